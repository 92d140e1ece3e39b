"""Two calls that take turns: the order of what both do, what a thread of its own has, and errors of either."""

from __future__ import annotations

import contextvars
import threading
import time
import traceback

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.adapters.turns import Abandoned, Turns

LIMIT_S = 60
word = contextvars.ContextVar("word", default="of nobody")


def within(seconds, call):
    """What `call` returns, or raises, in a thread that must end: one that waits for ever fails the test."""
    found = []

    def body():
        try:
            found.append((call(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it waits for ever"
    (result, error), *_ = found
    if error is not None:
        raise error
    return result


class Two:
    """Two calls of so many steps; `did` has what was done, `begun` whose turn each step was in."""

    def __init__(self, steps=(4, 4), slow=0, fails=None):
        self.did, self.begun, self.slow, self.fails = [], [], slow, fails
        self.turns = Turns(self.begun.append)
        self.steps = steps

    def call(self, i):
        def run():
            for step in range(self.steps[i]):
                if i == self.slow:
                    time.sleep(0.01)  # whoever is slow, the order is the same
                assert self.begun[-1] == i
                if self.fails == (i, step):
                    raise ValueError(f"of call {i}, step {step}")
                self.did.append((i, step))
                self.turns.hand_over(i)
            return f"of call {i}"

        return run

    def run(self):
        return within(LIMIT_S, lambda: self.turns.run(self.call(0), self.call(1)))


@pytest.mark.parametrize("slow", [0, 1])
def test_strictly_in_turn_whoever_is_slow(slow):
    two = Two(slow=slow)
    assert two.run() == ["of call 0", "of call 1"]
    assert two.did == [(i, step) for step in range(4) for i in (0, 1)]


@pytest.mark.parametrize("steps", [(1, 4), (4, 1), (0, 3), (3, 0), (0, 0)])
def test_behind_the_end_of_one_the_other_runs_through(steps):
    two = Two(steps)
    assert two.run() == ["of call 0", "of call 1"]
    alternating = [(i, step) for step in range(4) for i in (0, 1) if step < steps[i]]
    assert two.did == alternating


@pytest.mark.parametrize("fails", [(0, 0), (0, 2), (1, 0), (1, 2), (0, 3), (1, 3)])
def test_an_error_ends_both_and_is_raised_as_it_was(fails):
    two = Two(fails=fails)
    with pytest.raises(ValueError, match=f"of call {fails[0]}, step {fails[1]}") as raised:
        two.run()
    assert "in run" in "".join(traceback.format_tb(raised.value.__traceback__)), "the place where it happened"
    done = [(i, step) for step in range(4) for i in (0, 1)]
    assert two.did == done[: done.index(fails)], "nothing is done behind it"
    assert raised.value.__cause__ is None and raised.value.__context__ is None


def test_no_handler_of_errors_keeps_a_call_alive_whose_other_one_has_failed():
    seen, turns = [], Turns(lambda i: None)

    def stubborn():
        for _ in range(3):
            try:
                turns.hand_over(0)
            except Exception:  # as code between us and the layers may
                seen.append("swallowed")
            finally:
                seen.append("cleaned up")

    def failing():
        turns.hand_over(1)
        raise ValueError("of the second")

    with pytest.raises(ValueError, match="of the second"):
        within(LIMIT_S, lambda: turns.run(stubborn, failing))
    assert seen == ["cleaned up"] * 2 and not issubclass(Abandoned, Exception)


class Interrupted:
    """The lock at which the first call waits for its turn, and where a signal's handler raises."""

    def acquire(self):
        time.sleep(0.02)
        raise KeyboardInterrupt

    def locked(self):
        return False


def test_an_interrupt_of_the_one_that_waits_ends_the_one_that_runs():
    turns, seen = Turns(lambda i: None), []
    turns._turn = (Interrupted(), turns._turn[1])

    def second():
        time.sleep(0.1)
        seen.append("ran on")
        turns.hand_over(1)
        seen.append("not here")

    with pytest.raises(KeyboardInterrupt):
        within(LIMIT_S, lambda: turns.run(lambda: turns.hand_over(0), second))
    assert seen == ["ran on"]


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_the_second_thread_has_what_the_first_has(inference, gradients):
    def seen():
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled(), word.get()

    def run():
        word.set("of this forward")
        turns = Turns(lambda i: None)
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            return seen(), turns.run(seen, seen)

    here, both = within(LIMIT_S, run)
    assert here[2] == "of this forward" and both == [here, here]


def test_the_second_thread_is_on_the_stream_and_card_of_the_first(monkeypatch):
    seen = []

    class Stream:
        device = "cuda:1"

    class On:
        def __init__(self, stream):
            seen.append((threading.current_thread(), stream))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    stream = Stream()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", On)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append((threading.current_thread(), device)))
    threads = within(LIMIT_S, lambda: Turns(lambda i: None).run(*[threading.current_thread] * 2))
    assert threads[0] is not threads[1]
    assert seen == [(threads[1], "cuda:1"), (threads[1], stream)]


def test_a_card_that_the_second_thread_does_not_get_is_an_error_of_the_call(monkeypatch):
    def refuse(device):
        raise RuntimeError("no such card")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"device": 7})())
    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    turns = Turns(lambda i: None)
    with pytest.raises(RuntimeError, match="no such card"):
        within(LIMIT_S, lambda: turns.run(lambda: turns.hand_over(0), lambda: None))

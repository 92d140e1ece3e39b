"""Two functions that take turns: their order, what they return and raise, and what the second one's thread has."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.adapters.turns import OtherFailed, Turns

VARIABLE = contextvars.ContextVar("of this test", default="nothing")


def steps(turns, number, count, seen, end=None):
    def run():
        for step in range(count):
            seen.append((number, step))
            turns.next(number)
        if end is not None:
            raise end
        return number, threading.current_thread()

    return run


@pytest.mark.parametrize("first, second", [(3, 3), (3, 5), (5, 3), (0, 2), (2, 0), (0, 0)])
def test_they_take_turns_until_one_is_over(first, second):
    turns, seen = Turns(), []
    (one, here), (other, there) = turns.run(steps(turns, 0, first, seen), steps(turns, 1, second, seen))
    both = [(number, step) for step in range(max(first, second)) for number in (0, 1)]
    assert seen == [(number, step) for number, step in both if step < (first, second)[number]]
    assert (one, other) == (0, 1) and here is threading.current_thread() is not there


@pytest.mark.parametrize("counts", [(2, 4), (4, 2), (0, 3), (3, 0)])
@pytest.mark.parametrize("failing", [0, 1])
def test_what_one_raises_ends_the_other_and_is_raised(counts, failing):
    turns, seen, ends = Turns(), [], [None, None]
    ends[failing] = ValueError("this one")
    left = []

    def watched(number):
        run = steps(turns, number, counts[number], seen, ends[number])

        def watch():
            try:
                return run()
            except OtherFailed as error:
                left.append((number, error.__cause__))
                raise

        return watch

    with pytest.raises(ValueError, match="this one"):
        turns.run(watched(0), watched(1))
    if counts[1 - failing] > counts[failing]:  # still under way
        began = failing == 1 or counts[0] > 0
        assert left == ([(1 - failing, ends[failing])] if began else [])
    assert Turns().run(lambda: 1, lambda: 2) == (1, 2), "the thread is there for the next ones"


def test_the_second_has_what_the_callers_thread_has():
    def asked():
        return VARIABLE.get(), torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    VARIABLE.set("something")
    for mode in (torch.inference_mode(), torch.no_grad(), torch.enable_grad()):
        with mode:
            found = Turns().run(asked, asked)
            assert found[0] == found[1] == asked()


def test_the_second_has_the_callers_device_and_stream(monkeypatch):
    """CUDA's are a thread's own, and its driver is called once before the function is."""
    seen = []
    stream = SimpleNamespace(device="the second card", query=lambda: seen.append("called"))

    def named(name):
        @contextlib.contextmanager
        def current(given):
            seen.append((name, given))
            yield
            seen.append(name)

        return current

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "device", named("device"))
    monkeypatch.setattr(torch.cuda, "stream", named("stream"))
    Turns().run(lambda: seen.append("first"), lambda: seen.append("second"))
    assert seen == ["first", ("device", stream.device), ("stream", stream), "called", "second", "stream", "device"]


def test_one_thread_is_kept_for_all_seconds_of_a_caller():
    """Each that is made anew would stay."""
    seconds = {Turns().run(lambda: None, threading.current_thread)[1] for _ in range(3)}
    assert [one.name for one in seconds] == ["deepseek_v4_sm120_turns_0"]


def test_what_the_second_sets_is_its_own():
    def sets():
        VARIABLE.set("of the second")
        torch.set_grad_enabled(False)

    VARIABLE.set("of the first")
    before = torch.is_grad_enabled()
    Turns().run(lambda: None, sets)
    assert VARIABLE.get() == "of the first" and torch.is_grad_enabled() is before


def test_threads_do_not_share_a_second():
    """As ranks of a test do: each caller's second has a thread of its own."""
    met = threading.Barrier(2, timeout=20)
    found = []

    def caller():
        found.append(Turns().run(lambda: None, met.wait)[1])

    threads = [threading.Thread(target=caller) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("counts", [(2, 4), (4, 2), (0, 0)])
def test_nothing_of_a_failed_run_is_kept(counts, failing):
    """An error has the frames of what raised it, and those the tensors of a pass."""
    gc.collect(1)  # what is made from here on is young, and all that is older is not looked through
    turns, holding = Turns(), [Held()]
    alive = weakref.ref(holding[0])

    def fails():
        mine = holding.pop()
        raise ValueError(mine is None)

    ends = [steps(turns, number, counts[number], []) for number in (0, 1)]
    ends[failing] = fails
    with pytest.raises(ValueError):
        turns.run(*ends)
    assert turns._error is None
    gc.collect(1)
    assert alive() is None


class Held:
    """What a frame holds."""

"""A right server is not failed for what it does by itself: another rounding from run to run, a flag that it lacks, a
few wrong sums. No verdict is none against it; and what is wrong besides still fails."""

from __future__ import annotations

import itertools
import random

import pytest

from bench.quality import cancelled_requests, gates
from tests.quality.test_gates import PACE, run  # noqa: F401

EQUAL = ("batch-invariance", "long-chats", "speculation-equality")
WIDE = 0.3  # of log-probabilities: more than a tie


def wavers(server, is_other, gap=WIDE):
    """Where its two best are as likely, the second is likelier by `gap` in the requests of which `is_other`() is."""
    steps, candidates = server.engine.steps, server.engine.candidates

    def flipped(state):
        best = candidates(state)
        if abs(best[0][0] - best[1][0]) > 0.01 or not server.engine.other:
            return best
        return [(best[0][0], best[1][1]), (best[0][0] - gap, best[0][1]), *best[2:]]

    def flipping(*asked, **options):
        yield from _each(steps(*asked, **options), server.engine, is_other())

    server.engine.other, server.engine.candidates, server.engine.steps = False, flipped, flipping
    return server


def _each(steps, engine, other):
    """One request uses the engine at a time, for a token."""
    while True:
        engine.other = other
        try:
            step = next(steps)
        except StopIteration:
            return
        yield step


def every_other():
    count = itertools.count()
    return lambda: next(count) % 2


@pytest.mark.parametrize("gate", EQUAL)
def test_a_server_that_is_another_one_each_time_gets_no_verdict(gate, run, serve):  # noqa: F811
    accept_length = 2 if gate == "speculation-equality" else 1
    server = wavers(serve(**PACE, accept_length=accept_length), every_other())
    plain = wavers(serve(**PACE), every_other())
    code, found = run(gate, server, *(["--without", plain.url] if gate == "speculation-equality" else []))
    assert (code, found["verdict"]) == (gates.INCOMPLETE, "INCOMPLETE"), found
    if gate == "batch-invariance":
        assert run(gate, server, "--strict")[0] == gates.FAILED


def test_speculation_that_is_wider_off_than_the_batch_alone_fails(run, serve):  # noqa: F811
    plain = wavers(serve(**PACE), every_other(), gap=0.2)
    server = serve("spec_corrupt", **PACE, accept_length=2)
    code, found = run("speculation-equality", server, "--without", plain.url)
    assert code == gates.FAILED and found["figures"]["widest_gap_without_speculation"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("stays", "noise", "code"), [(1, 0.0, gates.PASSED), (99, 0.0, gates.FAILED), (99, 1e-9, gates.PASSED)]
)
def test_a_tie_after_a_storm_is_its_own_only_where_it_stays(stays, noise, code, run, serve, monkeypatch):  # noqa: F811
    """A server may waver so seldom that two answers before the storm are the same; where it always does, and their
    log-probabilities are not, a tie is none of the storm's."""
    server, asks, after, count = serve(**PACE), [], [], itertools.count()
    ask, candidates = cancelled_requests.Answers.ask, server.engine.candidates
    monkeypatch.setattr(cancelled_requests.Answers, "ask", lambda self, when: asks.append(when) or ask(self, when))
    server.engine.candidates = lambda state: [(one - next(count) * noise, token) for one, token in candidates(state)]

    def is_other():
        after.extend(asks[2:3])  # one more request
        return 0 < len(after) <= stays

    wavers(server, is_other, gap=0.1)
    assert run("cancelled-requests", server, "--num-prompts", "1", "--new", "48")[0] == code


@pytest.mark.parametrize(("of_ties", "code"), [(True, gates.INCOMPLETE), (False, gates.FAILED)])
def test_the_oracle_tells_rounding_from_what_is_wrong_at_random(of_ties, code, run, serve):  # noqa: F811
    """Either is another one than itself as often as than the reference: of two tokens that are as likely, or of any."""
    server, draw = serve(), random.Random(1)
    candidates = server.engine.candidates

    def other(state):
        best = candidates(state)
        is_other = best[0][0] == best[1][0] if of_ties else draw.random() < 0.3
        ids = [token for _, token in best]
        ids[:2] = reversed(ids[:2]) if is_other and draw.random() < 0.5 else ids[:2]
        return [(logprob, token) for (logprob, _), token in zip(best, ids, strict=True)]

    server.engine.candidates = other
    asked = ("--lengths", "16", "--new", "120")
    given, found = run("logit-oracle", server, "--reference", serve().url, *asked)
    assert given == code and ("against itself" in found["incomplete"]) == of_ties, found


@pytest.mark.parametrize("wrong", [6, 7, 20])
def test_a_few_wrong_sums_say_nothing_and_many_do(wrong, run, serve):  # noqa: F811
    server = serve()
    for question in list(server.engine.script)[-wrong:]:
        server.engine.script[question] += 1
    code, found = run("arithmetic", server)
    assert code == (gates.FAILED if wrong == 20 else gates.INCOMPLETE), found
    assert wrong == 20 or "ask more" in found["incomplete"]


@pytest.mark.parametrize("lacks", ["tool_call_parser", "reasoning_parser"])
def test_a_server_without_a_parser_is_told_which(lacks, run, serve):  # noqa: F811
    server = serve("markup_leak", flags={lacks: None})
    code, found = run("tool-calls", server)
    assert code == gates.INCOMPLETE and f"--{lacks.replace('_', '-')} deepseek" in found["incomplete"]
    has = {"tool_call_parser": "deepseekv4", "reasoning_parser": "deepseek-v4"}
    assert run("tool-calls", serve("markup_leak", flags=has))[0] == gates.FAILED
    assert run("tool-calls", serve(flags=has))[0] == gates.PASSED
    assert run("tool-calls", serve("no_server_info"))[0] == gates.PASSED

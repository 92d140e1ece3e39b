"""Wrong compressors must not pass the self-test's check and calibrate's error: the reference with a part that is wrong.
On the CPU."""

from __future__ import annotations

import functools
import types

import pytest
import torch

from deepseek_v4_sm120.reference import compressor as reference
from deepseek_v4_sm120.specs import compressor as spec
from deepseek_v4_sm120.specs.check import Failure
from deepseek_v4_sm120.specs.provider import OURS


def without_token(number: int):
    def pool(right, own, before, overlaps, ape):
        own = own.clone()
        own[:, number, own.shape[2] // 2 :] = -1e30
        return right(own, before, overlaps, ape)

    return {"pool": pool}


def turned(positions: float, conjugate: bool = False):
    def finish(right, pooled, weight, eps, freqs_cis):
        angles = positions * 10000.0 ** (-torch.arange(32) / 32)
        freqs_cis = freqs_cis.conj() if conjugate else freqs_cis
        return right(pooled, weight, eps, freqs_cis * torch.polar(torch.ones(32), angles).to(freqs_cis.dtype))

    return {"finish": finish}


def stored(change):
    def store(right, cache, page_size, slots, entries, fp4):
        entries = entries.clone()
        change(entries)
        right(cache, page_size, slots, entries, fp4)

    return {"store": store}


def beside(right, cache, page_size, slots, entries, fp4):
    """Also writes to the slot behind an entry's."""
    right(cache, page_size, (slots + 1) % (cache.shape[0] * page_size), entries, fp4)
    right(cache, page_size, slots, entries, fp4)


def scaled(right, pooled, weight, eps, freqs_cis):
    return 1.05 * right(pooled, weight, eps, freqs_cis)


def biased(change):
    return {"pool": lambda right, own, before, overlaps, ape: right(own, before, overlaps, change(ape))}


def _pages_change(right, own, before, overlaps, ape):
    return right(own.roll(1, 0), before, overlaps, ape)


FAULTS = {
    "the last token of a group": without_token(-1),
    "the first token of a group": without_token(0),
    "the position beside": turned(1),
    "the other way round": turned(0, conjugate=True),
    "no position bias": biased(torch.zeros_like),
    "the position bias of the token before": biased(lambda ape: ape.roll(1, 0)),
    "another request's group": {"pool": _pages_change},
    "8 numbers of the last entry": stored(lambda entries: entries[-1, -8:].zero_()),
    "all entries 5% too great": {"finish": scaled},
    "the entry behind is written": {"store": beside},
}


def compressor(parts: dict, kv_score, **given):
    """The reference with other parts."""
    right = {name: getattr(reference, name) for name in parts}
    for name, part in parts.items():
        setattr(reference, name, functools.partial(part, right[name]))
    try:
        return reference.compressor(kv_score, **given)
    finally:
        for name, part in right.items():
            setattr(reference, name, part)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(spec, "make_inputs", functools.partial(spec.make_inputs, device="cpu"))


def asked(kind: str, parts: dict, monkeypatch) -> str | None:
    """What the self-test says, None where it passes."""
    monkeypatch.setattr(spec, "op", types.SimpleNamespace(compressor=functools.partial(compressor, parts)))
    try:
        spec._check_kind(kind)
    except Failure as failure:
        return str(failure)
    return None


@pytest.mark.parametrize("kind", spec.KINDS)
def test_the_self_test_sees_what_is_wrong(kind, monkeypatch):
    assert asked(kind, {}, monkeypatch) is None
    faults = dict(list(FAULTS.items())[::3]) if kind == "c128" else FAULTS  # whose state is large
    assert [name for name, parts in faults.items() if asked(kind, parts, monkeypatch) is None] == []


def calibrates(case: spec.Case, parts: dict) -> float:
    """The error of such a compressor."""
    calls = spec.correctness_inputs(case, "cpu")
    for call in calls:
        compressor(parts, **call.inputs.arguments())
    return max(spec.error(OURS, call, call) for call in calls)


@pytest.mark.parametrize("kind", spec.LAYERS)
def test_calibrate_sees_what_is_wrong(kind):
    case = spec.Case(kind, 8, True)
    allowed = spec.max_error(OURS, case)
    assert calibrates(case, {}) <= allowed
    unseen = {name for name, parts in FAULTS.items() if calibrates(case, parts) <= allowed}
    # what is no entry's the self-test looks at; with one entry there is no other request's
    assert unseen <= {"the entry behind is written", "another request's group"}


@pytest.mark.parametrize("kind", ["c4", "c128"])
def test_a_number_that_is_wrong_does_not_hide_in_the_caches_rounding(kind, monkeypatch):
    def change(entries):
        entries[-1, entries[-1].abs().argmax()] *= 0.7

    assert "reference's rounding" in asked(kind, stored(change), monkeypatch)


@pytest.mark.parametrize("kind", ["c4", "c128"])
def test_a_quarter_of_an_entry_that_is_6_percent_too_small_does_not_hide_from_calibrate(kind):
    case = spec.Case(kind, 8, True)
    assert calibrates(case, stored(lambda entries: entries[-1, :128].mul_(0.94))) > spec.max_error(OURS, case)

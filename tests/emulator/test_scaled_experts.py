"""The experts for many rows with MXFP8 activations, by SM120's block-scaled product of E2M1 and E4M3, which no card of
another architecture has, against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from deepseek_v4_sm120.ops import mxfp4_moe
from deepseek_v4_sm120.reference import mxfp4_moe as reference
from deepseek_v4_sm120.reference.accuracy import relative_error, strict_error
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs import mxfp4_moe as spec
from tests.emulator.emulated import emulated, ran

SCHEDULES = {
    "short turns": {"seed": 1, "most_instructions": 12, "multiprocessors": 3},
    "long turns": {"seed": 2, "most_instructions": 800, "multiprocessors": 8},
}
schedules = pytest.mark.parametrize("choices", SCHEDULES.values(), ids=list(SCHEDULES))


@pytest.fixture(autouse=True)
def many_rows(monkeypatch):
    monkeypatch.setattr(mxfp4_moe, "DECODE_ROWS", 0)


def experts(inputs, choices):
    with emulated(**choices):
        found = mxfp4_moe.mxfp4_moe(**inputs.arguments(), activations="mxfp8")
    assert ran("scaled_kernel")
    return found


def right(inputs):
    return reference.mxfp4_moe(**inputs.arguments(), activations="mxfp8")


@schedules
@pytest.mark.parametrize("up_first", [False, True])
def test_against_the_reference(choices, up_first):
    """Half a slice of scales and a whole one; tiles of several heights, two of an expert among them."""
    shape = spec.Shape(120, 512, 512 if up_first else 256, experts=3, masked=0.1, topk=2, up_first=up_first)
    inputs = spec.make_inputs(shape, seed=3, device="cpu")
    inputs.topk_ids[:70, 0] = 2
    assert strict_error(experts(inputs, choices), right(inputs)) < bounds.MXFP4_MOE_MXFP8_ROUNDED


def test_what_the_rounding_costs():
    """Far looser than what it is held to: the truth is of activations as they are."""
    inputs = spec.make_inputs(spec.Shape(40, 256, 256, experts=3, masked=0.1, topk=2), seed=5, device="cpu")
    found = experts(inputs, SCHEDULES["long turns"])
    assert 0.01 < relative_error(found, reference.mxfp4_moe(**inputs.arguments())) < 0.06


@pytest.mark.parametrize("activations", ["bf16", "mxfp8"])
@pytest.mark.parametrize(
    ("hidden", "inter", "experts", "words"),
    [
        (256, 128, 3, r"w13.shape\[1\] / 2 must not be 128 more than a multiple of 512, got 128"),
        (256, 640, 3, r"w13.shape\[1\] / 2 must not be 128 more than a multiple of 512, got 640"),
        (256, 320, 3, r"w13.shape\[1\] / 2 must be a positive multiple of 128, got 320"),
        (384, 256, 3, r"hidden.shape\[1\] must be a positive multiple of 256, got 384"),
        (32, 32, 1025, "w13 must have at most 1024 experts, got 1025"),
    ],
)
def test_a_size_that_many_rows_do_not_take_is_refused(hidden, inter, experts, words, activations):
    inputs = spec.make_inputs(spec.Shape(4, hidden, inter, experts, topk=2), device="cpu")
    with emulated(**SCHEDULES["long turns"]), pytest.raises(ValueError, match=f"^mxfp4_moe: {words}"):
        mxfp4_moe.mxfp4_moe(**inputs.arguments(), activations=activations)


@pytest.mark.parametrize("activations", ["bf16", "mxfp8"])
def test_rows_behind_the_real_ones_change_no_bit(activations):
    """Of a pass that is padded to a graph's rows: ids of no expert, and rows that are no numbers, at experts that real
    rows are at; and a row alone, which is in another tile."""
    real, inputs = 23, spec.make_inputs(spec.Shape(40, 512, 256, experts=3, topk=2), seed=9, device="cpu")
    given, found = inputs.arguments(), []
    wild = {name: given[name].clone() for name in ("hidden", "topk_ids", "topk_weights")}
    wild["hidden"][real:, 0::3], wild["hidden"][real:, 1::3] = math.nan, math.inf
    wild["topk_ids"][real:] = torch.tensor([-1, 2**31 - 1, -(2**31), 7, 0]).repeat(7)[: 2 * (40 - real)].view(-1, 2)
    wild["topk_weights"][real:] = math.nan
    alone = {name: given[name][11:12] for name in wild}
    for changed in ({}, wild, alone):
        with emulated(seed=9, most_instructions=800, multiprocessors=5):
            found.append(mxfp4_moe.mxfp4_moe(**given | changed, activations=activations))
    assert ran("scaled_kernel" if activations == "mxfp8" else "wide_kernel")
    assert torch.equal(found[0][:real], found[1][:real]) and torch.equal(found[0][11:12], found[2])
    assert bool(found[0].isfinite().all())


def test_what_is_not_local_adds_nothing_and_is_not_read():
    """Ids of no expert here, an expert with one pair and one with none; rows that nobody reads are NaN."""
    inputs = spec.make_inputs(spec.Shape(40, 256, 256, experts=4, topk=2), seed=7, device="cpu")
    ids = inputs.topk_ids
    ids.clamp_(max=1)
    ids[3, 1] = 3  # the only pair of the last expert; the one before has none
    ids[5:20, 0] = -1
    ids[8:30, 1] = torch.tensor([4, 2**31 - 1, -(2**31), -7, 5000] * 5)[:22].int()
    alone = reference.local_experts(ids, 4).amax(1) < 0
    assert 5 < int(alone.sum()) < 35
    inputs.hidden[alone] = math.nan
    for weights in (inputs.w13, inputs.w13_scale, inputs.w2, inputs.w2_scale):
        weights[2] = 0xFF
    found = experts(inputs, SCHEDULES["short turns"])
    assert not found[alone].any()
    inputs.hidden[alone] = 0
    assert strict_error(found, right(inputs)) < bounds.MXFP4_MOE_MXFP8_ROUNDED


def test_no_pairs_at_all():
    inputs = spec.make_inputs(spec.Shape(9, 256, 256, experts=2, masked=1.0, topk=2), seed=1, device="cpu")
    assert not experts(inputs, SCHEDULES["long turns"]).any()


@pytest.mark.parametrize("mapped", [False, True])
def test_ids_of_other_ranks(mapped):
    shape = spec.Shape(50, 256, 256, experts=3, all_experts=9, first_expert=0 if mapped else 4, mapped=mapped, topk=3)
    inputs = spec.make_inputs(shape, seed=11, device="cpu")
    found = experts(inputs, SCHEDULES["long turns"])
    assert strict_error(found, right(inputs)) < bounds.MXFP4_MOE_MXFP8_ROUNDED


def test_all_scale_bytes():
    """0 is 2^-127, nothing beside the others; 255 is not a number, and what reads it is none."""
    inputs = spec.make_inputs(spec.Shape(24, 256, 256, experts=2, topk=1, wide_scales=True), seed=2, device="cpu")
    inputs.w13_scale[:, ::3, 1] = 0
    inputs.w2_scale[:, 1::2, 0] = 0
    found = experts(inputs, SCHEDULES["short turns"])
    assert strict_error(found, right(inputs)) < bounds.MXFP4_MOE_MXFP8_ROUNDED
    inputs.w2_scale[1, 5, 3] = 255
    spoilt = experts(inputs, SCHEDULES["short turns"])
    rows = inputs.topk_ids[:, 0] == 1
    assert rows.any() and not rows.all()
    assert not spoilt[rows, 5].isfinite().any()
    spoilt[rows, 5] = found[rows, 5]
    assert torch.equal(spoilt, found)
    inputs.w13_scale[0, 7, 0] = 255
    spoilt = experts(inputs, SCHEDULES["short turns"])
    assert not spoilt[~rows].isfinite().any()


def test_rows_that_are_no_numbers_and_rows_of_zeros():
    inputs = spec.make_inputs(spec.Shape(24, 256, 256, experts=2, topk=2), seed=4, device="cpu")
    clean = experts(inputs, SCHEDULES["long turns"])
    inputs.hidden[3, 17] = math.nan
    inputs.hidden[9] = 0
    found = experts(inputs, SCHEDULES["long turns"])
    assert found[3].isnan().all() and not found[9].any()
    others = [i for i in range(24) if i not in (3, 9)]
    assert torch.equal(found[others], clean[others])


def test_one_schedule_is_as_good_as_another():
    inputs = spec.make_inputs(spec.Shape(150, 256, 256, experts=2, topk=2), seed=6, device="cpu")
    assert torch.equal(*(experts(inputs, choices) for choices in SCHEDULES.values()))

"""The reference against a second formulation and against cases that one can work out on paper. CPU only."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.reference.mxfp4_moe import (
    decode_e2m1,
    decode_ue8m0,
    dequantize,
    dequantize_float32,
    local_experts,
    mxfp4_moe,
    mxfp4_moe_by_bits,
    quantize_mxfp8,
    swiglu,
)
from deepseek_v4_sm120.specs.mxfp4_moe import Shape, make_inputs

SMALL = Shape(3, hidden=128, inter=64, experts=8)
SHAPES = {
    "plain": SMALL,
    "holes": dataclasses.replace(SMALL, rows=5, masked=0.4),
    "one expert": dataclasses.replace(SMALL, ids="one"),
    "edges": dataclasses.replace(SMALL, rows=4, ids="edges"),
    "repeated": dataclasses.replace(SMALL, ids="few"),
    "second rank": dataclasses.replace(SMALL, first_expert=8, all_experts=16),
    "map": dataclasses.replace(SMALL, mapped=True, all_experts=16),
    "up first, scaled": dataclasses.replace(SMALL, up_first=True, routed_scaling=1.5),
    "no limit": dataclasses.replace(SMALL, swiglu_limit=None),
    "wide scales": dataclasses.replace(SMALL, wide_scales=True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_two_formulations_agree(name):
    inputs = make_inputs(SHAPES[name], seed=3, device="cpu")
    out = mxfp4_moe(**inputs.arguments())
    assert float(out.abs().max()) > 0
    assert relative_error(mxfp4_moe_by_bits(**inputs.arguments()), out) < 1e-12


def test_all_codes_low_nibble_first():
    packed = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert decode_e2m1(packed).tolist() == magnitudes + [-m for m in magnitudes]


def test_scale_bytes():
    found = decode_ue8m0(torch.tensor([0, 126, 127, 130, 254, 255], dtype=torch.uint8)).tolist()
    assert found[:5] == [2.0**-127, 0.5, 1.0, 8.0, 2.0**127] and math.isnan(found[5])


def test_a_scale_covers_32_inputs():
    packed = torch.full((1, 32), 0x22, dtype=torch.uint8)  # ones
    values = dequantize(packed, torch.tensor([[128, 126]], dtype=torch.uint8))
    assert values.tolist() == [[2.0] * 32 + [0.5] * 32]


@pytest.mark.parametrize("gate, up, expected", [(20, 20, (10, 10)), (-20, -20, (-20, -10)), (3, -4, (3, -4))])
def test_the_gate_is_clamped_from_above_only(gate, up, expected):
    g, u = expected
    found = swiglu(torch.tensor(float(gate)).double(), torch.tensor(float(up)).double(), 10.0)
    assert float(found) == pytest.approx(g / (1 + math.exp(-g)) * u, rel=1e-12)


def test_unread_experts_are_nan_and_do_not_matter():
    inputs = make_inputs(dataclasses.replace(SMALL, rows=1, masked=0.5), seed=1, device="cpu")
    assert bool((inputs.w13_scale == 255).flatten(1).all(1).any())
    assert bool(torch.isfinite(mxfp4_moe(**inputs.arguments())).all())


def test_rows_without_an_expert_are_zero():
    inputs = make_inputs(dataclasses.replace(SMALL, masked=1.0), device="cpu")
    assert bool((inputs.topk_ids == -1).all())
    assert not mxfp4_moe(**inputs.arguments()).any()


def test_scaling_is_applied_once():
    inputs = make_inputs(SMALL, device="cpu").arguments()
    once = mxfp4_moe(**{**inputs, "routed_scaling": 1.5})
    assert relative_error(once, 1.5 * mxfp4_moe(**inputs)) < 1e-15


def test_foreign_ids():
    ids = torch.tensor([[-1, 7, 8, 15, 16, 2**31 - 1, -(2**31)]], dtype=torch.int32)
    assert local_experts(ids, 8, first_expert=8).tolist() == [[-1, -1, 0, 7, -1, -1, -1]]
    table = torch.tensor([3, -1, 0, 9])
    ids = torch.tensor([[0, 1, 2, 3, 4, -1]], dtype=torch.int32)
    assert local_experts(ids, 4, expert_map=table).tolist() == [[3, -1, 0, -1, -1, -1]]


def test_ranks_of_expert_parallelism_add_up():
    whole = make_inputs(dataclasses.replace(SMALL, experts=16), seed=5, device="cpu")
    out = mxfp4_moe(**whole.arguments())
    parts = 0
    for first in (0, 8):
        names = ("w13", "w13_scale", "w2", "w2_scale")
        local = {name: getattr(whole, name)[first : first + 8] for name in names}
        parts = parts + mxfp4_moe(**{**whole.arguments(), **local, "first_expert": first})
    assert relative_error(parts, out) < 1e-12


def test_mxfp8_scale_is_rounded_up():
    values = torch.zeros(64, dtype=torch.float64)
    values[0], values[1], values[32] = 449.0, 1.0, 448.0  # just above 448: scale 2; 448 itself: scale 1
    kept = quantize_mxfp8(values)
    assert kept[0] == 448.0 and kept[1] == 1.0 and kept[32] == 448.0 and not kept[33:].any()


def test_mxfp8_activations_cost_about_a_fortieth():
    inputs = make_inputs(dataclasses.replace(SMALL, rows=8), device="cpu").arguments()
    error = relative_error(mxfp4_moe(**inputs, activations="mxfp8"), mxfp4_moe(**inputs))
    assert 0.01 < error < 0.06


def test_float32_has_the_same_weights():
    """Each pair of codes with each scale that is no extreme one, and the one that is no number."""
    packed = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(250, 16, 16).reshape(250, 256)
    scale = torch.tensor([*range(3, 252), 255], dtype=torch.uint8)[:, None].expand(250, 16)
    found = dequantize_float32(packed, scale)
    assert found.dtype == torch.float32
    assert torch.equal(found[:-1].double(), dequantize(packed, scale)[:-1]) and found[-1].isnan().all()

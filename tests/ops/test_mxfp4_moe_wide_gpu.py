"""mxfp4_moe for many rows in bf16 (csrc/mxfp4_moe/wide.cuh), by mma.sync on every card."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from deepseek_v4_sm120.ops.mxfp4_moe import mxfp4_moe
from deepseek_v4_sm120.reference.accuracy import relative_error, strict_error
from deepseek_v4_sm120.reference.mxfp4_moe import local_experts
from deepseek_v4_sm120.reference.mxfp4_moe import mxfp4_moe as reference
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs.mxfp4_moe import Shape, make_inputs

pytestmark = pytest.mark.gpu

BASE = Shape(600, inter=512, experts=32)
ROWS = (257, 1024, 8192)
ROUTED = {
    "one row": Shape(1, experts=8),
    "edges": Shape(700, experts=40, ids="edges"),
    "one expert": Shape(3000, experts=8, ids="one"),
    "holes, map": Shape(900, experts=32, mapped=True, all_experts=96, masked=0.4),
    "second rank": Shape(333, experts=31, first_expert=31, all_experts=93),
    "many chunks": Shape(30_000, experts=384),
    "as many experts as there may be": Shape(5000, experts=1024),
}
SHAPES = {
    **{f"{rows} rows": dataclasses.replace(BASE, rows=rows) for rows in (257, 300, 1000, 2049)},
    **{f"inter {n}": dataclasses.replace(BASE, inter=n) for n in (256, 384, 768, 896, 1024, 2048)},
    "other sizes": Shape(300, hidden=512, inter=256, experts=24),
    "Pro": Shape(400, hidden=7168, inter=384, experts=48, topk=8),
    "one expert": dataclasses.replace(BASE, ids="one"),
    "edges": dataclasses.replace(BASE, ids="edges"),
    "few experts": dataclasses.replace(BASE, ids="few"),
    "holes, map": dataclasses.replace(BASE, mapped=True, all_experts=96, masked=0.3),
    "second rank": dataclasses.replace(BASE, first_expert=32, all_experts=96, up_first=True),
    "no limit, scaled, topk 3": dataclasses.replace(BASE, swiglu_limit=None, routed_scaling=1.5, topk=3),
    "topk 8": dataclasses.replace(BASE, topk=8),
    "wide scales": dataclasses.replace(BASE, wide_scales=True),
    "past 2^31 bytes of w13, Pro": Shape(300, hidden=7168, inter=3072, experts=100),
    "y in parts": Shape(9000, inter=256, experts=16),
    # Flash and Pro on one, two, four and eight cards
    **{f"Flash, TP{tp}, {n} rows": Shape(n, inter=2048 // tp, experts=256) for tp in (1, 2, 4, 8) for n in ROWS},
    **{f"Pro, TP{tp}": Shape(1024, hidden=7168, inter=3072 // tp, experts=96) for tp in (1, 2, 4, 8)},
    # how pairs are sorted and cut
    **{f"sorted, {name}": dataclasses.replace(shape, hidden=256, inter=256) for name, shape in ROUTED.items()},
}


def wide(inputs) -> torch.Tensor:
    return mxfp4_moe(**inputs.arguments())


@pytest.mark.parametrize("name", SHAPES)
def test_against_the_reference(name, device):
    inputs = make_inputs(SHAPES[name], seed=11, device=device)
    out = wide(inputs)
    assert bool(torch.isfinite(out).all())
    error = (relative_error if inputs.shape.wide_scales else strict_error)(
        out, reference(**inputs.arguments())
    )  # few terms rule a block
    assert error < bounds.MXFP4_MOE.truth
    assert all(torch.equal(out, wide(inputs)) for _ in range(3)), "not the same again"


@pytest.mark.parametrize("byte", [34, 100, 127, 160])
def test_scales_far_from_one(byte, device):
    """Of gate and up; down's bring the result back."""
    inputs = make_inputs(dataclasses.replace(BASE, swiglu_limit=None), device=device)
    inputs.w13_scale[:] = byte
    inputs.hidden *= 2.0 ** ((120 - byte) / 2)
    out, truth = wide(inputs), reference(**inputs.arguments())
    if bool(torch.isfinite(truth.to(torch.bfloat16)).all()) and float(truth.abs().max()) > 1e-30:
        assert relative_error(out, truth) < bounds.MXFP4_MOE.truth


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("mapped", [False, True])
def test_ids_of_no_expert(mapped, rows, device):
    """Of no rank, of others' and beyond the map: nothing of them is read, and rows that have no others are zero."""
    shape = dataclasses.replace(BASE, rows=rows, first_expert=0 if mapped else 7, all_experts=96, mapped=mapped)
    inputs = make_inputs(shape, seed=rows, device=device)
    hostile = torch.tensor([-1, 96, 2**31 - 1, -(2**31), 10_000, -9], dtype=torch.int32, device=device)
    inputs.topk_ids[::5] = hostile
    inputs.topk_ids[1::5, 3:] = hostile[3:]
    local = local_experts(
        inputs.topk_ids, shape.experts, first_expert=inputs.first_expert, expert_map=inputs.expert_map
    )
    alone = local.amax(1) < 0
    inputs.hidden[alone] = math.nan
    inputs.topk_weights[local < 0] = math.nan
    found = wide(inputs)
    assert int(alone.sum()) >= rows // 5 and not found[alone].any() and bool(found[~alone].any())
    inputs.hidden[alone] = 0
    inputs.topk_weights[local < 0] = 0
    assert strict_error(found, reference(**inputs.arguments())) < bounds.MXFP4_MOE.truth


def test_no_expert_at_all(device):
    inputs = make_inputs(dataclasses.replace(BASE, masked=1.0), device=device)
    assert not wide(inputs).any()


def test_rows_with_strides_and_an_out(device):
    inputs = make_inputs(BASE, seed=2, device=device)
    expected = wide(inputs)
    rows, hidden = inputs.hidden.shape
    padded, out = (torch.zeros((rows, hidden + more), dtype=torch.bfloat16, device=device) for more in (8, 16))
    padded[:, :hidden] = inputs.hidden
    given = inputs.arguments() | {"hidden": padded[:, :hidden]}
    found = mxfp4_moe(**given, out=out[:, :hidden])
    assert torch.equal(found, expected) and not out[:, hidden:].any()


def test_a_captured_call_follows_its_inputs(device):
    inputs = make_inputs(dataclasses.replace(BASE, experts=8), seed=1, device=device)
    other = make_inputs(dataclasses.replace(BASE, experts=8), seed=2, device=device)
    wide(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = wide(inputs)
    for name in ("hidden", "topk_ids", "topk_weights"):
        getattr(inputs, name).copy_(getattr(other, name))
    graph.replay()
    assert torch.equal(out, wide(inputs))


def test_calls_on_two_streams(device):
    both = [make_inputs(dataclasses.replace(BASE, rows=rows), seed=rows, device=device) for rows in (600, 900)]
    alone, streams, found = [wide(inputs) for inputs in both], [torch.cuda.Stream() for _ in both], [[], []]
    torch.cuda.synchronize()
    for _ in range(4):
        for inputs, stream, outs in zip(both, streams, found, strict=True):
            with torch.cuda.stream(stream):
                outs.append(wide(inputs))
    torch.cuda.synchronize()
    for expected, outs in zip(alone, found, strict=True):
        assert all(torch.equal(out, expected) for out in outs)

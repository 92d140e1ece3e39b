"""The experts for many rows with MXFP8 activations by our own kernels: SM120's block-scaled instruction, on other cards
bf16 products of the same values."""

from __future__ import annotations

import math

import pytest
import torch

from deepseek_v4_sm120.ops import mxfp4_moe as op
from deepseek_v4_sm120.reference.accuracy import relative_error, strict_error
from deepseek_v4_sm120.reference.mxfp4_moe import local_experts, mxfp4_moe
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs.mxfp4_moe import Shape, make_inputs

pytestmark = pytest.mark.gpu

SHAPES = {
    "TP2": Shape(257, inter=1024, experts=64),
    "TP1, all experts": Shape(600, experts=256),
    "runs of pairs": Shape(1000, inter=512, experts=64, ids="edges", masked=0.2),
    "one expert": Shape(300, inter=256, experts=8, ids="one", first_expert=100, all_experts=256),
    "few experts": Shape(700, inter=256, experts=8, ids="few", masked=0.5, swiglu_limit=None, routed_scaling=2.5),
    "Pro, mapped": Shape(700, hidden=7168, inter=384, experts=32, all_experts=256, mapped=True, up_first=True),
    "slices and a half": Shape(400, hidden=768, inter=896, experts=16, wide_scales=True),
}


def ours(inputs):
    return op.mxfp4_moe(**inputs.arguments(), activations="mxfp8")


@pytest.mark.parametrize("name", SHAPES)
def test_against_the_reference(name):
    inputs = make_inputs(SHAPES[name], seed=len(name))
    found = ours(inputs)
    right = mxfp4_moe(**inputs.arguments(), activations="mxfp8")
    measure = relative_error if inputs.shape.wide_scales else strict_error  # there few terms rule a block
    assert measure(found, right) < bounds.MXFP4_MOE_MXFP8_ROUNDED
    assert measure(found, mxfp4_moe(**inputs.arguments())) < bounds.MXFP4_MOE_MXFP8.truth
    assert all(torch.equal(found, ours(inputs)) for _ in range(5))


def test_rows_that_nobody_reads():
    inputs = make_inputs(Shape(500, inter=256, experts=16, masked=0.7), seed=3)
    inputs.topk_ids[::5] = torch.tensor([-1, 16, 2**31 - 1, -(2**31), 77, -9], dtype=torch.int32, device="cuda")
    alone = local_experts(inputs.topk_ids, 16).amax(1) < 0
    inputs.hidden[alone] = math.nan
    found = ours(inputs)
    assert not found[alone].any()
    inputs.hidden[alone] = 0
    assert strict_error(found, mxfp4_moe(**inputs.arguments(), activations="mxfp8")) < bounds.MXFP4_MOE_MXFP8_ROUNDED


def test_no_pairs_at_all():
    assert not ours(make_inputs(Shape(300, inter=256, experts=8, masked=1.0), seed=1)).any()


def test_scales_that_are_no_numbers_and_none():
    inputs = make_inputs(Shape(300, hidden=512, inter=256, experts=8), seed=5)
    inputs.w13_scale[:, ::3, 1] = 0
    found = ours(inputs)
    assert strict_error(found, mxfp4_moe(**inputs.arguments(), activations="mxfp8")) < bounds.MXFP4_MOE_MXFP8_ROUNDED
    inputs.w2_scale[1, 5, 3] = 255
    reads = (inputs.topk_ids == 1).any(dim=1)
    spoilt = ours(inputs)
    assert not spoilt[reads, 5].isfinite().any()
    spoilt[reads, 5] = found[reads, 5]
    assert torch.equal(spoilt, found)


def test_in_a_graph():
    inputs = make_inputs(Shape(400, inter=512, experts=32), seed=2)
    found, out = ours(inputs), torch.empty_like(inputs.hidden)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.mxfp4_moe(**inputs.arguments(), activations="mxfp8", out=out)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, found)

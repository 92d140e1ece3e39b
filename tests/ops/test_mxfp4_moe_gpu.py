"""ops.mxfp4_moe on the GPU against the reference: shapes of Flash and Pro, hostile routing, bits, graphs, streams."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from deepseek_v4_sm120.ops import mxfp4_moe as op
from deepseek_v4_sm120.ops.mxfp4_moe import DECODE_ROWS, mxfp4_moe
from deepseek_v4_sm120.reference.accuracy import relative_error, strict_error
from deepseek_v4_sm120.reference.mxfp4_moe import mxfp4_moe as reference
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs.mxfp4_moe import Inputs, Shape, make_inputs, routed_ids, routed_weights

pytestmark = pytest.mark.gpu


BASE = Shape(8, inter=512, experts=32)
SHAPES = {
    **{f"{rows} rows": dataclasses.replace(BASE, rows=rows) for rows in (1, 2, 5, 6, 8, 9, 31, 33, 64, 65, 128, 256)},
    **{f"inter {n}": dataclasses.replace(BASE, rows=5, inter=n) for n in (256, 384, 768, 1024, 1536, 2048, 3072)},
    "inter 256, 40 rows": dataclasses.replace(BASE, rows=40, inter=256),
    "Pro, 3 rows": Shape(3, hidden=7168, inter=384, experts=24),
    "Pro, 50 rows": Shape(50, hidden=7168, inter=768, experts=24),
    "Pro, all experts": Shape(20, hidden=7168, inter=384, experts=384),
    "one expert, 1 row": dataclasses.replace(BASE, rows=1, ids="one"),
    "one expert, 5 rows": dataclasses.replace(BASE, rows=5, ids="one"),
    "one expert, 128 rows": dataclasses.replace(BASE, rows=128, ids="one"),
    "edges": dataclasses.replace(BASE, rows=60, ids="edges"),
    "few": dataclasses.replace(BASE, rows=4, ids="few"),
    "holes": dataclasses.replace(BASE, rows=30, masked=0.5),
    "holes, 1 row": dataclasses.replace(BASE, rows=1, masked=0.5),
    "topk 16, 1 row": dataclasses.replace(BASE, rows=1, topk=16),
    "topk 20, 1 row": dataclasses.replace(BASE, rows=1, topk=20),
    "Pro, 1 row": Shape(1, hidden=7168, inter=768, experts=24),
    "holes, 3 rows": dataclasses.replace(BASE, rows=3, masked=0.5),
    "second rank": dataclasses.replace(BASE, rows=20, first_expert=32, all_experts=96),
    "map": dataclasses.replace(BASE, rows=20, mapped=True, all_experts=96),
    "up first, scaled": dataclasses.replace(BASE, up_first=True, routed_scaling=1.5),
    "no limit": dataclasses.replace(BASE, swiglu_limit=None),
    "wide scales": dataclasses.replace(BASE, wide_scales=True),
    "topk 8": dataclasses.replace(BASE, rows=100, topk=8),
    "past 2^31 bytes": Shape(8, inter=2048, experts=256, first_expert=0),
    "one expert, 256 rows": dataclasses.replace(BASE, rows=256, ids="one"),
    "200 rows, edges": dataclasses.replace(BASE, rows=200, ids="edges"),
    "200 rows, holes, map": dataclasses.replace(BASE, rows=200, mapped=True, all_experts=96, masked=0.3),
    "200 rows, past 2^31 bytes": Shape(200, inter=2048, experts=256),
    "Pro, 256 rows, all experts": Shape(256, hidden=7168, inter=384, experts=384),
    "257 rows": dataclasses.replace(BASE, rows=257),
    "1000 rows": dataclasses.replace(BASE, rows=1000),
    "1000 rows, one expert": dataclasses.replace(BASE, rows=1000, ids="one"),
    "600 rows, edges": dataclasses.replace(BASE, rows=600, ids="edges"),
    "600 rows, holes, map": dataclasses.replace(BASE, rows=600, mapped=True, all_experts=96, masked=0.3),
    "600 rows, second rank": dataclasses.replace(BASE, rows=600, first_expert=32, all_experts=96, up_first=True),
    "600 rows, past 2^31 bytes": Shape(600, inter=2048, experts=256),
}


@pytest.mark.parametrize("name", SHAPES)
def test_against_the_reference(name, device):
    inputs = make_inputs(SHAPES[name], seed=11, device=device)
    out = mxfp4_moe(**inputs.arguments())
    truth = reference(**inputs.arguments())
    assert bool(torch.isfinite(out).all())
    assert float(truth.abs().max()) > 0
    measure = relative_error if inputs.shape.wide_scales else strict_error  # there few terms rule a block
    assert measure(out, truth) < bounds.MXFP4_MOE.truth
    assert torch.equal(out, mxfp4_moe(**inputs.arguments()))


@pytest.mark.parametrize("inter", [512, 2048])
def test_many_rows_repeat_themselves(inter, device):
    """What shows a race between copies and products."""
    inputs = make_inputs(Shape(2048, inter=inter, experts=64), seed=6, device=device)
    first = mxfp4_moe(**inputs.arguments())
    assert all(torch.equal(first, mxfp4_moe(**inputs.arguments())) for _ in range(6))


@pytest.mark.parametrize("rows", [1, 5, 30, 40, 200, 600])
def test_no_expert_at_all(rows, device):
    inputs = make_inputs(dataclasses.replace(BASE, rows=rows, masked=1.0), device=device)
    out = torch.full_like(inputs.hidden, float("nan"))
    assert mxfp4_moe(**inputs.arguments(), out=out) is out
    assert not out.any()


def test_no_rows(device):
    inputs = make_inputs(dataclasses.replace(BASE, rows=0), device=device)
    assert mxfp4_moe(**inputs.arguments()).shape == (0, 4096)


def rows_of(inputs: Inputs, chosen: list[int]) -> dict:
    names = ("hidden", "topk_ids", "topk_weights")
    return {**inputs.arguments(), **{name: getattr(inputs, name)[chosen] for name in names}}


@pytest.mark.parametrize("inter", [2048, 1024, 512, 256])
def test_a_row_alone_equals_the_row_among_others(inter, device):
    inputs = make_inputs(Shape(DECODE_ROWS, inter=inter, experts=16, masked=0.1), seed=4, device=device)
    together = mxfp4_moe(**inputs.arguments())
    for chosen in (
        [0],
        [77],
        [255],
        [3, 190],
        list(range(5)),
        list(range(60, 69)),
        list(range(40)),
        list(range(255, -1, -1)),
    ):
        assert torch.equal(mxfp4_moe(**rows_of(inputs, chosen)), together[chosen]), chosen


def test_strided_arguments(device):
    inputs = make_inputs(dataclasses.replace(BASE, rows=7), seed=2, device=device)
    expected = mxfp4_moe(**inputs.arguments())
    wide = torch.full((7, 5000), float("nan"), dtype=torch.bfloat16, device=device)
    wide[:, 8 : 8 + 4096] = inputs.hidden
    ids = torch.full((7, 9), 2, dtype=torch.int32, device=device)
    ids[:, 3:] = inputs.topk_ids
    weights = torch.full((7, 8), float("nan"), device=device)
    weights[:, :6] = inputs.topk_weights
    out = torch.full((7, 4096 + 64), 7.0, dtype=torch.bfloat16, device=device)
    strided = {"hidden": wide[:, 8 : 8 + 4096], "topk_ids": ids[:, 3:], "topk_weights": weights[:, :6]}
    mxfp4_moe(**{**inputs.arguments(), **strided}, out=out[:, :4096])
    assert torch.equal(out[:, :4096], expected)
    assert bool((out[:, 4096:] == 7.0).all())


@pytest.mark.parametrize("rows", [3, 24, 200, 600])
def test_a_captured_call_follows_its_inputs(rows, device):
    inputs = make_inputs(dataclasses.replace(BASE, rows=rows, experts=8), seed=1, device=device)
    fresh = dataclasses.replace(BASE, rows=rows, experts=8)
    mxfp4_moe(**inputs.arguments())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mxfp4_moe(**inputs.arguments())
    for seed in range(3):
        generator = torch.Generator(device).manual_seed(seed)
        inputs.hidden.copy_(torch.randn(inputs.hidden.shape, generator=generator, device=device))
        ids = routed_ids(dataclasses.replace(fresh, masked=0.2 * seed), generator)
        known = torch.isin(ids, inputs.topk_ids.unique())  # the others' weights are NaN
        inputs.topk_ids.copy_(torch.where(known, ids, -1))
        inputs.topk_weights.copy_(routed_weights(fresh, generator))
        graph.replay()
        assert torch.equal(out, mxfp4_moe(**inputs.arguments()))
        assert strict_error(out, reference(**inputs.arguments())) < bounds.MXFP4_MOE.truth


def test_calls_on_two_streams(device):
    both = [make_inputs(dataclasses.replace(BASE, rows=rows), seed=rows, device=device) for rows in (4, 60)]
    expected = [mxfp4_moe(**inputs.arguments()) for inputs in both]
    streams = [torch.cuda.Stream(device) for _ in both]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for inputs, stream in zip(both, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(mxfp4_moe(**inputs.arguments()))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected[i % 2]) for i, out in enumerate(found))


@pytest.mark.parametrize("rows", [1, 40])
def test_a_scale_of_nan_is_seen(rows, device):
    for name in ("w13_scale", "w2_scale"):
        inputs = make_inputs(dataclasses.replace(BASE, rows=rows), device=device)
        getattr(inputs, name)[int(inputs.topk_ids[0, 0]), ::7, 3] = 255
        assert not bool(torch.isfinite(mxfp4_moe(**inputs.arguments())[0]).all())


@pytest.mark.parametrize("byte", [1, 30, 200])
def test_scales_far_from_one(byte, device):
    inputs = make_inputs(dataclasses.replace(BASE, rows=1), device=device)
    inputs.w13_scale[:] = byte  # 200: gate and up at the limit; the others: h is zero in bf16
    out, truth = mxfp4_moe(**inputs.arguments()), reference(**inputs.arguments())
    assert bool(torch.isfinite(out).all())
    if byte == 200:
        assert relative_error(out, truth) < bounds.MXFP4_MOE.truth
    else:
        assert float(out.abs().max()) <= 1e-20
    inputs = make_inputs(dataclasses.replace(BASE, rows=1), device=device)
    inputs.w2_scale[:] = byte
    out, truth = mxfp4_moe(**inputs.arguments()), reference(**inputs.arguments())
    assert relative_error(out, truth) < bounds.MXFP4_MOE.truth


@pytest.mark.parametrize("factor", [2.0**-60, 2.0**-20, 2.0**20])
def test_rows_far_from_one(factor, device):
    """x is multiplied in f16, with a power of two for each row and slice."""
    inputs = make_inputs(dataclasses.replace(BASE, rows=3, swiglu_limit=None), device=device)
    inputs.hidden[0] *= factor
    inputs.hidden[1, ::512] *= 2.0**12
    out, truth = mxfp4_moe(**inputs.arguments()), reference(**inputs.arguments())
    for row in range(3):
        assert relative_error(out[row], truth[row]) < bounds.MXFP4_MOE.truth, row


@pytest.mark.sm120
@pytest.mark.parametrize("rows", [257, 1000])
def test_mxfp8_activations(rows, device):
    inputs = make_inputs(dataclasses.replace(BASE, rows=rows), seed=3, device=device)
    out = mxfp4_moe(**inputs.arguments(), activations="mxfp8")
    assert strict_error(out, reference(**inputs.arguments(), activations="mxfp8")) < bounds.MXFP4_MOE_MXFP8_ROUNDED
    assert strict_error(out, reference(**inputs.arguments())) < bounds.MXFP4_MOE_MXFP8.truth


@pytest.mark.parametrize("rows, hidden", [(1, 4096), (3, 7168), (256, 4096), (700, 256)])
@pytest.mark.parametrize("scaling", [1.0, 1.5, 2.5])
def test_the_shared_expert_is_added_as_torch_does(rows, hidden, scaling, device):
    generator = torch.Generator(device).manual_seed(rows)
    shared, routed = (torch.randn(rows, hidden + 8, generator=generator, device=device).bfloat16() for _ in range(2))
    shared[0, :6] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3e38])
    routed[0, :6] = torch.tensor([-torch.inf, 1.0, 1.0, -0.0, -0.0, 3e38])
    expected = shared[:, :hidden].clone().add_(routed[:, :hidden], alpha=scaling)
    beside = shared[:, hidden:].clone()
    returned = op.add_shared(shared[:, :hidden], routed[:, :hidden], scaling=scaling)
    assert returned.data_ptr() == shared.data_ptr() and torch.equal(shared[:, hidden:], beside)
    same = returned.view(torch.int16) == expected.view(torch.int16)
    assert bool((same | (returned.isnan() & expected.isnan())).all())


def test_the_sum_is_behind_both_streams(device):
    """In a graph whose second stream makes the shared output: a launch in front of either would add what was there."""
    inputs = make_inputs(dataclasses.replace(BASE, rows=1, experts=8), seed=1, device=device)
    other, x = torch.cuda.Stream(device), torch.zeros(1, 4096, dtype=torch.bfloat16, device=device)
    mxfp4_moe(**inputs.arguments())
    shared = torch.empty_like(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        here = torch.cuda.current_stream()
        for _ in range(20):
            other.wait_stream(here)
            routed = mxfp4_moe(**inputs.arguments())
            with torch.cuda.stream(other):
                shared.zero_()
                torch.add(x, 1.0, out=shared)
            here.wait_stream(other)
            x.copy_(op.add_shared(shared, routed))
    routed = mxfp4_moe(**inputs.arguments())
    for _ in range(50):
        x.zero_()
        graph.replay()
        expected = torch.zeros_like(x)
        for _ in range(20):
            expected = (expected + 1.0) + routed
        assert torch.equal(x, expected)

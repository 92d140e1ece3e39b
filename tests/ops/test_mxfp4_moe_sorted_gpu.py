"""mxfp4_moe for many rows with `reproducible` against the kernels for few rows, all bits; and these against the order
that is written down (mxfp4_moe_order.py)."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from deepseek_v4_sm120.ops import mxfp4_moe as op
from deepseek_v4_sm120.ops.mxfp4_moe import DECODE_ROWS, mxfp4_moe
from deepseek_v4_sm120.ops.shared import extension
from deepseek_v4_sm120.reference.accuracy import strict_error
from deepseek_v4_sm120.reference.mxfp4_moe import mxfp4_moe as reference
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs.mxfp4_moe import Inputs, Shape, make_inputs
from tests.ops.mxfp4_moe_order import product

pytestmark = pytest.mark.gpu

BY_ROW = ("hidden", "topk_ids", "topk_weights")


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of what is no NaN; NaNs in the same places."""
    nan = one.isnan()
    width = torch.int16 if one.element_size() == 2 else torch.int32
    return torch.equal(nan, other.isnan()) and torch.equal(one.view(width)[~nan], other.view(width)[~nan])


def few_at_a_time(given: dict) -> torch.Tensor:
    """The same rows by the kernels for few, as many at a time as these take."""
    together = min(DECODE_ROWS, 3072 // given["topk_ids"].shape[1])
    parts = []
    for first in range(0, len(given["hidden"]), together):
        cut = {name: given[name][first : first + together] for name in BY_ROW}
        parts.append(mxfp4_moe(**(given | cut), reproducible=True))
    return torch.cat(parts)


def sorted_rows(inputs: Inputs) -> torch.Tensor:
    given = inputs.arguments()
    assert len(inputs.hidden) > DECODE_ROWS, "fewer rows are few"
    return mxfp4_moe(**given, reproducible=True)


def check(inputs: Inputs) -> None:
    out = sorted_rows(inputs)
    assert same_bits(out, few_at_a_time(inputs.arguments()))
    assert same_bits(out, sorted_rows(inputs)), "not the same twice"


BASE = Shape(600, inter=512, experts=32)
SHAPES = {
    **{f"{rows} rows": dataclasses.replace(BASE, rows=rows) for rows in (257, 300, 511, 1000, 2049)},
    **{f"inter {n}": dataclasses.replace(BASE, inter=n) for n in (256, 384, 768, 1024, 1536, 2048, 3072)},
    "Pro": Shape(400, hidden=7168, inter=384, experts=48, topk=8),
    "Pro, inter 3072": Shape(300, hidden=7168, inter=3072, experts=8),
    "one expert": dataclasses.replace(BASE, ids="one"),
    "one expert, 3001 rows": dataclasses.replace(BASE, rows=3001, experts=8, ids="one"),
    "1 to 65 pairs": dataclasses.replace(BASE, rows=700, experts=40, ids="edges"),
    "fewer pairs than experts' tiles": dataclasses.replace(BASE, rows=260, experts=256),
    "the same expert twice in a row": dataclasses.replace(BASE, rows=500, ids="few"),
    "half without an expert": dataclasses.replace(BASE, rows=1500, masked=0.5),
    "nearly all without": dataclasses.replace(BASE, rows=1500, masked=0.98),
    "none at all": dataclasses.replace(BASE, masked=1.0),
    "map": dataclasses.replace(BASE, mapped=True, all_experts=96, masked=0.3),
    "second rank": dataclasses.replace(BASE, first_expert=32, all_experts=96),
    "up first, scaled": dataclasses.replace(BASE, up_first=True, routed_scaling=1.5),
    "no limit, wide scales": dataclasses.replace(BASE, swiglu_limit=None, wide_scales=True),
    "topk 1": dataclasses.replace(BASE, topk=1),
    "topk 20": dataclasses.replace(BASE, rows=400, topk=20),
    "64 experts of TP2": Shape(2048, inter=1024, experts=64),
    "64 experts of TP4": Shape(4096, inter=512, experts=64),
    "past 2^31 bytes of weights, TP1": Shape(1100, inter=2048, experts=256),
    "8,192 rows, TP2": Shape(8192, inter=1024, experts=256),
    "9,000 rows, y in parts": Shape(9000, inter=512, experts=256),
}


@pytest.mark.parametrize("name", SHAPES)
def test_all_bits_are_those_of_few_rows(name):
    check(make_inputs(SHAPES[name], seed=21))


@pytest.mark.parametrize("seed", range(6))
def test_random_shapes(seed):
    draw = torch.Generator().manual_seed(seed)

    def one_of(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=draw))]

    shape = Shape(
        rows=257 + int(torch.randint(1500, (1,), generator=draw)),
        inter=one_of(256, 512, 1024),
        experts=one_of(8, 31, 64, 200),
        ids=one_of("uniform", "edges", "few"),
        masked=one_of(0.0, 0.2),
        swiglu_limit=one_of(None, 10.0),
        topk=one_of(4, 6, 8),
    )
    check(make_inputs(shape, seed=seed))


def test_hostile_numbers():
    """Outliers, tiny beside huge, subnormal and infinite inputs, NaN, scale bytes of 0, 1, 254 and 255, codes all 6."""
    inputs = make_inputs(dataclasses.replace(BASE, experts=8, swiglu_limit=None), seed=22)
    x = inputs.hidden
    x[::7] = (x[::7].float() ** 5).bfloat16()
    x[1, ::512] *= 2.0**12
    x[2, 1::2] *= 2.0**-20
    x[3] *= 2.0**-126
    x[4] = 0
    x[5] = 255 * 2.0**7
    x[6] = -(2.0**-133)
    x[8, 100], x[9, 4000], x[10, 7] = math.inf, -math.inf, math.nan
    x[11] = 3e38
    bits = torch.randint(-(2**15), 2**15, (40, x.shape[1]), device=x.device).to(torch.int16)
    x[20:60] = torch.where((bits & 0x7F80) == 0x7F80, 0, bits).view(torch.bfloat16)
    for scale in (inputs.w13_scale, inputs.w2_scale):
        for expert, byte in enumerate((0, 1, 254, 255)):
            scale[expert, 5::97, 3] = byte
    inputs.w13[4], inputs.w2[4] = 0x77, 0xF7
    check(inputs)
    out = sorted_rows(inputs)
    assert bool(out.isnan().any()) and bool(out[100:].isfinite().any())


def test_against_the_reference():
    inputs = make_inputs(dataclasses.replace(BASE, rows=900), seed=23)
    assert strict_error(sorted_rows(inputs), reference(**inputs.arguments())) < bounds.MXFP4_MOE.truth


def test_rows_with_strides_and_an_out():
    inputs = make_inputs(BASE, seed=24)
    expected = sorted_rows(inputs)
    rows = BASE.rows
    wide = torch.full((rows, 5000), math.nan, dtype=torch.bfloat16, device="cuda")
    wide[:, 8 : 8 + 4096] = inputs.hidden
    ids = torch.full((rows, 9), 2, dtype=torch.int32, device="cuda")
    ids[:, 3:] = inputs.topk_ids
    weights = torch.full((rows, 8), math.nan, device="cuda")
    weights[:, :6] = inputs.topk_weights
    out = torch.full((rows, 4096 + 64), 7.0, dtype=torch.bfloat16, device="cuda")
    strided = {"hidden": wide[:, 8 : 8 + 4096], "topk_ids": ids[:, 3:], "topk_weights": weights[:, :6]}
    mxfp4_moe(**(inputs.arguments() | strided), reproducible=True, out=out[:, :4096])
    assert same_bits(out[:, :4096].contiguous(), expected)
    assert bool((out[:, 4096:] == 7.0).all())


def test_calls_on_two_streams():
    both = [make_inputs(dataclasses.replace(BASE, rows=rows), seed=rows) for rows in (300, 700)]
    expected = [sorted_rows(inputs) for inputs in both]
    streams = [torch.cuda.Stream() for _ in both]
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        for inputs, stream in zip(both, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(sorted_rows(inputs))
    torch.cuda.synchronize()
    assert all(same_bits(out, expected[i % 2]) for i, out in enumerate(found))


@pytest.mark.parametrize("inter", [2048, 384])
def test_few_rows_have_the_order_that_is_written_down(inter):
    """h where SiLU of the gate is the gate itself, and y, to the bit."""
    shape = Shape(24, inter=inter, experts=8, swiglu_limit=None)
    inputs = make_inputs(shape, seed=25)
    inputs.w13_scale += 5  # gates of some 100
    inputs.hidden[1] = (inputs.hidden[1].float() ** 5).bfloat16()
    inputs.hidden[2, ::2] *= 2.0**-20
    inputs.hidden[3:11] = 255 * 2.0**7  # with codes that are all 6, the greatest sums that there are
    inputs.w13[2] = 0x77
    pairs = shape.rows * shape.topk
    h = torch.empty((pairs, inter), dtype=torch.bfloat16, device="cuda")
    y = torch.empty((pairs, shape.hidden), device="cuda")
    weights = op.Weights(inputs.w13, inputs.w13_scale, inputs.w2, inputs.w2_scale, False)
    routing = op.Routing(inputs.topk_ids, inputs.topk_weights, 0, None, 1.0)
    given = op._arguments(inputs.hidden, weights, routing, math.inf, torch.empty_like(inputs.hidden))
    extension.load().mxfp4_moe(**given, h=h.data_ptr(), y=y.data_ptr(), exact=True)
    compared = 0
    for expert in range(shape.experts):
        here = (inputs.topk_ids.flatten() == expert).nonzero()[:, 0]
        x = inputs.hidden[here // shape.topk]
        some = torch.arange(0, inter, 7, device="cuda")
        gate, up = (
            product(x, inputs.w13[expert][part], inputs.w13_scale[expert][part]) for part in (some, inter + some)
        )
        is_gate = (gate > 30) & (gate * up).isfinite()  # 1 + exp(-30) is 1
        assert same_bits(h[here][:, some][is_gate], (gate * up).bfloat16()[is_gate])
        some = torch.arange(0, shape.hidden, 13, device="cuda")
        assert same_bits(y[here][:, some], product(h[here], inputs.w2[expert][some], inputs.w2_scale[expert][some]))
        compared += int(is_gate.sum())
    assert compared > 1000

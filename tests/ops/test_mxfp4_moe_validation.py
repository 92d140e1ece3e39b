"""Sizes and strides that ops.mxfp4_moe refuses; the rest is in test_checks.py. CPU only."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from deepseek_v4_sm120.ops import mxfp4_moe as op
from deepseek_v4_sm120.ops.mxfp4_moe import mxfp4_moe
from deepseek_v4_sm120.ops.shared import extension
from deepseek_v4_sm120.ops.shared.checks import Call
from deepseek_v4_sm120.ops.shared.limits import LIMITS
from deepseek_v4_sm120.specs.mxfp4_moe import Shape, make_inputs

GOOD = make_inputs(Shape(3, hidden=256, inter=128, experts=4, topk=2), device="cpu")
NAMES = [field.name for field in dataclasses.fields(GOOD) if field.name != "shape"]


def call(**changes):
    return mxfp4_moe(**{**{name: getattr(GOOD, name) for name in NAMES}, **changes})


def test_good_input_gets_as_far_as_the_device():
    with pytest.raises(RuntimeError, match=r"hidden.device must be a CUDA device, got cpu"):
        call()
    with pytest.raises(RuntimeError, match="CUDA"):
        call(w13=GOOD.w13.view(torch.int8), w13_scale=GOOD.w13_scale.view(torch.float8_e8m0fnu))


BAD = {
    "hidden's width": ({"hidden": GOOD.hidden[:, :16]}, r"hidden.shape\[1\] must be a positive multiple of 32, got 16"),
    "hidden's stride": ({"hidden": GOOD.hidden.T.contiguous().T}, r"hidden must have strides \[a multiple of 8, 1\]"),
    "no inter": ({"w13": GOOD.w13[:, :0]}, r"w13.shape\[1\] / 2 must be a positive multiple of 32, got 0"),
    "inter": ({"w13": GOOD.w13[:, :16]}, r"w13.shape\[1\] / 2 must be a positive multiple of 32, got 8"),
    "no experts": (
        {"w13": GOOD.w13[:0]},
        r"w13.shape must be \[experts, 2 \* inter, hidden / 2\], got \[0, 256, 128\]",
    ),
    "w13 shape": ({"w13": GOOD.w13[:, :, :64]}, r"w13.shape must be \[4, 256, 128\], got \[4, 256, 64\]"),
    "w13 odd": ({"w13": GOOD.w13[:, :255]}, r"w13.shape must be \[experts, 2 \* inter, hidden / 2\]"),
    "w13 transposed": (
        {"w13": GOOD.w13.transpose(1, 2).contiguous().transpose(1, 2)},
        r"w13 must have strides \[a multiple of 16, 128, 1\], got strides",
    ),
    "experts' stride": (
        {"w13": torch.zeros(4, 32776, dtype=torch.uint8)[:, :32768].view(4, 256, 128)},
        r"w13 must have strides \[a multiple of 16, 128, 1\], got strides \[32776, 128, 1\]",
    ),
    "scale shape": (
        {"w13_scale": GOOD.w13_scale[:, :, :4]},
        r"w13_scale.shape must be \[4, 256, 8\], got \[4, 256, 4\]",
    ),
    "w2 shape": ({"w2": GOOD.w2[:2]}, r"w2.shape must be \[4, 256, 64\], got \[2, 256, 64\]"),
    "ids rows": ({"topk_ids": GOOD.topk_ids[:2]}, r"topk_ids.shape must be \[3, topk\], got \[2, 2\]"),
    "no ids": ({"topk_ids": GOOD.topk_ids[:, :0]}, r"topk_ids.shape\[1\] must be 1 or more, got 0"),
    "ids stride": (
        {"topk_ids": GOOD.topk_ids.T.contiguous().T},
        r"topk_ids must have strides .*, got strides \[1, 3\]",
    ),
    "weights shape": ({"topk_weights": GOOD.topk_weights[:, :1]}, r"topk_weights.shape must be \[3, 2\], got \[3, 1\]"),
    "map shape": (
        {"expert_map": torch.zeros(0, dtype=torch.int32)},
        r"expert_map.shape must be \[1 or more\], got \[0\]",
    ),
    "activations": ({"activations": "fp4"}, "activations must be one of bf16, mxfp8, got 'fp4'"),
    "out shape": ({"out": torch.zeros(2, 256).bfloat16()}, r"out.shape must be \[3, 256\], got \[2, 256\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    changes, words = BAD[name]
    with pytest.raises(ValueError, match=f"^mxfp4_moe: {words}"):
        call(**changes)


WIDE = Shape(3, hidden=4096, inter=256, experts=3, topk=2)


@pytest.mark.parametrize(
    ("name", "most"), [("w13", 1 << 36), ("w2", 1 << 36), ("w13_scale", 1 << 34), ("w2_scale", 1 << 34)]
)
def test_what_32_bits_do_not_reach_is_refused_where_it_is_asked_for(name, most):
    """On memory that nobody has: experts so far apart."""
    given = {key: getattr(make_inputs(WIDE, device="cpu"), key) for key in NAMES}
    given |= {key: value.to("meta") for key, value in given.items() if torch.is_tensor(value)}
    _, rows, row_bytes = given[name].shape
    apart = (most - rows * row_bytes) // 2
    for stride, words in (
        (apart, "hidden.device must be a CUDA device"),
        (apart + 16, f"{name} must span at most {most}"),
    ):
        weights = torch.empty_strided(given[name].shape, (stride, row_bytes, 1), dtype=torch.uint8, device="meta")
        with pytest.raises((ValueError, RuntimeError), match=f"^mxfp4_moe: {words}"):
            mxfp4_moe(**(given | {name: weights}), reproducible=True)
        with pytest.raises(RuntimeError, match="hidden.device must be a CUDA device"):
            mxfp4_moe(**(given | {name: weights}))
    experts = op.Weights(*((given | {name: weights})[key] for key in ("w13", "w13_scale", "w2", "w2_scale")), False)
    with pytest.raises(ValueError, match=f"^mxfp4_moe: {name} must span at most {most} bytes, got "):  # of many rows
        op._check_many(Call("mxfp4_moe", "hidden", given["hidden"]), 4096, 256, 3, experts)


def test_the_pairs_of_a_launch():
    def problem(pairs):
        return extension.load().mxfp4_moe_problem(hidden=4096, inter=512, experts=256, pairs=pairs)

    most = op.DECODE_ROWS * 12  # so rows of up to 12 experts are few up to DECODE_ROWS
    assert problem(most) == "" and "3072 pairs" in problem(most + 1)


SIZES = LIMITS["mxfp4_moe"]


@pytest.mark.parametrize("inter", SIZES["inter"].values)
@pytest.mark.parametrize("hidden", SIZES["hidden"].values)
def test_a_size_that_adapters_keep_is_taken_at_any_number_of_rows(hidden, inter):
    experts, empty = SIZES["experts"].most, functools.partial(torch.empty, dtype=torch.uint8, device="meta")
    w13, w2 = (experts, 2 * inter, hidden), (experts, hidden, inter)
    weights = op.Weights(*(empty(*size[:2], size[2] // n) for size in (w13, w2) for n in (2, op.GROUP)), up_first=False)
    op._check_many(Call("mxfp4_moe", "hidden", empty(1, hidden)), hidden, inter, experts, weights)
    few = {"hidden": hidden, "inter": inter, "experts": experts}
    assert extension.load().mxfp4_moe_problem(**few, pairs=op.DECODE_ROWS * SIZES["experts_per_token"].most) == ""


def test_sizes_of_many_rows_alone_are_not_reproducible():
    words = r"reproducible must be False for these sizes \(few rows take hidden 4096 or 7168, got 256\), got True"
    with pytest.raises(ValueError, match=f"^mxfp4_moe: {words}"):
        call(reproducible=True)


@pytest.mark.parametrize("rows", [257, 1024, 8192, 60_000])
def test_the_scratch_of_many_rows_that_are_reproducible(rows):
    """x and h of all pairs; y in parts that stay in the L2, however many rows there are."""
    size = extension.load().mxfp4_moe_sorted_scratch_bytes(
        rows=rows, topk=6, experts=256, hidden=4096, inter=1024, exact=True
    )
    x_and_h = rows * 4096 * 2 + rows * 6 * 1024 * 2
    assert x_and_h < size < 1.04 * x_and_h + max(96 << 20, rows * 6 * 128 * 4) + (1 << 20)

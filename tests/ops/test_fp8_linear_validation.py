"""What ops.fp8_linear refuses of sizes, strides and forms, and what `takes` says; the rest is in test_checks.py."""

from __future__ import annotations

import itertools

import pytest
import torch

from deepseek_v4_sm120.ops import fp8_linear as op
from deepseek_v4_sm120.ops.fp8_linear import fp8_grouped_linear, fp8_linear, takes
from deepseek_v4_sm120.ops.shared import extension


def e4m3(*shape):
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def arguments(rows=3, outputs=256, inputs=384):
    return {
        "x": torch.zeros(rows, inputs, dtype=torch.bfloat16),
        "weight": e4m3(outputs, inputs),
        "weight_scale": torch.ones(outputs // 128, inputs // 128),
    }


def grouped(rows=3, groups=2, outputs=256, inputs=384):
    return {
        "x": torch.zeros(rows, groups, inputs, dtype=torch.bfloat16),
        "weight": e4m3(groups, outputs, inputs),
        "weight_scale": torch.ones(groups, outputs // 128, inputs // 128),
    }


def out(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


BAD = {
    "x's strides": ({"x": out(384, 3).T}, "x must have strides [a multiple of 8, 1], got strides [1, 3]"),
    "x's address": (
        {"x": out(3, 392)[:, 4:388]},
        "x must start on a 16-byte boundary, got an address 8 bytes past one",
    ),
    "inputs": (arguments(inputs=256) | {"x": out(3, 384)}, "weight.shape must be [outputs, 384], got [256, 256]"),
    "200 outputs": ({"weight": e4m3(200, 384)}, "weight.shape[-2] must be a positive multiple of 128, got 200"),
    "208 inputs": ({"x": out(3, 208), "weight": e4m3(256, 208)}, "weight.shape[-1] must be a positive multiple of 128"),
    "scales": ({"weight_scale": torch.ones(3, 2)}, "weight_scale.shape must be [2, 3], got [3, 2]"),
    "rows of no own": ({"weight": e4m3(1, 384).expand(256, 384)}, "weight.stride(-2) must be at least 384, got 0"),
    "out's shape": ({"out": out(3, 128)}, "out.shape must be [3, 256], got [3, 128]"),
    "out's strides": (
        {"out": out(3, 258)[:, :256]},
        "out must have strides [a multiple of 4, 1], got strides [258, 1]",
    ),
    "out's address": ({"out": out(3, 260)[:, 2:258]}, "out must start on an 8-byte boundary, got an address 4 bytes"),
}


@pytest.mark.parametrize(
    ("partial", "raised", "words"),
    [
        (
            torch.zeros(4, 3, 256, dtype=torch.bfloat16),
            TypeError,
            "partial.dtype must be torch.float32, got torch.bfloat16",
        ),
        (torch.zeros(3, 3, 256), ValueError, r"partial.shape\[0\] must be 2, 4, 8 \(splits\), got 3"),
        (torch.zeros(4, 3, 200), ValueError, r"partial.shape\[2\] must be a positive multiple of 128, got 200"),
        (torch.zeros(4, 256, 3).mT, ValueError, "partial must be contiguous"),
    ],
)
def test_what_cannot_be_merged(partial, raised, words):
    with pytest.raises(raised, match=f"^merge: {words}"):
        op.merge(partial)


@pytest.mark.parametrize(
    ("x", "weight", "raised", "words"),
    [
        (out(3, 512), out(1024), ValueError, r"x.shape must be \[rows, 1024\], got \[3, 512\]"),
        (torch.zeros(3, 1024), out(1024), TypeError, "x.dtype must be torch.bfloat16, got torch.float32"),
        (out(3, 1028)[:, :1024], out(1024), ValueError, "x must have strides"),
        (out(3, 1024), out(512), ValueError, r"weight.shape must be \[1024\], got \[512\]"),
        (out(3, 1024), out(2048)[::2], ValueError, "weight must be contiguous"),
    ],
)
def test_what_is_no_latent(x, weight, raised, words):
    assert not op.takes_latent(x, weight) and op.takes_latent(out(3, 1536)[:, :1024], out(1024))
    with pytest.raises(raised, match=f"^latent_norm: {words}"):
        op.latent_norm(x, weight, 1e-6)
    assert extension.load().FP8_LINEAR_NORM_INPUTS == op.NORM_INPUTS


def test_parts_of_a_product_are_of_its_sizes(monkeypatch):
    monkeypatch.setattr(op.cuda_tensors, "num_sms", lambda index: 188)
    for inputs, splits in ((1024, 1), (2048, 4), (4096, 4), (8192, 4)):
        assert {op.splits_of(rows, 4096, inputs, 0) for rows in (1, 8, 9, 64)} == {splits}
    most = (
        extension.load().FP8_LINEAR_DRAFT_MOST_INPUTS
    )  # what a draft begins with has sums of no other numbers of parts
    sizes = itertools.product((1, 7, 8, 9, 64), (128, 4096, 7168), range(128, most + 1, 128))
    assert {op.splits_of(*size, 0) for size in sizes} == {1, 4} and op.splits_of(8, 128, 32768, 0) == 8
    assert op.splits_of(0, 4096, 2048, 0) == op.splits_of(op.LAUNCH_ROWS + 1, 4096, 2048, 0) == 1
    with pytest.raises(RuntimeError, match="fp8_linear: takes outputs a multiple of 128, got 64"):
        op.splits_of(3, 64, 2048, 0)
    monkeypatch.setattr(op.Call, "on_cuda", lambda self: None)
    with pytest.raises(ValueError, match="have rows whose product is made in several parts"):
        op.fp8_linear_unmerged(**arguments())


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    changes, words = BAD[name]
    with pytest.raises(ValueError) as caught:
        fp8_linear(**{**arguments(), **changes})
    assert str(caught.value).startswith(f"fp8_linear: {words}")


def test_out_over_x():
    memory = out(3, 384)
    good = arguments(outputs=384)
    with pytest.raises(ValueError, match="out must not overlap x"):
        fp8_linear(**{**good, "x": memory, "out": memory})


def test_groups_must_follow_each_other():
    good = grouped()
    with pytest.raises(ValueError, match="weight must have groups that follow each other"):
        fp8_grouped_linear(**{**good, "weight": grouped(groups=4)["weight"][::2]})
    with pytest.raises(ValueError, match="weight_scale must have groups that follow each other"):
        fp8_grouped_linear(**{**good, "weight_scale": grouped(groups=4)["weight_scale"][::2]})
    with pytest.raises(ValueError, match=r"weight.shape must be \[2, outputs, 384\], got \[4, 256, 384\]"):
        fp8_grouped_linear(**{**good, "weight": grouped(groups=4)["weight"]})


def test_scales_are_float32_or_powers_of_two():
    for run, good in ((fp8_linear, arguments()), (fp8_grouped_linear, grouped())):
        for dtype in (torch.float8_e8m0fnu, torch.uint8):
            with pytest.raises(RuntimeError, match="x.device must be a CUDA device, got cpu"):
                run(**{**good, "weight_scale": good["weight_scale"].to(dtype)})


def test_takes_says_what_the_operator_would():
    good = arguments()
    weight, scale = good["weight"], good["weight_scale"]
    assert (
        takes(weight, scale) and takes(weight, scale.T.contiguous().T) and takes(weight, scale.to(torch.float8_e8m0fnu))
    )
    assert takes(grouped()["weight"], grouped()["weight_scale"])
    refused = {
        "bf16": (weight.to(torch.bfloat16), scale),
        "packed scales": (weight, torch.ones(256, 1, dtype=torch.int32)),
        "blocks of 64": (weight, torch.ones(4, 6)),
        "row scales": (weight, torch.ones(256, 1)),
        "an odd stride": (e4m3(256, 392)[:, :384], scale),
        "transposed": (e4m3(384, 256).T, scale),
        "odd sizes": (weight[:200], scale),
        "groups apart": (grouped(groups=4)["weight"][::2], grouped()["weight_scale"]),
    }
    assert [name for name, (w, s) in refused.items() if takes(w, s)] == []


def scratch_bytes(rows, outputs, inputs, *, groups=1, num_sms=132, **tuning):
    sizes = dict(rows=rows, groups=groups, outputs=outputs, inputs=inputs, num_sms=num_sms)
    return extension.load().fp8_linear_scratch_bytes(**sizes, **tuning)


def test_a_launch_takes_as_many_rows_as_the_operator_gives_it():
    assert extension.load().FP8_LINEAR_MAX_ROWS == op.LAUNCH_ROWS


@pytest.mark.parametrize("num_sms", (1, 16, 48, 84, 120, 132, 170, 188, 256))
@pytest.mark.parametrize("size", ((1, 4096, 8192), (1, 1536, 4096), (8, 1024, 4096), (1, 32768, 1024), (1, 128, 128)))
def test_splits_of_many_rows_have_room(size, num_sms):
    """Of a plan above 64 rows: fp32 sums of 2, 4 or 8 splits for every row; two units' sums of a block, that wait."""
    groups, outputs, inputs = size
    slices = 8 if inputs >= 2048 else 2 if inputs >= 256 else 1
    choices = [(in_turn, row_tiles) for in_turn in (1, 2, 4, 8) if in_turn <= slices for row_tiles in (1, 2)]
    for rows in (65, 128, 200, 256, 1000, 8192, op.LAUNCH_ROWS):
        needed = {}
        for in_turn, row_tiles in choices:
            splits, units = slices // in_turn, -(-rows // (64 * row_tiles)) * groups * outputs // 128
            sums = splits * rows * groups * outputs * 4 if splits > 1 else 0
            waiting = min(units * splits, num_sms) * 2 * 128 * 128 * 4 if in_turn > 2 else 0
            needed[in_turn, row_tiles] = sums + waiting
            tuning = {"in_turn": in_turn, "row_tiles": row_tiles}
            found = scratch_bytes(rows, outputs, inputs, groups=groups, num_sms=num_sms, **tuning)
            assert found == needed[in_turn, row_tiles]
        assert scratch_bytes(rows, outputs, inputs, groups=groups, num_sms=num_sms) in needed.values()


@pytest.mark.parametrize("num_sms", (84, 132, 188))
def test_wo_bs_inputs_are_split_for_few_rows(num_sms):
    """Four splits where a multiprocessor has one to four tiles of 16 outputs and long inputs; not of its peers."""
    for inputs in (8192, 4096, 2048):
        for rows in (1, 4, 8):
            assert scratch_bytes(rows, 4096, inputs, num_sms=num_sms) == 4 * rows * 4096 * 4
    assert scratch_bytes(4, 4096, 1024, num_sms=num_sms) == 0  # short
    assert scratch_bytes(4, 1280, 4096, num_sms=num_sms) == 0  # fewer tiles than multiprocessors
    assert scratch_bytes(4, 64 * num_sms // 128 * 128 + 128, 4096, num_sms=num_sms) == 0  # more than four for each
    assert scratch_bytes(4, 512, 4096, groups=8, num_sms=num_sms) == 0  # wo_a


@pytest.mark.parametrize("num_sms", (84, 132, 188))
def test_what_is_asked_for_whole_is_not_split(num_sms):
    for rows in range(1, op.FEW_ROWS + 1):
        for inputs in (4096, 2048):  # the shared expert's of one card
            assert scratch_bytes(rows, 4096, inputs, num_sms=num_sms, warp_rows=1, blocks=num_sms) == 0


def test_few_blocks_are_split_and_many_are_not():
    assert scratch_bytes(65, 1536, 4096) > 0 and scratch_bytes(128, 4096, 8192) > 0
    assert scratch_bytes(256, 32768, 1024) == 0 == scratch_bytes(8192, 16384, 1024)
    assert scratch_bytes(8192, 1536, 4096) == 132 * 2 * 128 * 128 * 4
    assert scratch_bytes(op.LAUNCH_ROWS, 128, 2048, in_turn=1) == 8 * op.LAUNCH_ROWS * 128 * 4
    assert scratch_bytes(op.LAUNCH_ROWS, 1 << 16, 2048, in_turn=1) == 8 << 33  # beyond 32 bits

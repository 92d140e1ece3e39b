"""Sizes and strides that ops.mhc refuses, and which kernels take a call; the rest is in test_checks.py. CPU only."""

from __future__ import annotations

import types

import pytest
import torch

from deepseek_v4_sm120.ops import mhc as op
from deepseek_v4_sm120.ops.all_reduce import AllReduce
from deepseek_v4_sm120.ops.mhc import MANY_ROWS, mhc, mhc_head, mhc_post, mhc_pre
from deepseek_v4_sm120.ops.shared import extension
from deepseek_v4_sm120.specs.mhc import Shape, make_inputs

GOOD = make_inputs(Shape(3), device="cpu")


def call(**changes):
    return mhc(**{**GOOD.boundary(), **changes})


def test_good_input_gets_as_far_as_the_device():
    device = "streams.device must be a CUDA device, got cpu"
    for run in (
        call,
        lambda: call(post=GOOD.post.unsqueeze(-1)),
        lambda: call(norm_weight=None),
        lambda: call(kernels="many"),
        lambda: call(kernels="fused"),
        lambda: mhc_pre(**GOOD.pre()),
        lambda: mhc_post(**GOOD.post_only()),
        lambda: mhc_head(**GOOD.head()),
        lambda: mhc_head(**GOOD.head(), f=GOOD.f, post=GOOD.post, comb=GOOD.comb, norm_weight=GOOD.norm_weight),
    ):
        with pytest.raises(RuntimeError, match=device):
            run()


BAD = {
    "streams": ({"streams": GOOD.streams[:, :3]}, r"streams.shape\[1\] must be 4, got 3"),
    "streams width": ({"streams": GOOD.streams[..., :512]}, r"must be 4096 or 7168 \(hidden\), got 512"),
    "streams apart": (
        {"streams": torch.zeros(3, 4, 4104, dtype=torch.bfloat16)[..., :4096]},
        r"streams.stride\(1\) must be 4096 \(hidden\), got 4104",
    ),
    "streams rows": (
        {"streams": torch.zeros(3, 16388, dtype=torch.bfloat16)[:, :16384].view(3, 4, 4096)},
        r"streams must have strides \[a multiple of 8, a multiple of 8, 1\], got strides \[16388, 4096, 1\]",
    ),
    "streams strides": (
        {"streams": GOOD.streams.transpose(1, 2).contiguous().transpose(1, 2)},
        r"streams must have strides \[.*, 1\], got strides \[16384, 1, 4\]",
    ),
    "f shape": ({"f": GOOD.f[:2]}, r"f.shape must be \[3, 4096\], got \[2, 4096\]"),
    "f strides": ({"f": GOOD.f.T.contiguous().T}, r"f must have strides \[a multiple of 8, 1\], got"),
    "post shape": ({"post": GOOD.post[:, :3]}, r"post.shape must be \[3, 4\], got \[3, 3\]"),
    "comb shape": ({"comb": GOOD.comb.view(3, 16)}, r"comb.shape must be \[3, 4, 4\], got \[3, 16\]"),
    "comb transposed": ({"comb": GOOD.comb.transpose(1, 2)}, "comb must be contiguous, got strides"),
    "fn shape": ({"fn": GOOD.head_fn}, r"fn.shape must be \[24, 16384\], got \[4, 16384\]"),
    "scale shape": ({"scale": GOOD.head_scale}, r"scale.shape must be \[3\], got \[1\]"),
    "base shape": ({"base": GOOD.head_base}, r"base.shape must be \[24\], got \[4\]"),
    "norm shape": ({"norm_weight": GOOD.norm_weight[:8]}, r"norm_weight.shape must be \[4096\], got \[8\]"),
    "kernels": ({"kernels": "two"}, "kernels must be one of fused, split, many, got 'two'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    changes, words = BAD[name]
    with pytest.raises(ValueError, match=f"^mhc: .*{words}"):
        call(**changes)


def test_the_heads_weights_are_its_own():
    with pytest.raises(ValueError, match=r"fn.shape must be \[4, 16384\], got \[24, 16384\]"):
        mhc_head(**{**GOOD.head(), "fn": GOOD.fn})
    with pytest.raises(ValueError, match="f, post and comb must be given together, got a value, None, None"):
        mhc_head(**GOOD.head(), f=GOOD.f)


def group(**changes) -> AllReduce:
    """What is asked of a group, without one."""
    made = object.__new__(AllReduce)
    known = {"ranks": 4, "hidden": 4096, "max_rows": 512, "one_shot_rows": 64, "num_sms": 188}
    vars(made).update(known | {"device": torch.device("cpu")} | changes)
    return made


BAD_SUMS = {
    "width": (ValueError, {"sum_over": group(hidden=7168)}, "sum_over.hidden must be 4096 .hidden., got 7168"),
    "rows": (ValueError, {"sum_over": group(max_rows=2)}, "sum_over.max_rows must be at least 3 .rows., got 2"),
    "device": (RuntimeError, {"sum_over": group(device=torch.device("cuda", 1))}, "must be streams's, cpu, got cuda:1"),
    "no group": (ValueError, {"sum_over": "tp"}, "sum_over must be an AllReduce or None, got 'tp'"),
    "strided": (
        ValueError,
        {"sum_over": group(), "f": torch.zeros(3, 4104, dtype=torch.bfloat16)[:, :4096]},
        r"f must be contiguous, got strides \[4104, 1\]",
    ),
}


@pytest.mark.parametrize("name", BAD_SUMS)
def test_a_sum_that_cannot_be(name):
    raised, changes, words = BAD_SUMS[name]
    last = {name: changes.get(name, getattr(GOOD, name)) for name in ("f", "post", "comb")}
    changes = {"sum_over": changes["sum_over"], **last}
    for op_name, run in (
        ("mhc", lambda: call(**changes)),
        ("mhc_head", lambda: mhc_head(**GOOD.head(), **changes)),
    ):
        with pytest.raises(raised, match=f"^{op_name}: .*{words}"):
            run()


def test_a_good_sum_gets_as_far_as_the_device():
    for run in (
        lambda: call(sum_over=group()),
        lambda: call(sum_over=group(), tag=3, kernels="split"),
        lambda: mhc_head(**GOOD.head(), f=GOOD.f, post=GOOD.post, comb=GOOD.comb, sum_over=group()),
    ):
        with pytest.raises(RuntimeError, match="streams.device must be a CUDA device, got cpu"):
            run()
    with pytest.raises(ValueError, match="sum_over must be None without f, got"):
        mhc_head(**GOOD.head(), sum_over=group())


@pytest.mark.parametrize(
    ("rows", "hidden", "changes", "fits", "expected"),
    [
        (1, 4096, {}, True, True),
        (16, 4096, {}, True, True),
        (17, 4096, {}, True, False),  # two hops move fewer bytes
        (64, 4096, {"ranks": 2}, True, True),
        (65, 4096, {"ranks": 2}, True, False),
        (9, 4096, {"ranks": 2, "one_shot_rows": 8}, True, False),  # no places for them
        (5, 4096, {"ranks": 8}, True, False),
        (1, 7168, {}, True, False),
        (1, 4096, {}, False, False),
    ],
)
def test_who_adds_is_decided_by_what_all_ranks_have(monkeypatch, rows, hidden, changes, fits, expected):
    asked = []

    def mhc_fits_summing(**sizes):
        asked.append(sizes)
        return fits

    op._fits_summing.cache_clear()
    monkeypatch.setattr(extension, "load", lambda: types.SimpleNamespace(mhc_fits_summing=mhc_fits_summing))
    assert op._sums_inside(None, rows, hidden, group(**changes), 0) is expected
    assert asked in ([], [{"rows": rows, "num_sms": 188}])
    assert op._sums_inside("fused", 64, hidden, group(), 0)
    assert not op._sums_inside("split", 1, hidden, group(), 0)
    op._fits_summing.cache_clear()


GIVEN = make_inputs(Shape(9), device="cpu")
TERMS = torch.zeros(op.TERM_SPLITS, 9, 4096)
BAD_TERMS = {
    "parts and routed": ({"f": TERMS, "routed": GIVEN.f}, TypeError, "f.dtype must be torch.bfloat16, got"),
    "rows apart with routed": (
        {"f": torch.cat([GIVEN.f, GIVEN.f], 1)[:, :4096], "routed": GIVEN.f},
        ValueError,
        "f must be contiguous",
    ),
    "three parts without a sum": ({"f": TERMS[:3]}, ValueError, r"f.shape must be \[4, 9, 4096\], got"),
    "three parts": (
        {"f": TERMS[:3], "sum_over": group()},
        ValueError,
        r"f.shape must be \[4, 9, 4096\], got \[3, 9, 4096\]",
    ),
    "a row short": (
        {"f": TERMS[:, :8], "sum_over": group()},
        ValueError,
        r"f.shape must be \[4, 9, 4096\], got \[4, 8,",
    ),
    "routed's shape": (
        {"routed": GIVEN.f[:8], "sum_over": group()},
        ValueError,
        r"routed.shape must be \[9, 4096\], got",
    ),
    "routed's type": ({"routed": TERMS[0], "sum_over": group()}, TypeError, "routed.dtype must be torch.bfloat16, got"),
}


@pytest.mark.parametrize("name", BAD_TERMS)
def test_terms_that_cannot_be(name):
    changes, raised, words = BAD_TERMS[name]
    with pytest.raises(raised, match=f"^mhc: {words}"):
        mhc(**{**GIVEN.boundary(), **changes})


@pytest.mark.parametrize("given", [{"f": TERMS}, {"routed": GIVEN.f}])
def test_terms_of_one_card_get_as_far_as_the_device(given):
    with pytest.raises(RuntimeError, match="streams.device must be a CUDA device, got cpu"):
        mhc(**GIVEN.boundary() | given)


@pytest.mark.parametrize(
    ("rows", "hidden", "fits", "expected"),
    [
        (1, 4096, True, True),
        (64, 4096, True, True),
        (65, 4096, True, False),
        (1, 7168, True, False),
        (4, 4096, False, False),
    ],
)
def test_who_may_leave_a_term_to_the_boundary_on_one_card(monkeypatch, rows, hidden, fits, expected):
    asked = []
    module = types.SimpleNamespace(mhc_fits_adding=lambda **sizes: asked.append(sizes) or fits)
    op._fits_adding.cache_clear()
    monkeypatch.setattr(extension, "load", lambda: module)
    assert op._fits_adding(rows, hidden, 90, 0) is expected
    assert asked in ([], [{"rows": rows, "num_sms": 90}])
    op._fits_adding.cache_clear()


def test_the_parts_of_a_term_are_the_kernels():
    assert extension.load().mhc_term_splits == op.TERM_SPLITS


@pytest.mark.parametrize("kernels", ["fused", "many"])
def test_some_kernels_need_flashs_width(kernels):
    wide = make_inputs(Shape(1, hidden=7168), device="cpu")
    with pytest.raises(ValueError, match=f'kernels must be "split" or None but for hidden 4096, got {kernels}, 7168'):
        mhc(**wide.boundary(), kernels=kernels)


@pytest.mark.parametrize(
    ("rows", "hidden", "is_boundary", "fits", "expected"),
    [
        (1, 4096, True, ("fused", "many", "split"), "fused"),
        (128, 4096, False, ("fused", "many", "split"), "fused"),
        (129, 4096, True, ("fused", "many", "split"), "split"),
        (MANY_ROWS, 4096, True, ("fused", "many", "split"), "many"),
        (MANY_ROWS, 4096, False, ("fused", "many", "split"), "split"),
        (8, 7168, True, ("fused", "many", "split"), "split"),
        (128, 4096, True, ("many", "split"), "split"),
        (8192, 4096, True, ("fused", "split"), "split"),
    ],
)
def test_the_kernels_that_take_a_call_fit_the_streams_multiprocessors(
    monkeypatch, rows, hidden, is_boundary, fits, expected
):
    """Where blocks that wait for each other would not all be resident, the two launches take the call."""
    asked = []

    def mhc_fits(*, kernels, rows, num_sms):
        asked.append((rows, num_sms))
        return kernels in fits

    module = types.SimpleNamespace(mhc_fused_rows=128, mhc_fits=mhc_fits, mhc_card_is_shared=lambda: False)
    monkeypatch.setattr(extension, "load", lambda: module)
    assert op._kernels_of.__wrapped__(rows, hidden, is_boundary, 24, 0) == expected
    assert asked == [(rows, 24)]
    module.mhc_card_is_shared = lambda: True
    shared = op._kernels_of.__wrapped__(rows, hidden, is_boundary, 24, 0)
    assert shared == ("split" if expected == "many" else expected)

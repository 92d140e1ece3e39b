"""Bad input: a clear error that names the argument, what was expected and what came, before any launch. CPU only."""

from __future__ import annotations

import types

import pytest
import torch

from deepseek_v4_sm120 import extension
from deepseek_v4_sm120.ops import mhc as op
from deepseek_v4_sm120.ops.mhc import MANY_ROWS, mhc, mhc_head, mhc_post, mhc_pre
from deepseek_v4_sm120.reference.mhc_inputs import Shape, make_inputs

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


def off_by_one(tensor):
    """The same values two bytes past a 16-byte boundary."""
    wide = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    wide[1:] = tensor.flatten()
    return wide[1:].view(tensor.shape)


BAD = {
    "streams dtype": ({"streams": GOOD.streams.half()}, TypeError, "streams.dtype must be torch.bfloat16, got torch.f"),
    "streams shape": ({"streams": GOOD.streams[:, :3]}, ValueError, r"streams.shape must be \[rows, 4, hidden\], got"),
    "streams width": ({"streams": GOOD.streams[..., :512]}, ValueError, r"must be 4096 or 7168 \(hidden\), got 512"),
    "streams strides": (
        {"streams": GOOD.streams.transpose(1, 2).contiguous().transpose(1, 2)},
        ValueError,
        r"streams' strides must be \[a multiple of 8, 4096, 1\], got \[16384, 1, 4\]",
    ),
    "streams address": ({"streams": off_by_one(GOOD.streams)}, ValueError, "streams must start on a 16-byte boundary"),
    "f dtype": ({"f": GOOD.f.float()}, TypeError, "f.dtype must be torch.bfloat16, got torch.float32"),
    "f shape": ({"f": GOOD.f[:2]}, ValueError, r"f.shape must be \[3, 4096\], got \[2, 4096\]"),
    "f strides": ({"f": GOOD.f.T.contiguous().T}, ValueError, r"f's strides must be \[a multiple of 8, 1\], got"),
    "post dtype": ({"post": GOOD.post.double()}, TypeError, "post.dtype must be torch.float32, got torch.float64"),
    "post shape": ({"post": GOOD.post[:, :3]}, ValueError, r"post.shape must be \[3, 4\], got \[3, 3\]"),
    "comb shape": ({"comb": GOOD.comb.view(3, 16)}, ValueError, r"comb.shape must be \[3, 4, 4\], got \[3, 16\]"),
    "comb transposed": ({"comb": GOOD.comb.transpose(1, 2)}, ValueError, "comb must be contiguous, got strides"),
    "fn dtype": ({"fn": GOOD.fn.to(torch.bfloat16)}, TypeError, "fn.dtype must be torch.float32, got torch.bfloat16"),
    "fn shape": ({"fn": GOOD.head_fn}, ValueError, r"fn.shape must be \[24, 16384\], got \[4, 16384\]"),
    "fn address": ({"fn": off_by_one(GOOD.fn)}, ValueError, "fn must start on a 16-byte boundary"),
    "scale shape": ({"scale": GOOD.head_scale}, ValueError, r"scale.shape must be \[3\], got \[1\]"),
    "base shape": ({"base": GOOD.head_base}, ValueError, r"base.shape must be \[24\], got \[4\]"),
    "norm dtype": ({"norm_weight": GOOD.norm_weight.float()}, TypeError, "norm_weight.dtype must be torch.bfloat16"),
    "norm shape": ({"norm_weight": GOOD.norm_weight[:8]}, ValueError, r"norm_weight.shape must be \[4096\], got \[8\]"),
    "eps": ({"norm_eps": -1e-6}, ValueError, "norm_eps must be 0 or more, got -1e-06"),
    "eps NaN": ({"hc_eps": float("nan")}, ValueError, "hc_eps must be 0 or more, got nan"),
    "kernels": ({"kernels": "two"}, ValueError, "kernels must be None or one of fused, split, many, got two"),
    "iterations": ({"sinkhorn_iters": 0}, ValueError, "sinkhorn_iters must be 1 or more, got 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    changes, error, words = BAD[name]
    with pytest.raises(error, match=words):
        call(**changes)


def test_the_heads_weights_are_its_own():
    with pytest.raises(ValueError, match=r"fn.shape must be \[4, 16384\], got \[24, 16384\]"):
        mhc_head(**{**GOOD.head(), "fn": GOOD.fn})
    with pytest.raises(ValueError, match="f, post and comb of a head must be given together"):
        mhc_head(**GOOD.head(), f=GOOD.f)


@pytest.mark.parametrize("kernels", ["fused", "many"])
def test_some_kernels_need_flashs_width(kernels):
    wide = make_inputs(Shape(1, hidden=7168), device="cpu")
    with pytest.raises(ValueError, match=f"kernels {kernels} need hidden 4096, got 7168"):
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

    module = types.SimpleNamespace(mhc_fused_rows=128, mhc_fits=mhc_fits)
    monkeypatch.setattr(extension, "load", lambda: module)
    assert op._kernels_of.__wrapped__(rows, hidden, is_boundary, 24, 0) == expected
    assert asked == [(rows, 24)]

"""What ops.compressor refuses, and in which words. CPU only: the checks come before anything touches a GPU."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.ops import compressor as op
from deepseek_v4_sm120.reference.compressor_inputs import make_inputs

MADE = make_inputs("c4", [4, 5, 8], device="cpu")
REFUSED = {
    "state's dtype": ({"state": MADE.state.bfloat16()}, TypeError, "state.dtype must be torch.float32"),
    "state's shape": ({"state": MADE.state[0]}, ValueError, r"state.shape must be \[pages, 4 or 128, width\]"),
    "groups of 8": ({"state": torch.zeros(2, 8, 2048)}, ValueError, r"\[pages, 4 or 128, width\]"),
    "state's width": ({"state": torch.zeros(9, 4, 512)}, ValueError, r"state must be \[pages, 4, 2048\], contiguous"),
    "state's stride": ({"state": MADE.state[::2]}, ValueError, r"state must be \[pages, 4, 2048\], contiguous"),
    "head": ({"norm_weight": torch.ones(256)}, ValueError, r"norm_weight.shape must be \[512 or 128\] for groups of 4"),
    "fp4 of 512": ({"fp4": True}, ValueError, "fp4 must be False for entries of 512 values"),
    "token's dtype": ({"kv_score": MADE.kv_score.half()}, TypeError, "kv_score.dtype must be torch.float32"),
    "token's width": ({"kv_score": MADE.kv_score[:, :512]}, ValueError, r"kv_score.shape must be \[rows, 2048\]"),
    "token's stride": (
        {"kv_score": torch.zeros(3, 2050)[:, :2048]},
        ValueError,
        r"kv_score must have strides \[multiple of 4, 1\]",
    ),
    "rows": ({"kv_score": torch.zeros(513, 2048)}, ValueError, "at most 512 rows, got 513"),
    "ape's dtype": ({"ape": MADE.ape.double()}, TypeError, "ape.dtype must be torch.float32"),
    "ape's shape": ({"ape": MADE.ape.view(4, 1024)}, ValueError, r"ape must be contiguous \[8, 512\]"),
    "plan's dtype": ({"plan": MADE.plan.view(torch.int32)}, TypeError, "plan.dtype must be torch.uint8"),
    "plan's rows": ({"plan": MADE.plan[:2]}, ValueError, r"plan must be contiguous \[3, 16\], got \[2, 16\]"),
    "weight's dtype": ({"norm_weight": MADE.norm_weight.bfloat16()}, TypeError, "norm_weight.dtype must be"),
    "table's dtype": ({"freqs_cis": MADE.freqs_cis.real}, TypeError, "freqs_cis.dtype must be torch.complex64"),
    "table's shape": ({"freqs_cis": MADE.freqs_cis[:, :16]}, ValueError, r"freqs_cis must be contiguous \[4096, 32\]"),
    "slots' dtype": ({"out_loc": MADE.out_loc.int()}, TypeError, "out_loc.dtype must be torch.int64"),
    "slots' rows": ({"out_loc": MADE.out_loc[:2]}, ValueError, r"out_loc must be contiguous \[3\]"),
    "epsilon": ({"norm_eps": 0.0}, ValueError, "norm_eps must be above 0, got 0.0"),
    "cache's dtype": ({"cache": MADE.cache.view(torch.int8)}, TypeError, "cache.dtype must be torch.uint8"),
    "page size": ({"page_size": 48}, ValueError, "page_size must be a power of two, got 48"),
    "larger pages": ({"page_size": 128}, ValueError, r"strides \[74880 or more, 1\]"),
    "short pages": ({"cache": MADE.cache[:, :37000]}, ValueError, "pages of 37440 bytes or more"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    changes, error, words = REFUSED[name]
    with pytest.raises(error, match=f"compressor: .*{words}"):
        op.compressor(**{**MADE.arguments(), **changes})


def test_the_indexers_groups_are_of_4():
    long = make_inputs("c128", [128], device="cpu")
    with pytest.raises(ValueError, match=r"norm_weight.shape must be \[512\] for groups of 128, got 128"):
        op.compressor(**{**long.arguments(), "norm_weight": torch.ones(128)})


@pytest.mark.parametrize("kind", ("c4", "c128", "index", "index_fp4"))
def test_no_cuda_device(kind):
    with pytest.raises(RuntimeError, match="compressor: state.device must be a CUDA device, got cpu"):
        op.compressor(**make_inputs(kind, [4, 128], device="cpu").arguments())

"""Sizes that ops.compressor refuses, and in which words; the rest is in test_checks.py. CPU only."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.ops import compressor as op
from deepseek_v4_sm120.specs.compressor import Request, make_inputs, make_step

MADE = make_inputs("c4", [4, 5, 8], device="cpu")
pytestmark = pytest.mark.usefixtures("fake")
REFUSED = {
    "groups of 8": ({"state": torch.zeros(2, 8, 2048)}, r"state.shape\[1\] must be 4 or 128, got 8"),
    "state's width": ({"state": torch.zeros(9, 4, 512)}, r"state.shape must be \[pages, 4, 2048\], got \[9, 4, 512\]"),
    "state's stride": ({"state": MADE.state[::2]}, "state must be contiguous, got strides"),
    "head": (
        {"norm_weight": torch.ones(256)},
        r"norm_weight.shape must be \[512 or 128\] for groups of 4, got \[256\]",
    ),
    "fp4 of 512": ({"fp4": True}, "fp4 must be False for entries of 512 values"),
    "token's width": ({"kv_score": MADE.kv_score[:, :512]}, r"kv_score.shape must be \[rows, 2048\], got \[3, 512\]"),
    "token's stride": ({"kv_score": torch.zeros(3, 2050)[:, :2048]}, r"strides \[a multiple of 4, 1\], got .*2050"),
    "rows": ({"kv_score": torch.zeros(513, 2048)}, "at most 512 rows, got 513"),
    "ape's shape": ({"ape": MADE.ape.view(4, 1024)}, r"ape.shape must be \[8, 512\]"),
    "plan's rows": ({"plan": MADE.plan[:2]}, r"plan.shape must be \[3, 16\], got \[2, 16\]"),
    "table's shape": ({"freqs_cis": MADE.freqs_cis[:, :16]}, r"freqs_cis.shape must be \[positions, 32\]"),
    "slots' rows": ({"out_loc": MADE.out_loc[:2]}, r"out_loc.shape must be \[3\]"),
    "larger pages": ({"page_size": 128}, r"cache.shape\[1\] must be 74880 bytes or more"),
    "short pages": ({"cache": MADE.cache[:, :37000]}, r"cache.shape\[1\] must be 37440 bytes or more, got 37000"),
    "pages over each other": (
        {"cache": MADE.cache[:1].expand(3, -1)},
        r"cache.stride\(0\) must be at least 37440, got 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    changes, words = REFUSED[name]
    with pytest.raises(ValueError, match=f"^compressor: .*{words}"):
        op.compressor(**{**MADE.arguments(), **changes})


STEP = make_step("c4", [Request(5, 4), Request(0, 2)], device="cpu")
REFUSED_OF_MANY = {
    "plan's width": ({"plan": STEP.plan[:, :8].contiguous()}, r"plan.shape must be \[entries, 16\], got \[6, 8\]"),
    "entries": ({"plan": torch.zeros(513, 16, dtype=torch.uint8)}, "plan must have at most 512 rows, got 513"),
    "writes' width": ({"writes": STEP.plan}, r"writes.shape must be \[writes, 8\], got \[6, 16\]"),
    "writes": ({"writes": torch.zeros(513, 8, dtype=torch.uint8)}, "writes must have at most 512 rows, got 513"),
    "writes' stride": ({"writes": STEP.writes.repeat(2, 1)[::2]}, "writes must be contiguous, got strides"),
    "slots' rows": ({"out_loc": STEP.out_loc[:2]}, r"out_loc.shape must be \[6\]"),
}


@pytest.mark.parametrize("name", REFUSED_OF_MANY)
def test_refused_of_many_tokens(name):
    changes, words = REFUSED_OF_MANY[name]
    with pytest.raises(ValueError, match=f"^compressor: .*{words}"):
        op.compressor(**{**STEP.arguments(), **changes})


def test_the_indexers_groups_are_of_4():
    long = make_inputs("c128", [128], device="cpu")
    with pytest.raises(ValueError, match=r"norm_weight.shape must be \[512\] for groups of 128, got \[128\]"):
        op.compressor(**{**long.arguments(), "norm_weight": torch.ones(128)})


@pytest.mark.parametrize("kind", ("c4", "c128", "index", "index_fp4"))
def test_no_cuda_device(kind):
    with pytest.raises(RuntimeError, match="compressor: state.device must be a CUDA device, got cpu"):
        op.compressor(**make_inputs(kind, [4, 128], device="cpu").arguments())

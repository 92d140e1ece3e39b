"""What ops.wo_a refuses of sizes and forms; the rest is in test_checks.py. CPU only."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.ops import wo_a as op
from deepseek_v4_sm120.specs.wo_a import make_wo_a

NAMES = ("x", "weight", "weight_scale", "freqs_cis", "positions")


def arguments(rows=3, groups=2, **changes):
    made = make_wo_a(rows, groups, torch.Generator().manual_seed(1), outputs=128, inputs=1024, table=9)
    found = {**dict(zip(NAMES, made, strict=True)), **changes}
    return [found[name] for name in NAMES[:3]], {name: found[name] for name in NAMES[3:]}


def call(**changes):
    given, named = arguments(**changes)
    return op.wo_a(*given, **named)


MADE = dict(
    zip(NAMES, make_wo_a(3, 2, torch.Generator().manual_seed(1), outputs=128, inputs=1024, table=9), strict=True)
)
REFUSED = {
    "groups": ({"weight": MADE["weight"][:1]}, r"weight.shape must be \[2, outputs, 1024\], got \[1, 128, 1024\]"),
    "scales": ({"weight_scale": MADE["weight_scale"][:, :, :4]}, r"weight_scale.shape must be \[2, 1, 8\]"),
    "one of two": ({"positions": None}, "freqs_cis and positions must be given together, got a value, None"),
    "the other": ({"freqs_cis": None}, "freqs_cis and positions must be given together, got None, a value"),
    "table": ({"freqs_cis": MADE["freqs_cis"][:, :16]}, r"freqs_cis.shape must be \[any, 32\], got \[9, 16\]"),
    "their number": ({"positions": MADE["positions"][:2]}, r"positions.shape must be \[3\], got \[2\]"),
    "their stride": (
        {"positions": torch.zeros(6, dtype=torch.int64)[::2]},
        "positions must be contiguous, got strides",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    changes, words = REFUSED[name]
    with pytest.raises(ValueError, match=f"^wo_a: {words}"):
        call(**changes)


def test_half_a_head_is_not_rotated():
    x, weight, scale, freqs_cis, positions = make_wo_a(2, 1, torch.Generator().manual_seed(1), outputs=128, inputs=768)
    with pytest.raises(ValueError, match=r"x.shape\[2\] must be a multiple of 512 to be rotated, got 768"):
        op.wo_a(x, weight, scale, freqs_cis=freqs_cis, positions=positions)


def test_prompts_that_are_to_have_the_bits_of_few_rows_are_rotated():
    given, named = arguments(rows=257)
    with pytest.raises(RuntimeError, match="must be a CUDA device"):
        op.wo_a(*given, **named, reproducible=True)


def test_prompts_are_rotated_by_the_caller():
    with pytest.raises(ValueError, match="freqs_cis must be None above 256 rows, got 257 rows: rotate them first"):
        given, named = arguments(rows=257)
        op.wo_a(*given, **named)


@pytest.mark.parametrize("rows", [1, 257])
def test_no_cuda_device(rows):
    given, named = arguments(rows=rows, **({} if rows < 257 else {"freqs_cis": None, "positions": None}))
    with pytest.raises(RuntimeError, match="must be a CUDA device, got cpu"):
        op.wo_a(*given, **named)

"""What ops.wo_a refuses, and in which words. CPU only: the checks come before anything touches a GPU."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.ops import wo_a as op
from deepseek_v4_sm120.reference.wo_a_inputs import make_wo_a

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
    "dtype of x": ({"x": MADE["x"].float()}, TypeError, "wo_a: x.dtype must be torch.bfloat16"),
    "shape of x": ({"x": MADE["x"][0]}, ValueError, r"wo_a: x.shape must be \[rows, groups, inputs\]"),
    "weight": ({"weight": MADE["weight"].float()}, TypeError, "wo_a: weight.dtype must be torch.float8_e4m3fn"),
    "groups": ({"weight": MADE["weight"][:1]}, ValueError, r"wo_a: weight.shape must be \[2, outputs, 1024\]"),
    "scales": ({"weight_scale": MADE["weight_scale"][:, :, :4]}, ValueError, "wo_a: weight_scale.shape must be"),
    "one of two": ({"positions": None}, ValueError, "freqs_cis and positions must be given together"),
    "the other": ({"freqs_cis": None}, ValueError, "freqs_cis and positions must be given together"),
    "real table": ({"freqs_cis": MADE["freqs_cis"].real}, TypeError, "wo_a: freqs_cis.dtype must be torch.complex64"),
    "table": ({"freqs_cis": MADE["freqs_cis"][:, :16]}, ValueError, r"wo_a: freqs_cis must be contiguous \[any, 32\]"),
    "positions": ({"positions": MADE["positions"].float()}, TypeError, "positions.dtype must be torch.int32 or"),
    "their number": (
        {"positions": MADE["positions"][:2]},
        ValueError,
        r"positions must be contiguous \[3\], got \[2\]",
    ),
    "their stride": ({"positions": torch.zeros(6, dtype=torch.int64)[::2]}, ValueError, r"contiguous \[3\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    changes, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        call(**changes)


def test_half_a_head_is_not_rotated():
    x, weight, scale, freqs_cis, positions = make_wo_a(2, 1, torch.Generator().manual_seed(1), outputs=128, inputs=768)
    with pytest.raises(ValueError, match="inputs must be a multiple of 512 to be rotated, got 768"):
        op.wo_a(x, weight, scale, freqs_cis=freqs_cis, positions=positions)


def test_prompts_are_rotated_by_the_caller():
    with pytest.raises(ValueError, match="freqs_cis must be None above 64 rows, got 65 rows: rotate them first"):
        given, named = arguments(rows=65)
        op.wo_a(*given, **named)


@pytest.mark.parametrize("rows", [1, 65])
def test_no_cuda_device(rows):
    given, named = arguments(rows=rows, **({} if rows < 65 else {"freqs_cis": None, "positions": None}))
    with pytest.raises(RuntimeError, match="must be a CUDA device, got cpu"):
        op.wo_a(*given, **named)

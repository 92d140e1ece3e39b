"""The two kernels of ops.sparse_decode: which one a call takes, and that they agree."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from deepseek_v4_sm120.ops import sparse_decode as op
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.specs.bounds import SPARSE_DECODE_KERNELS
from deepseek_v4_sm120.specs.sparse_decode import CacheShape, Shape, make_inputs

pytestmark = pytest.mark.gpu

WINDOW = CacheShape(256, 128, lengths=(128, 128, 77))
C4 = CacheShape(64, 512, lengths=(512, 512, 300))
C128 = CacheShape(2, 2048, lengths=(2048, 64, 1500), ascending=True)


def bits(inputs, **more):
    return op.sparse_decode(**inputs.arguments(), **more)


@pytest.mark.parametrize("heads", [8, 32, 33, 64, 128])
@pytest.mark.parametrize("extra", [None, C4, C128], ids=["window", "C4", "C128"])
def test_both_kernels_agree_within_rounding(extra, heads, device):
    inputs = make_inputs(Shape(9, heads, WINDOW, extra), device=device)
    few, few_lse = bits(inputs, prefill=False, return_lse=True)
    many, many_lse = bits(inputs, prefill=True, return_lse=True)
    assert relative_error(many, few) <= SPARSE_DECODE_KERNELS
    finite = torch.isfinite(few_lse)
    assert torch.equal(finite, torch.isfinite(many_lse))
    assert float((many_lse - few_lse)[finite].abs().max()) <= 2e-4


@pytest.mark.parametrize(
    ("rows", "heads", "extra", "many"),
    [
        (op.PREFILL_ROWS, op.PREFILL_HEADS, C4, True),
        (op.PREFILL_ROWS - 1, 64, C4, False),
        (op.PREFILL_ROWS, op.PREFILL_HEADS - 1, C4, False),
        (op.SHARED_ROWS, 8, C128, True),
        (op.SHARED_ROWS - 1, 8, C128, False),
    ],
)
def test_sizes_choose_the_kernel(rows, heads, extra, many, device):
    inputs = make_inputs(Shape(rows, heads, WINDOW, extra), device=device)
    chosen = bits(inputs)
    assert torch.equal(chosen, bits(inputs, prefill=many))
    assert not torch.equal(chosen, bits(inputs, prefill=not many))


def test_65536_rows(device):
    """More rows than a dimension of the grid holds."""
    inputs = make_inputs(Shape(65536, 33, CacheShape(256, 128, lengths=(3, 0, 40))), device=device)
    last = slice(65531, 65536)
    rows = {name: getattr(inputs, name)[last] for name in ("q", "indices", "topk_length")}
    assert torch.equal(bits(inputs)[last], bits(dataclasses.replace(inputs, **rows), prefill=True))

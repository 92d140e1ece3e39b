"""Weights made E4M3 again that somebody expanded: what comes back, by slices, and what does not."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.ops import fp8_linear_weights as op
from deepseek_v4_sm120.reference.fp8_linear import dequantized

CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
VALUES = CODES[CODES.isfinite()].unique()


def make(outputs, inputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    weight *= torch.exp(torch.randn(outputs, 1, generator=generator))  # tokens of different size
    return weight.bfloat16()


@pytest.mark.parametrize("numbers", [1 << 23, 1 << 15, 1], ids=["at once", "slices", "a block's rows"])
@pytest.mark.parametrize("greatest", [448.0, 256.0, 240.0, 2.0**-9])
def test_what_was_expanded_comes_back(greatest, numbers, monkeypatch):
    """Every code up to a block's greatest, by every power of two that a scale of the checkpoint's can be in bf16."""
    monkeypatch.setattr(op, "SLICE_NUMBERS", numbers)
    within = VALUES[VALUES.abs() <= greatest]
    generator = torch.Generator().manual_seed(int(greatest))
    codes = within[torch.randint(len(within), (256, 2, 128), generator=generator)]
    codes[::128, :, 0] = greatest
    codes[:128, 1] = 0  # a block of zeros
    for power in (-100, -9, 0, 20, 110):
        weight = (codes * 2.0**power).bfloat16().view(256, 256)
        assert torch.equal(weight.double(), (codes * 2.0**power).view(256, 256)), "as it is in bf16"
        found, scale = op.recovered(weight)
        assert torch.equal(dequantized(found, scale), weight.double())
        assert bool((torch.frexp(scale)[0] == 0.5).all())


def test_what_was_not_expanded_does_not():
    weight = torch.ones(256, 256).bfloat16()
    for number in (1 + 2**-4, 2.0**-15 * (1 + 2**-3), 2.0**-18, float("nan"), float("inf")):
        changed = weight.clone()
        changed[200, 7] = number
        assert op.recovered(changed) is None, number
    assert op.recovered(make(256, 256)) is None
    with pytest.raises(TypeError, match="weight.dtype must be torch.bfloat16"):
        op.recovered(weight.float())

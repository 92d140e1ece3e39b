"""bf16 weights as `fp8_linear` reads them: E4M3, with a float32 scale per 128 x 128 block. Made once, when a model is
loaded, slice by slice: beside its results it needs some 100 MB, whatever the weights' size."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepseek_v4_sm120.ops.fp8_linear import BLOCK
from deepseek_v4_sm120.ops.shared.checks import BF16, CONTIGUOUS, VECTOR, Call

SLICE_NUMBERS = 1 << 23  # of a slice at most; whole blocks of 128 outputs
_MAX_MANTISSA, _MAX_EXPONENT = 0.875, 9  # 448 = 0.875 * 2^9
_EXPONENTS, _EXPONENT_BIAS, _EXPONENT_AT = (-126, 127), 127, 23  # of float32's normal numbers


def padded(outputs: int) -> int:
    """Outputs that the operator takes: the next multiple of a block's."""
    return -(-outputs // BLOCK) * BLOCK


def empty(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(E4M3 [outputs, inputs], scales) of these bf16 weights' size, outputs padded."""
    outputs, inputs = padded(weight.shape[0]), weight.shape[1]
    codes = torch.empty((outputs, inputs), dtype=torch.float8_e4m3fn, device=weight.device)
    return codes, codes.new_empty((outputs // BLOCK, inputs // BLOCK), dtype=torch.float32)


@torch.no_grad()
def recovered(weight) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(codes, scale) as `empty` makes them, with codes * scale the weight to the bit and scales that are powers of two:
    what bf16 weights were before somebody expanded E4M3 and UE8M0. None where there are none such. Host sync.

    weight       [outputs, inputs] bf16, contiguous, inputs a multiple of 128
    raises       TypeError (dtype), ValueError (shape, stride, alignment)
    """
    codes, scale = empty(weight)
    check_weight(Call("recovered", "weight", weight), weight)
    for rows, blocks in _slices(weight):
        mantissa, exponent = torch.frexp(blocks.abs().amax((1, 3), keepdim=True))
        # the least that keeps the greatest number within E4M3, so that the least ones have theirs, too
        exponent = (exponent + (mantissa > _MAX_MANTISSA) - _MAX_EXPONENT).clamp_(*_EXPONENTS)
        factors = ((exponent + _EXPONENT_BIAS) << _EXPONENT_AT).view(torch.float32)  # exact on a GPU, too
        _write(codes, scale, rows, blocks / factors, factors)
        if not torch.equal(codes[rows].float().view(blocks.shape) * factors, blocks):
            return None
    return codes, scale


def check_weight(check: Call, weight) -> tuple[int, int]:
    """(outputs, inputs)"""
    outputs, inputs = check.tensor("weight", weight, BF16, "outputs, inputs", CONTIGUOUS, VECTOR)
    check.multiple("weight.shape[1]", inputs, BLOCK)
    return outputs, inputs


def _slices(weight) -> Iterator[tuple[slice, torch.Tensor]]:
    """(outputs, [n, 128, inputs / 128, 128] float32) one after the other; rows behind the weight's are 0."""
    outputs, inputs = weight.shape
    step = max(BLOCK, SLICE_NUMBERS // inputs // BLOCK * BLOCK)
    for first in range(0, outputs, step):
        part = weight[first : first + step].float()
        rows = padded(part.shape[0])
        if rows > part.shape[0]:
            part = torch.nn.functional.pad(part, (0, 0, 0, rows - part.shape[0]))
        yield slice(first, first + rows), part.view(rows // BLOCK, BLOCK, inputs // BLOCK, BLOCK)


def _write(codes, scale, rows: slice, blocks, factors) -> None:
    codes[rows].copy_(blocks.view(rows.stop - rows.start, -1))
    scale[rows.start // BLOCK : rows.stop // BLOCK].copy_(factors.view(factors.shape[0], -1))

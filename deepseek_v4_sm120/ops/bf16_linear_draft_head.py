"""Public head for guesses: logits by a copy of the head in INT4, the best of them once more by the head itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepseek_v4_sm120.ops.shared import cuda_tensors, extension
from deepseek_v4_sm120.ops.shared.checks import BF16, CONTIGUOUS, UINT8, VECTOR, Call, Question

TILE_OUTPUTS, SCALE_INPUTS, UNIT_INPUTS = 16, 64, 256  # csrc/bf16_linear/draft_head.h has these, and a test compares
UNIT_BYTES = TILE_OUTPUTS * (UNIT_INPUTS // 2 + 2 * UNIT_INPUTS // SCALE_INPUTS)
PART_OUTPUTS, BEST = 2048, 4  # of so many outputs the best are computed by the head
INPUTS_MULTIPLE, MOST_INPUTS = 1024, 32 << 10
MAX_ROWS = 65_535
SLICE_NUMBERS = 1 << 23  # of a slice of the head, whose copy is made at once
_OUT_DTYPES = (torch.float32, torch.bfloat16)
_STRIDES = 8  # that x's rows have multiples of: 16 bytes
_MOST, _ZERO = 7, 8  # of a code: how far from that of 0, and this


def draft_head(x, copy, weight, *, out_dtype=torch.float32):
    """x W^T for guesses: by a copy of W in INT4, but the four best of each 2,048 outputs of a row by W.

    x            [rows, inputs] bf16, 1 to 65,535 rows, inputs a multiple of 1,024 up to 32,768, last dim contiguous,
                 row stride a multiple of 8, 16-byte aligned
    copy         [outputs / 16, inputs / 256, UNIT_BYTES] uint8, contiguous, 16-byte aligned: `fill`'s of this weight
    weight       [outputs, inputs] bf16, outputs a multiple of 16, contiguous, 16-byte aligned
    out_dtype    torch.float32, or torch.bfloat16: the float32 sums rounded once
    returns      [rows, outputs] of out_dtype
    accuracy     of the best: float32 sums of exact products. Of the others about 0.1 relative L2, by the copy; against
                 float64 of the copy below 1e-3
    determinism  the same bits in every run and every batch: a row alone equals the row among others
    raises       TypeError (dtype), ValueError (shape, stride, alignment, value), RuntimeError (device, launch)
    cuda graphs  capture-safe: no host sync; out and float32 scratch of twice as many numbers, through torch
    weights      copy must not be written by the kernel in front on the same stream: it is read before that has ended
                 (programmatic dependent launch)
    source       SGLang's LogitsProcessor._compute_lm_head of a draft: what is greatest is what matters
    """
    check = Call("draft_head", "x", x)
    rows, inputs = check.tensor("x", x, BF16, "rows, inputs", _STRIDES, VECTOR)
    outputs = check_weight(check, weight, inputs)
    check.tensor("copy", copy, UINT8, copy_shape(outputs, inputs), CONTIGUOUS, VECTOR)
    if not 1 <= rows <= MAX_ROWS:
        check.refuse("shape", "x", f"have 1 to {MAX_ROWS} rows", rows)
    if out_dtype not in _OUT_DTYPES:
        check.refuse("dtype", "out_dtype", f"be one of {_OUT_DTYPES}", out_dtype)
    check.on_cuda()
    out = torch.empty((rows, outputs), dtype=out_dtype, device=x.device)
    scores = torch.empty((2, rows, outputs), dtype=torch.float32, device=x.device)
    with cuda_tensors.on_device_of(x):
        extension.load().draft_head(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            copy=copy.data_ptr(),
            weight=weight.data_ptr(),
            scores=scores.data_ptr(),
            out=out.data_ptr(),
            bf16_out=out_dtype == torch.bfloat16,
            rows=rows,
            inputs=inputs,
            outputs=outputs,
            num_sms=cuda_tensors.num_sms(x.device.index),
            pdl=True,
            stream=cuda_tensors.current_stream(x.device.index),
        )
    return out


def copy_shape(outputs: int, inputs: int) -> tuple[int, int, int]:
    return outputs // TILE_OUTPUTS, inputs // UNIT_INPUTS, UNIT_BYTES


def empty(weight: torch.Tensor) -> torch.Tensor:
    """A copy of this weight's size."""
    return torch.empty(copy_shape(*weight.shape), dtype=torch.uint8, device=weight.device)


@torch.no_grad()
def fill(weight, copy) -> None:
    """Makes copy a copy of weight in INT4: -7 to 7 times a bf16 scale for each 64 inputs of an output.

    weight       as `draft_head`'s
    copy         as `empty` makes it, written
    accuracy     relative L2 0.1 where weights are normally distributed: the nearest of what lies up to 7 scales
    raises       TypeError (dtype), ValueError (shape, stride, alignment, overlap)
    cuda graphs  device operations alone, in place, no host sync; scratch through torch, less than 400 MB
    """
    check = Call("fill", "weight", weight)
    outputs = check_weight(check, weight)
    inputs = weight.shape[1]
    check.tensor("copy", copy, UINT8, copy_shape(outputs, inputs), CONTIGUOUS, VECTOR)
    check.written("weight", weight, ("copy", copy))
    for tiles, part in _slices(weight):
        groups = part.float().view(-1, inputs // SCALE_INPUTS, SCALE_INPUTS)
        greatest = groups.abs().amax(2, keepdim=True)
        # by a tensor: torch divides by a number with the number's inverse on a GPU
        scales = (greatest / torch.full_like(greatest, _MOST)).bfloat16()
        steps = groups / scales.float().clamp_(min=torch.finfo(torch.float32).tiny)
        codes = steps.round_().nan_to_num_(0.0).clamp_(-_MOST, _MOST).long().add_(_ZERO)
        _lay(copy[tiles], codes.view(-1, inputs), scales.view(-1, inputs // SCALE_INPUTS))


def check_weight(check: Call, weight, inputs="inputs") -> int:
    """outputs"""
    outputs, inputs = check.tensor("weight", weight, BF16, ("outputs", inputs), CONTIGUOUS, VECTOR)
    check.multiple("weight.shape[0]", outputs, TILE_OUTPUTS)
    check.multiple("weight.shape[1]", inputs, INPUTS_MULTIPLE)
    if inputs > MOST_INPUTS:
        check.refuse("shape", "weight", f"have at most {MOST_INPUTS} inputs", inputs)
    return outputs


def takes_weight(weight) -> bool:
    """True for weights that `fill` copies; an adapter asks."""
    return bool(
        weight.ndim == 2
        and weight.numel() > 0
        and weight.shape[0] % TILE_OUTPUTS == 0
        and weight.shape[1] % INPUTS_MULTIPLE == 0
        and weight.shape[1] <= MOST_INPUTS
        and Question("draft_head", "weight", weight).tensor("weight", weight, BF16, weight.shape, CONTIGUOUS, VECTOR)
    )


def _slices(weight: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """(tiles, their outputs' weights), one after the other"""
    step = max(1, SLICE_NUMBERS // weight.shape[1] // TILE_OUTPUTS)
    tiles = weight.shape[0] // TILE_OUTPUTS
    for first in range(0, tiles, step):
        end = min(first + step, tiles)
        yield slice(first, end), weight[first * TILE_OUTPUTS : end * TILE_OUTPUTS]


def _lay(copy: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Codes, int64, and scales of whole tiles as the kernel reads them, into their part of the copy."""
    tiles, units, _ = copy.shape
    steps = UNIT_INPUTS // SCALE_INPUTS
    # output: half, g; input: unit, step, t (of 16), word, pair, which
    at = codes.view(tiles, 2, 8, units, steps, 4, 4, 2, 2)
    # of a row and four inputs: at bits 6 and 22 the first pair's, at 2 and 18 the second's
    four = at[..., 0, 0] << 6 | at[..., 0, 1] << 22 | at[..., 1, 0] << 2 | at[..., 1, 1] << 18
    upper = four[:, 1] << 8
    words = four[:, 0] | (upper & 0xFFFFFFFF) | upper >> 32  # [tile, g, unit, step, t, word]
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).permute(0, 2, 3, 1, 4, 5)
    ends = UNIT_INPUTS * TILE_OUTPUTS // 2
    copy[..., :ends].copy_(words.contiguous().view(torch.uint8).view(tiles, units, ends))
    of = scales.view(tiles, 2, 8, units, steps).permute(0, 3, 2, 4, 1).contiguous()
    copy[..., ends:].copy_(of.view(tiles, units, -1).view(torch.uint8))

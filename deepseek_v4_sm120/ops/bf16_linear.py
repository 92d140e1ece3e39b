"""Public bf16 linear layer for few rows: checks the arguments, launches. One kernel, no scratch."""

from __future__ import annotations

import torch

from deepseek_v4_sm120 import cuda_tensors, extension

MAX_ROWS = 32  # csrc/bf16_linear/bf16_linear.h has the same three; a test compares
INPUTS_MULTIPLE = 512
OUTPUTS_MULTIPLE = 4
_OUT_DTYPES = (torch.float32, torch.bfloat16)
_ALIGN_BYTES = 16


def bf16_linear(x, weight, *, out_dtype=torch.float32, out=None):
    """x W^T for few rows, in one launch that reads W once.

    x            [rows, inputs] bf16, 1 to 32 rows, inputs a multiple of 512, last dim contiguous, row stride a multiple
                 of 8, 16-byte aligned
    weight       [outputs, inputs] bf16, outputs a multiple of 4, likewise
    out_dtype    torch.float32, or torch.bfloat16: the float32 sums rounded once
    out          [rows, outputs] of out_dtype written in place, last dim contiguous; or None
    returns      out
    accuracy     exact products, float32 sums: relative L2 against float64 below 1e-5 (float32 out), 0.0025 (bf16 out)
    determinism  the same bits in every run and every batch: a row alone equals the row among others
    raises       TypeError (dtype), ValueError (shape, stride, alignment: says name, expected, got), RuntimeError
                 (device, launch)
    cuda graphs  capture-safe: no host sync, no scratch; allocates only out, through torch
    weights      must not be written by the kernel in front on the same stream: they are read before it has ended
                 (programmatic dependent launch)
    source       SGLang's linear_bf16_fp32 and weights_proj: the compressors' and the indexer's projections
    """
    _check(x, weight, out_dtype, out)
    device = x.device
    if device.type != "cuda":
        raise RuntimeError(f"bf16_linear: x.device must be a CUDA device, got {device}")
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=device)
    if device.index == torch._C._cuda_getDevice():
        _launch(x, weight, out)
    else:
        with torch.cuda.device(device):
            _launch(x, weight, out)
    return out


def takes(x, weight) -> bool:
    """True where bf16_linear computes x W^T; an adapter asks before it replaces a call."""
    return (
        x.ndim == weight.ndim == 2
        and x.dtype == weight.dtype == torch.bfloat16
        and 1 <= x.shape[0] <= MAX_ROWS
        and x.shape[1] == weight.shape[1]
        and x.shape[1] % INPUTS_MULTIPLE == 0
        and weight.shape[0] % OUTPUTS_MULTIPLE == 0
        and x.shape[1] > 0
        and weight.shape[0] > 0
        and not _layout_problem(x)
        and not _layout_problem(weight)
    )


def _layout_problem(t) -> str:
    if t.stride(1) != 1:
        return f"stride of dim 1 must be 1, got {t.stride(1)}"
    if t.stride(0) % 8:
        return f"stride of dim 0 must be a multiple of 8, got {t.stride(0)}"
    if t.data_ptr() % _ALIGN_BYTES:
        return f"address must be a multiple of {_ALIGN_BYTES}, got {t.data_ptr():#x}"
    return ""


def _check(x, weight, out_dtype, out) -> None:
    for name, t in (("x", x), ("weight", weight)):
        if t.dtype != torch.bfloat16:
            raise TypeError(f"bf16_linear: {name}.dtype must be torch.bfloat16, got {t.dtype}")
        if t.ndim != 2:
            raise ValueError(f"bf16_linear: {name} must have 2 dimensions, got shape {tuple(t.shape)}")
    if out_dtype not in _OUT_DTYPES:
        raise TypeError(f"bf16_linear: out_dtype must be one of {_OUT_DTYPES}, got {out_dtype}")
    rows, inputs = x.shape
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"bf16_linear: x must have 1 to {MAX_ROWS} rows, got {rows}")
    if inputs % INPUTS_MULTIPLE or inputs == 0:
        raise ValueError(f"bf16_linear: x.shape[1] must be a positive multiple of {INPUTS_MULTIPLE}, got {inputs}")
    if weight.shape[1] != inputs:
        raise ValueError(f"bf16_linear: weight must be [outputs, {inputs}] as x has it, got {tuple(weight.shape)}")
    if weight.shape[0] % OUTPUTS_MULTIPLE or weight.shape[0] == 0:
        raise ValueError(
            f"bf16_linear: weight.shape[0] must be a positive multiple of {OUTPUTS_MULTIPLE}, got {weight.shape[0]}"
        )
    for name, t in (("x", x), ("weight", weight)):
        problem = _layout_problem(t)
        if problem:
            raise ValueError(f"bf16_linear: {name}: {problem}")
    if weight.device != x.device:
        raise ValueError(f"bf16_linear: weight.device must be {x.device} as x's, got {weight.device}")
    if out is not None:
        _check_out(out, x, weight, out_dtype)


def _check_out(out, x, weight, out_dtype) -> None:
    expected = (x.shape[0], weight.shape[0])
    if out.dtype != out_dtype:
        raise TypeError(f"bf16_linear: out.dtype must be out_dtype {out_dtype}, got {out.dtype}")
    if tuple(out.shape) != expected or out.stride(1) != 1 or out.device != x.device:
        raise ValueError(
            f"bf16_linear: out must be {expected} on {x.device} with a contiguous last dim, got {tuple(out.shape)} on "
            f"{out.device}, strides {out.stride()}"
        )


def _launch(x, weight, out) -> None:
    """Checked arguments to raw pointers; x's device is current."""
    index = x.device.index
    extension.load().bf16_linear(
        x=x.data_ptr(),
        x_stride=x.stride(0),
        weight=weight.data_ptr(),
        weight_stride=weight.stride(0),
        out=out.data_ptr(),
        out_stride=out.stride(0),
        bf16_out=out.dtype == torch.bfloat16,
        rows=x.shape[0],
        inputs=x.shape[1],
        outputs=weight.shape[0],
        num_sms=cuda_tensors.num_sms(index),
        pdl=True,
        stream=torch._C._cuda_getCurrentRawStream(index),
    )

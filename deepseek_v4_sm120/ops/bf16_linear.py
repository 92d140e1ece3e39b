"""Public bf16 linear layer: checks the arguments, launches. One kernel, no scratch."""

from __future__ import annotations

import torch

from deepseek_v4_sm120.ops.shared import cuda_tensors, extension
from deepseek_v4_sm120.ops.shared.checks import BF16, VECTOR, Call, Question

MAX_ROWS = 1 << 20  # csrc/bf16_linear/bf16_linear.h has the same three; a test compares
INPUTS_MULTIPLE = 512
OUTPUTS_MULTIPLE = 4
_OUT_DTYPES = (torch.float32, torch.bfloat16)
_STRIDES = 8  # that x and weight have multiples of: 16 bytes


def bf16_linear(x, weight, *, out_dtype=torch.float32, out=None):
    """x W^T in one launch, made for few rows: up to 32 it reads W once.

    x            [rows, inputs] bf16, 1 to 2^20 rows, inputs a multiple of 512, last dim contiguous, row stride a
                 multiple of 8, 16-byte aligned
    weight       [outputs, inputs] bf16, outputs a multiple of 4, likewise
    out_dtype    torch.float32, or torch.bfloat16: the float32 sums rounded once
    out          [rows, outputs] of out_dtype written in place, last dim contiguous, not over x; or None
    returns      out
    accuracy     exact products, float32 sums: relative L2 against float64 below 1e-5 (float32 out), 0.0025 (bf16 out)
    determinism  the same bits in every run and every batch: a row alone equals the row among others
    raises       TypeError (dtype), ValueError (shape, stride, alignment, overlap, value), RuntimeError (device, launch)
    cuda graphs  capture-safe: no host sync, no scratch; allocates only out, through torch
    weights      must not be written by the kernel in front on the same stream: they are read before it has ended
                 (programmatic dependent launch)
    source       SGLang's linear_bf16_fp32 and weights_proj: the compressors' and the indexer's projections
    """
    check = Call("bf16_linear", "x", x)
    rows, inputs = check.tensor("x", x, BF16, "rows, inputs", _STRIDES, VECTOR)
    outputs, _ = check.tensor("weight", weight, BF16, ("outputs", inputs), _STRIDES, VECTOR)
    if not 1 <= rows <= MAX_ROWS:
        check.refuse("shape", "x", f"have 1 to {MAX_ROWS} rows", rows)
    check.multiple("x.shape[1]", inputs, INPUTS_MULTIPLE)
    check.multiple("weight.shape[0]", outputs, OUTPUTS_MULTIPLE)
    if out_dtype not in _OUT_DTYPES:
        check.refuse("dtype", "out_dtype", f"be one of {_OUT_DTYPES}", out_dtype)
    if out is not None:
        check.tensor("out", out, (out_dtype,), (rows, outputs), 1)
        check.written("x", x, ("out", out))
    check.on_cuda()
    if out is None:
        out = torch.empty((rows, outputs), dtype=out_dtype, device=x.device)
    with cuda_tensors.on_device_of(x):
        _launch(x, weight, out)
    return out


def takes(x, weight) -> bool:
    """True where bf16_linear computes x W^T; an adapter asks before it replaces a call."""
    if x.ndim != 2 or weight.ndim != 2:
        return False
    (rows, inputs), outputs, ask = x.shape, weight.shape[0], Question("bf16_linear", "x", x)
    return bool(
        1 <= rows <= MAX_ROWS
        and inputs % INPUTS_MULTIPLE == 0 < inputs
        and outputs % OUTPUTS_MULTIPLE == 0 < outputs
        and ask.tensor("x", x, BF16, (rows, inputs), _STRIDES, VECTOR)
        and ask.tensor("weight", weight, BF16, (outputs, inputs), _STRIDES, VECTOR)
    )


def _launch(x, weight, out, **tuning) -> None:
    """Checked arguments to raw pointers; x's device is current. `tuning`: warps (tests and bench only)."""
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
        stream=cuda_tensors.current_stream(index),
        **tuning,
    )

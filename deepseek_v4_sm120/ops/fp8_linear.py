"""Public FP8 block-scaled linear: checks the arguments, owns the scratch, launches `_C.fp8_linear`.

bf16 activations, E4M3 weights with a scale per 128 x 128 block, fp32 sums, bf16 out. `fp8_grouped_linear` is the same
for independent groups side by side (DeepSeek-V4's `wo_a`).
"""

from __future__ import annotations

import functools

import torch

from deepseek_v4_sm120.ops.shared import cuda_tensors, extension
from deepseek_v4_sm120.ops.shared.checks import ANY, BF16, CONTIGUOUS, E4M3, FP32, VECTOR, Call, Question

LAUNCH_ROWS = 1 << 15  # of one launch at most; fp8_linear.h has it too, and a test compares
BLOCK = 128  # inputs and outputs of one scale
NORM_INPUTS = 1024  # of latent_norm: Flash; norm.h has it too, and a test compares
SPLITS = (2, 4, 8)  # parts of the inputs, where there are several
FEW_ROWS = 8  # whose products need not be split over blocks; config.h has it too
_STRIDES = 8  # that x has multiples of: 16 bytes
_OUT_STRIDES, _OUT_ALIGN_BYTES = 4, 8
_SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu, torch.uint8)


def fp8_linear(x, weight, weight_scale, *, out=None, whole=False):
    """y = x W^T with W = weight * weight_scale, for rows of bf16 x.

    x             [rows, inputs] bf16, last dim contiguous, row stride a multiple of 8
    weight        [outputs, inputs] float8_e4m3fn, last dim contiguous, row stride a multiple of 16; outputs and inputs
                  multiples of 128. NaN bytes are NaN
    weight_scale  [outputs / 128, inputs / 128] float32 (any value), or float8_e8m0fnu or uint8 (UE8M0: 2^(byte - 127),
                  255 is NaN); any strides
    out           [rows, outputs] bf16 written in place, last dim contiguous, row stride a multiple of 4, not over x;
                  or None
    whole         up to FEW_ROWS rows: no block has a part of the inputs, so there is no launch that adds the parts. Of
                  long inputs slower behind a kernel, and less in the way of others beside it. The same bits
    returns       out [rows, outputs] bf16
    accuracy      relative L2 0.0017 against float64 (bf16 out, nothing coarser). Weights and x enter exactly
    determinism   the same bits in every run and every batch: a row alone equals the row among others. A row's NaN or
                  infinity stays in the row
    sizes         any number of rows; made for few: weights are decoded once for each 64 of them
    raises        TypeError (dtype), ValueError (shape, stride, alignment, overlap, value), RuntimeError (device,
                  launch)
    cuda graphs   capture-safe: no host sync; allocates out and, for more than a few rows, scratch through torch
    streams       the current stream of x's device; scratch is the call's own. Weights and scales are read ahead of the
                  end of the kernel before (programmatic dependent launch), which must not write them
    source        DeepSeek's inference/model.py (Linear) and kernel.py (fp8_gemm), without the rounding of x to FP8;
                  specification in reference/fp8_linear.py
    """
    check = check_product("fp8_linear", x, "rows, inputs", weight, weight_scale)
    _check_out(check, out, x, (x.shape[0], weight.shape[0]))
    check.on_cuda()
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16, device=x.device)
    rows, index = x.shape[0], x.device.index
    would_split = whole and rows <= FEW_ROWS and splits_of(rows, *weight.shape, index) > 1
    tuning = {"warp_rows": 1, "blocks": cuda_tensors.num_sms(index)} if would_split else {}
    _run(x.unsqueeze(1), weight.unsqueeze(0), weight_scale.unsqueeze(0), out.unsqueeze(1), **tuning)
    return out


def fp8_linear_unmerged(x, weight, weight_scale):
    """`fp8_linear` without its last addition: the sums of each part of the inputs, for who adds them where it reads.

    returns       [splits, rows, outputs] float32, contiguous; `merge` makes fp8_linear's bits of it. Only where
                  `splits_of` says that there are several parts

    Arguments, sizes (up to LAUNCH_ROWS rows), errors, graphs and streams as fp8_linear's.
    """
    check = check_product("fp8_linear_unmerged", x, "rows, inputs", weight, weight_scale)
    rows, outputs = x.shape[0], weight.shape[0]
    check.on_cuda()
    splits = splits_of(rows, *weight.shape, x.device.index)
    if splits == 1:
        check.refuse("shape", "x", "have rows whose product is made in several parts (splits_of)", list(x.shape))
    partial = torch.empty((splits, rows, outputs), dtype=torch.float32, device=x.device)
    with cuda_tensors.on_device_of(x):
        _launch(x.unsqueeze(1), weight.unsqueeze(0), weight_scale.unsqueeze(0), None, NO_ROTATION, (), partial)
    return partial


def merge(partial):
    """[rows, outputs] bf16 of what `fp8_linear_unmerged` gives: float32, parts added in pairs, rounded once.

    Sizes, errors, graphs and streams as fp8_linear's.
    """
    check = Call("merge", "partial", partial)
    splits, rows, outputs = check.tensor("partial", partial, FP32, "splits, rows, outputs", CONTIGUOUS, VECTOR)
    if splits not in SPLITS:
        check.refuse("shape", "partial.shape[0]", f"be {', '.join(map(str, SPLITS))} (splits)", splits)
    check.multiple("partial.shape[2]", outputs, BLOCK)
    check.on_cuda()
    out = torch.empty((rows, outputs), dtype=torch.bfloat16, device=partial.device)
    if rows:
        with cuda_tensors.on_device_of(partial):
            extension.load().fp8_linear_merge(
                partial=partial.data_ptr(),
                out=out.data_ptr(),
                out_stride=outputs,
                rows=rows,
                outputs=outputs,
                splits=splits,
                pdl=True,
                stream=cuda_tensors.current_stream(partial.device.index),
            )
    return out


def latent_norm(x, weight, eps):
    """x * rsqrt(mean(x^2) + eps) * weight: RMSNorm of the queries' latent, in front of `fp8_linear` of wq_b.

    x         [rows, 1024] bf16, last dim contiguous, row stride a multiple of 8
    weight    [1024] bf16, contiguous
    returns   [rows, 1024] bf16, contiguous
    accuracy  float32, rounded once; the bits of FlashInfer's CUDA kernel, which SGLang runs

    Sizes, errors, graphs and streams as fp8_linear's; the weight is read ahead of the end of the kernel before.
    Source: SGLang's RMSNorm; a kernel of its own because that one lets nothing in before its end.
    """
    check = Call("latent_norm", "x", x)
    rows, _ = check.tensor("x", x, BF16, ("rows", NORM_INPUTS), _STRIDES, VECTOR)
    check.tensor("weight", weight, BF16, (NORM_INPUTS,), CONTIGUOUS, VECTOR)
    if not eps >= 0:
        check.refuse("value", "eps", "be 0 or more", eps)
    check.on_cuda()
    out = torch.empty((rows, NORM_INPUTS), dtype=torch.bfloat16, device=x.device)
    if rows:
        with cuda_tensors.on_device_of(x):
            extension.load().fp8_linear_norm(
                x=x.data_ptr(),
                x_stride=x.stride(0),
                weight=weight.data_ptr(),
                out=out.data_ptr(),
                eps=float(eps),
                rows=rows,
                pdl=True,
                stream=cuda_tensors.current_stream(x.device.index),
            )
    return out


def takes_latent(x, weight) -> bool:
    """True where latent_norm takes these; an adapter asks before it replaces a call."""
    ask = Question("latent_norm", "x", x)
    return bool(
        x.ndim == 2
        and ask.tensor("x", x, BF16, (x.shape[0], NORM_INPUTS), _STRIDES, VECTOR)
        and ask.tensor("weight", weight, BF16, (NORM_INPUTS,), CONTIGUOUS, VECTOR)
    )


def splits_of(rows: int, outputs: int, inputs: int, index: int) -> int:
    """Parts of the inputs in which a product of so many rows is made on this device; 1: as a whole. By sizes alone."""
    return _splits(rows, outputs, inputs, cuda_tensors.num_sms(index)) if 0 < rows <= LAUNCH_ROWS else 1


@functools.lru_cache(maxsize=4096)
def _splits(rows: int, outputs: int, inputs: int, num_sms: int) -> int:
    return extension.load().fp8_linear_splits(rows=rows, outputs=outputs, inputs=inputs, num_sms=num_sms)


def fp8_grouped_linear(x, weight, weight_scale, *, out=None):
    """y[t, g] = x[t, g] W[g]^T for every group g: `fp8_linear` per group, in one launch.

    x             [rows, groups, inputs] bf16, last dim contiguous, other strides multiples of 8
    weight        [groups, outputs, inputs] float8_e4m3fn, contiguous; outputs a multiple of 128
    weight_scale  [groups, outputs / 128, inputs / 128] as in fp8_linear; a group's rows follow the last group's
    out           [rows, groups, outputs] bf16, last dim contiguous, other strides multiples of 4; or None
    returns       out [rows, groups, outputs] bf16

    Accuracy, determinism, sizes, errors, graphs and streams are fp8_linear's. Source: DeepSeek's inference/model.py
    (`wo_a` in MLA): einsum("tgd,grd->tgr").
    """
    check = check_product("fp8_grouped_linear", x, "rows, groups, inputs", weight, weight_scale)
    _check_out(check, out, x, (*x.shape[:2], weight.shape[1]))
    check.on_cuda()
    if out is None:
        out = torch.empty((*x.shape[:2], weight.shape[1]), dtype=torch.bfloat16, device=x.device)
    _run(x, weight, weight_scale, out)
    return out


def takes(weight: torch.Tensor, weight_scale: torch.Tensor) -> bool:
    """Whether these weights, [.., outputs, inputs] and their scales as they are stored, are what the operators read."""
    if weight.dim() not in (2, 3):
        return False
    *groups, outputs, inputs = weight.shape
    ask = Question("fp8_linear", "weight", weight)
    return bool(
        ask.tensor("weight", weight, E4M3, weight.shape, VECTOR, VECTOR)
        and ask.tensor("weight_scale", weight_scale, _SCALE_DTYPES, (*groups, outputs // BLOCK, inputs // BLOCK), ANY)
        and outputs % BLOCK == 0 < outputs
        and inputs % BLOCK == 0 < inputs
        and weight.stride(-2) >= inputs
        and (not groups or (_follows(weight) and _follows(weight_scale)))
    )


def _follows(tensor) -> bool:
    """A group's rows lie behind the last group's, with the rows' own stride."""
    return tensor.shape[0] == 1 or tensor.stride(0) == tensor.shape[1] * tensor.stride(1)


@functools.lru_cache(maxsize=4096)
def _scratch_bytes(rows: int, groups: int, outputs: int, inputs: int, num_sms: int, tuning: tuple) -> int:
    return extension.load().fp8_linear_scratch_bytes(
        rows=rows, groups=groups, outputs=outputs, inputs=inputs, num_sms=num_sms, **dict(tuning)
    )


NO_ROTATION: dict[str, int] = {}


def _run(x, weight, weight_scale, out, *, rotation=NO_ROTATION, **tuning) -> None:
    """Checked [rows, groups, ..] tensors to raw pointers. `tuning`: warp_rows, blocks; row_tiles, in_turn (tests).

    rotation: the launch's arguments for x that is rotated back on its way in (ops.wo_a), of at most LAUNCH_ROWS rows.
    """
    if x.shape[0]:
        with cuda_tensors.on_device_of(x):
            _launch(x, weight, weight_scale, out, rotation, tuple(tuning.items()))


def _launch(x, weight, weight_scale, out, rotation, tuning, unmerged=None) -> None:
    """unmerged: the result in place of `out`"""
    module, index = extension.load(), x.device.index
    groups, outputs, inputs = weight.shape
    num_sms, stream = cuda_tensors.num_sms(index), cuda_tensors.current_stream(index)
    for first in range(0, x.shape[0], LAUNCH_ROWS):
        rows = min(LAUNCH_ROWS, x.shape[0] - first)
        needed = _scratch_bytes(rows, groups, outputs, inputs, num_sms, tuning)
        partial = torch.empty(needed, dtype=torch.uint8, device=x.device) if needed and unmerged is None else unmerged
        module.fp8_linear(
            x=x.data_ptr() + first * x.stride(0) * 2,
            x_stride=x.stride(0),
            x_stride_group=x.stride(1),
            weight=weight.data_ptr(),
            weight_stride=weight.stride(1),
            scale=weight_scale.data_ptr(),
            scale_stride_output=weight_scale.stride(1),
            scale_stride_input=weight_scale.stride(2),
            scale_bytes=weight_scale.element_size(),
            **_written(out, first),
            partial=0 if partial is None else partial.data_ptr(),
            partial_bytes=0 if partial is None else partial.nbytes,
            merges=unmerged is None,
            rows=rows,
            groups=groups,
            outputs=outputs,
            inputs=inputs,
            num_sms=num_sms,
            pdl=True,
            stream=stream,
            **rotation,
            **dict(tuning),
        )


def _written(out, first: int) -> dict[str, int]:
    if out is None:
        return {"out": 0, "out_stride": 0, "out_stride_group": 0}
    return {
        "out": out.data_ptr() + first * out.stride(0) * 2,
        "out_stride": out.stride(0),
        "out_stride_group": out.stride(1),
    }


# ---- checks


def check_product(op, x, shape, weight, weight_scale) -> Call:
    """Of x W^T: x [rows, inputs] or [rows, groups, inputs], weights of the same inputs."""
    check = Call(op, "x", x)
    _, *groups, inputs = check.tensor("x", x, BF16, shape, _STRIDES, VECTOR)
    check_weight(check, weight, weight_scale, (*groups, "outputs", inputs))
    return check


def check_weight(check: Call, weight, scale, shape) -> None:
    *groups, outputs, inputs = check.tensor("weight", weight, E4M3, shape, VECTOR, VECTOR)
    check.multiple("weight.shape[-2]", outputs, BLOCK)
    check.multiple("weight.shape[-1]", inputs, BLOCK)
    check.tensor("weight_scale", scale, _SCALE_DTYPES, (*groups, outputs // BLOCK, inputs // BLOCK), ANY)
    if weight.stride(-2) < inputs:
        check.refuse("stride", "weight.stride(-2)", f"be at least {inputs}", weight.stride(-2))
    for name, tensor in (("weight", weight), ("weight_scale", scale)) if groups else ():
        if not _follows(tensor):
            check.refuse("stride", name, "have groups that follow each other", f"strides {list(tensor.stride())}")
    if (rows := weight.numel() // inputs) > 1 << 24:
        check.refuse("shape", "weight", "have at most 2^24 rows of all groups", rows)


def _check_out(check: Call, out, x, shape) -> None:
    if out is not None:
        check.tensor("out", out, BF16, shape, _OUT_STRIDES, _OUT_ALIGN_BYTES)
        check.written("x", x, ("out", out))

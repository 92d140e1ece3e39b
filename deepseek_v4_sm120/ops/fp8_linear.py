"""Public FP8 block-scaled linear for few rows: checks the arguments, owns the scratch, launches `_C.fp8_linear`.

bf16 activations, E4M3 weights with a scale per 128 x 128 block, fp32 sums, bf16 out. `fp8_grouped_linear` is the same
for independent groups side by side (DeepSeek-V4's `wo_a`). `fp8_linear` can normalise x, or gate it, on its way in.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from deepseek_v4_sm120 import cuda_tensors, extension

MAX_ROWS = 64  # of one launch; more rows are launched in tiles of as many
MADE_ROWS = 4  # that a launch gates or normalises itself; fp8_linear.h has it too, and a test compares
BLOCK = 128  # inputs and outputs of one scale
_ALIGN_BYTES = 16


def fp8_linear(x, weight, weight_scale, *, swiglu_limit=None, norm_weight=None, norm_eps=None, out=None):
    """y = x' W^T with W = weight * weight_scale, for few rows of bf16 x. x' is x; or x gated; or x normalised.

    x             [rows, inputs] bf16, with swiglu_limit [rows, 2 * inputs], gates and then ups; last dim contiguous,
                  row stride a multiple of 8
    weight        [outputs, inputs] float8_e4m3fn, last dim contiguous, row stride a multiple of 16; outputs and inputs
                  multiples of 128. NaN bytes are NaN
    weight_scale  [outputs / 128, inputs / 128] float32 (any value), or float8_e8m0fnu or uint8 (UE8M0: 2^(byte - 127),
                  255 is NaN); any strides
    swiglu_limit  positive number, finite in bf16: x' = bf16(silu(min(gate, limit)) * clamp(up, -limit, limit)).
                  Clamped in bf16, where a NaN becomes the limit, the rest in float32, as SGLang's silu_and_mul_clamp.
                  Or None
    norm_weight   [inputs] bf16, contiguous, 16-byte aligned: x' = bf16(x * rsqrt(mean(x^2) + norm_eps) * norm_weight),
                  in float32. Or None
    norm_eps      positive number, with norm_weight
    out           [rows, outputs] bf16 written in place, last dim contiguous, row stride a multiple of 4; or None
    returns       out [rows, outputs] bf16
    accuracy      relative L2 0.0017 against float64 of x' (bf16 out, nothing coarser). Weights and x' enter exactly:
                  the same bits as for an x' that was made before
    determinism   the same bits in every run and every batch: a row alone equals the row among others. A row's NaN or
                  infinity stays in the row
    sizes         any number of rows; weights are read once for each 64 of them, which is what this is for. x' of up to
                  4 rows is made by the launch itself, where `takes_prologue` says so; else by a launch before it
                  (`gated`, `normalized`). No bit depends on which
    raises        TypeError (dtype), ValueError (shape, stride, alignment: says name, expected, got), RuntimeError
                  (device, launch)
    cuda graphs   capture-safe: no host sync; allocates out and, for more than a few rows, scratch through torch
    streams       the current stream of x's device; scratch is the call's own. Weights, scales and norm_weight are read
                  ahead of the end of the kernel before (programmatic dependent launch), which must not write them; a
                  launch that gates or normalises begins behind that end
    source        DeepSeek's inference/model.py (Linear, RMSNorm, Expert) and kernel.py (fp8_gemm), without the rounding
                  of x to FP8; specification in reference/fp8_linear.py
    """
    gated = swiglu_limit is not None
    _check_x("fp8_linear", x, 2, ("rows", "2 * inputs" if gated else "inputs"))
    if gated and x.shape[1] % 2:
        raise ValueError(f"fp8_linear: x must have gates and as many ups with swiglu_limit, got {x.shape[1]} of both")
    inputs = x.shape[1] // 2 if gated else x.shape[1]
    _check_weight("fp8_linear", weight, weight_scale, x, (inputs,))
    prologue = _check_prologue(x, swiglu_limit, norm_weight, norm_eps)
    if out is not None:
        _check_out("fp8_linear", out, x, (x.shape[0], weight.shape[0]))
    else:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16, device=x.device)
    if prologue is not NO_PROLOGUE:
        _check_device(x)
        if x.shape[0] > MADE_ROWS or not takes_prologue(prologue.name, *weight.shape):
            x, prologue = _make(x, inputs, prologue), NO_PROLOGUE
    # beside what gates or normalises run other streams' kernels, the routed experts and the compressors: blocks that
    # wait for their x would do so in those kernels' places
    pdl = prologue is NO_PROLOGUE
    _run(x.unsqueeze(1), weight.unsqueeze(0), weight_scale.unsqueeze(0), out.unsqueeze(1), prologue=prologue, pdl=pdl)
    return out


def gated(x, swiglu_limit):
    """The x' [rows, inputs] bf16, contiguous, that `fp8_linear` makes of gates and ups x [rows, 2 * inputs].

    Arguments, rounding, errors, graphs and streams are fp8_linear's, inputs a multiple of 8. Any number of rows.
    """
    _check_x("gated", x, 2, ("rows", "2 * inputs"))
    if x.shape[1] % 16:
        raise ValueError(f"gated: x must have gates and ups, each a multiple of 8, got {x.shape[1]} of both")
    return _make(x, x.shape[1] // 2, _check_prologue(x, swiglu_limit, None, None, op="gated"))


def normalized(x, norm_weight, norm_eps):
    """The x' [rows, inputs] bf16, contiguous, that `fp8_linear` makes of x [rows, inputs] and norm_weight [inputs].

    Arguments, rounding, errors, graphs and streams are fp8_linear's, inputs a multiple of 8. Any number of rows.
    """
    _check_x("normalized", x, 2, ("rows", "inputs"))
    if x.shape[1] % 8:
        raise ValueError(f"normalized: inputs must be a multiple of 8, got {x.shape[1]}")
    return _make(x, x.shape[1], _check_prologue(x, None, norm_weight, norm_eps, op="normalized"))


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
    _check_x("fp8_grouped_linear", x, 3, ("rows", "groups", "inputs"))
    _check_weight("fp8_grouped_linear", weight, weight_scale, x, tuple(x.shape[1:]))
    if out is not None:
        _check_out("fp8_grouped_linear", out, x, (*x.shape[:2], weight.shape[1]))
    else:
        out = torch.empty((*x.shape[:2], weight.shape[1]), dtype=torch.bfloat16, device=x.device)
    _run(x, weight, weight_scale, out)
    return out


@functools.lru_cache(maxsize=256)
def takes_prologue(name: str, outputs: int, inputs: int) -> bool:
    """Whether a launch of `fp8_linear` of few rows can gate ("SWIGLU") or normalise ("NORM") x itself."""
    module = extension.load()
    prologue = getattr(module.Fp8LinearPrologue, name)
    return not module.fp8_linear_problem(prologue=prologue, rows=MADE_ROWS, groups=1, outputs=outputs, inputs=inputs)


def takes(weight: torch.Tensor, weight_scale: torch.Tensor) -> bool:
    """Whether these weights, [.., outputs, inputs] and their scales as they are stored, are what the operators read."""
    return (
        weight.dtype == torch.float8_e4m3fn
        and weight.dim() in (2, 3)
        and weight_scale.dim() == weight.dim()
        and weight_scale.dtype in _SCALE_DTYPES
        and weight.shape[-1] > 0
        and weight.shape[-2] > 0
        and weight.shape[-1] % BLOCK == 0
        and weight.shape[-2] % BLOCK == 0
        and tuple(weight_scale.shape) == (*weight.shape[:-2], weight.shape[-2] // BLOCK, weight.shape[-1] // BLOCK)
        and weight.stride(-1) == 1
        and weight.stride(-2) % _ALIGN_BYTES == 0
        and weight.stride(-2) >= weight.shape[-1]
        and weight.data_ptr() % _ALIGN_BYTES == 0
        and (weight.dim() == 2 or (_follows(weight) and _follows(weight_scale)))
    )


_SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu, torch.uint8)


def _follows(tensor) -> bool:
    """A group's rows lie behind the last group's, with the rows' own stride."""
    return tensor.shape[0] == 1 or tensor.stride(0) == tensor.shape[1] * tensor.stride(1)


@functools.lru_cache(maxsize=4096)
def _scratch_bytes(
    prologue: str, rows: int, groups: int, outputs: int, inputs: int, num_sms: int, tuning: tuple
) -> int:
    module = extension.load()
    return module.fp8_linear_scratch_bytes(
        prologue=getattr(module.Fp8LinearPrologue, prologue),
        rows=rows,
        groups=groups,
        outputs=outputs,
        inputs=inputs,
        num_sms=num_sms,
        **dict(tuning),
    )


class Prologue(NamedTuple):
    """What the kernel does to x on its way in: the extension's name of it, and the launch's arguments for it."""

    name: str
    arguments: dict[str, int | float]


NO_PROLOGUE = Prologue("NONE", {})


def _make(x, inputs, prologue) -> torch.Tensor:
    """What the prologue makes of x, by a launch of its own."""
    _check_device(x)
    out = torch.empty((x.shape[0], inputs), dtype=torch.bfloat16, device=x.device)
    if x.shape[0]:
        with torch.cuda.device(x.device):
            extension.load().fp8_linear_make(
                x=x.data_ptr(),
                x_stride=x.stride(0),
                out=out.data_ptr(),
                out_stride=out.stride(0),
                rows=x.shape[0],
                inputs=inputs,
                pdl=True,
                stream=torch._C._cuda_getCurrentRawStream(x.device.index),
                **prologue.arguments,
            )
    return out


def _run(x, weight, weight_scale, out, *, prologue=NO_PROLOGUE, pdl=True, **tuning) -> None:
    """Checked [rows, groups, ..] tensors to raw pointers. `tuning`: warp_rows, blocks, row_tiles, in_turn (tests only).

    A rotation (ops.wo_a) is for at most MAX_ROWS rows.
    """
    _check_device(x)
    if x.shape[0] == 0:
        return
    launch = functools.partial(_launch, prologue=prologue, pdl=pdl, tuning=tuple(tuning.items()))
    if x.device.index == torch._C._cuda_getDevice():
        launch(x, weight, weight_scale, out)
    else:
        with torch.cuda.device(x.device):
            launch(x, weight, weight_scale, out)


def _launch(x, weight, weight_scale, out, *, prologue, pdl, tuning) -> None:
    module, index = extension.load(), x.device.index
    groups, outputs, inputs = weight.shape
    num_sms, stream = cuda_tensors.num_sms(index), torch._C._cuda_getCurrentRawStream(index)
    for first in range(0, x.shape[0], MAX_ROWS):
        rows = min(MAX_ROWS, x.shape[0] - first)
        needed = _scratch_bytes(prologue.name, rows, groups, outputs, inputs, num_sms, tuning)
        partial = torch.empty(needed, dtype=torch.uint8, device=x.device) if needed else None
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
            out=out.data_ptr() + first * out.stride(0) * 2,
            out_stride=out.stride(0),
            out_stride_group=out.stride(1),
            partial=0 if partial is None else partial.data_ptr(),
            partial_bytes=needed,
            rows=rows,
            groups=groups,
            outputs=outputs,
            inputs=inputs,
            num_sms=num_sms,
            pdl=pdl,
            stream=stream,
            **prologue.arguments,
            **dict(tuning),
        )


# ---- checks: every message says argument, expected, got


def _check_device(x) -> None:
    if x.device.type != "cuda":
        raise RuntimeError(f"fp8_linear: x.device must be a CUDA device, got {x.device}")


def _check_x(op, x, dims, names) -> None:
    if x.dtype != torch.bfloat16:
        raise TypeError(f"{op}: x.dtype must be torch.bfloat16, got {x.dtype}")
    if x.dim() != dims:
        raise ValueError(f"{op}: x.shape must be [{', '.join(names)}], got {list(x.shape)}")
    _check_strides(op, "x", x, 8)
    if x.data_ptr() % _ALIGN_BYTES:
        got = f"an address {x.data_ptr() % _ALIGN_BYTES} bytes past one"
        raise ValueError(f"{op}: x must start on a {_ALIGN_BYTES}-byte boundary, got {got}")


def _check_strides(op, name, tensor, multiple) -> None:
    odd = any(tensor.shape[d] > 1 and tensor.stride(d) % multiple for d in range(tensor.dim() - 1))
    if odd or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
        expected = ", ".join([f"a multiple of {multiple}"] * (tensor.dim() - 1) + ["1"])
        raise ValueError(f"{op}: {name}'s strides must be [{expected}], got {list(tensor.stride())}")


def _check_weight(op, weight, scale, x, leading) -> None:
    if weight.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{op}: weight.dtype must be torch.float8_e4m3fn, got {weight.dtype}")
    if scale.dtype not in _SCALE_DTYPES:
        names = " or ".join(map(str, _SCALE_DTYPES))
        raise TypeError(f"{op}: weight_scale.dtype must be {names}, got {scale.dtype}")
    inputs, groups = leading[-1], leading[:-1]
    wanted = "[" + ", ".join([*map(str, groups), "outputs", str(inputs)]) + "]"
    if weight.dim() != x.dim() or weight.shape[-1] != inputs or tuple(weight.shape[:-2]) != groups:
        raise ValueError(f"{op}: weight.shape must be {wanted}, got {list(weight.shape)}")
    outputs = weight.shape[-2]
    if inputs % BLOCK or outputs % BLOCK or not inputs or not outputs:
        raise ValueError(f"{op}: outputs and inputs must be multiples of {BLOCK}, got {outputs} and {inputs}")
    expected = (*groups, outputs // BLOCK, inputs // BLOCK)
    if tuple(scale.shape) != expected:
        raise ValueError(f"{op}: weight_scale.shape must be {list(expected)}, got {list(scale.shape)}")
    _check_strides(op, "weight", weight, _ALIGN_BYTES)
    if weight.stride(-2) < inputs or weight.data_ptr() % _ALIGN_BYTES:
        got = f"row stride {weight.stride(-2)} at an address {weight.data_ptr() % _ALIGN_BYTES} bytes past one"
        raise ValueError(
            f"{op}: weight must have rows of its own that start on {_ALIGN_BYTES}-byte boundaries, got {got}"
        )
    for name, tensor in (("weight", weight), ("weight_scale", scale)):
        if tensor.dim() == 3 and not _follows(tensor):
            got = list(tensor.stride())
            raise ValueError(f"{op}: {name}'s groups must follow each other without a gap, got strides {got}")
        if tensor.device != x.device:
            raise RuntimeError(f"{op}: {name}.device must be x's, {x.device}, got {tensor.device}")
    if (rows := weight.numel() // inputs) > 1 << 24:
        raise ValueError(f"{op}: weight must have at most 2^24 rows of all groups, got {rows}")


def _check_prologue(x, swiglu_limit, norm_weight, norm_eps, op="fp8_linear") -> Prologue:
    if (norm_weight is None) != (norm_eps is None):
        raise ValueError(f"{op}: norm_weight and norm_eps must be given together, got one of them")
    if swiglu_limit is not None and norm_weight is not None:
        raise ValueError(f"{op}: swiglu_limit and norm_weight must not be given together")
    if swiglu_limit is not None:
        if not 0 < swiglu_limit <= torch.finfo(torch.bfloat16).max:
            raise ValueError(f"{op}: swiglu_limit must be positive and finite in bf16, got {swiglu_limit}")
        return Prologue("SWIGLU", {"swiglu_limit": swiglu_limit})
    if norm_weight is not None:
        _check_norm(op, x, norm_weight, norm_eps)
        return Prologue("NORM", {"norm_weight": norm_weight.data_ptr(), "norm_eps": norm_eps})
    return NO_PROLOGUE


def _check_norm(op, x, weight, eps) -> None:
    if weight.dtype != torch.bfloat16:
        raise TypeError(f"{op}: norm_weight.dtype must be torch.bfloat16, got {weight.dtype}")
    if weight.shape != x.shape[1:] or not weight.is_contiguous():
        got = f"{list(weight.shape)} with strides {list(weight.stride())}"
        raise ValueError(f"{op}: norm_weight must be contiguous [{x.shape[1]}], got {got}")
    if weight.data_ptr() % _ALIGN_BYTES:
        raise ValueError(f"{op}: norm_weight must start on a {_ALIGN_BYTES}-byte boundary")
    if weight.device != x.device:
        raise RuntimeError(f"{op}: norm_weight.device must be x's, {x.device}, got {weight.device}")
    if not eps > 0:
        raise ValueError(f"{op}: norm_eps must be positive, got {eps}")


def _check_out(op, out, x, shape) -> None:
    if out.dtype != torch.bfloat16:
        raise TypeError(f"{op}: out.dtype must be torch.bfloat16, got {out.dtype}")
    if tuple(out.shape) != shape:
        raise ValueError(f"{op}: out.shape must be {list(shape)}, got {list(out.shape)}")
    _check_strides(op, "out", out, 4)
    if out.data_ptr() % 8:
        got = f"an address {out.data_ptr() % 8} bytes past one"
        raise ValueError(f"{op}: out must start on an 8-byte boundary, got {got}")
    if out.device != x.device:
        raise RuntimeError(f"{op}: out.device must be x's, {x.device}, got {out.device}")
    sizes = sorted((out.stride(d), out.shape[d]) for d in range(out.dim()) if out.shape[d] > 1)
    reach = 1
    for stride, size in sizes:
        if stride < reach:
            raise ValueError(f"{op}: out's elements must not overlap, got strides {list(out.stride())}")
        reach = stride * (size - 1) + reach
    if out.numel() and cuda_tensors.overlap(out, x):
        raise ValueError(f"{op}: out must not overlap x, got tensors that share memory")

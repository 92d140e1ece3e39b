"""Public wo_a, the first half of DeepSeek-V4's output projection: checks the arguments, launches.

The weights stay E4M3. Up to FP8_ROWS rows: one launch of `_C.fp8_linear`, which also takes the rotary position
embedding of the attention's output back. More rows: the weights become bf16 in a buffer of torch's pool that lives for
the call, and torch multiplies; or, where the bits of few rows are wanted (`reproducible`), the same launch.
"""

from __future__ import annotations

import torch

from deepseek_v4_sm120.ops import fp8_linear as linear
from deepseek_v4_sm120.ops.fp8_linear import takes  # noqa: F401
from deepseek_v4_sm120.ops.shared import cuda_tensors, extension
from deepseek_v4_sm120.ops.shared.checks import ANY, BF16, COMPLEX, CONTIGUOUS, POSITIONS, ROTATED, VECTOR, Call
from deepseek_v4_sm120.ops.shared.limits import STEP_ROWS

FP8_ROWS = (
    STEP_ROWS  # a step's rows have the same bits however many; for a prompt's expanding costs less (bench/wo_a.py)
)
_SHAPE = "rows, groups, inputs"
HEAD_INPUTS = 512  # csrc/fp8_linear/config.h has it too, a test compares
EQUATION = "tgd,grd->tgr"  # the product, as SGLang asks torch.einsum for it


def wo_a(x, weight, weight_scale, *, freqs_cis=None, positions=None, reproducible=False):
    """y[t, g] = x'[t, g] W[g]^T, where x' is x rotated back by its row's position.

    x             [rows, groups, inputs] bf16, last dim contiguous, other strides multiples of 8, 16-byte aligned
    weight        [groups, outputs, inputs] float8_e4m3fn, contiguous; outputs and inputs multiples of 128
    weight_scale  [groups, outputs / 128, inputs / 128] float32, or UE8M0 (float8_e8m0fnu, uint8); a group's rows follow
                  the last group's
    freqs_cis     [any, 32] complex64, contiguous: row p has the rotation of position p. Or None: x' = x
    positions     [rows] int32 or int64, contiguous, each a row of freqs_cis (not checked: that would wait for the GPU)
    reproducible  True: any number of rows goes the way of up to 256
    returns       [rows, groups, outputs] bf16, contiguous
    rotation      inputs must be whole heads of 512; of each the last 64 are 32 pairs (a, b), which become
                  (a c + b s, b c - a s) in float32 and are rounded to bf16. At most 256 rows, but if reproducible:
                  where they are more, the caller rotates and passes None (SGLang's kernel does, in place)
    accuracy      relative L2 0.0017 against float64 of the rounded x' (bf16 out)
    determinism   up to 256 rows, and if reproducible at any number, the same bits in every run and every batch: a row
                  alone equals the row among others; else cuBLAS's (torch.bmm)
    memory        for cuBLAS 2 bytes a weight of torch's pool while the call runs; else as fp8_linear
    raises        TypeError (dtype), ValueError (shape, stride, alignment, overlap, value), RuntimeError (device,
                  launch)
    cuda graphs   capture-safe: no host sync, allocates through torch only
    streams       the current stream of x's device. Weights and scales are read ahead of the end of the kernel before
                  (programmatic dependent launch): that kernel must not write them
    source        DeepSeek's inference/model.py (MLA.forward: apply_rotary_emb inverse, wo_a); specification in
                  reference/wo_a.py
    """
    check = linear.check_product("wo_a", x, _SHAPE, weight, weight_scale)
    few = reproducible or x.shape[0] <= FP8_ROWS
    rotates = _check_rotation(check, x, freqs_cis, positions, few)
    check.on_cuda()
    out = torch.empty((*x.shape[:2], weight.shape[1]), dtype=torch.bfloat16, device=x.device)
    if not few:
        _multiply_expanded(x, weight, weight_scale, out)
        return out
    for first in range(0, x.shape[0], linear.LAUNCH_ROWS):
        part = slice(first, first + linear.LAUNCH_ROWS)
        rotation = _rotation(freqs_cis, positions[part]) if rotates else linear.NO_ROTATION
        linear._run(x[part], weight, weight_scale, out[part], rotation=rotation)
    return out


def multiply_expanded(x, weight, weight_scale, out) -> None:
    """out [rows, groups, outputs] = x W^T of each group, with weights that are bf16 while the call runs.

    Arguments, errors and graphs are wo_a's, out's strides free; what wo_a does above FP8_ROWS rows.
    """
    check = linear.check_product("multiply_expanded", x, _SHAPE, weight, weight_scale)
    check.tensor("out", out, BF16, (*x.shape[:2], weight.shape[1]), ANY)
    check.written("x", x, ("out", out))
    check.on_cuda()
    _multiply_expanded(x, weight, weight_scale, out)


def expanded(weight, weight_scale):
    """weight [groups, outputs, inputs] * weight_scale, in float32, rounded once: a new bf16 tensor of the same shape.

    Arguments, errors and graphs are wo_a's.
    """
    check = Call("expanded", "weight", weight)
    linear.check_weight(check, weight, weight_scale, "groups, outputs, inputs")
    check.on_cuda()
    return _expand(weight, weight_scale)


def _multiply_expanded(x, weight, weight_scale, out) -> None:
    with torch.no_grad():  # `out=`; SGLang's warm-up may run with gradients on
        torch.bmm(x.transpose(0, 1), _expand(weight, weight_scale).transpose(1, 2), out=out.transpose(0, 1))


def _expand(weight, weight_scale):
    groups, outputs, inputs = weight.shape
    out = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
    with cuda_tensors.on_device_of(weight):
        extension.load().wo_a_expand(
            weight=weight.data_ptr(),
            weight_stride=weight.stride(1),
            scale=weight_scale.data_ptr(),
            scale_stride_output=weight_scale.stride(1),
            scale_stride_input=weight_scale.stride(2),
            scale_bytes=weight_scale.element_size(),
            out=out.data_ptr(),
            weight_rows=groups * outputs,
            inputs=inputs,
            pdl=True,
            stream=cuda_tensors.current_stream(weight.device.index),
        )
    return out


def _check_rotation(check: Call, x, freqs_cis, positions, few: bool) -> bool:
    """Whether the kernel rotates."""
    if not check.together("freqs_cis and positions", freqs_cis, positions):
        return False
    rows, _, inputs = x.shape
    check.tensor("freqs_cis", freqs_cis, COMPLEX, ("any", ROTATED // 2), CONTIGUOUS, VECTOR)
    check.tensor("positions", positions, POSITIONS, (rows,))
    if inputs % HEAD_INPUTS:
        check.refuse("shape", "x.shape[2]", f"be a multiple of {HEAD_INPUTS} to be rotated", inputs)
    if not few:
        check.refuse("value", "freqs_cis", f"be None above {FP8_ROWS} rows", f"{rows} rows: rotate them first")
    return True


def _rotation(freqs_cis, positions) -> dict[str, int]:
    return {
        "rotation": freqs_cis.data_ptr(),
        "positions": positions.data_ptr(),
        "position_bytes": positions.element_size(),
    }

"""What `takes` says, and sizes that are refused: they are the kernel's own. The rest is in test_checks.py."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.ops import bf16_linear as op
from deepseek_v4_sm120.ops.shared import extension


def tensors(rows=2, inputs=512, outputs=8, dtype=torch.bfloat16):
    return torch.zeros(rows, inputs, dtype=dtype), torch.zeros(outputs, inputs, dtype=dtype)


def wide(rows, columns, extra):
    return torch.zeros(rows, columns + extra, dtype=torch.bfloat16)[:, :columns]


GOOD = tensors()
BAD = {
    "x float32": ((GOOD[0].float(), GOOD[1]), {}, TypeError, "x.dtype must be torch.bfloat16, got torch.float32"),
    "weight float32": ((GOOD[0], GOOD[1].float()), {}, TypeError, "weight.dtype must be torch.bfloat16"),
    "x of 3 dims": ((GOOD[0][None], GOOD[1]), {}, ValueError, "x.shape must be [rows, inputs], got [1, 2, 512]"),
    "no rows": (tensors(rows=0), {}, ValueError, "x must have 1 to 1048576 rows, got 0"),
    "2^20 + 1 rows": ((tensors(rows=1)[0].expand((1 << 20) + 1, 512), GOOD[1]), {}, ValueError, "rows, got 1048577"),
    "inputs": (tensors(inputs=768), {}, ValueError, "x.shape[1] must be a positive multiple of 512, got 768"),
    "outputs": (tensors(outputs=6), {}, ValueError, "weight.shape[0] must be a positive multiple of 4, got 6"),
    "unlike": (
        (GOOD[0], tensors(inputs=1024)[1]),
        {},
        ValueError,
        "weight.shape must be [outputs, 512], got [8, 1024]",
    ),
    "x transposed": ((torch.zeros(512, 512).bfloat16().T[:2], GOOD[1]), {}, ValueError, "x must have strides [a mult"),
    "x row stride": ((wide(2, 512, 4), GOOD[1]), {}, ValueError, "x must have strides [a multiple of 8, 1], got str"),
    "weight stride": ((GOOD[0], wide(8, 512, 2)), {}, ValueError, "weight must have strides [a multiple of 8, 1]"),
    "address": ((wide(2, 520, 0)[:, 1:513], GOOD[1]), {}, ValueError, "x must start on a 16-byte boundary"),
    "out dtype": (GOOD, {"out_dtype": torch.float16}, TypeError, "out_dtype must be one of"),
    "out given": (GOOD, {"out": torch.zeros(2, 8).bfloat16()}, TypeError, "out.dtype must be torch.float32, got"),
    "out shape": (GOOD, {"out": torch.zeros(2, 9)}, ValueError, "out.shape must be [2, 8], got [2, 9]"),
    "on the CPU": (GOOD, {}, RuntimeError, "x.device must be a CUDA device, got cpu"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    arguments, more, error, text = BAD[name]
    with pytest.raises(error) as raised:
        op.bf16_linear(*arguments, **more)
    assert str(raised.value).startswith("bf16_linear: ") and text in str(raised.value)


@pytest.mark.parametrize("name", [n for n in BAD if not n.startswith("o") or n == "outputs"])
def test_takes_says_no_where_the_operator_raises(name):
    arguments = BAD[name][0]
    assert not op.takes(*arguments)


def test_takes_says_yes():
    assert op.takes(*GOOD) and op.takes(*tensors(rows=256, inputs=4096, outputs=64))


def test_limits_are_the_kernels():
    assert extension.load().bf16_linear_limits == (op.MAX_ROWS, op.INPUTS_MULTIPLE, op.OUTPUTS_MULTIPLE)

"""What `takes` says, and sizes that are refused. The rest is in test_checks.py."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.ops import router_topk as op
from deepseek_v4_sm120.ops.shared import extension


def tensors(rows=2, experts=256, dtype=torch.float32):
    return torch.zeros(rows, experts, dtype=dtype), torch.zeros(experts, dtype=dtype)


BAD = {
    "513 experts": (tensors(experts=513), 6, "router_logits must have 1 to 512 experts, got 513"),
    "no expert": (tensors(experts=0), 1, "router_logits"),
    "more than there are": (tensors(experts=4), 5, "topk must be 1 to 4, got 5"),
    "more than 8": (tensors(), 9, "topk must be 1 to 8, got 9"),
    "another bias": ((tensors()[0], tensors(experts=64)[1]), 6, "bias.shape must be [256], got [64]"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_sizes(name):
    given, topk, text = BAD[name]
    with pytest.raises(ValueError) as raised:
        op.router_topk(*given, topk)
    assert str(raised.value).startswith("router_topk: ") and text in str(raised.value)
    assert not op.takes(*given, topk, None)


@pytest.mark.parametrize(
    "experts, topk, dtype", [(1, 1, torch.float32), (8, 8, torch.bfloat16), (512, 8, torch.float32)]
)
def test_takes_says_yes_where_nothing_but_the_device_is_wrong(experts, topk, dtype):
    given = tensors(experts=experts, dtype=dtype)
    assert op.takes(*given, topk, torch.zeros(1, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="CUDA device"):
        op.router_topk(*given, topk)


NUMBERS = torch.zeros(3, 264)
BAD_ROWS = {
    "no multiple of 4 numbers": (NUMBERS[:, :258], "at most 65535 rows of a multiple of 4 numbers"),
    "no number": (NUMBERS[:, :0], "multiple of 4 numbers"),
    "too many rows": (torch.zeros(1, 4).expand(65_536, 4), ""),
    "rows apart by no 16 bytes": (torch.zeros(3, 258)[:, :256], "stride"),
    "no 16 bytes": (NUMBERS[:, 1:257], "x"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_long_rows(name):
    x, text = BAD_ROWS[name]
    with pytest.raises(ValueError) as raised:
        op.row_argmax(x)
    assert str(raised.value).startswith("row_argmax: ") and text in str(raised.value)
    assert not op.takes_row_argmax(x)


def test_long_rows_that_it_takes():
    for x in (NUMBERS, NUMBERS[:1], NUMBERS[:, :256], NUMBERS[:, 4:260]):
        assert op.takes_row_argmax(x)
        with pytest.raises(RuntimeError, match="CUDA device"):
            op.row_argmax(x)
    assert not op.takes_row_argmax(NUMBERS.double()) and not op.takes_row_argmax(NUMBERS[0])
    assert not op.takes_row_argmax(NUMBERS[:0])
    assert extension.load().row_argmax_numbers == op.PART_NUMBERS

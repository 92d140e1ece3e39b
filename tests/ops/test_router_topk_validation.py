"""What `takes` says, and sizes that are refused. The rest is in test_checks.py."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.ops import router_topk as op


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

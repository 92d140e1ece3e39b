"""The two formulations of the reference against each other, and by hand."""

from __future__ import annotations

import math

import pytest
import torch

from deepseek_v4_sm120.reference import router_topk as reference
from deepseek_v4_sm120.specs.router_topk import make_inputs


@pytest.mark.parametrize("kind", ["normal", "ties", "low", "wide"])
@pytest.mark.parametrize("rows, experts, topk", [(1, 8, 8), (5, 64, 6), (3, 33, 2)])
def test_two_formulations_agree(rows, experts, topk, kind):
    inputs = make_inputs(rows, torch.Generator().manual_seed(rows), experts=experts, kind=kind)
    one = reference.router_topk(inputs.logits, inputs.bias, topk)
    other = reference.router_topk_by_numbers(inputs.logits, inputs.bias, topk)
    assert torch.equal(one[1], other[1])
    torch.testing.assert_close(one[0], other[0], rtol=1e-12, atol=0)


def test_by_hand():
    """The bias chooses, and is in no weight; of equal ones the lowest id is first; NaN is behind all finite ones."""
    nan, infinity = float("nan"), float("inf")
    logits = torch.tensor([[0.0, 0.0, 1.0, 0.0], [nan, 0.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 9.0, 0.0, -infinity])
    weights, ids = reference.router_topk(logits, bias, 3, renormalize=False, scale=2.0)
    zero, one = 2 * math.sqrt(math.log(2)), 2 * math.sqrt(math.log1p(math.e))
    assert ids.tolist() == [[1, 2, 0], [1, 2, 0]]
    torch.testing.assert_close(weights[0], torch.tensor([zero, one, zero], dtype=torch.float64))
    padded = reference.router_topk(logits, bias, 2, real_rows=torch.tensor([1]))
    assert padded[1].tolist() == [[1, 2], [-1, -1]] and padded[0][1].tolist() == [0.0, 0.0]
    assert padded[0][0].sum() == 1

"""The two formulations of the reference against each other."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.reference.bf16_linear import bf16_linear, bf16_linear_by_sums


@pytest.mark.parametrize("rows, inputs, outputs", [(1, 512, 4), (3, 512, 12), (2, 1024, 8)])
def test_two_formulations_agree(rows, inputs, outputs):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    torch.testing.assert_close(bf16_linear(x, weight), bf16_linear_by_sums(x, weight), rtol=1e-12, atol=1e-9)


def test_by_hand():
    x = torch.zeros(1, 512)
    x[0, 3], x[0, 511] = 2.0, -1.0
    weight = torch.zeros(4, 512)
    weight[1, 3], weight[2, 511], weight[3, 0] = 0.5, 4.0, 9.0
    assert bf16_linear(x.bfloat16(), weight.bfloat16()).tolist() == [[0.0, 1.0, -4.0, 0.0]]

"""The references of fp8_linear against each other, against numbers by hand, and the inputs they are fed. CPU."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.reference import fp8_linear as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.specs.bounds import FP8_LINEAR, FP8_LINEAR_WIDE
from deepseek_v4_sm120.specs.fp8_linear import make_weight, make_x, matrices


def _inputs(rows, outputs, inputs, *, groups=1, ue8m0=False):
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight, scale = make_weight(groups, outputs, inputs, generator, ue8m0=ue8m0)
    return make_x(rows, groups, inputs, generator), weight, scale


@pytest.mark.parametrize("ue8m0", [False, True])
def test_two_formulations(ue8m0):
    x, weight, scale = _inputs(5, 384, 640, ue8m0=ue8m0)
    one = reference.fp8_linear(x[:, 0], weight[0], scale[0])
    assert relative_error(reference.fp8_linear_by_bits(x[:, 0], weight[0], scale[0]), one) < 1e-12
    assert float(one.abs().max()) > 0


def test_groups_are_linears_side_by_side():
    x, weight, scale = _inputs(3, 128, 256, groups=3)
    together = reference.fp8_grouped_linear(x, weight, scale)
    assert together.shape == (3, 3, 128)
    assert torch.equal(together[:, 2], reference.fp8_linear(x[:, 2], weight[2], scale[2]))


def test_numbers_by_hand():
    codes = torch.zeros(128, 128, dtype=torch.uint8)
    codes[0, :4] = torch.tensor([0x01, 0x7E, 0xB8, 0x38])  # 2^-9, 448, -1, 1
    codes[1, 0] = 0x7F
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    x[0, :4] = torch.tensor([512.0, 2.0, 3.0, 0.5])
    for scale in (torch.full((1, 1), 0.25), torch.full((1, 1), 125, dtype=torch.uint8)):
        for formulation in (reference.fp8_linear, reference.fp8_linear_by_bits):
            found = formulation(x, codes.view(torch.float8_e4m3fn), scale)
            assert float(found[0, 0]) == (1 + 896 - 3 + 0.5) * 0.25 and bool(found[0, 1].isnan())


@pytest.mark.parametrize("power_of_two", [False, True])
def test_what_fp8_activations_cost(power_of_two):
    """The shadow's bound has room for stock's rounding, and not for twice as much."""
    x, weight, scale = _inputs(8, 256, 2048)
    x = x[:, 0]
    rounded = reference.quantized_activations(x, power_of_two=power_of_two)
    truth = reference.fp8_linear(x, weight[0], scale[0])
    error = relative_error(rounded @ reference.dequantized(weight[0], scale[0]).T, truth)
    assert 0.015 < error < FP8_LINEAR.shadow < 3 * error
    assert relative_error(truth.to(torch.bfloat16), truth) < FP8_LINEAR_WIDE


def test_the_matrices_are_the_models():
    assert sum(m.bytes for m in matrices(1)) == 1536 * 4096 + 3 * 33554432 + 8192 * 1024 + 3 * 2048 * 4096
    assert {m.groups for m in matrices(4)} == {1, 2}
    codes = make_weight(1, 128, 128, torch.Generator().manual_seed(1))[0].view(torch.uint8)
    assert not bool(((codes & 0x7F) == 0x7F).any()) and codes.unique().numel() > 240


def test_codes_are_decoded_as_torch_converts_them():
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128).view(torch.float8_e4m3fn)
    for weight in (codes, codes.T):
        assert torch.equal(reference.decoded(weight).nan_to_num(9e9), weight.double().nan_to_num(9e9))

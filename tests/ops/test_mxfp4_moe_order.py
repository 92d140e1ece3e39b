"""What the order of mxfp4_moe's sums relies on (mxfp4_moe_order.py): sums of 32 products are exact. CPU only."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.reference.mxfp4_moe import GROUP, dequantize
from tests.ops.mxfp4_moe_order import SLICES, prepared, product


def hostile(inputs: int) -> torch.Tensor:
    """Rows of bf16: normal, heavy tails, outliers, tiny beside huge, subnormal, all bits set, random bits."""
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn((8, inputs), generator=generator)
    x[1] = x[1] ** 5
    x[2, ::77] *= 2.0**12
    x[3, ::2] *= 2.0**-20
    x[4] *= 2.0**-126
    x[5] = 255 * 2.0**7
    x = x.bfloat16()
    bits = torch.randint(-(2**15), 2**15, (2, inputs), generator=generator).to(torch.int16)
    x[6:] = torch.where((bits & 0x7F80) == 0x7F80, 0, bits).view(torch.bfloat16)
    return x


@pytest.mark.parametrize("inputs", [256, 1024, 4096])
def test_what_is_multiplied_is_f16_and_near(inputs):
    x = hostile(inputs)
    values, power = prepared(x)
    assert torch.equal(values, values.half().double())
    true = x.double().unflatten(1, (SLICES[inputs], -1))
    kept = values * (power.double() * 2.0**-14)[:, :, None]
    greatest = true.unflatten(2, (-1, GROUP)).abs().amax(dim=3).repeat_interleave(GROUP, dim=2)
    of_slice = true.abs().amax(dim=2, keepdim=True)
    # half a step of the group's grid, or of the slice's
    assert bool(((kept - true).abs() <= torch.maximum(greatest * 2.0**-15, of_slice * 2.0**-39)).all())
    exact = true.abs() >= torch.maximum(greatest * 2.0**-7, of_slice * 2.0**-31)
    assert torch.equal(kept[exact], true[exact])


@pytest.mark.parametrize("codes", ["random", "greatest"])
def test_sums_of_a_group_are_exact_in_any_order(codes):
    """As float32 has 24 bits: in the worst case, too, every number 255 * 2^7 grids and every code 6."""
    generator = torch.Generator().manual_seed(1)
    x = hostile(1024)
    x[7] = x[7].abs()
    groups = prepared(x)[0].flatten(1).unflatten(1, (-1, GROUP))
    weights = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6]).double()
    drawn = weights[torch.randint(7, groups.shape, generator=generator)] if codes == "random" else weights[-1]
    products = groups * drawn * 2.0**-14
    exact = products.sum(dim=2)
    assert torch.equal(exact, exact.float().double())
    for _ in range(5):
        order = torch.randperm(GROUP, generator=generator)
        total = torch.zeros(groups.shape[:2])
        for k in order:
            total = total + products[:, :, k].float()
        assert torch.equal(total.double(), exact)


@pytest.mark.parametrize("inputs", [256, 384, 2048, 4096])
def test_the_product_is_the_definition_s(inputs):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn((5, inputs), generator=generator).bfloat16()
    packed = torch.randint(0, 256, (24, inputs // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(118, 125, (24, inputs // GROUP), generator=generator, dtype=torch.uint8)
    assert relative_error(product(x, packed, scale), x.double() @ dequantize(packed, scale).T) < 1e-4

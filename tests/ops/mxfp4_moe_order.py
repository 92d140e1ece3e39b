"""The order of the sums of mxfp4_moe for few rows, and for many with `reproducible`, in plain torch: the contract of
docs/notes/mxfp4_moe.md, to the bit. The sums of 32 products are exact, so float64 has them; the rest is float32."""

from __future__ import annotations

import torch

from deepseek_v4_sm120.reference.mxfp4_moe import GROUP, decode_e2m1

STEP = 128  # inputs: four groups, whose sums stay apart over a slice
SLICES = {4096: 8, 7168: 14, 3072: 8, 2048: 4, 1536: 4, 1024: 2, 768: 2, 512: 1, 384: 1, 256: 1}  # of so many inputs


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """float64, exact."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def exponents(x: torch.Tensor) -> torch.Tensor:
    """The exponent fields of bf16."""
    return (x.view(torch.int16).int() >> 7) & 0xFF


def prepared(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 [n, inputs] -> what is multiplied, float64 that f16 holds [n, slices, inputs of one], and the power of two
    that it and the codes lack, float32 [n, slices]. For finite numbers."""
    sliced = x.unflatten(1, (SLICES[x.shape[1]], -1))
    fields = exponents(sliced)
    of_slice = fields.amax(dim=2).clamp_min(15)
    of_group = fields.unflatten(2, (-1, GROUP)).amax(dim=3)
    grid = power_of_two((of_group - of_slice[:, :, None]).clamp_min(-24)).repeat_interleave(GROUP, dim=2)
    lifted = sliced.double() * power_of_two(141 - of_slice[:, :, None])
    return torch.round(lifted / grid) * grid, power_of_two(of_slice - 127).float()


def product(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x bf16 [n, inputs] times one expert's uint8 [outputs, inputs / 2] and [outputs, inputs / 32] -> float32."""
    values, power = prepared(x)
    slices = values.shape[1]
    codes = (decode_e2m1(packed) * 2.0**-14).unflatten(1, (slices, -1, 4, GROUP))
    factors = (scale.int() << 23).view(torch.float32).unflatten(1, (slices, -1, 4))
    groups = values.unflatten(2, (-1, 4, GROUP))
    total = None
    for s in range(slices):
        apart = torch.zeros((len(x), len(packed), 4), device=x.device)
        for step in range(groups.shape[2]):
            exact = torch.einsum("ntk,otk->not", groups[:, s, step], codes[:, s, step])
            # fma: the sum of two float32 in float64, rounded again, is rounded once
            apart = (exact * factors[:, s, step].double() + apart.double()).float()
        sums = (apart[..., 0] + apart[..., 1]) + (apart[..., 2] + apart[..., 3])
        part = sums * power[:, s, None]
        total = part if total is None else total + part
    return total

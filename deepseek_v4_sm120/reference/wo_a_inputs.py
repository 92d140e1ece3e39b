"""Random inputs of wo_a: the attention's output with its positions, and the table of rotations."""

from __future__ import annotations

import torch

from deepseek_v4_sm120.reference.fp8_linear_inputs import make_weight, make_x
from deepseek_v4_sm120.reference.wo_a import ROTATED

OUTPUTS, INPUTS = 1024, 4096  # of a group of 8 heads; a rank has 8 / TP groups


def make_freqs_cis(positions: int, device, base: float = 10000.0) -> torch.Tensor:
    """[positions, 32] complex64: e^(i p base^(-j / 32))."""
    powers = torch.arange(ROTATED // 2, dtype=torch.float64, device=device) / (ROTATED // 2)
    angles = torch.arange(positions, dtype=torch.float64, device=device)[:, None] * base**-powers
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def make_wo_a(
    rows: int, groups: int, generator: torch.Generator, *, outputs=OUTPUTS, inputs=INPUTS, table=5000, **options
):
    """(x, weight, scale, freqs_cis, positions), the positions in no order; options: make_weight's."""
    device = generator.device
    weight, scale = make_weight(groups, outputs, inputs, generator, **options)
    positions = torch.randint(0, table, (rows,), generator=generator, device=device)
    return make_x(rows, groups, inputs, generator), weight, scale, make_freqs_cis(table, device), positions

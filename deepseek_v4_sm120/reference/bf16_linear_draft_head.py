"""Truth for ops/bf16_linear_draft_head.py: a head's logits by its copy in INT4, each part's best by the head itself."""

from __future__ import annotations

import torch

from deepseek_v4_sm120.ops.bf16_linear_draft_head import BEST, PART_OUTPUTS, SCALE_INPUTS, TILE_OUTPUTS, UNIT_INPUTS


def dequantised(copy: torch.Tensor) -> torch.Tensor:
    """float64 [outputs, inputs], number by number from where the layout says that each lies."""
    tiles, units, _ = copy.shape
    output = torch.arange(tiles * TILE_OUTPUTS, device=copy.device)[:, None]
    inputs = torch.arange(units * UNIT_INPUTS, device=copy.device)[None]
    tile, row, unit, at = output // TILE_OUTPUTS, output % TILE_OUTPUTS, inputs // UNIT_INPUTS, inputs % UNIT_INPUTS
    group, within = at // SCALE_INPUTS, at % SCALE_INPUTS
    # a lane's 16 bytes: 8 lanes of rows modulo 8, in them 4 of 16 inputs each; four words of four inputs and two rows
    lane, word, which = row % 8 * 4 + within // 16, within % 16 // 4, within % 4
    first = group * 512 + lane * 16 + word * 4
    words = sum(copy[tile, unit, first + byte].long() << 8 * byte for byte in range(4))
    bit = (6 - which // 2 * 4 + which % 2 * 16 + row // 8 * 8) % 32  # of a code that may go on at bit 0
    code = (words >> bit | words << 32 - bit) & 15
    scales = copy[..., TILE_OUTPUTS * UNIT_INPUTS // 2 :].contiguous().view(torch.bfloat16)
    return (code - 8).double() * scales[tile, unit, row % 8 * 8 + group * 2 + row // 8].double()


def scores(x: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """float64 [rows, outputs], by the copy alone."""
    return x.double() @ dequantised(copy).T


def draft_head(x: torch.Tensor, copy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float64 [rows, outputs]."""
    logits = scores(x, copy)
    for part in logits.split(PART_OUTPUTS, dim=1):
        part.masked_fill_(chosen(part), torch.nan)
    return torch.where(logits.isnan(), x.double() @ weight.double().T, logits)


def chosen(part: torch.Tensor) -> torch.Tensor:
    """bool, of a part's scores: the best of each row, the first of equals."""
    best = part.sort(dim=1, descending=True, stable=True).indices[:, :BEST]
    return torch.zeros_like(part, dtype=torch.bool).scatter_(1, best, True)

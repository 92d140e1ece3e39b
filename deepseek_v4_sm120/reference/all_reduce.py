"""Sums and gathers between cards in plain torch: the specification of ops/all_reduce.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def all_reduce(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """bf16 terms of the same shape, one a rank, in the order of ranks: added in float32, rounded to bf16 once."""
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    return total.to(torch.bfloat16)


def all_gather(sent: Sequence[torch.Tensor]) -> torch.Tensor:
    """[rows, columns] of each rank side by side, in the order of ranks. A word of all bits set, a NaN or two, is then
    another NaN."""
    words = torch.cat(list(sent), 1).view(torch.int32)
    return torch.where(words == -1, 0x7FFF7FFF, words).view(sent[0].dtype)

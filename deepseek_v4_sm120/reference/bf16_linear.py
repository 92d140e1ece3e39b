"""Truth for ops/bf16_linear.py: out[row, n] = sum over k of x[row, k] W[n, k]. Two formulations."""

from __future__ import annotations

import math

import torch


def bf16_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float64 [rows, outputs]."""
    return x.double() @ weight.double().T


def bf16_linear_by_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same by exactly rounded sums of exact products, element by element: for small sizes."""
    rows = [[math.fsum((a.double() * b.double()).tolist()) for b in weight] for a in x]
    return torch.tensor(rows, dtype=torch.float64, device=x.device)

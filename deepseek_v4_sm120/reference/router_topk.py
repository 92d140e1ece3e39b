"""Truth for ops/router_topk.py: a row's experts by sqrt(softplus(logit)) + bias. Two formulations."""

from __future__ import annotations

import math

import torch

NAN_RANK = -1e30  # of a NaN among the ranked numbers


def ranked(logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, what they are ranked by), float64 [rows, experts]."""
    x = logits.double()
    scores = torch.logaddexp(x, torch.zeros_like(x)).sqrt()
    by = scores + bias.double()
    return scores, torch.where(by.isnan(), NAN_RANK, by)


def weights_of(scores: torch.Tensor, ids: torch.Tensor, *, renormalize=True, scale=1.0) -> torch.Tensor:
    """Float64 [rows, topk] of experts that are chosen already."""
    weights = scores.gather(1, ids.long())
    if renormalize:
        total = weights.sum(dim=1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1.0)
    return weights * scale


def router_topk(logits, bias, topk, *, renormalize=True, scale=1.0, real_rows=None):
    """(weights float64, ids int64), both [rows, topk]."""
    scores, by = ranked(logits, bias)
    ids = by.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    weights = weights_of(scores, ids, renormalize=renormalize, scale=scale)
    if real_rows is not None:
        padding = torch.arange(len(ids), device=ids.device)[:, None] >= real_rows
        weights, ids = weights.masked_fill(padding, 0.0), ids.masked_fill(padding, -1)
    return weights, ids


def row_argmax(x: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: where the greatest number of each is, or its first NaN."""
    missing = x.isnan()
    greatest = x.masked_fill(missing, -torch.inf).amax(1, keepdim=True)
    is_it = torch.where(missing.any(1, keepdim=True), missing, x == greatest)
    return torch.where(is_it, torch.arange(x.shape[1], device=x.device), x.shape[1]).amin(1)


def router_topk_by_numbers(logits, bias, topk):
    """The same, renormalised, number by number: for small sizes and finite logits."""
    weights, ids = [], []
    for row in logits.tolist():
        scores = [math.sqrt(max(x, 0.0) + math.log1p(math.exp(-abs(x)))) for x in row]
        order = sorted(range(len(row)), key=lambda e: (-(scores[e] + bias[e].item()), e))[:topk]
        total = math.fsum(scores[e] for e in order)
        weights.append([scores[e] / total for e in order])
        ids.append(order)
    return torch.tensor(weights, dtype=torch.float64), torch.tensor(ids)

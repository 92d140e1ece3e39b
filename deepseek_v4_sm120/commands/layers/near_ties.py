"""Rows whose last expert is chosen by rounding: what the next one in its place makes of them.

A router's two scores that are as near to each other as their rounding to bf16 are a tie: an engine may take either. Its
row is another one then, and so are the streams behind it, in every later layer. So both are computed, and the one that
the engine is nearer to is the model's: neither an error, nor of any fault. What neither explains is off as ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_v4_sm120.reference import model
from deepseek_v4_sm120.reference.model import Rules

NEAR = 4e-3  # of a router's scores: two logits of 4 rounded to bf16 change their scores' difference by so much


@dataclass
class Other:
    """Of some rows int64 [n] of a sublayer: its output with the next expert, exact and as the coarsest right engine
    rounds, float64 [n, hidden]."""

    rows: torch.Tensor
    truth: torch.Tensor
    rounded: torch.Tensor

    def take(self, made, seen: torch.Tensor, streams, entering) -> None:
        """Into `made` go those rows whose next sublayer's inputs `seen` it is nearer to; streams: of all rows what
        `model.behind` is given with an output."""
        at, given = [one[self.rows] for one in streams], seen[self.rows].double()
        own, other = (entering(model.behind(f, *at)) for f in (made.truth[self.rows], self.truth))
        taken = (given - other).norm(dim=1) < (given - own).norm(dim=1)
        rows = self.rows[taken]
        made.truth[rows], made.rounded[rows] = self.truth[taken], self.rounded[taken]
        for faulty in made.faulty.values():  # a fault would have made another choice of its own
            faulty[rows] = self.truth[taken]


def next_experts(config, weights, x, tokens, rows, chosen, shared) -> Other:
    """Of the given rows: x [n, hidden], chosen float64 [2, n, topk, hidden], exact and rounded, what their experts make
    before their shares; shared [2, n, hidden]."""
    ids, shares, _ = model.routed(config, weights, x, tokens, hashed=False, rules=Rules(next_expert=True))
    last = model.outputs(weights, x, ids[:, -1:], config.swiglu_limit, False, True)
    every = torch.cat([chosen[:, :, :-1], last], dim=2)
    return Other(rows, *(torch.einsum("erkh,rk->erh", every, shares) + shared))

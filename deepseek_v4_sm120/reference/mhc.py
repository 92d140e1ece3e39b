"""The hyper-connections in float64, written from the specification, and a second time as whole products.

A token's residual is four streams X_j of `hidden` values. From the streams, flattened to x of 4 * hidden:

    m = (fn x) / sqrt(mean(x^2) + rms_eps)                                    24 mixes
    pre = sigmoid(m[0:4] scale[0] + base[0:4]) + eps                          how much of each stream the sublayer reads
    post = post_scale * sigmoid(m[4:8] scale[1] + base[4:8])                  how much of its output each stream gets
    C = softmax_rows(m[8:24] scale[2] + base[8:24]) + eps                     [4 old, 4 new], then made nearly doubly
                                                                              stochastic: Sinkhorn, ending on columns
    y = sum_j pre_j X_j, then the sublayer's RMSNorm

and after the sublayer, whose output is f: X'_i = post_i f + sum_j C[j][i] X_j.

Roundings that are part of the operator: X' and y are bf16 values. What reads X' reads the rounded one. The norm's sum
of squares is that of the unrounded y; what it multiplies is y rounded (as SGLang's fused kernel does). Where f is a sum
between cards, it is a bf16 value, too.
Source: DeepSeek's inference/model.py (Block.hc_pre, hc_post, hc_head) and config (hc_mult 4, 20 iterations, eps 1e-6).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

STREAMS = 4
MIXES = STREAMS * (2 + STREAMS)
EPS = 1e-6
POST_SCALE = 2.0
SINKHORN_ITERS = 20


@dataclass(frozen=True)
class Boundary:
    """What a boundary gives. Streams and y are float64 tensors of bf16 values."""

    streams: torch.Tensor  # [rows, 4, hidden]
    post: torch.Tensor  # [rows, 4] float64
    comb: torch.Tensor  # [rows, 4, 4] float64
    y: torch.Tensor  # [rows, hidden]


def bf16(values: torch.Tensor) -> torch.Tensor:
    """Rounded to bf16, in float64."""
    return values.float().to(torch.bfloat16).double()


def summed(terms) -> torch.Tensor:
    """The f [rows, hidden] of a boundary that adds the terms of all cards: rounded, in float64."""
    return bf16(sum(term.double() for term in terms))


def mhc_post(f, streams, post, comb) -> torch.Tensor:
    """X' before its rounding: f [rows, hidden], streams [rows, 4, hidden], post [rows, 4], comb [rows, old, new]."""
    f, streams, post, comb = (value.double() for value in (f, streams, post, comb))
    new = torch.empty_like(streams)
    for i in range(STREAMS):
        new[:, i] = post[:, i, None] * f
        for j in range(STREAMS):
            new[:, i] += comb[:, j, i, None] * streams[:, j]
    return new


def mixes(streams, fn, rms_eps=EPS) -> torch.Tensor:
    x = streams.double().flatten(1)
    return (x @ fn.double().T) / (x.square().mean(1, keepdim=True) + rms_eps).sqrt()


def sinkhorn(logits, iters=SINKHORN_ITERS, eps=EPS) -> torch.Tensor:
    """[rows, 4, 4] logits -> C."""
    c = torch.softmax(logits, dim=2) + eps
    c = c / (c.sum(1, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(2, keepdim=True) + eps)
        c = c / (c.sum(1, keepdim=True) + eps)
    return c


def collapse(streams, pre, norm_weight=None, norm_eps=EPS) -> torch.Tensor:
    """y before its last rounding."""
    y = sum(pre[:, j, None] * streams[:, j].double() for j in range(STREAMS))
    if norm_weight is None:
        return y
    root = (y.square().mean(1, keepdim=True) + norm_eps).sqrt()
    return bf16(y) / root * norm_weight.double()


def mhc_pre(streams, fn, scale, base, *, norm_weight=None, norm_eps=EPS, rms_eps=EPS, eps=EPS, iters=SINKHORN_ITERS):
    """(y, post, comb) of the streams; y rounded to bf16."""
    m, scale, base = mixes(streams, fn, rms_eps), scale.double(), base.double()
    pre = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + eps
    post = POST_SCALE * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    comb = sinkhorn((m[:, 8:] * scale[2] + base[8:]).view(-1, STREAMS, STREAMS), iters, eps)
    return bf16(collapse(streams, pre, norm_weight, norm_eps)), post, comb


def mhc(f, streams, post, comb, fn, scale, base, **options) -> Boundary:
    """A whole boundary; options as mhc_pre's."""
    new = bf16(mhc_post(f, streams, post, comb))
    y, new_post, new_comb = mhc_pre(new, fn, scale, base, **options)
    return Boundary(new, new_post, new_comb, y)


def mhc_head(streams, fn, scale, base, *, norm_weight=None, norm_eps=EPS, rms_eps=EPS, eps=EPS) -> torch.Tensor:
    """y of the head: fn [4, 4 * hidden], scale [1], base [4]; no post, no comb."""
    pre = torch.sigmoid(mixes(streams, fn, rms_eps) * scale.double() + base.double()) + eps
    return bf16(collapse(streams, pre, norm_weight, norm_eps))


# ---- the same a second time: einsum, explicit exponentials, scalings of rows and columns instead of divided matrices


def mhc_by_products(
    f, streams, post, comb, fn, scale, base, *, norm_weight=None, norm_eps=EPS, rms_eps=EPS
) -> Boundary:
    old = streams.double()
    new = torch.einsum("ri,rc->ric", post.double(), f.double()) + torch.einsum("rji,rjc->ric", comb.double(), old)
    new = bf16(new)
    weights = fn.double().view(MIXES, STREAMS, -1)
    power = torch.einsum("rjc,rjc->r", new, new) / (new.shape[1] * new.shape[2])
    m = torch.einsum("ojc,rjc->ro", weights, new) * (power + rms_eps).rsqrt()[:, None]
    factors = torch.tensor([0] * 4 + [1] * 4 + [2] * 16, device=m.device)
    z = m * scale.double()[factors] + base.double()
    pre = 1 / (1 + (-z[:, :4]).exp()) + EPS
    exponentials = (z[:, 8:] - z[:, 8:].view(-1, 4, 4).amax(2).repeat_interleave(4, 1)).exp().view(-1, 4, 4)
    start = exponentials / exponentials.sum(2, keepdim=True) + EPS
    row, column = torch.ones_like(start[:, :, 0]), torch.ones_like(start[:, 0])
    for turn in range(SINKHORN_ITERS):
        if turn:
            row = row / (row * torch.einsum("rij,rj->ri", start, column) + EPS)
        column = column / (column * torch.einsum("rij,ri->rj", start, row) + EPS)
    y = torch.einsum("rj,rjc->rc", pre, new)
    if norm_weight is not None:
        y = bf16(y) * (y.square().mean(1) + norm_eps).rsqrt()[:, None] * norm_weight.double()
    return Boundary(new, POST_SCALE / (1 + (-z[:, 4:8]).exp()), row[:, :, None] * start * column[:, None], bf16(y))

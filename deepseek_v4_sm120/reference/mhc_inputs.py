"""Inputs of a boundary, as DeepSeek-V4's weights and activations are in size; hostile ones by options."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_v4_sm120.reference.mhc import MIXES, STREAMS, sinkhorn

HIDDEN = 4096


@dataclass(frozen=True)
class Shape:
    """`x_scale`: of the streams and of the sublayer's output. `mix_scale`: of the logits behind sigmoid and softmax."""

    rows: int
    hidden: int = HIDDEN
    x_scale: float = 1.0
    mix_scale: float = 1.0


@dataclass
class Inputs:
    f: torch.Tensor
    streams: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    norm_weight: torch.Tensor
    head_fn: torch.Tensor
    head_scale: torch.Tensor
    head_base: torch.Tensor

    def boundary(self) -> dict:
        names = ("f", "streams", "post", "comb", "fn", "scale", "base", "norm_weight")
        return {name: getattr(self, name) for name in names}

    def pre(self) -> dict:
        return {name: getattr(self, name) for name in ("streams", "fn", "scale", "base", "norm_weight")}

    def post_only(self) -> dict:
        return {name: getattr(self, name) for name in ("f", "streams", "post", "comb")}

    def head(self) -> dict:
        return {"streams": self.streams, "fn": self.head_fn, "scale": self.head_scale, "base": self.head_base}


def make_inputs(shape: Shape, seed: int = 0, device: str | torch.device = "cuda") -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size, scale=1.0):
        return torch.randn(size, generator=generator, device=device) * scale

    rows, hidden = shape.rows, shape.hidden
    # the streams share a part, as a residual's copies do, so that their sums do not cancel
    common = normal(rows, 1, hidden)
    streams = (common + 0.5 * normal(rows, STREAMS, hidden)) * shape.x_scale
    width = (STREAMS * hidden) ** -0.5
    return Inputs(
        f=normal(rows, hidden, scale=shape.x_scale).to(torch.bfloat16),
        streams=streams.to(torch.bfloat16),
        post=2 * torch.sigmoid(normal(rows, STREAMS)),
        comb=sinkhorn(normal(rows, STREAMS, STREAMS).double()).float(),
        fn=normal(MIXES, STREAMS * hidden, scale=width),
        scale=(1.0 + 0.2 * normal(3)) * shape.mix_scale,
        base=normal(MIXES),
        norm_weight=(1.0 + 0.1 * normal(hidden)).to(torch.bfloat16),
        head_fn=normal(STREAMS, STREAMS * hidden, scale=width),
        head_scale=(1.0 + 0.2 * normal(1)) * shape.mix_scale,
        head_base=normal(STREAMS),
    )

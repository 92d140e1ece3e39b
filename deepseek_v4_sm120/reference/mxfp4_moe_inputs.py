"""Inputs of mxfp4_moe as production makes them, and hostile ones: generated on the tensor's own device.

Experts that no id names are filled with 0xFF: their scales are NaN, so that whoever reads them shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deepseek_v4_sm120.reference.mxfp4_moe import GROUP, local_experts

TOPK = 6


@dataclass(frozen=True)
class Shape:
    """One call. `ids`: uniform (distinct experts per row), one (all rows, all slots: the same expert), edges (experts
    with 1, 7, 8, 9, 16, 17 ... rows), few (uniform over 4 experts, repeated within a row)."""

    rows: int
    hidden: int = 4096
    inter: int = 2048  # of this rank
    experts: int = 256  # local ones
    ids: str = "uniform"
    masked: float = 0.0  # share of ids replaced by -1
    first_expert: int = 0
    all_experts: int | None = None  # ids are drawn from so many; None: the local ones
    mapped: bool = False  # local experts are named through expert_map
    routed_scaling: float = 1.0
    swiglu_limit: float | None = 10.0
    up_first: bool = False
    topk: int = TOPK
    wide_scales: bool = False  # scale bytes over a wide range


@dataclass
class Inputs:
    """Arguments of ops.mxfp4_moe; `arguments()` passes them on."""

    hidden: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    routed_scaling: float = 1.0
    swiglu_limit: float | None = 10.0
    first_expert: int = 0
    expert_map: torch.Tensor | None = None
    up_first: bool = False
    shape: Shape | None = field(default=None, repr=False)

    def arguments(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "shape"}


def routed_ids(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """[rows, topk] int32 ids as the router would write them."""
    device, count = generator.device, shape.all_experts or shape.experts
    pairs = shape.rows * shape.topk
    if shape.ids == "one":
        ids = torch.full((shape.rows, shape.topk), shape.first_expert + shape.experts - 1, device=device)
    elif shape.ids == "edges":
        sizes = [1, 7, 8, 9, 16, 17, 1, 15, 31, 32, 33, 63, 64, 65]
        runs = [torch.full((size,), i % count, device=device) for i, size in enumerate(sizes)]
        while sum(run.numel() for run in runs) < pairs:
            runs.append(torch.full((5,), len(runs) % count, device=device))
        ids = torch.cat(runs)[:pairs]
        ids = ids[torch.randperm(pairs, generator=generator, device=device)].view(shape.rows, shape.topk)
    elif shape.ids == "few":
        ids = torch.randint(0, min(4, count), (shape.rows, shape.topk), generator=generator, device=device)
    else:
        keys = torch.rand((shape.rows, count), generator=generator, device=device)
        ids = keys.argsort(dim=1)[:, : shape.topk]
    if shape.masked:
        draw = torch.rand(ids.shape, generator=generator, device=device)
        ids = torch.where(draw < shape.masked, -1, ids)
    return ids.to(torch.int32)


def routed_weights(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """[rows, topk] float32, positive, a row's sum is 1."""
    weights = torch.rand((shape.rows, shape.topk), generator=generator, device=generator.device) + 0.1
    return weights / weights.sum(dim=1, keepdim=True)


def _bytes(size: tuple[int, ...], low: int, high: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high + 1, size, generator=generator, device=generator.device, dtype=torch.uint8)


def _scales(experts: int, outputs: int, inputs: int, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Such that an output's standard deviation is 1.5 to 6 for inputs of 1: the clamp at 10 is met, not ruled by."""
    centre = 127 - round(torch.tensor(inputs * 8.5 / 9.0).log2().item() / 2)
    spread = 24 if shape.wide_scales else 1
    return _bytes((experts, outputs, inputs // GROUP), centre - spread, centre + 1, generator)


def make_inputs(shape: Shape, *, seed: int = 0, device="cuda") -> Inputs:
    """Random inputs of a shape; the same seed gives the same inputs on the same device type."""
    generator = torch.Generator(device=device).manual_seed(seed)
    ids = routed_ids(shape, generator)
    expert_map = None
    if shape.mapped:
        count = shape.all_experts or shape.experts
        expert_map = torch.full((count,), -1, dtype=torch.int32, device=device)
        chosen = torch.randperm(count, generator=generator, device=device)[: shape.experts]
        expert_map[chosen] = torch.arange(shape.experts, dtype=torch.int32, device=device)
    inter, hidden = shape.inter, shape.hidden
    inputs = Inputs(
        hidden=torch.randn((shape.rows, hidden), generator=generator, device=device).to(torch.bfloat16),
        topk_ids=ids,
        topk_weights=routed_weights(shape, generator),
        w13=_bytes((shape.experts, 2 * inter, hidden // 2), 0, 255, generator),
        w13_scale=_scales(shape.experts, 2 * inter, hidden, shape, generator),
        w2=_bytes((shape.experts, hidden, inter // 2), 0, 255, generator),
        w2_scale=_scales(shape.experts, hidden, inter, shape, generator),
        routed_scaling=shape.routed_scaling,
        swiglu_limit=shape.swiglu_limit,
        first_expert=shape.first_expert,
        expert_map=expert_map,
        up_first=shape.up_first,
        shape=shape,
    )
    local = local_experts(ids, shape.experts, first_expert=shape.first_expert, expert_map=expert_map)
    unread = torch.ones(shape.experts, dtype=torch.bool, device=device)
    unread[local[local >= 0]] = False
    for weights in (inputs.w13, inputs.w13_scale, inputs.w2, inputs.w2_scale):
        weights[unread] = 0xFF
    return inputs

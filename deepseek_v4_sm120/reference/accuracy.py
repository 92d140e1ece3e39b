"""How far a result is from the truth: relative L2 error, of all and of blocks, and tolerances element by element."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """An element fails when it violates both `absolute` and `relative`; the whole fails above `cosine`."""

    absolute: float
    relative: float
    cosine: float | None = None


def relative_error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """||ours - truth|| / ||truth|| in float64; 0 for two zero tensors, inf where truth is zero or not all is finite."""
    difference = float((ours.double() - truth.double()).norm())
    norm = float(truth.double().norm())
    if not math.isfinite(difference):
        return float("inf")
    if norm == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / norm


BLOCK = 128  # numbers of a row, a head or a tile of outputs, that are judged by themselves
BLOCKS_COUNT = 1 / 3  # a block's error, in that of all: of 128 numbers rounded at random it is up to 1.6 times as much
SMALL_BLOCK = 1e-3  # of the root mean square of all blocks: what is smaller counts as if it were so large


def strict_error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """relative_error, or a third of that of the worst BLOCK of a row, whichever is greater: what is wrong in one row,
    head or column of many is a small part of all. Tensors [rows, ..]; a row's last block may be shorter."""
    whole = relative_error(ours, truth)
    if not math.isfinite(whole) or not truth.numel():
        return whole
    pad = -truth[0].numel() % BLOCK

    def norms(values: torch.Tensor) -> torch.Tensor:
        rows = torch.nn.functional.pad(values.double().flatten(1), (0, pad))
        return rows.unflatten(1, (-1, BLOCK)).norm(dim=2)

    blocks = norms(truth)
    least = SMALL_BLOCK * blocks.square().mean().sqrt()
    worst = float((norms(ours.double() - truth.double()) / torch.maximum(blocks, least).clamp_min(1e-300)).max())
    return max(whole, BLOCKS_COUNT * worst)


def complaint(ours: torch.Tensor, truth: torch.Tensor, tolerance: Tolerance) -> str | None:
    """None when `ours` is within the tolerance of `truth`, else what is wrong, in words."""
    ours, truth = ours.double(), truth.double()
    if bool(torch.isnan(ours).any()):
        return f"{int(torch.isnan(ours).sum())} NaN of {ours.numel()}"
    infinite = torch.isinf(truth)
    if not bool((torch.isinf(ours) == infinite).all()) or not bool((ours[infinite] == truth[infinite]).all()):
        return "infinities differ from the truth's"
    ours, truth = ours[~infinite], truth[~infinite]
    error = (ours - truth).abs()
    bad = (error > tolerance.absolute) & (error > tolerance.relative * truth.abs())
    if bool(bad.any()):
        worst = int(torch.where(bad, error, torch.zeros_like(error)).argmax())
        return f"{int(bad.sum())} of {error.numel()} elements off, worst {float(ours[worst])} for {float(truth[worst])}"
    if tolerance.cosine is not None and error.numel():
        norms = float((ours * ours + truth * truth).sum())
        difference = 0.0 if norms < 1e-12 else 1.0 - 2.0 * float((ours * truth).sum()) / norms
        if difference > tolerance.cosine:
            return f"cosine difference {difference:.2e} above {tolerance.cosine:.0e}"
    return None

"""How far a result is from the truth: relative L2 error, and tolerances element by element."""

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

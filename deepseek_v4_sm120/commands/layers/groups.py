"""What is added up of the rows of one kind of sublayer: errors, what rounding alone would make of them, and shares.

A share is the error's projection upon what a fault would have made of it: 0 where the engine has it not and 1 where it
has. A unit is a part that can be wrong by itself: a head, an expert, a page of keys. What it adds is taken away, and
the error's share in that is 1 where an engine has nothing, or something else, in its place.

`chance` is what the coarsest right engine (reference/model.py, Rules.rounds) has of the same, with the same weights and
inputs; `reach` what a share would be off by if the error had nothing to do with the fault.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch

OUTLIER = 0.5  # of a row: an expert, or an entry of the index, that was chosen otherwise by a near tie
ODD = 4.0  # times what rounding makes of a row: more is another choice, or a fault
LEAST = 0.01  # what is less of a row than this is no error: some roundings to bf16
OF_ALL_LAYERS = ("head", "page")  # units that are the same in every layer


@dataclass
class Share:
    along: float = 0.0
    chance: float = 0.0
    square: float = 0.0
    error: float = 0.0  # of the rows that it was asked of, and their size
    size: float = 0.0
    numbers: int = 0

    def add(self, error: torch.Tensor, rounded: torch.Tensor, effect: torch.Tensor, truth: torch.Tensor) -> None:
        sums = error * effect, rounded * effect, effect.square(), error.square(), truth.square()
        added = torch.stack([one.sum() for one in sums]).tolist()  # waits for a card once
        for name, one in zip(("along", "chance", "square", "error", "size"), added, strict=True):
            setattr(self, name, getattr(self, name) + one)
        self.numbers += error.numel()

    def merge(self, other: Share) -> None:
        for name in vars(other):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def summary(self) -> dict:
        return {
            "share": self.along / self.square,
            "chance": self.chance / self.square,
            "reach": (self.error / self.square / self.numbers) ** 0.5,
            "strength": (self.square / self.size) ** 0.5,
        }


@dataclass
class Group:
    """Rows of one kind of sublayer, or of one, in one kind of pass."""

    rows: int = 0
    outliers: int = 0
    odd: int = 0
    error: float = 0.0
    rounding: float = 0.0
    size: float = 0.0
    worst: float = 0.0
    shares: dict = field(default_factory=lambda: defaultdict(Share))
    units: dict = field(default_factory=lambda: defaultdict(Share))

    def add(self, seen, truth, rounded, effects):
        """Of rows: what an engine was given, the model's, a coarse right engine's, and {fault: of one with it}."""
        error, by_rounding = seen.double() - truth, rounded - truth
        by_row = error.norm(dim=1) / truth.norm(dim=1)
        expected = by_rounding.norm(dim=1) / truth.norm(dim=1)
        kept = by_row < OUTLIER  # not what is NaN
        self.rows += len(by_row)
        self.outliers += int((~kept).sum())
        self.odd += int((by_row[kept] > (ODD * expected[kept]).clamp_min(LEAST)).sum())
        self.worst = max(self.worst, float(by_row.max()))
        self.error += float(error[kept].square().sum())
        self.rounding += float(by_rounding[kept].square().sum())
        self.size += float(truth[kept].square().sum())
        # near ties are few: where most rows are far off, it is by a fault that may have a name
        asked = kept if 2 * int(kept.sum()) >= len(kept) else error.isfinite().all(dim=1)
        for name, changed in effects.items():
            self.shares[name].add(error[asked], by_rounding[asked], (changed - truth)[asked], truth[asked])
        return asked

    def merge(self, other: Group) -> None:
        for name in ("rows", "outliers", "odd", "error", "rounding", "size"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.worst = max(self.worst, other.worst)
        for name, share in other.shares.items():
            self.shares[name].merge(share)
        for unit, share in other.units.items():
            if unit.startswith(OF_ALL_LAYERS):
                self.units[unit].merge(share)

    def summary(self) -> dict:
        found = {name: getattr(self, name) for name in ("rows", "outliers", "odd", "worst")}
        found["error"] = (self.error / self.size) ** 0.5 if self.size else None
        found["rounding"] = (self.rounding / self.size) ** 0.5 if self.size else None
        for name in ("shares", "units"):
            told = {one: share.summary() for one, share in getattr(self, name).items() if share.square > 0}
            found["faults" if name == "shares" else name] = told
        return found

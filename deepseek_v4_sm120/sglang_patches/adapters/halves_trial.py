"""Whether a server's passes of so many rows go in halves: by the times of its own first ones.

What halves give is the sums' time, and what they cost is the host's: each launch is made twice. Where the host is slow,
a pass in halves takes longer, and only a run can tell. So the first passes go whole and in halves, by
turns, and the later ones as was faster, of all ranks the slowest counted: one exchange of the group's CPUs, at the same
pass on each. Passes of other sizes have trials of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

WHOLE, HALVES = "whole", "in halves"
ORDER = (WHOLE, HALVES, HALVES, WHOLE)  # a prompt's later chunks take longer: both ways have as many of them
WARM, COUNTED = 1, 2  # times ORDER: what is compiled or tuned at its first use is in the first
LEAST_GAIN = 0.03  # below, what is usual stays


@dataclass
class Trial:
    """Of passes with `rows` and more, less than twice as many. told: what `status` says of it."""

    rows: int
    begun: int = 0
    decided: str | None = None
    told: str = ""
    _times: list[tuple[str, int, object, object]] = field(default_factory=list)

    def next_way(self, group) -> str:
        """How the next pass goes. group: a process group of all ranks' CPUs."""
        if self.begun == len(ORDER) * (WARM + COUNTED):
            self._decide(group)
        self.begun += 1
        return self.decided or ORDER[(self.begun - 1) % len(ORDER)]

    def is_timed(self) -> bool:
        """Whether the pass that was begun last is."""
        return self.decided is None and self.begun > len(ORDER) * WARM

    def add(self, way: str, rows: int, start, end) -> None:
        self._times.append((way, rows, start, end))

    def _decide(self, group) -> None:
        each = torch.tensor([self._ms_of_a_row(way) for way in (WHOLE, HALVES)], dtype=torch.float64)
        torch.distributed.all_reduce(each, op=torch.distributed.ReduceOp.MAX, group=group)
        whole, halves = each.tolist()
        self.decided = HALVES if halves < (1 - LEAST_GAIN) * whole else WHOLE
        is_known = math.isfinite(halves) and math.isfinite(whole)
        found = f"{halves / whole:.2f} of the whole's time in halves" if is_known else "no pass came to its end"
        self.told = f"{self.decided} from {self.rows:,} rows on: {found}"
        self._times.clear()

    def _ms_of_a_row(self, way: str) -> float:
        """Infinite, where no pass came to its end."""
        found = [(rows, start, end) for how, rows, start, end in self._times if how == way]
        if not found:
            return math.inf
        found[-1][2].synchronize()
        return sum(start.elapsed_time(end) for _, start, end in found) / sum(rows for rows, _, _ in found)


class Trials:
    def __init__(self):
        self._of: dict[int, Trial] = {}

    def of(self, rows: int) -> Trial:
        least = 1 << (rows.bit_length() - 1)
        return self._of.setdefault(least, Trial(least))

    def decided(self) -> dict[str, str]:
        """Least rows -> the way."""
        return {str(rows): trial.decided for rows, trial in sorted(self._of.items()) if trial.decided}

    def told(self) -> list[str]:
        return [trial.told for _, trial in sorted(self._of.items()) if trial.told]


def event():
    """Of a pass's begin or end, on the current stream."""
    found = torch.cuda.Event(enable_timing=True)
    found.record()
    return found

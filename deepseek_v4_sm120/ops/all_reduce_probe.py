"""Which way the cards of a group may sum, found out with the kernels themselves before a server relies on one.

Drivers report peers that move nothing, copies that work where a kernel's stores do not, and some boards hang. So each
rank starts a process of its own (all_reduce_probe_child.py): what goes wrong there costs no server its CUDA context.
Most of its time is the import of torch, so who knows early that there will be a probe starts it ahead
(all_reduce_probe_process.py).
The ranks pass on what their processes say to each other, and agree: a way is taken where it was right on all ranks, the
faster of two; where none was, the sums stay SGLang's. Where peers were tried and failed, nothing of SGLang's own may
sum by them either. No wait is without an end.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from deepseek_v4_sm120.ops.all_reduce import TRANSPORTS, Gather
from deepseek_v4_sm120.ops.all_reduce_probe_process import FAILED, FOUND, GATHER, PROGRAM, Child, asked_of

ROWS = (1, 8, 64)  # of the calls that are timed, each of which counts as much as the others
START_S, STEP_S, WHOLE_S = 60.0, 20.0, 120.0
WORDS = {"peer": "each other's memory", "host": "host memory"}
CHOSEN = "chosen by the user, the only one tried"
REMEDY = (
    "BIOS: IOMMU off or pass-through, ACS off, Resizable BAR on; driver 580 or newer; in a container --ipc=host; "
    "`doctor` names the bridges"
)
NO_MEMORY = "out of memory"  # in what CUDA says of a card's memory, and of the host's that is locked
MEMORY = "a card's memory is full (`nvidia-smi` names by whom), or the host's that may be locked (`ulimit -l`)"
NCCL_P2P = "NCCL_P2P_DISABLE"
NCCL_TOO = f"{NCCL_P2P}=1 now, for NCCL goes by peers too where it can; then "


@dataclass(frozen=True)
class Way:
    """us: rows -> microseconds of a sum in a graph, of the slowest rank; pings: {"from", "to", "rows", "us"}, of one
    card's stores and the other's answer; is_tried: False where a rank's process failed before all had their memory."""

    problem: str | None
    us: dict[int, float] = field(default_factory=dict)
    pings: tuple[dict, ...] = ()
    is_tried: bool = True


@dataclass(frozen=True)
class Verdict:
    """transport: the way that is taken, None: SGLang's own sums. is_chosen: the user named the one that was tried."""

    ranks: int
    transport: str | None
    ways: dict[str, Way]
    seconds: float
    is_chosen: bool = False

    @property
    def peers_fail(self) -> bool:
        """Wrong bits, a wait in vain, a process lost: whatever it was, by the cards' own memory."""
        way = self.ways.get("peer")
        return way is not None and way.problem is not None and way.is_tried

    def remedy(self) -> str:
        problems = [way.problem for way in self.ways.values() if way.problem is not None]
        if problems and all(NO_MEMORY in problem for problem in problems):
            return MEMORY  # nothing is known of the way between the cards
        is_said = self.peers_fail and os.environ.get(NCCL_P2P, "0") in ("", "0")
        return (NCCL_TOO if is_said else "") + REMEDY

    def left(self) -> str:
        """Whose the sums are where none are ours."""
        return f"the sums between the cards {'are NCCL' if self.peers_fail else 'stay SGLang'}'s"

    def describe(self) -> str:
        chosen = f" ({CHOSEN})" if self.is_chosen else ""
        parts = [f"{self.left()}{chosen}"]
        if self.transport is not None:
            took = _times(self.ways[self.transport])
            parts = [f"{self.ranks} cards sum by way of {WORDS[self.transport]}{chosen}: {took}"]
        others = {name: way for name, way in self.ways.items() if name != self.transport}
        parts += [f"by way of {WORDS[name]}: {_described(way)}" for name, way in others.items()]
        if self.peers_fail:
            parts.append("SGLang's own kernel, which goes by peers too, sums nothing")
        return "; ".join(parts + ([f"to do: {self.remedy()}"] if any(way.problem for way in others.values()) else []))

    def as_dict(self) -> dict:
        return {**asdict(self), "text": self.describe(), "table": self.table(), "remedy": self.remedy()}

    def table(self) -> list[tuple[str, ...]]:
        """Of a pair each way: microseconds until an answer to 1, 8 and 64 rows is there. To be posted."""
        rows = [("from", "to", "by", *(f"{count} rows" for count in ROWS))]
        for name, way in self.ways.items():
            pairs = dict.fromkeys((ping["from"], ping["to"]) for ping in way.pings)
            for a, b in pairs:
                found = {ping["rows"]: ping["us"] for ping in way.pings if (ping["from"], ping["to"]) == (a, b)}
                rows.append((str(a), str(b), WORDS[name], *(f"{found[count]:.1f}" for count in ROWS)))
        return rows


def _described(way: Way) -> str:
    return _times(way) if way.problem is None else f"{'' if way.is_tried else 'not tried: '}{way.problem}"


def _times(way: Way) -> str:
    return ", ".join(f"{us:.1f} us ({rows} row{'s' if rows > 1 else ''})" for rows, us in way.us.items())


def relay(child: Child, gather: Gather) -> tuple[Way, bool]:
    """(what the ranks' processes found of a way, whether they are there for another): the same on all ranks. Passes on
    what they gather."""
    end, patience, is_tried = time.monotonic() + WHOLE_S, START_S, False
    while True:
        told = gather(child.next(min(patience, end - time.monotonic())))
        kinds, patience = {kind for kind, _ in told}, STEP_S
        if kinds == {FOUND}:
            return merged([value for _, value in told]), True
        if kinds != {GATHER}:
            failed = [f"rank {rank}: {value}" for rank, (kind, value) in enumerate(told) if kind == FAILED]
            return Way("; ".join(failed) or "the ranks' probes are at different places", is_tried=is_tried), False
        child.answer([value for _, value in told])
        is_tried = True


def probe(
    rank: int,
    ranks: int,
    device: int,
    gather: Gather,
    *,
    hidden: int,
    transport: str | None = None,
    program: Sequence[str] = PROGRAM,
) -> Verdict:
    """The verdict, the same on all ranks; each calls it with its card's index, an all-gather between them, and the one
    way to try, or None for all."""
    tried = TRANSPORTS if transport is None else (transport,)
    started = time.monotonic()
    ways: dict[str, Way] = {}
    while left := [name for name in tried if name not in ways]:
        child = asked_of(program, {"rank": rank, "ranks": ranks, "device": device, "hidden": hidden, "ways": left})
        try:
            for name in left:
                ways[name], are_there = relay(child, gather)
                if not are_there:
                    break  # with its process; what is left is asked of another one
        finally:
            child.end()
    right = [name for name in tried if ways[name].problem is None]
    seconds = max(gather(round(time.monotonic() - started, 1)))
    return Verdict(ranks, fastest({name: ways[name].us for name in right}), ways, seconds, transport is not None)


def fastest(us: dict[str, dict[int, float]]) -> str | None:
    """Of way -> rows -> microseconds, by the geometric mean: a fifth at one row is not worth five times as long at 64.
    (Four cards, other engines starting beside it: peers 5.9, 8.7, 8.2 us and host memory 4.6, 8.5, 40.1 at ROWS; by the
    few rows alone that server summed by host memory.)"""
    return min(us, key=lambda name: math.prod(us[name].values()), default=None)


def merged(found: list[dict]) -> Way:
    """One way by what each rank found: {"problem"}, or {"us": {rows: us}, "pings": [of those it sent]}."""
    problems = [f"rank {rank}: {one['problem']}" for rank, one in enumerate(found) if one["problem"] is not None]
    if problems:
        return Way("; ".join(dict.fromkeys(problems)))
    us = {rows: round(max(one["us"][rows] for one in found), 2) for rows in found[0]["us"]}
    return Way(None, us, tuple(ping for one in found for ping in one["pings"]))

"""How every benchmark here measures and reports. GPU only.

Time: one CUDA graph holds a call per layer, each with caches, indices and activations of its own, together over twice
the L2, so that every call finds cold caches. The graph is replayed back to back between two events; a call's time is
the median over several such stretches, divided by replays and calls. Host time is outside.
"""

from __future__ import annotations

import datetime
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

COLD_L2_MULTIPLE = 2.2
MIN_LAYERS, MAX_LAYERS = 4, 2048
STRETCH_S = 2.5e-3  # GPU time between two events, at least
STRETCHES = 9


@dataclass(frozen=True)
class Row:
    """One number. `bar` is the most (for *_us, ratio) that the issue allows; None: no bar."""

    issue: int
    case: str
    impl: str
    metric: str
    value: float
    bar: float | None = None
    met: bool | None = None
    note: str = ""


def row(issue: int, case: str, impl: str, metric: str, value: float, bar: float | None = None, note: str = "") -> Row:
    return Row(issue, case, impl, metric, value, bar, None if bar is None else value <= bar, note)


@dataclass
class Report:
    """What a benchmark writes: where and how it ran, the machine's ceilings, the rows."""

    name: str
    commit: str
    ceilings: dict[str, float]
    rows: list[Row] = field(default_factory=list)

    def add(self, *rows: Row) -> None:
        self.rows.extend(rows)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        found = {
            "benchmark": self.name,
            "device": torch.cuda.get_device_name(),
            "date": datetime.date.today().isoformat(),
            "commit": self.commit,
            "command": "python3 " + " ".join(shlex.quote(word) for word in sys.argv),
            "torch": torch.__version__,
            "ceilings": self.ceilings,
            "rows": [asdict(one) for one in self.rows],
        }
        path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")


def total_memory() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def layers_for_cold_caches(bytes_per_call: int) -> int:
    """Calls whose bytes together are over twice the L2."""
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return min(MAX_LAYERS, max(MIN_LAYERS, math.ceil(COLD_L2_MULTIPLE * l2 / bytes_per_call)))


def graph_microseconds(calls: Iterable[Callable[[], object]]) -> float:
    """Median microseconds per call of a graph that holds all of them. Each is run once eagerly before."""
    calls = list(calls)
    kept = [call() for call in calls[:2]]  # compiles, tunes and loads; the rest are of the same shape
    torch.cuda.synchronize()
    del kept
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    return replay_microseconds(graph) / len(kept)


def replay_microseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Median microseconds of one replay, replays queued back to back."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def stretch(replays: int) -> float:
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / replays

    once = max(stretch(1), stretch(1))
    replays = max(1, math.ceil(STRETCH_S * 1e6 / once))
    stretches = STRETCHES if once * replays < 1e5 else 3
    return statistics.median(stretch(replays) for _ in range(stretches))


def host_microseconds(call: Callable[[], object], calls: int = 300) -> float:
    """Microseconds of Python and driver per eager call: the queue is kept short, the GPU's time is not counted."""
    for _ in range(10):
        call()
    best = []
    for _ in range(calls // 10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            call()
        best.append((time.perf_counter() - begin) * 1e5)
    return statistics.median(best)


def copy_bandwidth_gbs() -> float:
    """Device-to-device copy of 1 GiB, bytes read plus bytes written, in 1e9 bytes a second."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    read, written = source.view(torch.float32), target.view(torch.float32)
    # a kernel: a graph would give a plain copy to the copy engine, which is slower
    return 2 * source.numel() / graph_microseconds([lambda: torch.neg(read, out=written)] * 4) / 1e3


def empty_launch_microseconds() -> float:
    """One node of a graph of kernels that do nothing."""
    return graph_microseconds([lambda: torch.cuda._sleep(0)] * 1000)


def ceilings() -> dict[str, float]:
    """What this machine can do at best, measured in the same run."""
    return {"copy_gbs": round(copy_bandwidth_gbs(), 1), "empty_launch_us": round(empty_launch_microseconds(), 3)}


def table(header: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    widths = [max(len(line[column]) for line in [header, *lines]) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [header, *lines]
    )

"""How every benchmark here measures and reports. GPU only.

Time: one CUDA graph holds a call per layer, each with caches, indices and activations of its own, together over twice
the L2, so that every call finds cold caches. The graph is replayed back to back between two events; a call's time is
the median over several such stretches, divided by replays and calls. Host time is outside.
"""

from __future__ import annotations

import datetime
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from deepseek_v4_sm120.commands.calibrate.timing import graph_microseconds, layers_for_cold_caches, replay_microseconds  # noqa: F401


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


def require_gpu() -> None:
    """End in one sentence where there is nothing to measure on."""
    if not torch.cuda.is_available():
        raise SystemExit(f"no GPU: torch {torch.__version__} sees no CUDA device")


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


def captured(run: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    """A graph of what `run` launches, replayed once, and what it gives. Inputs that `run` holds must outlive it."""
    run()  # compiles, tunes and loads
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    torch.cuda.synchronize()
    return graph, out


def microseconds_in_turns(graphs: dict[str, torch.cuda.CUDAGraph], *, turns: int, replays: int) -> dict[str, float]:
    """Median microseconds of a replay by graph, which take turns: what the machine does meanwhile is shared by all."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(turns):
        for name, graph in graphs.items():
            graph.replay()
            start.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            found[name].append(start.elapsed_time(end) * 1e3 / replays)
    return {name: statistics.median(times) for name, times in found.items()}


def gate(case: str, error: float, allowed: float, what: str = "relative error") -> float:
    """The error; a wrong result ends the benchmark."""
    if not error <= allowed:
        raise SystemExit(f"{case}: {what} {error:.3g}, allowed {allowed:g}: not timed")
    return error


def head() -> str:
    """The commit of this checkout, for what is measured without our build."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(words, text=True, capture_output=True, check=True).stdout.strip()


def total_memory() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


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


def eager_row(issue: int, case: str) -> Row:
    """An eager call of torch's, to see by what hosts differ: a host_us of another machine is twice as much."""
    x = torch.ones(4096, device="cuda")
    return row(issue, case, "torch.neg", "host_us", round(host_microseconds(lambda: torch.neg(x)), 2))


def copy_bandwidth_gbs() -> float:
    """Device-to-device copy of 1 GiB, bytes read plus bytes written, in 1e9 bytes a second."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    read, written = source.view(torch.float32), target.view(torch.float32)
    # a kernel: a graph would give a plain copy to the copy engine, which is slower
    return 2 * source.numel() / graph_microseconds([lambda: torch.neg(read, out=written)] * 4) / 1e3


def read_bandwidth_gbs() -> float:
    """A plain sum over 6 GiB of float32."""
    size = 6 << 30
    source = torch.empty(size, dtype=torch.uint8, device="cuda").fill_(1).view(torch.float32)
    return size / graph_microseconds([source.sum] * 2) / 1e3


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

"""GPU time of calls with cold caches: one CUDA graph holds many calls, each with inputs of its own, together over twice
the L2; it is replayed back to back between two events. Host time is outside."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable

import torch

COLD_L2_MULTIPLE = 2.2
MIN_LAYERS, MAX_LAYERS = 4, 2048
STRETCH_S = 2.5e-3  # GPU time between two events, at least
STRETCHES = 9


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

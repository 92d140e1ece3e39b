"""Groups of ranks for tests and the benchmark: threads of one process on one card, or a process for each rank."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from deepseek_v4_sm120.ops.all_reduce import AllReduce


class Meeting:
    """An all-gather between threads."""

    def __init__(self, ranks: int, timeout: float = 60):
        self._barrier, self._told = threading.Barrier(ranks, timeout=timeout), [None] * ranks

    def gather(self, rank: int) -> Callable[[object], list]:
        def all_gather(value):
            self._told[rank] = value
            self._barrier.wait()
            told = list(self._told)
            self._barrier.wait()
            return told

        return all_gather


def in_threads(ranks: int, **options) -> list[AllReduce]:
    """A group whose ranks are threads of this process, all on the current card."""
    meeting, device = Meeting(ranks), torch.device("cuda", torch.cuda.current_device())
    with ThreadPoolExecutor(ranks) as pool:
        made = [pool.submit(AllReduce, r, ranks, device, meeting.gather(r), **options) for r in range(ranks)]
        return [one.result() for one in made]


def _process(rank: int, ranks: int, store: str, body: Callable, arguments: tuple) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    init = f"file://{store}"
    torch.distributed.init_process_group("gloo", init_method=init, rank=rank, world_size=ranks)

    def gather(value):
        told = [None] * ranks
        torch.distributed.all_gather_object(told, value)
        return told

    body(rank, ranks, device, gather, *arguments)
    torch.distributed.destroy_process_group()


def in_processes(ranks: int, body: Callable, *arguments) -> None:
    """body(rank, ranks, device, gather, *arguments) in a process for each rank, cards in turn."""
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        torch.multiprocessing.spawn(_process, (ranks, store, body, arguments), nprocs=ranks, join=True)

"""A process for each rank, with cards in turn: for the GPU tests and the benchmark."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import torch


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

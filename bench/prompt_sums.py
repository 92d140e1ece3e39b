#!/usr/bin/env python3
"""NCCL's sums of a prompt's rows, by the settings of its that a user can make.

    python3 bench/prompt_sums.py --ranks 2 [--no-peers] [--only NAME ..] [--out FILE]

A process a card, new for each setting. A sum's time by itself, and what a chain of products on the same card takes
alone and with sums of half of the rows beside it, as halves that take turns have it: more channels move more and leave
fewer multiprocessors. `--no-peers`: by host memory, as where NCCL finds no way between cards. Every setting's sums are
checked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import needs_torch  # noqa: F401
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "bench")]

import common  # noqa: E402

from tests.ops.all_reduce_groups import in_processes  # noqa: E402

ISSUE = 22
HIDDEN, ROWS = 4096, (1024, 4096, 8192)
BESIDE_ROWS, BESIDE_SUMS, PRODUCTS = 4096, 4, 24  # half of a pass; sums beside products of [rows, 4096] x [4096, 4096]
REPEATS, WARM = 12, 3
SETTINGS = {
    "as it comes": {},
    "8 channels": {"NCCL_MIN_NCHANNELS": "8"},
    "16 channels": {"NCCL_MIN_NCHANNELS": "16"},
    "buffers of 16 MB": {"NCCL_BUFFSIZE": str(16 << 20)},
    "8 channels, buffers of 16 MB": {"NCCL_MIN_NCHANNELS": "8", "NCCL_BUFFSIZE": str(16 << 20)},
    "8 channels, buffers of 1 MB": {"NCCL_MIN_NCHANNELS": "8", "NCCL_BUFFSIZE": str(1 << 20)},
    # of its way through host memory alone: whose memory it is, by which allocator, and copy engines
    "the sender's memory": {"NCCL_SHM_LOCALITY": "1"},
    "no cuMem host memory": {"NCCL_CUMEM_HOST_ENABLE": "0"},
    "copy engines": {"NCCL_SHM_USE_CUDA_MEMCPY": "1"},
}


def milliseconds(call: Callable[[], object], gather) -> float:
    """The slowest rank's median."""
    times = []
    for turn in range(WARM + REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        gather(None)
        start.record()
        call()
        end.record()
        end.synchronize()
        times += [start.elapsed_time(end)] if turn >= WARM else []
    return max(gather(statistics.median(times)))


def measure(rank, ranks, device, gather, found: Path) -> None:
    """found: a file for rank 0's lines, [what, milliseconds] each."""
    group = torch.distributed.new_group(backend="nccl")

    def add(what: str, value: float) -> None:
        if rank == 0:
            with open(found, "a") as file:
                file.write(json.dumps([what, value]) + "\n")

    def summed(x: torch.Tensor, is_async: bool = False):
        return torch.distributed.all_reduce(x, group=group, async_op=is_async)

    for rows in ROWS:
        x = torch.full((rows, HIDDEN), float(1 + rank), dtype=torch.bfloat16, device=device)
        summed(x)
        if not torch.equal(x, torch.full_like(x, ranks * (ranks + 1) / 2)):
            raise SystemExit(f"rank {rank}: a wrong sum of {rows} rows")
        zeros = torch.zeros_like(x)
        add(f"a sum of {rows} rows", milliseconds(lambda zeros=zeros: summed(zeros), gather))
    x = torch.randn(BESIDE_ROWS, HIDDEN, device=device).bfloat16()
    weight = torch.randn(HIDDEN, HIDDEN, device=device).bfloat16()
    terms = [torch.zeros_like(x) for _ in range(BESIDE_SUMS)]

    def products() -> None:
        for _ in range(PRODUCTS):
            torch.mm(x, weight)

    def both() -> None:
        works = [summed(term, is_async=True) for term in terms]
        products()
        for work in works:
            work.wait()

    add(f"{BESIDE_SUMS} sums of {BESIDE_ROWS} rows", milliseconds(lambda: [summed(term) for term in terms], gather))
    add(f"{PRODUCTS} products", milliseconds(products, gather))
    add(f"{PRODUCTS} products beside {BESIDE_SUMS} sums of {BESIDE_ROWS} rows", milliseconds(both, gather))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    common.require_gpu()
    if options.ranks < 2:
        parser.error(f"sums need 2 cards or more, got {options.ranks}")
    options.commit = options.commit or common.head()
    report = common.Report("prompt_sums", options.commit, {})
    way = f"{options.ranks} cards, {'host memory' if options.no_peers else 'what NCCL finds'}"
    for name in options.only:
        asked = SETTINGS[name] | ({"NCCL_P2P_DISABLE": "1"} if options.no_peers else {})
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, asked):
            found = Path(folder) / "found"
            in_processes(options.ranks, measure, found)
            lines = [json.loads(line) for line in found.read_text().splitlines()]
        report.add(*(common.row(ISSUE, f"{way}, {what}", f"NCCL, {name}", "ms", value) for what, value in lines))
        print(common.table(("case", "ms"), [(what, f"{value:.3f}") for what, value in lines]), name, flush=True)
        if options.out:
            report.write(options.out)  # a setting that NCCL hangs with leaves those before it


if __name__ == "__main__":
    main()

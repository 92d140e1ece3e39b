#!/usr/bin/env python3
"""Sums between cards: `python3 bench/all_reduce.py --ranks 2 [--quick] [--rounds N] [--out FILE]`. A process a card.

A graph holds a chain of calls, each of the last one's result, as a model has them; a call's time is the greatest
of the ranks' medians. NCCL runs in the same way, in the same run: over what it finds, and once more with
NCCL_P2P_DISABLE=1 (through host memory, beside our transport that does so). Every call's bits are checked before,
and --rounds random calls more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "bench")]

import common  # noqa: E402

from deepseek_v4_sm120.ops import all_reduce as op  # noqa: E402
from deepseek_v4_sm120.ops.all_reduce_probe_child import microseconds  # noqa: E402
from deepseek_v4_sm120.specs import all_reduce as spec  # noqa: E402
from deepseek_v4_sm120.specs.all_reduce_ranks import nccl  # noqa: E402
from tests.ops.all_reduce_groups import in_processes  # noqa: E402

ISSUE = 20
HIDDEN = 4096
ROWS, QUICK_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), (1, 8, 64)
BARS = {  # (ranks, transport) -> rows -> us
    (2, "peer"): {1: 4.5, 8: 5.0, 64: 9.0},
    (4, "peer"): {1: 5.5, 8: 6.5, 64: 14.0},
    (2, "host"): {1: 9.0, 8: 13.0},
    (4, "host"): {1: 13.0, 8: 17.0},
}


def slowest(call, x, gather) -> float:
    return max(gather(microseconds(call, x, gather)))


def check(group, gather, rows: int, seed: int) -> None:
    terms = spec.make_terms(group.ranks, rows, seed, device=str(group.device))
    for algorithm in ways(rows):
        if spec.differing(group(terms[group.rank], algorithm=algorithm), terms):
            raise SystemExit(f"rank {group.rank}: wrong bits at {rows} rows, {algorithm}, {group.transport}")


def ways(rows: int) -> tuple[str, ...]:
    return op.ALGORITHMS if rows <= op.ONE_SHOT_ROWS else op.ALGORITHMS[1:]


def measure(rank, ranks, device, gather, options) -> None:
    rows_of = QUICK_ROWS if options.quick else ROWS
    torch.distributed.barrier()
    by_nccl = nccl(rank, ranks, device, gather, max(rows_of)).call
    report = common.Report("all_reduce", options.commit, common.ceilings() if rank == 0 else {})

    without_peers = os.environ.get("NCCL_P2P_DISABLE") == "1"
    groups = [
        op.AllReduce(rank, ranks, device, gather, max_rows=max(rows_of), transport=transport)
        for transport in (("host",) if without_peers else ("peer", "host"))
    ]
    for rows in rows_of:
        x = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        case = f"{ranks} cards, {rows} rows"
        name = "nccl_without_p2p" if without_peers else "nccl"
        report.add(common.row(ISSUE, case, name, "call_us", slowest(by_nccl, x, gather)))
        for group in groups:
            check(group, gather, rows, rows)
            for algorithm in ways(rows):
                us = slowest(lambda y, g=group, a=algorithm: g(y, algorithm=a), x, gather)
                taken = algorithm == op.algorithm_for(rows, ranks)
                bar = BARS.get((ranks, group.transport), {}).get(rows) if taken else None
                report.add(common.row(ISSUE, case, f"{group.transport}_{algorithm}", "call_us", us, bar))
    for turn in range(options.rounds):
        for group in groups:
            check(group, gather, 1 + turn * 37 % max(rows_of), turn)
    torch.cuda.synchronize()
    gather(None)
    for group in groups:
        group.close()
    if rank == 0:
        lines = [(r.case, r.impl, f"{r.value:.2f}", "" if r.bar is None else f"{r.bar} {r.met}") for r in report.rows]
        print(common.table(("case", "by", "us", "bar"), lines), flush=True)
        if options.out:
            report.write(options.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), choices=op.RANKS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    if not options.commit:
        words = ["git", "-C", str(REPO), "rev-parse", "--short=12", "HEAD"]
        options.commit = subprocess.run(words, text=True, capture_output=True, check=True).stdout.strip()
    in_processes(options.ranks, measure, options)


if __name__ == "__main__":
    main()

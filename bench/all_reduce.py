#!/usr/bin/env python3
"""Sums and gathers between cards: `python3 bench/all_reduce.py --ranks 2 [--quick] [--rounds N] [--out FILE]`.

A process a card. A graph holds a chain of calls, each of the last one's result, as a model has them; a call's time is
the greatest of the ranks' medians. NCCL runs in the same way, in the same run: over what it finds, and once more with
NCCL_P2P_DISABLE=1 (through host memory, beside our transport that does so). Every call's bits are checked before, and
--rounds random calls more. Then what a sum adds to a boundary of mhc: in its kernel, and in front of it. Last the
gather of the real vocabulary's logits, beside NCCL's with SGLang's copy into rows behind it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import sys
from pathlib import Path

import needs_torch  # noqa: F401
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "bench")]

import common  # noqa: E402

from deepseek_v4_sm120.ops import all_reduce as op  # noqa: E402
from deepseek_v4_sm120.ops.all_reduce_probe_child import CHAIN, microseconds  # noqa: E402
from deepseek_v4_sm120.ops.mhc import SUMMING_ROWS, _fits_summing, mhc  # noqa: E402
from deepseek_v4_sm120.reference.all_reduce import all_reduce as reference  # noqa: E402
from deepseek_v4_sm120.specs import all_reduce as spec  # noqa: E402
from deepseek_v4_sm120.specs.all_reduce_ranks import nccl  # noqa: E402
from deepseek_v4_sm120.specs.mhc import Shape, make_inputs, make_terms  # noqa: E402
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
BOUNDARY_BARS = {(2, "peer"): {1: 2.5, 8: 3.0}, (4, "peer"): {1: 3.5, 8: 4.5}}  # what a sum in it adds
BOUNDARY_ROWS, QUICK_BOUNDARY_ROWS = (1, 2, 4, 8, 16, 32, 64), (1, 8)
GATHERED_ROWS = (1, 8, 32, 64)


def slowest(call, x, gather) -> float:
    return max(gather(microseconds(call, x, gather)))


def check(group, rows: int, seed: int) -> None:
    terms = spec.make_terms(group.ranks, rows, seed, device=str(group.device))
    for algorithm in ways(rows):
        if spec.differing(group(terms[group.rank], algorithm=algorithm), terms):
            raise SystemExit(f"rank {group.rank}: wrong bits at {rows} rows, {algorithm}, {group.transport}")


def ways(rows: int) -> tuple[str, ...]:
    return op.ALGORITHMS if rows <= op.ONE_SHOT_ROWS else op.ALGORITHMS[1:]


def measure_boundary(report, group, gather, rows: int) -> None:
    """A chain of boundaries, each of the last one's streams and y, with weights of its own."""
    case = f"boundary, {group.ranks} cards, {rows} rows"
    names = ("fn", "scale", "base", "norm_weight")
    layers = [make_inputs(Shape(1), seed=seed, device=group.device) for seed in range(CHAIN)]
    weights = [{name: getattr(layer, name) for name in names} for layer in layers]
    first = make_inputs(Shape(rows), device=group.device)
    terms = make_terms(first, group.ranks)
    state = (first.streams, first.post, first.comb)
    expected = mhc(reference(terms), *state, **weights[0])

    def chained(boundary) -> float:
        turns = itertools.cycle(weights)
        return slowest(lambda last: boundary(last[3], *last[:3], **next(turns)), (*state, terms[group.rank]), gather)

    ways = {"in front": lambda f, *state, **layer: mhc(group(f), *state, **layer)}
    if rows <= group.one_shot_rows and _fits_summing(rows, group.num_sms, group.device.index):
        ways["inside"] = lambda f, *state, **layer: mhc(f, *state, **layer, sum_over=group, kernels="fused")
    without = chained(mhc)
    report.add(common.row(ISSUE, case, "without a sum", "call_us", without))
    for name, boundary in ways.items():
        found = boundary(terms[group.rank], *state, **weights[0])
        if not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)):
            raise SystemExit(f"rank {group.rank}: wrong bits of a boundary, {rows} rows, sum {name}, {group.transport}")
        taken = name == "inside" and rows <= SUMMING_ROWS[group.ranks]
        bar = BOUNDARY_BARS.get((group.ranks, group.transport), {}).get(rows) if taken else None
        us = chained(boundary) - without
        report.add(common.row(ISSUE, case, f"{group.transport}, sum {name}, less without", "call_us", us, bar))


def nccl_gather(ranks: int):
    """As SGLang's coordinator has it."""
    group = torch.distributed.new_group(backend="nccl")

    def call(x):
        out = x.new_empty(ranks * x.shape[0], x.shape[1])
        torch.distributed.all_gather_into_tensor(out, x, group=group)
        return out.view(ranks, *x.shape).movedim(0, 1).reshape(x.shape[0], -1)

    return call


def measure_gathers(report, groups, gather, nccl_name: str) -> None:
    """Chains of calls with the same logits; what each gives is not looked at by the next."""
    rank, ranks, device = groups[0].rank, groups[0].ranks, groups[0].device
    calls = {nccl_name: nccl_gather(ranks)}
    calls |= {f"{group.transport}_gather": functools.partial(op.all_gather, group=group) for group in groups}
    for rows in GATHERED_ROWS:
        sent = spec.make_logits(ranks, rows, rows, device=str(device))
        for name, call in calls.items():
            if name != nccl_name and spec.misplaced(call(sent[rank]), sent):
                raise SystemExit(f"rank {rank}: wrong words of a gather, {rows} rows, {name}")
            us = slowest(lambda x, c=call: (c(x), x)[1], sent[rank], gather)
            report.add(common.row(ISSUE, f"logits, {ranks} cards, {rows} rows", name, "call_us", us))


def measure(rank, ranks, device, gather, options) -> None:
    rows_of = QUICK_ROWS if options.quick else ROWS
    torch.distributed.barrier()
    by_nccl = nccl(rank, ranks, device, gather, max(rows_of)).call
    report = common.Report("all_reduce", options.commit, common.ceilings() if rank == 0 else {})

    without_peers = os.environ.get("NCCL_P2P_DISABLE") == "1"
    groups = [
        op.AllReduce(rank, ranks, device, gather, transport=transport)
        for transport in (("host",) if without_peers else ("peer", "host"))
    ]
    for rows in rows_of:
        x = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        case = f"{ranks} cards, {rows} rows"
        name = "nccl_without_p2p" if without_peers else "nccl"
        report.add(common.row(ISSUE, case, name, "call_us", slowest(by_nccl, x, gather)))
        for group in groups:
            check(group, rows, rows)
            for algorithm in ways(rows):
                us = slowest(lambda y, g=group, a=algorithm: g(y, algorithm=a), x, gather)
                taken = algorithm == op.algorithm_for(rows, ranks)
                bar = BARS.get((ranks, group.transport), {}).get(rows) if taken else None
                report.add(common.row(ISSUE, case, f"{group.transport}_{algorithm}", "call_us", us, bar))
    if not without_peers:
        for rows in QUICK_BOUNDARY_ROWS if options.quick else BOUNDARY_ROWS:
            for group in groups:
                measure_boundary(report, group, gather, rows)
    measure_gathers(report, groups, gather, "nccl_without_p2p" if without_peers else "nccl")
    for turn in range(options.rounds):
        for group in groups:
            check(group, 1 + turn * 37 % max(rows_of), turn)
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
    common.require_gpu()
    if options.ranks not in op.RANKS:  # argparse does not look at its default
        parser.error(f"sums need {', '.join(map(str, op.RANKS))} cards, torch sees {options.ranks}")
    options.commit = options.commit or common.head()
    in_processes(options.ranks, measure, options)


if __name__ == "__main__":
    main()

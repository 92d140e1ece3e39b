"""The probe's process of one rank (all_reduce_probe.py): is a way right, and how fast is it, by the kernels themselves.

    python3 -m deepseek_v4_sm120.ops.all_reduce_probe_child [JSON] DESCRIPTOR

Without JSON it was started ahead, and is told on the connection what it is asked; no CUDA before that.
Says (kind, value) on a connection: GATHER for what it wants from all ranks, what it FOUND of each way, why it FAILED.
Waits on the card have an end (PATIENCE_S) and leave the context as it was; what does not ends with this process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from deepseek_v4_sm120.ops import all_reduce as op
from deepseek_v4_sm120.ops.all_reduce_probe import ROWS
from deepseek_v4_sm120.ops.all_reduce_probe_process import ASKED_S, FAILED, FOUND, GATHER
from deepseek_v4_sm120.ops.shared import cuda_tensors, extension

CHECKED_ROWS = (1, 8, 9, 64, 65, op.MAX_ROWS, *range(1, 8))  # each generation of places, behind many rows and few
GATHERS = 12  # every third has all that the places hold: so has each of the four generations, once
PATIENCE_S = 3.0
# A graph of CHAIN calls, each of the last one's result, is replayed until idle cards have their clocks, and timed in
# TURNS of several replays behind each other: the first of a turn waits for the rank that comes last to it.
CHAIN, UNTIMED, TURNS, REPLAYS = 40, 60, 5, 8
PINGS, WARM_UPS = 25, 5
VECTOR_BYTES = 16


def examine(way: str, *, rank: int, ranks: int, device: torch.device, gather: op.Gather, hidden: int) -> dict:
    """What `merged` takes."""

    def make(together):
        options = {"hidden": hidden, "transport": way, "patience_s": PATIENCE_S, "traps": False}
        return op.AllReduce(rank, ranks, device, together, **options)

    group, problem = op.made_together(gather, make)
    if group is None:
        return {"problem": problem}
    terms_of(ranks, 1, hidden, 0, device)  # what is loaded at its first use
    gather(None)
    for look in (wrong_sum, wrong_gather):
        if any(gather(wrong := look(group))):
            return {"problem": wrong}
    zeros = {rows: torch.zeros(rows, hidden, dtype=torch.bfloat16, device=device) for rows in ROWS}
    us = {rows: microseconds(group, zeros[rows], gather, pick=min) for rows in ROWS}  # others may use the cards
    pings, lost = ping_all(way, rank, ranks, device, gather, hidden)
    problem = group.fault() or lost
    group.close()
    return {"problem": problem, "us": us, "pings": pings}


def wrong_sum(group: op.AllReduce) -> str | None:
    """What is not the sum in the order of ranks, to the bit; None: all are. One that is wrong is no reason to keep the
    others waiting: the calls go on."""
    wrong = None
    for turn, rows in enumerate(CHECKED_ROWS):
        terms = terms_of(group.ranks, rows, group.hidden, turn, group.device)
        expected = terms[0].float()
        for term in terms[1:]:
            expected = expected + term.float()
        expected = torch.where(expected.isnan(), torch.full_like(expected, 0x7FFF, dtype=torch.int16), bits(expected))
        for algorithm in op.ALGORITHMS if rows <= op.ONE_SHOT_ROWS else op.ALGORITHMS[1:]:
            found = group(terms[group.rank], algorithm=algorithm)
            different = int((bits(found) != expected).sum())
            if (fault := group.fault()) is not None:
                return fault
            if different and wrong is None:
                wrong = f"{different} of {found.numel()} sums are wrong ({rows} rows, {algorithm})"
    return wrong


def wrong_gather(group: op.AllReduce) -> str | None:
    """What is not there as it was sent; None: all is."""
    wrong = None
    for turn in range(GATHERS):
        rows, columns = (5, group.hidden) if turn % 3 else (1, group.slot_vectors * VECTOR_BYTES // 2)
        sent = terms_of(group.ranks, rows, columns, turn, group.device)
        words = torch.cat(sent, 1).view(torch.int32)
        expected = torch.where(words == -1, 0x7FFF7FFF, words)
        found = op.all_gather(sent[group.rank], group).view(torch.int32)
        different = int((found != expected).sum())
        if (fault := group.fault()) is not None:
            return fault
        if different and wrong is None:
            wrong = f"{different} of {found.numel()} gathered words are wrong ({rows} rows)"
    return wrong


def bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.bfloat16().view(torch.int16)


def terms_of(ranks: int, rows: int, hidden: int, seed: int, device) -> list[torch.Tensor]:
    """Of each rank, the same on all: a hash of the place, for random numbers that a card draws follow its size. Either
    sign, 2^-7 to 2; some are the word that means "nothing has come" (csrc/all_reduce/kernel.cuh)."""
    words = torch.arange(ranks * rows * hidden, dtype=torch.int32, device=device).add_(seed * 0x1234567)
    for shift, factor in ((16, 0x7FEB352D), (15, -0x7B935975), (16, 1)):  # Chris Wellons' lowbias32
        words.bitwise_xor_((words >> shift).bitwise_and_(0xFFFFFFFF >> shift)).mul_(factor)
    terms = words.bitwise_and_(0x83FF).add_(0x3C00).to(torch.int16).view(torch.bfloat16).view(ranks, rows, hidden)
    terms.view(torch.int16)[:, :, seed % 8 :: 1024] = -1
    terms.view(torch.int32)[:, :, seed % 4 + 4 :: 512] = -1
    return list(terms)


def microseconds(
    call: Callable, x: torch.Tensor, gather: op.Gather, capture=contextlib.nullcontext, pick=statistics.median
) -> float:
    """Time of call(x) in a graph, `pick`ed of all replays but the first of each turn; `capture()` is around its
    capture. All ranks make the same calls, which wait for each other."""
    call(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capture(), torch.cuda.graph(graph):
        y = x
        for _ in range(CHAIN):
            y = call(y)
    gather(None)
    for _ in range(UNTIMED):
        graph.replay()
    times = []
    for _ in range(TURNS):
        gather(None)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        events[-1].synchronize()
        took = [begin.elapsed_time(end) * 1e3 / CHAIN for begin, end in itertools.pairwise(events)]
        times += took[1:]
    return pick(times)


def ping_all(way, rank, ranks, device, gather, hidden) -> tuple[list[dict], str | None]:
    """({"from", "to", "rows", "us"} of those that this rank sends, None), or what was lost: pair by pair, both ways."""
    most = max(ROWS) * hidden * 2 // VECTOR_BYTES
    memory = (op.Peers if way == "peer" else op.Host)(rank, (most + 1) * VECTOR_BYTES, gather)
    took = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    pings, lost = [], None
    for a in range(ranks):
        for b in [other for other in range(ranks) if other != a]:
            gather(None)
            if rank not in (a, b):
                continue
            data, answer = memory.places[b], memory.places[a] + most * VECTOR_BYTES
            there, here = (data, answer) if rank == a else (answer, data)
            for rows in ROWS:
                took.zero_()
                extension.load().all_reduce_ping(
                    there=there,
                    here=here,
                    vectors=rows * hidden * 2 // VECTOR_BYTES,
                    rounds=PINGS,
                    warm_ups=WARM_UPS,
                    sends=rank == a,
                    patience_s=PATIENCE_S,
                    took_ns=took.data_ptr(),
                    stream=cuda_tensors.current_stream(device.index),
                )
                torch.cuda.synchronize(device)
                us = took.item() / 1e3 / (PINGS - WARM_UPS)
                if us == 0:
                    lost = lost or f"{rows} rows from rank {a} to rank {b} did not come, or no answer did"
                elif rank == a:
                    pings.append({"from": a, "to": b, "rows": rows, "us": round(us, 2)})
    gather(None)
    memory.close()
    return pings, lost


def card(index: int) -> torch.device:
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def told(argv: list[str]) -> tuple[dict | None, Connection]:
    """(what is asked, None: nothing came; the connection)"""
    *words, descriptor = argv
    connection = Connection(int(descriptor))
    if words:
        return json.loads(words[0]), connection
    try:
        asked = connection.recv() if connection.poll(ASKED_S) else None
    except EOFError:  # who might have asked has ended
        return None, connection
    if asked is not None:
        join_who_asks()
    return asked, connection


def join_who_asks() -> None:
    """On the processors that the rank has: SGLang binds it to its card's, which a process that was started before did
    not inherit, and host memory is where who first writes it runs."""
    theirs = os.sched_getaffinity(os.getppid())
    if theirs != os.sched_getaffinity(0):
        os.sched_setaffinity(0, theirs)


def main(argv: list[str]) -> int:
    asked, connection = told(argv)
    return 0 if asked is None else answer(asked, connection)


def answer(asked: dict, connection: Connection) -> int:
    def gather(value):
        connection.send((GATHER, value))
        return connection.recv()

    try:
        ways, device = asked.pop("ways"), card(asked.pop("device"))
        for way in ways:
            connection.send((FOUND, examine(way, device=device, gather=gather, **asked)))
    except (RuntimeError, OSError, ImportError) as error:
        connection.send((FAILED, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
        return 1
    connection.poll(None)  # till the other end is closed: its memory is the others', too
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

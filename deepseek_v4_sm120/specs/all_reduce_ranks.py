"""A card's process of calibrate and the benchmark: python3 -m ... RANK RANKS STORE PROVIDER DESCRIPTOR.

On its connection it says what it found at the start, then for each case that comes its error and time; the ranks of
STORE do all of it together. An error ends it, and is what the others' leader hears.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from deepseek_v4_sm120.commands.plan.models import FLASH
from deepseek_v4_sm120.ops import all_reduce as op
from deepseek_v4_sm120.ops import all_reduce_probe
from deepseek_v4_sm120.ops.all_reduce_probe_child import card, microseconds
from deepseek_v4_sm120.ops.all_reduce_probe_process import FAILED, FOUND
from deepseek_v4_sm120.specs import all_reduce as spec
from deepseek_v4_sm120.specs.provider import OURS, STOCK

DISPATCH = "sglang.srt.distributed.device_communicators.custom_all_reduce"


class Way(NamedTuple):
    """How a provider sums: call(x) -> the sum; what is around the capture of a graph; what was found before."""

    call: Callable
    capture: Callable = contextlib.nullcontext
    found: dict | None = None


def ours(rank, ranks, device, gather, most_rows) -> Way:
    """As a server has it: by the way that the probe takes."""
    verdict = all_reduce_probe.probe(rank, ranks, device.index, gather, hidden=FLASH.hidden)
    if verdict.transport is None:
        raise RuntimeError(verdict.describe())
    group = op.AllReduce(rank, ranks, device, gather, hidden=FLASH.hidden, transport=verdict.transport)
    return Way(group, found=verdict.as_dict())


def nccl(rank, ranks, device, gather, most_rows) -> Way:
    group = torch.distributed.new_group(backend="nccl")

    def call(x):
        y = x.clone()  # NCCL sums in place; SGLang's own way copies as well
        torch.distributed.all_reduce(y, group=group)
        return y

    return Way(call)


def stock(rank, ranks, device, gather, most_rows) -> Way:
    """What SGLang's coordinator does: its communicator where that takes the sum, else NCCL."""
    group, otherwise = torch.distributed.group.WORLD, nccl(rank, ranks, device, gather, most_rows).call
    dispatch = importlib.import_module(DISPATCH).dispatch_custom_allreduce
    theirs = dispatch(group=group, device=device)(group=group, device=device)

    def call(x):
        takes = not theirs.disabled and theirs.should_custom_ar(x)
        return theirs.custom_all_reduce(x) if takes else otherwise(x)

    return Way(call, theirs.capture)


def pcie_ipc(rank, ranks, device, gather, most_rows) -> Way:
    """FlashInfer's, as SGLang has it, with its tuning."""
    home, group = importlib.import_module(spec.PCIE_IPC_HOME), torch.distributed.new_group(backend="nccl")
    made = home.PcieIpcCommunicator(group=group, device=device, cpu_group=torch.distributed.group.WORLD)
    made.prepare(hidden=FLASH.hidden, max_rows=most_rows)
    otherwise = nccl(rank, ranks, device, gather, most_rows).call
    return Way(lambda x: made.pcie_ipc_all_reduce(x) if made.should_pcie_ipc_ar(x) else otherwise(x))


WAYS = {OURS: ours, STOCK: stock, spec.NCCL: nccl, spec.PCIE_IPC: pcie_ipc}


def measured(provider: str, way: Way, case: spec.Case, rank: int, device, gather) -> tuple[float, float]:
    """(greatest error of the case's inputs, microseconds)."""
    errors = [
        spec.error(provider, way.call(terms[rank]), terms)
        for terms in spec.correctness_inputs(case, device=str(device))
    ]
    x = torch.zeros(case.rows, FLASH.hidden, dtype=torch.bfloat16, device=device)
    return max(errors), microseconds(way.call, x, gather, way.capture)


def main(argv: list[str]) -> int:
    rank, ranks, store, provider, connection = int(argv[0]), int(argv[1]), *argv[2:4], Connection(int(argv[4]))
    try:
        device = card(rank)
        init = f"file://{store}"
        torch.distributed.init_process_group("gloo", init_method=init, rank=rank, world_size=ranks)

        def gather(value):
            told = [None] * ranks
            torch.distributed.all_gather_object(told, value)
            return told

        way = WAYS[provider](rank, ranks, device, gather, op.MAX_ROWS)
        connection.send((FOUND, way.found))
        while True:
            case = connection.recv()
            connection.send((FOUND, measured(provider, way, case, rank, device, gather)))
    except EOFError:  # no more cases
        return 0
    except (RuntimeError, OSError, ImportError) as error:
        connection.send((FAILED, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

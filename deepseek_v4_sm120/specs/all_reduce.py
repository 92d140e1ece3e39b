"""What all_reduce is measured by: the sums between the cards of a step, which all ranks' processes make together.

The self-test has two ranks on one card. calibrate starts a process for each card of the plan (all_reduce_ranks.py);
where the machine has fewer, there is nothing to measure.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait

import torch

from deepseek_v4_sm120.commands.plan.models import FLASH
from deepseek_v4_sm120.ops import all_reduce as op
from deepseek_v4_sm120.ops.all_reduce_probe_process import FOUND, Child
from deepseek_v4_sm120.reference import all_reduce as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs.check import ON_GPU, Check, Failure, within
from deepseek_v4_sm120.specs.provider import OURS, STOCK, Provider, is_installed, our_problem, rows_of, sglang_version

ERROR = "relative error against sums in float32 in the order of ranks; of ours, 0 is the same bits"
NCCL, PCIE_IPC = "nccl", "flashinfer pcie_ipc"
PCIE_IPC_HOME = "sglang.srt.distributed.device_communicators.pcie_ipc_ar"  # 0.5.21 and later
SINCE = (0, 5, 13)
SUMS = 2 * FLASH.layers + 1  # of a step: the embedding's, and each layer's two
PATIENCE_S = 5.0
RANK_PROGRAM = (sys.executable, "-m", "deepseek_v4_sm120.specs.all_reduce_ranks")
START_S, CASE_S = 180.0, 120.0  # of a card's process: imports and NCCL, then a case


# ---- inputs


def make_terms(
    ranks: int, rows: int, seed: int, *, hidden=FLASH.hidden, device="cpu", hard=False
) -> list[torch.Tensor]:
    """bf16 terms of each rank. hard: NaNs of all bits, infinities, zeros of both signs and the largest numbers too."""
    generator = torch.Generator(device).manual_seed(seed)
    terms = [torch.randn(rows, hidden, device=device, generator=generator).bfloat16() for _ in range(ranks)]
    if hard:
        for rank, term in enumerate(terms):
            words = term.view(torch.int16).flatten()
            for at, word in enumerate((-1, -1, 0x7F80, -0x80, -0x8000, 0, 0x7F7F, 0x7FFF)):
                words[rank * 3 + at :: 97 + rank] = word
    return terms


def differing(found: torch.Tensor, terms: list[torch.Tensor]) -> int:
    """Sums that have other bits than the specification's; a NaN is any NaN."""
    expected = reference.all_reduce(terms)
    other = found.view(torch.int16) != expected.view(torch.int16)
    return int((other & ~(expected.isnan() & found.isnan())).sum())


def make_logits(
    ranks: int, rows: int, seed: int, *, columns: int | None = None, dtype=torch.bfloat16, device="cpu"
) -> list[torch.Tensor]:
    """What each rank gathers, its part of the vocabulary; words of all bits, NaNs and infinities too."""
    generator = torch.Generator(device).manual_seed(seed)
    columns = columns or FLASH.vocab // ranks
    sent = [torch.randn(rows, columns, device=device, generator=generator).to(dtype) for _ in range(ranks)]
    for rank, logits in enumerate(sent):
        words = logits.view(torch.int32).flatten()
        for at, word in enumerate((-1, 0x7FC0FFFF, 0x7F800000, -0x800000, -0x8000_0000, 0, -0x10000, 0xFFFF)):
            words[(rank * 3 + at) % words.numel() :: 97 + rank] = word
    return sent


def misplaced(found: torch.Tensor, sent: list[torch.Tensor]) -> int:
    """Words that are not what the specification has there, to the bit."""
    return int((found.view(torch.int32) != reference.all_gather(sent).view(torch.int32)).sum())


# ---- a group whose ranks are threads of this process, on one card


class Meeting:
    """An all-gather between threads."""

    def __init__(self, ranks: int, timeout: float = 60):
        self._barrier, self._told = threading.Barrier(ranks, timeout=timeout), [None] * ranks

    def gather(self, rank: int) -> op.Gather:
        def all_gather(value):
            self._told[rank] = value
            self._barrier.wait()
            told = list(self._told)
            self._barrier.wait()
            return told

        return all_gather


def in_threads(ranks: int, *, patience_s=PATIENCE_S, traps=False, **options) -> list[op.AllReduce]:
    """A group on the current card."""
    meeting, device = Meeting(ranks), torch.device("cuda", torch.cuda.current_device())
    options |= {"patience_s": patience_s, "traps": traps}
    with ThreadPoolExecutor(ranks) as pool:
        made = [pool.submit(op.AllReduce, r, ranks, device, meeting.gather(r), **options) for r in range(ranks)]
        return [one.result() for one in made]


def summed(group: list[op.AllReduce], terms, streams, *, call=op.all_reduce, **options) -> list[torch.Tensor]:
    """Each rank's sum, in a stream of its own."""
    outs = []
    for one, term, stream in zip(group, terms, streams, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outs.append(call(term, one, **options))
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    return outs


def gathered(group: list[op.AllReduce], sent, streams) -> list[torch.Tensor]:
    """The same of a gather."""
    return summed(group, sent, streams, call=op.all_gather)


# ---- self-test


def checks(quick: bool) -> Iterator[Check]:
    yield Check("all_reduce", "the specification's rounding", _check_reference)
    for transport in op.TRANSPORTS:
        run = functools.partial(_check_one_card, transport)
        yield Check("all_reduce", f"two ranks on one card, {transport} memory", run, ON_GPU)


def _check_reference() -> str:
    terms = make_terms(4, 3, 1, hidden=512)
    exact = torch.stack([term.double() for term in terms]).sum(0)
    return within(relative_error(reference.all_reduce(terms), exact), 2.0**-8)  # a rounding to bf16


def _check_one_card(transport: str) -> str:
    """All kernels, few rows and many, every generation of places."""
    group = in_threads(2, transport=transport)
    streams = [torch.cuda.Stream() for _ in group]
    calls = 0
    for turn, rows in enumerate((1, 8, 64, 65, op.MAX_ROWS, 1, 2, 3)):
        terms = make_terms(2, rows, turn, device="cuda", hard=True)
        for algorithm in op.ALGORITHMS if rows <= op.ONE_SHOT_ROWS else op.ALGORITHMS[1:]:
            for rank, out in enumerate(summed(group, terms, streams, algorithm=algorithm)):
                wrong = differing(out, terms)
                if fault := next(filter(None, (one.fault() for one in group)), None):
                    raise Failure(fault)
                if wrong:
                    raise Failure(f"{wrong} of {out.numel()} sums of rank {rank} differ: {rows} rows, {algorithm}")
            calls += 1
        sent = make_logits(2, min(rows, op.GATHERED_ROWS), turn, device="cuda")
        if any(misplaced(out, sent) for out in gathered(group, sent, streams)):
            raise Failure(next(filter(None, (one.fault() for one in group)), f"words of {rows} gathered rows differ"))
        calls += 1
    for one in group:
        one.close()
    return f"{calls} sums and gathers, all bits as specified"


# ---- calibrate


@dataclass(frozen=True)
class Case:
    rows: int
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.ranks} cards, {self.rows} rows"

    @property
    def calls(self) -> int:
        return SUMS

    @property
    def point(self) -> str:
        return f"{self.rows} rows"

    @property
    def bytes_per_call(self) -> int:
        return 2 * FLASH.hidden * self.rows * self.ranks


def cases(*, tp: int, context: int, concurrency: int, quick: bool) -> list[Case]:
    return [Case(rows, tp) for rows in rows_of(concurrency, quick, op.MAX_ROWS)]


def not_here(shapes: dict, cards: int) -> str | None:
    """Why there is nothing to measure on a machine with so many cards; None: there is."""
    if shapes["tp"] == 1:
        return "one card has nothing to sum"
    return f"needs {shapes['tp']} cards, there are {cards}" if cards < shapes["tp"] else None


def max_error(provider: str, case: Case) -> float:
    return bounds.ALL_REDUCE.truth if provider == OURS else bounds.ALL_REDUCE.others


def correctness_inputs(case: Case, device: str = "cuda") -> list[list[torch.Tensor]]:
    """Drawn on the CPU: cards of two sizes draw other numbers from one seed, and each rank has to know all terms."""
    drawn = [make_terms(case.ranks, case.rows, seed) for seed in range(2)]
    return [[term.to(device) for term in terms] for terms in drawn]


class TimingInputs:
    """The ranks' processes make theirs."""

    def calls(self, case: Case, count: int) -> list:
        return []


def error(provider: str, result: torch.Tensor, terms: list[torch.Tensor]) -> float:
    if provider == OURS and differing(result, terms):
        return float("inf")
    return relative_error(result, reference.all_reduce(terms))


def providers() -> tuple[Provider, ...]:
    """Their `build` is the ranks' (all_reduce_ranks.py)."""
    sglang, flashinfer = ("sglang",), ("sglang", "flashinfer")
    return (
        Provider(OURS, our_problem, lambda: None),
        Provider(STOCK, _stock_problem, lambda: None, packages=sglang),
        Provider(NCCL, lambda: None, lambda: None),
        Provider(PCIE_IPC, _pcie_ipc_problem, lambda: None, packages=flashinfer),
    )


def _stock_problem() -> str | None:
    return None if (sglang_version() or SINCE) >= SINCE else "0.5.12 has no communicator of a group to ask"


def _pcie_ipc_problem() -> str | None:
    if not is_installed(PCIE_IPC_HOME):
        return "this SGLang does not know FlashInfer's PCIe sums"
    if not is_installed("flashinfer.comm.pcie_ipc_ar"):
        return "this FlashInfer has none"
    return None


class Together:
    """The processes of a job, one for each card."""

    def __init__(self, provider: str, ranks: int):
        self._folder = tempfile.TemporaryDirectory()
        words = (str(ranks), f"{self._folder.name}/store", provider)
        self._children = [Child([*RANK_PROGRAM, str(rank), *words]) for rank in range(ranks)]
        self.found = self._answers(START_S)[0]

    def ask(self, case: Case) -> tuple[float, float]:
        """(error, microseconds), the greatest of all ranks'."""
        for child in self._children:
            child.answer(case)
        errors, times = zip(*self._answers(CASE_S), strict=True)
        return max(errors), max(times)

    def _answers(self, seconds: float) -> list:
        """Of each rank; one that fails is not waited for by way of the others, which wait for it."""
        told, end = {}, time.monotonic() + seconds
        while len(told) < len(self._children):
            waiting = {child.connection: rank for rank, child in enumerate(self._children) if rank not in told}
            ready = wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                self.end()
                raise RuntimeError(f"rank {min(waiting.values())} said nothing for {seconds:.0f} s")
            for rank in sorted(waiting[connection] for connection in ready):
                kind, told[rank] = self._children[rank].next(0.0)
                if kind != FOUND:
                    self.end()
                    raise RuntimeError(f"rank {rank}: {told[rank]}")
        return [told[rank] for rank in range(len(self._children))]

    def end(self) -> None:
        for child in self._children:
            child.end()
        self._folder.cleanup()


_together: dict[tuple[str, int], Together] = {}  # of the job under way


def measure(provider: str, case: Case) -> tuple[float, float, str]:
    """(error, microseconds, how) of a case, by all ranks; RuntimeError where one is lost."""
    key = provider, case.ranks
    if key not in _together:
        for other in _together.values():
            other.end()
        _together.clear()
        _together[key] = Together(provider, case.ranks)
    return *_together[key].ask(case), "graph"


def found(provider: str) -> dict | None:
    """What the probe found, as its verdict has it."""
    return next((one.found for (name, _), one in _together.items() if name == provider == OURS), None)

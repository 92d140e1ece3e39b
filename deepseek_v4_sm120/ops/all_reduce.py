"""Public sums and gathers between the cards of one host: owns the memory where they meet, checks arguments, launches.

One process a card, as SGLang's tensor parallelism has it. Every card ends with the same bits: fp32 sums in the order of
ranks, rounded once, by whatever way and in however many hops the terms come. A gather lays the ranks' rows side by
side.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import functools
import mmap
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch

from deepseek_v4_sm120.ops.all_reduce_sizes import (
    GATHERED_ROWS,
    MAX_ROWS,
    ONE_SHOT_ROWS,
    RANKS,
    places_bytes,
    slot_vectors,
    vectors,
)
from deepseek_v4_sm120.ops.shared import cuda_tensors, extension
from deepseek_v4_sm120.ops.shared.checks import BF16, CONTIGUOUS, FP32, VECTOR, Call, Question

TRANSPORTS = ("peer", "host")
ALGORITHMS = ("one_shot", "two_shot")
GATHERED = BF16 + FP32
# A rank that compiles kernels keeps the others waiting, or one that merges all profiles between two replays of a graph.
# SGLang's own watchdog waits as long; who has ended is seen at once.
PATIENCE_S = 300.0
# By ranks. A row of Flash's is 8 KB times ranks - 1 in one hop, 24 or 56, and 12 or 14 in two, over PCIe at 50 GB/s;
# the second hop takes 1.5 us and more. Reckoned
_ONE_HOP_ROWS = {2: ONE_SHOT_ROWS, 4: 8, 8: 4}
_LOOK_S, _TOLD_S = 0.02, 0.2  # between two looks at the others; that a kernel has to tell where this process ends
_STAT, _PF_EXITING = "/proc/{}/stat", 0x4
_GATHER_TAG = 1 << 31  # of a tag: the call is a gather

Gather = Callable[[object], Sequence]  # object -> [object of each rank], over the CPU, in the order of ranks


class AllReduce:
    """What this process holds of one group's sums and gathers. All its processes make one, at the same time.

    rank, ranks   this process's place in the group, and its size: 2, 4 or 8
    device        its card
    gather        called a few times here
    max_rows      the most of a call, of `hidden` bf16 each; hidden a multiple of 64
    transport     "peer": cards write into each other's memory; "host": by way of host memory
    patience_s    how long a call waits for another rank's terms before it ends this process's CUDA work
    traps         False: a call out of patience leaves with wrong sums and `fault()` says so, for a probe; its memory
                  is of no use then
    name          whose calls they are, for messages
    raises        ValueError (argument), RuntimeError, OSError (no such way between these cards: says the reason)

    All ranks make the same calls, with the same sizes, in the same order, one at a time: they are in one stream, or
    ordered by events. Replays of a graph are calls. Memory: `bytes`, of the card or of the host, outside torch's pool.

    Groups of the same processes take turns, too: in the same order on all ranks, the calls of one done on the card
    before another's start. Side by side they are safe only where every card holds all blocks of all that may run at
    once, calls launched ahead among them: else one card waits in one group, the other in the other, each for what the
    other's waiting blocks keep off the card. Nothing checks that.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        device: torch.device,
        gather: Gather,
        *,
        max_rows: int = MAX_ROWS,
        hidden: int = 4096,
        transport: str = "peer",
        patience_s: float = PATIENCE_S,
        traps: bool = True,
        name: str = "all_reduce",
    ):
        _check_group(rank, ranks, max_rows, hidden, transport)
        self.rank, self.ranks, self.device, self.transport = rank, ranks, device, transport
        self.max_rows, self.hidden = max_rows, hidden
        self.one_shot_rows = min(ONE_SHOT_ROWS, max_rows)
        self._patience_s, self._traps, self._name = patience_s, traps, name
        self._sizes = vectors(max_rows, hidden)
        _C = extension.load()
        self.bytes = places_bytes(ranks, transport, hidden, max_rows)
        self.slot_vectors = slot_vectors(ranks, transport, hidden, max_rows)
        with torch.cuda.device(device):
            self._state = torch.zeros(_C.all_reduce_state_words, dtype=torch.int32, device=device)
            self._fault = torch.zeros(_C.all_reduce_fault_words, dtype=torch.int32, pin_memory=True)
            self._memory = (Peers if transport == "peer" else Host)(rank, self.bytes, gather)
        with contextlib.ExitStack() as unless_made:
            unless_made.callback(self._memory.leave)
            self._places = torch.tensor(self._memory.places, dtype=torch.uint64)
            torch.cuda.synchronize(device)  # the state is zero before a call on any stream
            # of the smallest card: what all ranks must decide alike is decided by it
            self.num_sms = min(
                gather(cuda_tensors.num_sms(device.index))
            )  # and nobody sends before all have opened all
            self._watch = _Watch(rank, self._fault, gather(os.getpid()), name)
            unless_made.pop_all()

    def __call__(self, x: torch.Tensor, **options) -> torch.Tensor:
        return all_reduce(x, self, **options)

    def takes(self, x: torch.Tensor) -> bool:
        """True where all_reduce computes the sum of x; an adapter asks before it replaces a call."""
        if x.ndim != 2 or not 1 <= x.shape[0] <= self.max_rows or x.device != self.device:
            return False
        ask = Question("all_reduce", "x", x)
        return ask.tensor("x", x, BF16, ("rows", self.hidden), CONTIGUOUS, VECTOR) is not None

    def gathers(self, x: torch.Tensor) -> bool:
        """True where all_gather takes x, in few rows; an adapter asks before it replaces a call."""
        if x.ndim != 2 or not 1 <= x.shape[0] <= GATHERED_ROWS or x.device != self.device:
            return False
        ask = Question("all_gather", "x", x)
        shape = ask.tensor("x", x, GATHERED, ("rows", "columns"), CONTIGUOUS, VECTOR)
        return (
            shape is not None and not (row := shape[1] * x.itemsize) % VECTOR and 0 < row // VECTOR <= self.slot_vectors
        )

    def arguments(self, tag: int) -> dict:
        """What a kernel that sums takes of the group: this one, and others that sum on their way (ops/mhc.py)."""
        return {
            "places": self._places.data_ptr(),
            "ranks": self.ranks,
            "state": self._state.data_ptr(),
            "fault": self._fault.data_ptr(),
            "rank": self.rank,
            **self._sizes,
            "transport": self.transport,
            "tag": tag,
            "patience_s": self._patience_s,
            "traps": self._traps,
        }

    def fault(self) -> str | None:
        """What the kernel said before it gave up, or None."""
        return describe_fault(self.rank, self._fault, self._name)

    def close(self) -> None:
        """Gives the memory back. This rank's calls are over then, so nobody writes into its memory any more; it makes
        no other call, and so do the others."""
        torch.cuda.synchronize(self.device)
        self._watch.end()
        self._memory.close()


def all_reduce(x, group: AllReduce, *, out=None, tag: int = 0, algorithm: str | None = None):
    """The sum of x over the ranks of `group`.

    x            [rows, hidden] bf16, contiguous, 16-byte aligned, on the group's device; 1 to the group's max_rows rows
    group        AllReduce
    out          like x, written in place, not over x; None: a new tensor
    tag          a number that a message about a rank that did not come has
    algorithm    "one_shot" (one hop, up to 64 rows), "two_shot" (two, 2 / ranks of the bytes); None: by the number of
                 rows. The bits are the same
    returns      out: sums in fp32 in the order of ranks, rounded to bf16 once
    determinism  the same bits on all ranks, in every run and every batch: a row alone equals the row among others
    raises       TypeError (dtype), ValueError (shape, stride, alignment, overlap, value), RuntimeError (device, launch)
    cuda graphs  capture-safe: no host sync; which memory a call takes is found on the device; allocates only out
    source       docs/notes/all_reduce.md
    """
    check = Call("all_reduce", "x", x)
    rows, _ = check.tensor("x", x, BF16, ("rows", group.hidden), CONTIGUOUS, VECTOR)
    if not 1 <= rows <= group.max_rows:
        check.refuse("shape", "x", f"have 1 to {group.max_rows} rows", rows)
    if out is not None:
        check.given("out", out)
        check.written("x", x, ("out", out))
        check.tensor("out", out, BF16, x.shape, CONTIGUOUS, VECTOR)
    if algorithm is None:
        algorithm = algorithm_for(rows, group.ranks)
    check.one_of("algorithm", algorithm, ALGORITHMS if rows <= ONE_SHOT_ROWS else ALGORITHMS[1:])
    check.on_cuda()
    if x.device != group.device:
        check.refuse("device", "x.device", f"be the group's, {group.device}", x.device)
    if out is None:
        out = torch.empty_like(x)
    with cuda_tensors.on_device_of(x):
        _launch(x, out, group, algorithm, tag)
    return out


def all_gather(x, group: AllReduce, *, out=None, tag: int = 0):
    """The ranks' x side by side in each row: logits, of which each rank has its part of the vocabulary.

    x            [rows, columns] bf16 or float32, contiguous, 16-byte aligned, on the group's device; a row is 1 to the
                 group's slot_vectors times 16 bytes
    group        AllReduce; all its ranks' x have one shape
    out          [rows, ranks * columns] like x, contiguous, 16-byte aligned, not over x; None: a new tensor
    tag          a number that a message about a rank that did not come has
    returns      out: rank 0's columns of a row, then rank 1's ...; every word as it was sent, but for words of all bits
                 set, which are NaNs and arrive as another NaN, on all ranks the same
    launches     one, or where the rows need more than slot_vectors, one for each equal part of them
    errors       as all_reduce has them
    cuda graphs  as all_reduce, whose calls it may stand between
    source       docs/notes/all_reduce.md
    """
    check = Call("all_gather", "x", x)
    rows, columns = check.tensor("x", x, GATHERED, ("rows", "columns"), CONTIGUOUS, VECTOR)
    row_vectors, rest = divmod(columns * x.itemsize, VECTOR)
    if rest or not 1 <= row_vectors <= group.slot_vectors:
        expected = f"have rows of 1 to {group.slot_vectors} times {VECTOR} bytes"
        check.refuse("shape", "x", expected, f"{columns} times {x.itemsize}")
    if rows < 1:
        check.refuse("shape", "x", "have a row", rows)
    if out is not None:
        check.given("out", out)
        check.written("x", x, ("out", out))
        check.tensor("out", out, (x.dtype,), (rows, group.ranks * columns), CONTIGUOUS, VECTOR)
    check.on_cuda()
    if x.device != group.device:
        check.refuse("device", "x.device", f"be the group's, {group.device}", x.device)
    if out is None:
        out = torch.empty(rows, group.ranks * columns, dtype=x.dtype, device=x.device)
    launches = -(-rows // (group.slot_vectors // row_vectors))
    with cuda_tensors.on_device_of(x):
        for sent, gathered in zip(x.tensor_split(launches), out.tensor_split(launches), strict=True):
            _launch(sent, gathered, group, "gather", tag | _GATHER_TAG, row_vectors=row_vectors)
    return out


def _launch(x, out, group: AllReduce, algorithm: str, tag: int, **further) -> None:
    """Checked arguments to raw pointers; x's device is current."""
    index = x.device.index
    extension.load().all_reduce(
        x=x.data_ptr(),
        out=out.data_ptr(),
        vectors=x.nbytes // VECTOR,
        **further,
        **group.arguments(tag),
        algorithm=algorithm,
        rows=x.shape[0],
        num_sms=cuda_tensors.num_sms(index),
        pdl=True,
        stream=cuda_tensors.current_stream(index),
    )


@functools.lru_cache(maxsize=4096)
def algorithm_for(rows: int, ranks: int) -> str:
    """One hop for few rows, and always between two cards, where two hops move as many bytes."""
    return "one_shot" if rows <= _ONE_HOP_ROWS[ranks] else "two_shot"


def describe_fault(rank: int, fault, name: str = "all_reduce") -> str | None:
    told, waited_for, call, tag, rows, _ = fault.tolist()
    if not told:
        return None
    is_gather, tag = tag < 0, tag % _GATHER_TAG
    where = f"{'gather' if is_gather else 'sum'} {tag} of a graph" if tag else "outside of graphs"
    if is_gather and not tag:
        where = f"a gather {where}"
    return (
        f"{name}: rank {rank} waited in vain for rank {waited_for}, in call {call}, {where}, of {rows} rows: "
        "that rank has ended, hangs, or made other calls"
    )


def made_together(gather: Gather, make: Callable[[Gather], object]) -> tuple[object | None, str | None]:
    """(make(gather), None) on all ranks, or (None, why) on all: who cannot go on says so where the others gather."""

    def all_gather(value):
        told = gather((None, value))
        if failed := [f"rank {rank}: {why}" for rank, (why, _) in enumerate(told) if why is not None]:
            raise _OthersFailed("; ".join(failed))
        return [value for _, value in told]

    try:
        made = make(all_gather)
        all_gather(None)
    except _OthersFailed as error:
        return None, str(error)
    except (RuntimeError, OSError) as error:
        told = gather((str(error), None))
        return None, "; ".join(f"rank {rank}: {why}" for rank, (why, _) in enumerate(told) if why is not None)
    return made, None


class _OthersFailed(Exception):
    pass


class Peers:
    """Each card's memory, opened by all."""

    def __init__(self, rank, size, gather):
        _C = extension.load()
        self._own = _C.all_reduce_allocate(bytes=size)
        told = gather((os.getpid(), self._own, _C.all_reduce_handle(memory=self._own)))
        # a process cannot open what is its own: there ranks are threads, for tests
        self._opened = {r: _C.all_reduce_open(handle=h) for r, (pid, _, h) in enumerate(told) if pid != os.getpid()}
        self.places = [self._opened.get(r, memory) for r, (_, memory, _) in enumerate(told)]

    def leave(self):
        """Where there will be no group: others may have opened what is this rank's own, so that stays."""
        for memory in self._opened.values():
            extension.load().all_reduce_close(memory=memory)

    def close(self):
        self.leave()
        extension.load().all_reduce_release(memory=self._own)


class Host:
    """Host memory without a name, which ends with the last process that has it: rank 0 makes it, the others find it
    among its open files."""

    def __init__(self, rank, size, gather):
        with contextlib.ExitStack() as until_all_have_it, contextlib.ExitStack() as unless_made:
            file = os.memfd_create("all_reduce") if rank == 0 else None
            if file is not None:
                until_all_have_it.callback(os.close, file)
                os.ftruncate(file, size)
                with mmap.mmap(file, size) as memory:
                    memory.write(b"\xff" * size)
            pid, number = gather((os.getpid(), file))[0]
            if file is None:
                file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
                until_all_have_it.callback(os.close, file)
            self._map = unless_made.enter_context(contextlib.closing(mmap.mmap(file, size)))
            gather(None)
            until_all_have_it.close()
            self._view = (ctypes.c_char * size).from_buffer(self._map)
            unless_made.callback(self._forget_view)
            self._address = ctypes.addressof(self._view)
            seen = extension.load().all_reduce_register_host(memory=self._address, bytes=size)
            # CUDA knows the address until it is told, and would refuse whoever is given it next
            unless_made.callback(extension.load().all_reduce_unregister_host, memory=self._address)
            self.places = [seen] * len(gather(None))
            self._made = unless_made.pop_all()

    def _forget_view(self):
        del self._view

    def close(self):
        self._made.close()

    leave = close


class _Watch:
    """A thread that makes calls give up at once when a rank's process ends, and prints that, and what a kernel told.

    A killed process closes its sockets long before it has ended: CUDA's memory is taken down first, for seconds. Where
    SGLang waits in such a socket, this process ends, too, so what its end does (atexit) is the last look.
    """

    def __init__(self, rank, fault, pids, name="all_reduce"):
        self._rank, self._fault, self._name, self._lock = rank, fault, name, threading.Lock()
        self._others = [_Process(r, pid) for r, pid in enumerate(pids) if r != rank]
        self._is_told, self._end = False, threading.Event()
        self._thread = threading.Thread(target=self._run, name="all_reduce watch", daemon=True)
        self._thread.start()
        atexit.register(self._look_last)

    def _run(self):
        while not self._end.wait(_LOOK_S) and not self._look():
            pass

    def _look(self) -> bool:
        """True once a kernel has told: it has trapped, and nothing comes after."""
        with self._lock:
            for other in [other for other in self._others if other.has_ended()]:
                self._fault[5] = 1
                self._others.remove(other)
                other.close()
                self._say(f"{self._name}: rank {self._rank}: rank {other.rank} (process {other.pid}) has ended")
            text = None if self._is_told else describe_fault(self._rank, self._fault, self._name)
            if text is not None:
                self._is_told = True
                self._say(text)
            return self._is_told

    def _look_last(self):
        """A kernel that waits for who has ended needs a moment to tell."""
        end = time.monotonic() + _TOLD_S
        while not self._look() and self._fault[5] and time.monotonic() < end:
            time.sleep(_LOOK_S)

    @staticmethod
    def _say(text: str) -> None:
        print(f"deepseek_v4_sm120: {text}", file=sys.stderr, flush=True)

    def end(self):
        atexit.unregister(self._look_last)
        self._end.set()
        self._thread.join()
        for other in self._others:
            other.close()


class _Process:
    """Another rank's: its files are opened while it lives, so they never are those of a later one with its number."""

    def __init__(self, rank, pid):
        self.rank, self.pid = rank, pid
        self._pidfd, self._ended = None, select.poll()
        try:
            self._pidfd = os.pidfd_open(pid)
            self._ended.register(self._pidfd, select.POLLIN)
        except OSError as error:  # a kernel before 5.3, a container that may not: then by its stat alone
            if error.errno not in (errno.ENOSYS, errno.EPERM):
                raise
        try:
            self._stat = os.open(_STAT.format(pid), os.O_RDONLY)
        except OSError:  # hidden from this user: its end alone is seen
            self._stat = None

    def has_ended(self) -> bool:
        """Or is about to."""
        return bool(self._ended.poll(0)) or self._stat is not None and is_exiting(self._stat)

    def close(self):
        for opened in (self._pidfd, self._stat):
            if opened is not None:
                os.close(opened)


def is_exiting(stat: int) -> bool:
    """By an open /proc/<pid>/stat: in exit (PF_EXITING of its flags), not yet reaped, or gone."""
    try:
        said = os.pread(stat, 1024, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    state, *_, flags = said.rpartition(b")")[2].split()[:7]
    return state in (b"Z", b"X") or bool(int(flags) & _PF_EXITING)


def _check_group(rank, ranks, max_rows, hidden, transport) -> None:
    if ranks not in RANKS:
        raise ValueError(f"all_reduce: ranks must be {', '.join(map(str, RANKS))}, got {ranks}")
    if not 0 <= rank < ranks:
        raise ValueError(f"all_reduce: rank must be 0..{ranks - 1}, got {rank}")
    if max_rows < 1:
        raise ValueError(f"all_reduce: max_rows must be at least 1, got {max_rows}")
    if hidden < 64 or hidden % 64:
        raise ValueError(f"all_reduce: hidden must be a multiple of 64, got {hidden}")
    if transport not in TRANSPORTS:
        raise ValueError(f"all_reduce: transport must be {' or '.join(TRANSPORTS)}, got {transport!r}")

"""Public sums between the cards of one host: owns the memory in which they meet, checks the arguments, launches.

One process a card, as SGLang's tensor parallelism has it. Every card ends with the same bits: fp32 sums in the order of
ranks, rounded once, by whatever way and in however many hops the terms come.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import select
import sys
import threading
from collections.abc import Callable, Sequence

import torch

from deepseek_v4_sm120.ops.shared import cuda_tensors, extension

RANKS = (2, 4, 8)
TRANSPORTS = ("peer", "host")
ONE_SHOT_ROWS = 64  # the most that everybody sends to everybody; more go by way of their owner
PATIENCE_S = 30.0  # a rank that compiles a kernel keeps the others waiting for seconds
_VALUES = 8  # bf16 that a thread moves
_WATCH_S = 0.5


class AllReduce:
    """What this process holds of one group's sums. All its processes make one, at the same time.

    rank, ranks   this process's place in the group, and its size: 2, 4 or 8
    device        its card
    gather        object -> [object of each rank], over the CPU, in the order of ranks: called a few times here
    max_rows      the most of a call, of `hidden` bf16 each; hidden a multiple of 64
    transport     "peer": cards write into each other's memory; "host": by way of host memory
    patience_s    how long a call waits for another rank's terms before it ends this process's CUDA work
    traps         False: a call out of patience leaves with wrong sums and `fault()` says so, for a probe; its memory
                  is of no use then
    raises        ValueError (argument), RuntimeError (no such way between these cards: says CUDA's reason)

    All ranks make the same calls, with the same sizes, in the same order, one at a time: they are in one stream, or
    ordered by events. Replays of a graph are calls. Memory: `bytes`, of the card or of the host, outside torch's pool.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        device: torch.device,
        gather: Callable[[object], Sequence],
        *,
        max_rows: int,
        hidden: int = 4096,
        transport: str = "peer",
        patience_s: float = PATIENCE_S,
        traps: bool = True,
    ):
        _check_group(rank, ranks, max_rows, hidden, transport)
        self.rank, self.ranks, self.device, self.transport = rank, ranks, device, transport
        self.max_rows, self.hidden = max_rows, hidden
        self.one_shot_rows = min(ONE_SHOT_ROWS, max_rows)
        sizes = {
            "one_shot_vectors": self.one_shot_rows * hidden // _VALUES,
            "two_shot_vectors": max_rows * hidden // _VALUES,
        }
        group = {"rank": rank, "ranks": ranks, "transport": transport, "patience_s": patience_s, "traps": traps}
        self._given = group | sizes
        _C = extension.load()
        self.bytes = _C.all_reduce_places_bytes(ranks=ranks, transport=transport, **sizes)
        with torch.cuda.device(device):
            self._state = torch.zeros(_C.all_reduce_state_words, dtype=torch.int32, device=device)
            self._fault = torch.zeros(_C.all_reduce_fault_words, dtype=torch.int32, pin_memory=True)
            self._memory = (_Peers if transport == "peer" else _Host)(rank, self.bytes, gather)
        self._places = torch.tensor(self._memory.places, dtype=torch.uint64)
        torch.cuda.synchronize(device)  # the state is zero before a call on any stream
        # of the smallest card: what all ranks must decide alike is decided by it
        self.num_sms = min(gather(cuda_tensors.num_sms(device.index)))  # and nobody sends before all have opened all
        self._watch = _Watch(rank, self._fault, gather(os.getpid()))

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor | None = None, tag: int = 0, algorithm: str | None = None):
        """The sum of x over the ranks.

        x           [rows, hidden] bf16, contiguous, 16-byte aligned, on the group's device; 1 to max_rows rows
        out         like x; may be x; None: a new tensor
        tag         a number that a message about a rank that did not come has
        algorithm   "one_shot" (one hop), "two_shot" (two, 2 / ranks of the bytes); None: by the number of rows. The
                    bits are the same
        returns     out: sums in fp32 in the order of ranks, rounded to bf16 once
        raises      TypeError (dtype), ValueError (shape, stride, alignment), RuntimeError (device)
        cuda graphs capture-safe: no host sync; which memory a call takes is found on the device
        """
        _check_tensor("x", x, self)
        if out is None:
            out = torch.empty_like(x)
        else:
            _check_tensor("out", out, self)
            if out.shape != x.shape:
                raise ValueError(f"all_reduce: out.shape must be x's, {list(x.shape)}, got {list(out.shape)}")
        rows = x.shape[0]
        index = self.device.index
        with torch.cuda.device(self.device):
            extension.load().all_reduce(
                x=x.data_ptr(),
                out=out.data_ptr(),
                vectors=x.numel() // _VALUES,
                **self.arguments(tag),
                algorithm=algorithm or algorithm_for(rows, self.ranks),
                rows=rows,
                num_sms=cuda_tensors.num_sms(index),
                pdl=True,
                stream=torch._C._cuda_getCurrentRawStream(index),
            )
        return out

    def arguments(self, tag: int) -> dict:
        """What a kernel that sums takes of the group: this one, and others that sum on their way (ops/mhc.py)."""
        return {
            **self._given,
            "places": self._places.data_ptr(),
            "state": self._state.data_ptr(),
            "fault": self._fault.data_ptr(),
            "tag": tag,
        }

    def fault(self) -> str | None:
        """What the kernel said before it gave up, or None."""
        return describe_fault(self.rank, self._fault)

    def close(self) -> None:
        """Gives the memory back: when no call runs on any rank, on all of them."""
        self._watch.end()
        self._memory.close()


@functools.cache
def algorithm_for(rows: int, ranks: int) -> str:
    """One hop for few rows, and always between two cards, where two hops move as many bytes."""
    return "one_shot" if rows <= (ONE_SHOT_ROWS if ranks == 2 else 8) else "two_shot"


def describe_fault(rank: int, fault) -> str | None:
    told, waited_for, call, tag, rows, _ = fault.tolist()
    if not told:
        return None
    return (
        f"all_reduce: rank {rank} waited in vain for rank {waited_for}, in call {call}, of {rows} rows, tag {tag}: "
        "that rank has ended, hangs, or made other calls"
    )


class _Peers:
    """Each card's memory, opened by all."""

    def __init__(self, rank, size, gather):
        _C = extension.load()
        self._own = _C.all_reduce_allocate(bytes=size)
        told = gather((os.getpid(), self._own, _C.all_reduce_handle(memory=self._own)))
        # a process cannot open what is its own: there ranks are threads, for tests
        self._opened = {r: _C.all_reduce_open(handle=h) for r, (pid, _, h) in enumerate(told) if pid != os.getpid()}
        self.places = [self._opened.get(r, memory) for r, (_, memory, _) in enumerate(told)]

    def close(self):
        _C = extension.load()
        for memory in self._opened.values():
            _C.all_reduce_close(memory=memory)
        _C.all_reduce_release(memory=self._own)


class _Host:
    """Host memory without a name, which ends with the last process that has it: rank 0 makes it, the others find it
    among its open files."""

    def __init__(self, rank, size, gather):
        file = os.memfd_create("all_reduce") if rank == 0 else None
        if file is not None:
            os.ftruncate(file, size)
            with mmap.mmap(file, size) as memory:
                memory.write(b"\xff" * size)
        pid, number = gather((os.getpid(), file))[0]
        if file is None:
            file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        self._map = mmap.mmap(file, size)
        gather(None)  # rank 0's file stays open until all have it
        os.close(file)
        self._view = (ctypes.c_char * size).from_buffer(self._map)
        self._address = ctypes.addressof(self._view)
        seen = extension.load().all_reduce_register_host(memory=self._address, bytes=size)
        self.places = [seen] * len(gather(None))

    def close(self):
        extension.load().all_reduce_unregister_host(memory=self._address)
        del self._view
        self._map.close()


class _Watch:
    """A thread that makes calls give up at once when a rank's process has ended, and prints what a kernel told."""

    def __init__(self, rank, fault, pids):
        self._rank, self._fault = rank, fault
        self._others = {os.pidfd_open(pid): (r, pid) for r, pid in enumerate(pids) if r != rank}
        self._wake, self._end = os.pipe()
        self._thread = threading.Thread(target=self._run, name="all_reduce watch", daemon=True)
        self._thread.start()

    def _run(self):
        poll = select.poll()
        for number in (*self._others, self._wake):
            poll.register(number, select.POLLIN)
        while True:
            for number, _ in poll.poll(_WATCH_S * 1000):
                if number == self._wake:
                    return
                poll.unregister(number)
                self._fault[5] = 1
            if (text := describe_fault(self._rank, self._fault)) is not None:
                print(f"deepseek_v4_sm120: {text}", file=sys.stderr, flush=True)
                return

    def end(self):
        os.close(self._end)
        self._thread.join()
        for number in (*self._others, self._wake):
            os.close(number)


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


def _check_tensor(name, tensor, group) -> None:
    if tensor.dtype != torch.bfloat16:
        raise TypeError(f"all_reduce: {name}.dtype must be torch.bfloat16, got {tensor.dtype}")
    if tensor.dim() != 2 or tensor.shape[1] != group.hidden or not 1 <= tensor.shape[0] <= group.max_rows:
        wanted = f"[1..{group.max_rows}, {group.hidden}]"
        raise ValueError(f"all_reduce: {name}.shape must be {wanted}, got {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"all_reduce: {name} must be contiguous, got strides {list(tensor.stride())}")
    if tensor.data_ptr() % 16:
        raise ValueError(f"all_reduce: {name} must start on a 16-byte boundary, got {tensor.data_ptr() % 16} past one")
    if tensor.device != group.device:
        raise RuntimeError(f"all_reduce: {name}.device must be the group's, {group.device}, got {tensor.device}")

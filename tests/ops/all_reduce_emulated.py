"""The kernels of csrc/all_reduce on the CPU: compiled (all_reduce_on_cpu.cpp), and as a stand-in for `_C` with which
the operator, its probe and its adapter run between processes of a machine without a card. Their text, memory that
processes share, and no CUDA: what stands for CUDA's calls is here, with the faults that tests ask for.

    python3 all_reduce_emulated.py LIBRARY FAULT [JSON] DESCRIPTOR        a process of the probe
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.insert(0, str(REPO))

from deepseek_v4_sm120.ops import all_reduce_probe_child as child  # noqa: E402
from deepseek_v4_sm120.ops.shared import cuda_tensors, extension  # noqa: E402
from deepseek_v4_sm120.ops.shared.checks import Call  # noqa: E402
from tests.on_cpu import made_of  # noqa: E402

FLAGS = ("-pthread", "-Wall", "-Werror", "-Wno-unknown-pragmas")
HARNESS = Path(__file__).with_name("all_reduce_on_cpu.cpp")
SHARED = ("all_reduce.h", "../mhc/config.h")
SOURCES = (
    *("turn.cuh", "kernel.cuh", "gather.cuh", "ping.cuh", "../device/terms.cuh"),
    *("../mhc/term.h", "../mhc/term.cuh", "../mhc/sum.cuh"),
)
# what a text of the kernels, in a namespace of its own, has of it
SEES_SHARED = """namespace dsv4 {
using namespace ::dsv4;
namespace all_reduce { using namespace ::dsv4::all_reduce; }
namespace mhc { using namespace ::dsv4::mhc; }
}
"""
SMALL = (  # two slices of two rows, two threads without a vector; rows of eight vectors, two for each of four threads
    ("constexpr int kThreads = 128;", "constexpr int kThreads = 3;"),
    ("constexpr int kPingThreads = 512;", "constexpr int kPingThreads = 3;"),
    ("constexpr int kFlashHidden = 4096;", "constexpr int kFlashHidden = 64;"),
    ("constexpr int kTileRows = 16;", "constexpr int kTileRows = 2;"),
    ("constexpr int kMixThreads = 32 * kStreams;", "constexpr int kMixThreads = 10;"),
    ("constexpr int kFusedThreads = 32 * kFusedWarps;", "constexpr int kFusedThreads = 4;"),
)
KERNELS = ("one_shot", "two_shot", "gather")  # as Algorithm has them
US = {"peer": 5.0, "host": 9.0}  # what a call takes, as the emulated probe tells it
LONG_S, SHORT_S = 60.0, 1.0  # of patience: where all is well, and where a fault is due


def text_of(names: tuple[str, ...]) -> str:
    text = "".join((REPO / "csrc/all_reduce" / name).read_text() for name in names)
    return re.sub(r"^#(include|pragma once).*$", "", text, flags=re.M)


def changed(text: str, changes: tuple[tuple[str, str], ...]) -> str:
    """Each change made in the text, which must have it."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def harness(others: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()) -> str:
    """Its text with the kernels in it, and with others: ("ranks, whether by host memory", changes of the kernels')."""
    shared, kernels = text_of(SHARED), text_of(SOURCES)
    small = [[change for change in SMALL if change[0] in text] for text in (shared, kernels)]
    assert len(small[0]) + len(small[1]) == len(SMALL)
    shared, kernels = changed(shared, small[0]), changed(kernels, small[1])
    first, rest = HARNESS.read_text().split("//@@ the kernels\n")
    uses, rest = rest.split("//@@ other texts\n")
    named = {"as_they_are": ()} | {f"text_{number}": changes for number, (_, changes) in enumerate(others)}
    texts = [first.replace("//@@ what is shared", shared)]
    for name, changes in named.items():
        texts.append(f"namespace {name} {{\n{SEES_SHARED}{changed(kernels, changes)}{uses}}}\n")
    table = ", ".join(f"text_{number}::dsv4::kKernels<{only}>" for number, (only, _) in enumerate(others))
    texts.append(f"constexpr dsv4::Kernels kOthers[] = {{{table or 'dsv4::Kernels{}'}}};\n")
    return "".join([*texts, rest])


def program(others: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]) -> Path:
    """Its last argument is one of the others' numbers; -1: the kernels as they are."""
    return made_of(harness(others), *FLAGS, "-Og", "-Wno-unused-function")


def library() -> Path:
    """What stands for the module."""
    return made_of(harness(), *FLAGS, "-Og", "-DLIBRARY", "-shared", "-fPIC")


class Emulated:
    """`_C`, as far as the operator asks it. fault: {"rank", "way", "what"}, or empty; rank: of this process."""

    def __init__(self, library: Path, fault: dict | None = None, rank: int = -1):
        self._library = ctypes.CDLL(str(library))
        self._library.emulated_bytes.restype = self._library.emulated_slot.restype = ctypes.c_int64
        self._library.emulated_ping.restype = self._library.emulated_all_reduce.restype = None
        self.all_reduce_state_words = self._library.emulated_state_words()
        self.all_reduce_fault_words = self._library.emulated_fault_words()
        self._maps: dict[int, tuple] = {}
        self._fault, self._rank = fault or {}, rank

    def _has_fault(self, way: str, *what: str) -> bool:
        due = self._fault.get("what") in what and self._fault["way"] in (way, "both")
        return due and self._fault["rank"] in (self._rank, -1)

    def all_reduce_places_bytes(self, *, ranks, transport, one_shot_vectors, two_shot_vectors):
        sizes = map(ctypes.c_int64, (one_shot_vectors, two_shot_vectors))
        return self._library.emulated_bytes(*sizes, ranks, transport == "host")

    def all_reduce_slot_vectors(self, *, ranks, transport, one_shot_vectors, two_shot_vectors):
        sizes = map(ctypes.c_int64, (one_shot_vectors, two_shot_vectors))
        return self._library.emulated_slot(*sizes, ranks, transport == "host")

    def _map(self, file: int, size: int) -> int:
        mapped = mmap.mmap(file, size)
        view = (ctypes.c_char * size).from_buffer(mapped)
        self._maps[ctypes.addressof(view)] = (mapped, view, file, size)
        return ctypes.addressof(view)

    def all_reduce_allocate(self, *, bytes):
        file = os.memfd_create("a card")
        os.ftruncate(file, bytes)
        address = self._map(file, bytes)
        ctypes.memset(address, 0xFF, bytes)
        return address

    def all_reduce_handle(self, *, memory):
        return pickle.dumps((os.getpid(), *self._maps[memory][2:]))

    def all_reduce_open(self, *, handle):
        if self._has_fault("peer", "refused"):
            raise RuntimeError("all_reduce memory: cudaIpcOpenMemHandle: peer access is not supported")
        pid, file, size = pickle.loads(handle)
        return self._map(os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR), size)

    def all_reduce_close(self, *, memory):
        mapped, view, file, _ = self._maps.pop(memory)
        del view
        with contextlib.suppress(BufferError):  # the exception of a frame may still hold the view
            mapped.close()
        os.close(file)

    def all_reduce_release(self, *, memory):
        self.all_reduce_close(memory=memory)

    def all_reduce_register_host(self, *, memory, bytes):
        return memory

    def all_reduce_unregister_host(self, *, memory):
        pass

    def all_reduce(self, *, x, out, vectors, places, ranks, state, fault, rank, transport, **rest):
        way, rows = transport, rest["rows"]
        if self._has_fault(way, "dies"):
            print("Xid 31: MMU fault", file=sys.stderr, flush=True)
            os._exit(7)
        if self._has_fault(way, "hangs"):
            time.sleep(600)
        if self._has_fault(way, "raises"):
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more lines")
        if self._has_fault(way, "does not come"):
            return
        patience = rest["patience_s"]
        if self._fault:
            lost = self._fault["what"] in ("dies", "raises", "hangs", "does not come")
            patience = SHORT_S if lost and self._fault["way"] in (way, "both") else LONG_S
        pointers = map(ctypes.c_void_p, (state, fault))
        sizes = map(ctypes.c_int64, (rest["one_shot_vectors"], rest["two_shot_vectors"]))
        self._library.emulated_all_reduce(
            *(ctypes.c_void_p(x), ctypes.c_void_p(out), ctypes.c_int64(vectors), ctypes.c_void_p(places), ranks),
            *(
                *pointers,
                rank,
                *sizes,
                way == "host",
                KERNELS.index(rest["algorithm"]),
                ctypes.c_uint32(rest["tag"]),
                rows,
            ),
            *(rest.get("row_vectors", 0), ctypes.c_double(patience), rest["traps"]),
        )
        if self._has_fault(way, "wrong bits") and rows == 9:
            ctypes.memset(out + 16, 0x11, 1)

    def all_reduce_ping(self, *, there, here, vectors, rounds, warm_ups, sends, patience_s, took_ns, stream):
        is_peers = any(first <= there < first + size for first, (*_, size) in self._maps.items())
        if is_peers and not sends and self._has_fault("peer", "no answer"):
            return
        patience = SHORT_S if is_peers and self._fault.get("what") == "no answer" else LONG_S
        self._library.emulated_ping(
            *(ctypes.c_void_p(there), ctypes.c_void_p(here), ctypes.c_int64(vectors), rounds, warm_ups, sends),
            *(ctypes.c_double(patience), ctypes.c_void_p(took_ns)),
        )


def stand_in(library: Path, fault: dict | None = None, rank: int = -1) -> None:
    """From here on this process's card is its CPU. Not to be undone: for processes of a test."""
    emulated, zeros, randn = Emulated(library, fault, rank), torch.zeros, torch.randn

    def randn_of_this_card(*size, generator, **options):
        """CUDA deals its numbers to a grid as large as the card, so cards of two sizes draw others from one seed."""
        return randn(*size, generator=generator.manual_seed(generator.initial_seed() + 1000 * rank), **options)

    torch.randn = randn_of_this_card
    extension.load = lambda: emulated
    torch.zeros = lambda *size, pin_memory=False, **options: zeros(*size, **options)
    torch.cuda.device = contextlib.nullcontext
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.is_current_stream_capturing = lambda: False
    cuda_tensors.on_device_of = contextlib.nullcontext
    cuda_tensors.num_sms = cuda_tensors.current_stream = lambda index: 0
    Call.on_cuda = lambda self: None

    def microseconds(group, x, gather, capture=None, pick=None):
        for _ in range(2):
            gather(None)
            group(x)
        slow = emulated._has_fault(group.transport, "slow")
        return US[group.transport] + x.shape[0] + (100.0 if slow else 0.0)

    child.PINGS, child.WARM_UPS = 4, 1  # nobody reads these times, and a round waits for a core
    child.microseconds, child.card = microseconds, lambda index: torch.device("cpu")


def in_gloo(python: list[str], ranks: int, body: Callable, *arguments) -> list:
    """body(rank, ranks, gather, *arguments) of a process for each rank, started by `python`, in a gloo group."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job").write_bytes(pickle.dumps((ranks, body, arguments)))
        code = "import sys; from tests.ops import all_reduce_emulated as emulated; emulated.as_rank(*sys.argv[1:])"
        words = [*python, "-c", code, folder]
        processes = [subprocess.Popen([*words, str(rank)], cwd=REPO, stderr=subprocess.PIPE) for rank in range(ranks)]
        try:
            said = [process.communicate(timeout=600)[1].decode() for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert not any(process.returncode for process in processes), "\n".join(said)
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(ranks)]


def as_rank(folder: str, number: str) -> None:
    ranks, body, arguments = pickle.loads(Path(folder, "job").read_bytes())
    rank = int(number)
    torch.set_num_threads(1)
    init = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=init, rank=rank, world_size=ranks)

    def gather(value):
        told = [None] * ranks
        torch.distributed.all_gather_object(told, value)
        return told

    result = body(rank, ranks, gather, *arguments)
    torch.distributed.barrier()
    torch.save(result, f"{folder}/{rank}")
    torch.distributed.destroy_process_group()


def main(library: str, fault: str, *words: str) -> int:
    torch.set_num_threads(1)
    asked, connection = child.told(list(words))
    if asked is None:
        return 0
    stand_in(Path(library), json.loads(fault), asked["rank"])
    return child.answer(asked, connection)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Operators on the emulator: within `emulated()` tensors of the CPU are a card's, and _C launches into the emulator.

Launches wait until a tensor is looked at; then all of all cards run, side by side where they may be.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import re
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode

from deepseek_v4_sm120.ops import all_reduce as op_all_reduce
from deepseek_v4_sm120.ops import index_select, mhc, sparse_decode
from deepseek_v4_sm120.ops.shared import checks, cuda_tensors, extension, zeroed_words
from deepseek_v4_sm120.ops.shared.kv_page_layout import kv_page_layout
from deepseek_v4_sm120.specs.all_reduce import Meeting
from tests.emulator.build import built

CAPABILITY = (12, 0)
MOST_INSTRUCTIONS = 150_000_000  # of a run: a wait for what never comes is ended
# of a run of what lacks a wait or a fence, and of one that is whole at the same place: to wait for ever costs no more
MOST_OF_MUTANTS, MOST_OF_RIGHT = 24_000_000, 6_000_000
# that make tensors or tell of them, and touch the numbers of none that a kernel may have
BLIND = {
    *(
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "data_ptr",
        "stride",
        "size",
        "dim",
        "numel",
        "element_size",
    ),
    *("is_contiguous", "storage_offset", "untyped_storage", "view", "reshape", "narrow", "as_strided", "flatten"),
    *("tensor_split", "split", "unbind", "chunk", "unsqueeze", "squeeze", "view_as", "expand", "select", "detach"),
    *("zeros", "ones", "full", "zeros_like", "tensor", "arange", "new_zeros", "new_full"),
    *("is_pinned", "__len__", "nelement", "ndimension", "get_device"),
}
# that tell of a tensor what is neither its address nor another tensor: most of what is called, by the operators' checks
PLAIN = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout")),
    *(getattr(torch.Tensor, name) for name in ("stride", "size", "dim", "numel", "element_size", "is_contiguous")),
}
PLACES = (torch.device, str)
MADE_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty")


class EmulatorError(RuntimeError):
    """A kernel did what it must not, or does not end."""


@functools.cache
def library() -> ctypes.PyDLL:
    module, texts = built()
    lib = ctypes.PyDLL(str(module))  # holds the GIL: the emulator is one, ranks are threads of this process
    for name in ("emulator_ran", "emulator_instructions"):
        getattr(lib, name).restype = ctypes.c_uint64
    for name in ("emulator_error", "emulator_take", "emulator_reports", "emulator_forms"):
        getattr(lib, name).restype = ctypes.c_char_p
    lib.emulator_launch.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
    for name in ("emulator_allow", "emulator_unwritten", "emulator_written"):
        getattr(lib, name).argtypes = [ctypes.c_uint64] * 2
    lib.emulator_limit.argtypes = [ctypes.c_uint64]
    lib.emulator_choose.argtypes = [ctypes.c_uint64, *[ctypes.c_int] * 5]
    lib.emulator_limit(MOST_INSTRUCTIONS)
    for text in texts:
        lib.emulator_ptx(text.read_bytes())
    return lib


@functools.cache
def module() -> types.ModuleType:
    """_C of the emulator."""
    spec = importlib.util.spec_from_file_location(f"{__name__}._C", built()[0])  # pybind11 keeps modules by their names
    made = importlib.util.module_from_spec(spec)
    library()
    spec.loader.exec_module(made)
    return made


@functools.cache
def ptx() -> dict[str, str]:
    """Each kernel's text, by its mangled name."""
    found = {}
    for path in built()[1]:
        text = path.read_text()
        shared = "".join(line for line in text.splitlines(True) if line.startswith(".extern .shared"))
        for part in re.split(r"(?=^(?:\.visible |\.weak )?\.entry )", text, flags=re.MULTILINE)[1:]:
            found[re.search(r"\.entry (\w+)", part)[1]] = shared + part[: part.rindex("\n}") + 2] + "\n"
    return found


@contextlib.contextmanager
def at_most(instructions: int) -> Iterator[None]:
    """A run of more is one that does not end."""
    library().emulator_limit(instructions)
    try:
        yield
    finally:
        library().emulator_limit(MOST_INSTRUCTIONS)


def called(error: int) -> None:
    if error:
        raise EmulatorError(library().emulator_error().decode())


class _Tensors(TorchFunctionMode):
    """Lets launches run before a tensor's numbers are touched, and holds and allows all memory that they may reach:
    addresses are taken long before a launch, and stand in others' memory."""

    def __init__(self):
        super().__init__()
        self.held = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in PLAIN:
            return function(*args, **kwargs or {})
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(function, "__self__", None), "__name__", "")
            blind = name not in ("data", "grad", "T", "mT", "real")
        else:
            blind = name in BLIND
        if not blind:
            self.run()
        if "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        args = tuple("cpu" if isinstance(a, PLACES) and str(a).startswith("cuda") else a for a in args)
        result = function(*args, **kwargs)
        self.see(args)
        self.see(result)
        if _chosen.poison is not None and name in MADE_EMPTY:
            fill_empty(result, _chosen.poison)
        if name in MADE_EMPTY:
            library().emulator_unwritten(result.data_ptr(), result.untyped_storage().nbytes())
        elif name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i"):
            written(args[0])
        return result

    def see(self, found) -> None:
        if isinstance(found, torch.Tensor):
            storage = found.untyped_storage()
            place = storage.data_ptr(), storage.nbytes()
            if place not in self.held:
                library().emulator_allow(*place)
                self.held[place] = storage
        elif isinstance(found, tuple | list):
            for one in found:
                self.see(one)

    def run(self) -> None:
        called(library().emulator_run())


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fill_empty(tensor: torch.Tensor, byte: int) -> None:
    """What an allocator leaves in memory that nobody has written."""
    ctypes.memset(tensor.data_ptr(), byte, tensor.untyped_storage().nbytes())


def written(tensor: torch.Tensor) -> None:
    """By the host: from the first of its numbers to the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel():
        library().emulator_written(tensor.data_ptr(), (last + 1) * tensor.element_size())


def reports() -> list[str]:
    """Of what ran while it was watched: how often, kernel and PTX line of accesses to shared memory that nothing puts
    in order, of reads of global memory that nobody has written, of barriers of all threads without all."""
    return library().emulator_reports().decode().splitlines()


def run() -> None:
    """All that was launched."""
    called(library().emulator_run())


def choose(
    seed: int = 0,
    multiprocessors: int = 4,
    most_instructions: int = 200,
    checks_memory: bool = True,
    weak: bool = False,
    watched: bool = False,
    poison: int | None = None,
) -> None:
    """Whose turn it is, by a seed; of how many multiprocessors a card is; how long a warp's turn is at most; whether
    global memory is weak (weak.h); whether accesses are watched (watch.h); with which bytes memory begins that nobody
    has written. Begins anew: what was launched is forgotten, and operators' words are zero, for a
    launch that has failed leaves them as they were then."""
    library().emulator_choose(seed, multiprocessors, most_instructions, checks_memory, weak, watched)
    _chosen.poison = poison
    _chosen.multiprocessors = multiprocessors
    _words_of.clear()
    for cached in _caches():
        cached.cache_clear()


@dataclass(frozen=True)
class Launch:
    """resident: blocks of it that a multiprocessor holds, by threads and shared memory"""

    kernel: str
    blocks: tuple[int, int, int]
    threads: int
    shared: int
    is_cooperative: bool
    resident: int


def taken() -> list[Launch]:
    """What was launched and has not run, which it never will."""
    found = []
    for line in library().emulator_take().decode().splitlines():
        kernel, *numbers = line.split()
        x, y, z, threads, shared, is_cooperative, resident = map(int, numbers)
        found.append(Launch(kernel, (x, y, z), threads, shared, bool(is_cooperative), resident))
    return found


def ran(part: str) -> int:
    """Launches that ran, not those that were only `taken`, of kernels in whose names this is, since the last
    `emulated()` began. What was launched runs now."""
    run()
    return sum(library().emulator_ran(name.encode()) for name in ptx() if part in name)


def _caches() -> list:
    """Of what is asked of the module, or depends on the card."""
    found = [kv_page_layout, index_select._scratch_bytes, sparse_decode._workspace]
    return found + [one for one in vars(mhc).values() if hasattr(one, "cache_clear")]


_generator = torch.Generator
_chosen = types.SimpleNamespace(multiprocessors=4, poison=None)
_words_of: dict[tuple[int, int], torch.Tensor] = {}  # (operator's words, stream) -> buffer


class _Card(threading.local):  # CUDA's current device is a thread's own
    number = 0


_card = _Card()


@contextlib.contextmanager
def card(number: int) -> Iterator[None]:
    """Launches go to this card's stream."""
    before, _card.number = _card.number, number
    library().emulator_card(number)
    try:
        yield
    finally:
        _card.number = before
        library().emulator_card(before)


def _words(self, stream: int, words: int) -> torch.Tensor:
    key = id(self), stream
    if key not in _words_of:
        _words_of[key] = torch.zeros(max(words, self._stream_words), dtype=torch.int32)
    return _words_of[key]


@contextlib.contextmanager
def emulated(runs: bool = True, **choices) -> Iterator[None]:
    """runs: whether anything does; else launches are only taken (`taken`), and no memory needs to be known. choices: as
    `choose` takes them."""
    library().emulator_forget_launches()
    replaced = [
        (extension, "load", module),
        (cuda_tensors, "num_sms", lambda index: _chosen.multiprocessors),
        (cuda_tensors, "stream_sms", lambda index, stream: _chosen.multiprocessors),
        (cuda_tensors, "current_stream", lambda index: _card.number + 1),
        (cuda_tensors, "on_device_of", lambda tensor: contextlib.nullcontext()),
        (checks.Call, "on_cuda", lambda self: None),
        (zeroed_words.ZeroedWords, "take", _words),
        (torch.cuda, "get_device_capability", lambda device=None: CAPABILITY),
        (torch.cuda, "synchronize", lambda device=None: run()),
        (torch.cuda, "current_device", lambda: 0),
        (torch, "Generator", lambda device=None: _generator()),
        (torch.cuda, "device", lambda device: contextlib.nullcontext()),
        # ranks are threads of one process: a look at the others tells nothing, and waits for the lock that is held here
        (op_all_reduce, "_LOOK_S", 600.0),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    try:
        for owner, name, new in replaced:
            setattr(owner, name, new)
        choose(**choices)
        if not runs:
            yield
            taken()  # what is left
            return
        with _Tensors() as tensors:
            yield
            tensors.run()
    finally:
        library().emulator_forbid_all()
        for owner, name, old in before:
            setattr(owner, name, old)
        for cached in _caches():
            cached.cache_clear()


def group(ranks: int, **options) -> list[op_all_reduce.AllReduce]:
    """A group whose ranks are cards of the emulator; within `emulated()`. options: AllReduce's."""
    meeting = Meeting(ranks)

    def made(rank: int) -> op_all_reduce.AllReduce:
        with _Tensors(), card(rank):
            return op_all_reduce.AllReduce(rank, ranks, torch.device("cpu"), meeting.gather(rank), **options)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(made, range(ranks)))


def on_cards(call: Callable, *arguments) -> list:
    """call(*one of each argument), each on the next card: launched on all before any runs."""
    results = []
    for rank, given in enumerate(zip(*arguments, strict=True)):
        with card(rank):
            results.append(call(*given))
    return results

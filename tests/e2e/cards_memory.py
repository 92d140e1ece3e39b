"""How much memory of the cards is in use, by whatever is there to say so: nvidia-smi, its library, torch."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sys
from collections.abc import Callable

MIB = 1 << 20
LIBRARY = "libnvidia-ml.so.1"
BY_TORCH = """
import torch
cards = [torch.cuda.mem_get_info(card) for card in range(torch.cuda.device_count())]
print(*[total - free >> 20 for free, total in cards])
"""


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def _numbers(line: list[str], timeout_s: float) -> int | None:
    """The sum of what a command prints, in MiB; it has a word for each card."""
    try:
        said = subprocess.run(line, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return None
    numbers = said.stdout.split()
    return sum(map(int, numbers)) if numbers and said.returncode == 0 and all(n.isdigit() for n in numbers) else None


def _by_the_library() -> int | None:
    try:
        nvml = ctypes.CDLL(LIBRARY)
        if nvml.nvmlInit_v2():
            return None
    except (OSError, AttributeError):
        return None
    try:
        count, total = ctypes.c_uint(), 0
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) or not count.value:
            return None
        for card in range(count.value):
            handle, memory = ctypes.c_void_p(), _Memory()
            if nvml.nvmlDeviceGetHandleByIndex_v2(card, ctypes.byref(handle)):
                return None
            if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
                return None
            total += memory.used
        return total // MIB
    finally:
        nvml.nvmlShutdown()


WAYS: dict[str, Callable[[], int | None]] = {
    "nvidia-smi": lambda: _numbers(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], 20.0),
    "NVML": _by_the_library,
    "torch": lambda: _numbers([sys.executable, "-c", BY_TORCH], 120.0),  # with its own context, each time the same
}


@functools.cache
def way() -> str | None:
    """The first that answers, by which all is measured then: they count differently. None: nothing here says it."""
    return next((name for name, ask in WAYS.items() if ask() is not None), None)


def used_mib() -> int | None:
    """Of all cards; None where nothing says it."""
    return None if way() is None else WAYS[way()]()

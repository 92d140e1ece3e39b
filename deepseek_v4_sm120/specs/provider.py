"""What is compared: an implementation of an operator, by the name that profiles use."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from deepseek_v4_sm120.patching.sources import Sources, package_version, tells_release

OURS, STOCK = "ours", "stock"  # the two that decide; others are shown beside them
DEEP_GEMM_WRAPPER, DEEP_GEMM_PDL = "sglang.srt.layers.deep_gemm_wrapper", "SGLANG_DEEPGEMM_PDL"
MORE_ROWS = (16, 32, 64)  # of a decode step, without --quick


@dataclass(frozen=True)
class Provider:
    """One implementation.

    problem   why it cannot run on this machine, None if it can; asked in the worker
    build     loads it and returns call(inputs) -> result, in the form that the operator's `error` takes; where it has
              call.ready(inputs), that is done with all inputs before the clock starts
    handles   whether it takes a case
    packages  what must be installed; where it is not, no worker is started
    optional  a way of ours that the operator can do without: where it is wrong, or slower than `ours`, the profile
              rules out this way and not the operator
    """

    name: str
    problem: Callable[[], str | None]
    build: Callable[[], Callable]
    handles: Callable[[object], bool] = lambda case: True
    packages: tuple[str, ...] = ()
    optional: bool = False

    def absent(self) -> str | None:
        """The first package that is not there, in words; nothing is imported."""
        missing = next((name for name in self.packages if importlib.util.find_spec(name) is None), None)
        return missing and f"{PACKAGE_NAMES.get(missing, missing)} is not installed"


PACKAGE_NAMES = {"sglang": "SGLang", "deep_gemm": "DeepGEMM", "flashinfer": "FlashInfer"}


@dataclass
class PerWeight:
    """`make(inputs)`, once for every inputs.weight; what was made of weights in another storage is let go."""

    make: Callable
    storage: int | None = None
    made: dict[int, object] = field(default_factory=dict)

    def __call__(self, inputs):
        storage, address = inputs.weight.untyped_storage().data_ptr(), inputs.weight.data_ptr()
        if self.storage != storage:
            self.storage, self.made = storage, {}
        if address not in self.made:
            self.made[address] = self.make(inputs)
        return self.made[address]


def our_problem() -> str | None:
    """Why none of ours can run here, None if they can."""
    from deepseek_v4_sm120.ops.shared import extension

    return extension.problem()


def error_of(provider: str, result, truth) -> float:
    """Of ours in the worst place, too; others, which may be coarse, over all."""
    from deepseek_v4_sm120.reference.accuracy import relative_error, strict_error

    return (strict_error if provider.startswith(OURS) else relative_error)(result, truth)


def rows_of(concurrency: int, quick: bool, most: int) -> list[int]:
    """Rows of a decode step, at most as many as the operator takes."""
    rows = {1, concurrency} if quick else {1, concurrency, *MORE_ROWS}
    return sorted({min(count, most) for count in rows})


def is_sm120() -> bool:
    import torch

    return torch.cuda.get_device_capability()[0] == 12


def is_installed(module: str) -> bool:
    """Whether a module can be found, without importing more than its packages."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def first_installed(modules: Iterable[str]) -> str | None:
    """The first of a function's homes that this machine has."""
    return next(filter(is_installed, modules), None)


def unpatched(module: str, name: str) -> Callable:
    """A function of SGLang as SGLang wrote it, also where our patch is in its place."""
    function = getattr(importlib.import_module(module), name)
    return getattr(function, "__wrapped__", function)


def set_up_deep_gemm() -> None:
    """DeepGEMM with the launches that SGLang's servers give it: dependent ones from 0.5.13 on, unless switched off."""
    if not importlib.import_module(DEEP_GEMM_WRAPPER).ENABLE_JIT_DEEPGEMM:
        return
    deep_gemm, envs = importlib.import_module("deep_gemm"), importlib.import_module("sglang.srt.environ").envs
    if hasattr(deep_gemm, "set_pdl") and hasattr(envs, DEEP_GEMM_PDL) and getattr(envs, DEEP_GEMM_PDL).get():
        deep_gemm.set_pdl(True)


@functools.cache
def sglang_version() -> tuple[int, ...] | None:
    """Of the SGLang found here, without importing it; None where it is not there or names no release, which whoever
    asks takes for the newest: that something is not installed is another question."""
    text = package_version("sglang", Sources())
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", text) if tells_release(text) else None
    return tuple(map(int, numbers.groups())) if numbers else None

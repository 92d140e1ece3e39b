"""What is compared: an implementation of an operator, by the name that profiles use."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

OURS, STOCK = "ours", "stock"  # the two that decide; others are shown beside them


@dataclass(frozen=True)
class Provider:
    """One implementation.

    problem   why it cannot run on this machine, None if it can; imports nothing that needs a GPU
    build     loads it and returns call(inputs) -> result, in the form of the operator's reference
    handles   whether it takes a case
    """

    name: str
    problem: Callable[[], str | None]
    build: Callable[[], Callable]
    handles: Callable[[object], bool] = lambda case: True


def is_installed(module: str) -> bool:
    """Whether a module can be found, without importing more than its packages."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def unpatched(module: str, name: str) -> Callable:
    """A function of SGLang as SGLang wrote it, also where our patch is in its place."""
    function = getattr(importlib.import_module(module), name)
    return getattr(function, "__wrapped__", function)

"""What a check of the self-test is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ON_GPU = ("torch", "module", "GPU")


class Failure(Exception):
    """What a check found wrong."""


class NotRun(Exception):
    """Why a check could not ask its question."""


@dataclass(frozen=True)
class Check:
    """One line of the table. `run` returns a detail or raises Failure or NotRun."""

    operator: str
    name: str
    run: Callable[[], str]
    needs: tuple[str, ...] = ("torch",)


def within(error: float, allowed: float, what: str = "relative error") -> str:
    """The error in words; Failure where it is more than is allowed, or no number."""
    if not error <= allowed:
        raise Failure(f"{what} {error:.2g}, allowed {allowed:g}")
    return f"{what} {error:.2g}"


def same(one, other, names: str) -> None:
    """Failure unless two tensors hold the same numbers."""
    if one.shape != other.shape or not bool((one == other).all()):
        raise Failure(f"{names} differ in {int((one != other).sum())} of {one.numel()} elements")

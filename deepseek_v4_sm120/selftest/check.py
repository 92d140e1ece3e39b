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

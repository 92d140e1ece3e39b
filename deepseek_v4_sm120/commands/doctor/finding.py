"""One line of the doctor's table."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL, NOT_RUN = "OK", "WARN", "FAIL", "NOT RUN"


@dataclass(frozen=True)
class Finding:
    """What was found, what it costs or breaks, and the exact fix. NOT RUN: `found` says why."""

    check: str
    state: str
    found: str
    cost: str = ""
    fix: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, OK, found)


def warn(check: str, found: str, cost: str, fix: str) -> Finding:
    return Finding(check, WARN, found, cost, fix)


def fail(check: str, found: str, cost: str, fix: str) -> Finding:
    return Finding(check, FAIL, found, cost, fix)


def not_run(check: str, why: str, fix: str = "") -> Finding:
    return Finding(check, NOT_RUN, why, "", fix)

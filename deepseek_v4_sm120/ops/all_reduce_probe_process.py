"""The process that a rank starts for the probe (all_reduce_probe.py), and what is said to it and by it.

Standard library only: what starts it, in front of an import of SGLang's, brings nothing else along.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAM = (sys.executable, "-m", "deepseek_v4_sm120.ops.all_reduce_probe_child")
END_S = 5.0
# That a process which was started ahead waits to be asked: what a rank still imports lies between, 20 s and on a cold
# disk minutes, and its start of NCCL, which waits ten minutes for a rank that is late. Weights are loaded behind it
ASKED_S = 600.0
GATHER, FOUND, FAILED = "gather", "found", "failed"  # kinds of a message from a process


class Child:
    """A process of the probe, and what it says. Whatever becomes of it is said by `next`: the other ranks wait. One
    whose words do not say what is asked waits for that (`answer`)."""

    def __init__(self, words: Sequence[str]):
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        self.connection, self._said, self._process, self._problem = None, None, None, None
        try:
            self.connection, theirs = multiprocessing.Pipe()
            self._said = os.fdopen(os.memfd_create("all_reduce probe"), "w+b")
            with theirs:
                self._process = subprocess.Popen(
                    [*words, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=self._said,
                    stderr=self._said,
                    env=os.environ | {"DSV4_SM120": "off", "PYTHONPATH": path},
                )
        except OSError as error:
            self._problem = f"its probe does not start: {error}"

    def next(self, seconds: float) -> tuple[str, object]:
        """(kind, value); FAILED where nothing comes."""
        if self._problem is not None:
            return FAILED, self._problem
        try:
            if self.connection.poll(max(0.0, seconds)):
                return self.connection.recv()
        except (EOFError, ConnectionError):
            return FAILED, f"its probe ended: {self._last_words()}"
        return FAILED, f"its probe said nothing for {seconds:.0f} s"

    def is_there(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def answer(self, value) -> None:
        with contextlib.suppress(ConnectionError):  # it has ended, and `next` says so
            self.connection.send(value)

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # one in the driver ends when that lets it go
                self._process.wait(END_S)
        for opened in filter(None, (self.connection, self._said)):
            opened.close()

    def _last_words(self) -> str:
        status = "unknown"
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(END_S)
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return f"exit status {status}" + (f", {lines[-1][:200]}" if lines else "")


_ahead: list[Child] = []  # at most one


def start_ahead(program: Sequence[str] = PROGRAM) -> None:
    """This rank's process of the next probe, which imports what it needs. Unasked it ends by itself, after ASKED_S or
    with this process."""
    if not _ahead:
        _ahead.append(Child(program))


def end_ahead() -> None:
    """Where no probe comes; nothing where one has asked it."""
    while _ahead:
        _ahead.pop().end()


def asked_of(program: Sequence[str], asked: dict) -> Child:
    """The process that was started ahead, told what it is asked; another one where there is none, or none any more."""
    if _ahead:
        child = _ahead.pop()
        if child.is_there():
            child.answer(asked)
            return child
        child.end()
    return Child([*program, json.dumps(asked)])

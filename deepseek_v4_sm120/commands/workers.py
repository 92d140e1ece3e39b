"""Processes of a command's own: what they find out comes in lines of JSON, and none leaves anything behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO

MARK = "answer: "  # begins every line of ours: libraries print, too
STARTED = "_DSV4_SM120_WORKER"  # in a worker's environment; no setting of users
LAST_WORDS_S = 10.0  # for one that has said its last answer to end by itself
NOT_KILLED = "it cannot be killed: the driver holds it"
KILLED_S = 30.0  # until a process that was killed has ended, but for one that waits in the kernel


def say(**values) -> None:
    """In a worker: an answer."""
    print(f"\n{MARK}{json.dumps(values)}", flush=True)


def end_with_parent() -> None:
    """In a worker of `start`: it ends when who started it has ended, however that was; one that hangs would hold its
    card."""

    def wait() -> None:
        while os.read(0, 1 << 16):
            pass
        os.killpg(0, signal.SIGKILL)  # what it has started, too

    if os.environ.pop(STARTED, None):  # not where it is asked by hand
        threading.Thread(target=wait, daemon=True).start()


def start(words: Sequence[str], stderr: IO, environment: dict[str, str] | None = None) -> subprocess.Popen:
    """A worker in a session of its own; stderr: where its last words go."""
    pipe, told = subprocess.PIPE, (os.environ if environment is None else environment) | {STARTED: "1"}
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=stderr, env=told, start_new_session=True)


def answers(process: subprocess.Popen, left: Callable[[], float]) -> Iterator[dict]:
    """What a worker says, as it comes, until it ends or no seconds are left."""
    mark, buffer = MARK.encode(), b""
    while (seconds := left()) > 0:
        ready, _, _ = select.select([process.stdout], [], [], min(seconds, 1.0))
        if not ready and process.poll() is None:
            continue
        chunk = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
        if not chunk:
            return
        *lines, buffer = (buffer + chunk).split(b"\n")
        yield from (json.loads(line.removeprefix(mark)) for line in lines if line.startswith(mark))


def end(process: subprocess.Popen, patience: float) -> int | None:
    """A worker's exit status, after the end of what is left of it and of the compilers that it started; None where it
    does not end when it is killed. Of any process that has a session of its own."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdout, process.stdin):
        if pipe is not None:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(KILLED_S)
    return None


def last_words(stderr: IO, code: int | None) -> str:
    """The last line that an ended worker wrote, and what ended it where that was a signal; code: as of `end`."""
    if code is None:
        return NOT_KILLED
    stderr.seek(0)
    lines = stderr.read().decode(errors="replace").strip().splitlines()
    said = lines[-1][:200] if lines else ""
    if code >= 0:
        return said or f"no message, exit status {code}"
    name = signal_name(-code)
    return f"{name}: {said}" if said else f"{name}, no message"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return f"signal {number}"

"""`doctor --out FILE`: what finds a cause from afar, and the figures of this card, in one file that one can read and
post. Each part is a process of its own with a limit of time; what it said until then stays, and how it ended is said.

An earlier file of this kind is added to: of a card without a server, then of the server.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import deepseek_v4_sm120
from deepseek_v4_sm120.commands import console, nameless, workers
from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.disclosure import API_KEY
from deepseek_v4_sm120.commands.doctor import facts, http_get
from deepseek_v4_sm120.commands.ending import as_interrupts
from deepseek_v4_sm120.settings import PROFILE

HEAD = "deepseek_v4_sm120: a card and its server"
MODULE = ("-m", "deepseek_v4_sm120")
PARTS = ("-m", "deepseek_v4_sm120.commands.doctor.parts")
MOST_SIGNS, MOST_ASIDE = 200_000, 12_000  # of what a part says, and of its stderr
ENDS_S = 20.0  # to write what it has, when its time is over
ROOT = Path("/")


@dataclass(frozen=True)
class Part:
    """words: of Python's command line, none where it is not run; why it is not."""

    name: str
    words: tuple[str, ...]
    limit_s: float
    why: str = ""


def parts_of(arguments: argparse.Namespace, profile: str | None) -> Iterator[Part]:
    """In their order: first what takes seconds. profile: of calibrate, that is there already."""
    url, quick = arguments.url or "", "quick" if arguments.quick else ""
    yield Part("status", (*MODULE, "status"), 60)
    yield Part("doctor", (*PARTS, "machine", url, quick), 400)
    yield Part("torch", (*PARTS, "torch"), 120)
    if arguments.log is not None:
        yield Part("the server's log", (*PARTS, "log", arguments.log), 60)
    in_vain = "a server has the cards: ask without --url in front of its start" if url else ""
    in_vain = "--quick" if quick else in_vain
    if url:
        yield Part("the server", () if quick else (*PARTS, "served", url), 600, in_vain if quick else "")
    yield Part("selftest", () if in_vain else (*PARTS, "selftest"), 1800, in_vain)
    if profile is not None:
        yield Part("calibrate, the profile", (*PARTS, "calibrated", profile), 60)
    else:
        yield Part("calibrate", () if in_vain else (*PARTS, "calibration"), 600, in_vain)


def run(arguments: argparse.Namespace) -> int:
    """Exit status 1 where a part found something wrong, or could not do what it is for."""
    if arguments.json:
        raise CommandError("--out writes a text to read; --json is for doctor alone")
    if arguments.url is not None:
        http_get.check_url(arguments.url)
    console.temporary_folder()
    environ = os.environ | ({API_KEY: arguments.api_key} if arguments.api_key else {})
    names = nameless.known(ROOT, os.environ, [arguments.api_key])
    profile = arguments.profile or os.environ.get(PROFILE)
    todo = list(parts_of(arguments, profile))
    if facts.is_container(ROOT) and not facts.is_mounted(ROOT, Path(arguments.out).resolve()):
        text = f"doctor: {arguments.out} is lost with this container; --out a file in a mounted folder stays"
        console.say(text, sys.stderr)
    statuses: list[int | None] = []
    with _opened(arguments.out) as file, as_interrupts():

        def write(text: str) -> None:
            try:
                lines = [nameless.nameless(line, names) for line in text.split("\n")]
                file.write("\n".join([*lines, ""]).encode(errors="replace"))
                file.flush()
            except OSError as error:
                raise CommandError(f"--out: {arguments.out} cannot be written: {error.strerror}") from error

        now = datetime.datetime.now(datetime.timezone.utc)
        write(f"{HEAD}\n{now:%Y-%m-%d %H:%M} UTC, version {deepseek_v4_sm120.__version__}")
        write(f"Left out: {nameless.LEFT_OUT}; '{nameless.HIDDEN}' and words like HOST stand for these.")
        for number, part in enumerate(todo, 1):
            limit = f", {part.limit_s:.0f} s at most" if part.words else ""
            console.say(f"doctor: {number} of {len(todo)}, {part.name}{limit}", sys.stderr)
            if not part.words:
                write(f"\n==== {part.name}: NOT RUN: {part.why}")
                continue
            statuses.append(_of_process(part, environ, write))
    console.say(f"Written to {arguments.out}, without {nameless.LEFT_OUT}. Read it through before you post it.")
    return int(any(status != 0 for status in statuses))


@contextlib.contextmanager
def _opened(given: str) -> Iterator[IO[bytes]]:
    """To be added to; CommandError for what cannot be written, or is there and no file of this kind."""
    try:
        with open(os.open(given, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o644), "r+b", 0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CommandError(f"--out must be a file to write, {given} is a device or FIFO")
            file.seek(0)
            begin = file.read(len(HEAD))
            if begin and begin != HEAD.encode():
                raise CommandError(f"--out: {given} is there, and is none that this command has written")
            file.write(b"\n\n" if begin else b"")
            yield file
    except OSError as error:
        raise CommandError(f"--out: {given:.200} cannot be written: {error.strerror}") from error


def _of_process(part: Part, environ: dict[str, str], write) -> int | None:
    """A part's exit status, None where it did not end in time; what it says is written."""
    started = time.monotonic()
    words = [facts.python(), *part.words]
    child, status, end = None, None, "interrupted"
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as aside:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": aside}
        try:
            child = subprocess.Popen(words, **pipes, env=environ, start_new_session=True)
            status = child.wait(part.limit_s)
            end = f"exit status {status}" if status >= 0 else f"ended by {workers.signal_name(-status)}"
        except subprocess.TimeoutExpired:
            end = f"NOT AT ITS END after {part.limit_s:.0f} s"
        finally:
            end += _stop(child) if child is not None else ""
            write(f"\n==== {part.name}: {end}, {time.monotonic() - started:.0f} s")
            write(_text_of(out, MOST_SIGNS))
            if said := _text_of(aside, MOST_ASIDE):
                write(f"---- beside it:\n{said}")
    return status


def _stop(child: subprocess.Popen) -> str:
    """Ends what is left of it and of those that it started; in words where that fails."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
    return f"; {workers.NOT_KILLED}" if workers.end(child, ENDS_S) is None else ""


def _text_of(file: IO[bytes], most: int) -> str:
    """All of it, or its beginning and its end."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    data = file.read(most if size <= most else most // 2)
    if size > most:
        file.seek(size - most // 2)
        data += f"\n[{size - most} bytes left out]\n".encode() + file.read()
    return data.decode(errors="replace").rstrip()

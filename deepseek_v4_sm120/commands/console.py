"""What the commands share: one sentence for bad input, tables with `rich` where it is at hand, plain text elsewhere.

All that they print goes through here: no secret, nothing that a terminal obeys, no character that it cannot show.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import TextIO

from deepseek_v4_sm120.commands.disclosure import redacted, shown
from deepseek_v4_sm120.patching import report

BAD_INPUT = 2  # exit status; 1 means that the command ran and found something wrong
INTERRUPTED = 130  # as a shell says it of Ctrl-C
COLOURS = {"OK": "green", "PASS": "green", "WARN": "yellow", "FAIL": "red", "NOT RUN": "dim", "WRONG": "red"}


class CommandError(Exception):
    """Why a command cannot do what was asked, in one sentence."""


class Unwritable(Exception):
    """Why what a command says cannot be written."""


def temporary_folder() -> str:
    """CommandError where nothing can be written: a container's read-only file system without a /tmp of its own."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        needs = "SGLang wants one, too: in a container --tmpfs /tmp, or set TMPDIR"
        raise CommandError(f"{error.strerror}: {needs}") from error


def is_rich() -> bool:
    """`rich` is importable and somebody looks at a terminal."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and importlib.util.find_spec("rich") is not None


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Print a text of one or more lines, to stdout unless told otherwise."""
    _write(f"{encodable(shown(text), sys.stdout if stream is None else stream)}\n", stream)


def _write(text: str, stream: TextIO | None = None) -> None:
    stream = sys.stdout if stream is None else stream
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unwritable(f"the answer cannot be written: {error.strerror}") from error


def encodable(text: str, stream: TextIO) -> str:
    """Text in which what the stream cannot write is written out (\\u4e2d)."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def one_line(value, most: int = 200) -> str:
    """What a stranger said, for one cell or sentence: without line ends, cut off."""
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def print_json(value) -> None:
    _write(json.dumps(redacted(value), indent=1, default=str) + "\n")


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; cells are text. In a cell that is the name of a state, rich shows its colour."""
    rows = [[shown(cell).replace("\n", "\\n") for cell in row] for row in rows]
    if not is_rich():
        say(f"\n{title}\n{report.table([tuple(header), *map(tuple, rows)])}")
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_lines=len(header) > 4)
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(f"[{COLOURS[c]}]{c}[/]" if c in COLOURS else escape(c) for c in row))
    Console().print(table)


class Progress:
    """One line on stderr that is overwritten on a terminal, and one line per step elsewhere."""

    def __init__(self, total: int):
        self.total, self.done, self.is_live, self.is_seen = total, 0, sys.stderr.isatty(), True

    def note(self, text: str) -> None:
        """What is known before the next step ends."""
        text = encodable(one_line(shown(text), 10_000), sys.stderr)
        self._write(f"\r{text[:110]:110}" if self.is_live else f"  {text}\n")

    def step(self, text: str) -> None:
        self.done += 1
        width = 24
        filled = width * self.done // max(1, self.total)
        line = f"[{'#' * filled}{'.' * (width - filled)}] {self.done}/{self.total} {one_line(shown(text), 10_000)}"
        line = encodable(line, sys.stderr)
        end = "\n" if self.is_live and self.done >= self.total else ""
        self._write((f"\r{line[:110]:110}" if self.is_live else f"{line}\n") + end)

    def _write(self, text: str) -> None:
        """Until nobody can see it: a terminal that was closed costs no minutes of measuring."""
        try:
            if self.is_seen:
                sys.stderr.write(text)
                sys.stderr.flush()
        except OSError:
            self.is_seen = False

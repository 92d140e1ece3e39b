"""What is tried at a start, and might end it, leaves a mark until it is over: the start behind one that ended within it
does without it. So a supervisor that starts a server again has one that serves.

The mark is a file in the user's cache, by what is tried and how the process was started. The one who tries holds a lock
on it, by which a mark of a start that has ended is told from that of another server, which is in its midst. Where no
file can be written, nothing is remembered.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from deepseek_v4_sm120.patching import report

FOLDER = "deepseek_v4_sm120"
HELD = (errno.EAGAIN, errno.EACCES)


class Mark:
    ended_within = ""  # what an earlier start was at when it ended

    def __init__(self, file: IO[str] | None = None):
        self._file = file

    def note(self, at: str) -> None:
        """What is tried now."""
        if self._file is not None:
            self._file.seek(0)
            self._file.truncate()
            self._file.write(at)
            self._file.flush()


def path(name: str) -> Path | None:
    """None: there is no folder of the user's."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    started = zlib.crc32("\0".join((report.our_version(), *sys.argv)).encode(errors="surrogateescape"))
    return folder / FOLDER / f"{name}-{started:08x}" if folder.is_absolute() else None


@contextlib.contextmanager
def marked(name: str) -> Iterator[Mark]:
    place = path(name)
    file = None if place is None else _own(place)
    if file is None:
        yield Mark()
        return
    with file:
        file.seek(0)
        mark = Mark(file)
        mark.ended_within = file.read()
        try:
            yield mark
        finally:
            file.truncate(0)  # whoever has opened it already reads nothing of this start
            place.unlink(missing_ok=True)


def _own(place: Path) -> IO[str] | None:
    """Opened and locked; None: another server is at it, or no file can be written there."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        file = open(place, "a+")  # noqa: SIM115  closed by who asked
    except OSError as error:
        report.info(f"deepseek_v4_sm120: {name_of(place)}: a start that ends is not remembered: {error}")
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno not in HELD:
            report.info(f"deepseek_v4_sm120: {name_of(place)}: a start that ends is not remembered: {error}")
        return None
    return file


def name_of(place: Path) -> str:
    return place.name.rpartition("-")[0]

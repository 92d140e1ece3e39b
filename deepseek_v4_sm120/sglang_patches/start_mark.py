"""What is tried at a start, and might end it, leaves a mark until it is over: the start behind one that ended within it
does without it. So a supervisor that starts a server again has one that serves.

The mark is a file in the user's cache, by what is tried and how the process was started. The one who tries holds a lock
on it, by which a mark of a start that has ended is told from that of another server, which is in its midst. Where no
file can be written, nothing is remembered, and what is tried goes on.
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
    def __init__(self, place: Path | None = None, file: IO[bytes] | None = None):
        self._place, self._file, self._stays = place, file, False
        self.ended_within = ""  # what an earlier start was at when it ended
        if file is not None:
            file.seek(0)
            self.ended_within = file.read().decode(errors="replace")

    def note(self, at: str) -> None:
        """What is tried now."""
        if self._file is None:
            return
        try:
            self._file.truncate(0)
            self._file.write(at.encode())
        except OSError as error:  # a full disk, or one that is gone, keeps no server from being ready
            _tell(self._place, error)
            self.end()

    def stay(self) -> None:
        """What is tried may yet end this start: the next one is told of it, however this one goes on."""
        self._stays = True

    def end(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            with file:
                if not self._stays:
                    file.truncate(0)  # whoever has opened it already reads nothing of this start
                    self._place.unlink(missing_ok=True)
        except OSError as error:
            _tell(self._place, error)


def path(name: str) -> Path | None:
    """None: there is no folder of the user's."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    started = zlib.crc32("\0".join((report.our_version(), *sys.argv)).encode(errors="surrogateescape"))
    return folder / FOLDER / f"{name}-{started:08x}" if folder.is_absolute() else None


@contextlib.contextmanager
def marked(name: str) -> Iterator[Mark]:
    place = path(name)
    mark = Mark() if place is None else _own(place)
    try:
        yield mark
    finally:
        mark.end()


def _own(place: Path) -> Mark:
    """Opened and locked; one that remembers nothing where another server is at it, or no file can be written."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        file = open(place, "a+b", buffering=0)  # noqa: SIM115  closed by its mark
    except OSError as error:
        _tell(place, error)
        return Mark()
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:
            return Mark(place, file)
        file.close()  # another server has come through meanwhile: what is at this place now may be a third one's
        return Mark()
    except OSError as error:
        file.close()
        if error.errno not in HELD:
            _tell(place, error)
        return Mark()


def _tell(place: Path, error: OSError) -> None:
    report.info(f"deepseek_v4_sm120: {place.name.rpartition('-')[0]}: a start that ends is not remembered: {error}")

"""A JSON file that somebody names: only a file is read, nothing is waited for, size and depth have limits. What is
written is there as a whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

MOST_BYTES = 64 << 20
MOST_LEVELS = 64  # of lists and mappings in each other
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class JsonFileError(Exception):
    """Why a file cannot be taken, as the end of a sentence that begins with its name."""


def load(path: str | Path, most_bytes: int = MOST_BYTES):
    """What the file holds; JsonFileError for whatever is not a JSON text of that size."""
    try:
        found = json.loads(_text(path, most_bytes), parse_constant=_no_constant)
    except OSError as error:
        raise JsonFileError(f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise JsonFileError(f"is not JSON ({error})") from error
    except RecursionError as error:
        raise JsonFileError("is not JSON that anybody wrote: too many levels") from error
    if _levels(found) > MOST_LEVELS:
        raise JsonFileError("is not JSON that anybody wrote: too many levels")
    return found


@contextlib.contextmanager
def draft(folder: Path, data: bytes) -> Iterator[Path]:
    """A new file with `data`, removed at the end unless it was renamed. OSError: it cannot be made, or be filled."""
    path = folder / f".{os.getpid()}-{secrets.token_hex(8)}.tmp"
    descriptor = os.open(path, _NEW, 0o644)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        yield path
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def put(path: Path, text: str) -> None:
    """In the place of what is there, all of it at once; a link stays one. OSError: what was there is there still."""
    final = path.resolve()
    with draft(final.parent, text.encode()) as new:
        os.replace(new, final)


def _text(path: str | Path, most_bytes: int) -> str:
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise JsonFileError(f"cannot be read: a {'FIFO' if stat.S_ISFIFO(mode) else 'device'}, not a file")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise JsonFileError(f"cannot be read: more than {most_bytes >> 20} MiB")
    return data.decode()


def _no_constant(name: str):
    raise ValueError(f"{name} is no number")


def _levels(value) -> int:
    """How deep lists and mappings lie in each other."""
    count, layer = 0, [value]
    while layer and count <= MOST_LEVELS:
        inner = [item.values() if isinstance(item, dict) else item for item in layer if isinstance(item, dict | list)]
        layer = [item for items in inner for item in items]
        count += 1
    return count

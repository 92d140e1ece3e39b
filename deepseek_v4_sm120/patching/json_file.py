"""A JSON file that somebody names: only a file is read, nothing is waited for, size and depth have limits."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

MOST_BYTES = 64 << 20
MOST_LEVELS = 64  # of lists and mappings in each other


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

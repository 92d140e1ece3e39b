"""The files in DSV4_SM120_REPORT, in a folder that others may write to as well: nothing in it is followed, overwritten
unless it is a report of ours, waited for, or believed. Errors are OSError, with the reason in words.

Containers that share the folder number their processes alike. So a process keeps a lock on its report while it runs,
and one that finds its name locked takes the next; that of one that has ended is written over.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import secrets
import stat
from pathlib import Path

from deepseek_v4_sm120.patching import json_file

LIMIT_BYTES = 64 << 20  # a report with a full table of shadow records has 10 MB
MOST_REPORTS = 1024  # read from one folder: those whose process number is one that runs here, then the newest
TRIAL_BYTES = 64 << 10  # a full disk still takes empty files, some even short ones
_written: dict[Path, tuple[int, ...]] = {}  # by this process: path -> _identity
_locks: dict[Path, int] = {}  # the open file of each, whose lock ends with this process
_NAME = re.compile(r"(\d+)(?:-\d+)?\.json", re.ASCII)  # of a report: its process's number, and which of several that is
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO does not block


def replace(folder: Path, number: int, text: str) -> None:
    """Put `text` as a whole at folder/<number>.json, or <number>-2.json, .. where processes that run have these; what
    lies there and is no report of ours stays, and is an OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    names = itertools.chain([f"{number}.json"], (f"{number}-{which}.json" for which in itertools.count(2)))
    final = next(path for path in map(folder.joinpath, names) if _is_own(path) or not _is_locked(path))
    try:
        if not _is_own(final) and not _is_empty(final):
            _parsed(final)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise FileExistsError(errno.EEXIST, f"{final.name} {_words(error)}, and is left as it is") from error
    with json_file.draft(folder, text.encode()) as draft, contextlib.ExitStack() as opened:
        identity, lock = _identity(draft), os.open(draft, os.O_RDWR | os.O_NOFOLLOW)
        opened.callback(os.close, lock)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(draft, final)  # replaces the name itself, whatever was put there meanwhile: no link is followed
        opened.pop_all()
    if final in _locks:
        os.close(_locks[final])
    _written[final], _locks[final] = identity, lock


def problem(folder: str | Path) -> str | None:
    """Why reports cannot be written to this folder, by trying; None when they can, or the folder can be made."""
    folder = Path(folder)
    try:
        if folder.exists():
            with json_file.draft(folder, bytes(TRIAL_BYTES)):
                return None
        above = next(parent for parent in folder.absolute().parents if parent.exists())
        trial = above / f".{os.getpid()}-{secrets.token_hex(8)}.tmp"
        trial.mkdir()
        trial.rmdir()
        return None
    except OSError as error:
        return f"{folder}: {_words(error)}"


def read(folder: str | Path) -> tuple[list[dict], list[str]]:
    """(the reports in the folder, a sentence for each file and thing that is none)."""
    try:
        ranks = {entry.name: _rank(entry) for entry in os.scandir(folder) if entry.name.endswith(".json")}
    except OSError as error:
        return [], [] if isinstance(error, FileNotFoundError) else [f"{folder}: {_words(error)}"]
    names = sorted(ranks, key=ranks.get)[-MOST_REPORTS:]
    many = (
        f"{folder}: only the last {MOST_REPORTS} of {len(ranks)} files; those of servers that have ended may be deleted"
    )
    problems = [many] if len(ranks) > MOST_REPORTS else []
    found = []
    for name in sorted(names, key=_number):
        try:
            found.append(_parsed(Path(folder, name)))
        except FileNotFoundError:  # gone since: its process wrote it anew
            continue
        except (OSError, ValueError) as error:
            problems.append(f"{Path(folder, name)}: {_words(error)}")
    return found, problems


def _is_own(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return _written.get(path) == _identity(path)
    return False


def _is_locked(path: Path) -> bool:
    """Whether a process that runs has it as its report."""
    try:
        descriptor = os.open(path, _READ)
    except OSError:  # nothing, or none of ours
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


def _is_empty(path: Path) -> bool:
    """A file with nothing in it: what some file systems have of one that was written when the power failed. In a
    container the next server's processes have the same numbers."""
    status = os.lstat(path)
    return stat.S_ISREG(status.st_mode) and status.st_size == 0


def _number(name: str) -> int:
    """Of the process whose report has this name; -1 of a name that is none of a report's."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else -1


def _rank(entry: os.DirEntry) -> tuple[bool, int]:
    """The greatest are read: a server that runs for weeks has older reports than many that have ended since."""
    is_there = os.path.exists(f"/proc/{_number(entry.name)}")
    with contextlib.suppress(FileNotFoundError):  # gone since
        return is_there, entry.stat(follow_symlinks=False).st_mtime_ns
    return False, 0


def _identity(path: Path) -> tuple[int, ...]:
    """What a rename keeps and another file has otherwise: the number of one that is gone is given to the next."""
    status = os.lstat(path)
    return status.st_dev, status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns


def _parsed(path: Path) -> dict:
    """The report in a file; OSError or ValueError in words for anything else."""
    try:
        descriptor = os.open(path, _READ)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise OSError(error.errno, "is a symbolic link") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no regular file")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(LIMIT_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > LIMIT_BYTES:
        raise ValueError(f"has more than {LIMIT_BYTES >> 20} MB")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError("is not JSON") from error
    if not _is_report(found):
        raise ValueError("is none of our reports")
    return found


def _is_report(found) -> bool:
    return (
        isinstance(found, dict)
        and isinstance(found.get("deepseek_v4_sm120"), str)
        and type(found.get("pid")) is int
        and isinstance(found.get("patches"), list)
        and all(isinstance(row, dict) and _are_texts([row.get("patch"), row.get("state")]) for row in found["patches"])
        and isinstance(found.get("devices_served", {}), dict)
        and all(_are_texts(found.get(name)) for name in ("notes", "shadow_summary"))
    )


def _are_texts(found) -> bool:
    return isinstance(found, list) and all(isinstance(text, str) for text in found)


def _words(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)

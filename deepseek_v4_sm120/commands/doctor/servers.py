"""Whose a report is, where several servers run here: by what the kernel tells of processes and of sockets."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

LISTENS = "0A"  # in /proc/<pid>/net/tcp


def first_ones(root: Path, pids: Collection[int]) -> dict[int, int]:
    """Of each process the first one of its server: of these the one that started it, or what started that, .."""
    known = frozenset(pids)
    return {pid: ([pid] + [one for one in _ancestors(root, pid) if one in known])[-1] for pid in pids}


def first_at(root: Path, first: dict[int, int], port: int) -> int | None:
    """Of the servers of `first_ones` that which listens at the port; None where none does, or several."""
    found = {first[pid] for pid in first if _listening(root, pid, port) & _sockets(root, pid)}
    return found.pop() if len(found) == 1 else None


def _ancestors(root: Path, pid: int) -> Iterator[int]:
    while (pid := _parent(root, pid)) > 0:
        yield pid


def _parent(root: Path, pid: int) -> int:
    """0 where there is none, or the process is gone."""
    try:
        return int((root / f"proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _listening(root: Path, pid: int, port: int) -> set[str]:
    """The sockets that are open at the port where the process is, by their inodes."""
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = (root / f"proc/{pid}/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for words in map(str.split, lines):
            if len(words) > 9 and words[3] == LISTENS and words[1].rpartition(":")[2] == f"{port:04X}":
                found.add(f"socket:[{words[9]}]")
    return found


def _sockets(root: Path, pid: int) -> set[str]:
    folder, found = root / f"proc/{pid}/fd", set()
    try:
        names = os.listdir(folder)
    except OSError:  # gone, or another user's
        return found
    for name in names:
        try:
            found.add(os.readlink(folder / name))
        except OSError:  # closed since
            continue
    return found

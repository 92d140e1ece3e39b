"""Control groups, by which a container has less of its host: where they are, and what memory they leave."""

from __future__ import annotations

from pathlib import Path

from deepseek_v4_sm120.commands.doctor.pci import read_text

# (folder below /sys/fs/cgroup, its limits, what is in use, what of that is files' pages, which the kernel gives back):
# version 2, and version 1, which has a folder of its own for memory
V2 = ("", ("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file"))
V1 = ("memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))


def folders(root: Path, text: str, controller: str = "") -> list[Path]:
    """The folders of a process's control group and of those above, by its /proc/PID/cgroup; in a container the first
    is its own. controller: of version 1, by its name; version 2 has one group for all."""
    lines = (line.split(":", 2) for line in text.splitlines() if line.count(":") > 1)
    places = [place for _, names, place in lines if controller in names.split(",")]
    path, top = Path(places[0] if places else "/"), root / "sys/fs/cgroup" / controller
    return [top / str(one).lstrip("/") for one in (path, *path.parents)]


def memory_left(root: Path) -> int | None:
    """Bytes that this process's control groups leave it, at least; None: they have no limit, or none is seen."""
    text, left = read_text(root / "proc/self/cgroup"), []
    for controller, limits, in_use, given_back in (V2, V1):
        for folder in folders(root, text, controller):
            told = [read_text(folder / name) for name in limits]
            used, kept = read_text(folder / in_use), read_text(folder / "memory.stat")
            if not used.isdecimal():
                continue
            pages = dict(line.split(" ", 1) for line in kept.splitlines() if " " in line)
            files = sum(int(pages[name]) for name in given_back if pages.get(name, "").isdecimal())
            left += [int(limit) - max(0, int(used) - files) for limit in told if limit.isdecimal()]
    return max(0, min(left)) if left else None

"""What /proc and /sys say of the host's processors: which may be used, how many at a time, how fast, and where."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deepseek_v4_sm120.commands.doctor import control_group
from deepseek_v4_sm120.commands.doctor.pci import read_text

MOST_CPUS = 1 << 16


@dataclass(frozen=True)
class Cpus:
    """allowed: those of the server's processes, else of this one; None: not told
    limit, held_s: of the control group, how many of them at a time, and for how long that has held its threads back
    driver, governor, preference: of their frequencies, "" where that is not told (a virtual machine)
    nodes: NUMA node -> its CPUs
    swapped_kib: of the server's processes, in swap
    kernel: its release
    """

    allowed: frozenset[int] | None = None
    limit: float | None = None
    held_s: float = 0.0
    driver: str = ""
    governor: str = ""
    preference: str = ""
    nodes: dict[int, frozenset[int]] = field(default_factory=dict)
    swapped_kib: int = 0
    kernel: str = ""


def read(root: Path, pids: Sequence[int]) -> Cpus:
    """pids: the server's processes, as far as they are known."""
    status = [read_text(root / "proc" / str(pid) / "status") for pid in pids]
    allowed = [_allowed(text) for text in filter(None, status)] or [_allowed(read_text(root / "proc/self/status"))]
    frequency = root / "sys/devices/system/cpu/cpu0/cpufreq"
    nodes = (root / "sys/devices/system/node").glob("node[0-9]*")
    groups = control_group.folders(root, read_text(root / "proc" / str(pids[0] if pids else "self") / "cgroup"))
    limits = [limit for group in groups if (limit := _limit(read_text(group / "cpu.max"))) is not None]
    return Cpus(
        allowed=None if None in allowed else frozenset().union(*allowed),
        limit=min(limits, default=None),
        held_s=max((_value(read_text(group / "cpu.stat"), "throttled_usec") for group in groups), default=0) / 1e6,
        driver=read_text(frequency / "scaling_driver"),
        governor=read_text(frequency / "scaling_governor"),
        preference=read_text(frequency / "energy_performance_preference"),
        nodes={int(node.name[4:]): cpus for node in nodes if (cpus := cpu_list(read_text(node / "cpulist")))},
        swapped_kib=sum(_value(text, "VmSwap:") for text in status),
        kernel=read_text(root / "proc/sys/kernel/osrelease"),
    )


def cpu_list(text: str) -> frozenset[int] | None:
    """Of "0-3,8"; None of what is none."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part.strip())
        if match is None:
            return None
        found.update(range(int(match[1]), min(int(match[2] or match[1]), MOST_CPUS) + 1))
    return frozenset(found)


def _allowed(status: str) -> frozenset[int] | None:
    return cpu_list(next((line.partition(":")[2] for line in status.splitlines() if "Cpus_allowed_list" in line), ""))


def _limit(text: str) -> float | None:
    """Of cpu.max: microseconds of each period, or max."""
    match = re.fullmatch(r"([0-9]{1,12}) ([1-9][0-9]{0,11})", text)
    return int(match[1]) / int(match[2]) if match else None


def _value(text: str, name: str) -> int:
    """The number behind a name that begins a line; 0 where there is none."""
    match = re.search(rf"^{re.escape(name)}\s+([0-9]{{1,18}})\b", text, re.MULTILINE)
    return int(match[1]) if match else 0

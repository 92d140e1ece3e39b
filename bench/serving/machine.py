"""What the machine is, and what its clocks did while a side was measured. Reads nvidia-smi, lscpu and git; changes
nothing. Results are posted: which machine it is, and which cards of their kind, is in none.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import shutil
import statistics
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

GPU_FIELDS = (
    "index,name,driver_version,vbios_version,power.limit,clocks.max.sm,clocks.max.mem,"
    "pcie.link.gen.max,pcie.link.width.max,memory.total"
)
CLOCK_FIELDS = "index,clocks.sm,clocks.mem,temperature.gpu,power.draw,utilization.gpu,clocks_throttle_reasons.active"
BUSY_PERCENT = 20  # clocks of an idle GPU say nothing
# bits of clocks_throttle_reasons: hardware slowdown, hardware thermal, hardware power brake, software thermal
BAD_THROTTLE = 0x8 | 0x40 | 0x80 | 0x20


def output_of(command: list[str], timeout_s: float = 30.0) -> str | None:
    """What the program prints, None where it is absent or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def rows_of(fields: str) -> list[dict[str, str]]:
    """A row a GPU. A line that has other columns is a message, as "No devices were found"."""
    text = output_of(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    rows = [row_of(fields, line) for line in (text or "").splitlines()]
    return [row for row in rows if len(row) == len(fields.split(","))]


def row_of(fields: str, line: str) -> dict[str, str]:
    return dict(zip(fields.split(","), map(str.strip, line.split(",")), strict=False))


def processor() -> str:
    for line in (output_of(["lscpu"]) or "").splitlines():
        if line.startswith("Model name:"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit(folder: Path) -> str | None:
    """The commit of a checkout, with "-dirty" where files differ; None outside git."""
    found = output_of(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if found and output_of(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"]):
        found += "-dirty"
    return found


def describe(folder: Path) -> dict:
    """Devices, topology, driver, host, commit of `folder`. Absent tools give None, never a guess."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpus": rows_of(GPU_FIELDS),
        "topology": re.sub(r"\x1b\[[0-9;]*m", "", output_of(["nvidia-smi", "topo", "-m"]) or "") or None,
        "processor": processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "commit": commit(folder),
    }


def gpu_names(described: dict) -> str:
    names = [gpu["name"] for gpu in described["gpus"]]
    found = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return ", ".join(found) or "no GPU seen by nvidia-smi"


class ClockWatch:
    """Samples the clocks every `period_s`, from one nvidia-smi that keeps running: starting it each time costs the
    GPU.
    """

    def __init__(self, period_s: float = 1.0):
        self.period_s, self.samples = period_s, []

    @contextlib.contextmanager
    def watching(self) -> Iterator[ClockWatch]:
        if shutil.which("nvidia-smi") is None:
            yield self
            return
        command = ["nvidia-smi", f"--query-gpu={CLOCK_FIELDS}", "--format=csv,noheader,nounits"]
        command += [f"--loop-ms={max(1, round(self.period_s * 1000))}"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        thread = threading.Thread(target=self._read, args=(process,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            process.terminate()
            process.wait()
            thread.join()
            process.stdout.close()
            if not self.samples:  # a short stretch, or a pipe that is not flushed
                self.samples += rows_of(CLOCK_FIELDS)

    def _read(self, process: subprocess.Popen) -> None:
        for line in process.stdout:
            self.samples.append(row_of(CLOCK_FIELDS, line))


def number(text: str) -> float | None:
    """nvidia-smi writes [N/A] where a card has no such value."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def summarise_clocks(samples: list[dict[str, str]]) -> dict | None:
    """Median clocks (MHz), greatest temperature (C), bad throttle reasons seen; None where no GPU was busy."""
    busy = [s for s in samples if (number(s.get("utilization.gpu")) or 0) >= BUSY_PERCENT]
    found: dict = {"busy_samples": len(busy)}
    for name, key, reduce in (
        ("clocks.sm", "sm_mhz", statistics.median),
        ("clocks.mem", "mem_mhz", statistics.median),
        ("temperature.gpu", "temperature_c", max),
        ("power.draw", "power_w", statistics.median),
    ):
        values = [value for sample in busy if (value := number(sample.get(name))) is not None]
        found[key] = reduce(values) if values else None
    bits = 0
    for sample in busy:
        reason = sample.get("clocks_throttle_reasons.active") or "0"
        bits |= int(reason, 16) if reason.startswith("0x") else 0
    found["throttled"] = bool(bits & BAD_THROTTLE)
    return found if busy else None

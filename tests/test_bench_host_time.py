"""bench/host_time.py runs every case, in a process of its own: what stands in for the card must not stay in caches."""

import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "bench/host_time.py"


def test_every_case_has_a_line(torch_python):
    command = [*torch_python(), str(SCRIPT), "--rows", "1100", "--calls", "7"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) >= 9 and all(float(time) > 0 and unit == "us" for time, unit, *_ in lines)

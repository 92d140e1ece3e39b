"""Where there is no card, a benchmark ends in one sentence and not with success."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", ["all_reduce", "bf16_linear", "index_select", "mhc", "prompt_sums"])
def test_a_benchmark_without_a_card(name, tmp_path):
    command = [sys.executable, str(REPO / f"bench/{name}.py"), "--out", str(tmp_path / "found.json")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith("no GPU: torch "), done.stderr
    assert not (tmp_path / "found.json").exists()

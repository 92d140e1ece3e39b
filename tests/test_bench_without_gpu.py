"""Where there is no card, a benchmark ends in one sentence and not with success."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


def test_a_help_text_of_one_line_is_a_whole_sentence():
    scripts = [path for folder in ("bench", "csrc", "tests") for path in (REPO / folder).rglob("*.py")]
    asked = [path for path in scripts if "description=__doc__.splitlines()[0]" in path.read_text()]
    firsts = {path.name: ast.get_docstring(ast.parse(path.read_text())).splitlines()[0] for path in asked}
    firsts.pop(Path(__file__).name)
    assert len(firsts) > 5 and [name for name, line in firsts.items() if not line.endswith((".", ":"))] == []


@pytest.mark.parametrize("name", ["all_reduce", "bf16_linear", "index_select", "mhc", "prompt_sums"])
def test_a_benchmark_without_a_card(name, tmp_path):
    command = [sys.executable, str(REPO / f"bench/{name}.py"), "--out", str(tmp_path / "found.json")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith("no GPU: torch "), done.stderr
    assert not (tmp_path / "found.json").exists()

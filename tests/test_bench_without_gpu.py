"""Where there is no card, a benchmark ends in one sentence and not with success."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loaded_python import Loaded

REPO = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(path.stem for path in (REPO / "bench").glob("*.py") if '__name__ == "__main__"' in path.read_text())
WITHOUT_TORCH = {"features", "measured", "timeline"}
OF_PYTHON = ("argparse", "unittest.mock", "ssl", "statistics", "csv", "multiprocessing.connection", "http.client")


def test_a_help_text_of_one_line_is_a_whole_sentence():
    scripts = [path for folder in ("bench", "csrc", "tests") for path in (REPO / folder).rglob("*.py")]
    asked = [path for path in scripts if "description=__doc__.splitlines()[0]" in path.read_text()]
    firsts = {path.name: ast.get_docstring(ast.parse(path.read_text())).splitlines()[0] for path in asked}
    firsts.pop(Path(__file__).name)
    assert len(firsts) > 5 and [name for name, line in firsts.items() if not line.endswith((".", ":"))] == []


@pytest.mark.parametrize("name", ["all_reduce", "bf16_linear", "index_select", "mhc", "prompt_sums"])
def test_a_benchmark_without_a_card(name, tmp_path, torch_python):
    command = [*torch_python(), str(REPO / f"bench/{name}.py"), "--out", str(tmp_path / "found.json")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith("no GPU: torch "), done.stderr
    assert not (tmp_path / "found.json").exists()


def test_times_of_loading_without_a_card(torch_python):
    command = [*torch_python(), str(REPO / "bench/load_time.py")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith("no GPU: torch ") and done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def without_packages(tmp_path_factory):
    """without_packages(name, *arguments). -S: of this interpreter's packages none is found."""
    loaded = Loaded(tmp_path_factory.mktemp("bare"), *OF_PYTHON, start=[sys.executable, "-S"])
    environment = {one: value for one, value in os.environ.items() if one != "PYTHONPATH"}

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess:
        command = [*loaded.command, str(REPO / f"bench/{name}.py"), *arguments]
        return subprocess.run(command, env=environment, cwd=REPO, capture_output=True, text=True, timeout=60)

    yield run
    loaded.close()


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_help_of_a_benchmark_needs_no_package(without_packages, name):
    done = without_packages(name, "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: {name}.py") and not done.stderr, done.stderr


@pytest.mark.parametrize("name", sorted({*SCRIPTS} - WITHOUT_TORCH))
def test_a_benchmark_without_torch(without_packages, name):
    done = without_packages(name)
    assert done.returncode == 1 and done.stdout == "", done.stderr
    assert done.stderr.startswith(f"{name}.py: torch is not installed for ") and done.stderr.count("\n") == 1

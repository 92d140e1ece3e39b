"""What extension.py says when the compiled module is missing, for another Python, stale or broken. No GPU, no torch."""

import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import deepseek_v4_sm120

PACKAGE = Path(deepseek_v4_sm120.__file__).parent
MODULE = f"_C{EXTENSION_SUFFIXES[0]}"


@pytest.fixture
def package(tmp_path) -> Path:
    """A mounted folder with the Python files that extension.py needs, and no compiled module."""
    folder = tmp_path / "deepseek_v4_sm120"
    folder.mkdir()
    for name in ("__init__.py", "extension.py"):
        shutil.copyfile(PACKAGE / name, folder / name)
    return folder


def ask(package: Path, expression: str) -> str:
    script = f"import sys; sys.path.insert(0, {str(package.parent)!r})\n"
    script += f"from deepseek_v4_sm120 import extension\nprint({expression})"
    done = subprocess.run([sys.executable, "-I", "-c", script], text=True, capture_output=True)
    return done.stdout if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def test_missing_module_says_where_it_looked_and_how_to_build(package):
    said = ask(package, "extension.load()")
    assert said.startswith("ImportError: deepseek_v4_sm120: no compiled module for Python")
    assert MODULE in said and str(package) in said and "build_docker.sh" in said


def test_module_for_another_python_is_named(package):
    (package / "_C.cpython-39-x86_64-linux-gnu.so").touch()
    said = ask(package, "extension.load()")
    assert "_C.cpython-39-x86_64-linux-gnu.so" in said and "--python" in said


def test_stale_module_is_refused(package):
    (package / MODULE).touch()
    (package / "build_info.json").write_text('{"version": "0.0.1"}')
    said = ask(package, "extension.load()")
    assert said.startswith("ImportError") and "0.0.1" in said and deepseek_v4_sm120.__version__ in said


def test_module_that_does_not_load_is_named_with_the_loader_s_words(package):
    (package / MODULE).write_bytes(b"not a library")
    said = ask(package, "extension.load()")
    assert said.startswith("ImportError: deepseek_v4_sm120: ") and MODULE in said and "file too short" in said


def test_describe_opens_no_library(package):
    (package / MODULE).write_bytes(b"not a library")
    (package / "build_info.json").write_text(f'{{"version": "{deepseek_v4_sm120.__version__}", "archs": ["120a"]}}')
    said = ask(package, "[extension.describe()[k] for k in ('archs', 'problem')], extension.find().name")
    assert said.strip() == f"[['120a'], None] {MODULE}"


def test_describe_without_a_module(package):
    said = ask(package, "[extension.describe()[k] for k in ('file', 'version', 'problem')]")
    assert said.startswith("[None, None, 'deepseek_v4_sm120: no compiled module")

"""Forks of a Python that has imported: what they see is what a Python started anew would."""

import os
import subprocess
import sys

import pytest

from tests.loaded_python import CHILDREN, Loaded

SCRIPT = """
import subprocess, sys
print(__name__, __file__, "colorsys" in sys.modules, sys.argv[1:], flush=True)
if len(sys.argv) > 1:
    subprocess.run([sys.executable, __file__])
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    loaded = Loaded(tmp_path_factory.mktemp("loaded"), "colorsys")
    yield loaded
    loaded.close()


def said(loaded, *words, **environment):
    return subprocess.run([*loaded.command, *words], env=os.environ | environment, capture_output=True, text=True)


def test_a_script_and_what_it_starts(loaded, tmp_path):
    """Behind a change it is another script."""
    (tmp_path / "script.py").write_text(SCRIPT)
    path = str(tmp_path / "script.py")
    forked, new = f"__main__ {path} True", f"__main__ {path} False"
    assert said(loaded, path, "a").stdout.splitlines() == [f"{forked} ['a']", f"{new} []"]
    done = said(loaded, path, "b", **{CHILDREN: loaded.python})
    assert done.stdout.splitlines() == [f"{forked} ['b']", f"{forked} []"]
    (tmp_path / "script.py").write_text("print('another one')\n")
    assert said(loaded, path).stdout == "another one\n"
    (tmp_path / "script.py").write_text("print(\n")
    assert "SyntaxError" in said(loaded, path).stderr
    (tmp_path / "script.py").unlink()
    done = said(loaded, path)
    assert "FileNotFoundError" in done.stderr and done.returncode == 1


def test_a_module_and_code(loaded, tmp_path):
    (tmp_path / "as_module.py").write_text(SCRIPT)
    done = said(loaded, "-m", "as_module", "c", PYTHONPATH=str(tmp_path), PYTHONDONTWRITEBYTECODE="1")
    assert done.stdout.splitlines()[0].endswith("as_module.py True ['c']")
    code = "import sys; print(sys.argv, sys.executable); sys.exit(7)"
    done = said(loaded, "-c", code, "d")
    assert (done.stdout, done.returncode) == (f"['-c', 'd'] {sys.executable}\n", 7)

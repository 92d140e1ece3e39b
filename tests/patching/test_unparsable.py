"""Files of SGLang that Python cannot parse: findings in words through survey, preflight and status."""

import json

import pytest

TARGET = "sglang/srt/layers/quantization/fp8.py"
MODULE = "sglang.srt.layers.quantization.fp8"
CALLER = "sglang/srt/layers/attention/deepseek_v4_backend.py"
VERSION = "sglang/_version.py"
BAD = {
    "syntax": b"def broken(:\n",
    "encoding": b"# a comment\nname = '\xff\xfe'\n",
    "unknown encoding": b"# -*- coding: none-such -*-\n",
    "NUL": b"name = 1\x00\n",
}
STATUS = "import sys; from deepseek_v4_sm120.__main__ import main; sys.exit(main(['status', '--json']))"


@pytest.fixture
def python(python_with_torch):
    """`status` and the preflight import it."""
    return python_with_torch


def broken(tree, name, kind):
    host = tree()
    (host / name).write_bytes(BAD[kind])
    return host


def rows(done):
    found = json.loads(done.stdout)
    return found, {row["target"]: row for row in found["patches"]}


@pytest.mark.parametrize("kind", BAD)
def test_a_target(python, tree, kind):
    done = python(STATUS, path=[broken(tree, TARGET, kind)], check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    row = rows(done)[1][f"{MODULE}:Fp8LinearMethod.apply"]
    assert row["state"] == "BROKEN" and f"{MODULE} cannot be parsed: " in row["reason"] and row["digest"] is None


def test_a_caller(python, tree):
    """Of a target whose own file is fine. Where it stands is in the words."""
    done = python(STATUS, path=[broken(tree, CALLER, "syntax")], check=False)
    found, _ = rows(done)
    (row,) = [row for row in found["patches"] if row["patch"] == "sparse_decode"]
    assert row["state"] == "BROKEN" and "deepseek_v4_backend, which should call" in row["reason"]
    assert "cannot be parsed: line 1: " in row["reason"]


@pytest.mark.parametrize("kind", BAD)
def test_a_version_file(python, tree, kind):
    host = broken(tree, VERSION, kind)
    done = python(STATUS, path=[host], check=False)
    found, _ = rows(done)
    assert "Traceback" not in done.stderr and found["sglang"] is None
    assert len(found["unparsable"]) == 1 and found["unparsable"][0].startswith("sglang._version cannot be parsed: ")
    text = python(STATUS.replace(", '--json'", ""), path=[host], check=False).stdout
    assert "sglang._version cannot be parsed: " in text


def test_the_preflight_names_it_and_the_line(python, tree):
    """And stops no server by itself: that is for the model and the GPU to decide."""
    code = "import sglang.srt.managers.scheduler as s; print(s.started)"
    host = broken(tree, TARGET, "syntax")
    for environ in ({}, {"DSV4_SM120_ON_BROKEN": "warn"}):
        done = python(code, path=[host], env=environ)
        assert done.stdout == "True\n" and f"{MODULE} cannot be parsed: line 1: " in done.stderr
        assert "SyntaxError" not in done.stderr


def test_the_preflight_tells_a_version_file(python, tree):
    code = "import sglang.srt.managers.scheduler as s; print(s.started)"
    done = python(code, path=[broken(tree, VERSION, "syntax")], env={"DSV4_SM120_ON_BROKEN": "warn"})
    assert done.stdout == "True\n" and "sglang._version cannot be parsed: line 1: " in done.stderr


def test_a_folder_in_a_files_place_is_no_traceback(python, tree, tmp_path):
    host = tree()
    (host / TARGET).unlink()
    (host / TARGET).symlink_to(tmp_path / "nowhere")
    done = python(STATUS, path=[host], check=False)
    assert "Traceback" not in done.stderr and f"there is no module {MODULE}" in done.stdout

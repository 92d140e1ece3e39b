"""The mark of what is tried at a start: whoever starts behind one that ended within it is told, and nobody else."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.sglang_patches import start_mark

REPO = Path(__file__).resolve().parents[2]
NAME = "thing"
ENDS = f"""
import os, sys
from deepseek_v4_sm120.sglang_patches import start_mark
sys.argv = {sys.argv!r}
with start_mark.marked("{NAME}") as mark:
    mark.note("a rather long first part")
    mark.note("second part")
    os._exit(9)
"""


@pytest.fixture
def told(monkeypatch):
    lines = []
    monkeypatch.setattr(report, "info", lines.append)
    return lines


@pytest.fixture
def place(monkeypatch, tmp_path, told):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return start_mark.path(NAME)


def found(name=NAME):
    with start_mark.marked(name) as mark:
        return mark.ended_within


def test_a_start_behind_one_that_ended_within_is_told_once(place):
    assert subprocess.run([sys.executable, "-c", ENDS], cwd=REPO, check=False).returncode == 9
    assert place.read_text() == "second part"
    assert found("another") == ""
    assert [found(), found()] == ["second part", ""] and not place.exists()


def test_one_that_came_through_leaves_nothing(place):
    with start_mark.marked(NAME) as mark:
        mark.note("a part")
        assert place.read_text() == "a part"
    assert not place.exists() and found() == ""


def test_nor_does_one_with_an_error(place):
    with pytest.raises(ValueError), start_mark.marked(NAME) as mark:
        mark.note("a part")
        raise ValueError
    assert not place.exists() and found() == ""


def test_another_server_that_is_in_its_midst_is_no_sign(place, told):
    with start_mark.marked(NAME) as mark:
        mark.note("a part")
        with start_mark.marked(NAME) as of_another:
            assert of_another.ended_within == ""
            of_another.note("its part")
        assert place.read_text() == "a part" and told == []


def test_one_that_opened_it_before_it_went_reads_nothing(place):
    with contextlib.ExitStack() as until_end:
        with start_mark.marked(NAME) as mark:
            mark.note("a part")
            opened = until_end.enter_context(open(place))
        assert opened.read() == ""


def test_other_arguments_have_a_mark_of_their_own(place, monkeypatch):
    with monkeypatch.context() as changed:
        changed.setattr(sys, "argv", [*sys.argv, "--mem-fraction-static", "0.9"])
        assert start_mark.path(NAME) != place
    assert start_mark.path(NAME) == place
    monkeypatch.setattr(report, "our_version", lambda: "99")
    assert start_mark.path(NAME) != place


def test_where_nothing_can_be_written_nothing_is_remembered(place, told, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("no folder")
    with start_mark.marked(NAME) as mark:
        mark.note("a part")
    assert mark.ended_within == "" and len(told) == 1 and f"{NAME}: a start that ends is not remembered" in told[0]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(start_mark.os.path, "expanduser", lambda path: path)  # of a user without a home
    assert start_mark.path(NAME) is None and found() == "" and len(told) == 1

"""The mark of what is tried at a start: whoever starts behind one that ended within it is told, and nobody else."""

import contextlib
import errno
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


def test_one_that_has_locked_it_when_it_was_gone_leaves_a_thirds_alone(place, told, monkeypatch):
    flock = start_mark.fcntl.flock

    def late(*args):
        place.unlink()
        place.write_text("a third one's part")
        return flock(*args)

    with monkeypatch.context() as changed:
        changed.setattr(start_mark.fcntl, "flock", late)
        with start_mark.marked(NAME) as mark:
            mark.note("a part")
    assert place.read_text() == "a third one's part" and mark.ended_within == "" and told == []


def test_other_arguments_have_a_mark_of_their_own(place, monkeypatch):
    with monkeypatch.context() as changed:
        changed.setattr(sys, "argv", [*sys.argv, "--mem-fraction-static", "0.9"])
        assert start_mark.path(NAME) != place
    assert start_mark.path(NAME) == place
    monkeypatch.setattr(report, "our_version", lambda: "99")
    assert start_mark.path(NAME) != place


def test_a_full_disk_keeps_nothing_from_going_on(place, told, monkeypatch):
    """Files are made there, and nothing can be written into them; NFS says so when they are closed, too."""
    for call in ("write", "truncate", "close"):
        told.clear()
        with start_mark.marked(NAME) as mark:
            mark._file = FullDisk(mark._file, call)
            for part in ("a part", "another"):
                mark.note(part)
        assert [f"{NAME}: a start that ends is not remembered" in line for line in told] == [True] * len(told) != []
        assert not place.exists() or place.read_text() == ""


class FullDisk:
    def __init__(self, file, call):
        self.file, self.call = file, call

    def __getattr__(self, name):
        if name != self.call:
            return getattr(self.file, name)
        return lambda *_: self.fail()

    def fail(self):
        raise OSError(errno.ENOSPC, "no space left")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()
        if self.call == "close":
            self.fail()


def test_where_nothing_can_be_taken_away_it_is_told(place, told):
    with start_mark.marked(NAME) as mark:
        mark.note("a part")
        place.unlink()
        place.mkdir()  # as a folder of another user's would, it refuses
    assert len(told) == 1


def test_one_that_stays_is_told_to_the_next_start_once(place):
    with start_mark.marked(NAME) as mark:
        mark.note("a part")
        mark.stay()
        mark.note("another")
    mark.note("a part that nobody waits for")
    assert [found(), found()] == ["another", ""] and not place.exists()


def test_what_is_no_text_is_a_mark_like_another(place):
    place.parent.mkdir(parents=True)
    place.write_bytes(b"\xff\xfe\0")
    assert found() != "" and found() == "" and not place.exists()


def test_where_nothing_can_be_written_nothing_is_remembered(place, told, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("no folder")
    with start_mark.marked(NAME) as mark:
        mark.note("a part")
    assert mark.ended_within == "" and len(told) == 1 and f"{NAME}: a start that ends is not remembered" in told[0]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(start_mark.os.path, "expanduser", lambda path: path)  # of a user without a home
    assert start_mark.path(NAME) is None and found() == "" and len(told) == 1

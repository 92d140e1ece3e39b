"""Tests in forks of the process that collected them come to what they come to in one."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import forks

REPO = Path(__file__).resolve().parents[1]
FILES = {
    "conftest.py": """
        import os, pytest
        @pytest.fixture(scope="session")
        def place(tmp_path_factory):
            yield tmp_path_factory.mktemp("session")
            with open(os.environ["LOG"], "a") as log:
                print("session ended", file=log)
        """,
    "test_a.py": """
        import os, warnings, pytest
        WHO = os.getpid()
        def test_place(place): assert place.is_dir() and os.getpid() != WHO
        @pytest.mark.parametrize("n", range(20))
        def test_many(n, tmp_path): assert not list(tmp_path.iterdir())
        def test_told(): print("what it printed"); os.write(1, b"by its file\\n"); assert 1 + 1 == 3
        def test_skipped(): pytest.skip("no reason")
        def test_warns(): warnings.warn("a warning of mine")
        """,
    "test_b.py": """
        import pytest
        @pytest.fixture
        def broken(): yield; assert False, "teardown"
        def test_teardown(broken): pass
        def test_setup(missing): pass
        @pytest.mark.xfail
        def test_expected(): assert False
        def test_place(place): assert place.is_dir()
        """,
    "test_c.py": "def test_c(): pass\n",
}
DIES = """
    import os, signal
    def test_before(): pass
    def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
    def test_behind(): pass
"""


def unindented(text):
    return re.sub(r"^ {8}|^ {4}", "", text, flags=re.MULTILINE) if text.startswith("\n") else text


@pytest.fixture
def ran(tmp_path):
    def run(*words, forks=3, **more):
        for name, text in (FILES | more).items():
            (tmp_path / name).write_text(unindented(text))
        line = [sys.executable, "-m", "pytest", "-p", "tests.forks", "--forks", str(forks), "-rA", *words]
        environment = os.environ | {"PYTHONPATH": str(REPO), "LOG": str(tmp_path / "log")}
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        found = set(re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL) (\S+)", done.stdout, flags=re.MULTILINE))
        return done, found

    return run


def test_every_test_comes_to_what_it_does_in_one_process(ran, tmp_path):
    done, found = ran()
    assert done.returncode == 1, done.stdout + done.stderr
    alone, expected = ran(forks=0)
    own = {("FAILED", "test_a.py::test_place"), ("PASSED", "test_a.py::test_place")}  # it asks for a fork
    assert found - own == expected - own and ("PASSED", "test_a.py::test_place") in found
    said = done.stdout.splitlines()[-1]
    assert "1 failed, 25 passed, 1 skipped, 1 xfailed, 1 warning, 2 errors" in said
    for words in ("what it printed", "by its file", "assert (1 + 1) == 3", "a warning of mine", "fixture 'missing'"):
        assert words in done.stdout, words
    assert (tmp_path / "log").read_text() == "session ended\n" * 3  # of two files in forks, of all in one process


MARKS = (
    FILES["conftest.py"]
    + """
        def pytest_collection_modifyitems(items):
            for item in items:
                item.together = True
"""
)


def test_files_that_are_marked_so_stay_in_one_process(ran):
    """As one that dies in it shows."""
    done, _ = ran(forks=9, **{"conftest.py": MARKS, "test_b.py": DIES})
    failed = set(re.findall(r"^FAILED (\S+)", done.stdout, flags=re.MULTILINE))
    assert {"test_b.py::test_dies", "test_c.py::test_c"} <= failed, done.stdout


def test_two_of_five_begin_with_files_that_wait_and_then_all_take_what_is_left():
    files = [[SimpleNamespace(waits=waits)] for waits in (False, True, False, True)] + [[SimpleNamespace()]]
    queues = [forks.filled(files, waits) for waits in (False, True)]
    five = [forks.in_order(queues, number, 5) for number in range(5)]
    assert five == [queues[::-1]] * 2 + [queues] * 3 and forks.in_order(queues, 0, 1) == queues
    taken = [forks.next_of(own, files) for own in (queues, queues[::-1], queues[::-1], queues[::-1], queues, queues)]
    assert taken == [files[0], files[1], files[3], files[2], files[4], []]
    for queue in queues:
        os.close(queue)


def test_a_process_that_dies_has_failed_tests_and_the_others_run(ran):
    done, found = ran(**{"test_b.py": DIES})
    assert done.returncode == 1 and "not run to its end: a process of the run ended (signal 9)" in done.stdout
    assert {("PASSED", "test_b.py::test_before"), ("PASSED", "test_c.py::test_c")} <= found
    failed = {name for what, name in found if what == "FAILED"}
    assert failed == {"test_a.py::test_told", "test_b.py::test_dies", "test_b.py::test_behind"}


def test_nothing_is_run_that_cannot_be_collected_nor_beyond_the_failure_that_is_one_too_many(ran):
    done, _ = ran(**{"test_d.py": "import nowhere\n"})
    assert done.returncode == 2 and "No module named 'nowhere'" in done.stdout
    done, _ = ran("-x", "test_a.py", "test_c.py", **{"test_d.py": ""})
    assert done.returncode == 1 and "stopping after 1 failures" in done.stdout

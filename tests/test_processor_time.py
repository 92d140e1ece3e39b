"""What a run says of its cost, and what makes it fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processor_time
from tests.processor_time import MOST, PACE_S, too_much

REPO = Path(__file__).resolve().parents[1]
BURNS = """
import subprocess, sys, time
def burn(seconds):
    while time.process_time() < seconds:
        pass
def test_quick(): pass
def test_own(): burn(time.process_time() + 0.3)
def test_of_a_child(): subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.3: pass"])
"""
BAR = """
import os, time
from tests import processor_time
processor_time.MOST = eval(os.environ["MOST"])
def pytest_sessionfinish():
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
"""


def test_the_machines_pace_is_taken_out():
    tests = {"a": MOST["one test"] * 0.9, "b": 1.0}
    assert too_much(tests, 0.0, [PACE_S], MOST) == []
    assert too_much({name: 3 * seconds for name, seconds in tests.items()}, 0.0, [PACE_S * 3] * 9, MOST) == []
    (said,) = too_much(tests, 0.0, [PACE_S * 0.8], MOST)
    assert said.startswith("one test (a): ")


def test_one_odd_look_at_the_pace_changes_nothing():
    tests = {"a": MOST["one test"] * 1.1}
    assert len(too_much(tests, 0.0, [PACE_S, PACE_S, PACE_S * 50], MOST)) == 1


def test_what_fixtures_take_at_their_ends_is_no_single_tests():
    assert too_much({"a": 1.0}, MOST["one test"] * 2, [PACE_S], MOST) == []
    assert len(too_much({"a": 1.0}, MOST["all tests"], [PACE_S], MOST)) == 1


def test_many_small_ones_are_too_much_together():
    tests = {str(number): 1.0 for number in range(int(MOST["all tests"]) + 1)}
    (said,) = too_much(tests, 0.0, [PACE_S], MOST)
    assert said.startswith("all tests: ")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """ran(most, *words): pytest over three tests, two of which take 0.3 s."""
    folder = tmp_path_factory.mktemp("burns")
    (folder / "test_burns.py").write_text(BURNS)
    (folder / "bar.py").write_text(BAR)

    def run(most, *words):
        line = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.processor_time",
            "-p",
            "bar",
            *words,
            "test_burns.py",
        ]
        environment = os.environ | {"PYTHONPATH": f"{REPO}{os.pathsep}{folder}", "MOST": repr(most)}
        return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)

    return run


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one process", "workers"])
def test_a_run_over_the_bar_fails_and_says_by_what(ran, workers):
    done = ran({"all tests": 0.02, "one test": 1e9}, "--whole-suite", *workers)
    assert done.returncode == 1 and "FAILED: all tests: " in done.stdout, done.stdout + done.stderr
    assert "3 passed" in done.stdout and "test_burns.py::test_own" in done.stdout
    told = {
        line.split()[2].partition("::")[2]: float(line.split()[0]) for line in done.stdout.splitlines() if "::" in line
    }
    (ends,) = (line for line in done.stdout.splitlines() if line.endswith("ends of fixtures"))
    assert float(ends.split()[0]) >= 0.1  # the session's, as of a Python that all share
    assert told["test_own"] >= 0.3 and told["test_of_a_child"] >= 0.3 > told["test_quick"]


def test_one_within_it_does_not_nor_one_of_a_selection(ran):
    assert ran({"all tests": 1e9, "one test": 1e9}, "--whole-suite").returncode == 0
    done = ran({"all tests": 0.0, "one test": 0.0})
    assert done.returncode == 0 and " s in 3 tests" in done.stdout


def test_a_run_with_the_whole_suite_is_judged(monkeypatch):
    from tests import test_run

    lines = []
    monkeypatch.setattr(test_run.run, "prepared", lambda environment: (sys.executable, [subprocess.Popen(["true"])]))
    monkeypatch.setattr(
        test_run.run.subprocess, "run", lambda line, **_: lines.append(line) or type("", (), {"returncode": 0})
    )
    for arguments, judged in (([], True), (["tests/ops"], False)):
        assert test_run.run.run_without_gpu(arguments) == 0
        assert ("--whole-suite" in lines[-1]) == judged and "tests.processor_time" in lines[-1]
    assert processor_time.MOST["all tests"] > 60

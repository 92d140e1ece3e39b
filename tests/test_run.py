"""tests/run.py --gpu: which passes there are, and what they come to."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("run", Path(__file__).with_name("run.py"))
run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run)


def test_what_waits_or_is_timed_has_the_card_for_itself():
    beside, alone = run.gpu_passes("gpu", True, ["-x", "tests/ops"])
    assert beside[:3] == ["-m", "gpu and not alone", "-n"] and alone[:2] == ["-m", "gpu and alone"]
    assert "-n" not in alone and all(words[-2:] == ["-x", "tests/ops"] for words in (beside, alone))


@pytest.mark.parametrize(
    "has_xdist, arguments", [(False, []), (True, ["-n0"]), (True, ["-n", "3"]), (True, ["-m", "gpu"])]
)
def test_one_pass_where_processes_are_none_or_the_callers(has_xdist, arguments):
    assert run.gpu_passes("gpu", has_xdist, arguments) == [["-m", "gpu", *arguments]]


@pytest.mark.parametrize(
    "codes, told", [([0, 0], 0), ([0, 5], 0), ([5, 0], 0), ([5, 5], 5), ([5], 5), ([0, 1], 1), ([-9, 0], -9)]
)
def test_a_pass_without_tests_is_no_failure_and_nothing_at_all_is(codes, told):
    assert run.outcome(codes) == told


@pytest.mark.parametrize(
    "capability, has_code, archs", [("9.0", False, "120f,90a"), ("12.0", False, "120f"), ("9.0", True, None)]
)
def test_what_is_built_before_gpu_tests(monkeypatch, capability, has_code, archs):
    """Nothing, or what the product has and, where that is another, the card's own."""
    asked = []

    def answered(command, **_):
        asked.append(command)
        done = subprocess.CompletedProcess(command, 0, stdout=f"{capability} a card\n")
        done.returncode = 0 if has_code or "extension" not in command[-1] else 1
        return done

    monkeypatch.setattr(run.subprocess, "run", answered)
    assert run.prepared_gpu({}, "pytest") == capability
    assert capability.replace(".", ", ") in asked[1][-1]
    assert [command[-2:] for command in asked[2:]] == ([] if archs is None else [["--archs", archs]])


def test_whether_a_build_has_a_cards_code():
    for capability, code in (("12, 0", 0), ("12, 1", 0), ("8, 0", 1)):
        command = [sys.executable, "-c", run.PRESENT.format(capability)]
        assert subprocess.run(command, cwd=run.REPO, stderr=subprocess.DEVNULL).returncode == code, capability

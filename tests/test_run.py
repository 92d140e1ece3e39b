"""tests/run.py --gpu: which passes there are, and what they come to."""

import importlib.util
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

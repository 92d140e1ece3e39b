"""The engines of an operator that is off by default, without a card: a stand-in for the engine."""

import json

import pytest

from deepseek_v4_sm120.sglang_patches.table import TABLE
from tests.e2e.test_scripts import machine, rows_of, script  # noqa: F401


def test_an_operator_that_is_off_by_default_is_switched_on_alone(machine):  # noqa: F811
    stages = script("stages")
    off = {row.name for row in TABLE.defaults if not row.on}
    assert off.intersection(stages.OPERATORS) == set(stages.BY_CHOICE)
    kinds = {case.name.split("_")[1] for case in stages.STAGES["without43"] if case.name.endswith(stages.BY_CHOICE)}
    ended = machine("without43", "--only", "ops43_with_router_topk")
    assert kinds == {"with"} and ended.returncode in (0, 1), ended.stdout + ended.stderr
    stage = json.loads((machine.out / "stage_without43.json").read_text())
    assert "DSV4_SM120_SET=router_topk=on" in stage["cases"]["ops43_with_router_topk"]["command"]
    rows = [r for r in rows_of(machine.out / "stage_without43.json") if r["metric"] == "decode step, ms, best"]
    assert [(r["impl"], r["issue"], "16 experts" in r["case"]) for r in rows] == [("ours, with router_topk", 7, True)]


@pytest.mark.parametrize("unlike, missed", [("", 0), ("same_router_topk", 96)])
def test_the_routers_choice_changes_no_bit(machine, unlike, missed):  # noqa: F811
    machine("reproducible", "--only", "same_router_8192", "same_router_topk", FAKE_UNLIKE=unlike)
    stage = json.loads((machine.out / "stage_reproducible.json").read_text())
    assert "router_topk=on" in stage["cases"]["same_router_topk"]["command"]
    assert "router_topk=on" not in stage["cases"]["same_router_8192"]["command"]
    told = {(s["run"], s["against"]): s["differ"] for s in stage["sames"]}
    assert told == {("same_router_topk", "same_router_8192"): missed, ("same_router_8192", "same_router_8192"): 0}
    rows = [r for r in rows_of(machine.out / "stage_reproducible.json") if r["metric"] == "answers that differ"]
    assert [(r["value"], r["bar"], r["met"]) for r in rows] == [(missed, 0, not missed), (0, 0, True)]


def test_the_routers_choice_beside_the_originals(machine):  # noqa: F811
    """The stand-in has records of attention alone: such an engine has shown nothing of the router's choice."""
    machine("router")
    path = machine.out / "stage_router.json"
    command = json.loads(path.read_text())["cases"]["router_shadow"]["command"]
    assert "DSV4_SM120_SET=router_topk=on" in command and "DSV4_SM120_SHADOW=1" in command
    missed = [(r["case"], r["metric"]) for r in rows_of(path) if r["met"] is False]
    assert missed == [("router_shadow, router_topk", "shadow calls recorded: none")]

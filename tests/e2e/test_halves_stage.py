"""The stages of chunks in halves without a GPU: their control flow, and what their rows say of what ran."""

import json

import pytest

from tests.e2e import halves_stage as stage
from tests.e2e.test_scripts import machine, rows_of, script  # noqa: F401

BOTH = [{"halves": {"forwards": 16, "rows": 90_000}}] * 2


def found_in(path, metric):
    return {(r["case"], r["impl"]): (r["value"], r["bar"], r["met"]) for r in rows_of(path) if r["metric"] == metric}


@pytest.mark.parametrize(
    ("found", "missing", "metric"),
    [
        (BOTH, 0, "chunks in halves, missing to 8"),
        ([{"halves": {"forwards": 8}}, {"halves": {"forwards": 4}}], 4, "chunks in halves, missing to 8"),
        ([{"halves": {"forwards": 16}}], 8, "chunks in halves, missing to 8"),  # of one card nothing is known
        ([{}], 8, "chunks in halves, missing to 8"),
        ([{"halves": {"a padded batch": 3}}] * 2, 8, "chunks in halves, missing to 8 (3 whole: a padded batch)"),
    ],
)
def test_answers_to_the_bit_count_only_where_chunks_were_in_halves(machine, found, missing, metric):  # noqa: F811
    ended = machine("halves2", FAKE_FOUND=json.dumps({stage.SAME: found}))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    path = machine.out / "stage_halves2.json"
    assert found_in(path, metric) == {(stage.SAME, stage.IMPLEMENTATIONS[stage.SAME]): (missing, 0, not missing)}
    differ = found_in(path, "answers that differ")
    assert [(value, bar) for value, bar, _ in differ.values()] == [(0, 0)] * 2
    cases = json.loads(path.read_text())["cases"]
    assert "DSV4_SM120_SET=reproducible=on,halves=on" in cases[stage.SAME]["command"]
    assert "DSV4_SM120_SET=reproducible=on " in cases[stage.WHOLE]["command"]


def test_another_bit_is_a_difference_and_halves_in_the_whole_run_are_seen(machine):  # noqa: F811
    told = json.dumps({stage.SAME: BOTH, stage.WHOLE: BOTH})
    ended = machine("halves2", FAKE_FOUND=told, FAKE_UNLIKE=stage.SAME)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    path = machine.out / "stage_halves2.json"
    ((value, bar, met),) = [f for (c, _), f in found_in(path, "answers that differ").items() if "in halves" in c]
    assert value > 0 and bar == 0 and not met
    assert list(found_in(path, "chunks in halves where none was asked for").values()) == [(32, 0, False)]


def test_times_of_engines_that_take_turns(machine):  # noqa: F811
    halves = [name for name in stage.TIMED if "halves2_43_halves" in name]
    ended = machine("halves2_43", FAKE_FOUND=json.dumps(dict.fromkeys(halves, BOTH)), FAKE_SUMS="1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    path = machine.out / "stage_halves2_43.json"
    cases = json.loads(path.read_text())["cases"]
    assert list(cases) == list(stage.TIMED) and {case["exit"] for case in cases.values()} == {0}
    for name, case in cases.items():
        assert list(case["first"]) == list(stage.SHAPES)
        assert {len(seen["ms"]) for seen in case["first"].values()} == {2 * 3}, "rounds, repetitions"
        assert case["first"]["1x8192"]["sums_ms"] == 87.0 and "sums_ms" not in case["first"]["1x32000"]
        assert ("NCCL_P2P_DISABLE=1" in case["command"]) == name.endswith("_no_peers")
        assert ("DSV4_SM120_SET=halves=on" in case["command"]) == (name in halves)
    assert len(found_in(path, "time to the first token, ms, best")) == 12
    assert all(met for _, _, met in found_in(path, "chunks in halves, missing to 16").values())
    assert len(found_in(path, "time to the first token, of the whole's")) == 6


@pytest.mark.parametrize(
    ("peers", "whole", "halves", "left", "met", "share", "is_fast"),
    [
        ("_no_peers", 400.0, 280.0, 0.2, True, 0.7, None),
        ("_no_peers", 400.0, 310.0, 0.4, False, 0.775, None),
        ("_no_peers", 400.0, 405.0, 1.0333, False, 1.0125, None),
        ("", 400.0, 405.0, 1.0333, None, 1.0125, True),
        ("", 400.0, 412.0, 1.08, None, 1.03, False),
    ],
)
def test_what_is_hidden_and_what_is_lost(peers, whole, halves, left, met, share, is_fast):
    """Of sums of 150 ms."""
    cases = {
        f"halves2_43_{how}{peers}": {"reports": [], "first": {"1x8192": {"ms": [ms + 9, ms], "sums_ms": 150.0}}}
        for how, ms in (("whole", whole), ("halves", halves))
    }
    rows = {r["metric"]: r for r in stage.rows(cases, script("collect").row)}
    hidden = rows["share of the sums' time that is not hidden"]
    assert hidden["value"] == pytest.approx(left, abs=1e-3) and hidden["met"] is met and hidden["issue"] == 22
    beside = rows["time to the first token, of the whole's"]
    assert beside["value"] == pytest.approx(share) and beside["met"] is is_fast


def test_one_of_a_pair_has_times_and_no_comparison():
    cases = {"halves2_43_whole": {"reports": [], "first": {"1x8192": {"ms": [3.0], "sums_ms": 1.0}}}}
    metrics = [r["metric"] for r in stage.rows(cases, script("collect").row)]
    assert metrics == ["chunks in halves where none was asked for", "time to the first token, ms, best"]

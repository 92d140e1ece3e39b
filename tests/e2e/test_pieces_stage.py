"""The stages of sums in pieces without a card: a stand-in for the engine, the real control flow; and what rows make of
bits that differ, times, and products that were not in pieces."""

import json

import pytest

from tests.e2e.collect import pieces_stage
from tests.e2e.test_scripts import machine, rows_of  # noqa: F401


def test_bits_in_pieces_and_whole(machine):  # noqa: F811
    ended = machine("pieces2_same", "--jobs", "3", FAKE_UNLIKE="same_pieces2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    path = machine.out / "stage_pieces2_same.json"
    stage = json.loads(path.read_text())
    assert "DSV4_SM120_SET=sums_in_pieces=on" in stage["cases"]["same_pieces2"]["command"]
    assert "DSV4_SM120_SET" not in stage["cases"]["same_whole2"]["command"]
    told = {(s["run"], s["against"]): (s["answers"], s["differ"]) for s in stage["sames"]}
    of_four = 4 * 2 + 8  # prompts alone, twice; 8 at once
    assert told == {
        ("same_pieces2", "same_whole2"): (of_four, 8),
        ("same_pieces2", "same_pieces2"): (of_four, 0),
        ("same_again2", "same_whole2"): (of_four, 0),
    }
    rows = [row for row in rows_of(path) if row["bar"] is not None and "products" in row["metric"]]
    assert sorted((row["value"], row["met"]) for row in rows) == [(0, True)] * 6
    assert all("E2E_AS_SM120=wide" in case["command"] for case in stage["cases"].values())


def test_an_engine_whose_products_were_whole_has_shown_nothing(machine):  # noqa: F811
    machine("pieces2_same", "--only", "same_pieces2", FAKE_PRODUCTS="3")
    rows = [row for row in rows_of(machine.out / "stage_pieces2_same.json") if "products" in row["metric"]]
    assert [(row["value"], row["bar"], row["met"]) for row in rows] == [(61, 0, False), (0, 0, True)]


def test_a_whole_beside_other_experts_has_shown_nothing(machine):  # noqa: F811
    machine("pieces2_same", "--only", "same_whole2", FAKE_KERNEL="triton")
    rows = {row["metric"]: row for row in rows_of(machine.out / "stage_pieces2_same.json")}
    missing = rows["calls above 256 rows by its kernel, missing to 32"]
    assert (missing["value"], missing["met"]) == (32, False)


def test_times_in_turn_and_in_rounds(machine):  # noqa: F811
    ended = machine("pieces2_43")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    path = machine.out / "stage_pieces2_43.json"
    cases = json.loads(path.read_text())["cases"]
    names = ("pieces2_43", "whole2_43", "pieces2_43_no_peers", "whole2_43_no_peers", "pieces8_2_43_no_peers")
    assert tuple(cases) == names
    for name, case in cases.items():
        assert ("NCCL_P2P_DISABLE=1" in case["command"]) is name.endswith("_no_peers")
        asked = "on" if name.startswith("pieces2") else "8"
        assert (f"sums_in_pieces={asked}" in case["command"]) is name.startswith("pieces")
        assert set(case["prompts"]) == set(pieces_stage.SHAPES)
        assert case["prompts"]["1x8192"]["sums_ms"] == pytest.approx(0.006) and "card" in case["prompts"]["1x8192"]
        said = [line for line in case["log"] if "1 x 8192" in line]
        assert len(said) == 2, "two rounds"
    found = {(r["case"], r["metric"], r["impl"]): r for r in rows_of(path)}
    impl = "ours, two cards, wide experts for prompts (W4A16), NCCL through host memory, sums in pieces"
    share = found["flash43, 16 experts, a prompt of 32,000 tokens", "time to all first tokens, of the whole's", impl]
    assert share["bar"] == 0.97 and 0.2 < share["value"] < 5
    assert found[
        "pieces2_43",
        "products in pieces on each card, missing to 256",
        impl.replace("through host memory", "by NVLink"),
    ]["met"]


def row(case, impl, metric, value, bar, issue):
    return case, metric, value, bar


def told(cases, at):
    """{metric: (value, bar)} of rows but those of other prompts than `at`."""
    others = {pieces_stage.case_of(other) for other in pieces_stage.SHAPES if other != at}
    return {metric: (value, bar) for case, metric, value, bar in pieces_stage.rows(cases, row) if case not in others}


def test_pieces_that_gain_nothing_do_not_meet_their_bar():
    seen = {"first_token_ms": 100.0, "first_token_ms_worst": 120.0}
    cases = {f"{how}2_43_no_peers": {"prompts": {"1x8192": dict(seen)}, "reports": []} for how in ("whole", "pieces")}
    found = told(cases, "1x8192")
    assert found["time to all first tokens, of the whole's"] == (1.0, 0.97)
    assert found["products in pieces on each card, missing to 256"] == (256, 0)
    assert found["products in pieces where none was asked for"] == (0, 0)
    assert found["products of experts in parts on each card, missing to 256"] == (256, 0)
    assert found["products of experts in parts where none was asked for"] == (0, 0)
    # of a prompt that was not reached
    assert told(cases, "1x32000")["time to all first tokens, of the whole's"] == (None, 0.97)
    del cases["whole2_43_no_peers"]
    found = told(cases, "1x8192")
    assert found["time to all first tokens, of the whole's"] == (None, 0.97)  # of nothing: missed

"""The stages of prompts in halves without a card: a stand-in for the engine, the real control flow; and what rows make
of bits that differ, times, and passes that went whole."""

import json

import pytest

from tests.e2e.collect import halves_stage
from tests.e2e.test_scripts import machine, rows_of  # noqa: F401


def test_bits_of_prompts_in_halves(machine):  # noqa: F811
    ended = machine("halves2_same", "--jobs", "4", FAKE_UNLIKE="same_halves2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    path = machine.out / "stage_halves2_same.json"
    stage = json.loads(path.read_text())
    assert "DSV4_SM120_SET=prompts_in_halves=1024" in stage["cases"]["same_halves2"]["command"]
    whole = ("same_unhalved2", "same_unhalved_again2", "same_chunks_of_a_half2", "same_chunks_graphs_of_a_half2")
    assert all("prompts_in_halves=off" in stage["cases"][name]["command"] for name in whole), "by default it is tried"
    told = {(s["run"], s["against"]): (s["answers"], s["differ"]) for s in stage["sames"]}
    of_three = 3 * 2 + 8  # prompts alone, twice; 8 at once
    assert told == {
        ("same_halves2", "same_chunks_of_a_half2"): (3 * 2, 0),
        ("same_halves_graphs2", "same_chunks_graphs_of_a_half2"): (4 * 2, 0),
        ("same_halves_graphs2", "same_halves_graphs2"): (4 * 2 + 8, 0),
        ("same_halves2", "same_unhalved2"): (of_three, 8),
        ("same_halves2", "same_halves2"): (of_three, 0),
        ("same_unhalved_again2", "same_unhalved2"): (of_three, 0),
    }
    rows = [row for row in rows_of(path) if "passes in halves" in row["metric"]]
    assert sorted((row["value"], row["met"]) for row in rows) == [(0, True)] * 6


@pytest.mark.parametrize("cards", ["2", "4"])
def test_bits_of_prompts_in_halves_over_four_cards(machine, cards):  # noqa: F811
    ended = machine("halves4_same", FAKE_CARDS=cards)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    path = machine.out / "stage_halves4_same.json"
    assert {(s["run"], s["differ"]) for s in json.loads(path.read_text())["sames"]} == {
        ("same_halves4", 0),
        ("same_halves_graphs4", 0),
    }
    rows = [(row["case"], row["value"]) for row in rows_of(path) if "passes in halves on each" in row["metric"]]
    missing = 0 if cards == "4" else 8  # a card that says nothing has shown nothing
    assert sorted(rows) == [("same_halves4", missing), ("same_halves_graphs4", missing)]


@pytest.mark.parametrize("unlike", ["same_halves_together_graphs2", "text_halves2_eagle314"])
def test_bits_and_text_of_prompts_in_halves_beside_other_features(machine, unlike):  # noqa: F811
    ended = machine("halves2_combined", FAKE_UNLIKE=unlike, FAKE_OTHER_TEXT=unlike)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    path = machine.out / "stage_halves2_combined.json"
    cases, rows = json.loads(path.read_text())["cases"], rows_of(path)
    assert list(cases) == list(halves_stage.COMBINED)
    for name, case in cases.items():
        way = "off" if "unhalved" in name else "1024"
        assert f"DSV4_SM120_SET=reproducible=on,prompts_in_halves={way}" in case["command"]
        assert ("breakable" in case["command"]) is ("graphs" in name)
        assert ("EAGLE" in case["command"]) is ("eagle314" in name)
    unmet = {row["impl"] for row in rows if row["metric"] == "answers that differ" and not row["met"]}
    assert unmet == {halves_stage.IMPLEMENTATIONS[unlike]}
    assert sum(row["metric"] == "answers that differ" and row["bar"] == 0 for row in rows) >= 3 + 2 * 3
    passes = [(row["case"], row["metric"], row["value"]) for row in rows if "passes in halves" in row["metric"]]
    assert len(passes) == 6 and all(value == 0 for *_, value in passes)
    assert {case for case, metric, _ in passes if "none was asked" in metric} == {n for n in cases if "unhalved" in n}


def test_combined_engines_whose_passes_were_whole_have_shown_nothing(machine):  # noqa: F811
    machine("halves2_combined", FAKE_PASSES="0")
    rows = [row for row in rows_of(machine.out / "stage_halves2_combined.json") if "passes in" in row["metric"]]
    assert sorted(row["value"] for row in rows if row["met"] is False) == [4, 4, 8, 8]


@pytest.mark.parametrize(("passes", "missing"), [("3", 5), ("0", 8), ("8", 0)])
def test_an_engine_whose_passes_were_whole_has_shown_nothing(machine, passes, missing):  # noqa: F811
    machine("halves2_same", "--only", "same_halves2", FAKE_PASSES=passes)
    [row] = [row for row in rows_of(machine.out / "stage_halves2_same.json") if "passes in" in row["metric"]]
    assert (row["value"], row["bar"], row["met"]) == (missing, 0, missing == 0)


def test_times_of_prompts_in_halves(machine):  # noqa: F811
    ended = machine("halves2_43")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    path = machine.out / "stage_halves2_43.json"
    cases = json.loads(path.read_text())["cases"]
    names = [f"{how}2_43{chunk}" for chunk in ("", "_graphs", "_32k") for how in ("halves", "unhalved")]
    assert list(cases) == [*names, "tried2_43"]
    assert "prompts_in_halves=on" in cases.pop("tried2_43")["command"]
    for name, case in cases.items():
        assert "NCCL_P2P_DISABLE=1" in case["command"]
        assert ("prompts_in_halves=1024" in case["command"]) is name.startswith("halves")
        assert ("32768" in case["command"]) is name.endswith("_32k")
        assert ("breakable" in case["command"]) is name.endswith("_graphs")
        assert set(case["prompts"]) == set(halves_stage.SHAPES["_32k" if name.endswith("_32k") else ""])
    rows = [r for r in rows_of(path) if r["metric"].startswith("the sums' time that is not hidden")]
    where = sorted((r["case"].rpartition("prompt of ")[2], "32,768" in r["impl"]) for r in rows)
    assert where == [("32,000 tokens", True), *[("8,192 tokens", False)] * 2]
    assert [(r["bar"], r["value"] is None, r["met"] is (r["value"] <= 0.3)) for r in rows] == [(0.3, False, True)] * 3


def test_what_is_not_hidden():
    whole = {"1x8192": {"first_token_ms": 500.0, "sums_ms": 200.0}}
    for time, share in ((500, 1.0), (300, 0.0), (360, 0.3), (600, 1.5)):
        found = halves_stage.not_hidden({"1x8192": {"first_token_ms": float(time)}}, whole, "1x8192")
        assert found == pytest.approx(share)
    assert halves_stage.not_hidden({}, whole, "1x8192") is None
    assert halves_stage.not_hidden(whole, {"1x8192": {"first_token_ms": 1.0}}, "1x8192") is None
    assert halves_stage.not_hidden(whole, {}, "1x8192") is None


def test_without_the_whole_the_bars_are_missed(machine):  # noqa: F811
    machine("halves2_43", "--only", "halves2_43")
    rows = [row for row in rows_of(machine.out / "stage_halves2_43.json") if row["bar"] == halves_stage.MOST_SEEN]
    assert [(row["value"], row["met"]) for row in rows] == [(None, False)]


@pytest.mark.parametrize(("found", "missed"), [("8192", 0), ("", 1)])
def test_a_server_that_finds_out(machine, found, missed):  # noqa: F811
    machine("halves2_43", "--only", "tried2_43", "unhalved2_43", FAKE_FOUND=found)
    rows = [row for row in rows_of(machine.out / "stage_halves2_43.json") if "as the server finds" in row["impl"]]
    [agreed] = [row for row in rows if row["metric"] == "cards that found nothing or something else"]
    assert (agreed["value"], agreed["bar"], agreed["met"]) == (missed, 0, not missed)
    assert [row["metric"] for row in rows if row["case"].endswith("rows and more")] == ["whole"] * (1 - missed)
    shares = [row["value"] for row in rows if row["metric"] == "time to all first tokens, of the whole's"]
    assert len(shares) == 3 and all(share > 0 for share in shares)

"""The stages of dealt streams without a card: a stand-in for the engine, the real control flow; and what rows make of
bits that differ, times, and passes that were not dealt."""

import json

import pytest

from tests.e2e.test_scripts import machine, rows_of  # noqa: F401


def test_bits_of_dealt_streams(machine):  # noqa: F811
    ended = machine("streams2_same", "--jobs", "3", FAKE_UNLIKE="same_dealt_streams2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    path = machine.out / "stage_streams2_same.json"
    stage = json.loads(path.read_text())
    assert "DSV4_SM120_SET=dealt_streams=on" in stage["cases"]["same_dealt_streams2"]["command"]
    assert "dealt_streams" not in stage["cases"]["same_kept_streams2"]["command"]
    told = {(s["run"], s["against"]): (s["answers"], s["differ"]) for s in stage["sames"]}
    of_four = 4 * 2 + 8  # prompts alone, twice; 8 at once
    assert told == {
        ("same_dealt_streams2", "same_kept_streams2"): (of_four, 8),
        ("same_dealt_streams2", "same_dealt_streams2"): (of_four, 0),
        ("same_kept_again2", "same_kept_streams2"): (of_four, 0),
    }
    rows = [row for row in rows_of(path) if row["bar"] is not None and "passes" in row["metric"]]
    assert sorted((row["value"], row["met"]) for row in rows) == [(0, True)] * 3


def test_a_stage_does_not_tell_of_another_ones_answers(machine):  # noqa: F811
    machine("streams2_same", "--jobs", "3")
    machine("halves2_same", "--only", "same_unhalved2")
    assert json.loads((machine.out / "stage_halves2_same.json").read_text())["sames"] == []
    assert json.loads((machine.out / "stage_streams2_same.json").read_text())["sames"] != []


def test_an_engine_whose_passes_were_whole_has_shown_nothing(machine):  # noqa: F811
    machine("streams2_same", "--only", "same_dealt_streams2", FAKE_PASSES="3")
    [row] = [row for row in rows_of(machine.out / "stage_streams2_same.json") if "passes" in row["metric"]]
    assert (row["value"], row["bar"], row["met"]) == (5, 0, False)


def test_times_of_dealt_streams(machine):  # noqa: F811
    ended = machine("streams2_43")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    path = machine.out / "stage_streams2_43.json"
    cases = json.loads(path.read_text())["cases"]
    assert tuple(cases) == (
        *("dealt_streams2_43", "kept_streams2_43", "dealt_streams2_43_no_peers", "kept_streams2_43_no_peers"),
        "stock_streams2_43",
    )
    for name, case in cases.items():
        assert ("NCCL_P2P_DISABLE=1" in case["command"]) is name.endswith("_no_peers")
        assert ("dealt_streams=on" in case["command"]) is name.startswith("dealt")
        assert set(case["prompts"]) == {"1x8192", "1x32000", "8x1024", "32x1024"}
        assert case["prompts"]["1x8192"]["sums_ms"] == pytest.approx(0.006) and "card" in case["prompts"]["1x8192"]
        assert len([line for line in case["log"] if "1 x 8192" in line]) == 2, "two rounds"
    found = {(r["case"], r["metric"], r["impl"]): r for r in rows_of(path)}
    impl = "ours, two cards, NCCL through host memory, streams dealt"
    share = found["flash43, 16 experts, a prompt of 32,000 tokens", "time to all first tokens, of the whole's", impl]
    assert share["bar"] == 1.0 and 0.2 < share["value"] < 5
    by_nvlink = impl.replace("through host memory", "by NVLink")
    assert found["dealt_streams2_43", "passes dealt on each card, missing to 4", by_nvlink]["met"]
    of_stock = {k: r for k, r in found.items() if k[1].endswith("of stock's")}
    assert {k[2] for k in of_stock} == {"ours, two cards, NCCL by NVLink, streams kept whole"}
    assert {k[0].partition("experts, ")[2] for k in of_stock} == {
        *("a prompt of 32,000 tokens", "8 prompts of 1,024 tokens", "32 prompts of 1,024 tokens"),
    }
    stock = "SGLang stock (Hopper kernels), two cards, NCCL by NVLink"
    slower = "time to all first tokens, ms, worst"
    for (case, _, ours), row in of_stock.items():
        times = [found[case, slower, impl]["value"] for impl in (ours, stock)]
        assert row["bar"] == 0.8 and row["value"] == pytest.approx(times[0] / times[1])


def test_an_engine_that_was_cut_has_missed_its_bars(machine):  # noqa: F811
    machine("streams2_43")
    path = machine.out / "stage_streams2_43.json"
    stage = json.loads(path.read_text())
    for name in ("kept_streams2_43", "dealt_streams2_43"):
        stage["cases"][name]["prompts"] = {"1x8192": stage["cases"][name]["prompts"]["1x8192"]}
    path.write_text(json.dumps(stage))
    by_nvlink = [
        row
        for row in rows_of(path)
        if ("of stock's" in row["metric"] and "kept" in row["impl"]) or "NVLink, streams dealt" in row["impl"]
    ]
    cut = [row["case"].partition("experts, ")[2] for row in by_nvlink if row["value"] is None and row["met"] is False]
    long = "a prompt of 32,000 tokens"
    assert sorted(cut) == sorted([long, long, "8 prompts of 1,024 tokens", "32 prompts of 1,024 tokens"])


def test_without_stock_its_bars_are_missed(machine):  # noqa: F811
    machine("streams2_43", "--only", "kept_streams2_43")
    rows = [row for row in rows_of(machine.out / "stage_streams2_43.json") if row["metric"].endswith("of stock's")]
    assert [(row["value"], row["met"]) for row in rows] == [(None, False)] * 3

"""The stages of dealt products without a card: a stand-in for the engine, the real control flow; and what rows make of
bits that differ, times, and products that were not dealt."""

import json

import pytest

from tests.e2e.collect import products_stage
from tests.e2e.test_scripts import machine, rows_of  # noqa: F401

SAME, TEXT, TIMED = products_stage.SAME, products_stage.TEXT, products_stage.TIMED


def test_bits_and_text_of_dealt_products(machine):  # noqa: F811
    dealt, whole = (SAME.format(how, 2) for how in products_stage.WORDS)
    ended = machine("products2_same", FAKE_UNLIKE=dealt)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    path = machine.out / "stage_products2_same.json"
    stage = json.loads(path.read_text())
    for name, case in stage["cases"].items():
        asked = "reproducible=on,dealt_products=on" if "dealt" in name else "reproducible=on "
        assert f"DSV4_SM120_SET={asked}" in case["command"], name
        assert "tp_size=2" in case["command"] and "disable_custom_all_reduce" not in case["command"]
        assert ('speculative_algorithm="EAGLE"' in case["command"].replace("\\", "")) is name.startswith("text")
    told = {(s["run"], s["against"]): (s["answers"] > 0, s["differ"] > 0) for s in stage["sames"]}
    assert told == {
        (dealt, whole): (True, True),
        (dealt, dealt): (True, True),
    }
    assert sum(text["run"] == TEXT.format("dealt", 2) for text in stage["texts"]) > 3
    rows = rows_of(path)
    differ = [row for row in rows if row["metric"] == "answers that differ" and row["bar"] == 0]
    by_text = [row["met"] for row in differ if "EAGLE" in row["impl"]]
    assert len(differ) > len(by_text) > 2 and all(by_text)
    assert not any(row["met"] for row in differ if "EAGLE" not in row["impl"])
    counted = [row for row in rows if "products" in row["metric"]]
    assert sorted((row["value"], row["met"]) for row in counted) == [(0, True)] * 4


@pytest.mark.parametrize(("products", "missing"), [("8", 8), ("0", 16), ("16", 0)])
def test_an_engine_whose_products_were_whole_has_shown_nothing(machine, products, missing):  # noqa: F811
    machine("products2_same", "--only", SAME.format("dealt", 2), FAKE_PASSES=products)
    rows = rows_of(machine.out / "stage_products2_same.json")
    [row] = [row for row in rows if "products dealt on each card" in row["metric"]]
    assert (row["value"], row["bar"], row["met"]) == (missing, 0, missing == 0)


def test_four_cards_have_stages_of_their_own(machine):  # noqa: F811
    def of(n):
        return {name.format("dealt", n) for name in (SAME, TEXT)}, {name for name, (m, *_) in TIMED.items() if m == n}

    for kind, names in zip(("same", "43"), of(4), strict=True):
        (name,) = sorted(names)[:1]
        machine(f"products4_{kind}", "--only", name)
        path = machine.out / f"stage_products4_{kind}.json"
        (case,) = json.loads(path.read_text())["cases"].values()
        assert "tp_size=4" in case["command"] and "dealt_products=on" in case["command"]
        told = [row for row in rows_of(path) if "products dealt on each card" in row["metric"]]
        assert [row["met"] for row in told] == [True] and "four cards" in told[0]["impl"]


def test_a_step_with_products_dealt_and_whole(machine):  # noqa: F811
    ended = machine("products2_43")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    path = machine.out / "stage_products2_43.json"
    stage = json.loads(path.read_text())
    names = [f"{how}_products2_43{way}" for way in ("", "_host") for how in ("dealt", "whole")]
    assert list(stage["cases"]) == names
    for name, case in stage["cases"].items():
        assert ("dealt_products=on" in case["command"]) is name.startswith("dealt")
        assert ("NCCL_P2P_DISABLE=1" in case["command"]) is name.endswith("_host")
        assert ("all_reduce=host" in case["command"]) is name.endswith("_host")
        assert list(case["rows"]) == ["1", "8"] and "tp_size=2" in case["command"]
        assert all(len(timed["step_ms_rounds"]) == 3 for timed in case["rows"].values())
    for name, times in zip(names, ((3.7, 7.1), (3.8, 7.0), (4.2, 8.1), (4.2, 9.0)), strict=True):
        for timed, ms in zip(stage["cases"][name]["rows"].values(), times, strict=True):
            timed["step_ms_middle_round"] = ms
    path.write_text(json.dumps(stage))
    rows = rows_of(path)
    shares = {
        (row["impl"].partition("sums ")[2], row["case"].split(", ")[2]): (
            round(row["value"], 3),
            row["bar"],
            row["met"],
        )
        for row in rows
        if row["metric"] == products_stage.SHARE
    }
    assert shares == {
        ("by NVLink, products dealt", "batch 1"): (0.974, 1.0, True),
        ("by NVLink, products dealt", "batch 8"): (1.014, 1.0, False),
        ("through host memory, products dealt", "batch 1"): (1.0, None, None),
        ("through host memory, products dealt", "batch 8"): (0.9, None, None),
    }
    assert {row["issue"] for row in rows if "step" in row["metric"]} == {products_stage.ISSUE}
    assert all("32 experts" in row["case"] for row in rows if "step" in row["metric"])
    counted = [row for row in rows if "products dealt" in row["metric"]]
    assert len(counted) == 4 and all(row["met"] for row in counted)


def test_without_the_whole_its_bar_is_missed(machine):  # noqa: F811
    machine("products2_43", "--only", "dealt_products2_43")
    rows = [r for r in rows_of(machine.out / "stage_products2_43.json") if r["metric"] == products_stage.SHARE]
    assert [(row["value"], row["met"]) for row in rows] == [(None, False)] * 2

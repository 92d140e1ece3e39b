"""The stages `chain43`, `dspark43` and `dspark_lengths43` without a card: a stand-in for the engine, the real flow."""

import json

from tests.e2e import chain_stage
from tests.e2e.test_scripts import machine, rows_of, script  # noqa: F401

STEP, SHARE = "decode step, ms, worst", "decode step, worst, of stock's worst"


def test_a_step_of_one_to_64_streams_beside_stocks(machine):  # noqa: F811
    machine("chain43")
    path = machine.out / "stage_chain43.json"
    cases = json.loads(path.read_text())["cases"]
    assert {name: list(case["rows"]) for name, case in cases.items()} == {
        chain_stage.STOCK: ["1", "8"],
        chain_stage.OURS: ["1", "8", "32", "64"],
    }
    asked = [row for row in rows_of(path) if row["issue"] == 24 and row["bar"] is not None]
    streams = [(row["case"].split(",")[1], row["metric"], row["bar"]) for row in asked]
    assert sorted(streams) == [
        (" batch 1", STEP, 4.2),
        (" batch 1", SHARE, 0.6),
        (" batch 32", STEP, 15.2),
        (" batch 8", STEP, 8.8),
        (" batch 8", SHARE, 0.6),
    ]


def row(case, impl, metric, value, bar, issue):
    return case.split(",")[1].strip(), value, value is not None and value <= bar


def test_a_step_is_compared_with_stocks_of_the_same_run():
    stock = {"rows": {"1": {"step_ms_worst": 8.0}, "8": {"step_ms_worst": 15.0}}}
    ours = {"rows": {"1": {"step_ms_worst": 4.0}, "8": {"step_ms_worst": 9.9}}}
    both = chain_stage.rows({chain_stage.STOCK: stock, chain_stage.OURS: ours}, row)
    assert both == [("batch 1", 0.5, True), ("batch 8", 0.66, False)]
    alone = chain_stage.rows({chain_stage.OURS: ours}, row)
    assert alone == [("batch 1", None, False), ("batch 8", None, False)], "a bar without what it is of is missed"
    assert chain_stage.rows({chain_stage.STOCK: stock}, row) == []


def test_two_cards_have_their_own_bar_and_traces(machine):  # noqa: F811
    machine("chain2_43")
    path = machine.out / "stage_chain2_43.json"
    cases = json.loads(path.read_text())["cases"]
    assert {name: list(case["rows"]) for name, case in cases.items()} == {
        chain_stage.STOCK2: ["1", "8"],
        chain_stage.OURS2: ["1", "8", "32", "64"],
    }
    assert all("tp_size=2" in case["command"] for case in cases.values())
    assert all(timed["launches_per_step"] for timed in cases[chain_stage.OURS2]["rows"].values())
    rows = [row for row in rows_of(path) if row["issue"] == 24]
    assert [(r["metric"], r["bar"]) for r in rows if r["bar"] is not None] == [(STEP, 3.0)]
    assert sum(r["metric"] == SHARE and r["value"] is not None for r in rows) == 2


def test_dsparks_step_is_of_all_layers_and_three_more(machine):  # noqa: F811
    machine("dspark43")
    path = machine.out / "stage_dspark43.json"
    commands = {name: case["command"] for name, case in json.loads(path.read_text())["cases"].items()}
    assert set(commands) == {"stock43_dspark3", "ops43_dspark3"}
    stages = script("stages")
    [model] = [word for word in stages.DSPARK43 if word.startswith("json_model_override_args")]
    asked = json.loads(json.loads(model.split("=", 1)[1]))
    assert len(asked["compress_ratios"]) == 43 + 3 and len(asked["dspark_target_layer_ids"]) == 3
    assert max(asked["dspark_target_layer_ids"]) < 43
    rows = [r for r in rows_of(path) if r["metric"] == STEP]
    assert {(r["issue"], r["impl"]) for r in rows} == {
        (21, "SGLang stock (Hopper kernels), DSPARK, a block of 3"),
        (21, "ours, every operator on, DSPARK, a block of 3"),
    }


def test_dspark_with_and_without_its_drafts_lengths(machine):  # noqa: F811
    machine("dspark_lengths43")
    path = machine.out / "stage_dspark_lengths43.json"
    commands = {name: case["command"] for name, case in json.loads(path.read_text())["cases"].items()}
    assert {name: "dspark_lengths=off" in command for name, command in commands.items()} == {
        "lengths_told_dspark3": False,
        "lengths_asked_dspark3": True,
    }
    rows = [r for r in rows_of(path) if r["metric"] == "decode step, ms, median of rounds in turn"]
    assert [(r["issue"], "16 experts" in r["case"]) for r in rows] == [(21, True)] * 2

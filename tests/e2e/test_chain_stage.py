"""The stages `chain43`, `dspark43` and `dspark_lengths43` without a card: a stand-in for the engine, the real flow."""

import json

import pytest

from tests.e2e.test_scripts import machine, rows_of, script  # noqa: F401

chain_stage = script("chain_stage")
STEP, SHARE = chain_stage.WORST, "decode step within a run, worst, of stock's worst"


def test_a_step_of_one_to_64_streams_beside_stocks(machine):  # noqa: F811
    machine("chain43")
    path = machine.out / "stage_chain43.json"
    cases = json.loads(path.read_text())["cases"]
    assert {name: list(case["rows"]) for name, case in cases.items()} == {
        chain_stage.STOCK: ["1", "8"],
        chain_stage.OURS: ["1", "8", "32", "64"],
        chain_stage.DEEP: ["1"],
    }
    assert "--in-len 131072" in cases[chain_stage.DEEP]["command"]
    asked = [row for row in rows_of(path) if row["issue"] == 24 and row["bar"] is not None]
    streams = [(row["case"].split(",")[1], row["metric"], row["bar"]) for row in asked]
    assert sorted(streams) == [
        (" batch 1", STEP, 4.2),
        (" batch 1", SHARE, 0.6),
        (" batch 1", "decode step within a run, worst, of that behind 1K", 1.08),
        (" batch 32", STEP, 15.2),
        (" batch 8", STEP, 8.8),
        (" batch 8", SHARE, 0.6),
    ]


def test_a_step_is_not_timed_where_requests_are_retracted(machine):  # noqa: F811
    machine("chain43", FAKE_RETRACTED=chain_stage.OURS)
    rows = rows_of(machine.out / "stage_chain43.json")
    missed = [row["metric"] for row in rows if row["met"] is False]
    assert "exit code of the engine run" in missed and missed.count(SHARE) == 2 and missed.count(STEP) == 3
    timed = {row["impl"] for row in rows if row["metric"] == STEP and row["value"] is not None}
    assert timed == {chain_stage.IMPLEMENTATIONS[name] for name in (chain_stage.STOCK, chain_stage.DEEP)}


def row(case, impl, metric, value, bar, issue):
    return case.split(",")[1].strip(), value, value is not None and value <= bar


def test_a_step_is_compared_with_stocks_of_the_same_run():
    stock = {"rows": {"1": {"within_ms_worst": 8.0}, "8": {"within_ms_worst": 15.0}}}
    ours = {"rows": {"1": {"within_ms_worst": 4.0}, "8": {"within_ms_worst": 9.9}}}
    both = chain_stage.rows({chain_stage.STOCK: stock, chain_stage.OURS: ours}, row)
    assert both == [("batch 1", 0.5, True), ("batch 8", 0.66, False)]
    alone = chain_stage.rows({chain_stage.OURS: ours}, row)
    assert alone == [("batch 1", None, False), ("batch 8", None, False)], "a bar without what it is of is missed"
    assert chain_stage.rows({chain_stage.STOCK: stock}, row) == []
    deep = {"rows": {"1": {"within_ms_worst": 4.4}}}
    of_1k = chain_stage.rows({chain_stage.OURS: ours, chain_stage.DEEP: deep}, row)[-1]
    assert of_1k == ("batch 1", pytest.approx(1.1), False)
    assert chain_stage.rows({chain_stage.DEEP: deep}, row) == [("batch 1", None, False)]


@pytest.mark.parametrize(
    ("metric", "ran", "exits", "share"),
    [
        (SHARE, {"ours"}, (0, 0), 0.6),
        (SHARE, {"ours"}, (0, 1), None),
        (SHARE, {"ours"}, (), None),
        (SHARE, {"ours", "stock"}, (0, 0), None),  # nothing was left out
        (STEP, {"ours"}, (0, 0), None),  # an engine's own, which ran and did not reach it
    ],
)
def test_a_share_of_an_engine_that_was_left_out_stays_unless_another_broke(metric, ran, exits, share):
    collect = script("collect")

    def table(value, runs, *exits):
        rows = [collect.row(f"engine {n}", "ours", collect.EXIT_CODE, code, 0) for n, code in enumerate(exits)]
        rows.append(collect.row("batch 1", "ours", metric, value, 0.7))
        given = {"device": {"name": "H"}, "sglang": ["1"], "date": "2026-01-02", "commit": "a", "command": ["x"]}
        return given | {"runs": dict.fromkeys(runs, 1), "rows": rows}

    both = ("ours", "stock")
    found = collect.added(table(0.6, both, 0), table(None, ran, *exits))
    assert [(r["value"], r["met"]) for r in found["rows"] if r["bar"] == 0.7] == [(share, share is not None)]
    assert collect.added(table(None, both, 0), table(None, ran, 0))["rows"][-1]["met"] is False


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


def test_four_cards_hold_one_engine_of_all_experts(machine):  # noqa: F811
    machine("chain4_43")
    path = machine.out / "stage_chain4_43.json"
    cases = json.loads(path.read_text())["cases"]
    names = (chain_stage.OURS4, chain_stage.STOCK4, chain_stage.GRAPHS4, chain_stage.HOST4)
    names = (*names, chain_stage.HOST_GRAPHS4, chain_stage.HOST_HALVES4)
    assert tuple(cases) == names
    assert all("tp_size=4" in case["command"] and "--turns" not in case["command"] for case in cases.values())
    assert [list(cases[name]["prompts"]) for name in names] == [list(chain_stage.SHAPES)] * 3 + [["8x1024"]] * 3
    assert "NCCL_P2P_DISABLE=1" in cases[chain_stage.HOST4]["command"]
    rows = rows_of(path)
    assert {row["case"].split(",")[0] for row in rows if row["issue"] in (22, 24)} == {
        "flash43",
        chain_stage.GRAPHS4,
        chain_stage.HOST_GRAPHS4,
        chain_stage.HOST_HALVES4,
    }
    asked = [(row["issue"], row["case"].removeprefix("flash43, "), row["bar"]) for row in rows if row["bar"]]
    assert sorted(asked) == [
        *[(22, "32 prompts of 1,024 tokens", 0.8)] * 2,  # without and with prefill graphs
        *[(22, "8 prompts of 1,024 tokens", 0.8)] * 2,
        *[(22, "8 prompts of 1,024 tokens", 420.0)] * 3,
        *[(22, "a prompt of 32,000 tokens", 0.8)] * 2,
        *((24, f"batch {n}, 1K context", bar) for n, bar in (("1", 2.6), ("32", 9.5), ("64", 11.0), ("8", 5.0))),
    ]
    assert sum(row["metric"] == SHARE and row["value"] is not None for row in rows) == 2


def test_engines_of_two_calls_are_compared(machine):  # noqa: F811
    machine("chain4_43")
    whole = machine.out / "stage_chain4_43.json"
    stage = json.loads(whole.read_text())
    halves = [dict(list(stage["cases"].items())[part]) for part in (slice(0, 1), slice(1, None))]
    calls = []
    for number, cases in enumerate(halves):
        calls.append(machine.out / f"{number}.json")
        calls[-1].write_text(json.dumps(stage | {"cases": cases}))
    again = halves[0] | {chain_stage.OURS4: halves[0][chain_stage.OURS4] | {"exit": 1, "rows": {}}}
    assert rows_of(*calls) == rows_of(whole)
    calls[0].write_text(json.dumps(stage | {"cases": again}))
    assert rows_of(*calls) != rows_of(whole) and rows_of(calls[0], *calls[1:], whole) == rows_of(whole)


def test_a_step_of_eagles_is_held_against_plain_decode_of_as_many_rows(machine):  # noqa: F811
    machine("speculation4_43")
    path = machine.out / "stage_speculation4_43.json"
    stage = json.loads(path.read_text())
    assert list(stage["cases"]) == [chain_stage.ROWS4, chain_stage.EAGLE4]
    assert [list(case["rows"]) for case in stage["cases"].values()] == [["4", "32"], ["1", "8"]]
    assert "draft_head=on" in stage["cases"][chain_stage.EAGLE4]["command"]
    for case, times in zip(stage["cases"].values(), ((4.0, 12.0), (4.5, 12.6)), strict=True):
        for timed, ms in zip(case["rows"].values(), times, strict=True):
            timed["within_ms_worst"] = ms
    path.write_text(json.dumps(stage))
    barred = [row for row in rows_of(path) if row["bar"] == chain_stage.MOST_BEYOND_MS]
    assert [(row["issue"], round(row["value"], 6), row["met"]) for row in barred] == [(21, 0.5, True), (21, 0.6, False)]
    del stage["cases"][chain_stage.ROWS4]
    path.write_text(json.dumps(stage))
    assert [row["met"] for row in rows_of(path) if row["bar"] == chain_stage.MOST_BEYOND_MS] == [False, False]


def test_eagles_streams_over_two_cards_are_beside_stocks(machine):  # noqa: F811
    machine("speculation2_43")
    path = machine.out / "stage_speculation2_43.json"
    cases = json.loads(path.read_text())["cases"]
    assert [list(case["rows"]) for case in cases.values()] == [["1", "8", "32"]] * 2
    steps = [row for row in rows_of(path) if row["metric"] == chain_stage.WORST and row["case"].startswith("flash43,")]
    assert [row["impl"].split(",")[0] for row in steps] == ["ours"] * 3 + ["SGLang stock (Hopper kernels"] * 3
    assert {(row["issue"], row["bar"]) for row in steps} == {(21, None)}


def test_what_four_cards_did_not_reach_is_missed():
    collect = script("collect")
    failed = {"exit": 1, "patched": True, "reports": [], "command": "engine_case.py"}
    cases = dict.fromkeys((chain_stage.OURS4, chain_stage.STOCK4, chain_stage.HOST4), failed)
    told = {"stage": "chain4_43", "device": {}, "date": "", "commit": "c0ffee", "command": "", "cases": cases}
    rows = collect.collect([told | {"differences": []}], "c0ffee")["rows"]
    none = sorted(r["bar"] for r in rows if r["bar"] and r["value"] is None and r["met"] is False)
    assert none == [0.8, 0.8, 0.8, 2.6, 5.0, 9.5, 11.0, 420.0]


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
    rows = [r for r in rows_of(path) if r["metric"] == "decode step, ms, worst"]
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

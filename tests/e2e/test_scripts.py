"""The end-to-end scripts without a GPU: a stand-in for the engine and for the harness, the real control flow."""

import gzip
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.e2e import (
    fault_rows,
    faults_stage,
    features_asked,
    layers_stage,
    prompts_stage,
    shortage_stage,
    soak_stage,
    start_stage,
)
from tests.e2e.made_sglang import HARNESS, NO_TORCH, SGLANG
from tests.patching import wheels

HERE = Path(__file__).resolve().parent


@pytest.fixture
def machine(tmp_path, stage_python):
    files = {"harness/run_engine.py": HARNESS, "site/sglang/__init__.py": SGLANG, "patch/sitecustomize.py": ""}
    files["site/torch/__init__.py"] = NO_TORCH
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)

    def run(stage, *more, forked=True, **environment):
        python, children = stage_python() if forked else ([sys.executable], {})
        line = [*python, str(HERE / "run_stage.py"), stage, "--harness", str(tmp_path / "harness"), *more]
        line += ["--patch", str(tmp_path / "patch"), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
        path = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "PYTHONDONTWRITEBYTECODE": "1"}
        path |= {"MODELS": str(tmp_path / "models")} | children | environment
        return subprocess.run(line, env=path, capture_output=True, text=True, timeout=300)

    run.out = tmp_path / "out"
    return run


def script(name):
    spec = importlib.util.spec_from_file_location(f"e2e_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(*paths):
    table = script("collect").collect([json.loads(p.read_text()) for p in paths], "c0ffee")
    assert {"device", "date", "commit", "command", "ceilings", "rows"} <= table.keys()
    assert all(r.keys() == {"issue", "case", "impl", "metric", "value", "bar", "met"} for r in table["rows"])
    return table["rows"]


def test_answers_differences_and_shadow(machine):
    ended = machine("ops")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    path = machine.out / "stage_ops.json"
    stage = json.loads(path.read_text())
    assert set(stage["cases"]) == {"stock", "ops", "ops_shadow", "ops_paged"}
    assert "DSV4_SM120_FORCE=ops" in stage["cases"]["ops"]["command"]
    assert not stage["cases"]["stock"]["reports"] and len(stage["cases"]["ops"]["reports"]) == 1
    greatest = {(d["run"], d["against"]): max(r["greatest"] for r in d["rows"]) for d in stage["differences"]}
    assert greatest == {("ops", "stock"): 0.5, ("ops_paged", "ops_shadow"): 0.0, ("ops_shadow", "stock"): 0.0}
    prompts = [r["prompt"] for r in stage["differences"][0]["rows"]]
    assert prompts[:5] == ["1x5", "1x130", "1x700", "1x2100", "1x8200"] and len(prompts) == 5 + 8 + 32
    rows = rows_of(path)
    worst = {r["case"]: r for r in rows if r["metric"] == "relative L2 of a call, greatest"}[
        "ops_shadow, sparse_decode, all calls"
    ]
    assert (worst["value"], worst["bar"], worst["met"]) == (0.002, 0.004, True)
    assert all(r["met"] for r in rows if r["met"] is not None)


def test_timed_stage(machine):
    ended = machine("ops43")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = rows_of(machine.out / "stage_ops43.json")
    found = {(r["case"], r["metric"], r["impl"][:4]): r["value"] for r in rows}
    assert 0.5 < found["flash43e64, batch 8, 1K context", "decode step, ms, best", "SGLa"] < 50
    assert not any("launches" in metric for _, metric, _ in found)


def test_launches_of_a_step_without_its_prefill(machine):
    ended = machine("launches43")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = rows_of(machine.out / "stage_launches43.json")
    for batch in (1, 8):
        for impl in ("SGLang stock", "FORCE=ops", "FORCE=seams"):
            mine = [r for r in rows if r["case"] == f"flash43e64, batch {batch}, 1K context" and impl in r["impl"]]
            assert {r["metric"]: r["value"] for r in mine} == {
                "launches per step": 3,
                "kernel time per step, us": 8,
                "launching a step's graph, us of the host": 70,
                "launches that are not a whole number per step": 0,
                "attention and K's store, launches per step": 2,
                "attention and K's store per step, us": 4,
            }


def test_the_whole_step_of_two_engines_that_take_turns(machine):
    ended = machine("whole43")
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr  # the fake's step time may miss a bar
    stage = json.loads((machine.out / "stage_whole43.json").read_text())
    assert {name: case["exit"] for name, case in stage["cases"].items()} == {"stock43_whole": 0, "ops43_whole": 0}
    assert "DSV4_SM120_FORCE=ops" in stage["cases"]["ops43_whole"]["command"]
    rows = rows_of(machine.out / "stage_whole43.json")
    bars = {(r["case"][:19], r["metric"]): r["bar"] for r in rows if r["issue"] == 7 and r["bar"] is not None}
    assert bars == {
        ("flash43e64, batch 1", "decode step, ms, worst"): 5.5,
        ("flash43e64, batch 1", "launches per step"): 950,
        ("flash43e64, batch 8", "decode step, ms, worst"): 11.5,
        ("flash43e64, batch 8", "prefill, ms, best"): stage["cases"]["stock43_whole"]["rows"]["8"]["prefill_ms"],
    }
    prefill = {(r["impl"][:4], r["metric"]): r["value"] for r in rows if "prefill of" in r["case"]}
    assert prefill["SGLa", "kernel time, ms"] == pytest.approx((5 * 100 + 3 * 4) / 1e3)
    assert prefill["ours", "attention and K's store, share of kernel time"] == 0


def test_each_operator_is_switched_off_alone(machine):
    ended = machine("without43", "--only", "ops43_alone", "ops43_without_mhc", "ops43_without_wo_a")
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    stage = json.loads((machine.out / "stage_without43.json").read_text())
    assert "DSV4_SM120_SET=mhc=off" in stage["cases"]["ops43_without_mhc"]["command"]
    assert "DSV4_SM120_SET" not in stage["cases"]["ops43_alone"]["command"]
    rows = [r for r in rows_of(machine.out / "stage_without43.json") if r["metric"] == "decode step, ms, best"]
    assert [r["impl"] for r in rows] == ["ours, every operator on", "ours, without wo_a", "ours, without mhc"]
    assert all(r["issue"] == 7 and "16 experts" in r["case"] for r in rows)


def test_the_text_of_a_server_that_speculates(machine):
    """Beside that of one that does not: one prompt at a time none may differ; shadow records of verifications."""
    ended = machine("speculation", "--jobs", "4", FAKE_OTHER_TEXT="eagle314 stock_eagle314")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    stage = json.loads((machine.out / "stage_speculation.json").read_text())
    assert stage["cases"]["eagle112"]["verified"][0] == 96 and stage["cases"]["plain"]["verified"][0] is None
    assert "speculative_dspark_block_size=3" in stage["cases"]["dspark3"]["command"]
    told = {(t["run"], t["at_once"]): (t["answers"], t["differ"], t["first"]) for t in stage["texts"]}
    assert told["eagle314", 1] == (4, 0, None) and told["eagle314", 8] == (8, 8, 2)
    assert told["dspark3", 32] == (32, 0, None) and told["stock_eagle314", 32] == (32, 32, 2)
    rows = [r for r in rows_of(machine.out / "stage_speculation.json") if r["metric"] == "answers that differ"]
    bars = {(r["impl"], r["case"].partition(":")[0]): (r["value"], r["bar"], r["met"]) for r in rows}
    assert bars["ours, EAGLE 3/1/4", "flash6h, one prompt at a time"] == (0, 0, True)
    assert bars["ours, EAGLE 3/1/4", "flash6h, 8 prompts at once"] == (8, None, None)
    assert bars["SGLang stock, EAGLE 3/1/4", "flash6h, one prompt at a time"][1] is None
    assert script("accepted_stage").first_difference([1, 2], [1, 2, 3]) == 2


def test_an_answer_that_is_drawn_beside_others_is_seen(machine):
    """In bits and in text: where greedy answers beside requests that sample are others, and nowhere else."""
    drawn = {"FAKE_DRAWN": "same_8192 accepted_eagle314_half"}
    machine("reproducible", "--only", "same_8192", **drawn)
    (row,) = json.loads((machine.out / "stage_reproducible.json").read_text())["sames"]
    assert row["differ"] == 32 and all(name.endswith("of 8 beside 8 that sample") for name in row["which"])
    machine("accepted", "--jobs", "2", "--only", "accepted_plain", "accepted_eagle314_half", **drawn)
    path = machine.out / "stage_accepted.json"
    texts = [t for t in json.loads(path.read_text())["texts"] if "ended" not in t]
    told = {(t["run"], t["at_once"], t.get("beside")): t["differ"] for t in texts}
    half, plain = "accepted_eagle314_half", "accepted_plain"
    assert told == {(half, 1, None): 0, (half, 8, None): 0, (half, 32, None): 0, (half, 8, 8): 8, (plain, 8, 8): 0}
    missed = [row for row in rows_of(path) if row["met"] is False]
    assert [(row["value"], "8 prompts at once beside 8 that sample: EAGLE" in row["case"]) for row in missed] == [
        (8, True)
    ]


def test_bits_of_a_reproducible_server(machine):
    """Each run beside the one without chunks and cache, and in itself; another seventh digit is a difference."""
    cases = ("same_8192", "same_512", "unlike_8192", "unlike_512")
    ended = machine("reproducible", "--jobs", "4", "--only", *cases, FAKE_UNLIKE="same_512 unlike_8192")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    path = machine.out / "stage_reproducible.json"
    stage = json.loads(path.read_text())
    told = {(s["run"], s["against"]): (s["answers"], s["differ"]) for s in stage["sames"]}
    assert told == {
        ("same_512", "same_8192"): (138, 96),  # 5 prompts twice, 32 in groups of 1, 8, 32, and 8 beside 8 that sample
        ("same_8192", "same_8192"): (138, 0),
        ("unlike_512", "unlike_8192"): (106, 0),
        ("unlike_8192", "unlike_8192"): (106, 64),
    }
    assert "reproducible=on" in stage["cases"]["same_512"]["command"]
    assert "reproducible=on" not in stage["cases"]["unlike_512"]["command"]
    rows = [r for r in rows_of(path) if r["metric"] == "answers that differ"]
    bars = [(r["value"], r["bar"], r["met"]) for r in rows]
    assert bars == [(96, 0, False), (0, 0, True), (0, None, None), (64, None, None)]
    greatest = [r["value"] for r in rows_of(path) if r["metric"] == "log-probability difference, greatest"]
    assert greatest[1] == 0 and 0 < greatest[0] < 2e-7


def test_short_prompts_and_passes_with_and_without_graphs(machine):
    """Three engines in turn: 32 prompts are four passes, by their latencies and by the trace; a pass of which the card
    waits half; an engine whose passes took no graph has not shown what it is for."""
    ended = machine("prompts", "--only", "ops43_prompts", "graphs43_prompts")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    stage = json.loads((machine.out / "stage_prompts.json").read_text())
    graphs = stage["cases"]["graphs43_prompts"]
    assert "cuda_graph_bs_prefill=[128, 256, 512, 1024, 8192]" in graphs["command"] and graphs["prefills"]["true"] > 15
    assert stage["cases"]["ops43_prompts"]["prefills"]["true"] == 0
    assert graphs["prompts"]["32x1024"]["passes_ms"] == pytest.approx([100.0] * 4)
    assert graphs["prompts"]["1x128"]["passes_ms"] == pytest.approx([100.0])
    rows = rows_of(machine.out / "stage_prompts.json")
    found = {(r["case"].partition(": ")[2], r["metric"], r["impl"][-6:]): r for r in rows}
    first = found["1x1024", "time to all first tokens, ms, best", "graphs"]
    assert first["bar"] == 100.0 and first["met"]
    assert found["32x1024", "pass 2, traced, ms", "graphs"]["value"] == pytest.approx(0.08)
    assert found["32x1024", "pass 2, the card without a kernel, ms", "graphs"]["value"] == pytest.approx(0.04)
    assert found["32x1024", "pass 3, launches", "graphs"]["value"] == 4
    machine("prompts", "--only", "graphs43_prompts", FAKE_NO_GRAPHS="graphs43_prompts")
    unmet = [r["metric"] for r in rows_of(machine.out / "stage_prompts.json") if r["met"] is False]
    assert unmet == ["engines without a prefill pass in graphs"]


def test_graphs_as_a_plan_has_them_and_what_they_hold(machine):
    assert machine("prompts_planned").returncode == 0
    rows = {r["metric"]: r for r in rows_of(machine.out / "stage_prompts_planned.json")}
    assert rows["prefill graphs hold, GiB"]["value"] == 1.12 and rows["prefill passes in graphs"]["value"] > 15
    bars = [r["bar"] for r in rows_of(machine.out / "stage_prompts_planned.json") if "1x1024" in r["case"]]
    assert 100.0 in bars


def test_answers_that_are_no_numbers_are_not_the_same(machine):
    ended = machine("reproducible", "--only", "same_8192", FAKE_NAN="same_8192")
    assert ended.returncode == 1 and "log-probabilities of an answer are no numbers, as nan" in ended.stdout
    assert json.loads((machine.out / "stage_reproducible.json").read_text())["sames"] == []


def test_prefill_graphs_have_the_bits_of_none(machine):
    ended = machine("prompts_same", FAKE_UNLIKE="same_graphs")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    path = machine.out / "stage_prompts_same.json"
    graphs = json.loads(path.read_text())["cases"]["same_graphs"]
    assert "DSV4_SM120_SET=reproducible=on,prefill_graphs=2048" in graphs["command"] and graphs["prefills"]["true"]
    rows = [r for r in rows_of(path) if r["metric"] == "answers that differ"]
    assert [(r["value"], r["bar"], r["met"]) for r in rows] == [(96, 0, False), (96, 0, False), (0, 0, True)]
    assert "--chunk 2048" in json.loads(path.read_text())["cases"]["same_chunks_graphs"]["command"]


def test_results_go_under_their_release_and_name(machine, tmp_path):
    assert machine("ops", "--only", "stock").returncode == 0
    assert machine("tp4", "--jobs", "2").returncode == 0
    paths = [machine.out / f"stage_{name}.json" for name in ("ops", "tp4")]
    line = [sys.executable, str(HERE / "collect.py"), *map(str, paths), "--results", str(tmp_path / "results")]
    subprocess.run(line, check=False, capture_output=True)
    names = {path.name for path in (tmp_path / "results").iterdir()}
    assert names == {"e2e_sglang_0.0.0.fake.json", "e2e_four_cards_sglang_0.0.0.fake.json"}
    stages = script("run_stage").STAGES
    grouped = [s for group in script("collect").RESULTS.values() for s in group]
    assert sorted(grouped) == sorted(
        [*stages, *(one.STAGE for one in (faults_stage, layers_stage, shortage_stage, soak_stage, start_stage))]
    )
    known = script("collect").IMPLEMENTATIONS
    assert {case.name for cases in stages.values() for case in cases} <= known.keys()
    mixed = [json.loads(path.read_text()) for path in paths]
    mixed[0]["cases"]["stock"]["sglang"] = "0.5.17"
    assert set(script("collect").results(mixed, "c0ffee")) == {
        "e2e_sglang_0.5.17.json", "e2e_four_cards_sglang_0.0.0.fake.json"
    }  # fmt: skip
    mixed[1]["cases"]["ops_tp4"]["sglang"] = "0.5.23"
    with pytest.raises(SystemExit, match="not so: tp4"):
        script("collect").results(mixed, "c0ffee")


def test_a_later_call_is_added_to_the_file_of_an_earlier_one(tmp_path):
    collect = script("collect")
    line = {"feature": "flush_cache", "engine": "radix", "state": "not run", "detail": ""}

    def table(**changes):
        given = {"device": {"name": "H"}, "sglang": ["1"], "date": "2026-01-02", "commit": "a", "command": ["x"]}
        return given | {"runs": {"one": 1}, "rows": []} | changes

    def row(case, value, metric="m"):
        return collect.row(case, "ours", metric, value, 0)

    old = table(rows=[row("kept", 1), row("again", 1)], features=[line])
    new = table(date="2026-01-01", commit="b", command=["x", "y"], runs={"two": 2})
    new |= {"rows": [row("again", 0), row("new", 0)], "features": [line | {"state": "same bits"}]}
    found = collect.added(old, new)
    values = {r["case"]: (r["value"], r["met"]) for r in found["rows"] if r["metric"] == "m"}
    assert values == {"kept": (1, False), "again": (0, True), "new": (0, True)}
    assert [r["metric"] for r in found["rows"] if r["case"] == "feature: flush_cache"] == ["a defect", "same bits"]
    assert (found["date"], found["commit"], found["command"]) == ("2026-01-02", "a, b", ["x", "y"])
    assert found["runs"] == {"one": 1, "two": 2} and found["features"] == [line | {"state": "same bits"}]
    assert collect.added(found, new) == found
    with pytest.raises(SystemExit, match="the same device: the file is of H, the stages are of G"):
        collect.added(old, new | {"device": {"name": "G"}})
    both = collect.added(old, new | {"device": {"name": "G"}}, is_timed=False)
    assert both["device"]["name"] == "H, G"
    assert collect.added(both, new, is_timed=False)["device"]["name"] == "H, G"
    h100 = "NVIDIA H100 80GB HBM3"
    assert [collect.suffix("e2e_soak", name) for name in ("NVIDIA H200", h100, "none")] == ["", "_h100", ""]
    assert collect.suffix("e2e_features", h100) == ""
    with pytest.raises(SystemExit, match="the same release"):
        collect.added(old, new | {"sglang": ["2"]})


@pytest.mark.parametrize("release", ["0.5.17", "0.5.23"])
def test_what_the_stages_set_is_there_in_the_releases_that_they_run(release):
    """Arguments as fields of SGLang's argument classes, variables in its environ.py."""
    wheel = wheels.fetch(release)
    homes = [m for m in wheels.members(wheel) if re.match(r"sglang/srt/(server_args|arg_groups/.*)\.py$", m)]
    text = "\n".join(wheels.content(wheel, member) for member in homes)
    fields = set(re.findall(r"^    (\w+): ", text, re.MULTILINE))
    cases = [case for stage in script("run_stage").STAGES.values() for case in stage]
    pairs = [pair for case in cases for pair in itertools.pairwise(case.options)]
    given = {word.partition("=")[0] for flag, word in pairs if flag == "--set"}
    given -= {prompts_stage.INTERVAL_ARGUMENT} if release < "0.5.19" else set()
    assert {"tp_size", "speculative_dspark_block_size", "json_model_override_args"} <= given <= fields
    variables = {name for case in cases for name in case.environment if name.startswith("SGLANG_")}
    variables -= {features_asked.SLOW_LOADS} if release < "0.5.23" else set()
    environ = wheels.content(wheel, "sglang/srt/environ.py")
    assert len(variables) >= 3 and all(re.search(rf"^    {name} = ", environ, re.MULTILINE) for name in variables)


def test_the_trace_of_rank_0_where_there_are_several(tmp_path):
    case = object.__new__(script("engine_case").Case)
    case.options = SimpleNamespace(name="x", out=str(tmp_path), in_len=[8])
    folder = tmp_path / "x_trace_1_8_4"
    ranks = {}

    def stop():
        for name, us in ranks.items():
            with gzip.open(folder / name, "wt") as file:
                json.dump({"traceEvents": [{"cat": "kernel", "name": "k", "dur": us}]}, file)

    case.engine = SimpleNamespace(start_profile=lambda output_dir, **_: os.makedirs(output_dir), stop_profile=stop)
    case.generate = lambda *_: None
    ranks |= {"1-TP-0.trace.json.gz": 3.0, "1-TP-1.trace.json.gz": 5.0}
    assert case.trace(1, 4) == {"k": (1, 3.0)}
    ranks.pop("1-TP-0.trace.json.gz")
    ranks["1-TP-2.trace.json.gz"] = 1.0
    with pytest.raises(RuntimeError, match="expected one trace"):
        case.trace(1, 4)


def test_the_commit_is_that_of_the_patch_that_ran(tmp_path):
    stage = script("run_stage")
    (tmp_path / "deepseek_v4_sm120").mkdir()
    (tmp_path / "deepseek_v4_sm120/build_info.json").write_text('{"git_commit": "abc-dirty"}')
    assert stage.commit(tmp_path) == "abc-dirty" != stage.commit(tmp_path / "none")


def test_one_long_prefill_does_not_make_a_step_short():
    case = object.__new__(script("engine_case").Case)
    case.options = SimpleNamespace(name="x", in_len=[8], out_len=10, reps=3)
    seconds = iter([0.0, 1.0, 2.0, 5.0, 2.0, 1.0, 2.4])  # a first call; then each prefill and the same with ten steps
    case.generate, case.within_a_run = lambda *_: next(seconds), lambda *_: None
    row = case.bench(1)
    assert "within_ms_best" not in row
    assert (row["step_ms_best"], row["step_ms_worst"]) == (pytest.approx(100.0), pytest.approx(140.0))
    assert row["prefill_ms"] == 1000.0


@pytest.mark.parametrize(("began", "step"), [(1.0, 100.0), (0.0, None), (2.1, None)])
def test_a_step_within_a_run_begins_when_the_last_prompt_has_its_token(began, step):
    case = object.__new__(script("engine_case").Case)
    case.harness = SimpleNamespace(ids=lambda length, vocabulary, seed: [seed] * length)
    case.vocabulary = 500

    def generate(input_ids, sampling_params):
        assert list(map(len, input_ids)) == [1024, 1024, 8]
        assert [one["max_new_tokens"] for one in sampling_params] == [11, 11, 1]
        return [{"meta_info": {"e2e_latency": seconds}} for seconds in (1.9, 2.0, began)]

    case.engine = SimpleNamespace(generate=generate)
    assert case.within_a_run(2, 1024, 10, 100) == (step and pytest.approx(step))


def test_a_step_within_a_run_is_not_timed_where_requests_are_retracted():
    case = object.__new__(script("engine_case").Case)
    case.harness, case.vocabulary = SimpleNamespace(ids=lambda length, vocabulary, seed: [seed] * length), 500
    meta = [{"e2e_latency": 1.9, "num_retractions": 1}, {"e2e_latency": 1.0}]
    case.engine = SimpleNamespace(generate=lambda **_: [{"meta_info": one} for one in meta])
    with pytest.raises(RuntimeError, match="1 of 2 requests were retracted"):
        case.within_a_run(1, 1024, 10, 100)


def test_every_engine_has_the_compiled_modules_of_the_harness_for_itself(tmp_path, monkeypatch):
    stage = script("run_stage")
    case, arguments = SimpleNamespace(name="ops"), SimpleNamespace(work=tmp_path / "work")
    monkeypatch.delenv(stage.SHELF, raising=False)
    assert stage.shelf(case, arguments) == {}
    monkeypatch.setenv(stage.SHELF, str(tmp_path / "none"))
    assert stage.shelf(case, arguments) == {}
    module = tmp_path / "shelf/norm-1f/norm.so"
    module.parent.mkdir(parents=True)
    module.write_text("code")
    monkeypatch.setenv(stage.SHELF, str(tmp_path / "shelf"))
    for _ in range(2):  # a second run of the stage finds the copy
        own = Path(stage.shelf(case, arguments)[stage.SHELF])
        assert own.parent == arguments.work and (own / "norm-1f/norm.so").read_text() == "code"


def test_a_turn_waits_for_all_to_start_and_for_the_one_before(tmp_path):
    turn, order = script("engine_case").turn, []

    def other():
        order.append("other starts")
        with turn(tmp_path / "turns", 2):
            order.append("other")

    waiting = threading.Timer(0.3, other)
    waiting.start()
    with turn(tmp_path / "turns", 2):
        order.append("first")
        time.sleep(0.3)  # the other has started, and waits
        order.append("first ends")
    waiting.join(10)
    assert order[0] == "other starts" and sorted(order[1:]) == ["first", "first ends", "other"]
    assert order.index("first ends") == order.index("first") + 1  # nobody came between


def test_an_engine_that_never_starts_does_not_cost_the_other_its_turn(tmp_path, monkeypatch):
    module = script("engine_case")
    monkeypatch.setattr(module, "OTHERS_START_S", 0.2)
    with module.turn(tmp_path / "turns", 2):
        pass


def test_rounds_alternate_between_the_engines(tmp_path):
    turn, order = script("engine_case").turn, []

    def engine(name):
        for number in range(3):
            with turn(tmp_path / "turns", 2, number):
                order.append(name)
                time.sleep(0.02)

    both = [threading.Thread(target=engine, args=(name,)) for name in "ab"]
    for one in both:
        one.start()
    for one in both:
        one.join(30)
    assert [sorted(order[i : i + 2]) for i in (0, 2, 4)] == [["a", "b"]] * 3


def test_an_engine_that_fails_in_its_turn_is_not_waited_for(tmp_path):
    turn, started = script("engine_case").turn, time.monotonic()

    def fails():
        with pytest.raises(RuntimeError), turn(tmp_path / "turns", 2):
            raise RuntimeError

    failing = threading.Thread(target=fails)
    failing.start()
    for number in range(3):
        with turn(tmp_path / "turns", 2, number):
            if number == 0:
                failing.join(0.01)
        failing.join(30)
    assert time.monotonic() < started + 30  # a round's patience is a minute


def test_rounds_have_their_least_their_greatest_and_a_middle():
    over_rounds = script("engine_case").over_rounds
    rows = [
        {"in_len": 1024, "prefill_ms": prefill, "step_ms_best": best, "step_ms_worst": best + 1.0}
        for prefill, best in ((90.0, 4.0), (80.0, 3.0), (100.0, 3.5))
    ]
    found = over_rounds(over_rounds(rows[0], rows[1]), rows[2])
    assert found["step_ms_rounds"] == [4.0, 3.0, 3.5] and found["step_ms_middle_round"] == 3.5
    assert (found["step_ms_best"], found["step_ms_worst"], found["prefill_ms"]) == (3.0, 5.0, 80.0)
    assert "within_ms_best" not in found
    told = [
        row | {"within_ms_best": best, "within_ms_worst": best + 0.5} for row, best in zip(rows, (3, 2, 4), strict=True)
    ]
    found = over_rounds(over_rounds(told[0], told[1]), told[2])
    assert (found["within_ms_best"], found["within_ms_worst"]) == (2, 4.5)
    assert not any(name.startswith("within") for name in over_rounds(told[0], rows[1]))


def test_a_profile_without_decode_kernels_fails(machine):
    ended = machine("launches43", FAKE_NO_STEPS="ops43_launches")
    assert ended.returncode == 1 and "more decode steps must add launches and time, got 0.0" in ended.stdout
    unmet = [r["case"] for r in rows_of(machine.out / "stage_launches43.json") if r["met"] is False]
    assert unmet == ["ops43_launches"]


def test_unlike_prefills_show_as_uneven_launches():
    short, long = {"a": (50, 5.0), "prefill": (9, 9.0)}, {"a": (50 + 64, 69.0), "prefill": (9, 7.0)}
    found = script("engine_case").per_step(short, long, 32)
    assert found["kernels"] == [["a", 2.0, 2.0]] and found["uneven_launches"] == 0
    assert script("engine_case").per_step({"a": (57, 5.0)}, long, 32)["uneven_launches"] == 7 + 9


def test_unmeasured_launches_have_no_row_and_batches_one_of_each():
    table = script("collect")
    old = {"step_ms_best": 9.0, "launches_per_step": 0.0, "busy_us_per_step": 0, "kernels": []}
    assert [r["metric"] for r in table.timing_rows("ops43", {"1": old})] == ["decode step, ms, best"]

    bars = {r["metric"]: (r["value"], r["met"]) for r in table.timing_rows("ops43_whole", {"1": old}) if r["bar"]}
    assert bars == {"decode step, ms, worst": (None, False), "launches per step": (None, False)}
    bars = {r["metric"]: r["met"] for r in table.timing_rows("ops43_whole", {"8": old | {"step_ms_median": 11.5}})}
    assert bars == {"decode step, ms, best": None, "decode step, ms, worst": True}
    beyond = old | {"step_ms_worst": 5.6, "launches_per_step": 950.0, "uneven_launches": 0, "busy_us_per_step": 1}
    assert {r["metric"]: r["met"] for r in table.timing_rows("ops43_whole", {"1": beyond}) if r["bar"]} == {
        "decode step, ms, worst": False, "launches per step": True
    }  # fmt: skip

    def found(prompt, positions, same, mean, greatest):
        keys = ("prompt", "positions", "same_greatest", "mean", "greatest", "repeated")
        return dict(zip(keys, (prompt, positions, same, mean, greatest, []), strict=True))

    answers = [found("1x5", 4, 1.0, 0.5, 2.0), found("8x5", 10, 1.0, 0.1, 0.9), found("8x128", 30, 0.5, 0.3, 0.4)]
    rows = table.difference_rows({"what": "x", "run": "ops", "against": "stock", "rows": answers})
    assert [r["case"] for r in rows] == ["flash6h, prompt of 5 tokens: x"] * 3 + ["flash6h, batch of 8 prompts: x"] * 3
    assert [r["value"] for r in rows] == pytest.approx([0.5, 2.0, 1.0, 0.2, 0.9, 0.625])


@pytest.mark.parametrize("run, against, issue", [("sums2_b", "sums2_a", 20), ("index_b", "index_a", 5)])
@pytest.mark.parametrize("greatest, own, met", [(0.0, 0.0, True), (1e-7, 0.0, False), (0.0, 1e-7, False)])
def test_a_second_process_must_have_the_same_bits(run, against, issue, greatest, own, met):
    repeated = [{"greatest": 0.0}, {"greatest": own}]
    answer = {"prompt": "1x5", "positions": 4, "same_greatest": 1.0, "mean": 0.0, "greatest": greatest}
    found = {"what": "x", "run": run, "against": against, "rows": [answer | {"repeated": repeated}]}
    judged = [r for r in script("collect").difference_rows(found) if r["bar"] is not None]
    assert len(judged) == 3 and all(r["issue"] == issue for r in judged) and all(r["met"] for r in judged) is met


@pytest.mark.parametrize("name", ["faults_stage", "shortage_stage", "interleaving", "collect"])
def test_a_script_has_all_that_it_needs(name, tmp_path):
    """By itself, as a user starts it: the others here are forks of a Python that has imported what they do."""
    line = [sys.executable, str(HERE / f"{name}.py"), "--help"]
    assert subprocess.run(line, capture_output=True, text=True, cwd=tmp_path).stdout.startswith("usage")


def test_a_crash_is_a_failed_bar(machine):
    ended = machine("ops", "--only", "stock", "ops_shadow", forked=False, FAKE_CRASH="ops_shadow")  # as a user does
    assert ended.returncode == 1 and "does not start" in ended.stdout
    unmet = [(r["case"], r["metric"]) for r in rows_of(machine.out / "stage_ops.json") if r["met"] is False]
    assert unmet == [
        ("ops_shadow", "exit code of the engine run"),
        ("ops_shadow, sparse_decode", "shadow calls recorded: none"),
    ]


def test_a_case_is_stopped_at_the_limit(machine):
    ended = machine("ops", "--only", "stock", "--limit-s", "2", FAKE_HANG="stock")
    assert ended.returncode == 1 and "stopped at the limit" in ended.stdout


def test_no_such_case_and_no_such_folder(machine):
    assert "stage ops has" in machine("ops", "--only", "nothing").stderr
    assert "does not exist" in machine("ops", "--harness", "/nowhere").stderr


@pytest.mark.parametrize("answers, differ, met", [(4, 0, True), (4, 1, False), (0, 0, False)])
def test_of_no_answers_none_is_the_same(answers, differ, met):
    seen = {"answers": answers, "differ": differ}
    left = {"shm": [], "shm_of_sglang": {}, "processes": [], "gpu_mib": 0}
    rows = fault_rows.rows(script("collect").row, [{"cases": {"two_engines": seen}, "left": left, "ways": {}}])
    assert [row["met"] for row in rows if row["metric"] == "answers that differ"] == [met]


def test_what_one_order_costs_a_prompt():
    """A prompt that takes a fifth longer misses the bar; so does one without the run beside it."""
    case = {"exit": 0, "patched": True, "reports": []}
    timed = {"1": {"prefill_ms": 100.0}, "8": {"prefill_ms": 400.0}}
    slower = {"1": {"prefill_ms": 109.0}, "8": {"prefill_ms": 480.0}}
    long = {"prompt": 32000, "first_token_ms": 2000.0, "kernels": [["a", 1, 1.0]]}
    cases = {
        "cost43_without": case | {"rows": timed, "prefill": long},
        "cost43_reproducible": case | {"rows": slower, "prefill": long | {"first_token_ms": 2100.0}},
    }
    rows = script("collect").cost_rows({"cases": cases})
    assert [(r["case"], r["value"], r["met"], r["issue"]) for r in rows] == [
        ("43 layers, prompt of 1,024 tokens", 1.09, True, 21),
        ("43 layers, 8 prompts of 1,024 tokens", 1.2, False, 21),
        ("43 layers, prompt of 32,000 tokens", 1.05, True, 21),
    ]
    del cases["cost43_without"]
    rows = script("collect").cost_rows({"cases": cases})
    assert [(r["value"], r["met"]) for r in rows] == [(None, False)] * 3
    assert script("collect").cost_rows({"cases": {}}) == []

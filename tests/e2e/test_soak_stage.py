"""soak_stage.py without a GPU: the fake server as `sglang.launch_server`, the real control flow. What a server may do
wrong over days must be a bar that is not met."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.e2e import collect, made_sglang, soak_load, soak_rows, soak_stage
from tests.e2e.test_serving_stage import free_ports
from tests.e2e.watch_plugin import engine_watch

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]

HARNESS = """
import argparse, json, os, sys
def parse(argv):
    p = argparse.ArgumentParser()
    p.add_argument("mode")
    for name in ("variant", "models", "context", "max-total-tokens", "max-running", "mem", "patch"):
        p.add_argument("--" + name)
    p.add_argument("--graph-bs", nargs="+")
    p.add_argument("--radix", action="store_true")
    p.add_argument("--set", action="append", default=[])
    return p.parse_args(argv)
def engine_args(a):
    model = os.path.join(a.models, a.variant)
    os.makedirs(model, exist_ok=True)
    more = {k: json.loads(v) for k, v in (s.split("=", 1) for s in a.set)}
    return {"model_path": model, "skip_tokenizer_init": True, "context_length": a.context, **more}, model
def vocab_of(model):
    return 500
def reexec(a):
    path = os.pathsep.join(([a.patch] if a.patch else []) + [os.environ["PYTHONPATH"]])
    os.execve(sys.executable, [], dict(os.environ, E2E_REEXEC="1", PYTHONPATH=path))
"""
# by what a server was started with it is one of the stage's; each has vices of its own
LAUNCH_SERVER = """
import json, os, sys, threading, time
from pathlib import Path
sys.path.insert(0, {repo!r})
from tests.serving.fake_server import FakeServer
def value(name):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else None
assert Path(value("--model-path"), "tokenizer.json").exists() and "--skip-tokenizer-init" not in sys.argv
assert "watch_plugin" in os.environ["PYTHONPATH"].rpartition(os.pathsep)[2]
reproducible = "reproducible=on" in os.environ.get("DSV4_SM120_SET", "")
name = "tp2" if value("--tp-size") == "2" else "eagle314" if value("--speculative-num-steps") == "3" else "plain"
name = "reproducible" if reproducible and name == "plain" else name
name = name if "DSV4_SM120_FORCE" in os.environ else "stock"
cards = {{"plain": "3", "eagle314": "GPU-8a", "tp2": "3,GPU-8a"}}.get(name, "3")  # of the caller's
assert os.environ["CUDA_VISIBLE_DEVICES"] == cards and ("build" in os.environ["PYTHONPATH"]) == (name != "stock")
vices = {{"eagle314": ["batch_variant"], "tp2": ["die_mid_stream"]}}.get(name, [])
server = FakeServer(vices, int(value("--port")), flags={{"context_length": int(value("--context-length"))}},
                    step_s=0.0003, die_after=28, accept_length=2 if name == "eagle314" else 1)
server.exits = True
watch, held, telling = Path(os.environ["E2E_WATCH"]), [], threading.Lock()
watch.mkdir(parents=True, exist_ok=True)
is_leaking = name == "reproducible"
def leak(handler, body):  # by what it is asked, for it always has time for that: markers, also between the two looks
    with telling:
        for _ in range(5 if len(body.get("input_ids", ())) in {markers!r} else 0):
            held.extend((b"x" * (1 << 20), open(os.devnull)))
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    tell()
    return ""
def held_of_cards():  # as the server numbers those that it sees; of the one that dies none
    held = 1000 + (time.monotonic() * 300 if name == "plain" else 0)
    return {{}} if name == "tp2" else {{"0": [900 << 20, int(held) << 20]}}
def tell():
    with telling:
        grown = len(held)
        words = {{"streams": 2 + grown, "captures": 3, "given": 640 + 32 * grown}}
        state = {{"at": time.monotonic(), "allocated": (1 + 10 * grown) << 20, "words": words, "cached": 9,
                 "cached_without_limit": 4 + grown, "contained": {{"ops.mhc._known": 1 + grown}},
                 "halves": int(100 * time.monotonic()), "cards": held_of_cards()}}
        draft = watch / "1.part"
        draft.write_text(json.dumps(state))
        draft.replace(watch / "1.json")
        if is_leaking:
            with open(watch / "1.compiles", "a") as file:
                file.write(json.dumps([time.monotonic(), "their_kernel", True, 1.5]) + "\\n")
print("Prefill batch, of the start, cuda graph: False", flush=True)
def keep_telling():
    while True:
        tell()
        print("Prefill batch, #new-seq: 1, cuda graph: True", flush=True)
        time.sleep(0.1)
if is_leaking:
    server.engine.requests.held = 0
    server.http.RequestHandlerClass.wrong = leak
threading.Thread(target=keep_telling, daemon=True).start()
if name == "stock":
    def lie(handler, content):  # an answer that lost its last token
        if isinstance(content, dict) and len(content.get("output_ids", ())) == {new}:
            content["output_ids"].pop()
        return content
    server.http.lie = lie
server.http.serve_forever()
"""
NVIDIA_SMI = """#!{python}
import time
used = 1000
while True:
    used += 20
    print(f"0, GPU-11, {{3 * used}}\\n1, GPU-8a5c, 500\\n3, GPU-33, {{used}}", flush=True)  # 0: not the caller's
    time.sleep(0.05)
"""
TIMED = ("an hour", "tokens/s")  # of a busy machine; judged below, by made series


@pytest.fixture(scope="module")
def soaked(tmp_path_factory):
    """(CompletedProcess, rows by (server, metric), the stage file) of a call with an honest server and four others."""
    folder = tmp_path_factory.mktemp("soak")
    files = {"tools/run_engine.py": HARNESS, "build/sitecustomize.py": ""}
    files |= made_sglang.site(LAUNCH_SERVER.format(repo=str(REPO), new=soak_load.FEWEST_NEW, markers=soak_load.MARKERS))
    files["bin/nvidia-smi"] = NVIDIA_SMI.format(python=sys.executable)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "bin/nvidia-smi").chmod(0o755)
    (folder / "shm").mkdir()
    line = [
        sys.executable,
        str(HERE / "soak_stage.py"),
        "--harness",
        str(folder / "tools"),
        "--out",
        str(folder / "out"),
    ]
    line += ["--patch", str(folder / "build"), "--models", str(folder / "m"), "--work", str(folder / "work")]
    line += ["--shared-memory", str(folder / "shm"), "--port", str(free_ports(1)[0] // 4), "--streams", "20"]
    line += ["--longest", "6000", "--warm-s", "0.3", "--seconds", "1.5", "--rest-s", "0.3", "--ramp-s", "0.1"]
    line += ["--block-s", "0.1", "--period-s", "0.1", "--commit", "abc"]
    line += ["--only", "plain", "reproducible", "eagle314", "tp2", "stock"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DSV4_", "E2E_"))}
    kept["CUDA_VISIBLE_DEVICES"] = "3,GPU-8a"
    kept |= {"PYTHONPATH": str(folder / "site"), "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(line, env=kept, capture_output=True, text=True, timeout=300)
    found = json.loads((folder / "out/stage_soak.json").read_text())
    return done, rows_of(found), found


def rows_of(found):
    return {(r["case"].split(", ")[1], r["metric"]): r for r in collect.collect([found], None)["rows"]}


def without_stock(found):
    soak = found["soak"]
    ours = {name: server for name, server in soak["servers"].items() if name != soak_rows.STOCK}
    return found | {"soak": soak | {"servers": ours}}


def unmet(rows, server):
    return {metric for (of, metric), row in rows.items() if of == server and row["met"] is False}


def test_a_server_that_does_all_well(soaked):
    done, rows, found = soaked
    assert {m for m in unmet(rows, "plain") if not any(word in m for word in TIMED)} == set(), done.stdout + done.stderr
    plain = {metric: row["value"] for (of, metric), row in rows.items() if of == "plain"}
    for kind in set(soak_load.KINDS) - {"marker"}:
        assert plain[f"requests, {kind}"] > 0
    assert plain["ended: malformed: refused with 400"] > 0 and plain["ended: too_long: refused with 400"] > 0
    assert plain["ended: aborted: confirmed"] > 0 and plain["prompt tokens from the prefix cache"] > 0
    assert plain["faults"] == 0 and plain["marker answers, alone, before and after"] == 2 * len(soak_load.MARKERS)
    assert plain["hours under load"] > 0 and plain["tokens/s"] > 0
    assert "host memory of front, MiB an hour" in plain
    assert ("plain", "marker answers under load") not in rows  # as shipped a batch may change a prompt's bits
    assert {row["issue"] for row in rows.values()} == {23}


def test_what_grows_is_found(soaked):
    """Memory, handles, threads, words, caches, compiled kernels; and requests that should have been refused."""
    done, rows, found = soaked
    grown = unmet(rows, "reproducible")
    missed = {f"{what}, after less before" for what in soak_rows.MORE_BARS} - grown
    assert missed <= {f"{what}, after less before" for what in ("processes", "entries in /dev/shm", "KV tokens in use")}
    assert "faults" in grown, done.stdout
    assert rows["reproducible", "kernels of SGLang's that Triton compiled under load"]["value"] > 0
    assert rows["reproducible", "host memory, MiB, after less before"]["value"] > 10
    faults = found["soak"]["servers"]["reproducible"]["load"]["faults"]
    assert any("malformed request" in text and "taken" in text for text in faults)


def test_answers_that_change_are_found(soaked):
    done, rows, _ = soaked
    assert "marker answers under load that differ" in unmet(rows, "eagle314"), done.stdout
    assert rows["eagle314", "marker answers, alone, that differ"]["met"] is True
    assert any(of == "eagle314" and "marker that differs: prompt of" in metric for of, metric in rows)
    assert rows["stock", "faults"]["value"] > 0 and all(
        row["bar"] is None for (of, _), row in rows.items() if of == "stock"
    )
    assert any(f"{soak_load.FEWEST_NEW - 1} tokens where" in metric for of, metric in rows if of == "stock")


def test_a_server_that_dies_is_found_and_the_others_go_on(soaked):
    done, rows, found = soaked
    assert done.returncode == 1 and unmet(rows, "tp2") == {"calls that broke"}
    assert "the server ended (exit code 9)" in found["soak"]["servers"]["tp2"]["problem"]


def test_a_card_that_fills_is_found(soaked):
    _, rows, found = soaked
    assert found["soak"]["cards"].keys() == {"0", "1"}
    metric = "memory of the card, MiB an hour of which one is sure"
    assert [rows[f"card {card}", metric]["met"] for card in "01"] == [None, None]  # stock is on both, too
    rows = rows_of(without_stock(found))
    assert [rows[f"card {card}", metric]["met"] for card in "01"] == [False, True]


def test_whose_the_memory_of_a_card_is(soaked):
    """Of card 0 torch holds more and more; of card 1 as much as before, and nobody else either."""
    found = without_stock(soaked[2])
    rows = rows_of(found)
    slopes = {card: rows[f"card {card}", "reserved by torch, MiB an hour"]["value"] for card in "01"}
    assert slopes["0"] > 100_000 and abs(slopes["1"]) < 1
    assert rows["card 0", "reserved by torch, end less beginning, MiB"]["value"] > 100
    assert {value for _, value in found["soak"]["allocators"]["1"]["allocated by torch"]} == {900.0}
    assert rows["card 1", "memory of the card beside torch's, end less beginning, MiB"]["value"] == pytest.approx(0)
    assert rows["card 1", "memory of the card beside torch's, MiB an hour of which one is sure"]["met"] is True


def test_what_processes_hold_of_a_card_is_added_up(tmp_path):
    """A server of two cards numbers them 0 and 1; with one card for all there is the first."""

    def told(pid: int, at: float, **cards) -> None:
        (tmp_path / f"{pid}.json").write_text(
            json.dumps({"at": at, "cards": {n[1:]: held for n, held in cards.items()}})
        )

    def of(kind: str, one_card: bool) -> soak_stage.Server:
        server = object.__new__(soak_stage.Server)
        server.kind, server.watch, server.allocators = soak_stage.SERVERS[kind], tmp_path, {}
        server.stage = SimpleNamespace(arguments=SimpleNamespace(one_card=one_card))
        return server

    both, second, shared = of("tp2", False), of("eagle314", False), of("eagle314", True)
    for at in (0.5, 1.5, 2.5):
        told(1, at, _0=[1 << 20, 8 << 20])
        told(2, at, _1=[2 << 20, int(16 + at) << 20])
        for _ in range(2):  # what was told before is not told again
            both.note_allocators()
    (tmp_path / "2.json").unlink()
    second.note_allocators(), shared.note_allocators()
    assert both.allocators["1", soak_rows.RESERVED] == {"2": [(0.5, 16), (1.5, 17), (2.5, 18)]}
    assert both.allocators["0", soak_rows.ALLOCATED] == {"1": [(0.5, 1), (1.5, 1), (2.5, 1)]}
    assert {card for card, _ in second.allocators} == {"1"} and {card for card, _ in shared.allocators} == {"0"}
    stage = object.__new__(soak_stage.Stage)
    stage.servers, stage.arguments = {"tp2": both, "eagle314": second}, SimpleNamespace(block_s=1.0)
    found = stage.of_allocators(2.0, 3.0)
    assert found["1"] == {soak_rows.ALLOCATED: [[0.5, 3.0]], soak_rows.RESERVED: [[0.5, 26.0]]}
    assert found["0"] == {soak_rows.ALLOCATED: [[0.5, 1.0]], soak_rows.RESERVED: [[0.5, 8.0]]}


def test_memory_of_a_card_that_nobody_asked_torch_for_is_the_drivers_alone():
    of_driver = [[t, 100.0 + t] for t in range(2, 120, 4)]
    old, new = {"cards": {"0": of_driver}}, {"cards": {"0": of_driver}, "allocators": {}}
    assert soak_rows.of_card("0", old) == {soak_rows.DRIVERS: of_driver}
    rows = {r["metric"]: r for r in soak_rows.rows(collect.row, [{"servers": {}, **new}])}
    assert rows["memory of the card beside torch's, MiB an hour of which one is sure"]["met"] is False
    assert rows["memory of the card, end less beginning, MiB"]["value"] == 116


def test_the_plugin_asks_for_every_card_of_its_process(monkeypatch):
    """A thread's current card is the first, whichever the scheduler has."""
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda card=0: (0, 5, 0)[card])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda card=0: (0, 9, 2)[card])
    state = engine_watch.state()
    assert state["cards"] == {1: [5, 9], 2: [0, 2]} and state["allocated"] == 5


def test_servers_of_one_card_share_it(capsys, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    arguments = soak_stage.parse(["--one-card", "--only", "reproducible", "eagle314"])
    assert {soak_stage.SERVERS[name].sees(arguments.one_card) for name in arguments.only} == {"0"}
    assert soak_stage.SERVERS["eagle314"].sees(soak_stage.parse([]).one_card) == "1"
    with pytest.raises(SystemExit):
        soak_stage.parse(["--one-card"])
    assert "tp2 needs two" in capsys.readouterr().err


# ---- what is sure, of made series


def series(value, seconds=120, noise=0.0, seed=1):
    source = random.Random(seed)
    return [[t, value(t) + source.gauss(0, noise)] for t in range(2, seconds, 4)]


def sure_growth(*calls):
    found = {}
    soak_rows.slope_rows(lambda metric, value, bar=None: found.update({metric: value}), "host memory", list(calls))
    return found["host memory, MiB an hour of which one is sure"], found["host memory, standard error, MiB an hour"]


def test_growth_without_end_is_told_from_noise_and_from_one_step():
    flat, error = sure_growth(series(lambda t: 900, noise=2.0))
    assert flat == 0.0 and 0 < error < 200
    assert sure_growth(series(lambda t: 900 + 500 * t / 3600, noise=0.5))[0] > 100  # 17 MiB in two minutes
    assert sure_growth(series(lambda t: 900 + 64 * (t > 40), noise=0.5))[0] < 100  # an allocator's segment, once
    assert sure_growth(series(lambda t: 900 + 4 * (t // 10), noise=0.5))[0] > 100  # step after step is growth


def test_calls_add_up():
    """What one call of two minutes cannot tell from noise, ten can."""

    def leak(seed):
        return series(lambda t: 900 + 400 * t / 3600, noise=3.0, seed=seed)

    alone, error = sure_growth(leak(1))
    together, less = sure_growth(*(leak(seed) for seed in range(10)))
    assert alone <= 100 < together and less < error / 2


def test_too_few_points_say_nothing():
    found = {}
    add = lambda metric, value, bar=None: found.update({metric: (value, bar)})  # noqa: E731
    soak_rows.slope_rows(add, "host memory", [[[0, 1.0], [1, 2.0]]])
    assert found["host memory, MiB an hour of which one is sure"] == (None, 100.0)
    soak_rows.slope_rows(add, "host memory", [series(lambda t: 900), []])  # a call in which nobody looked
    assert found["host memory, MiB an hour of which one is sure"] == (None, 100.0)
    soak_rows.slope_rows(add, "host memory", [series(lambda t: 900)[:5], series(lambda t: 900)])  # a half of two points
    assert found["host memory, MiB an hour of which one is sure"] == (None, 100.0)
    soak_rows.throughput_rows(add, [[5.0] * 4])
    assert found["tokens/s, loss of which one is sure, %"] == (None, 2.0)


@pytest.mark.parametrize(("loss", "noise", "is_lost"), [(0.0, 5.0, False), (0.01, 0.2, False), (0.1, 1.0, True)])
def test_throughput_that_is_lost(loss, noise, is_lost):
    source, found = random.Random(2), {}
    buckets = [100 * (1 - loss * t / 99) + source.gauss(0, noise) for t in range(100)]
    soak_rows.throughput_rows(lambda metric, value, bar=None: found.update({metric: (value, bar)}), [buckets])
    value, bar = found["tokens/s, loss of which one is sure, %"]
    assert (value > bar) == is_lost


def test_tokens_are_spread_over_the_time_of_their_answer():
    answers = [(10.5, 12.5, 20), (9.0, 10.0, 99), (12.0, 12.0, 7), (11.0, 20.0, 0)]
    assert soak_stage.buckets(answers, 10.0, 13.0) == [5.0, 10.0, 5.0]
    assert soak_stage.blocks([(0.1, 2.0), (0.2, 4.0), (2.5, 1.0)], 0.0, 3.5, 1.0) == [[0.5, 3.0], [2.5, 1.0]]


def test_what_a_process_holds(tmp_path):
    before = soak_stage.of_process(os.getpid())
    with open(tmp_path / "a", "w"):
        assert soak_stage.of_process(os.getpid())["handles"] == before["handles"] + 1
    assert before["mib"] > 5 and before["threads"] >= 1
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert soak_stage.of_process(ended.pid) is None and ended.wait() == 0
    assert soak_stage.of_processes([os.getpid(), ended.pid])["processes"] == 1


def test_whose_memory_grows_is_told():
    names = (
        "sglang::scheduler",
        "sglang::scheduler_DP0_TP1_EP1",
        "sglang::detokenizer",
        "python3 -m sglang.launch_server",
    )
    assert [soak_stage.role_of(name) for name in names] == ["scheduler", "scheduler", "detokenizer", "front"]
    flat, grows = series(lambda t: 900), series(lambda t: 900 + 500 * t / 3600, noise=0.5)
    each = {"host memory": grows, "host memory of front": flat, "host memory of scheduler": grows}
    rows = soak_rows.server_rows(collect.row, "plain", [made_call() | {"series": each}])
    sure = {row["metric"].partition(",")[0]: row for row in rows if row["metric"].endswith("of which one is sure")}
    assert sure["host memory of front"]["value"] == 0.0 and sure["host memory of scheduler"]["value"] > 100
    assert {what for what, row in sure.items() if row["met"] is False} == {"host memory"}  # the whole is judged


def test_what_torchs_compilers_hold_is_not_the_servers(monkeypatch):
    commands = {
        1: "sglang::scheduler_TP0",
        2: "/usr/bin/python /x/torch/_inductor/compile_worker/__main__.py --kind=fork",
    }
    monkeypatch.setattr(soak_stage, "processes_of", lambda session, mark: commands)
    process = SimpleNamespace(process=SimpleNamespace(pid=7))
    assert list(soak_stage.Server.living(SimpleNamespace(process=process, mark="a"))) == [1]


def test_passes_in_halves_and_in_graphs_are_told(soaked):
    assert soaked[1]["plain", "passes in halves, after less before"]["value"] > 0
    ran = soaked[2]["soak"]["servers"]["plain"]["prefills"]
    assert ran["true"] > 0 and ran["false"] == 0  # from the load's begin


def test_calls_of_one_server_are_summed(soaked):
    _, rows, found = soaked
    other = json.loads(json.dumps(found))
    other["soak"]["servers"]["plain"]["markers"]["digest"] = "another"
    table = collect.collect([found, other], None)["rows"]
    summed = {(r["case"].split(", ")[1], r["metric"]): r for r in table}
    assert summed["plain", "requests"]["value"] == 2 * rows["plain", "requests"]["value"]
    assert math.isclose(summed["plain", "hours under load"]["value"], 2 * rows["plain", "hours under load"]["value"])
    assert summed["plain", "marker answers, alone, that differ from another call's"]["met"] is False
    assert summed["tp2", "calls that broke"]["value"] == 2
    assert ("plain", "marker answers, alone, that differ from another call's") not in rows  # there was no other


def test_memory_that_nobody_looked_at_is_no_memory_that_stayed(soaked):
    found = json.loads(json.dumps(soaked[2]))
    found["soak"]["cards"] = {}
    del found["soak"]["servers"]["plain"]["series"]["host memory"]
    rows = {(r["case"].split(", ")[1], r["metric"]): r["met"] for r in collect.collect([found], None)["rows"]}
    assert rows["card unknown", "memory of the card, MiB an hour of which one is sure"] is False
    assert rows["plain", "host memory, MiB an hour of which one is sure"] is False


def test_a_series_of_requests_is_even():
    """Any stretch of numbers has as many tokens as another, to a few in a hundred; kinds come with every length."""
    sums = [sum(soak_load.length(n, 65536) for n in range(a, a + 1000)) for a in range(0, 10000, 1000)]
    assert max(sums) < 1.1 * min(sums) and max(soak_load.length(n, 65536) for n in range(1000)) > 60000
    for place, kind in enumerate(soak_load.KINDS):
        lengths = [soak_load.length(n, 65536) for n in range(place, 4000, len(soak_load.KINDS))]
        assert min(lengths) < 100 and max(lengths) > 50000, kind


def made_call() -> dict:
    """What soak_stage has of a server that did all well."""
    load = {"seconds": 100.0, "counts": {"short": 5, "long": 5}, "output_tokens": 9, "prompt_tokens": 9}
    load |= {"ran_at_once": 3, "kinds": ["short", "long"], "cached_tokens": 0, "ended": {}, "faults": []}
    held = dict.fromkeys((*soak_rows.MORE_BARS, *soak_rows.REPORTED), 100)
    markers = {"alone": 4, "alone_differ": 0, "digest": "a", "is_asked_under_load": True, "under_load": 4, "texts": []}
    return {
        **{"problem": None, "left_out": {}, "stuck": 0, "compiles": [], "idle": {"before": held, "after": dict(held)}},
        **{"load": load | {"buckets": [5.0] * 100}, "markers": markers | {"under_load_differ": 0}},
        "series": {"host memory": [[t, 900.0] for t in range(0, 100, 4)]},
    }


def missed_by(*calls, name="plain"):
    return {row["metric"] for row in soak_rows.server_rows(collect.row, name, list(calls)) if row["met"] is False}


def test_a_server_with_prefill_graphs_has_used_them():
    with_graphs, without = (made_call() | {"prefills": {"true": n, "false": 2}} for n in (3, 0))
    assert missed_by(with_graphs, name="graphs") == set()
    assert missed_by(with_graphs, without, name="graphs") == {"calls without a prefill pass in graphs"}


@pytest.mark.parametrize(
    ("where", "value", "missed"),
    [
        ((), {}, set()),
        ((), {"problem": "it died"}, {"calls that broke"}),
        ((), {"stuck": 1}, {"times that it did not come to rest"}),
        ((), {"compiles": [[1.0, "theirs", True, 0.1]]}, set()),
        ((), {"compiles": None}, {"calls in which nobody listened to Triton"}),
        (("load",), {"faults": ["one"]}, {"faults"}),
        (("load",), {"counts": {"short": 5}}, {"kinds of requests of which none went well"}),
        (("load",), {"buckets": []}, {"tokens/s, loss of which one is sure, %"}),
        (("markers",), {"alone_differ": 1}, {"marker answers, alone, that differ"}),
        (("markers",), {"alone": 0}, {"marker answers, alone, that differ"}),
        (("markers",), {"under_load_differ": 1}, {"marker answers under load that differ"}),
        (("markers",), {"under_load": 0}, {"marker answers under load that differ"}),
        (("idle",), {"after": {}}, {f"{what}, after less before" for what in soak_rows.MORE_BARS}),
        *(
            (("idle", "after"), {what: 100 + most + 1}, {f"{what}, after less before"})
            for what, most in {
                **{"processes": 0, "entries in /dev/shm": 0, "KV tokens in use": 0, "streams with words": 0},
                **{"words given to captures": 0, "entries of caches without limit": 0, "file handles": 8},
                **{"entries of our modules' lists, sets, dicts": 0, "threads": 8},
                "memory of torch's allocator, MiB": 64,
            }.items()
        ),
    ],
)
def test_each_bar_is_missed_by_one(where, value, missed):
    """Of one call, and of one among others that did all well."""
    call = found = made_call()
    for name in where:
        found = found[name]
    found |= value
    assert missed_by(call) == missed
    if not ({"problem", "counts"} & value.keys()):
        assert missed_by(made_call(), call) == missed == missed_by(call, made_call())


def test_what_is_not_shown_is_not_demanded_and_of_stock_nothing_is():
    call = made_call() | {"left_out": {"long": "no grammar"}}
    call["load"]["counts"] = {"short": 5}
    assert missed_by(call) == set()
    call |= {"problem": "it died", "compiles": None}
    assert missed_by(call, name="stock") == set() != missed_by(call)


def test_a_slope_and_its_error_by_hand():
    assert soak_rows.line([(0, 0.0), (1, 0.0), (2, 3.0)]) == pytest.approx((1.5, math.sqrt(0.75)))
    assert soak_rows.pooled([(1.0, 1.0), (4.0, 2.0)]) == pytest.approx((1.6, math.sqrt(0.8)))
    strays = [3.0, -3.0, 3.0, -3.0, 0.0, 0.0, -3.0, 3.0, -3.0, 3.0]  # no slope among them: even about the middle
    buckets = [tenth for n, stray in enumerate(strays) for tenth in [197.0 + 10 * n + stray] * 2]
    value, error = soak_rows.change(buckets)
    assert value == pytest.approx(100 * (290 / 200 - 1)) and error == pytest.approx(math.sqrt(2 * 72 / 8) / 2)
    found = {}
    add = lambda metric, value, bar=None: found.update({metric: value})  # noqa: E731
    soak_rows.throughput_rows(add, [buckets[::-1]])
    lost, error = 100 * (1 - 200 / 290), 100 * math.sqrt(18) / 290
    assert found["tokens/s, loss of which one is sure, %"] == pytest.approx(lost - 2 * error)
    assert found["tokens/s, last tenth against the first, standard error, %"] == pytest.approx(error)
    assert soak_rows.change([0.0] * 10 + [5.0] * 90) == (0.0, math.inf)  # of nothing nothing is lost


# ---- the plugin


def test_the_plugin_sees_our_words_caches_and_lists(tmp_path, monkeypatch):
    from triton import knobs

    from deepseek_v4_sm120.ops.shared.zeroed_words import ZeroedWords

    original, heard = ZeroedWords.__init__, []
    monkeypatch.setenv("E2E_WATCH", str(tmp_path / "watch"))
    monkeypatch.setattr(engine_watch, "_words", [])
    monkeypatch.setattr(knobs.compilation, "listener", lambda **told: heard.append(told))
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    try:
        engine_watch.register()
        words = ZeroedWords("cpu", 8, 4096)
    finally:
        ZeroedWords.__init__ = original
    before = engine_watch.state()
    words._by_stream[1], words._given = "a buffer", 64
    from deepseek_v4_sm120.patching import report

    assert before["halves"] == 0
    monkeypatch.setitem(report._notes, "prompts_in_halves", (str, lambda: {"passes": 5}))
    after = engine_watch.state()
    assert after["halves"] == 5
    assert after["words"] == {"streams": 1, "captures": 0, "given": 64} and before["words"]["streams"] == 0
    assert sum(after["contained"].values()) == sum(before["contained"].values()) + 1
    assert after["contained"]["patching.report._notes"] >= 1 and time.monotonic() - after["at"] < 60
    times = type("Times", (), {"total": 2_400_000})
    knobs.compilation.listener(src=None, metadata={"name": "k"}, metadata_group={}, times=times, cache_hit=False)
    (line,) = (tmp_path / "watch").glob("*.compiles")
    assert json.loads(line.read_text())[1:] == ["k", True, 2.4] and len(heard) == 1


@pytest.mark.parametrize(
    ("answer", "how"),
    [
        (((1, 2, 3), (-1.0, -2.0)), ""),
        (((1, 5, 3), (-1.0, -2.0)), "another text from token 1 on"),
        (((1, 2), (-1.0, -2.0)), "another text from token 2 on"),
        (((1, 2, 3), (-1.0, -2.25)), "the same text, log-probabilities up to 0.25 apart"),
    ],
)
def test_how_a_marker_differs(answer, how):
    assert soak_load.unlike(answer, ((1, 2, 3), (-1.0, -2.0))) == how


def test_a_shorter_soak_does_not_take_the_place_of_a_longer_one(capsys):
    def rows(hours, faults, slope, server="plain"):
        given = {soak_rows.HOURS: (hours, None), "faults": (faults, 0), "MiB": (slope, 100)}
        known = [collect.row(f"soak, {server}", "ours", metric, *one) for metric, one in given.items()]
        return [*known, collect.row("soak, card 0, all servers", "all", "MiB", slope, 100)]

    def told(old, new):
        table = {"device": {"name": "H"}, "sglang": ["1"], "date": "", "commit": "", "command": [], "runs": {}}
        found = collect.added(table | {"rows": old}, table | {"rows": new})["rows"]
        return {(r["case"].split(",")[1], r["metric"]): r["value"] for r in found}

    long, card = told([], rows(2, 0, 145)), (" card 0", "MiB")
    assert long == {(" plain", soak_rows.HOURS): 2, (" plain", "faults"): 0, (" plain", "MiB"): 145, card: 145}
    assert told(rows(2, 0, 145), rows(1, 0, 20)) == long
    assert capsys.readouterr().out.count("a load before was longer") == 2
    assert told(rows(2, 0, 145), rows(1, 3, 20)) == long | {(" plain", "faults"): 3}
    eagle = told([], rows(1, 0, 20, "eagle"))
    assert told(rows(2, 0, 145), rows(1, 0, 20, "eagle")) == eagle | long
    both = told(
        [*rows(2, 0, 145, "eagle"), *rows(1, 0, 1, "eagle314")], [*rows(1, 0, 2, "eagle"), *rows(3, 0, 3, "eagle314")]
    )
    assert both == told([], [*rows(2, 0, 145, "eagle"), *rows(3, 0, 3, "eagle314")])
    words = [
        collect.row("soak, plain", "ours", metric, None)
        for metric in ("fault: why", "marker that differs: a", "not shown: b")
    ]
    assert told(rows(2, 0, 145), [*rows(1, 1, 20), *words]).keys() - long.keys() == {
        (" plain", word["metric"]) for word in words[:2]
    }
    assert told(rows(2, 0, 145), [*rows(1, 0, 20), *words]) == long
    capsys.readouterr()
    assert told(rows(2, 0, 145), rows(2, 0, 20)) == told([], rows(2, 0, 20))
    assert told(rows(1, 0, 20), rows(2, 0, 145)) == long
    assert not capsys.readouterr().out

"""start_stage.py without a GPU: servers that answer lists of prompts, the real control flow; bars by made starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import collect, faults_stage, made_sglang, made_tokenizer, start_rows, start_stage
from tests.e2e.test_serving_stage import free_ports

HERE = Path(__file__).resolve().parent

HARNESS = """
import argparse, os, sys
def parse(argv):
    p = argparse.ArgumentParser()
    for name in ("variant", "models", "patch"):
        p.add_argument("--" + name, default="m")
    return p.parse_known_args(argv)[0]
def engine_args(a):
    model = os.path.join(a.models, a.variant)
    os.makedirs(model, exist_ok=True)
    return {"model_path": model, "skip_tokenizer_init": True}, model
def vocab_of(model):
    return 500
def ids(n, vocab, seed):
    return [seed % vocab] * n
def reexec(a):
    path = os.pathsep.join(([a.patch] if a.patch != "m" else []) + [os.environ["PYTHONPATH"]])
    os.execve(sys.executable, [], dict(os.environ, E2E_REEXEC="1", PYTHONPATH=path))
"""
LAUNCH_SERVER = (
    made_sglang.ANSWERING
    + """
import json, os, sys, time
from http.server import ThreadingHTTPServer
from pathlib import Path
ours = "DSV4_SM120_FORCE" in os.environ
assert ours == ("build" in os.environ["PYTHONPATH"])
watch, cards = Path(os.environ["E2E_WATCH"]), os.environ["CUDA_VISIBLE_DEVICES"]
watch.mkdir(parents=True)
kept = Path(os.environ["TRITON_CACHE_DIR"]) / "HASH/theirs.json"
(watch / "1.json").write_text("{}")
def compiled(name, did):
    with open(watch / "1.compiles", "a") as file:
        file.write(json.dumps([time.monotonic(), name, did, 0.7]) + "\\n")
compiled("theirs", not kept.exists())
kept.parent.mkdir(parents=True, exist_ok=True)
kept.write_text("{}")
print("[TP0] Load weight end. elapsed=1.25 s\\n[TP1] Load weight end. elapsed=1.50 s", flush=True)
print("[TP0] Capture target decode CUDA graph end. bs=[1, 2], elapsed=2.00 s", flush=True)
print("[TP0] Init parallel ends. elapsed=3.00 s", flush=True)
if os.environ.get("FAKE_NO_START") == cards and ours:
    sys.exit("out of memory")
seen = set()
class Handler(Answering):
    def answer_to(self, asked):
        prompts, sampling = asked["input_ids"], asked["sampling_params"]
        if ours and len(prompts[0]) == 8200 and not seen:
            seen.add(1)
            compiled("later", True)
            time.sleep(0.7)
        one = {"output_ids": [1] * sampling["max_new_tokens"], "meta_info": {}}
        self.answer([one] * len(prompts) * sampling.get("n", 1))
port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
)


def run_stage(folder, *options):
    files = {"tools/run_engine.py": HARNESS, "build/sitecustomize.py": ""}
    files |= made_sglang.site(LAUNCH_SERVER)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    line = [sys.executable, str(HERE / "start_stage.py"), "--harness", str(folder / "tools"), "--rest-s", "0"]
    line += ["--patch", str(folder / "build"), "--models", str(folder / "m"), "--work", str(folder / "work")]
    line += ["--out", str(folder / "out"), "--port", str(free_ports(1)[0] // 4), *options]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DSV4_", "E2E_"))}
    kept |= {name: str(folder / "none") for name in start_stage.FOLDERS}
    kept |= {"PYTHONPATH": str(folder / "site"), "TRITON_CACHE_DIR": str(folder / "triton")}
    done = subprocess.run(line, env=kept, capture_output=True, text=True, timeout=300)
    return done, json.loads((folder / "out/stage_start.json").read_text()), folder


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    return run_stage(tmp_path_factory.mktemp("start"))


def rows_of(found):
    rows = {}
    for row in collect.collect([found], None)["rows"]:
        rows.setdefault((row["impl"], row["metric"]), []).append(row)
    return rows


def test_three_waves_and_what_compiles_behind_the_first_token(started):
    done, found, folder = started
    starts = found["start"]["starts"]
    told = [(start["kind"], start["cards"], start["problem"]) for start in starts]
    kinds = ["stock_first", "ours_first", "stock", "ours", "ours", "stock"]
    assert told == list(zip(kinds, "010101", [None] * 6, strict=True)), done.stdout + done.stderr
    rows, ours = rows_of(found), start_rows.IMPLEMENTATIONS["ours"]
    late = {kind: [one["value"] for one in rows[text, "kernels of SGLang's that Triton compiled while serving"]]
            for kind, text in start_rows.IMPLEMENTATIONS.items()}  # fmt: skip
    assert late == {"stock": [0, 0], "stock_first": [0], "ours": [1, 1], "ours_first": [1]}
    assert found["start"]["files"] == 0 and (folder / "triton/HASH/theirs.json").exists()
    (pause,) = rows[ours, "longest pause of a shape's first time beyond stock's, s"]
    assert pause["value"] > 0.5 and pause["met"] is False and done.returncode == 1
    assert (ours, "pause at the first prompt of 8200 tokens, s") in rows
    assert any(metric.endswith("s from the start: later, 0.7 s") for _, metric in rows)
    assert [one["value"] for one in rows[ours, "of these, Load weight, s"]] == [1.5, 1.5]  # the slower rank's
    assert rows[ours, "of these, Capture target decode CUDA graph, s"][0]["value"] == 2.0
    assert rows[ours, "of these, Init parallel, s"][0]["value"] == 3.0
    assert {row["issue"] for of in rows.values() for row in of} == {23}


def test_where_there_is_one_card_both_servers_of_a_wave_share_it(capsys):
    told = [(kind, cards) for wave in start_stage.ON_ONE_CARD for kind, cards in wave]
    assert told == [("stock_first", "0"), ("ours_first", "0"), ("stock", "0"), ("ours", "0")]
    assert start_stage.parse(["--one-card"]).one_card and not start_stage.parse([]).one_card
    with pytest.raises(SystemExit):
        start_stage.parse(["--one-card", "--cards", "2"])
    assert "--one-card: servers of --cards 2 need two" in capsys.readouterr().err


def test_the_made_tokenizer_has_what_a_chat_is_made_of(tmp_path):
    """0.5.23's front encodes a conversation when it starts, and ends where a token of its frame is not an added one."""
    made_tokenizer.write_tokenizer(tmp_path, 2048)
    made = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary, added = made["model"]["vocab"], {one["content"]: one["id"] for one in made["added_tokens"]}
    assert sorted(vocabulary.values()) == list(range(2048)) and vocabulary["w7"] == 7
    assert set('{"n":10}') < set(vocabulary)  # an answer by a schema
    frame = {"<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"}
    assert frame <= set(added)
    assert all(vocabulary[text] == number for text, number in added.items())


@pytest.mark.parametrize("asked, named", [("deepseek-recipe==0.2.0; sys_platform == 'linux'", True), ("orjson", False)])
def test_what_a_release_asks_for_behind_http_is_named_before_any_server_starts(asked, named, tmp_path, monkeypatch):
    told = tmp_path / "sglang-0.5.23.dist-info/METADATA"
    told.parent.mkdir()
    told.write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\nRequires-Dist: {asked}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert ("deepseek_recipe" in faults_stage.missing_for_http()) is named


def made(ours=30.0, first=63.0, stock=28.0, compiles=(), problem=None, cards=1):
    def start(kind, seconds):
        served = {shape: [0.2, 0.2, 0.2] for shape in start_stage.SHAPES}
        heard = [list(one) for one in compiles] if kind == "ours" else []
        return {"kind": kind, "cards": "0", "problem": problem if kind == "ours" else None, "first_token_s": seconds,
                "parts": {}, "served": served, "compiles": heard}  # fmt: skip

    starts = [start("stock", stock), start("ours", ours), start("stock_first", 60.0)]
    starts += [start("ours_first", first)] if cards == 1 else []
    of = {"sglang": "0.5.23", "cards": cards, "starts": starts, "files": 0}
    return {
        "stage": "start",
        "device": {},
        "date": "",
        "commit": "a",
        "command": "",
        "cases": {},
        "differences": [],
    } | {"start": of}


def unmet(found):
    return {(impl, metric) for (impl, metric), of in rows_of(found).items() for row in of if row["met"] is False}


OURS, FIRST_OURS = (start_rows.IMPLEMENTATIONS[kind] for kind in ("ours", "ours_first"))
BEYOND, BESIDE = start_rows.BEYOND_WARM, start_rows.BEYOND_BESIDE


@pytest.mark.parametrize(
    ("start", "wrong"),
    [
        (made(), set()),
        (made(ours=33.5), {(OURS, BEYOND)}),
        (made(first=65.5), {(FIRST_OURS, BESIDE)}),
        (made(first=64.5), set()),
        (made(cards=2), set()),
        (made(cards=2, ours=33.5), {(OURS, BEYOND)}),
        (made(compiles=[(40.0, "theirs", True, 2.4)]), set()),
        (
            made(problem="it died"),
            {
                (OURS, metric)
                for metric in (BEYOND, "starts that broke", "longest pause of a shape's first time beyond stock's, s")
            },
        ),
    ],
)
def test_bars(start, wrong):
    assert unmet(start) == wrong


def test_starts_alone_ask_for_nothing_but_a_first_token(tmp_path):
    done, found, _ = run_stage(tmp_path, "--only-starts")
    starts = found["start"]["starts"]
    kinds = [(start["kind"], start["cards"], start["problem"], start["served"]) for start in starts]
    assert kinds == [(kind, "0", None, {}) for kind in start_stage.ALTERNATING], done.stdout + done.stderr
    assert "--only-starts" in found["command"] and done.returncode == 0


@pytest.mark.parametrize(("ours", "is_met"), [((33.0, 32.0), True), ((33.0, 34.0), False), ((), False)])
def test_starts_alone_are_held_against_as_many_of_stocks(ours, is_met):
    found = made()
    kinds = [("stock_first", 60.0), *(("ours", seconds) for seconds in ours), ("stock", 27.0), ("stock", 29.0)]
    (one, *_) = found["start"]["starts"]
    found["start"]["starts"] = [one | {"kind": k, "first_token_s": s, "served": {}} for k, s in kinds]
    found["start"]["only_starts"] = True
    rows = rows_of(found)
    assert [row["met"] for row in rows[OURS, BEYOND]] == [is_met]
    assert not any("pause" in metric for _, metric in rows) and not any(impl == FIRST_OURS for impl, _ in rows)


def test_waves_of_starts_alone_are_one_server_each_over_the_asked_cards(capsys):
    kinds = ("stock_first", "ours", "stock", "stock", "ours")
    for cards, seen in (("1", "0"), ("2", "0,1")):
        arguments = start_stage.parse(["--only-starts", "--cards", cards])
        assert start_stage.waves(arguments) == tuple(((kind, seen),) for kind in kinds)
    with pytest.raises(SystemExit):
        start_stage.parse(["--only-starts", "--one-card"])
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("compiles", "late"),
    [
        ((), 0),
        ([(3.0, "theirs", True, 1.0)], 0),  # at the start
        ([(40.0, "theirs", False, 0.1)], 0),  # from Triton's folder
        ([(40.0, "theirs", True, 2.4), (50.0, "others", True, 0.1)], 2),
        (None, None),
    ],
)
def test_what_compiles_behind_the_first_token_is_counted_and_named(compiles, late):
    found = made(compiles=compiles or ())
    found["start"]["starts"][1]["compiles"] = compiles and found["start"]["starts"][1]["compiles"]
    rows = rows_of(found)
    [counted] = rows[OURS, "kernels of SGLang's that Triton compiled while serving"]
    assert counted["value"] == (None if compiles is None else late) and counted["bar"] is None
    named = [metric for impl, metric in rows if impl == OURS and metric.startswith("compiled while serving")]
    assert len(named) == (late or 0)


def test_where_stock_did_not_start_nothing_is_compared_with_it():
    found = made()
    found["start"]["starts"][0]["problem"] = "it died"
    stock, beyond = start_rows.IMPLEMENTATIONS["stock"], "longest pause of a shape's first time beyond stock's, s"
    assert unmet(found) == {(stock, "starts that broke"), *((OURS, metric) for metric in (BEYOND, beyond))}


@pytest.mark.parametrize("cards", [1, 2])
def test_a_longest_pause_is_told_once_of_each_kind(cards):
    rows = rows_of(made(cards=cards))
    told = {
        impl: len(of) for (impl, metric), of in rows.items() if metric == "longest pause of a shape's first time, s"
    }
    kinds = {kind for pair in start_rows.PEERS[cards] for kind in pair}
    assert told == {start_rows.IMPLEMENTATIONS[kind]: 1 for kind in kinds} and len(kinds) == 4 // cards

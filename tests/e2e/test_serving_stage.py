"""serving_stage.py without a GPU: the fake server as `sglang.launch_server`, a stand-in harness, real control flow."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import serving_stage
from tests.serving.conftest import sglang_path  # noqa: F401

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]

HARNESS = """
import argparse, json, os, sys
def parse(argv):
    p = argparse.ArgumentParser()
    p.add_argument("mode")
    for name in ("variant", "models", "context", "max-total-tokens", "patch"):
        p.add_argument("--" + name)
    p.add_argument("--graph-bs", nargs="+")
    p.add_argument("--radix", action="store_true")
    return p.parse_args(argv)
def engine_args(a):
    model = os.path.join(a.models, a.variant)
    os.makedirs(model, exist_ok=True)
    return {"model_path": model, "skip_tokenizer_init": True, "tp_size": 1, "cuda_graph_bs_decode": [1, 2]}, model
def vocab_of(model):
    return 200
def reexec(a):
    path = os.pathsep.join(([a.patch] if a.patch else []) + [os.environ["PYTHONPATH"]])
    os.execve(sys.executable, [], dict(os.environ, E2E_REEXEC="1", PYTHONPATH=path))
"""
LAUNCH_SERVER = """
import json, os, sys, time
sys.path.insert(0, {repo!r})
from tests.serving.fake_server import FakeServer
def value(name):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else None
vocab = json.load(open(value("--model-path") + "/tokenizer.json"))["model"]["vocab"]
assert sorted(vocab.values()) == list(range(200)) and vocab["w0"] == 0 and "<think>" in vocab
print("GPU", os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("SGLANG_OPT_FLASHMLA_SPARSE_PREFILL"), flush=True)
mode = os.environ.get("DSV4_SM120_FORCE")
fault = os.environ.get("FAKE_FAULT_" + ("SPECULATING" if "--speculative-algorithm" in sys.argv else str(mode).upper()))
if fault == "no_start":
    sys.exit("out of memory")
if mode:
    report = {{"settings": {{"force": mode}}, "patches": [{{"patch": "sparse_decode", "state": "APPLIED"}}]}}
    with open(os.environ["DSV4_SM120_REPORT"] + "/1.json", "w") as f:
        json.dump(report, f)
accept = 2 if "--speculative-algorithm" in sys.argv else 1
PACE = {{"step_s": 0.0005, "quiet_s": 0.2, "stream_interval": 8}}
server = FakeServer([fault] if fault else [], int(value("--port")), accept_length=accept, **PACE)
server.exits = True
server.http.serve_forever()
"""


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture
def stage(sglang_path, tmp_path):  # noqa: F811
    """stage(*options, **faults) -> (CompletedProcess, the folder it left)."""
    path = sglang_path()
    launch = Path(path.split(os.pathsep)[0]) / "sglang/launch_server.py"
    launch.write_text(LAUNCH_SERVER.format(repo=str(REPO)))
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/run_engine.py").write_text(HARNESS)
    (tmp_path / "build").mkdir()
    (tmp_path / "build/sitecustomize.py").write_text("")

    def run(*options: str, **faults: str):
        command = [sys.executable, str(HERE / "serving_stage.py"), "--harness", str(tmp_path / "tools")]
        command += ["--patch", str(tmp_path / "build"), "--out", str(tmp_path / "out"), "--models", str(tmp_path / "m")]
        command += [
            "--matrix",
            "smoke",
            "--cells",
            "single,concurrency 2,depth,prefill,intrusion",
            "--rounds",
            "1",
            *("--others", "7"),
            "--ports",
            *map(str, free_ports(4)),
            *options,
        ]
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("DSV4_", "E2E_"))}
        environment = {**kept, **{f"FAKE_FAULT_{key}": value for key, value in faults.items()}, "PYTHONPATH": path}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        return done, tmp_path / "out"

    return run


def test_both_servers_are_compared_and_pass_the_gates(stage):
    done, out = stage("--commit", "abc123")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((out / "result.json").read_text())
    assert result["machine"]["commit"] == "abc123" and "python" in result["versions"]
    (variant,) = result["variants"]
    assert variant["refused"] == [] and variant["incomplete"] == []
    assert {entry["cell"]["kind"] for entry in variant["cells"]} == {
        "single",
        "concurrent",
        "depth",
        "prefill",
        "intrusion",
    }
    assert variant["sides"]["A"]["identity"]["patch"] == {}
    assert variant["sides"]["B"]["identity"]["patch"] == {"sparse_decode": "APPLIED (validation mode ops)"}
    assert variant["sides"]["B"]["identity"]["environment"]["DSV4_SM120_FORCE"] == "ops"
    page = (out / "report.html").read_text()
    assert "quality does not" in page and "no figure here is an SM120 figure" in page
    verdicts = {path.parent.name: json.loads(path.read_text())["verdict"] for path in out.glob("gates/*/*.json")}
    compared = ["batch_stock", "batch_patched", "speculation_stock", "speculation_patched"]
    own_noise = {"oracle_stock_against_itself": "NO VERDICT"}
    assert verdicts == own_noise | dict.fromkeys(["oracle_patched", *compared], "PASS")
    assert (out / "gates.md").read_text().count("| PASS |") == 5
    result = json.loads((out / "gates.json").read_text())
    assert result["commit"] == "abc123" and result["device"]["name"] == "none"
    assert [row["value"] for row in result["rows"] if row["metric"] == "verdict"].count("PASS") == 5
    assert {"issue": 9, "impl": "batch-invariance", "bar": None, "met": None}.items() <= result["rows"][1].items()
    assert (out / "stock.log").exists()


def test_speculation_is_compared_by_commands(stage, tmp_path):
    """--spec as a user has it, over two cards; the fake server tells two tokens a step. The commit is the patch's."""
    (tmp_path / "build/deepseek_v4_sm120").mkdir()
    (tmp_path / "build/deepseek_v4_sm120/build_info.json").write_text('{"git_commit": "abc123"}')
    done, out = stage("--spec", "--cards", "2", "--cells", "single", "--spec-start-s", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((out / "result.json").read_text())
    assert result["machine"]["commit"] == "abc123"
    assert [variant["refused"] + variant["incomplete"] for variant in result["variants"]] == [[], []]
    assert [variant["name"].split(":")[0] for variant in result["variants"]] == [
        "without speculation",
        "with speculation",
    ]
    sides = [side["identity"] for variant in result["variants"] for side in variant["sides"].values()]
    assert [who["patch"] for who in sides[1::2]] == [{"sparse_decode": "APPLIED (validation mode ops)"}] * 2
    assert all("--tp-size 2" in who["command"] for who in sides)
    assert ["--speculative-num-steps 3" in who["command"] for who in sides] == [False, False, True, True]
    assert "acceptance_length" in (out / "report.md").read_text() and ", 2 cards" in result["title"]


def test_a_faulty_patch_fails_its_gates_and_no_speculation_is_said(stage):
    done, out = stage("--only-gates", "--gpus", "0", "0", "1", "1", OPS="batch_variant", SPECULATING="no_start")
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {path.parent.name: json.loads(path.read_text())["verdict"] for path in out.glob("gates/*/*.json")}
    assert verdicts["batch_patched"] == "FAIL" and verdicts["batch_stock"] == "PASS"
    ended = "the server ended (exit code 1); its log ends: GPU 1 0 | out of memory"
    assert f"speculation: speculating: {ended}" in done.stdout and f"stock_speculating: {ended}" in done.stdout
    started = {name: (out / f"{name}.log").read_text().split()[:3] for name in serving_stage.NAMES}
    assert started == dict(zip(serving_stage.NAMES, (["GPU", gpu, "0"] for gpu in "0011"), strict=True))


def test_a_server_that_does_not_start_is_said(stage):
    done, out = stage("--only-compare", OPS="no_start")
    assert done.returncode == 1 and "patched: the server ended" in done.stdout


def test_the_limit_stops_everything_and_keeps_what_is_done(stage):
    done, out = stage("--only-compare", "--limit-s", "12", OPS="hang")
    assert done.returncode == 3 and "is near: stopped" in done.stdout, done.stdout + done.stderr
    assert json.loads((out / "result.json").read_text())["variants"]


def test_nothing_is_measured_while_the_gpu_is_taken(stage, tmp_path):
    done, out = stage("--only-compare", "--limit-s", "22", "--wait-for", str(tmp_path / "free"))
    assert "patched: ready" in done.stdout and not (out / "result.json").exists(), done.stdout + done.stderr


def test_gates_compare_engines_with_the_same_wo_a():
    """Dummy weights fill an E4M3 wo_a with other numbers than a bf16 one: no answer would match."""
    assert serving_stage.parse([]).choices == serving_stage.parse(["--only-gates"]).choices == "wo_a=off"
    assert serving_stage.parse(["--only-compare"]).choices == ""
    assert serving_stage.parse(["--choices", "mhc=off"]).choices == "mhc=off"

"""faults_stage.py without a GPU: servers that are a few processes with SGLang's titles, the real control flow. What a
server may do wrong must be a bar that is not met."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.serving.endpoint import Endpoint
from bench.serving.server_errors import ServerError
from bench.serving.server_process import ServerProcess
from tests.e2e import faults_stage, made_sglang
from tests.e2e.test_serving_stage import free_ports

HERE = Path(__file__).resolve().parent

HARNESS = """
import argparse, os, sys
def parse(argv):
    p = argparse.ArgumentParser()
    for name in ("patch", "models"):
        p.add_argument("--" + name)
    p.add_argument("--eager", action="store_true")
    p.add_argument("--set", action="append", default=[])
    return p.parse_known_args(argv)[0]
def engine_args(a):
    model = os.path.join(a.models, "model")
    os.makedirs(model, exist_ok=True)
    arguments = {"model_path": model, "tp_size": 2, "disable_cuda_graph": a.eager, "skip_tokenizer_init": True}
    return arguments, model
def vocab_of(model):
    return 50
def ids(n, vocab, seed):
    return [seed % vocab] * n
def reexec(a):
    os.execve(sys.executable, [], dict(os.environ, E2E_REEXEC="1"))
"""
LAUNCH_SERVER = (
    made_sglang.ANSWERING
    + """
import json, os, signal, subprocess, sys, threading, time
from http.server import ThreadingHTTPServer
from pathlib import Path

port, faults = sys.argv[sys.argv.index("--port") + 1], os.environ.get("FAKE_FAULTS", "").split()
assert os.environ["DSV4_SM120_FORCE"] == "ops" and "--skip-tokenizer-init" not in sys.argv
assert Path(sys.argv[sys.argv.index("--model-path") + 1], "tokenizer.json").exists()
folder = Path(os.environ["FAKE_FOLDER"])
started = folder / f"started_{port}"
if started.exists() and "no_restart" in faults:
    sys.exit("the port is taken")
started.write_text("")
if "leaves_memory" in faults:
    (folder / "shm" / f"left_{port}").write_text("")
if "leaves_memory_of_cards" in faults:
    (folder / "shm" / "sglang_left").write_text("")
    (folder / "shm" / "left_on_cards").write_text("")
(folder / "shm" / f"sgl_shm_mq_{port}").write_text("")
titles = ("scheduler_TP0", "scheduler_TP1", "detokenizer")
children = {t: subprocess.Popen(["sglang::" + t, "600"], executable="/bin/sleep") for t in titles}
if "leaves_process" in faults:
    subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
if "no_sums" not in faults:
    print("all_reduce: 2 cards sum by way of each other's memory: 3.0 us (1 row)", flush=True)

def end(*_):
    for child in children.values():
        child.kill()
    os._exit(0)

def watch():
    while True:
        time.sleep(0.02)
        for i, (title, child) in enumerate(children.items()):
            if child.poll() is None:
                continue
            if "silent" not in faults and i < 2:
                told = f"rank {1 - i} waited in vain for rank {i}, in call 5, sum 3 of a graph, of 1 rows: that rank"
                print(f"deepseek_v4_sm120: all_reduce: rank {1 - i}: rank {i} (process {child.pid}) has ended")
                print(f"deepseek_v4_sm120: all_reduce: {told}", flush=True)
            if "silent" not in faults:
                name = ("scheduler_0", "scheduler_1", "detokenizer")[i]
                print(f"Subprocess {name} (pid={child.pid}) crashed", flush=True)
            if "hangs" in faults:
                time.sleep(600)
            end()

def is_stopped():
    return any(Path(f"/proc/{c.pid}/stat").read_text().split()[2] == "T" for c in children.values())

class Handler(Answering):
    def answer_to(self, asked):
        new, was_stopped = asked["sampling_params"]["max_new_tokens"], False
        for _ in range(new // 10):
            time.sleep(0.01)
            while is_stopped():
                was_stopped = True
                time.sleep(0.01)
        off = 1e-7 if was_stopped and "other_bits" in faults else 0
        text = 7 if "--disable-cuda-graph" in sys.argv and "other_text" in faults else 1
        steps = [[-1.0 - off, text, None]] * new
        self.answer({"output_ids": [text] * new, "meta_info": {"output_token_logprobs": steps}})

signal.signal(signal.SIGTERM, signal.SIG_IGN if "hangs" in faults else end)
threading.Thread(target=watch, daemon=True).start()
ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""
)


NVIDIA_SMI = """#!/bin/sh
[ -e "$FAKE_FOLDER/shm/left_on_cards" ] && echo 700 || echo 100
echo 500
"""


@pytest.fixture
def stage(tmp_path, stage_python):
    """stage(*options, faults="") -> (CompletedProcess, {(case, metric): row}, the stage file)."""
    files = {"tools/run_engine.py": HARNESS, "site/sglang/__init__.py": "", "build/sitecustomize.py": ""}
    files |= {"site/sglang/launch_server.py": LAUNCH_SERVER, "bin/nvidia-smi": NVIDIA_SMI}
    files["site/torch/__init__.py"] = made_sglang.NO_TORCH
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    (tmp_path / "shm").mkdir()
    out = tmp_path / "out"

    def run(*options: str, faults: str = ""):
        line = [*stage_python()[0], str(HERE / "faults_stage.py"), "--harness", str(tmp_path / "tools")]
        line += ["--out", str(out), "--patch", str(tmp_path / "build"), "--models", str(tmp_path)]
        line += ["--shared-memory", str(tmp_path / "shm")]
        line += ["--port", str(free_ports(1)[0] // 4), "--served", "http", "--stall-s", "0.5", "--busy-s", "0.2"]
        line += ["--given-up-s", "3", "--stop-s", "3", "--give-back-s", "1", "--work", str(tmp_path / "work"), *options]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DSV4_", "E2E_"))}
        kept |= {"PYTHONPATH": str(tmp_path / "site"), "FAKE_FAULTS": faults, "FAKE_FOLDER": str(tmp_path)}
        kept["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{kept['PATH']}"
        done = subprocess.run(line, env=kept, capture_output=True, text=True, timeout=300)
        found = json.loads((out / "stage_faults2.json").read_text())
        table = out / "table.json"
        line = [sys.executable, str(HERE / "collect.py"), str(out / "stage_faults2.json"), "--write", str(table)]
        subprocess.run(line, capture_output=True)
        rows = {(r["case"].split(", ")[2], r["metric"]): r for r in json.loads(table.read_text())["rows"]}
        return done, rows, found

    return run


def unmet(rows):
    return {key for key, row in rows.items() if row["met"] is False}


def test_a_server_that_does_all_well(stage, tmp_path):
    done, rows, found = stage("--only", "all")
    assert done.returncode == 0 and unmet(rows) == set(), done.stdout + done.stderr
    cases = found["faults"]["cases"]
    assert set(cases) == set(faults_stage.CASES) and cases["two_engines"]["answers"] == 12
    assert cases["stalled"]["stalled_s"] >= 0.5 and cases["killed_rank1"]["client"]
    assert cases["stalled_then_killed"]["named"]["in_a_sum"] == [[0, 1]]
    assert cases["memory_saver"]["not_shown"] and ("memory_saver", "broke") not in rows
    assert any(case == "memory_saver" and "torch_memory_saver is not installed" in metric for case, metric in rows)
    bars = {
        case: rows[case, "seconds until all its processes have ended"]["bar"] for case in ("stopped", "killed_rank0")
    }
    assert bars == {"stopped": 10.0, "killed_rank0": 15.0}
    own = rows["all ended", "SGLang's own entries left in /dev/shm (sgl_shm_mq_*)"]
    assert own["value"] == len(faults_stage.SERVERS) - 1 and own["bar"] is None  # no memory_saver
    logs = (tmp_path / "out/faults_logs.txt").read_text()
    who, ends = logs.split("==== eager\n")[0], logs  # the lines of who ended come first
    assert "==== second, who ended\n" in who and "waited in vain for rank 1, in call 5" in who
    assert "Subprocess detokenizer" in who and "==== first\n" in ends
    assert {row["issue"] for row in rows.values()} == {20}
    assert all(set(ways) == {"each other's memory"} for ways in found["faults"]["ways"].values())


def test_memory_of_the_cards_that_is_left_and_that_nothing_looks_at(stage, tmp_path):
    of_cards = "memory left on the cards, MiB"
    done, rows, found = stage("--only", "stopped", faults="leaves_memory_of_cards")
    assert done.returncode == 1 and (rows["all ended", of_cards]["value"], rows["all ended", of_cards]["met"]) == (
        600,
        False,
    )
    assert found["faults"]["left"]["gpu_mib_by"] == "nvidia-smi"
    (tmp_path / "shm/left_on_cards").unlink()
    (tmp_path / "bin/nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    done, rows, found = stage("--only", "stopped")
    missed = ("all ended", f"{of_cards}: not looked at, nothing here says it")
    assert done.returncode == 1 and unmet(rows) == {missed} and found["faults"]["left"]["gpu_mib_by"] is None


WRONG = {  # fault -> what is not met
    "silent": {
        *((case, "messages that lack who ended") for case in ("killed_rank1", "killed_rank0", "stalled_then_killed")),
    },
    "other_bits": {("stalled", "answers that differ")},
    "leaves_memory": {("all ended", "entries left in /dev/shm, but for SGLang's own")},
    "no_restart": {("restarted", "broke")},
    "no_sums": {("all servers", "servers whose sums were not ours")},
}


def test_what_servers_do_wrong_is_a_bar_that_is_not_met(stage):
    done, rows, _ = stage(faults=" ".join(WRONG))
    assert done.returncode == 1 and unmet(rows) == set().union(*WRONG.values()), done.stdout + done.stderr


def test_another_text_without_graphs(stage):
    _, rows, _ = stage("--only", "eager", faults="other_text")
    assert unmet(rows) == {("eager", "answers that differ")}
    assert rows["eager", "answers that differ"]["value"] == len(faults_stage.PROMPTS)


def test_servers_that_hang_are_ended_and_said(stage):
    done, rows, found = stage("--only", "killed_rank0", "stopped", faults="hangs")
    assert done.returncode == 1
    for case in ("killed_rank0", "stopped"):
        ended = rows[case, "seconds until all its processes have ended"]
        assert ended["value"] is None and ended["met"] is False
        assert rows[case, "processes left"]["met"] is False
    assert rows["all ended", "processes left"]["met"] is True  # they were killed in the end


def test_a_process_that_left_the_servers_session_is_found(stage, tmp_path):
    done, rows, found = stage("--only", "killed_rank1", faults="leaves_process")
    try:
        assert done.returncode == 1
        assert {("killed_rank1", "processes left"), ("all ended", "processes left")} <= unmet(rows)
        assert found["faults"]["left"]["processes"] == ["/bin/sleep 600"]
    finally:
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"FAKE_FOLDER={tmp_path}".encode() in (folder / "environ").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)


ENGINE = """
import asyncio, os, signal
def end():
    print("the engine's handler ends all", flush=True)
    os._exit(0)
class Engine:
    def __init__(self, **arguments):
        self.arguments, self.loop = arguments, asyncio.new_event_loop()
    def generate(self, input_ids, sampling_params, return_logprob):
        return self.loop.run_until_complete(self.answer(input_ids, sampling_params["max_new_tokens"]))
    async def answer(self, input_ids, new):
        for number in (signal.SIGTERM, signal.SIGQUIT):  # with the first request, as SGLang's
            self.loop.add_signal_handler(number, end)
        if new == 1000:
            await asyncio.sleep(600)
        return {"output_ids": input_ids * new, "meta_info": self.arguments}
"""


@pytest.fixture
def offline(tmp_path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").write_text(ENGINE)
    (port,) = free_ports(1)
    words = [sys.executable, str(HERE / "faults_engine.py"), "--port", str(port), "--engine", '{"tp_size": 2}']
    url, environment = f"http://127.0.0.1:{port}", {"PYTHONPATH": str(tmp_path)}
    server = ServerProcess("offline", f"exec {shlex.join(words)}", url, tmp_path / "log", environment)
    server.start()
    try:
        server.wait_ready(60.0)
        yield server
    finally:
        server.stop()


def asking(server, new):
    asked = {"input_ids": [3], "sampling_params": {"max_new_tokens": new}, "return_logprob": True}
    return Endpoint(server.url, timeout_s=30.0).post("/generate", asked)


def test_the_offline_engine_behind_the_same_requests(offline):
    port = int(offline.url.rpartition(":")[2])
    assert asking(offline, 2) == {"output_ids": [3, 3], "meta_info": {"tp_size": 2, "port": port + 1000}}
    assert asking(offline, 1)["output_ids"] == [3]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
@pytest.mark.parametrize("is_busy", [False, True])
def test_the_offline_engine_ends_by_sglangs_own_handlers(offline, number, is_busy):
    """Idle or in a request, from the start on, and whoever waits for an answer knows."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(asking, offline, 1000) if is_busy else None
        time.sleep(0.5)
        os.kill(offline.process.pid, number)
        assert offline.process.wait(60) == 0
        if is_busy:
            with pytest.raises(ServerError):
                waiting.result(60)
    offline.writer.join(30)
    assert "the engine's handler ends all" in offline.log.read_text()


def test_who_is_named_in_a_log():
    log = (
        "x deepseek_v4_sm120: all_reduce: rank 1 waited in vain for rank 0, in call 7, outside of graphs, of 9 rows: y"
    )
    named = faults_stage.who_is_named(log + "\nSubprocess scheduler_1 (pid=8) crashed with exit code -9.")
    assert named == {"in_a_sum": [[1, 0]], "ranks": [], "subprocesses": ["scheduler_1"]}
    assert faults_stage.names_rank(named, 0) and faults_stage.names_rank(named, 1)
    nothing = faults_stage.who_is_named("Connection closed by peer")
    assert not any(faults_stage.names_rank(nothing, rank) for rank in (0, 1))

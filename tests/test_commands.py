"""The commands as users type them: exit status, one sentence for bad input, never a traceback; serve's whole life."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
PLAN = ["--gpus", "2", "--memory", "96"]
# answers /health after a moment, logs as SGLang does, and ends itself on SIGTERM
LAUNCH_SERVER = """
import http.server, json, os, signal, sys, threading, time
port = int(sys.argv[sys.argv.index("--port") + 1])
print("Load weight begin. avail mem=90 GB", flush=True)
if "--die" in sys.argv:
    print("RuntimeError: out of memory", flush=True)
    sys.exit(3)
print("Capture cuda graph begin", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
signal.signal(signal.SIGTERM, lambda *a: (print("bye", flush=True), os._exit(0)))
print("env", os.environ["PYTHONPATH"], os.environ.get("DSV4_SM120_REPORT", "-"), flush=True)
server.serve_forever()
"""
SMI = "#!/bin/sh\ncase \"$*\" in *-x*) cat '{data}';; *compute_cap*) echo 12.0; echo 12.0;; *) exit 1;; esac\n"


@pytest.fixture
def run(tmp_path):
    """run(words, path=(), **environment) -> the finished command, in a folder of its own."""

    def environment(path=(), **more):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DSV4_SM120", "PYTHON"))}
        return kept | {"PYTHONPATH": os.pathsep.join([str(REPO), *map(str, path)])} | more

    def call(*words, path=(), **more):
        line = [sys.executable, "-m", "deepseek_v4_sm120", *words]
        env = environment(path, **more)
        done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    call.environment = environment
    return call


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["plan", "--model", "/nowhere"], "there is no /nowhere"),
        (["plan", "--gpus", "3"], "divides into"),
        (["plan", "--memory", "nan"], "must be a number of GB"),
        (["plan", "--profile", "/nowhere.json"], "cannot be read"),
        (["plan", "--sglang", "newest"], "must be a version"),
        (["plan", "--model", "pro", "--experts", "fp8"], "no fp8 checkpoint of pro"),
        (["plan", *PLAN, "--context", "5"], "--context must be"),
        (["serve", *PLAN, "--experts", "fp8", "--dry-run"], "It does not fit"),
        (["serve", *PLAN], "SGLang is not installed"),
        (["serve", *PLAN, "--profile", "/nowhere.json", "--dry-run"], "cannot be read"),
        (["doctor", "--url", "http://127.0.0.1:9"], "no server at"),
        (["doctor", "--url", "here"], "must start with http"),
        (["calibrate", "--context", "1"], "--context must be"),
        (["calibrate", "--out", "/nowhere/p.json"], "there is no folder /nowhere"),
        (["calibrate"], "no GPU to calibrate on"),
    ],
)
def test_bad_input_is_one_sentence(run, words, sentence):
    done = run(*words)
    assert done.returncode == 2 and sentence in done.stderr
    assert done.stderr.startswith(f"deepseek_v4_sm120 {words[0]}: ") and len(done.stderr.splitlines()) == 1


def test_without_a_command_all_are_listed(run):
    done = run()
    assert done.returncode == 2
    assert all(f"    {name}" in done.stderr for name in ("status", "selftest", "doctor", "plan", "serve", "calibrate"))


@pytest.mark.parametrize("command", ["status", "doctor", "plan"])
def test_bad_variables_are_one_sentence(run, command):
    done = run(command, DSV4_SM120_SET="topk_v2")
    assert done.returncode == 2 and "DSV4_SM120_SET must be" in done.stderr


def test_plan_for_programs(run):
    found = json.loads(run("plan", *PLAN, "--json").stdout)
    assert found["fits"] and found["flags"] and found["launch"].startswith(f"PYTHONPATH={REPO} ")
    done = run("plan", *PLAN, "--experts", "fp8", "--json")
    assert done.returncode == 1 and json.loads(done.stdout)["remedies"]


def test_plan_with_an_operator_switched_off(run):
    switched = {"DSV4_SM120_SET": "index_select=off"}
    found = json.loads(run("plan", *PLAN, "--sglang", "0.5.17", "--json", **switched).stdout)
    values = {flag["name"]: flag["value"] for flag in found["environment"]}
    assert values["DSV4_SM120_SET"].startswith("index_select=off,prefill_decode_interval_0_5_17=")
    assert any(reserve["what"].startswith("index logits") for reserve in found["reserves"])
    assert any("DSV4_SM120_SET leaves out index_select" in note for note in found["notes"])


def test_doctor_runs_without_anything(run):
    done = run("doctor", "--json")
    findings = json.loads(done.stdout)["findings"]
    assert {f["check"]: f["state"] for f in findings}["GPU"] == "NOT RUN"
    assert done.returncode in (0, 1) and all(f["found"] for f in findings)


def test_doctor_names_a_corrupt_profile(run, tmp_path):
    (tmp_path / "p.json").write_text("{")
    done = run("doctor", "--json", DSV4_SM120_PROFILE=str(tmp_path / "p.json"))
    profile = next(f for f in json.loads(done.stdout)["findings"] if f["check"] == "profile")
    assert (profile["state"], done.returncode) == ("FAIL", 1) and "is not JSON" in profile["found"]


def test_status_without_packaging_is_one_sentence(run, tmp_path):
    site = tmp_path / "site"
    for name, text in {
        "sglang/__init__.py": "",
        "sglang/_version.py": "__version__ = '0.5.17'",
        "packaging.py": "",
    }.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    (site / "packaging.py").write_text("raise ImportError('no packaging')")
    done = run("status", path=[site])
    assert done.returncode == 2 and "not the package `packaging`" in done.stderr


# serve ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path):
    """A folder with a stand-in for SGLang, and a PATH with an nvidia-smi of one card."""
    for name, text in {"site/sglang/__init__.py": "", "site/sglang/launch_server.py": LAUNCH_SERVER}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "site/sglang/_version.py").write_text("__version__ = '0.0.0'\n")
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(SMI.format(data=REPO / "tests/data/nvidia_smi_h200.xml"))
    smi.chmod(0o755)
    return tmp_path / "site", f"{smi.parent}{os.pathsep}{os.environ['PATH']}"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve_words(*more, port=None):
    words = ["serve", "--gpus", "1", "--memory", "400", "--sglang", "0.5.17", "--context", "8192"]
    return [*words, "--port", str(port or free_port()), "--", *more]


def test_a_server_that_dies_is_told_with_its_last_words(run, machine):
    site, path = machine
    done = run(*serve_words("--die"), path=[site], PATH=path)
    assert done.returncode == 1
    assert "RuntimeError: out of memory" in done.stdout and "ended with status 3 before it answered" in done.stdout
    assert "-m sglang.launch_server --host 127.0.0.1" in done.stdout.splitlines()[0]


# SIGINT as a shell leaves it: to the foreground, and ignored in a background job without job control
@pytest.mark.parametrize(
    ("sigint", "told", "end"),
    [(signal.SIG_DFL, "Ctrl-C", signal.SIGINT), (signal.SIG_IGN, "`kill {}`", signal.SIGTERM)],
)
def test_a_server_comes_up_and_ends_as_it_says(run, machine, tmp_path, sigint, told, end):
    site, path = machine
    line = [sys.executable, "-u", "-m", "deepseek_v4_sm120", *serve_words()]
    env = run.environment([site], PATH=path)
    with open(tmp_path / "log", "w") as log:
        child = subprocess.Popen(
            line,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=tmp_path,
            preexec_fn=lambda: signal.signal(signal.SIGINT, sigint),
        )
    limit = time.monotonic() + 60
    while "stops the server" not in (tmp_path / "log").read_text() and time.monotonic() < limit:
        assert child.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.1)
    child.send_signal(end)
    assert child.wait(60) == 0
    text = (tmp_path / "log").read_text()
    assert f"{told.format(child.pid)} stops the server" in text
    assert "answers at http://127.0.0.1:" in text and "capturing CUDA graphs" in text and "bye" in text
    assert f"env {REPO}" in text and "patch " in text and "Traceback" not in text


def test_more_cards_than_there_are_and_a_port_in_use(run, machine):
    site, path = machine
    words = ["serve", "--gpus", "2", "--memory", "400", "--sglang", "0.5.17", "--context", "8192"]
    done = run(*words, path=[site], PATH=path)
    assert done.returncode == 2 and "--gpus 2, but this machine has 1" in done.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run(*serve_words(port=taken.getsockname()[1]), path=[site], PATH=path)
    assert done.returncode == 2 and "cannot listen on" in done.stderr


def test_the_users_own_arguments_win(run, machine):
    site, path = machine
    words = ["serve", "--dry-run", *PLAN, "--sglang", "0.5.23", "--", "--tp-size", "4", "--log-level", "debug"]
    line = run(*words, path=[site], PATH=path).stdout
    assert "yours instead of the plan's: --tp-size" in line and line.count("--tp-size") == 2
    assert line.rstrip().endswith("--tp-size 4 --log-level debug")

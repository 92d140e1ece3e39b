"""How `serve` begins and ends under who else runs servers: a stand-in for SGLang that answers what it has before it
ends, or that nobody on this machine hears."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.__main__ import main
from deepseek_v4_sm120.commands.doctor import nvidia_smi
from deepseek_v4_sm120.commands.serve import command as serve
from tests.doctor.test_machine import rtx, smi

REPO = Path(__file__).resolve().parent.parent
# takes `drain` seconds for what it has to answer, as SGLang does at SIGTERM; its child stays in its session
SERVER = """
import os, signal, subprocess, sys, time
def drain(*_):
    print("draining", flush=True)
    time.sleep(float(sys.argv[1]))
    print("answered", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, drain)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("worker", worker.pid, flush=True)
print("The server is fired up and ready to roll!", flush=True)
while True:
    time.sleep(0.05)
"""
SUPERVISE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests were begun in the background
from deepseek_v4_sm120.commands.serve import command as serve
serve.STOP_TIMEOUT_S = float(sys.argv[3])
serve.stop.__defaults__ = (serve.STOP_TIMEOUT_S,)
serve._show_status = lambda environ, url: serve._say("up")
sys.exit(serve.supervise([sys.executable, sys.argv[1], sys.argv[2]], os.environ, sys.argv[4]))
"""
NOBODY = "https://127.0.0.1:9"  # where a server is that speaks another protocol than is thought


@pytest.fixture
def supervised(tmp_path):
    """supervised(seconds that the server drains, serve's own limit) -> (the process, a function that reads its log)."""
    started = []

    def start(drain, limit):
        (tmp_path / "server.py").write_text(textwrap.dedent(SERVER))
        log = tmp_path / "log"
        words = [sys.executable, "-c", SUPERVISE, str(tmp_path / "server.py"), str(drain), str(limit), NOBODY]
        with open(log, "w") as file:
            env = os.environ | {"PYTHONPATH": str(REPO), "DSV4_SM120": "off"}
            started.append(subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=env))
        return started[0], log.read_text

    yield start
    for one in started:
        for _ in range(2):  # told again, it does not wait
            one.terminate()
        one.wait(20)


def wait_for(words, read, child, seconds=30):
    end = time.monotonic() + seconds
    while words not in read():
        assert time.monotonic() < end and child.poll() is None, read()
        time.sleep(0.02)


def has_ended(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


def worker(read):
    return int(read().partition("worker ")[2].split()[0])


def test_sigterm_waits_for_the_requests_that_run_as_long_as_who_sent_it(supervised):
    """Kubernetes, Docker and systemd have a limit of their own, which may be minutes."""
    child, read = supervised(drain=2.0, limit=0.2)
    wait_for("up", read, child)
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 0
    assert "answered" in read() and "killed" not in read() and has_ended(worker(read))


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_told_again_it_ends_at_once(supervised, second):
    child, read = supervised(drain=60, limit=60)
    wait_for("up", read, child)
    child.send_signal(signal.SIGTERM)
    wait_for("draining", read, child)
    child.send_signal(second)
    assert child.wait(20) == 0
    assert "told again: killed" in read() and "\nanswered" not in read() and has_ended(worker(read))


def test_at_a_terminal_it_has_a_limit(supervised):
    child, read = supervised(drain=60, limit=0.3)
    wait_for("up", read, child)
    child.send_signal(signal.SIGINT)
    assert child.wait(20) == 0
    assert "still there after 0.3 s: killed" in read() and has_ended(worker(read))


def test_a_serve_that_is_killed_leaves_no_server(supervised):
    """By the system, short of memory, or by `kill -9`: the server is told to end, and answers what it has."""
    child, read = supervised(drain=0, limit=10)
    wait_for("up", read, child)
    server = int(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()[0])
    child.kill()
    child.wait(20)
    end = time.monotonic() + 20
    while not has_ended(server):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_server_that_nobody_hears_at_its_address_is_not_ended_for_it(supervised):
    """TLS, asked for in a --config, or with a certificate of its own: it said that it is ready."""
    child, read = supervised(drain=0, limit=10)
    wait_for("is ready, as it says; not seen at https://127.0.0.1:9", read, child)
    wait_for("up", read, child)
    assert child.poll() is None


def test_a_start_may_take_as_long_as_it_takes(monkeypatch, capsys):
    """Of 160 GB by a slow line, in which SGLang says nothing. What ends it is who started it."""
    hours, now = 0, time.monotonic
    monkeypatch.setattr(serve.time, "monotonic", lambda: now() + 3600 * hours)
    monkeypatch.setattr(serve, "get", lambda url: None)

    def poll():
        nonlocal hours
        hours += 1
        return None if hours < 9 else 0

    child, log = SimpleNamespace(poll=poll), SimpleNamespace(started=now(), stage="loading weights", is_ready=False)
    assert serve._wait_until_healthy(child, log, "http://x") is False
    assert "still loading weights" in capsys.readouterr().out and hours == 9


@pytest.mark.parametrize(
    ("used", "visible", "own", "told"),
    [
        ((0, 0, 0, 0), None, [], []),
        ((90_000, 90_000, 0, 0), None, [], [0, 1]),
        ((90_000, 90_000, 0, 0), "2,3", [], []),
        ((0, 0, 0, 90_000), "2,3", [], [3]),
        ((19_400, 20_000, 0, 0), None, [], [1]),  # 77,774 MiB of weights and tables; of 97,887 the driver keeps 616
        ((9_000, 0, 90_000, 90_000), None, [], []),  # a monitor, another server
        ((90_000, 90_000, 0, 0), None, ["--base-gpu-id=2"], []),
    ],
)
def test_cards_of_another_server_are_told_before_this_one_takes_of_them(used, visible, own, told, monkeypatch, capsys):
    gpus = nvidia_smi.read(smi(rtx(4))).gpus
    now = tuple(dataclasses.replace(gpu, memory_used=mib) for gpu, mib in zip(gpus, used, strict=True))
    monkeypatch.setattr(serve.nvidia_smi, "read", lambda run: SimpleNamespace(gpus=now, problem=None))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(serve, "_check_machine", lambda *_: None)
    monkeypatch.setattr(serve, "supervise", lambda *_: 0)
    words = ["serve", "--gpus", "2", "--memory", "96", "--sglang", "0.5.23"]
    assert main([*words, "--", *own]) == 0
    found = re.findall(r"\[serve\] GPU (\d+) has \d+ of 97887 MiB free, for ", capsys.readouterr().out)
    assert list(map(int, found)) == told


def test_of_several_kinds_of_cards_nobody_knows_which_cuda_takes(monkeypatch):
    gpus = nvidia_smi.read(smi(rtx(4))).gpus
    mixed = [dataclasses.replace(gpu, memory_used=90_000, name=f"RTX {gpu.index // 2}") for gpu in gpus]
    monkeypatch.setattr(serve.nvidia_smi, "read", lambda run: SimpleNamespace(gpus=mixed))
    plan = SimpleNamespace(weights=70e9, request=SimpleNamespace(gpus_of_host=2))
    assert serve.taken(plan) == []
    mixed[:] = [dataclasses.replace(gpu, name="RTX") for gpu in mixed]
    assert len(serve.taken(plan)) == 2


@pytest.mark.parametrize("words", [["--ssl-certfile", "c"], ["--ssl-certfile=c"], []])
def test_the_address_of_a_server_with_tls(words, monkeypatch):
    asked = []
    monkeypatch.setattr(serve, "_check_machine", lambda *_: None)
    monkeypatch.setattr(serve, "supervise", lambda words, environ, url: asked.append(url) or 0)
    plan = ["serve", "--gpus", "2", "--memory", "96", "--sglang", "0.5.17", "--port", "4000"]
    assert main([*plan, "--", *words]) == 0
    assert asked == [f"{'https' if words else 'http'}://127.0.0.1:4000"]


UP = "The server is fired up and ready to roll!"
TORCH = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 970.00 MiB. GPU 0 has"


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["Load weight begin. avail mem=94", TORCH], "loading weights: is another process on the cards? Else more"),
        (
            ["Load weight end.", "RuntimeError: Not enough memory. Please try to increase"],
            "for the KV cache: above 0.93",
        ),
        (["Load weight end.", "x leaves no room for the full KV pool"], "for the KV cache: above 0.93"),
        (["Capture target decode CUDA graph begin.", TORCH], "capturing CUDA graphs: a --mem-fraction-static that is"),
        (["graphs: CUDA graph end.", UP, TORCH, "CUDA graph begin"], "while serving: a --mem-fraction-static that is"),
        ([UP, "RuntimeError: Triton Error [CUDA]: out of memory"], "while serving: a --mem-fraction-static that is"),
        ([UP, "mhc: launch failed: cudaErrorMemoryAllocation (out of memory)"], "while serving: a --mem-fraction"),
        ([UP, "NCCL WARN Cuda failure 2 'out of memory'"], "while serving: a --mem-fraction-static that is"),
        ([UP, "RuntimeError: Prefill out of memory. Try to lower your batch size."], None),  # of the KV cache's slots
        ([UP, "MemoryError"], None),
    ],
)
def test_what_a_card_lacked_is_told_with_its_flag(lines, told, monkeypatch, capsys):
    monkeypatch.setattr(serve, "_show_status", lambda *_: None)
    script = f"import sys, time\nfor line in {lines!r}: print(line, flush=True)\ntime.sleep(0.2)\nsys.exit({{}})"
    for code in (3, 0):
        words = [sys.executable, "-c", script.format(code)]
        assert serve.supervise(words, os.environ, "http://127.0.0.1:9") == min(code, 1)
        said = [line for line in capsys.readouterr().out.splitlines() if "memory was too little" in line]
        assert len(said) == bool(told and code) and all(f"too little {told}" in line for line in said)

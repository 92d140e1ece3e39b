"""The commands as users type them: exit status, one sentence for bad input, never a traceback; serve's whole life."""

import argparse
import ast
import errno
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import deepseek_v4_sm120
from deepseek_v4_sm120.__main__ import COMMANDS, main
from deepseek_v4_sm120.commands.calibrate import command as calibrate
from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.doctor import facts
from deepseek_v4_sm120.commands.plan import command as plan_command
from deepseek_v4_sm120.commands.plan import launch
from deepseek_v4_sm120.commands.serve import command as serve
from tests.loaded_python import Loaded

REPO = Path(__file__).resolve().parent.parent
PLAN = ["--gpus", "2", "--memory", "96"]
# answers /health after a moment, logs as SGLang does, and ends itself on SIGTERM
LAUNCH_SERVER = """
import http.server, json, os, signal, sys, threading, time
port = int(sys.argv[sys.argv.index("--port") + 1])
print("server_args={'disable_flashinfer_autotune': False, 'load_format': 'auto'}", flush=True)
print("[TP0] Load weight begin. avail mem=90 GB", flush=True)
print("argv", sys.argv, "ServerArgs(api_key=%r)" % sys.argv[-1], os.environ.get("HF_TOKEN"), flush=True)
if "--die" in sys.argv:
    print("RuntimeError: out of memory", flush=True)
    sys.exit(3)
print("[TP0] Capture target decode CUDA graph begin. backend=full, num_tokens_per_bs=1", flush=True)
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
AS_MODULE = "import runpy; runpy.run_module('deepseek_v4_sm120', run_name='__main__', alter_sys=True)"
SMI = "#!/bin/sh\ncase \"$*\" in *-x*) cat '{data}';; *compute_cap*) echo 12.0; echo 12.0;; *) exit 1;; esac\n"


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A Python that has imported what all commands import of ours; each has a start of its own below, too."""
    modules = [f"deepseek_v4_sm120.commands.{module}" for _, module in COMMANDS.values()]
    python = Loaded(tmp_path_factory.mktemp("commands"), *modules, path=(str(REPO),))
    yield [*python.command, "-c", AS_MODULE]
    python.close()


@pytest.fixture
def run(tmp_path, imported, torch_python):
    """run(words, path=(), **environment) -> the finished command, in a folder of its own."""

    def environment(path=(), **more):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DSV4_SM120", "PYTHON"))}
        return kept | {"PYTHONPATH": os.pathsep.join([str(REPO), *map(str, path)])} | more

    def call(*words, path=(), **more):
        anew = bool(path) or any(name.startswith("PYTHON") for name in more)
        python = [sys.executable, "-m", "deepseek_v4_sm120"] if anew else imported
        if words == ("calibrate",):  # which needs torch as well, and nothing that we have imported
            python = [*torch_python(), "-c", AS_MODULE]
        env = environment(path, **more)
        done = subprocess.run([*python, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    call.environment = environment
    return call


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["plan", "--model", "/nowhere"], "config.json: /nowhere cannot be read: No such"),
        (["plan", "--gpus", "3"], "divides into"),
        (["status", "--tp", "2"], "it wants --model"),
        (["plan", "--memory", "nan"], "--memory must be 8 to 1024 GB"),
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


@pytest.mark.parametrize(
    "words",
    [
        ["--tp-size", "2"],
        ["foo"],
        ["foo", "--gpus", "4"],
        ["--json"],
    ],
)
def test_arguments_of_sglang_without_dashes_in_front_are_told_where_they_go(run, words):
    done = run("serve", *PLAN, "--dry-run", *words)
    assert done.returncode == 2 and done.stdout == ""
    assert f"unknown arguments: {words[0]}" in done.stderr and "go behind --" in done.stderr


def test_nothing_but_serve_takes_what_stands_behind_dashes(run):
    done = run("plan", *PLAN, "--", "--tp-size", "2")
    assert done.returncode == 2 and "plan: error: unknown arguments: -- --tp-size 2" in done.stderr


def test_an_old_python_is_told_by_every_command():
    """On the way to that sentence nothing has a syntax that it does not know."""
    code = "import runpy, sys; sys.version_info = (3, 9, 2); runpy.run_module('deepseek_v4_sm120', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("deepseek_v4_sm120 needs Python 3.10 or newer, ")
    assert len(done.stderr.splitlines()) == 1
    for name in ("__init__", "__main__", "commands/__init__"):
        text = (REPO / f"deepseek_v4_sm120/{name}.py").read_text()
        ast.parse(text, feature_version=(3, 7))
    about, first, check, *_ = ast.parse(text).body
    assert isinstance(about, ast.Expr) and ast.unparse(first) == "import sys"
    assert isinstance(check, ast.If) and "version_info" in ast.unparse(check.test), "ahead of any other import"


@pytest.mark.parametrize("command", [["status"], ["plan", *PLAN], ["selftest"]])
def test_half_a_folder_is_told_by_every_command(command, tmp_path):
    folder = tmp_path / "half"
    shutil.copytree(REPO / "deepseek_v4_sm120", folder / "deepseek_v4_sm120", ignore=shutil.ignore_patterns("*.so"))
    record = folder / f"deepseek_v4_sm120-{deepseek_v4_sm120.__version__}.dist-info/RECORD"
    record.parent.mkdir()
    gone = "deepseek_v4_sm120/sglang_patches/table.py"
    record.write_text(f"{gone},sha256=x,1\ndeepseek_v4_sm120/_C.so,sha256=x,1\nsitecustomize.py,sha256=x,1\n")
    (folder / gone).unlink()
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    line = [sys.executable, "-m", "deepseek_v4_sm120", *command]
    done = subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"deepseek_v4_sm120: {folder} lacks {gone} of {record}: copy the folder"), done.stderr


@pytest.mark.parametrize("words", [["plan", *PLAN], ["plan", *PLAN, "--json"], ["status"], ["doctor", "--quick"]])
def test_an_answer_that_cannot_be_written_is_one_sentence(run, words):
    line = shlex.join([sys.executable, "-m", "deepseek_v4_sm120", *words])
    for where, code in (("> /dev/full", 2), (">&-", 0)):
        done = subprocess.run(f"{line} {where}", shell=True, env=run.environment(), capture_output=True, text=True)
        assert "Traceback" not in done.stderr and "Exception" not in done.stderr
        if code:
            assert done.returncode == 2 and done.stderr == (
                f"deepseek_v4_sm120 {words[0]}: the answer cannot be written: No space left on device\n"
            )
        else:
            assert done.returncode in (0, 1) and done.stderr == ""


def test_a_server_in_a_container_that_only_hears_itself_is_told(monkeypatch, capsys):
    monkeypatch.setattr(serve, "_check_machine", lambda *_: None)
    monkeypatch.setattr(serve, "supervise", lambda *_: 0)
    for host, inside, is_told in (("127.0.0.1", True, True), ("0.0.0.0", True, False), ("127.0.0.1", False, False)):
        monkeypatch.setattr(facts, "is_container", lambda root, inside=inside: inside)
        assert main(["serve", *PLAN, "--sglang", "0.5.23", "--host", host]) == 0
        assert ("--host 0.0.0.0 listens for all" in capsys.readouterr().out) is is_told


def test_a_python_that_drops_our_docstrings_runs_the_commands(run):
    assert run("plan", *PLAN, PYTHONOPTIMIZE="2").returncode == 0


def test_without_a_command_all_are_listed(run):
    done = run()
    assert done.returncode == 2
    assert all(f"    {name}" in done.stderr for name in ("status", "selftest", "doctor", "plan", "serve", "calibrate"))


@pytest.mark.parametrize("command", ["status", "doctor", "plan"])
def test_bad_variables_are_one_sentence(run, command):
    done = run(command, DSV4_SM120_SET="draft_head")
    assert done.returncode == 2 and "DSV4_SM120_SET must be" in done.stderr


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ("mcc=off", "names mcc (perhaps mhc?); it takes"),
        ("MHC=off", "names MHC (perhaps mhc?); it takes"),
        ("reproducible=5", "must be on or off for reproducible"),
        ("prefill_graphs=²", "(numbers have up to 6 digits)"),
        (f"prefill_graphs={'9' * 5000}", "(numbers have up to 6 digits)"),
        ("mhc=off,mhc=on", "must say one thing of mhc; got off and on"),
    ],
)
@pytest.mark.parametrize("words", [["plan"], ["serve", "--dry-run"]])
def test_choices_that_no_server_takes_are_refused_by_the_plan(run, words, choices, sentence):
    done = run(*words, *PLAN, DSV4_SM120_SET=choices)
    assert done.returncode == 2 and sentence in done.stderr and len(done.stderr) < 4000  # all names, no 5,000 digits


@pytest.mark.parametrize("words", [["plan"], ["serve", "--dry-run"]])
def test_choices_that_do_nothing_in_that_release_are_told(run, words):
    done = run(*words, *PLAN, "--sglang", "0.5.13", DSV4_SM120_SET="dealt_products=on,dealt_index=on")
    assert done.returncode == 0 and done.stdout.count("does nothing here") == 1
    assert "DSV4_SM120_SET: dealt_products does nothing here: it is for SGLang >=0.5.14,<0.6" in done.stdout


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


def test_doctor_runs_where_its_folder_is_gone(run, tmp_path):
    """As in a container whose mount was replaced."""
    line = [sys.executable, "-m", "deepseek_v4_sm120", "doctor", "--quick"]
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(line, cwd=gone, env=run.environment(), capture_output=True, text=True, preexec_fn=gone.rmdir)
    assert "sitecustomize" in done.stdout and "Traceback" not in done.stderr


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


def test_no_key_is_printed_and_the_server_gets_it(run, machine):
    site, path = machine
    own = ["--ssl-keyfile-password=CaNaRy", "--header", "Authorization: Bearer CaNaRy", "--die", "--api-key", "CaNaRy"]
    done = run(*serve_words(*own), path=[site], PATH=path, HF_TOKEN="hf_" + 24 * "x")
    assert "ServerArgs(api_key='***')" in done.stdout and done.stdout.splitlines()[0].endswith("--api-key ***")
    assert "CaNaRy" not in done.stdout + done.stderr and 24 * "x" not in done.stdout
    assert "--ssl-keyfile-password=***" in done.stdout


# SIGINT as a shell leaves it: to the foreground, and ignored in a background job without job control
@pytest.mark.parametrize(
    ("sigint", "told", "end"),
    [
        (signal.SIG_DFL, "Ctrl-C", signal.SIGINT),
        (signal.SIG_IGN, "`kill {}`", signal.SIGTERM),
        (signal.SIG_DFL, "Ctrl-C", signal.SIGHUP),  # its terminal is closed
    ],
)
def test_a_server_comes_up_and_ends_as_it_says(run, machine, tmp_path, sigint, told, end):
    site, path = machine
    line = [sys.executable, "-u", "-m", "deepseek_v4_sm120", *serve_words()]
    env = run.environment([site], PATH=path, http_proxy="http://127.0.0.1:9")  # none of a server on this machine
    with open(tmp_path / "log", "w") as log:
        child = subprocess.Popen(
            line,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=tmp_path,
            # whoever runs the tests under nohup has the second ignored
            preexec_fn=lambda: (signal.signal(signal.SIGINT, sigint), signal.signal(signal.SIGHUP, signal.SIG_DFL)),
        )
    limit = time.monotonic() + 60
    while "stops the server" not in (tmp_path / "log").read_text() and time.monotonic() < limit:
        assert child.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.1)
    child.send_signal(end)
    assert child.wait(60) == 0
    text = (tmp_path / "log").read_text()
    assert f"{told.format(child.pid)} stops the server" in text
    reports = re.search(r"env \S+ (\S+)", text)[1]  # the server's own
    assert f"`DSV4_SM120_REPORT={reports} python3 -m deepseek_v4_sm120 doctor --url http" in text
    assert "answers at http://127.0.0.1:" in text and "capturing CUDA graphs" in text and "bye" in text
    assert "tuning kernels" not in text  # an argument in the log has that word
    assert f"env {REPO}" in text and "patch " in text and "Traceback" not in text


def test_a_log_that_cannot_be_written_for_a_while_does_not_keep_the_server_from_speaking(monkeypatch):
    """A full disk: a server whose words nobody takes stands still."""
    told, is_full = [], [True]

    def say(text):
        if is_full and is_full.pop():
            raise OSError(errno.ENOSPC, "No space left on device")
        told.append(text)

    monkeypatch.setattr(serve, "_say", say)
    child = subprocess.Popen(["printf", "one\ntwo\nthree\n"], stdout=subprocess.PIPE, text=True)
    serve._Log(child).join(10)
    assert told == ["two", "three"] and child.wait(10) == 0


def test_more_cards_than_there_are_and_a_port_in_use(run, machine):
    site, path = machine
    words = ["serve", "--gpus", "2", "--memory", "400", "--sglang", "0.5.17", "--context", "8192"]
    done = run(*words, path=[site], PATH=path)
    assert done.returncode == 2 and "2 cards are asked for, but this machine has 1" in done.stderr
    two = site.parent / "two.xml"
    head, gpu, tail = re.fullmatch(
        "(.*?)(<gpu id.*</gpu>)(.*)", (REPO / "tests/data/nvidia_smi_h200.xml").read_text(), re.S
    ).groups()
    two.write_text(head + gpu * 2 + tail)
    (site.parent / "bin/nvidia-smi").write_text(SMI.format(data=two))
    done = run(*words, path=[site], PATH=path, CUDA_VISIBLE_DEVICES="1")
    assert done.returncode == 2 and "2 cards are asked for, but CUDA_VISIBLE_DEVICES=1 leaves 1" in done.stderr
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


# hostile arguments, in this process -----------------------------------------------------------------------------------


def dry_run(*more, own=()):
    words = ["serve", "--gpus", "2", "--memory", "96", "--sglang", "0.5.17", "--dry-run", *more]
    return main([*words, "--", *own] if own else words)


@pytest.mark.parametrize("port", ["0", "-1", "65536", "99999", "9" * 30])
def test_a_port_that_is_none_is_refused(port, capsys):
    for words in ({"more": ["--port", port]}, {"own": ["--port", port]}, {"own": [f"--port={port}"]}):
        assert dry_run(*words.get("more", ()), own=words.get("own", ())) == 2
        assert "--port" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["", "a b", "http://x", "x/y", "-x", "[::1", "\x1b[2J"])
def test_a_host_that_is_none_is_refused(host, capsys):
    assert dry_run(f"--host={host}") == 2
    told = capsys.readouterr().err
    assert "--host must be" in told and "\x1b" not in told


@pytest.mark.parametrize(
    ("host", "given", "url"),
    [
        ("::1", "::1", "http://[::1]:4000"),
        ("[::1]", "::1", "http://[::1]:4000"),
        ("::", "::", "http://[::1]:4000"),
        ("0.0.0.0", "0.0.0.0", "http://127.0.0.1:4000"),
        ("localhost", "localhost", "http://localhost:4000"),
    ],
)
def test_where_a_server_answers(host, given, url, monkeypatch):
    asked = []
    monkeypatch.setattr(serve, "_check_machine", lambda gpus, host, port: asked.append((host, port)))
    monkeypatch.setattr(serve, "supervise", lambda words, environ, url: asked.append((words, url)) or 0)
    words = ["serve", "--gpus", "2", "--memory", "96", "--sglang", "0.5.17"]
    assert main([*words, "--host", host, "--port", "4000"]) == 0
    (checked, (line, there)) = asked
    assert checked == (given, 4000) and there == url
    assert line[line.index("--host") + 1] == given
    asked.clear()
    assert main([*words, "--", f"--host={host}", "--port", "4000"]) == 0  # yours wins, so there it is waited for
    assert asked[0] == (given, 4000) and asked[1][1] == url


@pytest.mark.parametrize("words", [["serve", *PLAN, "--dry-run"], ["calibrate", "--out", "/dev/null"]])
def test_without_a_folder_for_temporary_files_it_is_said(words, monkeypatch, capsys):
    """A container's read-only file system."""

    def none_is_writable():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none_is_writable)
    monkeypatch.setattr(calibrate, "check_out", lambda out: None)
    assert main(words) == 2
    assert "No usable temporary directory found in ['/tmp']: SGLang wants one" in capsys.readouterr().err


def test_the_plans_choices_are_added_to_the_users_own():
    """Which win; and memory that the plan keeps free for prefill graphs is not kept for nothing."""
    words = ["--gpus", "2", "--memory", "96", "--spec", "none", "--sglang", "0.5.23"]
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    plan = launch.make(plan_command.request_of(parser.parse_args(words)))
    for own, wanted in (
        (None, "prefill_graphs=on,dealt_products=on"),
        ("unpadded_heads=off", "prefill_graphs=on,dealt_products=on,unpadded_heads=off"),
        ("prefill_graphs=off,router_topk=on", "prefill_graphs=off,dealt_products=on,router_topk=on"),
    ):
        added = serve.environment(plan, {} if own is None else {"DSV4_SM120_SET": own}, None)
        assert added["DSV4_SM120_SET"] == wanted
    assert "DSV4_SM120_REPORT" not in serve.environment(plan, {"DSV4_SM120_REPORT": "/x"}, None)


def test_an_address_of_the_other_kind_is_tried_as_it_is(monkeypatch):
    from deepseek_v4_sm120.commands.doctor import nvidia_smi

    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(nvidia_smi, "read", lambda run: nvidia_smi.Smi((object(),), None, None, {}))
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match=rf"cannot listen on http://\[::1\]:{port}: Address already in use"):
            serve._check_machine(None, "::1", port)
    serve._check_machine(None, "::1", free_port())
    with pytest.raises(CommandError, match="cannot listen on http://no-such-host.invalid:4000"):
        serve._check_machine(None, "no-such-host.invalid", 4000)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir(), "the folder"),
        (lambda path: os.mkfifo(path), "is a device or FIFO"),
        (lambda path: path.symlink_to(path), "cannot be written"),
        (lambda path: path.symlink_to(path.parent / "no folder/x"), "there is no folder"),
    ],
)
def test_where_calibrate_cannot_write_is_told_before_the_run(make, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "_device", lambda: pytest.fail("too late"))
    out = tmp_path / "out"
    make(out)
    assert main(["calibrate", "--out", str(out)]) == 2
    assert words in capsys.readouterr().err
    for bad in ("", ".", "/dev/null", "/proc/x", "x" * 5000, str(tmp_path / "no/such")):
        assert main(["calibrate", "--out", bad]) == 2, bad
        assert "--out" in capsys.readouterr().err


def test_a_file_that_is_mounted_by_itself_cannot_be_replaced(tmp_path, monkeypatch):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mounts").write_text(f"/dev/sda1 {tmp_path}/p.json ext4 rw 0 0\n")
    asked = facts.is_mount_point
    monkeypatch.setattr(facts, "is_mount_point", lambda root, path: asked(tmp_path, path))
    calibrate.check_out(str(tmp_path / "other.json"))
    with pytest.raises(CommandError, match="is a mount of its own, .*; mount its folder"):
        calibrate.check_out(str(tmp_path / "p.json"))


def test_trying_to_write_changes_nothing(tmp_path):
    there, absent, link = tmp_path / "there", tmp_path / "absent", tmp_path / "link"
    there.write_text("kept")
    link.symlink_to(absent)
    for path in (there, absent, link):
        calibrate.check_out(str(path))
    assert there.read_text() == "kept" and not absent.exists() and link.is_symlink()


@pytest.mark.parametrize(
    "words",
    [
        *(["plan", f"--{name}", n] for name in ("gpus", "context", "concurrency") for n in ("0", "-1", "9" * 40)),
        *(["plan", f"--{name}", ""] for name in ("model", "profile", "sglang")),
        *(["plan", "--profile", path] for path in ("/dev/null", "/tmp", "/proc/self/environ")),
        *(["calibrate", f"--limit-s={value}"] for value in ("0", "-1", "nan", "-inf")),
        *(["calibrate", f"--{name}", n] for name in ("context", "concurrency") for n in ("0", "-1", "9" * 40)),
        *(["doctor", "--url", value] for value in ("", "http://", "ftp://h", "http://h:99999", "http://u:CaNaRy@h")),
        ["doctor", "--api-key", "CaNaRy"],  # of no server
    ],
    ids=str,
)
def test_hostile_values_are_refused_in_one_sentence(words, capsys):
    assert main(words) == 2
    told = capsys.readouterr()
    assert len(told.err.splitlines()) == 1 and told.err.startswith(f"deepseek_v4_sm120 {words[0]}: ")
    assert words[1].partition("=")[0] in told.err or "profile" in told.err
    assert "CaNaRy" not in told.err and not told.out


@pytest.mark.parametrize(
    "words",
    [
        *(["plan", f"--{name}", value] for name in ("gpus", "context", "memory") for value in ("x", "", "1e", "0x10")),
        *(["serve", "--port", value] for value in ("x", "", "1.5")),
        *(["calibrate", *more] for more in (["--gpus", "3"], ["--operators"], ["--operators", "x"], ["--limit-s", ""])),
        ["selftest", "--bogus"],
        ["plan", "--bogus", "--api-key", "CaNaRy"],
        ["bogus"],
    ],
    ids=str,
)
def test_what_is_no_number_or_no_flag_is_wrong_usage(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and "CaNaRy" not in capsys.readouterr().err


def test_ctrl_c_is_no_traceback(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("deepseek_v4_sm120.commands.doctor.command.run", interrupted)
    assert main(["doctor"]) == 130 and "interrupted" in capsys.readouterr().err


# selftest -------------------------------------------------------------------------------------------------------------


def test_selftest_without_torch_is_one_sentence(run, tmp_path):
    """In a Python that finds no torch: isolated from this one's packages."""
    code = f"import sys; sys.path.insert(0, {str(REPO)!r}); from deepseek_v4_sm120 import __main__ as m; "
    code += "sys.exit(m.main())"
    line = [sys.executable, "-S", "-c", code, "selftest", "--quick"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("deepseek_v4_sm120 selftest: torch is not installed for ")
    assert len(done.stderr.splitlines()) == 1
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: no such file')")
    done = run("selftest", path=[tmp_path])
    assert done.returncode == 2 and "torch does not load" in done.stderr and "libcudart" in done.stderr

"""calibrate's workers without a GPU: their order, crashes, limits, and what is told meanwhile."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.commands.calibrate import command, worker
from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.workers import MARK
from deepseek_v4_sm120.patching import profile
from deepseek_v4_sm120.specs import mxfp4_moe, provider
from deepseek_v4_sm120.specs.provider import OURS, STOCK

SHAPES = {"tp": 2, "context": 131_072, "concurrency": 8, "quick": True}

WORKER = """
import json, sys, time
def say(**values):
    print(f"\\nMARK{json.dumps(values)}", flush=True)
shapes, jobs, seconds = map(json.loads, sys.argv[1:])
print("noise")
for name, provider in jobs:
    say(job=[name, provider])
    what = WHAT.get(f"{name} {provider}", WHAT.get(provider, {"us": 10.0}))
    for case in CASES[name]:
        if "sleep" in what:
            print("{still here", flush=True)
            time.sleep(what["sleep"])
        if "problem" in what:
            say(problem=what["problem"])
            break
        if "crash" in what:
            raise RuntimeError(what["crash"])
        say(case=case, **({"error": 0.001, "how": "graph"} | what))
        what.pop("crash_later", None) and sys.exit("illegal access")
    say(done=True)
"""


@pytest.fixture
def workers(tmp_path, monkeypatch):
    """workers(what) -> measure(names, ..) with workers that answer as told; `started`: their jobs."""
    script, template, started, real = tmp_path / "worker.py", [], [], subprocess.Popen

    def popen(words, **how):
        shapes, jobs = map(json.loads, words[3:5])
        started.append([tuple(job) for job in jobs])
        cases = {name: [case.name for case in worker.operator(name).cases(**shapes)] for name, _ in jobs}
        script.write_text(template[0].replace("CASES", repr(cases)))
        assert how["env"]["DSV4_SM120"] == "off" and how["start_new_session"]
        return real([sys.executable, str(script), *words[3:]], **how)

    def prepare(**what):
        template[:] = [WORKER.replace("WHAT", repr(what)).replace("MARK", MARK)]
        monkeypatch.setattr(subprocess, "Popen", popen)
        monkeypatch.setattr(command.nvidia_smi, "read", lambda run: SimpleNamespace(gpus=()))
        return started

    return prepare


NAMES = ["mxfp4_moe", "mhc"]


def everything_is_installed(monkeypatch):
    monkeypatch.setattr(provider.importlib.util, "find_spec", lambda name: object())


def test_what_decides_is_run_first_and_by_one_process_each(workers, monkeypatch, capsys):
    everything_is_installed(monkeypatch)
    started = workers(stock={"us": 44.4}, torch={"problem": "too large"})
    results = command.measure(NAMES, SHAPES, command.Clock())
    ways = (OURS, mxfp4_moe.OURS_MXFP8)
    ours = [("mhc", OURS), *(("mxfp4_moe", way) for way in ways)]  # few bytes first
    others = [("mhc", "fused"), ("mhc", "torch"), ("mxfp4_moe", "torch"), ("mxfp4_moe", "marlin")]
    assert started == [ours, [("mhc", STOCK), ("mxfp4_moe", STOCK)], others]
    assert list(results) == NAMES and list(results["mxfp4_moe"])[:3] == [*ways, STOCK]
    assert [c["us"] for c in results["mhc"][STOCK]["cases"]] == [44.4] * 3 and results["mhc"][STOCK]["wrong"] is None
    assert "not_reached" not in results["mhc"][STOCK] and results["mhc"]["torch"] == {"problem": "too large"}
    told = capsys.readouterr().err
    assert "  mhc: stock: boundary, 8 rows: 44.4 us (0.0010)\n" in told
    assert "mhc: stock: 44.4 us, mean of 3 shapes, 0 s\n" in told
    assert "7/9 mhc: torch: does not run here: too large\n" in told


def test_a_crash_is_a_result_and_the_others_run_in_another_process(workers, monkeypatch, capsys):
    everything_is_installed(monkeypatch)
    started = workers(**{"mhc stock": {"crash": "illegal access"}, "fused": {"us": 5.0, "crash_later": True}})
    results = command.measure(NAMES, SHAPES, command.Clock())
    assert results["mhc"][STOCK]["wrong"] == "crashed after 0 case(s): RuntimeError: illegal access"
    assert results["mhc"]["fused"]["wrong"] == "crashed after 1 case(s): illegal access"
    assert started[2] == [("mxfp4_moe", STOCK)] and started[4][0] == ("mhc", "torch") and len(started) == 5
    assert all(results["mxfp4_moe"][p]["wrong"] is None for p in (OURS, STOCK, "marlin", "torch"))
    assert "mhc: stock: wrong: crashed after 0 case(s): RuntimeError: illegal" in capsys.readouterr().err


def test_a_wrong_result_is_told_and_never_used(workers, monkeypatch, capsys):
    everything_is_installed(monkeypatch)
    workers(stock={"error": None, "allowed": 0.003})
    results = command.measure(["mhc"], SHAPES, command.Clock())
    assert results["mhc"][STOCK]["wrong"] == "boundary, 1 rows: relative error not finite, allowed 0.003"
    assert command.decide("mhc", results["mhc"])["winner"] == OURS
    assert "mhc: stock: wrong: boundary, 1 rows: relative error not finite" in capsys.readouterr().err


def test_when_the_time_is_over_what_was_reached_stays(workers, monkeypatch, capsys, tmp_path):
    everything_is_installed(monkeypatch)
    monkeypatch.setattr(command, "_device", lambda: ("GPU A", ["1a", "2a"]))
    monkeypatch.setattr(command.facts, "is_container", lambda root: True)
    monkeypatch.setattr(command.facts, "is_mounted", lambda root, path: path != tmp_path / "p.json")
    workers(**{"mhc stock": {"us": 44.4}, "mxfp4_moe stock": {"us": 44.4, "sleep": 30}})
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = ["--quick", "--limit-s", "6", "--out", str(tmp_path / "p.json"), "--operators", *NAMES]
    began = time.monotonic()
    assert command.run(parser.parse_args(words)) == 0 and time.monotonic() - began < 12
    found, told = json.loads((tmp_path / "p.json").read_text()), capsys.readouterr()
    assert "p.json is lost with this container" in told.err.splitlines()[0]
    moe, small = (found["operators"][name] for name in NAMES)
    assert small["stock_over_ours"] == pytest.approx(4.44) and moe["stock_over_ours"] is None
    assert moe["winner"] == OURS and moe["wrong"] == {} and found["not_reached"] == []
    assert len(moe["providers"][STOCK]["not_reached"]) == 3 == len(small["providers"]["torch"]["not_reached"])
    assert "not reached  stock: none of its shapes was" in told.out and "not reached" in told.err


def test_what_ends_calibrate_costs_nothing_that_was_measured(workers, monkeypatch, tmp_path):
    """The terminal is closed behind a case of stock's: nobody sees a line of progress from then on."""
    everything_is_installed(monkeypatch)
    monkeypatch.setattr(command, "_device", lambda: ("GPU A", ["1a", "2a"]))
    workers(**{"mhc stock": {"us": 44.4}, "mxfp4_moe stock": {"us": 44.4, "sleep": 60}})
    gone, before = [], signal.getsignal(signal.SIGTERM)

    def write(text):
        if gone:
            raise OSError(5, "Input/output error")
        if "mhc: stock: 44.4 us" in text:
            gone.append(text)
            os.kill(os.getpid(), signal.SIGTERM)

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = ["--quick", "--out", str(tmp_path / "p.json"), "--operators", *NAMES]
    terminal = SimpleNamespace(write=write, flush=lambda: None, isatty=lambda: False, encoding="utf-8")
    monkeypatch.setattr(sys, "stderr", terminal)
    began = time.monotonic()
    assert command.run(parser.parse_args(words)) == 0 and time.monotonic() - began < 30
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["operators"]["mhc"]["stock_over_ours"] == pytest.approx(4.44)
    assert found["operators"]["mxfp4_moe"]["stock_over_ours"] is None
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_operator_that_was_not_reached_gets_no_verdict(workers, monkeypatch, capsys, tmp_path):
    everything_is_installed(monkeypatch)
    monkeypatch.setattr(command, "_device", lambda: ("GPU A", ["1a", "2a"]))
    monkeypatch.setattr(command.facts, "is_container", lambda root: False)
    workers(**{"mxfp4_moe ours": {"us": 1.0, "sleep": 30}})
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = ["--quick", "--limit-s", "3", "--out", str(tmp_path / "p.json"), "--operators", *NAMES, "--json"]
    assert command.run(parser.parse_args(words)) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert "lost with this container" not in told.err
    assert found["not_reached"] == ["mxfp4_moe"] and list(found["operators"]) == ["mhc"]
    assert profile.read(tmp_path / "p.json") == found


def test_a_worker_that_is_never_ready_is_wrong(workers, monkeypatch):
    monkeypatch.setattr(command, "WORKER_SECONDS", 2)
    workers(torch={"us": 1.0, "sleep": 30})
    results = command.measure(["mhc"], SHAPES, command.Clock())
    assert results["mhc"]["torch"]["wrong"] == "crashed after 0 case(s): not ready after 2 s"


def test_a_provider_whose_package_is_absent_starts_no_worker(workers, monkeypatch):
    monkeypatch.setattr(provider.importlib.util, "find_spec", lambda name: None if name == "sglang" else object())
    started = workers()
    found = command.measure(["index_select"], SHAPES, command.Clock())["index_select"]
    assert found[STOCK] == {"problem": "SGLang is not installed"} and found[OURS]["cases"]
    assert not any(job[1] == STOCK for jobs in started for job in jobs)


def test_a_provider_for_none_of_the_shapes_is_not_asked(workers):
    started = workers()
    found = command.measure(["sparse_decode"], SHAPES, command.Clock())["sparse_decode"]
    started = [job for jobs in started for job in jobs]
    assert OURS in found and "ours, prefill kernel" not in found
    assert ("sparse_decode", OURS) in started and ("sparse_decode", "ours, prefill kernel") not in started


def test_a_module_that_does_not_load_writes_no_verdict(workers):
    workers(ours={"problem": "no compiled module"})
    with pytest.raises(CommandError, match="mhc cannot run here: no compiled module"):
        command.measure(["mhc"], SHAPES, command.Clock())


def worker_says(python, jobs, seconds=None):
    words = [
        *python,
        "-m",
        "deepseek_v4_sm120.commands.calibrate.worker",
        *map(json.dumps, (SHAPES, jobs, seconds)),
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    return [json.loads(line.removeprefix(MARK)) for line in lines]


def test_the_worker_itself_tells_that_there_is_no_gpu(torch_python):
    jobs = [["sparse_decode", OURS], ["mhc", "torch"]]
    found = worker_says(torch_python(), jobs)
    assert [line["job"] for line in found if "job" in line] == jobs and found.count({"done": True}) == 2
    assert all("sees no CUDA device" in line["problem"] for line in found if "problem" in line) and len(found) == 6


def test_a_slow_job_leaves_time_to_those_behind_it(monkeypatch):
    """A job begins no case after its share of what is left; an unused share is for the others."""
    now, asked, collected, monotonic = [100.0], [], [], worker.time
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def run_job(name, provider_name, shapes, until):
        asked.append(until - now[0])
        now[0] += {"a": 2.0, "b": 12.0, "c": 0.0}[name]

    monkeypatch.setattr(worker, "run_job", run_job)
    # this process has all that the tests before have left
    monkeypatch.setattr(worker, "gc", SimpleNamespace(collect=lambda: collected.append(now[0])))
    worker.main([json.dumps(SHAPES), json.dumps([["a", OURS], ["b", OURS], ["c", OURS]]), "30.0"])
    assert asked == pytest.approx([10.0, 14.0, 16.0]) and monotonic is time
    assert collected == [102.0, 114.0, 114.0]

"""A report is of a process: whether that one still runs, and that nobody takes an ended server for one that runs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120 import __main__ as main
from deepseek_v4_sm120.commands.doctor import command, facts, software_checks
from deepseek_v4_sm120.patching import lifetime
from deepseek_v4_sm120.settings import Settings


def test_a_proc_of_processes_alone_tells_nothing(monkeypatch):
    """systemd's ProcSubset=pid: there is no /proc/sys."""
    there = os.path.exists
    monkeypatch.setattr(lifetime.os.path, "exists", lambda path: there(path) and not path.startswith("/proc/sys"))
    assert lifetime.namespace() is None and not lifetime.has_ended({"pid": 1, "process": lifetime.of_this()})


def test_a_report_tells_whether_its_process_still_runs(tmp_path):
    """Reports of a server that has ended stay, and the next process may have its number."""
    mine = {"pid": os.getpid(), "process": lifetime.of_this()}
    assert not lifetime.has_ended(mine) and "pid:[" in mine["process"]["namespace"]
    another = {**mine["process"], "began": mine["process"]["began"] - 1}
    assert lifetime.has_ended({**mine, "process": another}), "its number is another process's now"
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    of_child = {"pid": child.pid, "process": {**mine["process"], "began": lifetime._began(child.pid)}}
    assert not lifetime.has_ended(of_child)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert lifetime.has_ended(of_child), "nobody has heard of its end yet"
    child.communicate()
    assert lifetime.has_ended(of_child)
    elsewhere = {**of_child, "process": {**of_child["process"], "namespace": "of another container"}}
    assert not any(
        map(lifetime.has_ended, (elsewhere, {"pid": child.pid}, {**mine, "pid": -1}, {**mine, "pid": 1 << 99}))
    )


@pytest.mark.parametrize("is_running", [True, False])
def test_status_and_doctor_do_not_take_an_ended_server_for_one_that_runs(is_running, tmp_path, monkeypatch):
    monkeypatch.setattr("deepseek_v4_sm120.settings.settings", lambda: Settings(report=str(tmp_path)))
    row = {"patch": "mhc", "state": "APPLIED"}
    made = {"deepseek_v4_sm120": "x", "pid": os.getppid(), "patches": [row], "notes": [], "shadow_summary": []}
    process = {**lifetime.of_this(), "began": lifetime._began(os.getppid()) if is_running else 1}
    (tmp_path / "1.json").write_text(json.dumps(made | {"process": process}))
    found = main.status()
    assert (len(found["processes"]), len(found["ended_processes"])) == (is_running, not is_running)
    ended = "" if is_running else ", which has ended"
    assert f"\npid {os.getppid()}{ended}: applied mhc" in main.status_text(found)
    seen = SimpleNamespace(status=found, servers={})
    assert command.applied(seen) == (frozenset({"mhc"}) if is_running else None)
    (told,) = [one for one in software_checks._processes(seen)]
    assert told.found == ("applied mhc" if is_running else "1 reports, all of processes that have ended")


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("told", [{"namespace": "of an earlier boot", "began": 1}, None])
def test_what_an_earlier_life_of_the_container_left_is_not_taken_for_a_server(told, is_running, tmp_path, monkeypatch):
    """Its numbers are other processes' now, whose environment is not the server's. Where a server runs, that one
    counts; where none is seen, what is there may be of a container that shares the folder."""
    monkeypatch.setattr("deepseek_v4_sm120.settings.settings", lambda: Settings(report=str(tmp_path)))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    made = {"deepseek_v4_sm120": "x", "notes": [], "shadow_summary": []}
    old = {**made, "pid": child.pid, "patches": [{"patch": "wo_a", "state": "APPLIED"}]} | (
        {"process": told} if told else {}
    )
    (tmp_path / "1.json").write_text(json.dumps(old))
    if is_running:
        process = {**lifetime.of_this(), "began": lifetime._began(os.getppid())}
        row = {"patch": "mhc", "state": "APPLIED"}
        new = {**made, "pid": os.getppid(), "patches": [row], "process": process}
        (tmp_path / "2.json").write_text(json.dumps(new))
    found = facts.gather(Path("/"), {}, lambda command: None)
    child.communicate()
    assert command.applied(found) == frozenset({"mhc" if is_running else "wo_a"})
    assert set(found.server_environ) == ({os.getppid()} if is_running else set())
    assert f"pid {child.pid}, {lifetime.ELSEWHERE}, if it runs: applied wo_a" in main.status_text(found.status)
    told = [one for one in software_checks._processes(found) if one.check == "running servers"]
    assert len(told) == (not is_running) and all("1 reports of another container" in one.found for one in told)

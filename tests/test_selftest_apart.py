"""The self-test on a card: its checks in processes of their own, which crash, hang or lose CUDA."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from deepseek_v4_sm120.commands import workers
from deepseek_v4_sm120.commands.selftest import apart
from deepseek_v4_sm120.specs.check import Check

REPO = Path(__file__).resolve().parent.parent
# what a check named so does in the worker; any other one passes
PROCESS = """
import os, signal, sys, time
sys.path.insert(0, {repo!r})
from deepseek_v4_sm120.commands import selftest
from deepseek_v4_sm120.commands.selftest import apart
from deepseek_v4_sm120.specs.check import Check, Failure
lost = []
def fails(): raise Failure("wrong by 1")
def loses(): lost.append("AcceleratorError: an illegal instruction"); raise Failure("wrong")
def loses_behind(): lost.append("AcceleratorError: an illegal address"); return "right"
def crashes(): print("Xid 13\\nlast words", file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGABRT)
def leaves(): os._exit(7)
def hangs(): print("a library's line", flush=True); time.sleep(99)
def traps():
    import torch
    torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].cpu()
def computes():
    import torch
    return str(torch.ones(2, device="cuda").sum().item())
known = dict(fails=fails, loses=loses, loses_behind=loses_behind, crashes=crashes, leaves=leaves, hangs=hangs)
known |= dict(traps=traps, computes=computes)
names = {names!r}
if "cannot" in names[int(sys.argv[1])]:
    sys.exit("no such device")
def check(name, quick):
    needs = ("torch", "GPU") if name == "of_a_card" else ("torch",)
    return Check("op", name, known.get(name, lambda: f"{{os.getpid()}} {{quick}}"), needs)
selftest.checks = lambda quick: [check(name, quick) for name in names]
is_gone = "of_a_card" in names and int(sys.argv[1]) > 0
gone = lambda require_gpu: {{"GPU": ("FAIL" if require_gpu else "NOT RUN", "no GPU: torch sees none")}}
selftest.what_is_missing = lambda require_gpu: gone(require_gpu) if is_gone else {{}}
say = apart.workers.say
def say_and_leave(**values):
    say(**values)
    if "outcome" in values and values["outcome"]["check"] == "last_of_it": os._exit(7)
apart.workers.say = say_and_leave
if not {{"traps", "computes"}} & set(names):
    apart._lost = lambda: "no CUDA" if is_gone else lost[0] if lost else None
sys.exit(apart.main(sys.argv[1:]))
"""


@pytest.fixture
def ask(monkeypatch):
    """ask(names of checks) -> (their outcomes, the processes that were started)"""
    start, started = workers.start, []

    def begin(names):
        def instead(words, stderr, environment=None):
            assert words[:3] == [sys.executable, "-m", "deepseek_v4_sm120.commands.selftest.apart"]
            code = PROCESS.format(repo=str(REPO), names=names)
            started.append(start([sys.executable, "-c", code, *words[3:]], stderr, environment))
            return started[-1]

        monkeypatch.setattr(workers, "start", instead)
        return apart.outcomes([Check("op", name, lambda: pytest.fail("here")) for name in names], True, False)

    def all_of(*names):
        found = list(begin(names))
        assert [one.check for one in found] == list(names) and all(one.poll() is not None for one in started)
        return [(one.result, one.detail) for one in found], started

    all_of.begin, all_of.started = begin, started
    return all_of


def passed_in(process):
    return ("PASS", f"{process.pid} True")


def test_one_process_asks_all_that_it_can(ask):
    found, (process,) = ask("one", "fails", "two")
    assert found == [passed_in(process), ("FAIL", "wrong by 1"), passed_in(process)] and process.returncode == 0


def test_where_cuda_is_lost_the_next_check_has_a_process_of_its_own(ask):
    found, (first, second, third) = ask("one", "loses", "two", "loses_behind", "three")
    assert found[:3] == [passed_in(first), ("FAIL", "wrong"), passed_in(second)]
    assert found[3:] == [("FAIL", "AcceleratorError: an illegal address"), passed_in(third)]


def test_a_process_that_ends_is_its_checks_failure(ask):
    found, (first, second, third) = ask("one", "crashes", "two", "leaves", "three")
    assert found[:3] == [passed_in(first), ("FAIL", "its process ended: SIGABRT: last words"), passed_in(second)]
    assert found[3:] == [("FAIL", "its process ended: no message, exit status 7"), passed_in(third)]


def test_a_check_that_does_not_end_is_a_failure(ask, monkeypatch):
    monkeypatch.setattr(apart, "LIMIT_S", 4.0)
    found, (first, second) = ask("one", "hangs", "two")
    assert found == [passed_in(first), ("FAIL", "not at its end after 4 s"), passed_in(second)]


def test_one_that_cannot_be_killed_is_left(monkeypatch):
    """As where it waits in the driver: here its group is spared."""
    monkeypatch.setattr(workers, "KILLED_S", 0.1)
    monkeypatch.setattr(workers.os, "killpg", lambda *_: None)
    with tempfile.TemporaryFile() as stderr:
        process = workers.start([sys.executable, "-c", "import time; time.sleep(99)"], stderr)
        code = workers.end(process, 0.0)
        assert code is None and workers.last_words(stderr, code) == "it cannot be killed: the driver holds it"
    process.kill()
    process.wait()


def test_a_worker_ends_with_whoever_started_it():
    worker = f"import sys, time; sys.path.insert(0, {str(REPO)!r}); from deepseek_v4_sm120.commands import workers; "
    worker += "workers.end_with_parent(); time.sleep(60)"
    parent = f"import os, sys; sys.path.insert(0, {str(REPO)!r}); from deepseek_v4_sm120.commands import workers; "
    parent += (
        f"print(workers.start([sys.executable, '-c', {worker!r}], sys.stderr).pid, flush=True); os.kill(os.getpid(), 9)"
    )
    pid = int(subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=60).stdout)
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("it lives")


def test_a_process_that_ends_between_two_checks_is_nobodys_failure(ask):
    found, (first, second) = ask("last_of_it", "one")
    assert found == [passed_in(first), passed_in(second)] and first.returncode == 7


def test_a_card_that_is_gone_is_told_by_one_process(ask):
    found, started = ask("loses", "fine", "of_a_card", "of_a_card")
    assert found[0] == ("FAIL", "wrong") and found[1] == passed_in(started[1]) and len(started) == 2
    assert found[2:] == [("FAIL", "no GPU: torch sees none")] * 2


def test_where_no_process_begins_all_that_is_left_has_failed(ask):
    found, started = ask("one", "crashes", "cannot", "two")
    assert len(started) == 2 and found[2:] == [("FAIL", "its process ended: no such device")] * 2


def test_whoever_is_interrupted_leaves_no_process(ask):
    outcomes = ask.begin(("one", "hangs", "two"))
    assert next(outcomes).result == "PASS"
    began = time.monotonic()
    outcomes.close()
    assert time.monotonic() - began < 5 and ask.started[0].poll() == -9


@pytest.mark.gpu
def test_behind_a_kernel_that_fails_the_others_are_asked(ask):
    found, (first, second) = ask("computes", "traps", "computes", "computes")
    assert found[0] == found[2] == found[3] == ("PASS", "2.0")
    assert found[1][0] == "FAIL" and "CUDA error" in found[1][1] and second.returncode == 0

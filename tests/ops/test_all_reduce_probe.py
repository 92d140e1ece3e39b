"""The probe between processes that have no card: the kernels' own text on memory that they share (all_reduce_emulated).

Each rank's process is a real one; the ranks themselves are threads here, and processes with gloo in the last test.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deepseek_v4_sm120.ops import all_reduce as op
from deepseek_v4_sm120.ops import all_reduce_probe as probe
from deepseek_v4_sm120.ops import all_reduce_probe_child, all_reduce_probe_process
from deepseek_v4_sm120.specs.all_reduce import Meeting
from tests.ops import all_reduce_emulated as emulated

HIDDEN = 64
GOOD = {}
SAYS_FOUND = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[2]))
connection.send(("found", {}))
connection.poll(None)
"""


@pytest.fixture(scope="module")
def program(torch_python):
    """program(fault): of a rank's process."""
    library = emulated.library()
    python = torch_python()  # starts what the ranks' processes are forks of
    return lambda fault: (*python, emulated.__file__, str(library), json.dumps(fault))


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch):
    for name in ("START_S", "STEP_S", "WHOLE_S"):
        monkeypatch.setattr(probe, name, 400.0)


def verdicts(ranks, program_of, hidden=HIDDEN):
    """Of each rank."""
    meeting = Meeting(ranks, timeout=500)
    with ThreadPoolExecutor(ranks) as pool:
        asked = [
            pool.submit(probe.probe, r, ranks, r, meeting.gather(r), hidden=hidden, program=program_of(r))
            for r in range(ranks)
        ]
        return [one.result() for one in asked]


def agreed(ranks, program, fault):
    found = verdicts(ranks, lambda rank: program(fault))
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_right_is_taken_and_timed(ranks, program):
    found = agreed(ranks, program, GOOD)
    assert found.transport == "peer" and found.ranks == ranks and found.seconds > 0
    pairs = {(a, b, rows) for a in range(ranks) for b in range(ranks) if a != b for rows in probe.ROWS}
    for name, way in found.ways.items():
        assert way.problem is None and way.us == {rows: emulated.US[name] + rows for rows in probe.ROWS}
        assert {(p["from"], p["to"], p["rows"]) for p in way.pings} == pairs and len(way.pings) == len(pairs)
        assert all(p["us"] > 0 for p in way.pings)
    assert found.describe() == (
        f"{ranks} cards sum by way of each other's memory: 6.0 us (1 row), 13.0 us (8 rows), 69.0 us (64 rows); "
        "by way of host memory: 10.0 us (1 row), 17.0 us (8 rows), 73.0 us (64 rows)"
    )
    assert len(found.table()) == 1 + 2 * ranks * (ranks - 1) and json.loads(json.dumps(found.as_dict()))["text"]


def test_the_faster_way_is_taken(program):
    """Peers that the driver stages through host memory are right, and slow."""
    found = agreed(2, program, {"rank": 1, "way": "peer", "what": "slow"})
    assert found.transport == "host" and found.ways["peer"].us[1] == 106.0 and probe.REMEDY not in found.describe()
    assert not found.peers_fail and "sums nothing" not in found.describe()


FAULTS = {  # what becomes of rank 1 -> what is said of it
    "dies": r"rank 1: its probe ended: exit status 7, Xid 31: MMU fault",
    "raises": r"rank 1: RuntimeError: CUDA error: an illegal memory access was encountered$",
    "does not come": r"rank 0: all_reduce: rank 0 waited in vain for rank 1, in call 0, outside of graphs, of 1 rows",
    "wrong bits": r"^rank 1: 1 of 576 sums are wrong \(9 rows, one_shot\)$",
    "refused": r"rank 1: all_reduce memory: cudaIpcOpenMemHandle: peer access is not supported",
    "no answer": r"^rank 0: 1 rows from rank 0 to rank 1 did not come, or no answer did",
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_way_that_fails_on_one_rank_is_taken_on_none(what, program):
    found = agreed(2, program, {"rank": 1, "way": "peer", "what": what})
    assert found.transport == "host" and found.ways["host"].problem is None
    assert re.search(FAULTS[what], found.ways["peer"].problem) and found.peers_fail
    assert "; SGLang's own kernel, which goes by peers too, sums nothing; to do: " in found.describe()
    assert (
        found.describe().startswith("2 cards sum by way of host memory: 10.0 us") and probe.REMEDY in found.describe()
    )


def test_memory_that_is_full_says_nothing_of_the_bus():
    """Seen with sixteen processes on a card. Where another way failed for its own reason, that is to be mended."""
    full = probe.Way("rank 2: AcceleratorError: CUDA error: out of memory", is_tried=False)
    refused = probe.Way("rank 1: all_reduce memory: cudaIpcOpenMemHandle: peer access is not supported")
    found = probe.Verdict(8, None, {"peer": full, "host": full}, 1.0)
    assert found.remedy() == probe.MEMORY and found.describe().endswith(f"to do: {probe.MEMORY}")
    for ways in ({"peer": refused, "host": full}, {"peer": full, "host": refused}, {"peer": refused}):
        assert probe.Verdict(8, None, ways, 1.0).remedy().endswith(probe.REMEDY)
    assert probe.Verdict(8, "peer", {"peer": probe.Way(None)}, 1.0).remedy() == probe.REMEDY


@pytest.mark.parametrize("what", ["dies", "raises", "does not come", "wrong bits"])
def test_what_host_memory_does_is_not_said_of_peers(what, program):
    """It is tried behind them, by the same processes."""
    found = agreed(2, program, {"rank": 1, "way": "host", "what": what})
    assert found.transport == "peer" and found.ways["peer"].us == {rows: 5.0 + rows for rows in probe.ROWS}
    assert re.search(FAULTS[what], found.ways["host"].problem) and found.ways["peer"].problem is None
    assert not found.peers_fail


@pytest.mark.parametrize("what", ["dies", "wrong bits"])
def test_where_no_way_is_right_the_sums_are_nccls(what, program, monkeypatch):
    """SGLang's own kernel would sum by peers, and NCCL does unless it is told not to. No process is left."""
    started, real = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(real(*a, **k)) or started[-1])
    found = agreed(2, program, {"rank": 0, "way": "both", "what": what})
    assert found.transport is None and all("rank 0: " in way.problem for way in found.ways.values())
    assert found.describe().startswith("the sums between the cards are NCCL's; by way of each other's memory: rank")
    assert "by way of host memory: rank 0" in found.describe() and probe.REMEDY in found.describe()
    assert "sums nothing" in found.describe() and found.as_dict()["remedy"].startswith("NCCL_P2P_DISABLE=1 now, for")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert found.as_dict()["remedy"] == probe.REMEDY
    assert len(started) == (4 if what == "dies" else 2) and all(process.poll() is not None for process in started)


# ---- a process that was started ahead


@pytest.fixture
def started(monkeypatch):
    """The probe's processes that are started."""
    found, real = [], subprocess.Popen

    def popen(words, **options):
        made = real(words, **options)
        found.extend([made] if emulated.__file__ in words else [])
        return made

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(all_reduce_probe_process, "_ahead", [])
    yield found
    for process in found:
        process.kill()


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_process_that_was_started_ahead_is_the_first_that_is_asked(has_ended, program, started):
    """One that has ended by then is none."""
    all_reduce_probe_process.start_ahead(program(GOOD))
    all_reduce_probe_process.start_ahead(program(GOOD))
    (ahead,) = started
    assert json.dumps(GOOD) in ahead.args and not any("ranks" in word for word in ahead.args)
    if has_ended:
        ahead.kill()
        ahead.wait()
    found = agreed(2, program, GOOD)
    assert found.transport == "peer" and found.ways["host"].problem is None
    assert len(started) == (3 if has_ended else 2) and all(one.poll() is not None for one in started)
    assert all_reduce_probe_process._ahead == []


def test_where_the_process_ahead_is_lost_another_one_asks_for_what_is_left(program, started):
    """Of two ranks, threads here, one has it."""
    fault = {"rank": -1, "way": "peer", "what": "dies"}
    all_reduce_probe_process.start_ahead(program(fault))
    found = agreed(2, program, fault)
    assert found.transport == "host" and "its probe ended: exit status 7" in found.ways["peer"].problem
    assert len(started) == 4


@pytest.mark.parametrize("closes", [True, False])
def test_a_process_that_nobody_asks_ends(closes, program, started):
    """With who started it, or in time."""
    *python, file, library, fault = program(GOOD)
    short = "import runpy, sys; from deepseek_v4_sm120.ops import all_reduce_probe_process as p; p.ASKED_S = 0.5; "
    short += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    all_reduce_probe_process.start_ahead((*python, *(() if closes else ("-c", short)), file, library, fault))
    (child,) = all_reduce_probe_process._ahead
    if closes:
        child.connection.close()
    assert started[0].wait(120) == 0 and not child.is_there()


def test_what_was_started_ahead_is_ended_where_nobody_will_ask(program, started):
    all_reduce_probe_process.start_ahead(program(GOOD))
    all_reduce_probe_process.end_ahead()
    assert started[0].poll() is not None and all_reduce_probe_process._ahead == []
    all_reduce_probe_process.end_ahead()


RANK = """
import sys
from deepseek_v4_sm120.ops import all_reduce_probe_process as process
process.start_ahead()
print(process._ahead[0]._process.pid, flush=True)
sys.stdin.read()
"""


def test_a_process_ahead_ends_with_its_rank():
    """Whichever way that one ends, and long before ASKED_S."""
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK], cwd=emulated.REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    ahead = os.pidfd_open(int(rank.stdout.readline()))
    rank.kill()
    rank.communicate()
    try:
        assert select.select([ahead], [], [], 300)[0], "it is still there"
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(ahead, signal.SIGKILL)
        os.close(ahead)


NO_CARD = """
import os, runpy, sys, torch
for name in ("_cuda_init", "_cuda_getDeviceCount", "_cuda_setDevice"):
    setattr(torch._C, name, lambda *_: os._exit(9))
sys.argv[0] = "the child"
runpy.run_module("deepseek_v4_sm120.ops.all_reduce_probe_child", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_process_ahead_makes_no_context_before_it_is_asked(is_asked, torch_python):
    child = all_reduce_probe_process.Child((*torch_python(), "-c", NO_CARD))
    if is_asked:
        child.answer({"rank": 0, "ranks": 2, "device": 0, "hidden": HIDDEN, "ways": ["peer"]})
    else:
        child.connection.close()
    assert child._process.wait(300) == (9 if is_asked else 0)
    child.end()


def test_a_process_ahead_runs_where_its_rank_was_bound_meanwhile(monkeypatch):
    """Both are the kernel's own: the rank is a process here, what it asks is told in this one."""
    before = os.sched_getaffinity(0)
    rank = subprocess.Popen(["sleep", "100"])
    try:
        os.sched_setaffinity(rank.pid, {min(before)})
        monkeypatch.setattr(os, "getppid", lambda: rank.pid)
        ours, theirs = multiprocessing.Pipe()
        ours.send({"rank": 0})
        asked, connection = all_reduce_probe_child.told([str(os.dup(theirs.fileno()))])
        connection.close()
        assert asked == {"rank": 0} and os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)
        rank.kill()
        rank.wait()


def test_a_probe_that_hangs_is_ended(program, monkeypatch):
    """By peers its steps are none that take a busy machine long; by host memory all others are tried in one."""
    asked_of = probe.asked_of

    def asked(words, question):
        monkeypatch.setattr(probe, "STEP_S", 5.0 if "peer" in question["ways"] else 400.0)
        return asked_of(words, question)

    monkeypatch.setattr(probe, "asked_of", asked)
    found = agreed(2, program, {"rank": 1, "way": "peer", "what": "hangs"})
    assert found.transport == "host" and "rank 1: its probe said nothing for 5 s" in found.ways["peer"].problem
    assert found.peers_fail


def test_a_probe_that_does_not_start_is_one_that_failed(program):
    found = verdicts(2, lambda rank: ("/nowhere/python",) if rank else program(GOOD))
    assert found[0] == found[1] and found[0].transport is None
    assert "rank 1: its probe does not start" in found[0].ways["host"].problem
    assert not found[0].peers_fail and "by way of each other's memory: not tried: rank 1" in found[0].describe()
    assert found[0].describe().startswith("the sums between the cards stay SGLang's")


def test_ranks_at_different_places_have_no_verdict(program):
    found = verdicts(2, lambda rank: (sys.executable, "-c", SAYS_FOUND) if rank else program(GOOD))
    assert found[0].transport is found[1].transport is None
    assert found[0].ways["peer"].problem == "the ranks' probes are at different places"
    assert not found[0].peers_fail


# ---- making the group on all ranks or on none


def made_on(ranks, make):
    meeting = Meeting(ranks, timeout=60)
    with ThreadPoolExecutor(ranks) as pool:
        jobs = [pool.submit(op.made_together, meeting.gather(r), functools.partial(make, r)) for r in range(ranks)]
        return [job.result() for job in jobs]


@pytest.mark.parametrize("fails_before", [0, 1, 2, 3])
@pytest.mark.parametrize("error", [RuntimeError, OSError])
def test_a_group_is_made_on_all_ranks_or_on_none(fails_before, error):
    def make(rank, gather):
        for step in range(3):
            if (rank, step) == (1, fails_before):
                raise error("no memory")
            assert gather((rank, step)) == [(0, step), (1, step), (2, step)]
        return rank

    expected = [(r, None) for r in range(3)] if fails_before == 3 else [(None, "rank 1: no memory")] * 3
    assert made_on(3, make) == expected


def test_two_failures_are_both_told():
    def make(rank, gather):
        raise RuntimeError(f"reason {rank}")

    assert made_on(2, make) == [(None, "rank 0: reason 0; rank 1: reason 1")] * 2


def test_a_mistake_of_ours_is_no_way_to_fail():
    with pytest.raises(TypeError):
        op.made_together(lambda value: [value], lambda gather: None + 1)


# ---- between processes


def in_a_process(rank, ranks, gather, program, library):
    found = probe.probe(rank, ranks, rank, gather, hidden=HIDDEN, program=program)
    emulated.stand_in(library)
    device = torch.device("cpu")
    group = op.AllReduce(rank, ranks, device, gather, hidden=HIDDEN, transport=found.transport, patience_s=60.0)
    sums = []
    for turn, rows in enumerate((1, 8, 9, 64, 200, 1)):
        terms = emulated.child.terms_of(ranks, rows, HIDDEN, turn, device)
        sums.append(op.all_reduce(terms[rank], group))
    gather(None)
    group.close()
    return found, sums


def test_with_gloo_between_processes(program, torch_python):
    from deepseek_v4_sm120.reference.all_reduce import all_reduce as reference

    words = program(GOOD)
    (first, sums), (second, others) = emulated.in_gloo(torch_python(), 2, in_a_process, words, words[-2])
    assert first == second and first.transport == "peer"
    for turn, rows in enumerate((1, 8, 9, 64, 200, 1)):
        expected = reference(emulated.child.terms_of(2, rows, HIDDEN, turn, "cpu"))
        known = ~expected.isnan()
        assert torch.equal(sums[turn].view(torch.int16), others[turn].view(torch.int16))
        assert torch.equal(sums[turn][known], expected[known]) and torch.equal(sums[turn].isnan(), ~known)

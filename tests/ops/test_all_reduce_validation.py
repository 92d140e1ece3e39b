"""What a group of sums is asked, by sizes and processes alone; its calls are walked by test_checks.py."""

import errno
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.ops import all_reduce as op
from deepseek_v4_sm120.ops.shared import cuda_tensors, extension
from deepseek_v4_sm120.ops.shared.checks import Call

GOOD = {"rank": 0, "ranks": 2, "max_rows": 512, "hidden": 4096, "transport": "peer"}


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"ranks": 3}, "ranks must be 2, 4, 8, got 3"),
        ({"rank": 2}, "rank must be 0..1, got 2"),
        ({"rank": -1}, "rank must be 0..1, got -1"),
        ({"max_rows": 0}, "max_rows must be at least 1, got 0"),
        ({"hidden": 4100}, "hidden must be a multiple of 64, got 4100"),
        ({"hidden": 0}, "hidden must be a multiple of 64, got 0"),
        ({"transport": "nvlink"}, "transport must be peer or host, got 'nvlink'"),
    ],
)
def test_a_group_that_cannot_be_is_refused_before_anything_is_made(wrong, text):
    given = GOOD | wrong
    rank, ranks = given.pop("rank"), given.pop("ranks")
    with pytest.raises(ValueError, match=f"^all_reduce: {text}$"):
        op.AllReduce(rank, ranks, torch.device("cpu"), lambda value: pytest.fail("gathered"), **given)


def group_of(**changes):
    made = object.__new__(op.AllReduce)
    vars(made).update(rank=0, ranks=4, device=torch.device("cpu"), max_rows=128, hidden=256, transport="peer")
    vars(made).update(_sizes=op.vectors(128, 256), slot_vectors=1000, _patience_s=op.PATIENCE_S, _traps=True)
    vars(made).update(_places=torch.zeros(4, dtype=torch.uint64), _state=torch.zeros(10), _fault=torch.zeros(6))
    vars(made).update(changes)
    return made


@pytest.fixture
def launched(monkeypatch):
    """Launches of the fake module; the CPU counts as a card."""
    calls = []
    monkeypatch.setattr(extension, "load", lambda: SimpleNamespace(all_reduce=lambda **call: calls.append(call)))
    monkeypatch.setattr(Call, "on_cuda", lambda self: None)
    monkeypatch.setattr(cuda_tensors, "on_device_of", nullcontext)
    monkeypatch.setattr(cuda_tensors, "num_sms", lambda index: 188)
    monkeypatch.setattr(cuda_tensors, "current_stream", lambda index: 7)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return calls


def x_of(rows):
    return torch.zeros(rows, 256, dtype=torch.bfloat16)


class Registering:
    """The module, of which CUDA knows what is registered."""

    def __init__(self):
        self.known = set()

    def all_reduce_register_host(self, *, memory, bytes):
        assert memory not in self.known, "cudaErrorHostMemoryAlreadyRegistered"
        self.known.add(memory)
        return memory

    def all_reduce_unregister_host(self, *, memory):
        self.known.remove(memory)


@pytest.mark.parametrize("lost", [0, 1, 2, None])
def test_host_memory_of_a_group_that_is_not_made_is_given_back(lost, monkeypatch):
    """Where another rank fails at one of its gathers; None: it is made, and closed."""
    module, gathers = Registering(), iter(range(3))
    monkeypatch.setattr(extension, "load", lambda: module)

    def gather(value):
        if next(gathers) == lost:
            raise RuntimeError("another rank's")
        return [value, value]

    opened = os.listdir("/proc/self/fd")
    with nullcontext() if lost is None else pytest.raises(RuntimeError, match="another rank's"):
        host = op.Host(0, 4096, gather)
        assert host.places == [*module.known] * 2
        host.close()
    assert module.known == set() and os.listdir("/proc/self/fd") == opened


def test_of_peers_what_was_opened_is_closed_and_the_own_stays_until_the_end(monkeypatch):
    """Others may still have this rank's own open."""
    done = []
    module = SimpleNamespace(
        all_reduce_allocate=lambda bytes: 10,
        all_reduce_handle=lambda memory: b"own",
        all_reduce_open=lambda handle: 20,
        all_reduce_close=lambda memory: done.append(("close", memory)),
        all_reduce_release=lambda memory: done.append(("release", memory)),
    )
    monkeypatch.setattr(extension, "load", lambda: module)
    peers = op.Peers(0, 64, lambda value: [value, (-1, 11, b"another's")])
    assert peers.places == [10, 20]
    peers.leave()
    assert done == [("close", 20)]
    done.clear()
    peers.close()
    assert done == [("close", 20), ("release", 10)]


def test_a_group_that_is_not_made_leaves_its_memory(monkeypatch):
    left = []
    memory = SimpleNamespace(places=[1, 2], leave=lambda: left.append("left"))
    monkeypatch.setattr(op, "Host", lambda *_: memory)
    words = SimpleNamespace(all_reduce_state_words=8, all_reduce_fault_words=8)
    monkeypatch.setattr(extension, "load", lambda: words)
    monkeypatch.setattr(op, "places_bytes", lambda *_: 64)
    monkeypatch.setattr(op, "slot_vectors", lambda *_: 64)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(cuda_tensors, "num_sms", lambda _: 188)

    def gather(_):
        raise RuntimeError("another rank's")

    with pytest.raises(RuntimeError, match="another rank's"):
        op.AllReduce(0, 2, torch.device("cpu"), gather, transport="host")
    assert left == ["left"]


def test_a_launch_is_told_all_that_the_kernel_reads(launched):
    group, x, out = group_of(), x_of(9), x_of(9)
    assert op.all_reduce(x, group, out=out, tag=5) is out
    (call,) = launched
    assert (call["x"], call["out"], call["vectors"]) == (x.data_ptr(), out.data_ptr(), 9 * 32)
    assert (call["rank"], call["ranks"], call["transport"], call["algorithm"]) == (0, 4, "peer", "two_shot")
    assert (call["one_shot_vectors"], call["two_shot_vectors"]) == (64 * 32, 128 * 32)
    assert (call["tag"], call["rows"], call["traps"], call["num_sms"], call["stream"]) == (5, 9, True, 188, 7)
    assert group(x).shape == x.shape and len(launched) == 2


@pytest.mark.parametrize(("ranks", "one_hop"), [(2, (1, 64)), (4, (1, 8)), (8, (1, 4))])
def test_hops_follow_rows_and_ranks(ranks, one_hop, launched):
    taken = {rows: op.algorithm_for(rows, ranks) for rows in (1, 4, 5, 8, 9, 64, 65, 512)}
    assert {rows for rows, way in taken.items() if way == "one_shot"} == {r for r in taken if r <= one_hop[1]}


def test_more_rows_than_one_hop_has_room_for_are_refused(launched):
    op.all_reduce(x_of(64), group_of(), algorithm="one_shot")
    with pytest.raises(ValueError, match="^all_reduce: algorithm must be one of two_shot, got 'one_shot'$"):
        op.all_reduce(x_of(65), group_of(), algorithm="one_shot")
    for rows in (0, 129):
        with pytest.raises(ValueError, match=f"^all_reduce: x must have 1 to 128 rows, got {rows}$"):
            op.all_reduce(x_of(rows), group_of())


def test_another_card_is_refused(launched):
    with pytest.raises(RuntimeError, match="^all_reduce: x.device must be the group's, cuda:1, got cpu$"):
        op.all_reduce(x_of(1), group_of(device=torch.device("cuda", 1)))
    assert launched == [] and not group_of(device=torch.device("cuda", 1)).takes(x_of(1))


def test_patience_is_the_same_in_graphs_and_outside(launched, monkeypatch):
    """A rank may keep the others waiting in either; a probe has its own."""
    op.all_reduce(x_of(1), group_of())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    op.all_reduce(x_of(1), group_of())
    op.all_reduce(x_of(1), group_of(_patience_s=2.0))
    assert [call["patience_s"] for call in launched] == [op.PATIENCE_S, op.PATIENCE_S, 2.0]


# ---- gathers


def logits_of(rows, columns=80, dtype=torch.bfloat16):
    return torch.zeros(rows, columns, dtype=dtype)


@pytest.mark.parametrize(("dtype", "row_vectors"), [(torch.bfloat16, 10), (torch.float32, 20)])
def test_a_gather_is_told_all_that_the_kernel_reads(dtype, row_vectors, launched):
    x, out = logits_of(9, dtype=dtype), logits_of(9, 320, dtype)
    assert op.all_gather(x, group_of(), out=out, tag=5) is out
    (call,) = launched
    assert (call["x"], call["out"], call["vectors"]) == (x.data_ptr(), out.data_ptr(), 9 * row_vectors)
    assert (call["algorithm"], call["row_vectors"], call["rows"]) == ("gather", row_vectors, 9)
    assert (call["tag"], call["ranks"], call["num_sms"], call["stream"]) == (5 + 2**31, 4, 188, 7)
    found = op.all_gather(x, group_of())
    assert found.shape == (9, 320) and found.dtype == dtype and len(launched) == 2


@pytest.mark.parametrize(("rows", "parts"), [(100, [100]), (101, [51, 50]), (300, [100] * 3), (301, [76, 75, 75, 75])])
def test_rows_that_the_places_cannot_hold_take_several_launches(rows, parts, launched):
    """Of 1000 vectors a rank, and 10 a row; one behind the other, without a gap."""
    x = logits_of(rows)
    out = op.all_gather(x, group_of())
    assert [call["rows"] for call in launched] == parts and [call["vectors"] for call in launched] == [
        10 * n for n in parts
    ]
    for call, first in zip(launched, (sum(parts[:i]) for i in range(len(parts))), strict=True):
        assert call["x"] == x[first].data_ptr() and call["out"] == out[first].data_ptr()


GATHERED = {  # what is asked -> whether an adapter may, what the call says
    "logits": (logits_of(3), True, None),
    "float32": (logits_of(3, dtype=torch.float32), True, None),
    "64 rows": (logits_of(64), True, None),
    "as wide as the places": (logits_of(1, 8000), True, None),
    "more rows": (logits_of(65), False, None),
    "wider": (logits_of(1, 8008), False, "x must have rows of 1 to 1000 times 16 bytes, got 8008 times 2"),
    "84 columns": (logits_of(3, 84), False, "x must have rows of 1 to 1000 times 16 bytes, got 84 times 2"),
    "no columns": (logits_of(3, 0), False, "x must have rows of 1 to 1000 times 16 bytes, got 0 times 2"),
    "no rows": (logits_of(0), False, "x must have a row, got 0"),
    "float16": (logits_of(3, dtype=torch.float16), False, "x.dtype must be torch.bfloat16 or torch.float32"),
    "a part of wider rows": (logits_of(3, 160)[:, :80], False, "x must be contiguous"),
    "unaligned": (torch.zeros(81).bfloat16()[1:].view(1, 80), False, "x must start on a 16-byte boundary"),
    "a vector": (logits_of(3)[0], False, r"x.shape must be \[rows, columns\], got \[80\]"),
}


@pytest.mark.parametrize("name", GATHERED)
def test_what_is_asked_and_what_is_taken(name, launched):
    x, may, refusal = GATHERED[name]
    assert group_of().gathers(x) is may
    if refusal is None:
        assert op.all_gather(x, group_of()).shape == (x.shape[0], 4 * x.shape[1])
    else:
        with pytest.raises((TypeError, ValueError), match=f"^all_gather: {refusal}"):
            op.all_gather(x, group_of())
        assert launched == []


def test_a_gather_of_another_card_is_refused(launched):
    other = group_of(device=torch.device("cuda", 1))
    with pytest.raises(RuntimeError, match="^all_gather: x.device must be the group's, cuda:1, got cpu$"):
        op.all_gather(logits_of(1), other)
    assert launched == [] and not other.gathers(logits_of(1))


@pytest.mark.parametrize("ranks", op.RANKS)
@pytest.mark.parametrize("transport", op.TRANSPORTS)
def test_a_steps_logits_are_one_launch(ranks, transport):
    """32 rows of the real vocabulary in the places of a server's sums: no memory of their own."""
    slot = op.slot_vectors(ranks, transport, 4096)
    assert slot * ranks * 16 * 4 <= op.places_bytes(ranks, transport, 4096) < (slot + 1) * ranks * 16 * 4
    assert slot >= 32 * (129_280 // ranks * 2 // 16)


# ---- a rank that is lost


def fault_of(*words):
    return torch.tensor(words or (0,) * 6, dtype=torch.int32)


def test_a_fault_names_rank_call_and_place():
    assert op.describe_fault(1, fault_of()) is None
    text = op.describe_fault(1, fault_of(1, 3, 4711, 86, 8, 0))
    assert "rank 1 waited in vain for rank 3, in call 4711, sum 86 of a graph, of 8 rows" in text
    assert "call 4711, outside of graphs" in op.describe_fault(1, fault_of(1, 3, 4711, 0, 8, 0))
    assert "call 4711, gather 86 of a graph, of" in op.describe_fault(1, fault_of(1, 3, 4711, 86 - 2**31, 8, 0))
    assert "call 4711, a gather outside of graphs" in op.describe_fault(1, fault_of(1, 3, 4711, -(2**31), 8, 0))


def until(holds, seconds=60.0):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def test_a_rank_that_ends_stops_the_others(capfd):
    """The word that makes their kernels give up at once, then what a kernel tells is printed."""
    fault = fault_of()
    other, watch = killed_other(fault)
    fault[:5] = torch.tensor((1, 1, 3, 0, 8))
    said = []
    assert until(lambda: said.append(capfd.readouterr().err) or "waited in vain for rank 1" in "".join(said))
    watch.end()
    other.wait()


def killed_other(fault):
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watch = op._Watch(0, fault, [os.getpid(), other.pid])
    time.sleep(0.1)
    assert fault[5] == 0
    other.kill()
    assert until(lambda: fault[5] == 1)
    return other, watch


def test_a_rank_in_its_exit_is_seen_before_it_has_ended(monkeypatch, tmp_path, capfd):
    """As the kernel shows a killed process whose memory is being taken down: it lives on, its sockets are closed."""
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    file, fault = tmp_path / str(other.pid), fault_of()
    file.write_text(stat_of("S", 0x400000))
    monkeypatch.setattr(op, "_STAT", f"{tmp_path}/{{}}")
    watch = op._Watch(0, fault, [os.getpid(), other.pid])
    time.sleep(0.1)
    assert fault[5] == 0
    with open(file, "r+") as stat:  # the file that the watch has open
        stat.write(stat_of("R", 0x40040C))
    assert until(lambda: fault[5] == 1) and other.poll() is None
    watch.end()
    assert capfd.readouterr().err.count(f"rank 0: rank 1 (process {other.pid}) has ended") == 1
    other.communicate()


def stat_of(state: str, flags: int) -> str:
    return f"7 (sglang::sch (0) S 4) {state} 1 7 7 0 -1 {flags} 100 0"


@pytest.mark.parametrize(
    ("state", "flags", "expected"),
    [("S", 0x400000, False), ("T", 0x40000000, False), ("R", 0x40040C, True), ("D", 0x4, True), ("Z", 0, True)],
)
def test_what_the_kernel_says_of_a_process_in_exit(state, flags, expected, tmp_path):
    (tmp_path / "stat").write_text(stat_of(state, flags))
    with open(tmp_path / "stat") as stat:
        assert op.is_exiting(stat.fileno()) is expected


def test_a_real_process_lives_then_is_in_exit_then_is_gone():
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with open(f"/proc/{other.pid}/stat") as stat:
        assert not op.is_exiting(stat.fileno())
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # a zombie
        assert op.is_exiting(stat.fileno())
        other.wait()
        assert op.is_exiting(stat.fileno())


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_where_no_process_may_be_opened_its_end_is_seen(code, monkeypatch):
    """Linux before 5.3, or a container whose filter of system calls is older: no pidfd, and sums all the same."""

    def refused(pid):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(op.os, "pidfd_open", refused)
    other, watch = killed_other(fault_of())
    watch.end()
    other.wait()


def test_a_rank_that_has_ended_before_it_is_watched_is_no_member():
    other = subprocess.Popen([sys.executable, "-c", ""])
    other.wait()
    with pytest.raises(ProcessLookupError):
        op._Watch(0, fault_of(), [os.getpid(), other.pid])


def test_where_proc_hides_the_others_their_end_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(op, "_STAT", f"{tmp_path}/{{}}")
    other, watch = killed_other(fault_of())
    watch.end()
    other.wait()


def test_a_process_that_ends_at_once_names_who_ended(torch_python):
    """Without a turn of the watch's thread: by its exit."""
    words = (
        "import subprocess, sys, torch\n"
        "from deepseek_v4_sm120.ops import all_reduce as op\n"
        "op._LOOK_S = 600.0\n"
        "other = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "fault = torch.zeros(6, dtype=torch.int32)\n"
        "fault[:5] = torch.tensor((1, 1, 3, 0, 8))\n"
        "watch = op._Watch(0, fault, [0, other.pid])\n"
        "other.kill(); other.wait()\n"
        "raise RuntimeError('Connection closed by peer')\n"
    )
    done = subprocess.run([*torch_python(), "-c", words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "Connection closed by peer" in done.stderr
    assert re.search(r"rank 0: rank 1 \(process \d+\) has ended\n", done.stderr)
    assert "rank 0 waited in vain for rank 1, in call 3" in done.stderr


def test_a_watch_that_is_not_needed_any_more_ends():
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watch = op._Watch(1, fault_of(), [other.pid, os.getpid()])
    watch.end()
    assert not watch._thread.is_alive()
    other.communicate()


# ---- the module's own checks, and the memory of a group


CALL = dict(x=1 << 40, out=1 << 41, vectors=64, places=0, ranks=4, state=0, fault=0, rank=0, transport="peer")
CALL |= dict(one_shot_vectors=32, two_shot_vectors=256, algorithm="two_shot", tag=0, rows=1, patience_s=1.0, traps=True)
CALL |= dict(num_sms=188, pdl=True, stream=0)
GATHER = {"algorithm": "gather", "row_vectors": 1}


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"algorithm": "one_shot"}, "all_reduce: takes 1 to 32 vectors of 8, got 64"),
        ({"vectors": 0}, "all_reduce: takes 1 to 256 vectors of 8, got 0"),
        ({"vectors": 66}, "all_reduce: takes 1 to 256 vectors of 8, got 66"),
        ({"transport": "nvlink"}, "all_reduce: transport must be peer or host, got nvlink"),
        ({"algorithm": "ring"}, "all_reduce: algorithm must be one_shot, two_shot or gather, got ring"),
        (GATHER | {"row_vectors": 0}, "all_reduce: a gather takes rows of row_vectors vectors, got 0"),
        (GATHER | {"row_vectors": 48}, "all_reduce: a gather takes rows of row_vectors vectors, got 48"),
        (GATHER | {"vectors": 161}, "all_reduce: takes 1 to 160 vectors of 8, got 161"),
        ({"two_shot_vectors": 255}, "all_reduce: two_shot_vectors must be a multiple of ranks, which are at most 8"),
        ({"ranks": 9}, "all_reduce: two_shot_vectors must be a multiple of ranks, which are at most 8"),
    ],
)
def test_the_launcher_takes_no_size_that_a_kernel_does_not(wrong, text):
    places = torch.zeros(9, dtype=torch.uint64)
    with pytest.raises(RuntimeError, match=f"^{text}"):
        extension.load().all_reduce(**CALL | {"places": places.data_ptr()} | wrong)


def test_a_ping_that_times_nothing_is_refused():
    call = dict(there=0, here=0, vectors=1, rounds=5, warm_ups=5, sends=True, patience_s=1.0, took_ns=0, stream=0)
    with pytest.raises(RuntimeError, match="^all_reduce_ping: takes vectors, and more rounds than warm-ups"):
        extension.load().all_reduce_ping(**call)


@pytest.mark.parametrize(("ranks", "peer_mib", "host_mib"), [(2, 36, 52), (4, 40, 88), (8, 48, 160)])
def test_the_memory_of_a_group(ranks, peer_mib, host_mib):
    found = [op.places_bytes(ranks, transport, 4096) / 2**20 for transport in op.TRANSPORTS]
    assert found == [peer_mib, host_mib]

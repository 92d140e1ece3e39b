"""A start does not wait in NCCL by peers that fail, and one that waits says so: every release's own communicator over a
stand-in for NCCL whose first sum does not come back, with ours; and that both are made of one group, NCCL's first."""

import ast
import contextlib
import os
import threading
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.ops import all_reduce_probe
from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes import nccl_start
from deepseek_v4_sm120.sglang_patches.table import NCCL_START
from tests.patching.test_wheel_all_reduce import STATE
from tests.patching.test_wheel_wo_a import Quiet, definition, take
from tests.patching.wheels import every_release, fetch, since

(WHERE,) = (target.where for target in NCCL_START.targets)
MODULE, _, NAME = WHERE.removesuffix(".__init__").partition(":")


class Group(torch.distributed.ProcessGroup):
    """Of two ranks; torch.distributed is asked for neither."""


class Waits:
    """A stream whose work is done when somebody says so."""

    def __init__(self, until, limit):
        self._until, self._limit = until, limit

    def synchronize(self):
        self._until.wait(self._limit)


@pytest.fixture
def start(served_card, monkeypatch):
    """start(version, rank, group) -> the lines that were said until the communicator was there, by a first sum that
    waits for one, for so many seconds at most, or (comes_back) for none."""
    monkeypatch.delenv(nccl_start.NCCL_P2P, raising=False)
    group, said, told = Group(0, 2), [], threading.Event()

    def warn(text):
        said.append(text)
        told.set()

    monkeypatch.setattr(nccl_start.report, "warn", warn)

    def started(version, *, rank=0, group=group, seconds=60.0, comes_back=False, finds=lambda *_: None):
        said.clear()
        started.begun = []  # what NCCL's variable is when it begins
        monkeypatch.setattr(nccl_start.all_reduce, "find_ahead", finds)
        told.clear()
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)
        monkeypatch.setattr(nccl_start, "PATIENCE_S", 600.0 if comes_back else 0.01)
        stream = Waits(told, 0.0 if comes_back else seconds)
        of_card = SimpleNamespace(
            Stream=lambda: stream, stream=lambda _: contextlib.nullcontext(), device=lambda _: contextlib.nullcontext()
        )
        group_of_two = {"get_backend": lambda group: "gloo", "get_rank": lambda group: rank, "Backend": Quiet()}
        group_of_two |= {"is_initialized": lambda: True}
        group_of_two |= {"get_world_size": lambda group: 2, "get_process_group_ranks": lambda group: [0, 1]}
        group_of_two |= {"broadcast": lambda *_, **__: None}
        names = {
            "torch": SimpleNamespace(cuda=of_card, device=torch.device, ByteTensor=torch.ByteTensor, zeros=_zeros),
            "dist": SimpleNamespace(**group_of_two),
            "NCCLLibrary": lambda path: started.begun.append(os.environ.get(nccl_start.NCCL_P2P)) or Quiet(),
            "ncclUniqueId": lambda: SimpleNamespace(internal=[0] * 4),
            "StatelessProcessGroup": SimpleNamespace,
            "logger": Quiet(),
        }
        taken = take(fetch(version), names, NAME, MODULE)
        taken.all_reduce = lambda self, tensor: None
        taken.__init__ = nccl_start.replace_init(taken.__init__)
        made = taken(group, torch.device("cuda:0"))
        assert made.available and made.disabled and made.world_size == 2
        return list(said)

    return started


def _zeros(count, device):
    return torch.zeros(count)


@every_release()
def test_a_sum_that_does_not_come_back_is_told_once(version, start):
    (line,) = start(version)
    assert f"{nccl_start.NCCL_P2P}=1" in line and line.startswith("deepseek_v4_sm120: NCCL")


@every_release()
def test_one_that_does_is_not(version, start):
    assert start(version, comes_back=True) == []
    left = [thread for thread in threading.enumerate() if getattr(thread, "function", None) is nccl_start._tell]
    assert all(thread.finished.is_set() for thread in left)


def test_what_to_do_is_not_what_was_done(start, monkeypatch):
    monkeypatch.setitem(os.environ, nccl_start.NCCL_P2P, "1")
    (line,) = start("0.5.23")
    assert "NCCL_DEBUG=INFO" in line and f"{nccl_start.NCCL_P2P}=1" not in line


WAYS = {"peer": all_reduce_probe.Way("rank 0: a wait in vain"), "host": all_reduce_probe.Way(None, {1: 5.0})}
PEERS_FAIL = all_reduce_probe.Verdict(2, "host", WAYS, 1.0)
PEERS_ARE_RIGHT = all_reduce_probe.Verdict(2, "peer", {"peer": all_reduce_probe.Way(None, {1: 3.0})}, 1.0)
NOT_TRIED = all_reduce_probe.Verdict(2, None, {"peer": all_reduce_probe.Way("did not start", is_tried=False)}, 1.0)


@every_release()
@pytest.mark.parametrize("rank", [0, 1])
def test_nccl_begins_without_peers_that_fail(version, rank, start):
    asked = []
    said = start(version, rank=rank, comes_back=True, finds=lambda *given: asked.append(given) or PEERS_FAIL)
    assert start.begun == ["1"] and os.environ.pop(nccl_start.NCCL_P2P) == "1"
    ((group, device),) = asked
    assert isinstance(group, Group) and device == torch.device("cuda:0")
    assert len(said) == (rank == 0) and all(
        "a wait in vain" in line and f"{nccl_start.NCCL_P2P}=0" in line for line in said
    )


@pytest.mark.parametrize("verdict", [PEERS_ARE_RIGHT, NOT_TRIED, None])
def test_else_it_begins_as_ever(verdict, start):
    assert start("0.5.23", comes_back=True, finds=lambda *_: verdict) == [] and start.begun == [None]


@pytest.mark.parametrize("word", ["0", "1"])
def test_the_users_word_stays(word, start, monkeypatch):
    monkeypatch.setitem(os.environ, nccl_start.NCCL_P2P, word)
    assert start("0.5.23", comes_back=True, finds=lambda *_: PEERS_FAIL) == [] and start.begun == [word]


@pytest.mark.parametrize("served, hosts", [(False, False), (True, True)])
def test_of_other_servers_nothing_is_asked(served, hosts, start, monkeypatch):
    monkeypatch.setattr(models_served, "has_served_card", lambda: served)
    monkeypatch.setattr(models_served, "has_several_hosts", lambda: hosts)
    start("0.5.23", seconds=0.0, finds=lambda *_: pytest.fail("asked"))
    assert start.begun == [None]


def test_others_are_not_told_of(start, monkeypatch):
    assert start("0.5.23", rank=1, seconds=0.1) == []
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    assert start("0.5.23", seconds=0.1) == []


def test_between_hosts_it_is_the_network_that_is_told_of(start, monkeypatch):
    monkeypatch.setattr(models_served, "has_several_hosts", lambda: True)
    (line,) = start("0.5.23", finds=lambda *_: pytest.fail("asked"))
    assert "between the hosts" in line and "NCCL_SOCKET_IFNAME" in line and nccl_start.NCCL_P2P not in line
    assert start("0.5.23", rank=1, seconds=0.1) == [] and start("0.5.23", comes_back=True) == []


def test_a_group_of_somebody_elses_is_left_alone(start):
    """A trainer's, which hands over weights: torch.distributed does not know it."""
    broadcast = {"broadcast_obj": lambda value, src: value}
    assert start("0.5.23", group=SimpleNamespace(rank=0, world_size=2, **broadcast), seconds=0.1) == []


@every_release()
def test_nccls_sum_is_in_front_of_what_the_probe_stands_behind(version):
    made = definition(fetch(version), "GroupCoordinator.__init__", STATE)
    lines = {
        call.func.id: call.lineno
        for call in ast.walk(made)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    ours = lines.get("dispatch_custom_allreduce", lines.get("CustomAllreduce"))
    assert lines[NAME] < (ours or 1 << 30)
    if since(version, "0.5.13"):  # of one group, by which what was found in front is found again
        calls = [call for call in ast.walk(made) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)]
        calls = [call for call in calls if call.func.id in (NAME, "dispatch_custom_allreduce")]
        groups = {ast.unparse(word.value) for call in calls for word in call.keywords if word.arg == "group"}
        assert len(calls) == 2 and groups == {"self.cpu_group"}

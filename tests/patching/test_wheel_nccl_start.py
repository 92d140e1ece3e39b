"""A start that waits in NCCL says so: every release's own communicator over a stand-in for NCCL whose first sum does
not come back, with ours; and what is made in front of the sums that our probe looks at."""

import ast
import contextlib
import os
import threading
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes import nccl_start
from deepseek_v4_sm120.sglang_patches.table import NCCL_START
from tests.patching.test_wheel_all_reduce import STATE
from tests.patching.test_wheel_wo_a import Quiet, definition, take
from tests.patching.wheels import every_release, fetch

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

    def started(version, *, rank=0, group=group, seconds=60.0, comes_back=False):
        said.clear()
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
            "NCCLLibrary": lambda path: Quiet(),
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


def test_others_are_not_told_of(start, monkeypatch):
    assert start("0.5.23", rank=1, seconds=0.1) == []
    monkeypatch.setattr(models_served, "has_several_hosts", lambda: True)
    assert start("0.5.23", seconds=0.1) == []
    monkeypatch.setattr(models_served, "has_several_hosts", lambda: False)
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    assert start("0.5.23", seconds=0.1) == []


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

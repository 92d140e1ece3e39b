"""When the process of the probe is started ahead: with the first group of a server that will ask it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from deepseek_v4_sm120.ops import all_reduce_probe as probe
from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.adapters import all_reduce as adapter

OURS = {"model_type": "deepseek_v4", "hidden": 4096, "on_served_card": True}


@pytest.mark.parametrize(
    ("told", "ranks", "world", "starts"),
    [
        (OURS, 2, None, True),
        (OURS, 8, None, True),
        (OURS, 1, None, False),
        (OURS, 16, None, False),
        (OURS, 2, "made before", False),
        (OURS | {"on_served_card": False}, 2, None, False),
        (OURS | {"several_hosts": True}, 2, None, False),
        (OURS | {"ranks_come_and_go": True}, 2, None, False),
        (OURS | {"model_type": "deepseek_v41"}, 2, None, False),
        (OURS | {"hidden": 5120}, 2, None, False),
        (None, 2, None, False),
    ],
)
def test_the_probes_process_is_started_ahead_where_there_will_be_a_probe(told, ranks, world, starts, monkeypatch):
    """Then the group is made, as it was asked for."""
    state, calls = ModuleType(adapter.PARALLEL_STATE), []
    state._WORLD = world
    monkeypatch.setitem(sys.modules, adapter.PARALLEL_STATE, state)
    monkeypatch.setattr(models_served, "announced", lambda: told)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    monkeypatch.setattr(probe, "start_ahead", lambda: calls.append("ahead"))

    class Coordinator:
        def __init__(self, group_ranks, local_rank, *more, group_name=None):
            calls.append((self, group_ranks, local_rank, more, group_name))

    Coordinator.__init__ = adapter.replace_coordinator_init(Coordinator.__init__)
    made = Coordinator([[0, 1]], 1, "nccl", group_name="world")
    assert calls == ["ahead"] * starts + [(made, [[0, 1]], 1, ("nccl",), "world")]

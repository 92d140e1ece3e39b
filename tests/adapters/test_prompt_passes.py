"""Whose a sum of a prompt's rows would be: NCCL's alone, or another's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.adapters import all_reduce, prompt_passes


class Coordinator:
    """A group that has nothing but torch's sums."""

    ca_comm, pynccl_comm = None, SimpleNamespace(disabled=True)

    def is_symmetric_memory_enabled(self):
        return False


def takes(rows):
    return SimpleNamespace(disabled=False, should_custom_ar=lambda x: len(x) < rows)


def is_for_nccl(**changes) -> bool:
    coordinator = Coordinator()
    vars(coordinator).update(changes)
    return prompt_passes.is_for_nccl(coordinator, torch.empty(9, 2))


OTHERS = {
    **{name: SimpleNamespace(disabled=False) for name in prompt_passes._OTHERS},
    "ca_comm": takes(10),
    "is_symmetric_memory_enabled": lambda: True,
    "_can_use_flashinfer_allreduce": lambda x: len(x) == 9,
}
NONE_OF_THEM = {
    **{name: SimpleNamespace(disabled=True) for name in OTHERS if name.endswith("_comm")},
    "_can_use_flashinfer_allreduce": lambda x: len(x) < 9,
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_takes_it(name):
    assert is_for_nccl() and not is_for_nccl(**{name: OTHERS[name]})


@pytest.mark.parametrize("name", NONE_OF_THEM)
def test_others_that_are_off_or_do_not_take_it_leave_it(name):
    assert is_for_nccl(**{name: NONE_OF_THEM[name]})


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.parametrize("rows", [8, 9])
def test_where_ours_takes_all_rows_nccl_has_those_of_prompts_over_two_cards(ranks, reproducible, rows, monkeypatch):
    """Ours takes 8 rows at once, and 9 of a reproducible server, in pieces."""
    choices = {"reproducible": "on"} if reproducible else {}
    monkeypatch.setattr(all_reduce, "settings", lambda: settings.Settings(choices=choices))
    monkeypatch.setattr(all_reduce.op, "MAX_ROWS", 8)
    theirs = SimpleNamespace(disabled=False, should_custom_ar=lambda x: False)
    ours = all_reduce.Communicator(theirs, SimpleNamespace(ranks=ranks, takes=lambda x: len(x) <= 8))
    coordinator = Coordinator()
    coordinator.ca_comm = ours
    assert ours.should_custom_ar(torch.empty(rows, 2)) is (reproducible or rows == 8)
    is_for_nccl = prompt_passes.is_for_nccl(coordinator, torch.empty(rows, 2))
    assert is_for_nccl is (rows == 9 and (ranks == 2 or not reproducible))


def test_where_sglangs_kernel_takes_fewer_rows_nccl_has_the_rest():
    assert is_for_nccl(ca_comm=takes(9))


TP = SimpleNamespace(world_size=2)
GROUPS = {"_ATTN_TP": TP, "_PDMUX_PREFILL_TP_GROUP": None, "get_moe_ep_group": lambda: SimpleNamespace(world_size=1)}
KEEPS_WHOLE = {
    "data or context parallel attention": {"_ATTN_TP": SimpleNamespace(world_size=1)},
    "PD multiplexing": {"_PDMUX_PREFILL_TP_GROUP": object()},
    "expert parallelism": {"get_moe_ep_group": lambda: SimpleNamespace(world_size=2)},
    "decode context parallelism": {"_DCP": SimpleNamespace(world_size=2)},
}


@pytest.mark.parametrize("why", [None, *KEEPS_WHOLE])
@pytest.mark.parametrize("has_context", [False, True])
def test_what_keeps_all_of_a_servers_passes_whole(why, has_context):
    """From 0.5.15 on there is a group of decode contexts, of one card unless it is asked for."""
    context = {"_DCP": SimpleNamespace(world_size=1)} if has_context else {}
    state = SimpleNamespace(**GROUPS | context | KEEPS_WHOLE.get(why, {}))
    found = prompt_passes.of_server(state, TP, SimpleNamespace(world_size=1), "batches")
    assert [reason for reason, holds in found.items() if holds] == ([why] if why else [])


@pytest.mark.parametrize(
    ("module", "name", "why"),
    [
        (models_served, "is_compiled", "torch compiles the model"),
        (models_served, "is_looked_into", "what modules return is looked at (--forward-hooks)"),
    ],
)
def test_what_is_done_with_the_model_keeps_them_whole(monkeypatch, module, name, why):
    monkeypatch.setattr(module, name, lambda: True)
    found = prompt_passes.of_server(SimpleNamespace(**GROUPS), TP, SimpleNamespace(world_size=1), "batches")
    assert [reason for reason, holds in found.items() if holds] == [why]


def test_a_groups_sums_are_wrapped_once_by_each_who_asks():
    """Which is in front of every layer."""
    coordinator = SimpleNamespace(all_reduce=lambda x: x)
    wrapped = {"adds": lambda original, x: original(x) + 1, "doubles": lambda original, x: 2 * original(x)}
    for is_new in (True, False):
        assert [prompt_passes.wrap_sums_of(coordinator, *one) for one in wrapped.items()] == [is_new] * 2
        assert coordinator.all_reduce(1) == 4

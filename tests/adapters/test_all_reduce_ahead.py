"""When the process of the probe is started ahead, and that none stays where no probe comes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.ops import all_reduce_probe_process as process
from deepseek_v4_sm120.sglang_patches import all_reduce_ahead, device_gate, models_served
from deepseek_v4_sm120.sglang_patches.adapters import all_reduce as adapter

REPO = Path(__file__).resolve().parents[2]
OURS = {"model_type": "deepseek_v4", "hidden": 4096, "on_served_card": True, "summing_ranks": 2}
NO_TORCH = """
import sys
from deepseek_v4_sm120.sglang_patches import all_reduce_ahead
started = []
all_reduce_ahead.all_reduce_probe_process.start_ahead = lambda: started.append(True)
all_reduce_ahead.start()
print(started, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("told", "starts"),
    [
        (OURS, True),
        (OURS | {"summing_ranks": 8}, True),
        (OURS | {"summing_ranks": 0}, False),
        (OURS | {"summing_ranks": 1}, False),
        (OURS | {"summing_ranks": 16}, False),
        ({name: value for name, value in OURS.items() if name != "summing_ranks"}, False),
        (OURS | {"on_served_card": False}, False),
        (OURS | {"several_hosts": True}, False),
        (OURS | {"ranks_come_and_go": True}, False),
        (OURS | {"model_type": "deepseek_v41"}, False),
        (OURS | {"hidden": 5120}, False),
        (None, False),
    ],
)
@pytest.mark.parametrize("is_ranks", [True, False])
def test_the_probes_process_is_started_ahead_where_there_will_be_a_probe(told, starts, is_ranks, monkeypatch):
    """Not in the controller of data parallelism, nor in what comes by way of it."""
    calls = []
    if is_ranks:
        monkeypatch.delitem(sys.modules, all_reduce_ahead.CONTROLLER, raising=False)
    else:
        monkeypatch.setitem(sys.modules, all_reduce_ahead.CONTROLLER, ModuleType(all_reduce_ahead.CONTROLLER))
    monkeypatch.setattr(models_served, "announced", lambda: told)
    monkeypatch.setattr(process, "start_ahead", lambda: calls.append("ahead"))
    all_reduce_ahead.start()
    assert calls == ["ahead"] * (starts and is_ranks)


def test_what_starts_it_is_told_by_the_parent_and_needs_no_torch(monkeypatch):
    environ = {}
    monkeypatch.setattr(models_served, "_announced", None)
    models_served.announce({"model_type": "deepseek_v4", "hidden_size": 4096}, environ, summing_ranks=2)
    models_served.announce_served_card(environ)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-c", NO_TORCH], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[True]", "False"]


# ---- where no probe comes


class Ahead:
    def __init__(self):
        self.ends = 0

    def end(self):
        self.ends += 1


class Theirs:
    def __init__(self, group, device):
        self.disabled = False


@pytest.fixture
def a_rank(monkeypatch):
    """a_rank(told) -> in rank 1 of 2 of a server of which that was told; the groups behind it are not made yet."""

    def become(told):
        monkeypatch.setattr(models_served, "announced", lambda: told)
        state = ModuleType(adapter.PARALLEL_STATE)
        state._TP = None
        monkeypatch.setitem(sys.modules, adapter.PARALLEL_STATE, state)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
        monkeypatch.setattr(torch.distributed, "all_gather_object", gathered)
        monkeypatch.setattr(adapter.report, "write", lambda *_: None)
        monkeypatch.setattr(adapter.report, "_notes", {})
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
        monkeypatch.setattr(device_gate, "serves_capability", lambda *_: True)
        monkeypatch.setattr(adapter.several_hosts, "ask", lambda: None)
        monkeypatch.setattr(adapter, "_most_rows", lambda: 8)
        return state

    return become


@pytest.mark.parametrize("why", ["several_hosts", "not served", "too many rows", "raises", "asked"])
def test_what_was_started_ahead_ends_where_no_probe_asks_it(why, a_rank, monkeypatch):
    ahead = Ahead()
    a_rank(OURS | {why: True})
    monkeypatch.setattr(process, "_ahead", [ahead])
    monkeypatch.setattr(device_gate, "serves_capability", lambda *_: why != "not served")
    monkeypatch.setattr(adapter, "_most_rows", lambda: 513 if why == "too many rows" else 8)
    verdict = SimpleNamespace(peers_fail=False, transport=None, describe=lambda: "none", as_dict=dict)

    def probe(*_, **__):
        assert why in ("raises", "asked"), "no probe"
        if why == "raises":
            raise RuntimeError("a rank is lost")
        process._ahead.pop()
        return verdict

    monkeypatch.setattr(adapter.all_reduce_probe, "probe", probe)
    make = adapter.replace_dispatch(lambda group, device: Theirs)(group="group", device=torch.device("cuda", 1))
    if why == "raises":
        with pytest.raises(RuntimeError, match="a rank is lost"):
            make(group="group", device=torch.device("cuda", 1))
    else:
        assert type(make(group="group", device=torch.device("cuda", 1))) is Theirs
    assert process._ahead == [] and ahead.ends == (why != "asked")


def gathered(told, value, group):
    told[:] = [value] * len(told)


# ---- what is found in front of NCCL's start


@pytest.fixture
def probed(monkeypatch):
    """The number of probes, each of which finds that peers fail and host memory is no way either."""
    verdict, calls = SimpleNamespace(peers_fail=True, transport=None, describe=lambda: "none", as_dict=dict), []
    monkeypatch.setattr(adapter.all_reduce_probe, "probe", lambda *_, **__: calls.append(1) or verdict)
    monkeypatch.setattr(adapter, "_found_ahead", {})
    monkeypatch.setattr(adapter, "_without_peers", set())
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(adapter.patching, "active_engine", lambda: SimpleNamespace(in_place=lambda: {"all_reduce"}))
    return verdict, calls


DEVICE = torch.device("cuda", 1)


def test_what_is_found_in_front_of_nccl_is_not_asked_again(a_rank, probed):
    verdict, calls = probed
    a_rank(OURS)
    assert adapter.find_ahead("group", DEVICE) is verdict and calls == [1]
    made = adapter.replace_dispatch(lambda group, device: Theirs)(group="group", device=DEVICE)("group", DEVICE)
    assert calls == [1] and made.disabled and adapter._found_ahead == {}
    adapter.replace_dispatch(lambda group, device: Theirs)(group="another", device=DEVICE)("another", DEVICE)
    assert calls == [1, 1]  # of a group of which nothing was found in front


def test_what_stands_against_a_probe_is_not_asked_again_either(a_rank, probed, monkeypatch):
    a_rank(OURS)
    monkeypatch.setattr(adapter, "_most_rows", lambda: 513)
    assert adapter.find_ahead("group", DEVICE) is None
    monkeypatch.setattr(adapter, "_most_rows", lambda: pytest.fail("asked again"))
    made = adapter.replace_dispatch(lambda group, device: Theirs)(group="group", device=DEVICE)("group", DEVICE)
    assert not made.disabled and probed[1] == []


@pytest.mark.parametrize("what", ["another group", "three ranks", "left out", "no engine", "told otherwise"])
def test_where_there_will_be_no_probe_none_is_asked_in_front(what, a_rank, probed, monkeypatch):
    state = a_rank(OURS | ({"summing_ranks": 0} if what == "told otherwise" else {}))
    state._TP = object() if what == "another group" else None
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 3 if what == "three ranks" else 2)
    if what in ("left out", "no engine"):
        engine = None if what == "no engine" else SimpleNamespace(in_place=set)
        monkeypatch.setattr(adapter.patching, "active_engine", lambda: engine)
    assert adapter.find_ahead("group", DEVICE) is None and probed[1] == [] and adapter._found_ahead == {}


@pytest.mark.parametrize("failing, are_all", [((), False), ((0, 1), False), ((0, 1, 2), True)])
def test_a_group_between_cards_whose_peers_fail_sums_by_none(failing, are_all, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0, 2])
    monkeypatch.setattr(adapter, "_without_peers", set(failing))
    assert adapter._is_without_peers("group") is are_all

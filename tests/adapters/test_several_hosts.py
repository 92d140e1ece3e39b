"""Ranks of several hosts that look for what the others run, in torch's own store: all with us, one without us, one with
another build or other settings; and where in a rank's start that is."""

import concurrent.futures
import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.patching import profile, report
from deepseek_v4_sm120.patching.spec import PatchError
from deepseek_v4_sm120.sglang_patches import models_served, several_hosts
from deepseek_v4_sm120.sglang_patches.adapters import all_reduce
from deepseek_v4_sm120.sglang_patches.table import TABLE

REPO = Path(__file__).resolve().parents[2]
RANKS = 4


ARGUMENTS = SimpleNamespace(chunked_prefill_size=4096, max_running_requests=8, node_rank=0)


def engine(version="0.5.23", patches=("mhc", "wo_a"), used=None, code="ours", arguments=ARGUMENTS, **chosen):
    return SimpleNamespace(
        code=code,
        arguments=arguments,
        table=TABLE,
        host="sglang",
        version=version,
        in_place=lambda: set(patches),
        settings=settings.Settings(choices=chosen),
        profile=used or profile.Profile(),
    )


def said(monkeypatch, caplog, engines):
    """What each rank says; None among the engines: a rank that lacks us."""
    runs, store = {}, torch.distributed.HashStore()
    wait_s = 0.5 if None in engines else 30.0
    monkeypatch.setattr(report, "_notes", {})
    monkeypatch.setattr(models_served, "_hosts_are_alike", False)
    monkeypatch.setattr(models_served, "announced", lambda: {"model_type": "deepseek_v4", "several_hosts": True})
    for rank, one in enumerate(engines):
        if one is not None:
            monkeypatch.setattr(several_hosts.patching, "active_engine", lambda one=one: one)
            monkeypatch.setattr(several_hosts, "_code", lambda one=one: one.code)
            monkeypatch.setattr(several_hosts, "server_arguments", lambda one=one: one.arguments)
            runs[rank] = several_hosts._what_runs()
    ranks = iter(runs)
    monkeypatch.setattr(several_hosts, "_what_runs", lambda: runs[next(ranks)])
    with concurrent.futures.ThreadPoolExecutor(len(engines)) as pool, caplog.at_level(logging.WARNING):
        started = [pool.submit(several_hosts.compare, rank, len(engines), store, wait_s) for rank in runs]
        return [one.result() for one in started]


def test_where_all_run_the_same_nothing_is_warned_of(monkeypatch, caplog):
    assert said(monkeypatch, caplog, [engine() for _ in range(RANKS)]) == [several_hosts.ALIKE] * RANKS
    assert caplog.text == "" and "all of them run" in report._notes["several_hosts"][0]()
    assert not models_served.may_have_unlike_hosts()


def test_a_rank_without_us_is_named_by_all_others_and_waited_for_no_longer(monkeypatch, caplog):
    for text in said(monkeypatch, caplog, [engine(), None, None]):
        assert text.startswith("ranks 1, 2 of 3 without deepseek_v4_sm120") and several_hosts.REMEDY in text
    assert "several_hosts: ranks 1, 2 of 3" in caplog.text and "1, 2 of 3" in report._notes["several_hosts"][0]()


WINNER = profile.Profile("/a/profile.json", {"mhc": {"winner": "ours", "left_out": {"ours, split": "slower"}}})


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (engine(code="another"), "rank 1 has another code: another, here ours"),
        (
            engine(arguments=SimpleNamespace(chunked_prefill_size=8192, max_running_requests=8)),
            "rank 1 has another arguments: {'chunked_prefill_size': '8192'}, here {'chunked_prefill_size': '4096'}",
        ),
        (engine(version="0.5.22"), "rank 1 has another sglang: 0.5.22, here 0.5.23"),
        (engine(patches=("mhc",)), "rank 1 has no others in place, and not wo_a"),
        (engine(patches=("mhc", "wo_a", "router_topk")), "rank 1 has router_topk in place, and not fewer"),
        (engine(dealt_index="off"), "rank 1 has another DSV4_SM120_SET: {'dealt_index': 'off'}, here {}"),
        (engine(used=WINNER), "rank 1 has another DSV4_SM120_PROFILE: {'winners': {'mhc': 'ours'}"),
    ],
)
def test_a_rank_with_another_build_or_other_settings_is_named(other, words, monkeypatch, caplog):
    first, second = said(monkeypatch, caplog, [engine(), other])
    assert first.startswith(words) and second.startswith("rank 0 has ") and words in caplog.text
    assert models_served.may_have_unlike_hosts()


def test_what_differs_by_its_nature_is_alike(monkeypatch, caplog):
    """Of each host its own number; and who records for `layers`, one rank of all."""
    of_second = SimpleNamespace(**{**vars(ARGUMENTS), "node_rank": 1})
    others = engine(arguments=of_second), engine(patches=("mhc", "wo_a", "layers"))
    assert set(said(monkeypatch, caplog, [engine(), *others])) == {several_hosts.ALIKE}


@pytest.mark.parametrize("ranks", [1, 2, 16])
@pytest.mark.parametrize(
    ("hosts", "card", "bound"), [(2, True, False), (1, True, False), (2, False, False), (2, True, True)]
)
def test_it_is_asked_once_where_the_first_group_is_made(hosts, card, bound, ranks, monkeypatch):
    """Of several hosts with cards of ours, whatever the number of ranks between which ours would sum."""
    told = {"model_type": "deepseek_v4", "hidden": 4096, "several_hosts": hosts > 1, "on_served_card": card}
    monkeypatch.setattr(models_served, "announced", lambda: told)
    state = SimpleNamespace(_TP="the group" if bound else None)
    monkeypatch.setattr(all_reduce.importlib, "import_module", lambda name: state)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: ranks)
    asked = []
    monkeypatch.setattr(several_hosts, "ask", lambda: asked.append("asked"))
    all_reduce.replace_dispatch(lambda group, device: "stock")(group="group", device="device")
    assert asked == ["asked"] * (hosts > 1 and card and not bound)


@pytest.mark.parametrize(
    "asks",
    [
        *({}, {"hosts": 1}, {"card": False}, {"world": 1}, {"tolerates": True}, {"alike": True}),
        *({"has_groups": False}, {"elastic": True}),
    ],
)
def test_a_rank_that_differs_stops_in_front_of_its_layers(asks, monkeypatch):
    asked = {"hosts": 2, "card": True, "world": 2, "tolerates": False, "alike": False, "has_groups": True} | asks
    told = {"model_type": "deepseek_v4", "several_hosts": asked["hosts"] > 1, "on_served_card": asked["card"]}
    told["ranks_come_and_go"], written = asked.get("elastic", False), []
    monkeypatch.setattr(models_served, "announced", lambda: told)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: asked["has_groups"])
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: asked["world"])
    chosen = settings.Settings(on_broken="warn" if asked["tolerates"] else "raise")
    monkeypatch.setattr(several_hosts.patching, "active_engine", lambda: SimpleNamespace(settings=chosen))
    monkeypatch.setattr(several_hosts.report, "write", lambda: written.append("the report"))
    monkeypatch.setattr(
        several_hosts, "ask", lambda wait_s: several_hosts.ALIKE if asked["alike"] else "rank 1 differs"
    )
    if asks:
        several_hosts.stop_unless_alike()
        assert not written
        return
    with pytest.raises(PatchError, match=r"several_hosts: rank 1 differs. DSV4_SM120_ON_BROKEN=warn there"):
        several_hosts.stop_unless_alike()
    assert written == ["the report"]


def test_other_code_is_told_and_the_same_in_another_folder_is_not(monkeypatch, tmp_path):
    def code(folder, **files):
        for name, text in files.items():
            place = tmp_path / folder / "fixes" / name.replace("_", ".")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        monkeypatch.setattr(several_hosts.deepseek_v4_sm120, "__file__", str(tmp_path / folder / "__init__.py"))
        return several_hosts._code()

    first = code("first", a_py="1", b_py="2")
    assert code("second", a_py="1", b_py="2", reads_json="{}") == first and len(first) == 16
    others = [code("third", a_py="1"), code("third", b_py="3"), code("fourth", a_py="2", b_py="1")]
    assert len({first, *others}) == 4


@pytest.mark.parametrize("names", [("get_server_args",), ("get_global_server_args",), ()])
def test_the_arguments_are_asked_where_a_release_has_them(names, monkeypatch):
    """The newer name first; 0.5.14 has that module without it, earlier ones have none."""
    for package in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, package, SimpleNamespace(__path__=[]))
    told = SimpleNamespace(**dict.fromkeys(names, lambda: "by the context"))
    if names:
        monkeypatch.setitem(sys.modules, several_hosts.CONTEXT, SimpleNamespace(__spec__="there", **vars(told)))
    by_arguments = SimpleNamespace(get_global_server_args=lambda: "by the arguments")
    monkeypatch.setitem(sys.modules, several_hosts.SERVER_ARGS, by_arguments)
    is_new = names == ("get_server_args",)
    assert several_hosts.server_arguments() == ("by the context" if is_new else "by the arguments")


def test_ranks_look_at_each_other_once(monkeypatch):
    """Where the group is made, and not again in front of the layers."""
    looked = []
    monkeypatch.setattr(several_hosts, "_found", None)
    monkeypatch.setattr(several_hosts, "compare", lambda *given: looked.append(given[-1]) or "rank 1 differs")
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: "the store")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert several_hosts.ask() == several_hosts.ask(several_hosts.LAYERS_WAIT_S) == "rank 1 differs"
    assert looked == [several_hosts.WAIT_S]


def test_the_engine_asks_in_front_of_the_layers_that_this_table_names():
    module, _, name = TABLE.agrees.partition(":")
    assert getattr(sys.modules[module], name) is several_hosts.stop_unless_alike


RANK = """
import json, os, sys, time
import torch.distributed
from types import SimpleNamespace
from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.sglang_patches import several_hosts
rank, place, other = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
several_hosts._what_runs = lambda: {"code": rank if other == "another" else 0}
several_hosts.LAYERS_WAIT_S = 0.5 if other == "without" else 30.0
several_hosts.patching.active_engine = lambda: SimpleNamespace(settings=settings.Settings())
report.write = lambda: None
if rank == 1:  # which has left its word, and looks when the process with the store is about to end
    told = several_hosts._told
    several_hosts._told = lambda *given: time.sleep(0.7) or told(*given)
if rank == 0 or other != "without":
    several_hosts.stop_unless_alike()
torch.distributed.barrier()
print("goes on")
"""


@pytest.mark.parametrize("other", ["another", "without"])
def test_processes_that_differ_stop_and_one_without_us_does_not_wait_for_ever(other, torch_python):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    told = {"model_type": "deepseek_v4", "several_hosts": True, "on_served_card": True}
    environ = os.environ | {
        "PYTHONPATH": str(REPO),
        "GLOO_SOCKET_IFNAME": "lo",
        models_served.VARIABLE: json.dumps(told),
    }
    started = [
        subprocess.Popen(
            [*torch_python(), "-c", RANK, str(rank), place, other],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        for rank in range(2)
    ]
    ended = [one.communicate(timeout=120) for one in started]
    assert [out for out, _ in ended] == [""] * 2, ended
    words = {"another": "rank 1 has another code: 1, here 0", "without": "rank 1 of 2 without deepseek_v4_sm120"}
    assert "PatchError" in ended[0][1] and words[other] in ended[0][1]
    assert ("rank 0 has another code" if other == "another" else "Connection closed by peer") in ended[1][1]

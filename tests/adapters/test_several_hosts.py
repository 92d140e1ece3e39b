"""Ranks of several hosts that look for what the others run, in torch's own store: all with us, one without us, one with
another build or other settings; and where in a rank's start that is."""

import concurrent.futures
import logging
import os
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.patching import profile, report
from deepseek_v4_sm120.sglang_patches import models_served, several_hosts
from deepseek_v4_sm120.sglang_patches.adapters import all_reduce

REPO = Path(__file__).resolve().parents[2]
RANKS = 4


def engine(build="a build", version="0.5.23", patches=("mhc", "wo_a"), used=None, **chosen):
    return SimpleNamespace(
        build=build,
        host="sglang",
        version=version,
        in_place=lambda: set(patches),
        settings=settings.Settings(choices=chosen),
        profile=used or profile.Profile(),
    )


def said(monkeypatch, caplog, engines):
    """What each rank says; None among the engines: a rank that lacks us."""
    runs, store = {}, torch.distributed.HashStore()
    monkeypatch.setattr(several_hosts, "WAIT_S", 0.5 if None in engines else 30.0)
    monkeypatch.setattr(report, "_notes", {})
    monkeypatch.setattr(several_hosts.patching, "active_engine", lambda: engines[0])
    for rank, one in enumerate(engines):
        if one is not None:
            monkeypatch.setattr(several_hosts.patching, "active_engine", lambda one=one: one)
            runs[rank] = several_hosts._what_runs()
    ranks = iter(runs)
    monkeypatch.setattr(several_hosts, "_what_runs", lambda: runs[next(ranks)])
    with concurrent.futures.ThreadPoolExecutor(len(engines)) as pool, caplog.at_level(logging.WARNING):
        started = [pool.submit(several_hosts.compare, rank, len(engines), store) for rank in runs]
        return [one.result() for one in started]


def test_where_all_run_the_same_nothing_is_warned_of(monkeypatch, caplog):
    assert said(monkeypatch, caplog, [engine() for _ in range(RANKS)]) == [several_hosts.ALIKE] * RANKS
    assert caplog.text == "" and "all of them run" in report._notes["several_hosts"][0]()


def test_a_rank_without_us_is_named_by_all_others_and_waited_for_no_longer(monkeypatch, caplog):
    for text in said(monkeypatch, caplog, [engine(), None, None]):
        assert text.startswith("ranks 1, 2 of 3 without deepseek_v4_sm120") and several_hosts.REMEDY in text
    assert "several_hosts: ranks 1, 2 of 3" in caplog.text and "1, 2 of 3" in report._notes["several_hosts"][0]()


WINNER = profile.Profile("/a/profile.json", {"mhc": {"winner": "ours", "left_out": {"ours, wide": "slower"}}})


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (engine(build="another"), "rank 1 has another build: another, here a build"),
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


RANK = """
import sys
import torch.distributed
from deepseek_v4_sm120.sglang_patches import several_hosts
rank, place, has_us = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
several_hosts._what_runs, several_hosts.WAIT_S = lambda: {"build": rank if has_us else 0}, 0.5 if not has_us else 30.0
if rank == 0 or has_us:
    several_hosts.ask()
torch.distributed.barrier()
print("goes on")
"""


@pytest.mark.parametrize("has_us", [True, False])
def test_processes_find_each_other_and_one_without_us_goes_on_beside(has_us, torch_python):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [*torch_python(), "-c", RANK, str(rank), place, str(has_us)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(REPO), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    ended = [one.communicate(timeout=120) for one in started]
    assert [out for out, _ in ended] == ["goes on\n"] * 2, ended
    words = "rank 1 has another build: 1, here 0" if has_us else "rank 1 of 2 without deepseek_v4_sm120"
    assert words in ended[0][1] and ("rank 0 has another build" in ended[1][1]) is has_us

"""doctor where a host has several servers: cards by what every nvidia-smi calls them, and each server by itself."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from deepseek_v4_sm120.commands.doctor import command, cpu_checks, cpus, facts, gpu_checks, http_get, servers
from deepseek_v4_sm120.commands.doctor import server as asked_server
from deepseek_v4_sm120.commands.doctor.software_checks import checks as software_checks
from deepseek_v4_sm120.patching import lifetime
from tests.doctor.test_health import ANSWER, health
from tests.doctor.test_machine import CARD, finding, gathered, rtx
from tests.doctor.test_server import PLANNED

# a server: its first process listens, and starts two ranks, one by way of a process that reports nothing
SERVER = """
import os, socket, subprocess, sys
if len(sys.argv) > 1:
    if sys.argv[1] == "between":
        subprocess.Popen([sys.executable, __file__, "rank"]).wait()
    print(os.getpid(), flush=True)
    sys.stdin.read()
    sys.exit()
listener = socket.create_server(("127.0.0.1", 0))
rank, between = (subprocess.Popen([sys.executable, __file__, kind]) for kind in ("rank", "between"))
print(os.getpid(), listener.getsockname()[1], between.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def two(tmp_path):
    """Two servers: (numbers of its processes that report, the first one's in front; its port) each."""
    (tmp_path / "server.py").write_text(SERVER)
    started, found = [], []
    for _ in range(2):
        words = [sys.executable, str(tmp_path / "server.py")]
        one = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(one)
        told = [one.stdout.readline().split() for _ in range(3)]
        first, port, between = map(int, next(words for words in told if len(words) == 3))
        ranks = [int(words[0]) for words in told if len(words) == 1]
        assert between not in ranks
        found.append(([first, *ranks], port))
    yield found
    for one in started:
        one.communicate()


def reports(pids, shadow=None, card=0):
    common = {"process": lifetime.of_this(), "patches": [], "notes": [], "shadow_summary": [], "shadow": []}
    common |= {"settings": {"shadow": shadow, "layers": shadow and "/tmp/layers"}}
    return [{**common, "pid": pid, "devices_served": {str(card + i // 2): True}} for i, pid in enumerate(pids)]


@pytest.fixture
def status(two, monkeypatch):
    """What both have reported: the first runs in shadow mode, and each counts its cards from 0."""
    (one, _), (other, _) = two
    found = {"build": {"problem": "none"}, "patches": [], "defaults": [], "profile": None, "settings": {}}
    found["processes"] = reports(one, "1") + reports(other)
    monkeypatch.setattr(facts, "_status", lambda: ({**found, "processes": list(found["processes"])}, None))
    return found


def here(port=None):
    return facts.gather(Path("/"), {}, lambda words: None, port)


def test_processes_are_of_the_server_that_started_them(two):
    (one, port), (other, other_port) = two
    first = servers.first_ones(Path("/"), [*reversed(one), *other])
    assert first == dict.fromkeys(one, one[0]) | dict.fromkeys(other, other[0])
    assert servers.first_at(Path("/"), first, port) == one[0]
    assert servers.first_at(Path("/"), first, other_port) == other[0]
    assert servers.first_at(Path("/"), first, 1) is None
    assert servers.first_ones(Path("/"), [lifetime.MOST + 1]) == {lifetime.MOST + 1: lifetime.MOST + 1}


def test_a_server_that_is_asked_is_judged_by_its_own_reports(two, status, monkeypatch, capsys):
    """The other one's shadow mode, variables and profile are none of its own."""
    (one, port), (other, other_port) = two
    told = {}
    monkeypatch.setattr(asked_server, "ask", lambda url, key: asked_server.Answers(PLANNED, None))
    monkeypatch.setattr(command, "show", lambda found: told.update({f.check: f for f in found}))
    for asked, pids, is_shadowed in ((port, one, True), (other_port, other, False)):
        told.clear()
        given = {"url": f"http://127.0.0.1:{asked}", "quick": True, "json": False}
        command.run(Namespace(**dict.fromkeys(("api_key", "out", "log", "profile")), **given))
        assert ("shadow mode" in told) is ("layers" in told) is is_shadowed
        assert {f"process {pid}" for pid in pids} == {name for name in told if name.startswith("process ")}
    assert len(here(1).servers) == 6  # of a port that nobody has here, as through Docker: all that is known


def test_without_an_address_several_are_told(two, status):
    found = list(software_checks(here()))
    assert "reports of 2 servers" in finding(found, "running servers").found
    status["processes"] = status["processes"][:3]
    assert not [one for one in software_checks(here()) if one.check == "running servers"]


def test_ranks_are_counted_server_by_server(two, status, tmp_path):
    """By CUDA_VISIBLE_DEVICES each has the cards 0 and 1."""
    found = gathered(tmp_path, rtx(4))
    found.status, found.servers = status, here().servers
    found.cpus = cpus.Cpus(allowed=frozenset(range(5)))
    assert "4 ranks want 6" in finding(cpu_checks.checks(found), "CPUs").found


@pytest.mark.parametrize(
    ("url", "port"),
    [("http://127.0.0.1:30000", 30000), ("http://[::1]:7/", 7), ("http://host", 80), ("https://host/", 443)],
)
def test_the_port_of_an_address(url, port):
    assert http_get.port_of(http_get.check_url(url)) == port


# ---- cards


def test_what_is_to_be_done_to_a_card_names_its_place_on_the_bus(tmp_path):
    """A container that was given the cards 2 and 3 calls them 0 and 1; the host, where it is to be done, does not."""
    xml = rtx(limit="300").replace(" </gpu>", "<mig_mode><current_mig>Enabled</current_mig></mig_mode></gpu>")
    found = list(gpu_checks.checks(gathered(tmp_path, xml)))
    assert "nvidia-smi -i 0000:02:00.0 -pl 600" in finding(found, "power of GPU 1").fix
    assert "nvidia-smi -i 0000:02:00.0 -mig 0" in finding(found, "MIG of GPU 1").fix
    for field, now in (("gpu_recovery_action", "Reset"), ("remapped_row_pending", "Yes")):
        before, tag, rest = ANSWER.partition(f"<{field}>")
        (one,) = health(tmp_path, before + tag + now + rest[rest.index("<") :])["health of GPU 0"]
        assert "nvidia-smi -r -i 0000:00:06.0" in one.fix


@pytest.mark.parametrize(
    ("environ", "kinds", "used"),
    [
        ({}, 1, {0, 1, 2, 3}),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, 1, {2, 3}),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, 2, {0, 1, 2, 3}),  # CUDA's numbers, the fastest first
        ({"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 2, {2, 3}),
        ({"CUDA_VISIBLE_DEVICES": "7"}, 1, {0, 1, 2, 3}),
    ],
)
def test_without_trials_the_cards_are_those_that_cuda_is_left(tmp_path, environ, kinds, used):
    """Beside a running server nothing is tried; a pair of another one's cards is not called slow."""
    xml = rtx(4) if kinds == 1 else rtx(4).replace(CARD, "RTX 4090", 1)
    assert gathered(tmp_path, xml, environ).used == used


@pytest.mark.parametrize(("left", "is_tried"), [("2,3", True), ("1,2", False)])
def test_cards_beside_those_of_a_server_are_tried(tmp_path, monkeypatch, left, is_tried):
    head, *rest = rtx(4).split("<used>0 MiB")
    xml = head + "".join(f"<used>{97_000 * (i < 2)} MiB{one}" for i, one in enumerate(rest))
    found = gathered(tmp_path, xml, {"CUDA_VISIBLE_DEVICES": left})
    assert [gpu.memory_used for gpu in found.smi.gpus] == [97_000, 97_000, 0, 0]
    tried = []
    monkeypatch.setattr(command.probe, "run", lambda *_: tried.append(True) or (None, None))
    command._probe(found)
    assert bool(tried) is is_tried


def test_nobody_is_told_to_stop_a_server_on_other_cards(tmp_path):
    xml = rtx(4, **{"<used>0 MiB": "90000 MiB"})
    found = gathered(tmp_path, xml, {"CUDA_VISIBLE_DEVICES": "2,3"})
    told = {f.check for f in gpu_checks.checks(found) if f.check.startswith("memory")}
    assert told == {"memory of GPU 2", "memory of GPU 3"}


@pytest.mark.parametrize("mode", ["Default", "Exclusive_Process", "Prohibited"])
def test_cards_that_let_one_process_compute_are_told(tmp_path, mode):
    """By which hosts keep servers apart; a server's ranks start their sums' probe on the same cards."""
    xml = rtx().replace(" </gpu>", f"<compute_mode>{mode}</compute_mode></gpu>", 1)
    found = {f.check: f for f in gpu_checks.checks(gathered(tmp_path, xml))}
    assert "compute mode of GPU 1" not in found
    assert ("compute mode of GPU 0" in found) is (mode != "Default")
    assert mode == "Default" or "-i 0000:01:00.0 -c 0;" in found["compute mode of GPU 0"].fix


@pytest.mark.parametrize("container", [True, False])
def test_a_containers_numbers_are_told_with_their_places(tmp_path, container):
    found = gathered(tmp_path, rtx())
    found.is_container = container
    assert ("0 at 0000:01:00.0, 1 at 0000:02:00.0" in finding(gpu_checks.checks(found), "GPU").found) is container

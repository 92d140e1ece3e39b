"""plan and serve where the cards are in several hosts, and where a card's memory is the host's (GB10)."""

import dataclasses
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.__main__ import main
from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.plan import cards, choices, command, hosts, launch, memory, models, roofline
from deepseek_v4_sm120.commands.plan.remedies import remedies
from deepseek_v4_sm120.commands.serve import command as serve
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import every_release, fetch
from tests.test_plan import flags, request

SPARK = {"card": cards.GB10, "memory_mib": int(128 * cards.SPARK_MIB_PER_GB), "concurrency": 4, "context": 131_072}
TWO = {**SPARK, "gpus": 2, "nodes": 2}
OF_HOSTS = ("--nnodes", "--node-rank", "--dist-init-addr")
UTILS = "sglang.srt.utils.common"


@every_release()
def test_of_an_integrated_gpu_sglang_asks_what_the_system_has_left(version):
    """Which is why a plan of one begins with the host's memory, in every release."""
    properties = SimpleNamespace(is_integrated=True)
    cuda = SimpleNamespace(device_count=lambda: 1, current_device=lambda: 0, get_device_properties=lambda _: properties)
    cuda.empty_cache, cuda.mem_get_info = lambda: None, lambda *_: (7 << 30, 128 << 30)
    system = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=100 << 30))
    names = {"torch": SimpleNamespace(cuda=cuda), "psutil": system, "empty_device_cache": lambda _: None}
    free = take(fetch(version), names, "get_available_gpu_memory", UTILS)
    assert free("cuda", 0) == 100.0
    properties.is_integrated = False
    assert free("cuda", 0) == 7.0


def test_one_spark_does_not_hold_it_and_two_do():
    alone = launch.make(request(**{**SPARK, "gpus": 1}))
    assert not alone.fits and "--nodes 2" in remedies(alone.request) and "121.0 GB for them" in command.why_not(alone)
    two = launch.make(request(**TWO))
    assert two.fits and not two.is_tight and two.fraction == cards.MOST_FRACTION_OF_HOST
    taken = two.card_bytes - two.free_bytes
    assert taken == pytest.approx(cards.OF_THE_SYSTEM + memory.AT_START)
    assert two.left_free + sum(r.bytes for r in two.reserves) >= 0.19 * two.free_bytes


def test_a_plan_of_several_hosts_counts_on_nothing_that_one_host_alone_has():
    of_one = launch.make(request(gpus=4, concurrency=8))
    two = launch.make(request(gpus=4, concurrency=8, nodes=2))
    assert "sums between the cards" in {r.what for r in of_one.reserves} - {r.what for r in two.reserves}
    assert of_one.captured and not two.captured and not two.halves
    assert not {"prefill_graphs", "prompts_in_halves", "dealt_products"} & {
        name.partition("=")[0] for name, _ in choices.of(two, None)
    }
    asked = dataclasses.replace(two.request, prefill_graphs=1024, also_set={"dealt_index": "on", "mhc": "off"})
    told = choices.in_vain(asked)
    assert len(told) == 2 and all("for the cards of one host" in text for text in told)
    assert set(OF_HOSTS) == set(flags(two)) - set(flags(of_one)) and flags(two)["--tp-size"] == "4"


def test_each_host_has_its_own_number_and_all_else_alike(capsys):
    words = ["plan", "--card", "gb10", "--gpus", "1", "--nodes", "2", "--sglang", "0.5.23", "--context", "131072"]
    assert main([*words, "--concurrency", "4", "--dist-init-addr", "10.0.0.1:5000", "--interface", "enp1s0f1np1"]) == 0
    out = capsys.readouterr().out
    lines = [line.strip() for line in out.splitlines() if "sglang.launch_server" in line]
    assert len(lines) == 4 and "on 1 GB10 of" in out and "in each of 2 hosts" in out and "273 GB/s" in out
    first, docker, second, _ = lines
    assert first.replace("--node-rank 0", "--node-rank 1") == second != first
    assert first.endswith("--nnodes 2 --node-rank 0 --dist-init-addr 10.0.0.1:5000")
    assert hosts.DOCKER in docker and " -p " not in docker and "--host 127.0.0.1" in docker
    assert all(f"{name}=enp1s0f1np1" in line for name in hosts.SOCKETS for line in lines)


def test_the_ceiling_of_sparks_is_their_memorys_and_the_networks():
    rows = command.speed_rows(launch.make(request(**TWO)))
    read = roofline.step_bytes(models.FLASH, 2, 1, 8192, wo_a_bf16=False) / 273e9
    assert float(rows[0][2]) == pytest.approx(1e3 * (read + 87 * (20e-6 + 8192 / 22e9)), abs=0.01)
    assert [row[4] for row in rows] == ["-", "-"]  # what others published is of other cards
    of_pro = launch.make(request(gpus=4, nodes=2))
    assert float(command.speed_rows(of_pro)[0][2]) > float(command.speed_rows(launch.make(request(gpus=4)))[0][2]) + 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "0"], "--nodes must be 1 to 8"),
        (["--nodes", "3"], "--gpus 2 on each of --nodes 3 are 6 cards; Flash divides into"),
        (["--nodes", "2", "--dist-init-addr", "somewhere"], "--dist-init-addr must be the first host's address"),
        (["--nodes", "2", "--dist-init-addr", "host:99999"], "--dist-init-addr must be the first host's address"),
        (["--interface", "eth0"], "--dist-init-addr and --interface are for several hosts"),
    ],
)
def test_what_is_no_number_of_hosts_is_refused(words, said, capsys):
    assert main(["plan", "--gpus", "2", "--memory", "96", *words]) == 2
    assert said in capsys.readouterr().err


SERVED = ["serve", "--dry-run", "--gpus", "1", "--card", "gb10", "--sglang", "0.5.23", "--context", "131072"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "2"], "wants this host's number: --node-rank 0 to 1"),
        (["--nodes", "2", "--node-rank", "2"], "wants this host's number"),
        (["--nodes", "2", "--node-rank", "1"], "wants --dist-init-addr"),
        (["--node-rank", "1"], "--node-rank is for several hosts"),
        (["--", "--nnodes", "2"], "--nnodes behind --: a plan is for so many hosts"),
        (["--", "--node-rank=1"], "--node-rank behind --"),
    ],
)
def test_a_server_of_several_hosts_is_asked_for_in_front_of_the_dashes(words, said, capsys):
    assert main([*SERVED, "--concurrency", "4", *words]) == 2
    assert said in capsys.readouterr().err


def test_serve_starts_this_hosts_part(capsys):
    words = ["--nodes", "2", "--node-rank", "1", "--dist-init-addr", "[fd00::1]:5000", "--concurrency", "4"]
    assert main([*SERVED, *words]) == 0
    out = capsys.readouterr().out
    assert "--nnodes 2 --node-rank 1 --dist-init-addr '[fd00::1]:5000'" in out and "--tp-size 2" in out
    assert serve.OF_HOSTS.issuperset(OF_HOSTS)


def test_hosts_of_which_one_is_not_told_are_none():
    with pytest.raises(CommandError):
        hosts.check(2, ":5000")
    hosts.check(2, None)

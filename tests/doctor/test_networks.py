"""The way to other hosts as doctor sees it: devices of RDMA, interfaces, and the variables that choose among them."""

import dataclasses
from pathlib import Path

import pytest

from deepseek_v4_sm120.commands.doctor import command, facts, gpu_checks, network_checks, networks
from deepseek_v4_sm120.commands.doctor.finding import NOT_RUN, OK, WARN
from deepseek_v4_sm120.commands.doctor.nvidia_smi import Gpu, Smi

NOTHING = (None, None)
SPARK = Gpu(0, "NVIDIA GB10", "000f:01:00.0", 0, 0, NOTHING, NOTHING, None, None, None, None, capability=(12, 1))
TWINS = ("rocep1s0f1", "roceP2p1s0f1")
BY_DEVICES = {"NCCL_IB_HCA": ",".join(TWINS)}
BY_CABLE = {"NCCL_SOCKET_IFNAME": "enp1s0f1np1", "GLOO_SOCKET_IFNAME": "enp1s0f1np1"}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


def host(root: Path, *, devices=TWINS, down=("rocep1s0f0",), mtu=9000, verbs=True, wifi=False) -> networks.Networks:
    """A DGX Spark: a cable in one port, which is two devices of 100 Gb/s and two interfaces."""
    for name in (*devices, *down):
        net = name.replace("roce", "en") + "np1"
        place, is_up = f"sys/class/infiniband/{name}/ports/1", name not in down
        state = "4: ACTIVE" if is_up else "1: DOWN"
        write(
            root, {f"{place}/state": state, f"{place}/rate": "100 Gb/sec (2X NDR)", f"{place}/link_layer": "Ethernet"}
        )
        (root / f"sys/class/infiniband/{name}/device/net/{net}").mkdir(parents=True)
        told = {"mtu": str(mtu), "operstate": "up" if is_up else "down"}
        write(root, {f"sys/class/net/{net}/{key}": text for key, text in told.items()})
    write(root, {"sys/class/net/lo/operstate": "unknown", "sys/class/net/lo/mtu": "65536"})
    if wifi:
        write(root, {"sys/class/net/wlP9s9/operstate": "up", "sys/class/net/wlP9s9/wireless/x": ""})
    if verbs:
        (root / "dev/infiniband").mkdir(parents=True)
    return networks.read(root)


def found(net, environ=None, gpus=(SPARK,), servers=None, hosts=None):
    smi = Smi(tuple(gpus), "580.95", "13.0", {})
    told = facts.Facts(smi, networks=net, environ=environ or {}, server_environ=servers or {}, hosts=hosts)
    return list(network_checks.checks(told))


def test_a_spark_with_its_cable_is_fine(tmp_path):
    (only,) = found(host(tmp_path), BY_DEVICES | BY_CABLE)
    assert only.state == OK and only.found == (
        "RDMA by roceP2p1s0f1 (enP2p1s0f1np1, 100 Gb/s), rocep1s0f1 (enp1s0f1np1, 100 Gb/s)"
    )
    assert found(host(tmp_path / "plain"), gpus=())[0].state == OK, "of a PC with such a card the same"


def test_a_machine_that_is_alone_is_asked_nothing(tmp_path):
    pro = dataclasses.replace(SPARK, name="NVIDIA RTX PRO 6000 Blackwell")
    net = host(tmp_path, devices=(), down=(), wifi=True)
    assert found(net, gpus=(pro,)) == []
    assert found(net, dict.fromkeys(BY_CABLE, "lo"), gpus=(pro,)) == [], "nobody else is at the loopback"
    assert found(net, dict.fromkeys(BY_CABLE, "eth7"), gpus=(pro,)), "two hosts"


def test_of_a_server_on_one_host_nothing_is_asked(tmp_path):
    net, asked = host(tmp_path, mtu=1500), {"NCCL_SOCKET_IFNAME": "eth7"}
    assert found(net, asked, hosts=1) == []
    assert len(found(net, asked, hosts=2)) == len(found(net, asked)) == 2


@pytest.mark.parametrize(
    ("of_host", "environ", "words", "fix"),
    [
        ({"devices": (), "down": ()}, {}, "no device of RDMA", "cable"),
        ({"devices": ()}, {}, "1 device(s), none active", "cable"),
        ({"verbs": False}, {}, "/dev/infiniband is not in this container", "--device /dev/infiniband"),
        ({}, {"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE=1 beside", "unset it"),
        ({}, {"NCCL_NET": "Socket"}, "NCCL_NET=Socket beside", "unset it"),
        ({}, {"NCCL_IB_HCA": "mlx5_0"}, "NCCL_IB_HCA=mlx5_0: none of them is active", "rocep1s0f1"),
        ({}, {"NCCL_IB_HCA": "=roce"}, "none of them is active", "rocep1s0f1"),
        ({}, {"NCCL_IB_HCA": "rocep1s0f1:1"}, "one of roceP2p1s0f1, rocep1s0f1", "NCCL_IB_HCA=roceP2p1s0f1,rocep1s0f1"),
        ({"mtu": 1500}, {}, "enP2p1s0f1np1, enp1s0f1np1 with an MTU of 1500", "mtu 9000"),
        ({}, {"NCCL_SOCKET_IFNAME": "eth0"}, "NCCL_SOCKET_IFNAME=eth0: not up here", "enp1s0f1np1"),
        ({}, {"GLOO_SOCKET_IFNAME": "enp1"}, "GLOO_SOCKET_IFNAME=enp1: not up here", "enp1s0f1np1"),
        ({}, {"NCCL_SOCKET_IFNAME": "enp1s0f0np1"}, "not up here", "enp1s0f1np1"),
        ({"wifi": True}, {}, "NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME unset beside wlP9s9", "-e GLOO_SOCKET_IFNAME="),
    ],
)
def test_what_keeps_hosts_apart_or_slow_is_named(of_host, environ, words, fix, tmp_path):
    (only,) = found(host(tmp_path, **of_host), environ)
    assert only.state == WARN and words in only.found and fix in only.fix and only.cost


@pytest.mark.parametrize(
    "environ",
    [{"NCCL_IB_HCA": "roce"}, {"NCCL_IB_HCA": "^mlx5"}, {"NCCL_SOCKET_IFNAME": "enp1"}, {"NCCL_SOCKET_IFNAME": "^lo"}],
)
def test_what_nccl_takes_by_the_beginning_of_a_name_is_fine(environ, tmp_path):
    assert [one.state for one in found(host(tmp_path), environ)] == [OK]


def test_a_hosts_name_at_its_own_loop_is_named(tmp_path):
    write(tmp_path, {"etc/hostname": "spark", "etc/hosts": "127.0.0.1 localhost\n127.0.1.1 spark.lan spark # its own"})
    net = host(tmp_path)
    (only,) = found(net)
    assert only.state == WARN and "/etc/hosts has spark at 127.x" in only.found
    assert found(net, BY_CABLE)[0].state == OK
    write(tmp_path, {"etc/hosts": "10.0.0.1 spark\n127.0.1.1 sparkle"})
    assert networks.read(tmp_path).looped == ""


def test_what_a_server_has_set_counts(tmp_path):
    net = host(tmp_path, wifi=True)
    assert found(net, servers={7: BY_CABLE})[0].state == OK
    assert found(net, BY_CABLE, servers={7: {"NCCL_NET": "socket"}})[0].state == WARN


def test_a_spark_has_no_link_and_its_memory_is_the_hosts(tmp_path):
    smi = Smi((SPARK,), "580.95", "13.0", {})

    def asked(memory, **more):
        told = facts.Facts(smi, host_memory=memory, **more)
        return {one.check: one for one in gpu_checks.checks(told) if one.check.endswith("GPU 0")}

    rows = asked((124611, 120000))
    assert rows["PCIe link of GPU 0"].found == "none: CPU and GPU are one chip"
    memory = rows["memory of GPU 0"]
    assert memory.state == OK and memory.found == "the host's: 120000 of 124611 MiB available"
    assert asked((124611, 90000))["memory of GPU 0"].state == WARN
    assert asked((124611, 9000), is_serving=True)["memory of GPU 0"].state == OK
    assert asked(None)["memory of GPU 0"].state == NOT_RUN
    write(tmp_path, {"proc/meminfo": "MemTotal:  127602060 kB\nMemFree: 1 kB\nMemAvailable: 122880000 kB"})
    assert facts._host_memory(tmp_path) == (124611, 120000) and facts._host_memory(tmp_path / "none") is None


def test_doctor_asks_them():
    assert network_checks in command.CHECKS

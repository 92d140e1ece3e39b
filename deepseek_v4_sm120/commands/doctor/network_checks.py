"""Checks of the way to other hosts: of a machine that has RDMA, or a GPU that holds the model only beside another's.
Of none where a server answers that has no other host."""

from __future__ import annotations

from collections.abc import Iterator

from deepseek_v4_sm120.commands.doctor.facts import Facts
from deepseek_v4_sm120.commands.doctor.finding import Finding, ok, warn
from deepseek_v4_sm120.commands.doctor.networks import Networks
from deepseek_v4_sm120.commands.plan import cards

BETWEEN = "network between hosts"
SOCKETS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
DEVICES, NO_RDMA, NET = "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET"
LOOPBACK = "lo"
WHOLE_PACKETS = 4200  # of an interface: RoCE then sends 4,096 bytes at a time, at 1,500 as Ethernet comes 1,024
BY_SOCKETS = "87 sums a step between the hosts go by TCP, each some 100 us and more for 20 to 30"


def checks(facts: Facts) -> Iterator[Finding]:
    net = facts.networks
    is_spark = any(cards.of_name(gpu.name).is_hosts for gpu in facts.smi.gpus)
    told = [facts.environ, *facts.server_environ.values()]
    environ = {name: value for one in told for name, value in one.items()}  # a server's own, where there is one
    is_asked = any(environ.get(name, LOOPBACK) not in ("", LOOPBACK) for name in (*SOCKETS, DEVICES))
    if facts.hosts == 1 or not (net.devices or is_spark or is_asked):
        return
    found = [*_rdma(net, environ, is_spark), *_sockets(net, environ)]
    yield from found
    if not found:
        yield ok(BETWEEN, f"RDMA by {', '.join(map(str, net.active))}")


def _rdma(net: Networks, environ: dict[str, str], is_spark: bool) -> Iterator[Finding]:
    active = {device.name: device for device in net.active}
    if not active:
        there = f"{len(net.devices)} device(s), none active" if net.devices else "no device of RDMA"
        yield warn(
            BETWEEN, there, BY_SOCKETS, "a cable between the ConnectX ports, and addresses; `ibdev2netdev` lists them"
        )
        return
    if not net.has_verbs:
        fix = "docker run --network host --device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1"
        yield warn(BETWEEN, "RDMA is there, /dev/infiniband is not in this container", BY_SOCKETS, fix)
    for name, off in ((NO_RDMA, ("1",)), (NET, ("socket",))):
        if environ.get(name, "").lower() in off:
            yield warn(BETWEEN, f"{name}={environ[name]} beside {', '.join(active)}", BY_SOCKETS, "unset it")
    asked = environ.get(DEVICES, "")
    names = [one.partition(":")[0] for one in asked.lstrip("=").split(",") if one]
    if asked and not asked.startswith("^"):
        taken = {one for one in active if any(one == n or (asked[0] != "=" and one.startswith(n)) for n in names)}
        if not taken:
            fix = f"one of {', '.join(active)}, or unset it"
            yield warn(BETWEEN, f"{DEVICES}={asked}: none of them is active here", BY_SOCKETS, fix)
        elif is_spark and len(taken) == 1 < len(active):
            fix = f"{DEVICES}={','.join(active)}"
            cost = "a Spark's port is two devices, of which each has half of its 200 Gb/s"
            yield warn(BETWEEN, f"{DEVICES}={asked}: one of {', '.join(active)}", cost, fix)
    mtus = {one.name: one.mtu for one in net.interfaces}
    small = [
        d.interface
        for d in active.values()
        if d.layer == "Ethernet" and (mtus.get(d.interface) or 9000) < WHOLE_PACKETS
    ]
    if small:
        cost = "RoCE sends 1,024 bytes at a time instead of 4,096; one pair so had 40% less of prompts than others'"
        fix = f"on both hosts, as root: ip link set {small[0]} mtu 9000 (netplan keeps it)"
        yield warn(BETWEEN, f"{', '.join(small)} with an MTU of {mtus[small[0]]}", cost, fix)


def _sockets(net: Networks, environ: dict[str, str]) -> Iterator[Finding]:
    up = {one.name for one in net.interfaces if one.is_up}
    waits = "the hosts do not find each other, and a start waits without a word"
    for name in SOCKETS:
        asked = environ.get(name, "")
        exact = name.startswith("GLOO") or asked.startswith("=")
        names = [one for one in asked.lstrip("=").split(",") if one]
        if names and not asked.startswith("^"):
            there = [one for one in up if any(one == n or (not exact and one.startswith(n)) for n in names)]
            if not there:
                yield warn(
                    BETWEEN, f"{name}={asked}: not up here", waits, f"of {', '.join(sorted(up - {LOOPBACK}))} that one"
                )
    if net.looped and not environ.get(SOCKETS[1]):
        found = f"/etc/hosts has {net.looped} at 127.x, and {SOCKETS[1]} is not set"
        cost = "gloo tells the other hosts that address, at which they find themselves: a start ends, or waits"
        yield warn(BETWEEN, found, cost, f"{SOCKETS[1]}=<the interface between the hosts>, on each")
    unset = [name for name in SOCKETS if not environ.get(name)]
    others = [one for one in net.interfaces if one.is_up and one.name != LOOPBACK and (one.is_wireless or one.is_made)]
    if unset and others:
        found = f"{', '.join(unset)} unset beside {', '.join(one.name for one in others)}"
        cable = next((d.interface for d in net.active if d.interface in up), "<interface>")
        fix = " ".join(f"-e {name}={cable}" for name in unset)
        yield warn(BETWEEN, found, f"they may be taken for the way to the other hosts: {waits}", fix)

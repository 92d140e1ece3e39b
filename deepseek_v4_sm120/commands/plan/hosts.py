"""What a plan says where the cards are in several hosts: each starts the same server, with its own number."""

from __future__ import annotations

import dataclasses

from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.plan.request import Flag, Plan, Request

RANK, PORT = "--node-rank", 20000
FIRST_HOST = f"FIRST_HOST:{PORT}"  # a word to be replaced, where nobody has told its address
MOST = 8
# NCCL by RDMA needs the devices and memory that stays; hosts find each other by ports that are told at the start
DOCKER = "--network host --device /dev/infiniband --cap-add IPC_LOCK"
SOCKETS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def check(nodes: int, address: str | None) -> None:
    """CommandError for what is no number of hosts, and no address with a port."""
    if not 1 <= nodes <= MOST:
        raise CommandError(f"--nodes must be 1 to {MOST} hosts, got {nodes}")
    if address is None:
        return
    host, _, port = address.rpartition(":")
    is_host = bool(host) and all(c.isalnum() or c in ".-:[]_%" for c in host) and not host.startswith("-")
    if not is_host or not (port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= 65535):
        raise CommandError(f"--dist-init-addr must be the first host's address and a port, got {address!r}")


def flags(r: Request) -> list[Flag]:
    if r.nodes == 1:
        return []
    return [
        Flag("--nnodes", str(r.nodes), f"hosts, of {r.gpus_of_host} card(s) each"),
        Flag(RANK, "0", "this host's number, another one on each: 0 is the first, which answers"),
        Flag(
            "--dist-init-addr", r.address or FIRST_HOST, "the first host's, in the network between them; on all alike"
        ),
    ]


def environment(r: Request) -> list[Flag]:
    if r.interface is None:
        return []
    return [Flag(name, r.interface, "the network between the hosts, by its name on this one") for name in SOCKETS]


def notes(r: Request) -> list[str]:
    found = []
    if r.nodes > 1:
        found.append(
            "on all hosts the same folder of ours, build, settings and profile, and the same flags but --node-rank: a "
            "server whose hosts differ stops in front of its layers, and says by what. Sums between the cards are "
            "NCCL's, and what deals work to cards is left out. Nobody has run several hosts with us"
        )
    if r.nodes > 1 and r.interface is None:
        found.append(
            "NCCL and gloo choose a network of the host by themselves, at times Wi-Fi: --interface NAME (by "
            "`ip -br addr`, that with the address above) pins it. `doctor` says what is there, RDMA among it"
        )
    if r.card.is_hosts:
        found.append(
            "memory is the host's: SGLang takes its fraction of what the system says is available, and while weights "
            "are read the page cache fills the rest. Others' starts were killed there or froze the machine (sglang "
            "#37931): a swap file of 64 GB, no desktop, and `sync; echo 3 | sudo tee /proc/sys/vm/drop_caches` in "
            "front of a start"
        )
        found.append(
            "others' two of them: 39 to 42 tokens/s of one stream with two drafts, prompts 1,760 (vllm #41834)"
        )
    return found


def of_host(plan: Plan, rank: int) -> Plan:
    """The same plan with that host's number."""
    own = [dataclasses.replace(flag, value=str(rank)) if flag.name == RANK else flag for flag in plan.flags]
    return dataclasses.replace(plan, flags=own)

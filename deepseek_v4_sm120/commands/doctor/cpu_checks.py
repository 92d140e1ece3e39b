"""Checks of the host's processors, which launch what the cards compute. What is fine is not said."""

from __future__ import annotations

from collections.abc import Iterator

from deepseek_v4_sm120.commands.doctor.facts import Facts
from deepseek_v4_sm120.commands.doctor.finding import Finding, warn

BESIDE_RANKS = 2  # the HTTP server with its tokenizer, and the detokenizer
LEAST_SWAPPED_KIB = 256 << 10
# drivers of frequencies under which the governor "powersave" is the usual one, and means no low clock
ACTIVE = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
WINDOWS = "microsoft"  # in the name of WSL2's kernel
SLEEPY_LINKS = ("powersave", "powersupersave")


def checks(facts: Facts) -> Iterator[Finding]:
    """Of machines that have cards."""
    if facts.smi.gpus:
        yield from _number(facts)
        yield from _frequency(facts)
        yield from _nodes(facts)
        yield from _swap(facts)
        yield from _windows(facts)
        yield from _link_power(facts)


def _number(facts: Facts) -> Iterator[Finding]:
    cpus = facts.cpus
    if cpus.allowed is None:
        return
    reports = (facts.status or {}).get("processes", [])
    served = {(facts.servers.get(one.get("pid")), card) for one in reports for card in one.get("devices_served", {})}
    ranks = len(served) or len(facts.used)  # each server counts its cards from 0
    have = min(len(cpus.allowed), len(cpus.allowed) if cpus.limit is None else cpus.limit)
    found = f"{len(cpus.allowed)} may be used"
    found += f", {cpus.limit:g} of them at a time (cpu.max)" if cpus.limit is not None else ""
    found += f", which has held threads back for {cpus.held_s:,.0f} s" if cpus.held_s >= 1 else ""
    if have < ranks + BESIDE_RANKS:
        yield warn(
            "CPUs",
            f"{found}; {ranks} rank{'s' * (ranks > 1)} want {ranks + BESIDE_RANKS} or more",
            "each rank's scheduler holds one, tokenizer and detokenizer two more; a rank that waits for its turn "
            "launches late, and all others wait for it in the next sum",
            "no --cpus, no small --cpuset-cpus for docker run; in Kubernetes a larger resources.limits.cpu, or none",
        )


def _frequency(facts: Facts) -> Iterator[Finding]:
    cpus = facts.cpus
    is_slow = cpus.governor == "powersave" and cpus.driver not in ACTIVE
    if is_slow or cpus.preference == "power":
        told = [f"governor {cpus.governor or 'unknown'}", f"driver {cpus.driver or 'unknown'}"]
        told += [f"energy preference {cpus.preference}"] if cpus.preference else []
        cost = "low clocks: what the host does between launches and steps takes longer, first without CUDA graphs"
        yield warn("CPU clocks", ", ".join(told), cost, "as root on the host: cpupower frequency-set -g performance")


def _nodes(facts: Facts) -> Iterator[Finding]:
    cpus = facts.cpus
    far = [
        f"GPU {gpu.index} at node {path.node}"
        for gpu, path in zip(facts.smi.gpus, facts.pci, strict=False)
        if gpu.index in facts.used
        and path.node in cpus.nodes
        and cpus.allowed is not None
        and not cpus.allowed & cpus.nodes[path.node]
    ]
    if far:
        here = sorted(node for node, of_node in cpus.nodes.items() if of_node & cpus.allowed)
        yield warn(
            "NUMA",
            f"{', '.join(far)}; the CPUs that may be used are all of node {', '.join(map(str, here)) or 'unknown'}",
            "launches, host copies and sums through host memory cross the link between the nodes",
            "CPUs of the cards' node, too (docker run --cpuset-cpus, taskset, numactl), or cards of this one by "
            "CUDA_VISIBLE_DEVICES",
        )


def _swap(facts: Facts) -> Iterator[Finding]:
    if facts.cpus.swapped_kib >= LEAST_SWAPPED_KIB:
        found = f"{facts.cpus.swapped_kib >> 10:,} MiB of the server's processes"
        cost = "a rank stands still while a page comes back from the disk, and the others wait for it"
        yield warn(
            "swap", found, cost, "less beside the server, or more memory; as root: swapoff -a, or vm.swappiness=1"
        )


def _windows(facts: Facts) -> Iterator[Finding]:
    if WINDOWS in facts.cpus.kernel.lower():
        cost = "launches and copies go through Windows' driver; nothing of ours was ever run so"
        yield warn("WSL2", f"kernel {facts.cpus.kernel}", cost, "Linux on the machine itself")


def _link_power(facts: Facts) -> Iterator[Finding]:
    if facts.aspm in SLEEPY_LINKS:
        cost = "idle links sleep, and what comes next, each sum of a step, may wait until they are awake"
        yield warn(
            "ASPM",
            f"the kernel's policy is {facts.aspm}",
            cost,
            "pcie_aspm=off for the kernel, or ASPM off in the BIOS",
        )

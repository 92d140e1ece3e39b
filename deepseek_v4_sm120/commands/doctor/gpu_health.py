"""Checks of what ends a server after hours: a card that waits for a reset, memory and link errors, the kernel's log."""

from __future__ import annotations

from collections.abc import Iterator

from deepseek_v4_sm120.commands.doctor.facts import Facts
from deepseek_v4_sm120.commands.doctor.finding import Finding, fail, not_run, ok, warn
from deepseek_v4_sm120.commands.doctor.nvidia_smi import Gpu

MANY_REPLAYS = 100  # since the last reset; a card with nothing wrong had 1 (H100, driver 580)
# Xids by what they mean (NVIDIA's catalogue), the cost, and what helped others; of the rest only the number is told
MEMORY, BUS, FIRMWARE, KERNEL = (48, 63, 64, 92, 94, 95), (79,), (8, 62, 109, 119, 120), (13, 31, 43, 45)
ECHO = 154  # the recovery that the driver asks for has changed
XIDS: dict[tuple[int, ...], tuple[str, str, str]] = {
    BUS: (
        "the card fell off the bus",
        "the server hangs, then ends; only a reboot brings the card back",
        "power cables and supply (600 W a card), riser or slot; BIOS and kernel: ASPM off (pcie_aspm=off), link Gen 4",
    ),
    FIRMWARE: (
        "the card's own firmware (GSP) does not answer",
        "all ranks wait for this one; seen on RTX PRO 6000 under inference (open-gpu-kernel-modules #1111, #1159)",
        "reboot, another driver branch; fans at full speed where the card runs hot (#1045); tell NVIDIA with the log",
    ),
    MEMORY: ("memory errors", "a process that meets one ends", "reset the card; if it comes again, its warranty"),
    KERNEL: (
        "a process's kernel failed",
        "that server ended",
        "`selftest`; it may be ours: tell us with the log. A bad link does it, too: see PCIe replays",
    ),
}


def checks(facts: Facts) -> Iterator[Finding]:
    """Where no GPU is listed, gpu_checks says so; what the kernel's log has of one tells why."""
    for gpu in facts.smi.gpus:
        yield from _card(gpu)
    yield from _kernel_log(facts)


def _card(gpu: Gpu) -> Iterator[Finding]:
    name = f"health of GPU {gpu.index}"
    if gpu.recovery:
        cost = "it has failed since the last reset: servers on it do not start, hang or end"
        fix = f"stop its processes, then nvidia-smi -r -i {gpu.bus_id}; where that says Reboot, the machine"
        yield fail(name, f"the driver asks for: {gpu.recovery}", cost, fix)
    elif gpu.memory_faults:
        cost = "a process that reads there ends; rows are replaced at the next reset"
        yield warn(name, ", ".join(gpu.memory_faults), cost, f"nvidia-smi -r -i {gpu.bus_id}; again: its warranty")
    elif (gpu.replays or 0) > MANY_REPLAYS:
        cost = "the link sends again what did not arrive: sums between the cards wait, and cards fall off such buses"
        fix = "seat card, riser and cables anew, or a shorter riser; else link speed Gen 4 in the BIOS, ASPM off"
        yield warn(name, f"{gpu.replays} PCIe replays since the last reset", cost, fix)
    elif gpu.replays is None:
        yield not_run(name, "the driver does not tell")
    else:
        yield ok(name, f"no memory errors, {gpu.replays} PCIe replays")


def _kernel_log(facts: Facts) -> Iterator[Finding]:
    name = "kernel log"
    if facts.xids is None:
        if facts.smi.gpus:
            yield not_run(name, "not readable here", "as root on the host: dmesg | grep Xid")
        return
    known_as = {gpu.bus_id.rpartition(".")[0]: f"GPU {gpu.index}" for gpu in facts.smi.gpus}
    if not facts.smi.gpus:  # nvidia-smi lists none where one is lost
        known_as = {place: f"the card at {place}" for place in facts.xids}
    found = {place: [c for c in codes if c != ECHO] for place, codes in facts.xids.items() if place in known_as}
    for codes, (what, cost, fix) in XIDS.items():
        seen = [f"{known_as[place]}: Xid {code}" for place, told in found.items() for code in told if code in codes]
        if seen:
            yield warn(name, f"{what} since this log begins ({', '.join(seen)})", cost, fix)
    known = {code for codes in XIDS for code in codes}
    others = [f"{known_as[place]}: Xid {code}" for place, told in found.items() for code in told if code not in known]
    if others:
        yield warn(name, ", ".join(others), "see NVIDIA's catalogue of Xids", "dmesg has the lines")
    if facts.smi.gpus and not any(found.values()):
        yield ok(name, "no Xid of these cards")

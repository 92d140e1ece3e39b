"""Checks of the GPUs, their links and the copies between them."""

from __future__ import annotations

from collections.abc import Iterator
from operator import ge

from deepseek_v4_sm120.commands.doctor.facts import Facts
from deepseek_v4_sm120.commands.doctor.finding import Finding, fail, not_run, ok, warn
from deepseek_v4_sm120.commands.doctor.pci import PciPath
from deepseek_v4_sm120.commands.plan import cards
from deepseek_v4_sm120.ops.shared import extension
from deepseek_v4_sm120.sglang_patches.device_gate import SM120_MAJOR

# CUDA major of the build -> oldest driver branch that loads its cubins (NVIDIA's compatibility table)
OLDEST_DRIVER = {"12": (575, 51), "13": (580, 0)}
FULL_LINK = (5, 16)
LINK_FIX = "another slot or riser; BIOS: no x8/x8 bifurcation, link speed Gen 5; disable ASPM"
BOARD_WATTS = 600  # Workstation and Server Edition; Max-Q is a 300 W card
LEAST_PEER_GBS = 20.0  # PCIe 5.0 x16 moves about 50 GB/s one way, 4.0 half
IDLE_MEMORY_MIB = 1024
LEAST_HELD_DOWN_S = 10.0  # by heat or the supply; what the limit of power does is no fault
VIRTUAL_GPU, PASSED_THROUGH = "VGPU", "Pass-Through"  # nvidia-smi's words
# how SGLang's processes call themselves, and what nvidia-smi says of those of which it sees the number alone
SGLANGS = "sglang::"
NOT_OTHERS = (SGLANGS, "[")
SLOWEST_FIRST = (None, "host", "peer")  # ways of our sums; None: SGLang's own


def checks(facts: Facts) -> Iterator[Finding]:
    """All findings about GPUs; one NOT RUN where there are none."""
    if not facts.smi.gpus:
        yield not_run("GPU", facts.smi.problem or "no GPU")
        return
    yield from _architecture(facts)
    yield from _slices(facts)
    yield from _driver(facts)
    yield from _links(facts)
    yield from _power(facts)
    yield from _memory(facts)
    if len(facts.smi.gpus) > 1:
        yield from _topology(facts)
        yield from _peers(facts)
        yield from _sums(facts)
        yield from _redirection(facts)


def _architecture(facts: Facts) -> Iterator[Finding]:
    gpus = facts.smi.gpus
    names = ", ".join(sorted({f"{g.name} ({'.'.join(map(str, g.capability or ('?',)))})" for g in gpus}))
    if facts.is_container:  # which may have been given some of the machine's
        places = ", ".join(f"{g.index} at {g.bus_id}" for g in gpus)
        names += f"; by this container's numbers, the host's may be others: {places}"
    if len({g.name for g in gpus}) > 1:
        yield warn(
            "GPU",
            f"{len(gpus)} GPUs of several kinds: {names}",
            "tensor parallel runs at the slowest card and at the least memory",
            "choose equal cards with CUDA_VISIBLE_DEVICES by the names of nvidia-smi -L, or its numbers together with "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID, without which CUDA counts the fastest first",
        )
    elif all(g.capability is None for g in gpus):
        yield not_run("GPU", f"{len(gpus)} x {names}: this driver does not tell the compute capability")
    elif any(g.capability and g.capability[0] != SM120_MAJOR for g in gpus):
        yield warn(
            "GPU",
            f"{len(gpus)} x {names}",
            f"our operators serve compute capability {SM120_MAJOR}.x only; here SGLang runs as it is",
            "nothing to fix; for validation see DSV4_SM120_FORCE",
        )
    else:
        yield ok("GPU", f"{len(gpus)} x {names}")


def _slices(facts: Facts) -> Iterator[Finding]:
    """Cards of which a server has a part, or where not all that it starts may compute."""
    for gpu in facts.smi.gpus:
        if gpu.mode is not None:
            cost = "one process may compute there: the sums' probe, a rank's second one, may not, so they stay SGLang's"
            fix = f"as root: nvidia-smi -i {gpu.bus_id} -c 0; CUDA_VISIBLE_DEVICES keeps servers apart, too"
            yield warn(f"compute mode of GPU {gpu.index}", gpu.mode, cost, fix)
        if gpu.is_sliced:
            cost = "a server sees one slice: a part of the memory and of the multiprocessors, and no peer beside it"
            yield warn(f"MIG of GPU {gpu.index}", "enabled", cost, f"as root: nvidia-smi -i {gpu.bus_id} -mig 0")
        elif gpu.virtual == VIRTUAL_GPU:
            found, cost = (
                "a virtual GPU (vGPU)",
                "its memory and time are what the host gives it, which nothing here tells",
            )
            yield warn(f"GPU {gpu.index}", found, cost, "pass the whole card through to this machine")


def _driver(facts: Facts) -> Iterator[Finding]:
    driver, build = facts.smi.driver, (facts.status or {}).get("build") or {}
    cuda = build.get("cuda_version")
    if driver is None or cuda is None:
        yield not_run("driver", f"driver {driver or 'unknown'}, our build's CUDA {cuda or 'unknown'}")
        return
    oldest = OLDEST_DRIVER.get(cuda.partition(".")[0])
    if oldest is None:
        yield not_run("driver", f"driver {driver}; which one loads CUDA {cuda} code is not known here")
        return
    have = tuple(int(part) for part in driver.split(".")[:2] if part.isdigit())
    if have < oldest:
        yield fail(
            "driver",
            f"{driver}; our module is built with CUDA {cuda}",
            f"the kernels do not load below driver {oldest[0]}",
            f"install driver {oldest[0]} or newer, or rebuild with CUDA 12.9 (build_artifact.py --nvcc)",
        )
        return
    archs = [str(arch) for arch in build.get("archs") or ()]
    found = sorted({g.capability for g in facts.smi.gpus if g.capability})
    found = [c for c in found if c[0] == SM120_MAJOR] or found  # beside these, another card has the monitor
    missing = ["".join(map(str, c)) for c in found if not any(extension.runs_on(arch, c) for arch in archs)]
    if missing:
        yield warn(
            "driver",
            f"{driver}; our module has code for sm_{', sm_'.join(archs)}, not for sm_{', sm_'.join(missing)}",
            "our kernels cannot run on this GPU",
            f"rebuild with: python3 csrc/build_artifact.py --archs {extension.archs_for(found)}",
        )
        return
    yield ok("driver", f"{driver} loads CUDA {cuda} code")


def _links(facts: Facts) -> Iterator[Finding]:
    loaded = (facts.probe or {}).get("links") or {}
    paths = {path.bus_id: path for path in facts.pci}
    for gpu in facts.smi.gpus:
        name = f"PCIe link of GPU {gpu.index}"
        if cards.of_name(gpu.name).is_hosts:
            yield ok(name, "none: CPU and GPU are one chip")
            continue
        rest = f"gen {gpu.link_generation[0]} x{gpu.link_width[0]} at rest"
        if None in gpu.link_generation or None in gpu.link_width:
            yield not_run(name, "the driver does not tell the link (a virtual machine?)")
            continue
        path = paths.get(gpu.bus_id, PciPath(gpu.bus_id))
        told = gpu.link_generation[1], gpu.link_width[1]  # by NVIDIA's words what card and slot can together
        generation_max, width_max = map(max, told, path.card or (0, 0))
        under_load = loaded.get(str(gpu.index))
        if under_load is None:
            generation, width, when = told[0], gpu.link_width[0], "width at rest, generation as announced"
        else:
            (generation, width), when = under_load, f"under load ({rest})"
        whose = "the card" if path.card else "card and slot, as far as the driver tells,"
        found = f"gen {generation} x{width} {when}; {whose} can gen {generation_max} x{width_max}"
        if width < width_max or generation < generation_max:
            share = width * 2**generation / (width_max * 2**generation_max)
            cost = f"{share:.0%} of the link: prefill's all-reduces (87 of 8 KB a token) take {1 / share:.0f}x the time"
            yield warn(name, found + _of_port(path, (generation, width), (generation_max, width_max)), cost, LINK_FIX)
        elif generation_max < FULL_LINK[0] or width_max < FULL_LINK[1]:
            cost = "half of a gen 5 link or less; published prefill is with gen 5 x16"
            yield warn(name, found, cost, "none, the card" if path.card else f"where the card can more, {LINK_FIX}")
        elif under_load is None:
            yield not_run(name, f"{found}; not tried under load", "run it where torch sees the GPUs, not --quick")
        else:
            yield ok(name, found)


def _of_port(path: PciPath, link: tuple[int, int], card: tuple[int, int]) -> str:
    """Where it is the slot's own port that can less than the card. A virtual machine's may tell less than the link."""
    port = path.port or card
    is_less = port[0] < card[0] or port[1] < card[1]
    return f", the port above it gen {port[0]} x{port[1]}" if is_less and all(map(ge, port, link)) else ""


def _power(facts: Facts) -> Iterator[Finding]:
    for gpu in facts.smi.gpus:
        name = f"power of GPU {gpu.index}"
        if gpu.power_limit is None:
            yield not_run(name, "the driver does not tell the power limit")
        elif gpu.slowdowns:
            yield warn(
                name,
                f"clocks held down now by {', '.join(gpu.slowdowns)}; {gpu.clock} of {gpu.clock_max} MHz",
                "speed falls with the clock, prefill first",
                "cooling and power supply; nvidia-smi -q -d PERFORMANCE shows the reason while it serves",
            )
        elif held := [f"{seconds:,.0f} s {why}" for why, seconds in gpu.held_down if seconds >= LEAST_HELD_DOWN_S]:
            yield warn(
                name,
                f"clocks were held down for {', '.join(held)} since the driver was loaded",
                "speed falls with the clock, prefill first",
                "cooling, room between the cards, power cables and supply; again while it serves: "
                "nvidia-smi -q -d PERFORMANCE",
            )
        elif gpu.power_default and gpu.power_limit < gpu.power_default:
            yield warn(
                name,
                f"limit {gpu.power_limit:.0f} W, the card's own is {gpu.power_default:.0f} W",
                "less prefill; decode is bound by memory and loses little",
                f"as root: nvidia-smi -i {gpu.bus_id} -pl {gpu.power_default:.0f}",
            )
        else:
            ceiling = f", of {BOARD_WATTS} W boards' published figures" if gpu.power_limit < BOARD_WATTS else ""
            clock = f"; up to {gpu.clock_max} MHz" if gpu.clock_max else ""
            yield ok(name, f"limit {gpu.power_limit:.0f} W{ceiling}{clock}")


def _memory(facts: Facts) -> Iterator[Finding]:
    reports = (facts.status or {}).get("processes", [])
    serving = facts.is_serving or bool(reports)
    ours = {process.get("pid") for process in reports}
    for gpu in (one for one in facts.smi.gpus if one.index in facts.used):
        name = f"memory of GPU {gpu.index}"
        large = [p for p in gpu.processes if (p.memory or 0) > IDLE_MEMORY_MIB]
        others = [p for p in large if p.pid not in ours and not p.name.startswith(NOT_OTHERS)]
        is_ours = any(p.pid in ours or p.name.startswith(SGLANGS) for p in gpu.processes)
        found = f"{gpu.memory_used} of {gpu.memory_total} MiB in use"
        free = gpu.memory_free
        if not gpu.memory_total:
            yield _of_host(name, facts, serving)
        elif serving and free < 1024:
            yield warn(
                name,
                f"{found}: {free} MiB free beside a running server",
                "a long prompt's scratch kills a rank hours later; seen with 0.95 to 0.975 at 240K to 550K tokens",
                "lower --mem-fraction-static or --chunked-prefill-size; `plan` computes both",
            )
        elif not serving and gpu.memory_used > IDLE_MEMORY_MIB:
            yield warn(
                name,
                "; ".join([found, *map(str, large)]),
                "SGLang takes its fraction of what is free at its start, so the KV cache shrinks by as much",
                "stop the other processes (nvidia-smi lists them), or give the server other cards; where it is a "
                "server's own: doctor --url <its address>",
            )
        elif others and serving and is_ours:
            cost = "what it computes makes the server's steps wait, those of all ranks"
            yield warn(
                name, f"beside the server {'; '.join(map(str, others))}", cost, "stop it, or give it another card"
            )
        else:
            yield ok(name, found)


def _of_host(name: str, facts: Facts, serving: bool) -> Finding:
    """Of a GPU whose memory is the host's, by which SGLang goes."""
    if facts.host_memory is None or not any(cards.of_name(gpu.name).is_hosts for gpu in facts.smi.gpus):
        return not_run(name, "the driver does not tell")
    total, available = facts.host_memory
    found = f"the host's: {available} of {total} MiB available"
    used = total - available - (cards.OF_THE_SYSTEM >> 20)
    if serving or used <= 0:
        return ok(name, found)
    cost = "SGLang takes its fraction of what is available at its start, and what runs beside it may take the rest"
    return warn(name, found, cost, "no desktop and no other models; `plan` reckons with 6 GiB of the system's")


def _topology(facts: Facts) -> Iterator[Finding]:
    kinds = {pair: kind for pair, kind in facts.smi.topology.items() if facts.used.issuperset(pair)}
    if not facts.smi.topology:
        yield not_run("topology", "nvidia-smi topo -m does not tell (a virtual machine?)")
    if not kinds:
        return
    words = ", ".join(f"{i}-{j} {kind}" for (i, j), kind in sorted(kinds.items()))
    if all(kind in ("PIX", "PXB") or kind.startswith("NV") for kind in kinds.values()):
        yield ok("topology", f"{words}: peers behind common switches")
    elif any(kind == "SYS" for kind in kinds.values()):
        yield warn(
            "topology",
            f"{words}: some pairs cross the link between NUMA nodes",
            "peer copies are slow there or not possible; all-reduce is in every layer twice",
            "cards at one node: on one socket (BIOS: NPS1 where that is several), by slot or by CUDA_VISIBLE_DEVICES",
        )
    else:
        yield warn(
            "topology",
            f"{words}: pairs meet at the CPU's root ports",
            "the same engine lost 18% of 2-card decode between a PCIe switch and root ports",
            "a PCIe switch; else nothing to fix",
        )


def _peers(facts: Facts) -> Iterator[Finding]:
    pairs = (facts.probe or {}).get("peers")
    if not pairs:
        yield not_run("peer copies", facts.probe_problem or "not tried", "run doctor where torch sees the GPUs")
        return
    lying = [p for p in pairs if p["reported"] and not p["moved"]]
    lost = [p for p in pairs if not p["reported"] and not p["moved"]]
    slow = [p for p in pairs if p["reported"] and p["moved"] and p["gbs"] < LEAST_PEER_GBS]
    absent = [p for p in pairs if not p["reported"]]

    def named(which: list[dict]) -> str:
        return ", ".join(f"{p['from']}->{p['to']}" for p in which)

    if lying:
        yield fail(
            "peer copies",
            f"{named(lying)}: reported as possible, but the data does not arrive{_small_windows(facts)}",
            "custom all-reduce and NCCL hang or give wrong numbers",
            "NCCL_P2P_DISABLE=1 and DSV4_SM120_SET=all_reduce=host now, our sums then go by host memory (without our "
            "patch: --disable-custom-all-reduce); then BIOS: IOMMU off or pass-through, ACS off",
        )
    elif lost:
        yield fail(
            "peer copies",
            f"{named(lost)}: not possible, and a copy through host memory does not arrive either",
            "whatever passes between these cards is wrong: sums, weights, answers",
            "memory and BIOS of the host (IOMMU), riser and slot; `selftest` on each card alone",
        )
    elif absent:
        yield warn(
            "peer copies",
            f"{named(absent)}: not possible{_small_windows(facts)}",
            "every all-reduce goes through host memory: about 10 us more, 87 times a step",
            "driver and BIOS (Resizable BAR, IOMMU, ACS); `nvidia-smi topo -p2p r` shows the driver's reason",
        )
    elif slow:
        rates = ", ".join(f"{p['from']}->{p['to']} {p['gbs']:.1f} GB/s" for p in slow)
        beside = facts.is_serving or bool((facts.status or {}).get("processes"))
        yield warn(
            "peer copies",
            rates + ", beside a running server" * beside + _small_windows(facts),
            "prefill's all-reduces wait for the link",
            "once more while the server is idle; " * beside + "see PCIe link, topology and ACS",
        )
    else:
        yield ok("peer copies", f"{len(pairs)} pairs move data, slowest {min(p['gbs'] for p in pairs):.1f} GB/s")


def _small_windows(facts: Facts) -> str:
    gpus = [gpu for gpu in facts.smi.gpus if gpu.index in facts.used and 0 < (gpu.window or 0) < gpu.memory_total]
    told = [f"BAR1 of GPU {gpu.index} is {gpu.window} of {gpu.memory_total} MiB" for gpu in gpus]
    return f"; {', '.join(told)}: Resizable BAR is off, or does not reach so far" if told else ""


def _sums(facts: Facts) -> Iterator[Finding]:
    """By a running server's own probe, of several the slowest way; else by ours."""
    name = "sums between the cards"
    told = verdicts_of_servers(facts) or list(filter(_is_verdict, [(facts.probe or {}).get("sums")]))
    found = min(told, key=lambda one: SLOWEST_FIRST.index(one["transport"]), default=None)
    if found is None:
        yield not_run(
            name, facts.probe_problem or "not tried: fewer than two cards, or no kernels", "run it on the cards"
        )
        return
    text = found["text"].partition("; to do: ")[0] + next(filter(None, map(_inside, _found(facts))), "")
    if found["transport"] is None:
        cost = "SGLang's own sums: NCCL's take 16 to 30 us each, 87 times a step"
        yield warn(name, text, cost, found["remedy"])
    elif found["transport"] == "host" and found.get("is_chosen") is True:
        cost = "through host memory a sum takes several us more than between peers, 87 times a step"
        yield warn(name, text, cost, "without all_reduce=host in DSV4_SM120_SET, where `peer copies` can be trusted")
    elif found["transport"] == "host" and _are_peers_right(found):
        cost = "peers give the right sums here, and later yet: what passes between these cards goes a slow way"
        yield warn(name, text, cost, "see PCIe link, topology, and ACS and IOMMU")
    elif found["transport"] == "host":
        cost = "through host memory a sum takes several us more, 87 times a step"
        yield warn(name, text, cost, found["remedy"])
    else:
        yield ok(name, text)


def verdicts_of_servers(facts: Facts) -> list[dict]:
    """What the probes of running servers found, by their reports."""
    return [one["all_reduce"] for one in _found(facts) if _is_verdict(one.get("all_reduce"))]


def _found(facts: Facts) -> list[dict]:
    found = [process.get("found") for process in (facts.status or {}).get("processes", [])]
    return [one for one in found if isinstance(one, dict)]


def _are_peers_right(found: dict) -> bool:
    ways = found.get("ways")
    way = ways.get("peer") if isinstance(ways, dict) else None
    return isinstance(way, dict) and "problem" in way and way["problem"] is None


def _inside(found: dict) -> str:
    """Of a running server whose boundaries sum on their way."""
    rows = found["mhc"].get("sums_up_to_rows") if isinstance(found.get("mhc"), dict) else None
    return f"; up to {rows} rows inside of mhc's boundaries" if isinstance(rows, int) else ""


def _is_verdict(found) -> bool:
    """Reports are files that anybody may have written."""
    if not isinstance(found, dict) or not all(isinstance(found.get(name), str) for name in ("text", "remedy")):
        return False
    return found.get("transport", "") in SLOWEST_FIRST


def _redirection(facts: Facts) -> Iterator[Finding]:
    visible = [path for path in facts.pci if path.is_visible]
    redirecting = sorted({bridge for path in visible for bridge in path.redirecting})
    hidden = sorted({bridge for path in visible for bridge in path.hidden})
    groups = f"IOMMU on ({facts.iommu_groups} groups)" if facts.iommu_groups else "IOMMU off or not visible"
    if not visible:
        yield not_run("ACS and IOMMU", "/sys does not show the GPUs' bridges")
    elif not redirecting and any(gpu.virtual == PASSED_THROUGH for gpu in facts.smi.gpus):
        found = "the cards are passed through to a virtual machine: their bridges are the host's, and not seen here"
        yield not_run("ACS and IOMMU", found, "run doctor as root on the host; `peer copies` says what arrives")
    elif redirecting:
        yield warn(
            "ACS and IOMMU",
            f"{groups}; access control redirects peer copies at {', '.join(redirecting)}",
            "copies between cards go up to the CPU and back, or stall",
            "BIOS: ACS off; or as root for each bridge: setpci -s <bridge> ECAP_ACS+0x6.w=0000",
        )
    elif hidden:
        yield not_run("ACS and IOMMU", f"{groups}; the bridges' registers need root", "run doctor as root on the host")
    elif facts.iommu_groups and any(path.bridges for path in visible):
        yield ok("ACS and IOMMU", f"{groups}; no bridge redirects peer copies")
    else:
        yield ok("ACS and IOMMU", groups)

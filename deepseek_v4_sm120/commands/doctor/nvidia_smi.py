"""nvidia-smi's answers as data. The fields differ between drivers; what is missing is None."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from xml.etree import ElementTree

from deepseek_v4_sm120.commands.console import one_line

Run = Callable[[list[str]], str | None]  # what a command says, None when it is not there, hangs or says nothing


@dataclass(frozen=True)
class Process:
    """One that computes on a GPU; its memory in MiB, None where that is not told."""

    pid: int | None
    name: str
    memory: int | None

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}) has {self.memory} MiB"


@dataclass(frozen=True)
class Gpu:
    """One GPU. Memory in MiB, power in W, clocks in MHz; link generation and width as (current, maximum)."""

    index: int
    name: str
    bus_id: str  # as sysfs writes it: 0000:01:00.0
    memory_total: int
    memory_used: int
    link_generation: tuple[int | None, int | None]
    link_width: tuple[int | None, int | None]
    power_limit: float | None
    power_default: float | None
    clock: int | None
    clock_max: int | None
    slowdowns: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    recovery: str | None = None  # what the driver asks for: Reset, Reboot, ..
    memory_faults: tuple[str, ...] = ()
    replays: int | None = None  # packets that the link sent again, since the last reset
    uuid: str | None = None  # GPU-..
    held_down: tuple[tuple[str, float], ...] = ()  # (what held the clocks down, seconds) since the driver was loaded
    processes: tuple[Process, ...] = ()  # that compute; none where a container does not see them
    is_sliced: bool = False  # in MIG mode
    mode: str | None = None  # Exclusive_Process, .. where not every process may compute
    virtual: str | None = None  # Pass-Through, VGPU, ..
    window: int | None = None  # MiB of its memory that others on the bus can reach at once (BAR1)
    memory_reserved: int = 0  # of the total, which the driver keeps and nobody can have

    @property
    def memory_free(self) -> int:
        return self.memory_total - self.memory_reserved - self.memory_used


@dataclass(frozen=True)
class Smi:
    gpus: tuple[Gpu, ...]
    driver: str | None
    cuda: str | None
    topology: dict[tuple[int, int], str]
    problem: str | None = None  # why there are no GPUs


# of memory: errors that could not be corrected since the driver was loaded, and flags
UNCORRECTED = ("sram_uncorrectable_parity", "sram_uncorrectable_secded", "sram_uncorrectable", "dram_uncorrectable")
MEMORY_FLAGS = {
    "remapped_rows/remapped_row_pending": "rows wait for a reset to be replaced",
    "remapped_rows/remapped_row_failure": "rows could not be replaced",
    "ecc_errors/unrepairable_memory": "memory that cannot be repaired",
}
# why clocks were held down -> the counter's name, in microseconds
HELD_DOWN = {"by heat": ("hw_therm_slowdown", "sw_therm_slowdown"), "by the power supply": ("hw_power_brake",)}
POWER_CAP = "sw_power_cap"
MOST_LANES = 32  # of PCIe
NOT_A_SLOWDOWN = ("gpu_idle", "applications_clocks_setting", "sw_power_cap", "display_clocks_setting", "sync_boost")


def read(run: Run) -> Smi:
    """Ask nvidia-smi; never raises."""
    text = run(["nvidia-smi", "-q", "-x"])
    if text is None:
        return Smi((), None, None, {}, "nvidia-smi is not there or does not answer (in a container: --gpus all)")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:  # the driver is another one than its library, a card is lost, ..
        return Smi((), None, None, {}, f"nvidia-smi -q -x says: {one_line(text)}")
    capabilities = _capabilities(run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]))
    nodes = root.findall("gpu")
    gpus = tuple(_gpu(i, node, capabilities[i] if i < len(capabilities) else None) for i, node in enumerate(nodes))
    topology = read_topology(run(["nvidia-smi", "topo", "-m"]) or "", len(gpus))
    problem = None if gpus else "nvidia-smi lists no GPU"
    return Smi(gpus, _text(root, "driver_version"), _text(root, "cuda_version"), topology, problem)


def read_topology(text: str, count: int) -> dict[tuple[int, int], str]:
    """`nvidia-smi topo -m`: (i, j) -> PIX, PXB, PHB, NODE, SYS or NV#, for i < j."""
    found = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        cells = line.split()
        if cells and (match := re.fullmatch(r"GPU(\d+)", cells[0])) and len(cells) > count:
            i = int(match[1])
            found |= {(i, j): cells[1 + j] for j in range(i + 1, count)}
    return found


def _gpu(index: int, node: ElementTree.Element, capability: tuple[int, int] | None) -> Gpu:
    link = node.find("pci/pci_gpu_link_info")
    power = next((p for p in (node.find("gpu_power_readings"), node.find("power_readings")) if p is not None), None)
    reasons = [r for name in ("clocks_event_reasons", "clocks_throttle_reasons") for r in node.findall(f"{name}/*")]
    active = [r.tag for r in reasons if (r.text or "").strip() == "Active"]
    slow = [re.sub(r"^clocks_(event|throttle)_reason_", "", tag) for tag in active]
    return Gpu(
        index=index,
        name=_text(node, "product_name") or "unknown GPU",
        bus_id=_sysfs_bus_id(_text(node, "pci/pci_bus_id") or node.get("id") or ""),
        memory_total=_number(node, "fb_memory_usage/total") or 0,
        memory_used=_number(node, "fb_memory_usage/used") or 0,
        memory_reserved=_number(node, "fb_memory_usage/reserved") or 0,
        link_generation=(
            _of_link(link, "pcie_gen/current_link_gen"),
            _greatest(_of_link(link, "pcie_gen/max_device_link_gen"), _of_link(link, "pcie_gen/max_link_gen")),
        ),
        link_width=(_of_link(link, "link_widths/current_link_width"), _of_link(link, "link_widths/max_link_width")),
        power_limit=_number(power, "current_power_limit", float) or _number(power, "power_limit", float),
        power_default=_number(power, "default_power_limit", float),
        clock=_number(node, "clocks/sm_clock"),
        clock_max=_number(node, "max_clocks/sm_clock"),
        slowdowns=tuple(name for name in slow if name not in NOT_A_SLOWDOWN),
        capability=capability,
        recovery=_flag(node, "gpu_recovery_action", "None"),
        memory_faults=_memory_faults(node),
        replays=_number(node, "pci/replay_counter"),
        uuid=_text(node, "uuid"),
        held_down=_held_down(node),
        processes=tuple(_process(one) for one in node.findall("processes/process_info") if "C" in _words(one, "type")),
        is_sliced=_text(node, "mig_mode/current_mig") == "Enabled",
        mode=_flag(node, "compute_mode", "Default"),
        virtual=_flag(node, "gpu_virtualization_mode/virtualization_mode", "None"),
        window=_number(node, "bar1_memory_usage/total"),
    )


def _held_down(node: ElementTree.Element) -> tuple[tuple[str, float], ...]:
    """Drivers without the counters tell none. Some tell one number for heat and for the limit of power: not heat."""
    prefix = "clocks_event_reasons_counters"

    def counted(name: str) -> int:
        return _number(node, f"{prefix}/{prefix}_{name}") or 0

    by_power = counted(POWER_CAP)
    found = {why: max((n for n in map(counted, names) if n != by_power), default=0) for why, names in HELD_DOWN.items()}
    return tuple((why, microseconds / 1e6) for why, microseconds in found.items() if microseconds)


def _process(node: ElementTree.Element) -> Process:
    told = _words(node, "process_name")  # with its arguments, or [Not Found], where it is of another container
    name = one_line(told if told.startswith("[") else told.partition(" ")[0], 60) or "a process"
    return Process(_number(node, "pid"), name, _number(node, "used_memory"))


def _words(node: ElementTree.Element, path: str) -> str:
    return _text(node, path) or ""


def _flag(node: ElementTree.Element, path: str, fine: str) -> str | None:
    """What it says, None where it is fine or not there."""
    text = _text(node, path)
    return None if text == fine else text


def _memory_faults(node: ElementTree.Element) -> tuple[str, ...]:
    errors = sum(_number(node, f"ecc_errors/volatile/{name}") or 0 for name in UNCORRECTED)
    told = [f"{errors} memory errors that were not corrected"] if errors else []
    return (*told, *(words for path, words in MEMORY_FLAGS.items() if _flag(node, path, "No")))


def read_xids(log: str | None) -> dict[str, tuple[int, ...]] | None:
    """The kernel's log: PCI place (0000:01:00) -> the driver's numbered complaints, each once; None: no log."""
    if log is None:
        return None
    found: dict[str, tuple[int, ...]] = {}
    for place, code in re.findall(r"NVRM: Xid \(PCI:([0-9a-fA-F:]+)\): (\d+)", log):
        known = found.setdefault(place.lower(), ())
        found[place.lower()] = known if int(code) in known else (*known, int(code))
    return found


def _capabilities(text: str | None) -> list[tuple[int, int] | None]:
    found = [re.fullmatch(r"\s*(\d+)\.(\d+)\s*", line) for line in (text or "").splitlines() if line.strip()]
    return [(int(m[1]), int(m[2])) if m else None for m in found]


def _sysfs_bus_id(text: str) -> str:
    """nvidia-smi writes 00000000:01:00.0, sysfs 0000:01:00.0."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else text


def _text(node: ElementTree.Element | None, path: str) -> str | None:
    found = node.find(path) if node is not None else None
    text = (found.text or "").strip() if found is not None else ""
    return text if text and text != "N/A" else None


def _number(node, path: str, kind: type = int):
    match = re.match(r"\d+(\.\d+)?", _text(node, path) or "")
    return kind(float(match[0])) if match else None


def _of_link(node, path: str) -> int | None:
    """A generation or width; of a card that is just lost anything is told."""
    found = _number(node, path)
    return found if found is not None and 0 < found <= MOST_LANES else None


def _greatest(*values):
    known = [value for value in values if value is not None]
    return max(known) if known else None  # the device's own maximum where the driver tells both

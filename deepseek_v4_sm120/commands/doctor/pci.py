"""What /sys says of each GPU's link and node, and of the bridges above it: access control services, IOMMU."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

ACS_CAPABILITY = 0x000D  # PCIe extended capability; its control register redirects peer traffic to the root
REDIRECTS = 0x04 | 0x08 | 0x10  # P2P request redirect, P2P completion redirect, upstream forwarding
EXTENDED_SPACE = 0x100
GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}  # by GT/s, as /sys writes them


@dataclass(frozen=True)
class PciPath:
    """The way from the root to one GPU. `redirecting`: bridges whose ACS sends peer copies over the root complex;
    `hidden`: bridges whose registers cannot be read (needs root); `is_visible`: sysfs knows the device.
    `card`, `port`: (generation, width) that the card and the port of its slot can, None where that is not told;
    `node`: the CPUs' NUMA node that the card is at."""

    bus_id: str
    bridges: tuple[str, ...] = ()
    redirecting: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    is_visible: bool = False
    card: tuple[int, int] | None = None
    port: tuple[int, int] | None = None
    node: int | None = None


def read_path(sys: Path, bus_id: str) -> PciPath:
    """sys: the /sys folder."""
    device = sys / "bus/pci/devices" / bus_id
    if not device.exists():
        return PciPath(bus_id)
    parents = [part for part in device.resolve().parts if part.count(":") == 2]
    bridges = [part for part in parents if part != bus_id]
    states = {bridge: _redirects(sys / "bus/pci/devices" / bridge / "config") for bridge in bridges}
    return PciPath(
        bus_id,
        tuple(bridges),
        tuple(b for b, state in states.items() if state),
        tuple(b for b, state in states.items() if state is None),
        True,
        _greatest_link(device),
        _greatest_link(sys / "bus/pci/devices" / bridges[-1]) if bridges else None,
        node if (node := read_number(device / "numa_node")) is not None and node >= 0 else None,
    )


def read_text(file: Path) -> str:
    """What a file of /sys or /proc says; "" where it is not there, or does not tell."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_number(file: Path) -> int | None:
    text = read_text(file)
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None


def _greatest_link(device: Path) -> tuple[int, int] | None:
    generation = GENERATIONS.get(read_text(device / "max_link_speed").partition(" ")[0])
    width = read_number(device / "max_link_width")
    return (generation, width) if generation and width and 0 < width <= 32 else None


def iommu_groups(sys: Path) -> int:
    folder = sys / "kernel/iommu_groups"
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def aspm_policy(sys: Path) -> str:
    """The one of "default performance [powersave] powersupersave" that holds; "" where that is not told."""
    match = re.search(r"\[(\w+)\]", read_text(sys / "module/pcie_aspm/parameters/policy"))
    return match[1] if match else ""


def _redirects(config: Path) -> bool | None:
    """Whether a bridge redirects peer traffic; None when its extended registers cannot be read."""
    try:
        data = config.read_bytes()
    except OSError:
        return None
    if len(data) <= EXTENDED_SPACE:
        return None
    offset, seen = EXTENDED_SPACE, set()
    while offset and offset not in seen and offset + 8 <= len(data):
        seen.add(offset)
        (header,) = struct.unpack_from("<I", data, offset)
        if header & 0xFFFF == ACS_CAPABILITY:
            (control,) = struct.unpack_from("<H", data, offset + 6)
            return bool(control & REDIRECTS)
        offset = header >> 20
    return False

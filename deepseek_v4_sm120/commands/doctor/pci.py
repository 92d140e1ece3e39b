"""What /sys says of the PCI bridges above each GPU: access control services, IOMMU, common switches."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

ACS_CAPABILITY = 0x000D  # PCIe extended capability; its control register redirects peer traffic to the root
REDIRECTS = 0x04 | 0x08 | 0x10  # P2P request redirect, P2P completion redirect, upstream forwarding
EXTENDED_SPACE = 0x100


@dataclass(frozen=True)
class PciPath:
    """The way from the root to one GPU. `redirecting`: bridges whose ACS sends peer copies over the root complex;
    `hidden`: bridges whose registers cannot be read (needs root); `is_visible`: sysfs knows the device."""

    bus_id: str
    bridges: tuple[str, ...] = ()
    redirecting: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    is_visible: bool = False


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
    )


def iommu_groups(sys: Path) -> int:
    folder = sys / "kernel/iommu_groups"
    return len(list(folder.iterdir())) if folder.is_dir() else 0


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

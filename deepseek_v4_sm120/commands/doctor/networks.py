"""What /sys says of this host's networks: interfaces, and the devices by which NCCL reaches others past the CPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from deepseek_v4_sm120.commands.doctor.pci import read_number, read_text

ACTIVE = "ACTIVE"
VIRTUAL = ("docker", "veth", "br-", "virbr", "tailscale", "tun", "wg", "ifb", "cni", "flannel", "cali")


@dataclass(frozen=True)
class Interface:
    name: str
    is_up: bool
    is_wireless: bool
    mtu: int | None

    @property
    def is_made(self) -> bool:
        """Docker's, a tunnel's: none that a cable is at."""
        return self.name == "lo" or self.name.startswith(VIRTUAL)


@dataclass(frozen=True)
class Device:
    """One of RDMA: RoCE or InfiniBand. gbits: a second; interface: its name as a network, where it has one."""

    name: str
    is_active: bool
    layer: str
    gbits: int | None
    interface: str | None

    def __str__(self) -> str:
        rate = f", {self.gbits} Gb/s" if self.gbits else ""
        return f"{self.name} ({self.interface or self.layer}{rate})"


@dataclass(frozen=True)
class Networks:
    interfaces: tuple[Interface, ...] = ()
    devices: tuple[Device, ...] = ()
    looped: str = ""  # the host's name, where its own table has it at an address that only it reaches
    has_verbs: bool = True  # /dev/infiniband, without which a process cannot use the devices

    @property
    def active(self) -> list[Device]:
        return [device for device in self.devices if device.is_active]


def read(root: Path) -> Networks:
    """root: "/" in real life."""
    nets, devices = root / "sys/class/net", root / "sys/class/infiniband"
    interfaces = tuple(_interface(place) for place in _folders(nets))
    has_verbs = (root / "dev/infiniband").is_dir()
    return Networks(interfaces, tuple(map(_device, _folders(devices))), _looped(root), has_verbs)


def _looped(root: Path) -> str:
    name, table = read_text(root / "etc/hostname"), read_text(root / "etc/hosts")
    rows = [line.partition("#")[0].split() for line in table.splitlines()]
    at = [row[0] for row in rows if name and name in row[1:]]
    return name if at and at[0].startswith("127.") else ""


def _folders(place: Path) -> list[Path]:
    return sorted(place.iterdir()) if place.is_dir() else []


def _interface(place: Path) -> Interface:
    is_up = read_text(place / "operstate") == "up"
    return Interface(place.name, is_up, (place / "wireless").is_dir(), read_number(place / "mtu"))


def _device(place: Path) -> Device:
    """By its first port: these cards have one a device."""
    port = next(iter(_folders(place / "ports")), place / "ports/1")
    rate = re.match(r"\d+", read_text(port / "rate"))  # "200 Gb/sec (4X HDR)"
    interface = next((one.name for one in _folders(place / "device/net")), None)
    is_active = read_text(port / "state").endswith(ACTIVE)  # "4: ACTIVE"
    return Device(place.name, is_active, read_text(port / "link_layer") or "RDMA", rate and int(rate[0]), interface)

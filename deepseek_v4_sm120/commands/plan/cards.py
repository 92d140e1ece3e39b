"""The kinds of cards and of links that a plan reckons with.

RTX PRO 6000: 1.79 TB/s, PCIe 5.0 x16. GB10 (DGX Spark): 273 GB/s of LPDDR5X that CPU and GPU share (NVIDIA's figures),
48 multiprocessors. Between hosts: ConnectX-7 of 200 Gb/s; how long a sum's way takes is an assumption.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deepseek_v4_sm120.commands.doctor.pci import read_text
from deepseek_v4_sm120.commands.plan import memory

MEMINFO = "proc/meminfo"
# Of a DGX Spark sold with 128 GB the kernel has 119.67 or 121.69 GiB, by the version of its system (gpud #1170,
# unslothai/unsloth #10283); of these the system, a desktop and SGLang's own processes have their share
SPARK_MIB_PER_GB = 119.67 * 1024 / 128
OF_THE_SYSTEM = 6 * memory.GIB
# above it such hosts are at the mercy of the page cache and of fragments (NV_ERR_NO_MEMORY beside free memory, vllm
# #56824); SGLang's own recipe has 0.80 (sglang #37479)
MOST_FRACTION_OF_HOST = 0.80


@dataclass(frozen=True)
class Card:
    """is_hosts: whether its memory is the host's, by which SGLang goes there: of an integrated GPU it asks the system
    what is available, page cache included, in all releases (get_available_gpu_memory)."""

    name: str
    bytes_per_s: float
    num_sms: int
    gb: float  # as sold
    mib_per_gb: float  # as the driver or the system reports it
    most_fraction: float
    is_hosts: bool = False
    prefill_per_s: Mapping[int, tuple[float, str]] | None = None  # by cards; None: roofline's

    def free_at_start(self, card_bytes: float) -> float:
        """Of a card with so many bytes what --mem-fraction-static is a fraction of."""
        kept = OF_THE_SYSTEM - memory.KEPT_BY_DRIVER if self.is_hosts else 0
        return memory.free_at_start(card_bytes - kept)


@dataclass(frozen=True)
class Link:
    """What carries a sum between so many ranks: bytes a second, and seconds that it takes at least, by a kernel of one
    launch where there is one, and by NCCL."""

    name: str
    bytes_per_s: float
    fast_s: Mapping[int, float]
    nccl_s: Mapping[int, float]


PRO = Card("RTX PRO 6000", 1.79e12, 188, 96, 97887 / 96, memory.MOST_FRACTION)
# prompts on two of them: vllm #41834, 8K, two parties
GB10 = Card(
    *("GB10", 273e9, 48, 128, SPARK_MIB_PER_GB, MOST_FRACTION_OF_HOST),
    is_hosts=True,
    prefill_per_s={2: (1760.0, "two parties' vLLM, 8K prompts")},
)
KINDS = {"pro": PRO, "gb10": GB10}
PCIE = Link("PCIe 5.0 x16", 50e9, {2: 5e-6, 4: 7e-6, 8: 11e-6}, {2: 15e-6, 4: 21e-6, 8: 30e-6})
_BETWEEN_HOSTS = {2: 20e-6, 4: 35e-6, 8: 50e-6}
NETWORK = Link("200 Gb/s between hosts", 22e9, _BETWEEN_HOSTS, _BETWEEN_HOSTS)


def of_name(name: str) -> Card:
    """By nvidia-smi's name of a card."""
    return GB10 if "GB10" in name else PRO


def host_memory(root: Path) -> dict[str, int]:
    """MiB by the system's names; empty where nothing tells."""
    pairs = (line.partition(":") for line in read_text(root / MEMINFO).splitlines())
    return {name: int(rest.split()[0]) >> 10 for name, _, rest in pairs if rest.split()}


def host_memory_mib(root: Path) -> int:
    """The host's; 0 where nothing tells."""
    return host_memory(root).get("MemTotal", 0)

"""Which of a machine's cards CUDA_VISIBLE_DEVICES leaves, by nvidia-smi's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deepseek_v4_sm120.commands.doctor.nvidia_smi import Gpu

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER, BY_PLACE = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"  # of CUDA's numbers; by default the fastest is the first


def names(environ: Mapping[str, str]) -> list[str]:
    """What CUDA_VISIBLE_DEVICES says, one by one; nothing where it leaves all."""
    return [name.strip() for name in environ.get(VISIBLE, "").split(",") if name.strip()]


def named(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu | None] | None:
    """In their order the cards that it names (None in it: nvidia-smi does not list that). None where it leaves all, and
    where it has CUDA's own numbers, by speed, of cards of several kinds."""
    told = names(environ)
    is_exact = environ.get(ORDER) == BY_PLACE or any(name.startswith(("GPU-", "MIG-")) for name in told)
    is_exact = is_exact or len({gpu.name for gpu in gpus}) == 1  # as fast as each other, CUDA takes them by their place
    if not (told and gpus and is_exact):
        return None
    return [next((gpu for gpu in gpus if _is_named(gpu, name)), None) for name in told]


def _is_named(gpu: Gpu, name: str) -> bool:
    """By nvidia-smi's number, or its name or the beginning of that."""
    return name == str(gpu.index) or name.startswith("GPU-") and (gpu.uuid or "").startswith(name)

"""Block sizes of the grouped GEMMs by (pairs per expert, N, K) bucket. Written by bench/tune_moe.py; nothing tunes at
run time.

A bucket is the first entry whose `pairs_per_expert` is not below the call's; an exact (N, K) wins over (None, None).
DEFAULT serves every capability and shape that the table does not name.

Four warps: with eight, Triton 3.6 compiles the down projection for sm_90 into a race (docs/notes/mxfp4_moe.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Blocks:
    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int


@dataclass(frozen=True)
class Entry:
    major: int  # compute capability
    gemm: str  # gate_up, down
    pairs_per_expert: float  # up to so many
    blocks: Blocks
    n: int | None = None
    k: int | None = None


DEFAULT = {"gate_up": Blocks(64, 64, 64, 3, 4), "down": Blocks(64, 128, 64, 3, 4)}

ENTRIES: tuple[Entry, ...] = (  # fmt: skip
    Entry(9, "gate_up", 1e9, Blocks(128, 64, 128, 3, 4)),
    Entry(9, "down", 1e9, Blocks(128, 128, 64, 3, 4)),
)


def choose(major, gemm, pairs_per_expert, n, k, *, block_m=None) -> Blocks:
    """Blocks for a call. block_m: only entries with it count, and the default gets it: both GEMMs share tiles."""
    fitting = [
        e
        for e in ENTRIES
        if (e.major, e.gemm) == (major, gemm)
        and pairs_per_expert <= e.pairs_per_expert
        and (e.n, e.k) in ((n, k), (None, None))
        and block_m in (None, e.blocks.block_m)
    ]
    if fitting:
        return min(fitting, key=lambda e: (e.n is None, e.pairs_per_expert)).blocks
    return DEFAULT[gemm] if block_m is None else replace(DEFAULT[gemm], block_m=block_m)

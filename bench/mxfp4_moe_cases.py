"""The cases of bench/mxfp4_moe.py, their bars, and figures of other implementations quoted from earlier runs."""

from __future__ import annotations

from dataclasses import dataclass

ISSUE = 6
HIDDEN, INTER, EXPERTS, TOPK = 4096, 2048, 256, 6
EXPERT_BYTES = 13_369_344  # codes and scales of one expert of Flash


@dataclass(frozen=True)
class Case:
    """`share`: of the measured read bandwidth, at least. `tflops`: at least. None: reported, no bar."""

    tp: int
    rows: int
    share: float | None = None
    tflops: float | None = None
    quick: bool = True

    @property
    def name(self) -> str:
        return f"TP{self.tp}, {self.rows} rows"

    @property
    def inter(self) -> int:
        return INTER // self.tp

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * TOPK * 3 * self.inter * HIDDEN


DECODE = (
    Case(1, 1, share=0.65),
    Case(1, 8),
    Case(1, 64, share=0.80),
    Case(2, 1, share=0.55),
    Case(2, 2, quick=False),
    Case(2, 4, quick=False),
    Case(2, 8, share=0.75),
    Case(2, 16, quick=False),
    Case(2, 32, share=0.80),
    Case(2, 64, share=0.80),
    Case(2, 128),
    Case(4, 1, share=0.45),
    Case(4, 8, quick=False),
    Case(4, 64, share=0.80, quick=False),
    Case(8, 1, quick=False),
    Case(8, 64, quick=False),
)
PREFILL = (
    Case(1, 8192, tflops=300.0),
    Case(2, 8192, tflops=300.0),
    Case(1, 1024, quick=False),
    Case(2, 1024, quick=False),
    Case(2, 512, quick=False),
    Case(2, 256),
)
# bench/mxfp4_moe_prompts.py: the kernels of mma.sync; a FLOP at TP4 no slower than at TP1
PROMPTS_ISSUE = 22
PROMPTS = tuple(
    Case(tp, rows, tflops=300.0 if rows == 8192 else None) for tp in (1, 2, 4) for rows in (257, 1024, 8192)
)
# The same bits as few rows, above as many: at most so many times as long as without
REPRODUCIBLE_ISSUE, REPRODUCIBLE = 21, 1.3

# SGLang 0.5.17's Marlin GEMMs alone (two a layer), in the engine, profiled on 2026-11-21 on an H200: TP1, 64 experts,
# so that 8 rows touch 35 experts and not 44. What surrounds them (align, clamp, silu, sum) is not in it.
QUOTED = {"TP1, 1 rows": 46.4, "TP1, 8 rows": 179.3}
QUOTED_NOTE = "two Marlin GEMMs of SGLang 0.5.17 with 64 experts, quoted from an engine profile of 2026-11-21"
FASTER_THAN_MARLIN = {1: 1.3, 8: 1.3, 64: 1.0}  # up to so many rows, at least

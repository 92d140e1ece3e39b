#!/usr/bin/env python3
"""Prompts' experts: `python3 bench/mxfp4_moe_prompts.py [--tp 1 2 4] [--rows 8192]`.

wide.cuh, the same with one order of sums, and with MXFP8 activations, whose instruction SM120 alone has: here the same
kernel multiplies the same numbers in bf16, two mma for one. Beside two ceilings: mma.sync and nothing else, and cuBLAS.
Until 2026-12-01 Triton's grouped GEMMs stood beside them, by wgmma and compiled as for SM120 (docs/notes/mxfp4_moe.md).
Most rows first; writes every number as JSON, after every case.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import needs_torch  # noqa: F401
import torch
import triton
import triton.language as tl

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "bench")]

import common  # noqa: E402
import mxfp4_moe as bench  # noqa: E402
from mxfp4_moe_cases import PROMPTS, PROMPTS_ISSUE, Case  # noqa: E402

from deepseek_v4_sm120.ops import mxfp4_moe as op  # noqa: E402
from deepseek_v4_sm120.ops.shared import extension  # noqa: E402
from deepseek_v4_sm120.reference.accuracy import relative_error  # noqa: E402
from deepseek_v4_sm120.specs import bounds  # noqa: E402

SHARDED = ("TP1, 8192 rows", "TP4, 8192 rows")
MXFP8 = "W4A8, multiplied in bf16"
CHAINS, STEPS = 8, 4096  # of the loop that only multiplies


@triton.jit
def _mma(d0, d1, d2, d3, operand):
    return tl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$8,$8,$8,$8}, {$8,$8}, {$4,$5,$6,$7};",
        "=f,=f,=f,=f,f,f,f,f,r",
        [d0, d1, d2, d3, operand],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _multiply_only_kernel(out, steps, THREADS: tl.constexpr):
    lane = tl.arange(0, THREADS)
    operand = lane * 0 + steps // 65536
    zero = operand.to(tl.float32)
    a0, a1, a2, a3 = zero, zero, zero, zero + 1
    b0, b1, b2, b3 = zero, zero, zero, zero + 2
    c0, c1, c2, c3 = zero, zero, zero, zero + 3
    d0, d1, d2, d3 = zero, zero, zero, zero + 4
    e0, e1, e2, e3 = zero, zero, zero, zero + 5
    f0, f1, f2, f3 = zero, zero, zero, zero + 6
    g0, g1, g2, g3 = zero, zero, zero, zero + 7
    h0, h1, h2, h3 = zero, zero, zero, zero + 8
    for _ in range(steps):
        a0, a1, a2, a3 = _mma(a0, a1, a2, a3, operand)
        b0, b1, b2, b3 = _mma(b0, b1, b2, b3, operand)
        c0, c1, c2, c3 = _mma(c0, c1, c2, c3, operand)
        d0, d1, d2, d3 = _mma(d0, d1, d2, d3, operand)
        e0, e1, e2, e3 = _mma(e0, e1, e2, e3, operand)
        f0, f1, f2, f3 = _mma(f0, f1, f2, f3, operand)
        g0, g1, g2, g3 = _mma(g0, g1, g2, g3, operand)
        h0, h1, h2, h3 = _mma(h0, h1, h2, h3, operand)
    total = a0 + a1 + a2 + a3 + b0 + b1 + b2 + b3 + c0 + c1 + c2 + c3 + d0 + d1 + d2 + d3
    total += e0 + e1 + e2 + e3 + f0 + f1 + f2 + f3 + g0 + g1 + g2 + g3 + h0 + h1 + h2 + h3
    tl.store(out + tl.program_id(0) * THREADS + lane, total)


def mma_tflops(warps: int = 8) -> float:
    """mma.sync and nothing else, one block a multiprocessor; operands are zeros, so no power limit is met."""
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(blocks * 32 * warps, device="cuda")
    call = lambda: _multiply_only_kernel[(blocks,)](out, STEPS, THREADS=32 * warps, num_warps=warps)  # noqa: E731
    return 2.0 * 16 * 8 * 16 * CHAINS * STEPS * warps * blocks / common.graph_microseconds([call]) / 1e6


def matmul_tflops(size: int = 8192) -> float:
    a, b = (torch.randn((size, size), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * size**3 / common.graph_microseconds([lambda: a @ b] * 2) / 1e6


WAYS = {
    "wide": lambda call, weights: op.mxfp4_moe(**call, **weights),
    "reproducible": lambda call, weights: op.mxfp4_moe(**call, **weights, reproducible=True),
    MXFP8: lambda call, weights: op.mxfp4_moe(**call, **weights, activations="mxfp8"),
}


def run_case(report: common.Report, case: Case, layer) -> tuple[str, ...]:
    calls, weights = bench.calls_of(case), bench.weights_of(layer)
    results, cells = {name: way(calls[0], weights) for name, way in WAYS.items()}, []
    few = bench.few_at_a_time(**calls[0], **weights)
    different = int((results["reproducible"].view(torch.int16) != few.view(torch.int16)).sum())
    common.gate(f"{case.name}, reproducible", different, 0, "numbers of other bits than few rows have")
    again = [WAYS["wide"](calls[0], weights) for _ in range(3)]
    common.gate(f"{case.name}, wide", sum(not torch.equal(one, again[0]) for one in again), 0, "runs of other bits")
    for name, way in WAYS.items():
        error = relative_error(results[name].float(), few.float())
        bound = bounds.MXFP4_MOE_MXFP8 if name == MXFP8 else bounds.MXFP4_MOE
        common.gate(f"{case.name}, {name}", error, bound.shadow, "difference to few rows")
        microseconds = common.graph_microseconds([lambda one=one, way=way: way(one, weights) for one in calls])
        tflops = case.flops / microseconds / 1e6
        report.add(common.row(PROMPTS_ISSUE, case.name, name, "tflops", round(tflops, 1)))
        bar = round(case.flops / case.tflops / 1e6, 2) if case.tflops and name == "wide" else None
        report.add(
            common.row(
                PROMPTS_ISSUE,
                case.name,
                name,
                "us",
                round(microseconds, 2),
                bar,
                f"{case.tflops:g} TFLOP/s" if bar else "",
            )
        )
        cells.append(f"{microseconds:.0f} ({tflops:.0f})")
        print(f"{case.name}, {name}: {microseconds:.1f} us, {tflops:.0f} TFLOP/s", flush=True)
    return (case.name, *cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rows", type=int, nargs="+", default=sorted({case.rows for case in PROMPTS}))
    parser.add_argument("--out", type=Path, default=REPO / "bench/results/mxfp4_moe_prompts_h200.json")
    arguments = parser.parse_args()
    common.require_gpu()
    ceilings = {"mma_sync_tflops": round(mma_tflops(), 1), "matmul_tflops": round(matmul_tflops(), 1)}
    print(torch.cuda.get_device_name(), ceilings, flush=True)
    report = common.Report("mxfp4_moe_prompts", extension.build_info()["git_commit"], ceilings)
    lines, layers, a_flop = [], {tp: bench.layer_of(tp) for tp in arguments.tp}, {}
    for case in sorted(PROMPTS, key=lambda case: -case.rows):
        if case.tp not in arguments.tp or case.rows not in arguments.rows:
            continue
        lines.append(run_case(report, case, layers[case.tp]))
        a_flop[case.name] = next(row.value for row in report.rows[::-1] if (row.impl, row.metric) == ("wide", "tflops"))
        if case.name == SHARDED[1] and SHARDED[0] in a_flop:
            ratio = round(a_flop[SHARDED[0]] / a_flop[SHARDED[1]], 3)
            report.add(common.row(PROMPTS_ISSUE, SHARDED[1], "wide", "ratio", ratio, 1.0, "of a FLOP's time to TP1's"))
        report.write(arguments.out)
    print("\nus (TFLOP/s)\n" + common.table(("case", *WAYS), lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())

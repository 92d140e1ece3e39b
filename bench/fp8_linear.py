#!/usr/bin/env python3
"""fp8_linear over the model's FP8 matrices, TP1, 2, 4: `python3 bench/fp8_linear.py [--quick] [--rows N] [--out FILE]`.

Cold weights: the calls of a graph take turns with weights that together are over twice the L2; x is warm, as its
producer leaves it. A graph holds at least 40 calls, as an engine's step does: what lies between two graphs is not a
call's. Shares are of the read bandwidth that a plain sum over 6 GiB reaches in the same run, and count weights alone.

Peers of the same run: torch.matmul on bf16 weights; torch._scaled_mm (cuBLAS FP8, one scale for the whole tensor, x
already quantised, rows padded to 16); and, where sglang and deep_gemm can be imported, SGLang's quantisation and
DeepGEMM, with which the issue compares. Where they cannot, the mean of a step is compared with an engine's profile of
another day.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import needs_torch  # noqa: F401
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "bench")]

import common  # noqa: E402

from deepseek_v4_sm120.ops import wo_a  # noqa: E402
from deepseek_v4_sm120.ops.fp8_linear import fp8_grouped_linear  # noqa: E402
from deepseek_v4_sm120.ops.shared import extension  # noqa: E402
from deepseek_v4_sm120.reference.accuracy import relative_error  # noqa: E402
from deepseek_v4_sm120.reference.fp8_linear import fp8_grouped_linear as reference  # noqa: E402
from deepseek_v4_sm120.specs import bounds  # noqa: E402
from deepseek_v4_sm120.specs.fp8_linear import (  # noqa: E402
    LAYERS,
    Matrix,
    make_weight,
    make_x,
    matrices,
)

ISSUE = 7
ROWS = (1, 4, 8, 16, 32, 64, 65, 128, 256)
QUICK_ROWS = (1, 8, 16, 64, 256)
LARGE_BYTES = 8 << 20  # matrices that have a bar
MIN_CALLS = 40  # of a graph
SHARES = {1: 0.70, 4: 0.70, 8: 0.70, 16: 0.70, 64: 0.60}  # rows -> share of the read bandwidth
DEEP_GEMM = "DeepGEMM + quantisation"
# rows -> (GEMM us, quantisation us, GEMMs) a step of stock 0.5.17 on an H200, TP1
QUOTED_DEEP_GEMM = {1: (2762, 375, 246), 8: (2452, 610, 246)}
QUOTED_NOTE = "quoted: engine profile, H200, SGLang 0.5.17, not this run"
FASTER_THAN_DEEP_GEMM = 1.5
COMPARED_ROWS = (1, 4, 8)  # those with that bar


@dataclass(frozen=True)
class Case:
    matrix: Matrix
    rows: int

    @property
    def name(self) -> str:
        return f"{self.matrix.label}, {self.rows} rows"

    @property
    def share(self) -> float | None:
        has_bar = self.matrix.bytes >= LARGE_BYTES
        return SHARES.get(self.rows) if has_bar else None


def unlike_matrices() -> list[Matrix]:
    """Each shape once, by the first rank count that has it."""
    found: dict[tuple, Matrix] = {}
    for tp in (1, 2, 4):
        for matrix in matrices(tp):
            found.setdefault((matrix.name == "wo_a", matrix.groups, matrix.outputs, matrix.inputs), matrix)
    return list(found.values())


def cases(rows: tuple[int, ...] = ROWS) -> list[Case]:
    return [Case(matrix, count) for matrix in unlike_matrices() for count in rows]


def microseconds_of(calls: list[Callable[[], object]]) -> float:
    """Of a call; they take turns until a graph has enough of them."""
    return common.graph_microseconds(calls * -(-MIN_CALLS // len(calls)))


def deep_gemm_linear() -> Callable | None:
    """SGLang's `linear(x, weight, [128, 128], weight_scale)`: quantises x, calls DeepGEMM. None where it cannot run."""
    missing = [name for name in ("sglang", "deep_gemm") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{DEEP_GEMM}: not run, no module {' and '.join(missing)}", flush=True)
        return None
    os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")  # the shapes timed here, not all there are
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.quantization.fp8_utils import deepgemm_w8a8_block_fp8_linear_with_fallback

    if not deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM:
        print(f"{DEEP_GEMM}: not run, SGLang does not use it on this GPU", flush=True)
        return None
    return deepgemm_w8a8_block_fp8_linear_with_fallback


def run_case(report: common.Report, case: Case, x, weights, scales) -> None:
    matrix, gbs = case.matrix, report.ceilings["read_gbs"]
    error = relative_error(fp8_grouped_linear(x, weights[0], scales[0]), reference(x, weights[0], scales[0]))
    common.gate(case.name, error, bounds.FP8_LINEAR_WIDE)
    calls = [lambda i=i: fp8_grouped_linear(x, weights[i], scales[i]) for i in range(len(weights))]
    microseconds = microseconds_of(calls)
    bar = note = None
    if case.share:
        bar, note = round(matrix.bytes / case.share / gbs / 1e3, 2), f"{case.share:.0%} of the read bandwidth"
    share = matrix.bytes / microseconds / 1e3 / gbs
    report.add(
        common.row(ISSUE, case.name, "ours", "us", round(microseconds, 2), bar, note or ""),
        common.row(ISSUE, case.name, "ours", "read_share", round(share, 4)),
        common.row(ISSUE, case.name, "ours", "relative_error", round(error, 6), bounds.FP8_LINEAR_WIDE),
    )


def run_peers(report: common.Report, case: Case, x, weights, scales, deep_gemm: Callable | None) -> None:
    """cuBLAS and DeepGEMM on the same shape; wo_a's groups as torch.einsum, which is what stock calls."""
    matrix = case.matrix
    layers = range(len(weights) // 2 + 2)
    wide = [torch.randn(weights.shape[1:], device="cuda", dtype=torch.bfloat16) for _ in layers]
    if matrix.name == "wo_a":
        calls = [lambda w=w: torch.einsum(wo_a.EQUATION, x, w) for w in wide]
    else:
        calls = [lambda w=w: torch.nn.functional.linear(x[:, 0], w[0]) for w in wide]
    report.add(common.row(ISSUE, case.name, "torch bf16", "us", round(microseconds_of(calls), 2)))
    if matrix.name == "wo_a":
        return
    padded = torch.zeros(-(-case.rows // 16) * 16, matrix.inputs, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    calls = [
        lambda i=i: torch._scaled_mm(padded, weights[i, 0].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        for i in range(len(weights))
    ]
    microseconds = round(microseconds_of(calls), 2)
    report.add(common.row(ISSUE, case.name, "torch._scaled_mm", "us", microseconds, note="without quantising x"))
    if deep_gemm is None:
        return
    rows = x[:, 0].contiguous()
    calls = [lambda i=i: deep_gemm(rows, weights[i, 0], [128, 128], scales[i, 0]) for i in range(len(weights))]
    error = relative_error(calls[0](), reference(x, weights[0], scales[0])[:, 0])
    report.add(
        common.row(ISSUE, case.name, DEEP_GEMM, "us", round(microseconds_of(calls), 2)),
        common.row(ISSUE, case.name, DEEP_GEMM, "relative_error", round(error, 6)),
    )


def compare_with_deep_gemm(report: common.Report) -> None:
    """The mean FP8 GEMM of a TP1 step, by the number of layers that have each matrix; theirs of this run, or quoted."""
    times = {(row.case, row.impl): row.value for row in report.rows if row.metric == "us"}
    chosen = [matrix for matrix in matrices(1) if matrix.name in LAYERS]

    def mean(rows: int, impl: str) -> float | None:
        found = [(LAYERS[matrix.name], times.get((Case(matrix, rows).name, impl))) for matrix in chosen]
        if any(value is None for _, value in found):
            return None
        return sum(layers * value for layers, value in found) / sum(layers for layers, _ in found)

    for rows in ROWS:
        ours, theirs, note = mean(rows, "ours"), mean(rows, DEEP_GEMM), ""
        if theirs is None and rows in QUOTED_DEEP_GEMM:
            gemm, quantise, count = QUOTED_DEEP_GEMM[rows]
            theirs, note = (gemm + quantise) / count, QUOTED_NOTE
        if ours is None or theirs is None:
            continue
        name = f"mean FP8 linear of a step, TP1, {rows} rows"
        bar = round(theirs / FASTER_THAN_DEEP_GEMM, 2) if rows in COMPARED_ROWS else None
        report.add(
            common.row(ISSUE, name, DEEP_GEMM, "us", round(theirs, 2), note=note),
            common.row(
                ISSUE,
                name,
                "ours",
                "us",
                round(ours, 2),
                bar,
                f"{FASTER_THAN_DEEP_GEMM:g} times as fast" if bar else "",
            ),
        )


def summary(report: common.Report) -> str:
    values = {(row.case, row.impl, row.metric): row for row in report.rows}
    lines = []
    for name in dict.fromkeys(row.case for row in report.rows):
        us = values[name, "ours", "us"]
        bar = "" if us.bar is None else f"{us.bar:g}{'' if us.met else ' MISSED'}"
        share = values.get((name, "ours", "read_share"))
        peers = [values.get((name, peer, "us")) for peer in ("torch bf16", "torch._scaled_mm", DEEP_GEMM)]
        cells = ["" if cell is None else f"{cell.value:.3g}" for cell in (share, *peers)]
        lines.append((name, f"{us.value:.2f}", bar, *cells))
    return common.table(("case", "ours us", "bar us", "share", "bf16 us", "scaled_mm us", "DeepGEMM us"), lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROWS} rows only, no peers")
    parser.add_argument("--rows", default="", help=f"other numbers of rows, a prompt's too, than {ROWS}: 128,8192")
    parser.add_argument("--cases", default="", help="only cases whose name contains this text")
    parser.add_argument("--commit", default=None, help="of the measured tree (default: the build's)")
    parser.add_argument("--out", type=Path, default=REPO / "bench/results/fp8_linear.json")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    common.require_gpu()
    ceilings = {"read_gbs": round(common.read_bandwidth_gbs(), 1), **common.ceilings()}
    report = common.Report("fp8_linear", arguments.commit or extension.build_info()["git_commit"], ceilings)
    print(torch.cuda.get_device_name(), ceilings, flush=True)
    deep_gemm = None if arguments.quick else deep_gemm_linear()
    rows = tuple(int(count) for count in arguments.rows.split(",") if count) or (
        QUICK_ROWS if arguments.quick else ROWS
    )
    chosen = [case for case in cases(rows) if arguments.cases in case.name]
    for matrix in dict.fromkeys(case.matrix for case in chosen):
        layers = common.layers_for_cold_caches(matrix.bytes)
        generator = torch.Generator("cuda").manual_seed(matrix.outputs)
        weights, scales = make_weight(layers * matrix.groups, matrix.outputs, matrix.inputs, generator)
        weights, scales = (t.view(layers, matrix.groups, *t.shape[1:]) for t in (weights, scales))
        x = make_x(max(rows), matrix.groups, matrix.inputs, generator)
        for case in [case for case in chosen if case.matrix == matrix]:
            run_case(report, case, x[: case.rows], weights, scales)
            if not arguments.quick:
                run_peers(report, case, x[: case.rows], weights, scales, deep_gemm)
        report.write(arguments.out)
    compare_with_deep_gemm(report)
    report.write(arguments.out)
    print("\n" + summary(report))
    missed = sum(row.met is False for row in report.rows)
    print(f"{sum(row.met is True for row in report.rows)} bars met, {missed} missed; {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""wo_a at TP1, 2 and 4, few rows and prompts: `python3 bench/wo_a.py [--quick] [--out FILE]`.

Cold weights: a graph's calls have weights of their own, together over twice the L2; the attention's output is warm, as
its producer leaves it. Ours rotates it back; for prompts (above 256 rows) SGLang's kernel does, before and outside of
what is timed. Stock is specs/wo_a.py's `product`: torch.einsum on bf16 weights and the copy that lays its result out
for the next layer (from 2 rows on), without the launch that rotates, so its step is dearer by that.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import needs_torch  # noqa: F401
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "bench")]

import common  # noqa: E402

from deepseek_v4_sm120.ops import fp8_linear as linear  # noqa: E402
from deepseek_v4_sm120.ops import wo_a as op  # noqa: E402
from deepseek_v4_sm120.ops.shared import extension  # noqa: E402
from deepseek_v4_sm120.reference.accuracy import relative_error  # noqa: E402
from deepseek_v4_sm120.reference.wo_a import wo_a as reference  # noqa: E402
from deepseek_v4_sm120.specs import bounds  # noqa: E402
from deepseek_v4_sm120.specs.fp8_linear import make_weight  # noqa: E402
from deepseek_v4_sm120.specs.wo_a import INPUTS, OUTPUTS, make_wo_a, product  # noqa: E402

ISSUE = 7
CHECKED_ROWS = 256  # of a prompt: float64 is slow
ROWS = (1, 2, 4, 8, 16, 32, 64, 65, 128, 192, 256, 512, 2048, 8192)
QUICK_ROWS = (1, 8, 16, 32, 64, 128, 256, 2048)
BOTH_WAYS = (65, 512)  # least and most rows for which FP8 tiles are timed beside the expansion, neither rotated
TPS = (1, 2, 4)
FASTER_THAN_STOCK = {1: 1.5, 8: 1.2}  # rows -> times as fast, its rotation not counted


@dataclass(frozen=True)
class Case:
    tp: int
    rows: int

    @property
    def groups(self) -> int:
        return 8 // self.tp

    @property
    def folded(self) -> bool:
        return self.rows <= op.FP8_ROWS

    @property
    def name(self) -> str:
        return f"TP{self.tp}, {self.groups} x [{OUTPUTS}, {INPUTS}], {self.rows} rows"


def cases(rows: tuple[int, ...] = ROWS, tps: tuple[int, ...] = TPS) -> list[Case]:
    return [Case(tp, count) for tp in tps for count in rows]


def microseconds(report, case, impl, calls, note="", bar=None) -> float:
    found = common.graph_microseconds(calls)
    report.add(common.row(ISSUE, case.name, impl, "us", round(found, 2), bar, note))
    return found


def run_case(report: common.Report, case: Case, x, weights, scales, freqs_cis, positions, wide) -> None:
    rotation = {"freqs_cis": freqs_cis, "positions": positions} if case.folded else {}
    check, few = (
        slice(0, CHECKED_ROWS),
        {name: t[:CHECKED_ROWS] if name == "positions" else t for name, t in rotation.items()},
    )
    out = op.wo_a(x, weights[0], scales[0], **rotation)
    error = relative_error(out[check], reference(x[check], weights[0], scales[0], **few))
    common.gate(case.name, error, bounds.WO_A.truth)
    layers = range(len(weights))
    stock = microseconds(
        report,
        case,
        "stock, bf16",
        [lambda i=i: product(x, wide[i]) for i in range(len(wide))],
        "no rotation",
    )
    bar = round(stock / FASTER_THAN_STOCK[case.rows], 2) if case.rows in FASTER_THAN_STOCK else None
    microseconds(
        report, case, "ours", [lambda i=i: op.wo_a(x, weights[i], scales[i], **rotation) for i in layers], bar=bar
    )
    if case.rows <= BOTH_WAYS[1]:
        calls = [lambda i=i: linear.fp8_grouped_linear(x, weights[i], scales[i]) for i in layers]
        microseconds(report, case, "ours, not rotated", calls)
    if BOTH_WAYS[0] <= case.rows <= BOTH_WAYS[1]:
        calls = [lambda i=i: op.multiply_expanded(x, weights[i], scales[i], torch.empty_like(out)) for i in layers]
        microseconds(report, case, "expanded", calls)
    report.add(common.row(ISSUE, case.name, "ours", "relative_error", round(error, 6), bounds.WO_A.truth))


def run_expansion(report: common.Report, case: Case, weights, scales) -> None:
    calls = [lambda i=i: op.expanded(weights[i], scales[i]) for i in range(len(weights))]
    name = Case(case.tp, 0)
    found = common.graph_microseconds(calls)
    gbs = 3 * weights[0].numel() / found / 1e3
    report.add(
        common.row(ISSUE, name.name, "expansion", "us", round(found, 2)),
        common.row(ISSUE, name.name, "expansion", "gbs", round(gbs, 1), note="E4M3 read, bf16 written"),
    )


def summary(report: common.Report) -> str:
    values = {(row.case, row.impl, row.metric): row for row in report.rows}
    lines = []
    for name in dict.fromkeys(row.case for row in report.rows):
        cells = []
        for impl in ("ours", "ours, not rotated", "expanded", "stock, bf16", "expansion"):
            found = values.get((name, impl, "us"))
            missed = "" if found is None or found.met is not False else f" MISSED {found.bar:g}"
            cells.append("" if found is None else f"{found.value:.2f}{missed}")
        lines.append((name, *cells))
    header = ("case", "ours us", "not rotated", "expanded us", "stock us", "expansion us")
    return common.table(header, lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROWS} rows only")
    parser.add_argument("--tp", type=int, nargs="+", default=TPS)
    parser.add_argument("--commit", default=None, help="of the measured tree (default: the build's)")
    parser.add_argument("--out", type=Path, default=REPO / "bench/results/wo_a.json")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    common.require_gpu()
    report = common.Report("wo_a", arguments.commit or extension.build_info()["git_commit"], common.ceilings())
    print(torch.cuda.get_device_name(), report.ceilings, flush=True)
    rows = QUICK_ROWS if arguments.quick else ROWS
    for tp in arguments.tp:
        groups = 8 // tp
        layers = common.layers_for_cold_caches(groups * OUTPUTS * INPUTS)
        generator = torch.Generator("cuda").manual_seed(tp)
        x, _, _, freqs_cis, positions = make_wo_a(max(rows), groups, generator)
        weights, scales = make_weight(layers * groups, OUTPUTS, INPUTS, generator)
        weights, scales = (t.view(layers, groups, *t.shape[1:]) for t in (weights, scales))
        wide = [op.expanded(weights[i], scales[i]) for i in range(layers // 2 + 2)]
        for case in cases(rows, (tp,)):
            run_case(report, case, x[: case.rows], weights, scales, freqs_cis, positions[: case.rows], wide)
        run_expansion(report, case, weights, scales)
        report.write(arguments.out)
        print(summary(report), flush=True)
    missed = sum(row.met is False for row in report.rows)
    print(f"{sum(row.met is True for row in report.rows)} bars met, {missed} missed; {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

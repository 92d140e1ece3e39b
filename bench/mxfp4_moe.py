#!/usr/bin/env python3
"""mxfp4_moe against its bars and SGLang's Marlin: `python3 bench/mxfp4_moe.py [--quick] [--cases TEXT] [--out FILE]`.

A call's weights are cold: consecutive calls of a graph route to other experts, and together they touch far more than
the L2 holds. Shares are of the read bandwidth that a plain sum over 6 GB reaches in the same run, and count the bytes
of the touched experts alone, once. Writes every number as JSON and, where matplotlib is installed, a plot beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path

import needs_torch  # noqa: F401
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "bench")]

import common  # noqa: E402
from mxfp4_moe_cases import (  # noqa: E402
    DECODE,
    EXPERT_BYTES,
    EXPERTS,
    FASTER_THAN_MARLIN,
    HIDDEN,
    ISSUE,
    PREFILL,
    QUOTED,
    QUOTED_NOTE,
    REPRODUCIBLE,
    REPRODUCIBLE_DECODE,
    REPRODUCIBLE_ISSUE,
    Case,
)

from deepseek_v4_sm120.ops.mxfp4_moe import DECODE_ROWS, mxfp4_moe  # noqa: E402
from deepseek_v4_sm120.ops.shared import extension  # noqa: E402
from deepseek_v4_sm120.reference.accuracy import relative_error  # noqa: E402
from deepseek_v4_sm120.reference.mxfp4_moe import mxfp4_moe as reference  # noqa: E402
from deepseek_v4_sm120.specs import bounds  # noqa: E402
from deepseek_v4_sm120.specs.mxfp4_moe import (  # noqa: E402
    Inputs,
    Marlin,
    Shape,
    make_inputs,
    routed_ids,
    routed_weights,
)
from deepseek_v4_sm120.specs.provider import is_installed  # noqa: E402

TOUCHED_BYTES = 3e9  # of a graph's calls together, at least
MAX_CALLS = 48
GATE_ROWS = 256  # of a prefill case's rows, compared with float64


def layer_of(tp: int) -> Inputs:
    """One layer with all experts' weights; the calls' own rows come from `calls_of`."""
    return make_inputs(Shape(4 * EXPERTS, inter=2048 // tp, experts=EXPERTS), seed=tp)


def calls_of(case: Case) -> list[dict]:
    """Arguments of a graph's calls, the same for every implementation. Up to 2 rows take the experts in turn."""
    generator = torch.Generator("cuda").manual_seed(1000 * case.tp + case.rows)
    pairs = case.rows * 6
    count = max(2, min(MAX_CALLS, math.ceil(TOUCHED_BYTES * case.tp / EXPERT_BYTES / min(pairs, EXPERTS))))
    order = torch.cat(
        [torch.randperm(EXPERTS, generator=generator, device="cuda") for _ in range(12 * count // 40 + 3)]
    )
    shape, calls = Shape(case.rows, inter=case.inter), []
    for i in range(count):
        in_turn = order[i * pairs : (i + 1) * pairs].view(case.rows, 6).to(torch.int32) if case.rows <= 2 else None
        hidden = torch.randn((case.rows, HIDDEN), generator=generator, device="cuda").to(torch.bfloat16)
        calls.append(
            {
                "hidden": hidden,
                "topk_ids": routed_ids(shape, generator) if in_turn is None else in_turn,
                "topk_weights": routed_weights(shape, generator),
            }
        )
    return calls


def weights_of(layer: Inputs) -> dict:
    return {name: getattr(layer, name) for name in ("w13", "w13_scale", "w2", "w2_scale")}


def gate(case: Case, layer: Inputs, call: dict) -> float:
    """Relative error of ours; a wrong result ends the benchmark."""
    out = mxfp4_moe(**call, **weights_of(layer))[:GATE_ROWS]
    few = {name: tensor[:GATE_ROWS] for name, tensor in call.items()}
    error = relative_error(out, reference(**few, **weights_of(layer)))
    return common.gate(case.name, error, bounds.MXFP4_MOE.truth)


def touched_bytes(case: Case, calls: list[dict]) -> float:
    """Of a call, mean: each touched expert once."""
    return sum(call["topk_ids"].unique().numel() for call in calls) / len(calls) * EXPERT_BYTES / case.tp


def run_case(report: common.Report, case: Case, layer: Inputs) -> None:
    calls = calls_of(case)
    error = gate(case, layer, calls[0])
    weights = weights_of(layer)
    microseconds = common.graph_microseconds([lambda one=one: mxfp4_moe(**one, **weights) for one in calls])
    floor = touched_bytes(case, calls) / report.ceilings["read_gbs"] / 1e3
    share, tflops = floor / microseconds, case.flops / microseconds / 1e6
    bar = note = None
    if case.share:
        bar, note = round(floor / case.share, 2), f"{case.share:.0%} of the read bandwidth"
    elif case.tflops:
        bar, note = round(case.flops / case.tflops / 1e6, 2), f"{case.tflops:g} TFLOP/s"
    report.add(
        common.row(ISSUE, case.name, "ours", "us", round(microseconds, 2), bar, note or ""),
        common.row(ISSUE, case.name, "ours", "read_share", round(share, 4)),
        common.row(ISSUE, case.name, "ours", "tflops", round(tflops, 1)),
        common.row(ISSUE, case.name, "ours", "relative_error", round(error, 6), bounds.MXFP4_MOE.truth),
    )
    verdict = "" if bar is None else "met" if microseconds <= bar else f"MISSED ({note}: {bar} us)"
    print(
        f"{case.name}: {microseconds:.2f} us, {share:.3f} of read, {tflops:.0f} TFLOP/s, {error:.5f} {verdict}",
        flush=True,
    )


def few_at_a_time(**call):
    """The same rows by the kernels for few."""
    weights = {name: call[name] for name in ("w13", "w13_scale", "w2", "w2_scale")}
    split = [call[name].split(DECODE_ROWS) for name in ("hidden", "topk_ids", "topk_weights")]
    return torch.cat([mxfp4_moe(*part, **weights, reproducible=True) for part in zip(*split, strict=True)])


def run_reproducible(report: common.Report, case: Case, layer: Inputs) -> None:
    calls, weights = calls_of(case), weights_of(layer)
    ways = {"reproducible": lambda call: mxfp4_moe(**call, **weights, reproducible=True)}
    limit = REPRODUCIBLE_DECODE
    if case.rows > DECODE_ROWS:
        limit = REPRODUCIBLE
        ways[f"few rows, {DECODE_ROWS} at a time"] = lambda call: few_at_a_time(**call, **weights)
        out, few = (way(calls[0]) for way in ways.values())
        different = int((out.view(torch.int16) != few.view(torch.int16)).sum())
        common.gate(case.name, different, 0, "numbers of other bits than few rows have")
    found = {}
    for impl, way in ways.items():
        found[impl] = common.graph_microseconds([lambda one=one, way=way: way(one) for one in calls])
        report.add(common.row(REPRODUCIBLE_ISSUE, case.name, impl, "us", round(found[impl], 2)))
    ours = next(r.value for r in report.rows if (r.case, r.impl, r.metric) == (case.name, "ours", "us"))
    ratio = round(found["reproducible"] / ours, 3)
    report.add(common.row(REPRODUCIBLE_ISSUE, case.name, "reproducible", "ratio", ratio, limit, "to ours without"))
    times = ", ".join(f"{impl} {microseconds:.1f} us" for impl, microseconds in found.items())
    print(f"{case.name}: {times}; {ratio} of ours without", flush=True)


def run_marlin(report: common.Report, cases: list[Case], layer: Inputs) -> None:
    experts = Marlin()

    def marlin(**call):
        return experts(dataclasses.replace(layer, **call))

    ours = {row.case: row.value for row in report.rows if (row.impl, row.metric) == ("ours", "us")}
    for case in cases:
        calls = calls_of(case)
        error = relative_error(marlin(**calls[0]), mxfp4_moe(**calls[0], **weights_of(layer)))
        common.gate(case.name, error, bounds.MXFP4_MOE.shadow, "difference of Marlin to ours")
        microseconds = common.graph_microseconds([lambda one=one: marlin(**one) for one in calls])
        factor = next((f for rows, f in FASTER_THAN_MARLIN.items() if case.rows <= rows), 1.0)
        report.add(
            common.row(ISSUE, case.name, "Marlin", "us", round(microseconds, 2)),
            common.row(ISSUE, case.name, "Marlin", "relative_difference_to_ours", round(error, 6)),
            common.row(
                ISSUE,
                case.name,
                "ours",
                "ratio",
                round(ours[case.name] / microseconds, 3),
                round(1 / factor, 3),
                "to Marlin",
            ),
        )
        print(
            f"{case.name}, Marlin: {microseconds:.2f} us; ours {ours[case.name]:.2f}; differ by {error:.5f}", flush=True
        )


def quote(report: common.Report) -> None:
    """Marlin from an earlier run, as such, where it cannot run here."""
    for name, microseconds in QUOTED.items():
        report.add(common.row(ISSUE, name, "Marlin, quoted", "us", microseconds, note=QUOTED_NOTE))


def summary(report: common.Report) -> str:
    values = {(row.case, row.impl, row.metric): row for row in report.rows}
    lines = []
    for name in dict.fromkeys(row.case for row in report.rows):
        if (name, "ours", "us") not in values:
            continue
        us = values[name, "ours", "us"]
        bar = "" if us.bar is None else f"{us.bar:g}{'' if us.met else ' MISSED'}"
        peer = values.get((name, "Marlin", "us")) or values.get((name, "Marlin, quoted", "us"))
        cells = [f"{values[name, 'ours', metric].value:.3g}" for metric in ("read_share", "tflops", "relative_error")]
        lines.append((name, f"{us.value:.1f}", bar, *cells, "" if peer is None else f"{peer.value:.1f} {peer.impl}"))
    return common.table(("case", "ours us", "bar us", "read share", "TFLOP/s", "error", "peer us"), lines)


def plot(report: common.Report, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shares: dict[int, list[tuple[int, float]]] = {}
    by_name = {case.name: case for case in DECODE}
    for row in report.rows:
        if row.metric == "read_share" and row.case in by_name:
            case = by_name[row.case]
            shares.setdefault(case.tp, []).append((case.rows, row.value))
    figure, axis = pyplot.subplots(figsize=(8, 4.5))
    for tp, points in sorted(shares.items()):
        axis.plot(*zip(*sorted(points), strict=True), marker="o", label=f"TP{tp}")
    axis.set(xlabel="rows", ylabel="share of the read bandwidth", xscale="log", ylim=(0, 1))
    axis.set_title(f"mxfp4_moe, touched experts' bytes, {torch.cuda.get_device_name()}")
    axis.grid(True, which="both", alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the cases with bars and a few more")
    parser.add_argument("--cases", default="", help="only cases whose name contains this text")
    parser.add_argument("--no-peers", action="store_true", help="do not run Marlin")
    parser.add_argument("--out", type=Path, default=REPO / "bench/results/mxfp4_moe.json")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    common.require_gpu()
    why_not = "not asked for" if arguments.no_peers else None if is_installed("sglang") else "sglang is not installed"
    print(f"Marlin: {why_not or 'run'}")
    ceilings = {"read_gbs": round(common.read_bandwidth_gbs(), 1), **common.ceilings()}
    report = common.Report("mxfp4_moe", extension.build_info()["git_commit"], ceilings)
    print(torch.cuda.get_device_name(), ceilings, flush=True)
    chosen = [c for c in (*DECODE, *PREFILL) if arguments.cases in c.name and (c.quick or not arguments.quick)]
    by_tp = {tp: [case for case in chosen if case.tp == tp] for tp in sorted({case.tp for case in chosen})}
    for tp, cases in by_tp.items():
        layer = layer_of(tp)
        for case in cases:
            run_case(report, case, layer)
            run_reproducible(report, case, layer)
        report.write(arguments.out)
    if why_not is not None:
        quote(report)
    else:  # after all of ours: what it does wrong, or a time limit, must not cost our numbers
        for tp, cases in by_tp.items():
            run_marlin(report, cases, layer_of(tp))
            report.write(arguments.out)
    report.write(arguments.out)
    print("\n" + summary(report))
    missed = sum(row.met is False for row in report.rows)
    print(f"{sum(row.met is True for row in report.rows)} bars met, {missed} missed; {arguments.out}")
    if is_installed("matplotlib"):
        plot(report, arguments.out.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""mhc against its bars: `python3 bench/mhc.py [--quick] [--out FILE]`.

A call is one boundary with weights, streams and sublayer output of its own; the calls of a graph together touch over
twice the L2. In such a chain a call is started before the one in front has ended (programmatic launch). Not so `behind
a plain kernel`: there torch.mul on f, which starts nothing early, is in front of each, and the time is that of both.
Bytes are counted once each: f, the old and the new streams, y, post and comb in and out, and fn. SGLang's kernels are
not on this machine: their times are quoted, each with where it was profiled. The peer is the same mathematics
in torch, in fp32, each operation its own kernel.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import needs_torch  # noqa: F401
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "bench")]

import common  # noqa: E402

from deepseek_v4_sm120.ops.mhc import FLASH_HIDDEN, mhc, mhc_head, mhc_post, mhc_pre  # noqa: E402
from deepseek_v4_sm120.ops.shared import extension  # noqa: E402
from deepseek_v4_sm120.specs.mhc import ALLOWED, Inputs, Shape, errors, make_inputs, torch_boundary  # noqa: E402

ISSUE = 7
BARS_US = {1: 6.0, 8: 7.0, 64: 12.0}
COPY_SHARE = {8192: 0.6}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
QUICK = (1, 8, 64, 8192)
OTHER_FORMS = (1, 8, 64)
BEHIND_ROWS = (1, 2, 4, 8, 32, 64)
REGIMES = {  # for the choice of kernels by rows
    **{rows: ("fused", "split") for rows in (1, 2, 4, 8, 16, 32, 64)},
    128: ("fused", "split", "many"),
    **{rows: ("split", "many") for rows in (256, 512, 1024, 4096)},
}
CHECKED_ROWS = 256  # float64 is slow
TORCH_ROWS = (1, 8, 64, 8192)
HIDDEN = FLASH_HIDDEN
QUOTED_US = {1: 14.2}
QUOTED_NOTE = "stock SGLang 0.5.17 in its engine at batch 1: pre 6.2 + prenorm GEMM 3.7 + post 4.3 us, norm not counted"


def boundary_bytes(rows: int) -> int:
    streams = 2 * 4 * HIDDEN * 2  # read and written
    return rows * (streams + 2 * HIDDEN * 2 + 2 * 20 * 4) + 24 * 4 * HIDDEN * 4


def calls_of(rows: int) -> list[Inputs]:
    count = common.layers_for_cold_caches(boundary_bytes(rows))
    return [make_inputs(Shape(rows), seed=seed) for seed in range(count)]


def gate(inputs: Inputs) -> dict[str, float]:
    """Relative errors of ours against float64; a wrong result ends the benchmark."""
    found = errors(inputs, mhc(**inputs.boundary()), rows=CHECKED_ROWS)
    for name, error in found.items():
        common.gate(f"{inputs.f.shape[0]} rows", error, ALLOWED[name], f"relative error of {name}")
    return found


def time_of(layers: list[Inputs], call: Callable[[Inputs], object]) -> float:
    return round(common.graph_microseconds([lambda one=one: call(one) for one in layers]), 3)


def run_boundary(report: common.Report, rows: int) -> None:
    layers = calls_of(rows)
    found = gate(layers[0])
    microseconds = time_of(layers, lambda one: mhc(**one.boundary()))
    share = boundary_bytes(rows) / microseconds / 1e3 / report.ceilings["copy_gbs"]
    bar, note = BARS_US.get(rows), ""
    if rows in COPY_SHARE:
        bar = round(boundary_bytes(rows) / 1e3 / report.ceilings["copy_gbs"] / COPY_SHARE[rows], 2)
        note = f"{COPY_SHARE[rows]:.0%} of the copy bandwidth"
    case = f"boundary, {rows} rows"
    report.add(
        common.row(ISSUE, case, "ours", "us", microseconds, bar, note),
        common.row(ISSUE, case, "ours", "copy_share", round(share, 4)),
        *(common.row(ISSUE, case, "ours", f"relative_error_{name}", float(f"{e:.3e}")) for name, e in found.items()),
    )
    verdict = "" if bar is None else "met" if microseconds <= bar else f"MISSED, bar {bar}"
    shown = ", ".join(f"{name} {error:.1e}" for name, error in found.items())
    print(f"{case}: {microseconds} us, {share:.3f} of copy, errors {shown} {verdict}", flush=True)
    if rows in QUOTED_US:
        report.add(common.row(ISSUE, case, "SGLang, quoted", "us", QUOTED_US[rows], note=QUOTED_NOTE))
    if rows in TORCH_ROWS:
        peer = time_of(layers[:4] if rows > 1000 else layers, lambda one: torch_boundary(**one.boundary()))
        report.add(common.row(ISSUE, case, "torch", "us", peer))
        print(f"{case}, torch: {peer} us", flush=True)


def run_behind(report: common.Report, rows: int) -> None:
    """As behind an all-reduce or an addition: nothing of the call can start before what is in front has ended."""
    layers = calls_of(rows)

    def both(one: Inputs):
        torch.mul(one.f, 1.0, out=one.f)
        return mhc(**one.boundary())

    case, value = f"boundary behind a plain kernel, {rows} rows", time_of(layers, both)
    alone = time_of(layers, lambda one: torch.mul(one.f, 1.0, out=one.f))
    report.add(common.row(ISSUE, case, "ours", "us", value, note="with that kernel"))
    report.add(common.row(ISSUE, case, "torch.mul alone", "us", alone))
    print(f"{case}: {value} us with that kernel, which alone takes {alone} us", flush=True)


def run_other_forms(report: common.Report, rows: int) -> None:
    layers = calls_of(rows)
    forms = {
        "pre": lambda one: mhc_pre(**one.pre()),
        "post": lambda one: mhc_post(**one.post_only()),
        "head": lambda one: mhc_head(**one.head()),
    }
    for name, call in forms.items():
        report.add(common.row(ISSUE, f"{name}, {rows} rows", "ours", "us", time_of(layers, call)))
        print(f"{name}, {rows} rows: {report.rows[-1].value} us", flush=True)


def run_regimes(report: common.Report, rows: int) -> None:
    layers = calls_of(rows)
    for kernels in REGIMES[rows]:
        case = f"boundary, {rows} rows"
        value = time_of(layers, lambda one, kernels=kernels: mhc(**one.boundary(), kernels=kernels))
        report.add(common.row(ISSUE, case, f"ours, {kernels}", "us", value))
        print(f"{case}, {kernels}: {value} us", flush=True)


def run_all(report: common.Report, quick: bool) -> None:
    for rows in QUICK if quick else ROWS:
        run_boundary(report, rows)
        torch.cuda.empty_cache()
    if quick:
        return
    one = make_inputs(Shape(1))
    host = round(common.host_microseconds(lambda: mhc(**one.boundary())), 2)
    report.add(common.row(ISSUE, "boundary, 1 rows", "ours", "host_us", host, note="Python and driver, eager"))
    report.add(common.eager_row(ISSUE, "boundary, 1 rows"))
    print(f"boundary, 1 row, eager: {host} us of Python and driver", flush=True)
    for rows in BEHIND_ROWS:
        run_behind(report, rows)
    for rows in OTHER_FORMS:
        run_other_forms(report, rows)
    for rows in REGIMES:
        run_regimes(report, rows)
        torch.cuda.empty_cache()


def summary(report: common.Report) -> str:
    ours = [row for row in report.rows if (row.impl, row.metric) == ("ours", "us")]
    values = {(row.case, row.impl, row.metric): row.value for row in report.rows}
    lines = []
    for row in ours:
        bar = "" if row.bar is None else f"{row.bar:g}{'' if row.met else ' MISSED'}"
        share, peer = values.get((row.case, "ours", "copy_share"), ""), values.get((row.case, "torch", "us"), "")
        lines.append((row.case, f"{row.value:.2f}", bar, str(share), str(peer)))
    return common.table(("case", "us", "bar", "share of copy", "torch us"), lines)


def plot(report: common.Report, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.5))
    values = {(row.case, row.impl, row.metric): row.value for row in report.rows}
    points = [(rows, values.get((f"boundary, {rows} rows", "ours", "us"))) for rows in ROWS]
    points = [point for point in points if point[1] is not None]
    axis.plot(*zip(*points, strict=True), marker="o", label="a boundary")
    copy = [boundary_bytes(rows) / report.ceilings["copy_gbs"] / 1e3 for rows, _ in points]
    axis.plot([rows for rows, _ in points], copy, linestyle="--", label="copy of its bytes")
    axis.plot(*zip(*BARS_US.items(), strict=True), linestyle="", marker="_", markersize=18, label="bar")
    axis.set(xlabel="rows", ylabel="microseconds", xscale="log", yscale="log")
    axis.set_title(f"mhc, cold weights, {torch.cuda.get_device_name()}")
    axis.grid(True, which="both", alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the cases with bars only")
    parser.add_argument("--out", type=Path, default=REPO / "bench/results/mhc.json")
    arguments = parser.parse_args()
    common.require_gpu()
    report = common.Report("mhc", extension.build_info()["git_commit"], common.ceilings())
    print(report.ceilings, flush=True)
    try:
        run_all(report, arguments.quick)
    finally:  # what was measured before a failure is kept
        report.write(arguments.out)
    print(summary(report))
    try:
        plot(report, arguments.out.with_suffix(".png"))
    except ImportError:
        print("no plot: matplotlib is not installed")
    return int(any(row.met is False for row in report.rows))


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""bf16_linear over the model's shapes: `python3 bench/bf16_linear.py [--commit HASH] [--out FILE]`.

Cold weights (a graph over layers with weights of their own, together over twice the L2), microseconds a call, share of
the read bandwidth of the same run. Peer: torch.mm into float32, which is what SGLang calls (cuBLAS). The issue
sets no bar for these.
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

from deepseek_v4_sm120.ops.bf16_linear import bf16_linear  # noqa: E402
from deepseek_v4_sm120.ops.shared import extension  # noqa: E402
from deepseek_v4_sm120.reference.accuracy import relative_error  # noqa: E402
from deepseek_v4_sm120.reference.bf16_linear import bf16_linear as reference  # noqa: E402
from deepseek_v4_sm120.specs import bounds  # noqa: E402
from deepseek_v4_sm120.specs.bf16_linear import MATRICES, make_weight, make_x  # noqa: E402

ISSUE = 7
INPUTS = 4096
ROWS = (1, 2, 8, 16, 32, 33, 64, 128, 256)


@dataclass(frozen=True)
class Case:
    what: str
    outputs: int
    rows: int

    @property
    def name(self) -> str:
        return f"{self.what}, {self.rows} rows"

    @property
    def bytes(self) -> int:
        return 2 * INPUTS * self.outputs


CASES = tuple(Case(matrix.name, matrix.outputs, rows) for matrix in MATRICES for rows in ROWS)


def measure(case: Case, gbs: float, report: common.Report) -> None:
    layers = common.layers_for_cold_caches(case.bytes)
    generator = torch.Generator("cuda").manual_seed(case.rows)
    weights = [make_weight(case.outputs, generator) for _ in range(layers)]
    x = make_x(case.rows, generator)
    error = relative_error(bf16_linear(x, weights[0]), reference(x, weights[0]))
    common.gate(case.name, error, bounds.BF16_LINEAR.truth)
    ours = common.graph_microseconds([lambda w=w: bf16_linear(x, w) for w in weights])
    cublas = common.graph_microseconds([lambda w=w: torch.mm(x, w.t(), out_dtype=torch.float32) for w in weights])
    share = case.bytes / ours / 1e3 / gbs
    report.add(
        common.row(ISSUE, case.name, "ours", "us", round(ours, 2)),
        common.row(ISSUE, case.name, "ours", "read_share", round(share, 3)),
        common.row(ISSUE, case.name, "ours", "relative_error", float(f"{error:.3g}"), bounds.BF16_LINEAR.truth),
        common.row(ISSUE, case.name, "torch.mm", "us", round(cublas, 2)),
    )
    print(f"{case.name}: {ours:.2f} us, {share:.2f} of read; torch.mm {cublas:.2f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", default=None, help="of the measured tree (default: the build's)")
    parser.add_argument("--out", type=Path, default=REPO / "bench/results/bf16_linear_h200.json")
    arguments = parser.parse_args()
    common.require_gpu()
    commit = arguments.commit or extension.build_info()["git_commit"]
    gbs = common.read_bandwidth_gbs()
    found = common.ceilings() | {"read_gbs": round(gbs, 1)}
    print(found, flush=True)
    report = common.Report("bf16_linear", commit, found)
    for case in CASES:
        measure(case, gbs, report)
    report.write(arguments.out)


if __name__ == "__main__":
    main()

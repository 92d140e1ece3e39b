#!/usr/bin/env python3
"""What drafts guess with: `python3 bench/bf16_linear_draft_head.py [--commit HASH] [--out FILE]`.

Cold weights, as bench/bf16_linear.py has them. The peer is the bf16 head that it stands for, torch.mm. Gated: every
row's greatest logit is where the head's own is, and the best are the head's numbers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import needs_torch  # noqa: F401
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "bench")]

import common  # noqa: E402

from deepseek_v4_sm120.commands.plan.models import FLASH  # noqa: E402
from deepseek_v4_sm120.ops import bf16_linear_draft_head as op  # noqa: E402
from deepseek_v4_sm120.ops.shared import extension  # noqa: E402
from deepseek_v4_sm120.specs.bf16_linear import make_head, make_x, others_than_the_heads  # noqa: E402

ISSUE = 21
ROWS = (1, 2, 4, 8, 16, 32, 64)
CARDS = (1, 2, 4, 8)
MIN_CALLS = 8


def measure(tp: int, gbs: float, report: common.Report) -> None:
    outputs = FLASH.vocab // tp
    bytes_read = outputs * FLASH.hidden // op.UNIT_INPUTS * op.UNIT_BYTES // op.TILE_OUTPUTS
    heads = [make_head(outputs, torch.Generator("cuda").manual_seed(tp))]
    heads += [tuple(t.clone() for t in heads[0]) for _ in range(common.layers_for_cold_caches(bytes_read) - 1)]
    turns = -(-MIN_CALLS // len(heads))
    for rows in ROWS:
        x = make_x(rows, torch.Generator("cuda").manual_seed(rows))
        name = f"drafts' head, TP{tp}, {rows} rows"
        common.gate(name, others_than_the_heads(x, *heads[0]), 0)
        ours = common.graph_microseconds([lambda x=x, w=w, c=c: op.draft_head(x, c, w) for w, c in heads] * turns)
        cublas = common.graph_microseconds([lambda x=x, w=w: torch.mm(x, w.t()) for w, _ in heads] * turns)
        report.add(
            common.row(ISSUE, name, "ours", "us", round(ours, 1)),
            common.row(ISSUE, name, "ours", "read_share", round(bytes_read / ours / 1e3 / gbs, 3)),
            common.row(ISSUE, name, "torch.mm, bf16", "us", round(cublas, 1)),
        )
        print(f"{name}: {ours:.1f} us; torch.mm {cublas:.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", default=None, help="of the measured tree (default: the build's)")
    parser.add_argument("--out", type=Path, default=REPO / "bench/results/bf16_linear_draft_head_h200.json")
    arguments = parser.parse_args()
    common.require_gpu()
    commit = arguments.commit or extension.build_info()["git_commit"]
    gbs = common.read_bandwidth_gbs()
    report = common.Report("bf16_linear_draft_head", commit, common.ceilings() | {"read_gbs": round(gbs, 1)})
    for tp in CARDS:
        measure(tp, gbs, report)
    report.write(arguments.out)


if __name__ == "__main__":
    main()

"""Runs the Triton kernels of mxfp4_moe in Triton's interpreter, on the CPU; prints {case: relative error} as JSON.

A program of its own: TRITON_INTERPRET must be set before the kernels are imported. float32 stands in for bf16, whose
conversions the interpreter truncates, so that the errors show every mistake of indexing.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

from deepseek_v4_sm120.ops import mxfp4_moe as op  # noqa: E402
from deepseek_v4_sm120.ops.triton.mxfp4_moe_table import Blocks  # noqa: E402
from deepseek_v4_sm120.reference import mxfp4_moe as reference  # noqa: E402
from deepseek_v4_sm120.reference.accuracy import relative_error  # noqa: E402
from deepseek_v4_sm120.specs.mxfp4_moe import Shape, make_inputs  # noqa: E402

SMALL = Shape(5, hidden=128, inter=64, experts=8)
SHAPES = {  # several things in one, where each is seen by itself: all take Triton's interpreter as long
    "holes, no limit": dataclasses.replace(SMALL, rows=20, masked=0.4, swiglu_limit=None),
    "no expert at all": dataclasses.replace(SMALL, masked=1.0),
    "one expert takes all": dataclasses.replace(SMALL, rows=12, ids="one"),
    "row counts at tile edges": dataclasses.replace(SMALL, rows=66, experts=14, ids="edges"),
    "repeated within a row": dataclasses.replace(SMALL, rows=9, ids="few"),
    "second rank, up first, scaled": dataclasses.replace(
        SMALL, rows=14, first_expert=8, all_experts=16, up_first=True, routed_scaling=1.5
    ),
    "map, wide scales": dataclasses.replace(SMALL, rows=14, mapped=True, all_experts=24, wide_scales=True),
}


def make_tiles(routing: op.Routing, experts: int, block_m: int) -> op.Tiles:
    """What the operator's kernels make, from the specification."""
    local = reference.local_experts(
        routing.ids, experts, first_expert=routing.first_expert, expert_map=routing.expert_map
    )
    num_whole = op.num_whole_tiles(local.numel(), block_m)
    pairs, table = reference.tiles(local, experts, block_m, num_whole)
    return op.Tiles(pairs, local.flatten().int(), op.cut(table, num_whole, block_m))


def run(shape: Shape, block_m: int = 32) -> float:
    inputs = make_inputs(shape, seed=7, device="cpu")
    out = torch.full((shape.rows, shape.hidden), float("nan"))
    limit = math.inf if inputs.swiglu_limit is None else inputs.swiglu_limit
    routing = op.Routing(
        inputs.topk_ids, inputs.topk_weights, inputs.first_expert, inputs.expert_map, inputs.routed_scaling
    )
    weights = op.Weights(inputs.w13, inputs.w13_scale, inputs.w2, inputs.w2_scale, inputs.up_first)
    blocks = (Blocks(block_m, 32, 64, 1, 4), Blocks(block_m, 64, 32, 1, 4))
    tiles = make_tiles(routing, shape.experts, block_m)
    op.run_grouped(inputs.hidden.float(), weights, routing, limit, out, tiles, "w4a16_interpreted", *blocks)
    return relative_error(out, reference.mxfp4_moe(**inputs.arguments()))


def main() -> None:
    found = {name: run(shape) for name, shape in SHAPES.items()}
    found["tiles of 64"] = run(SHAPES["row counts at tile edges"], 64)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Writes ops/triton/mxfp4_moe_table.py for this card: `python3 bench/tune_moe.py [--tp 1 2 4 8] [--dry-run]`.

For each tensor-parallel size and number of rows it times every candidate of both grouped GEMMs (graph replay)
and keeps the fastest pair with one block_m. A candidate must repeat itself to the last bit and agree with the default;
one that does not, or that this GPU cannot build (shared memory), is passed over with a line. Only the entries of this
GPU's capability are replaced.
"""

from __future__ import annotations

import argparse
import re
import sys
from itertools import product as combinations
from pathlib import Path

import needs_torch  # noqa: F401
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "bench")]

import common  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402

from deepseek_v4_sm120.ops import mxfp4_moe as op  # noqa: E402
from deepseek_v4_sm120.ops.triton import mxfp4_moe as kernels  # noqa: E402
from deepseek_v4_sm120.ops.triton import mxfp4_moe_table as table  # noqa: E402
from deepseek_v4_sm120.ops.triton.mxfp4_moe_table import Blocks, Entry  # noqa: E402
from deepseek_v4_sm120.reference.accuracy import relative_error  # noqa: E402
from deepseek_v4_sm120.specs.mxfp4_moe import Shape, make_inputs  # noqa: E402

ROWS = (256, 1024, 8192)
MAX_DIFFERENCE = 0.01  # relative L2 to the default's result: the order of a sum, not a mistake
CHECKS = 4  # runs of a candidate that must give the same bits; a race shows in the first few
BLOCK_M = (64, 128)
REST = {
    "gate_up": ((64, 64, 3, 4), (64, 128, 2, 4), (64, 128, 3, 4)),
    "down": ((64, 64, 3, 4), (128, 64, 3, 4), (128, 64, 3, 8)),
}


class WrongResult(Exception):
    """A candidate that does not compute what the default computes."""


class Layer:
    """One layer's weights, rows and scratch for a number of rows."""

    def __init__(self, rows: int, inter: int):
        self.inputs = inputs = make_inputs(Shape(rows, inter=inter), seed=1)
        self.routing = op.Routing(inputs.topk_ids, inputs.topk_weights, 0, None, 1.0)
        pairs, bf16 = rows * 6, {"dtype": torch.bfloat16, "device": "cuda"}
        self.h, self.y = torch.ones((pairs, inter), **bf16), torch.empty((pairs, inputs.hidden.shape[1]), **bf16)
        self.results: dict[str, torch.Tensor] = {}
        self.microseconds("gate_up", table.DEFAULT["gate_up"])
        self.microseconds("down", table.DEFAULT["down"])

    def microseconds(self, gemm: str, blocks: Blocks) -> float:
        inputs, tiles = self.inputs, op.make_tiles(self.routing, self.inputs.w13.shape[0], blocks.block_m)

        def gate_up():
            arguments = (inputs.hidden, inputs.w13, inputs.w13_scale, tiles, self.h)
            options = {"up_first": False, "limit": 10.0, "topk": 6, "product": "w4a16", "blocks": blocks}
            kernels.launch_gate_up(*arguments, **options)

        def down():
            kernels.launch_down(self.h, inputs.w2, inputs.w2_scale, tiles, self.y, product="w4a16", blocks=blocks)

        call, result = (gate_up, self.h) if gemm == "gate_up" else (down, self.y)
        if gemm == "down":
            self.h.copy_(self.results["gate_up"])  # the default's, whatever a candidate left there
        self.check(gemm, call, result)
        return common.graph_microseconds([call])

    def check(self, gemm: str, call, result: torch.Tensor) -> None:
        """The candidate repeats itself to the last bit and agrees with the default, which is the first to be asked."""
        found = []
        for _ in range(CHECKS):
            result.view(torch.uint8).fill_(0xFF)
            call()
            found.append(result.clone())
        known = self.results.setdefault(gemm, found[0])
        if any(not torch.equal(one.view(torch.uint8), found[0].view(torch.uint8)) for one in found):
            raise WrongResult("its result changes from run to run")
        if not relative_error(found[0].float(), known.float()) < MAX_DIFFERENCE:
            raise WrongResult("its result differs from the default's")


def fits(gemm: str, blocks: Blocks, inter: int) -> bool:
    n, k = (inter, 4096) if gemm == "gate_up" else (4096, inter)
    return n % blocks.block_n == 0 and k % blocks.block_k == 0


def best_pair(rows: int, inter: int) -> dict[str, Blocks]:
    """The fastest blocks of both GEMMs with one block_m."""
    layer, found = Layer(rows, inter), {}
    for gemm, block_m in combinations(REST, BLOCK_M):
        for rest in REST[gemm]:
            blocks = Blocks(block_m, *rest)
            if not fits(gemm, blocks, inter):
                continue
            try:
                microseconds = layer.microseconds(gemm, blocks)
            except (OutOfResources, WrongResult) as error:
                print(f"  {gemm} {blocks}: passed over, {error}")
                continue
            if microseconds < found.get((gemm, block_m), (float("inf"),))[0]:
                found[gemm, block_m] = (microseconds, blocks)
    whole = {m: found["gate_up", m][0] + found["down", m][0] for m in BLOCK_M if all((g, m) in found for g in REST)}
    block_m = min(whole, key=whole.get)
    print(f"inter {inter}, {rows} rows: {whole[block_m]:.0f} us with block_m {block_m}", flush=True)
    return {gemm: found[gemm, block_m][1] for gemm in REST}


def tune(tp_sizes: list[int], row_counts: list[int]) -> list[Entry]:
    major, entries = torch.cuda.get_device_capability()[0], []
    for tp, rows in combinations(tp_sizes, row_counts):
        inter = 2048 // tp
        shapes = {"gate_up": (inter, 4096), "down": (4096, inter)}
        for gemm, blocks in best_pair(rows, inter).items():
            limit = 1e9 if rows == max(row_counts) else rows * 6 / 256 * 2
            n, k = shapes[gemm]
            entries.append(Entry(major, gemm, limit, blocks, n=n, k=k))
    return entries


def write(entries: list[Entry], path: Path) -> None:
    text = path.read_text()
    lines = "".join(f"    {entry!r},\n" for entry in entries)
    replaced = f"ENTRIES: tuple[Entry, ...] = (  # fmt: skip\n{lines})\n"
    new, count = re.subn(
        r"ENTRIES: tuple\[Entry, \.\.\.\] = \((?:\)|.*?\n\))\n", lambda _: replaced, text, flags=re.DOTALL
    )
    if count != 1:
        raise SystemExit(f"{path} has no ENTRIES to replace")
    path.write_text(new)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--dry-run", action="store_true", help="print the entries, write nothing")
    arguments = parser.parse_args()
    common.require_gpu()
    major = torch.cuda.get_device_capability()[0]
    own = tune(arguments.tp, arguments.rows)
    entries = [entry for entry in table.ENTRIES if entry.major != major] + own
    if arguments.dry_run:
        print("\n".join(map(repr, own)))
    else:
        write(entries, Path(table.__file__))
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""A decode layer as in an engine, and each FP8 layer in it by other launches: `python3 bench/layer.py [--out FILE]`.

A launcher's choice between kernels is only right beside the kernels of a step: alone, in a chain of itself, a call of
wo_b is the fastest by a launch that costs a layer of four rows 6 us (docs/notes/fp8_linear.md). So a graph holds whole
C4 layers with weights of their own, together over twice the L2: boundary, wqkv_a, latent norm, wq_b, attention over
window and 256 entries, wo_a, wo_b, boundary, router's logits, routed experts and shared expert, their sum; the
compressors' products, the index's wq_b and head weights and the shared expert on streams of their own, as SGLang has
them. Norm, SwiGLU
and the queries' rotation are small Triton kernels; the experts' ids are drawn before, so that all graphs read the same
weights. Missing are the router's top-k, the compressor's and the indexer's own kernels, and the sums between cards.

A launch: warps beside each other (`kernel.cuh`), blocks a multiprocessor; of the bf16 products beside the queries',
warps of a block. Of wo_b and of the experts also who makes the last addition: a launch, or the boundary behind them.
None changes a bit of what the layers give, which is checked; of single calls that is the GPU tests' business.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
from pathlib import Path

import needs_torch  # noqa: F401
import torch
import triton
import triton.language as tl

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "bench")]

import common  # noqa: E402

from deepseek_v4_sm120.commands.calibrate.timing import COLD_L2_MULTIPLE  # noqa: E402
from deepseek_v4_sm120.commands.plan.models import FLASH  # noqa: E402
from deepseek_v4_sm120.ops import bf16_linear as bf16  # noqa: E402
from deepseek_v4_sm120.ops import fp8_linear as linear  # noqa: E402
from deepseek_v4_sm120.ops import wo_a as rotating  # noqa: E402
from deepseek_v4_sm120.ops.mhc import mhc  # noqa: E402
from deepseek_v4_sm120.ops.mxfp4_moe import add_shared, mxfp4_moe  # noqa: E402
from deepseek_v4_sm120.ops.shared import cuda_tensors, extension  # noqa: E402
from deepseek_v4_sm120.ops.sparse_decode import sparse_decode  # noqa: E402
from deepseek_v4_sm120.specs import fp8_linear as fp8_spec  # noqa: E402
from deepseek_v4_sm120.specs import mhc as mhc_spec  # noqa: E402
from deepseek_v4_sm120.specs import mxfp4_moe as moe_spec  # noqa: E402
from deepseek_v4_sm120.specs import sparse_decode as attention_spec  # noqa: E402
from deepseek_v4_sm120.specs.wo_a import make_wo_a  # noqa: E402

ISSUE = 24
TPS, ROWS = (1, 2, 4), (1, 2, 4, 8)
EXPERTS = 64
HIDDEN, HEADS, LATENT, INTER = FLASH.hidden, FLASH.heads, FLASH.q_lora, FLASH.expert_width
ENTRIES = attention_spec.CacheShape(64, 256, lengths=256)
COMPRESSORS, HEAD_WEIGHTS = "compressors", "head weights"
WARPS = 8, 16  # of a block of their products
WHOLE = "1 warp beside, 1 block"
SHARED = ("shared_gate_up", "shared_down")
ADDED = "added by the boundary"
BOTH = "wo_b, the shared expert whole"
ADDED_BY_IT = (("wo_b",), ("experts",), ("wo_b", "experts"))
TUNED = tuple(matrix.name for matrix in fp8_spec.matrices(1))
AS_LAUNCHED = "as launched"
REPLAYS, TURNS = 6, 11


def launches(num_sms: int) -> dict[str, dict[str, int]]:
    """{name: tuning} of the kernel for few rows."""
    return {
        WHOLE: {"warp_rows": 1, "blocks": num_sms},
        "1 warp beside, 2 blocks": {"warp_rows": 1, "blocks": 2 * num_sms},
        "4 warps beside": {"warp_rows": 4},
    }


@triton.jit
def _norm_kernel(x, y, stride, inputs: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, inputs)
    values = tl.load(x + row * stride + at).to(tl.float32)
    tl.store(y + row * inputs + at, (values * tl.rsqrt(tl.sum(values * values, 0) / inputs + 1e-6)).to(tl.bfloat16))


@triton.jit
def _scale_kernel(x, y, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y + at, (tl.load(x + at).to(tl.float32) * 0.5).to(tl.bfloat16))


@triton.jit
def _swiglu_kernel(x, y, width: tl.constexpr, block: tl.constexpr):
    row, at = tl.program_id(0), tl.program_id(1) * block + tl.arange(0, block)
    gate = tl.load(x + row * 2 * width + at).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + at).to(tl.float32)
    tl.store(y + row * width + at, (gate * tl.sigmoid(gate) * up).to(tl.bfloat16))


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")


@functools.cache
def side_streams() -> tuple[torch.cuda.Stream, ...]:
    """For all graphs the same: torch has 32, and deals the one that it captures on again in its turn."""
    return tuple(torch.cuda.Stream() for _ in range(4))


class Layer:
    """The weights of one, and ids for the most rows."""

    def __init__(self, tp: int, seed: int, most_rows: int):
        generator = torch.Generator("cuda").manual_seed(seed)
        self.fp8 = {
            m.name: fp8_spec.make_weight(m.groups, m.outputs, m.inputs, generator) for m in fp8_spec.matrices(tp)
        }
        self.compressor, self.index_compressor, self.head_weights, self.router = (
            (torch.randn((outputs, HIDDEN), generator=generator, device="cuda") / 64).to(torch.bfloat16)
            for outputs in (2048, 512, 64, 256)
        )
        self.boundaries = [mhc_spec.make_inputs(mhc_spec.Shape(1), seed=2 * seed + i) for i in range(2)]
        experts = moe_spec.Shape(most_rows, HIDDEN, INTER // tp, EXPERTS)
        given = moe_spec.make_inputs(experts, seed=seed).arguments()
        self.experts = {name: value for name, value in given.items() if name != "hidden"}


def run_layers(layers: list[Layer], tp: int, rows: int, tuned: dict[str, dict[str, int]], left: tuple[str, ...] = ()):
    """A function that runs them one behind the other and returns the last one's (output, index queries), which nobody
    else reads. Its inputs live with it. left: whose last addition the boundary makes."""
    heads, inter = HEADS // tp, INTER // tp
    start = mhc_spec.make_inputs(mhc_spec.Shape(rows), seed=9)
    attention = attention_spec.make_inputs(attention_spec.Shape(rows, heads, extra=ENTRIES)).arguments()
    _, _, _, freqs_cis, positions = make_wo_a(rows, FLASH.o_groups // tp, torch.Generator("cuda").manual_seed(1))
    indexing, beside, *compressing = side_streams()

    def product(layer, name, x, **further):
        groups, outputs, inputs = layer.fp8[name][0].shape
        out = empty(rows, groups, outputs)
        linear._run(x.view(rows, groups, inputs), *layer.fp8[name], out, **further, **tuned.get(name, {}))
        return out

    def project(name, y, weight):
        out = torch.empty((rows, len(weight)), device="cuda")
        bf16._launch(y, weight, out, **tuned.get(name, {}))

    def boundary(layer, which, f, streams, post, comb, **further):
        b = layer.boundaries[which]
        return mhc(f, streams, post, comb, b.fn, b.scale, b.base, norm_weight=b.norm_weight, **further)

    def project_out(layer, o):
        if "wo_b" not in left:
            return product(layer, "wo_b", o).view(rows, HIDDEN)
        weight, scale = layer.fp8["wo_b"]
        return linear.fp8_linear_unmerged(o.view(rows, -1), weight[0], scale[0])

    def run():
        rotation = rotating._rotation(freqs_cis, positions)
        main = torch.cuda.current_stream()
        f, streams, post, comb = start.f, start.streams, start.post, start.comb
        routed = {}
        for layer in layers:
            streams, post, comb, y = boundary(layer, 0, f, streams, post, comb, **routed)
            for stream in (beside, *compressing):
                stream.wait_stream(main)
            qkv = product(layer, "wqkv_a", y)
            for stream, name, weight in (
                (compressing[0], COMPRESSORS, layer.index_compressor),
                (compressing[1], HEAD_WEIGHTS, layer.head_weights),
                (beside, COMPRESSORS, layer.compressor),
            ):
                with torch.cuda.stream(stream):
                    project(name, y, weight)
            latent = empty(rows, LATENT)
            _norm_kernel[(rows,)](qkv, latent, qkv.stride(0), LATENT)
            indexing.wait_stream(main)
            with torch.cuda.stream(indexing):
                queries = product(layer, "index_wq_b", latent)
            plain, q = product(layer, "wq_b", latent), empty(rows, 1, heads, 512)
            _scale_kernel[(rows * heads,)](plain, q, 512)
            for stream in (beside, indexing, *compressing):
                main.wait_stream(stream)
            o = product(layer, "wo_a", sparse_decode(**attention | {"q": q}), rotation=rotation)
            f = project_out(layer, o)
            streams, post, comb, y = boundary(layer, 1, f, streams, post, comb)
            beside.wait_stream(main)
            with torch.cuda.stream(beside):
                gate_up, h = product(layer, "shared_gate_up", y), empty(rows, inter)
                _swiglu_kernel[(rows, inter // 256)](gate_up, h, inter, 256)
                shared = product(layer, "shared_down", h).view(rows, HIDDEN)
            bf16.bf16_linear(y, layer.router)
            ids = {name: layer.experts[name][:rows] for name in ("topk_ids", "topk_weights")}
            f = mxfp4_moe(y, **layer.experts | ids)
            main.wait_stream(beside)
            if "experts" in left and layer is not layers[-1]:
                f, routed = shared, {"routed": f}
            else:
                f, routed = add_shared(shared, f), {}
        return f, queries

    return run


def wrong(found, expected) -> str:
    """Of the results of a launch; empty: nothing. NaN everywhere would have the same bits."""
    if not all(one.isfinite().all() for one in found):
        return "results that are not finite"
    same = (torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(found, expected, strict=True))
    return "" if all(same) else f"other bits than {AS_LAUNCHED}"


def run_case(report: common.Report, layers: list[Layer], tp: int, rows: int, only: list[str], turns: int) -> None:
    name, num_sms = f"TP{tp}, {rows} rows", cuda_tensors.num_sms(torch.cuda.current_device())
    runs = {AS_LAUNCHED: run_layers(layers, tp, rows, {})}
    graphs, expected = {}, None
    for op in TUNED:
        for launch, tuning in launches(num_sms).items():
            runs[f"{op}: {launch}"] = run_layers(layers, tp, rows, {op: tuning})
    for op, warps in itertools.product((COMPRESSORS, HEAD_WEIGHTS), WARPS):
        runs[f"{op}: blocks of {warps} warps"] = run_layers(layers, tp, rows, {op: {"warps": warps}})
    beside = dict.fromkeys(SHARED, launches(num_sms)[WHOLE])
    runs[f"{' and '.join(SHARED)}: {WHOLE}"] = run_layers(layers, tp, rows, beside)
    runs[f"{BOTH}: {ADDED}"] = run_layers(layers, tp, rows, beside, ("wo_b",))
    for left in ADDED_BY_IT:
        runs[f"{' and '.join(left)}: {ADDED}"] = run_layers(layers, tp, rows, {}, left)
    runs = {impl: run for impl, run in runs.items() if impl == AS_LAUNCHED or not only or impl.split(": ")[-1] in only}
    for impl, run in runs.items():
        try:
            graphs[impl], found = common.captured(run)
        except RuntimeError as error:
            if "no kernel for this plan" not in str(error):
                raise
            torch.cuda.synchronize()
            continue
        expected = expected or [one.clone() for one in found]
        if problem := wrong(found, expected):
            raise SystemExit(f"{name}, {impl}: {problem}")
    for impl, us in common.microseconds_in_turns(graphs, turns=turns, replays=REPLAYS).items():
        report.add(common.row(ISSUE, name, impl, "us", round(us / len(layers), 2)))


def summary(report: common.Report) -> str:
    """What each other launch takes less than those that are: positive is faster."""
    values = {(row.case, row.impl): row.value for row in report.rows}
    lines = []
    for case in dict.fromkeys(row.case for row in report.rows):
        lines.append((case, AS_LAUNCHED, f"{values[case, AS_LAUNCHED]:.2f}", ""))
        for op in (*TUNED, COMPRESSORS, HEAD_WEIGHTS, " and ".join(SHARED), BOTH, *map(" and ".join, ADDED_BY_IT[1:])):
            cells = [(impl, us) for (of, impl), us in values.items() if of == case and impl.startswith(f"{op}: ")]
            lines += [("", impl, f"{us:.2f}", f"{values[case, AS_LAUNCHED] - us:+.2f}") for impl, us in cells]
    return common.table(("case", "launch", "us a layer", "less by"), lines)


def layers_for(tp: int, l2_bytes: int) -> int:
    """So many that their dense FP8 weights are over twice the L2, experts not counted; at least 3."""
    dense = sum(matrix.bytes for matrix in fp8_spec.matrices(tp))
    return max(3, math.ceil(COLD_L2_MULTIPLE * l2_bytes / dense))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, nargs="+", default=TPS)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--only", nargs="+", default=[], help="launches to compare, by what follows the colon")
    parser.add_argument("--turns", type=int, default=TURNS, help="of all launches, of which the median counts")
    parser.add_argument("--commit", default=None, help="of the measured tree (default: the build's)")
    parser.add_argument("--out", type=Path, default=REPO / "bench/results/layer.json")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    common.require_gpu()
    report = common.Report("layer", arguments.commit or extension.build_info()["git_commit"], common.ceilings())
    print(torch.cuda.get_device_name(), report.ceilings, flush=True)
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    for tp in arguments.tp:
        layers = [Layer(tp, seed, max(arguments.rows)) for seed in range(layers_for(tp, l2))]
        for rows in arguments.rows:
            run_case(report, layers, tp, rows, arguments.only, arguments.turns)
            report.write(arguments.out)
        del layers
        torch.cuda.empty_cache()
    print(summary(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

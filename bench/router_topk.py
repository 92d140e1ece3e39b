#!/usr/bin/env python3
"""The router's top-k: `python3 bench/router_topk.py --stock FILE [FILE ..] [--commit HASH] [--out FILE]`.

FILE: moe_fused_gate.py of a release of SGLang, out of its wheel; its Triton kernel is launched as SGLang does. First by
itself. Then what counts, a chain: boundary, router's logits, choice, routed experts, and on a second stream the shared
expert, at TP2 and with cold weights, in one graph; microseconds a layer, and of a chain whose experts are given.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import needs_torch  # noqa: F401
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "bench")]

import common  # noqa: E402

from deepseek_v4_sm120.commands.plan.models import FLASH  # noqa: E402
from deepseek_v4_sm120.ops.bf16_linear import bf16_linear  # noqa: E402
from deepseek_v4_sm120.ops.fp8_linear import fp8_linear  # noqa: E402
from deepseek_v4_sm120.ops.mhc import mhc  # noqa: E402
from deepseek_v4_sm120.ops.mxfp4_moe import add_shared, mxfp4_moe  # noqa: E402
from deepseek_v4_sm120.ops.router_topk import router_topk, triton_adds_in_pairs  # noqa: E402
from deepseek_v4_sm120.ops.shared import extension  # noqa: E402
from deepseek_v4_sm120.specs import bf16_linear as linear_spec  # noqa: E402
from deepseek_v4_sm120.specs import fp8_linear as fp8_spec  # noqa: E402
from deepseek_v4_sm120.specs import mhc as mhc_spec  # noqa: E402
from deepseek_v4_sm120.specs import mxfp4_moe as moe_spec  # noqa: E402
from deepseek_v4_sm120.specs.bounds import ROUTER_TOPK  # noqa: E402
from deepseek_v4_sm120.specs.provider import OURS  # noqa: E402
from deepseek_v4_sm120.specs.router_topk import KINDS, TOPK, error, make_inputs  # noqa: E402
from tests.patching import triton_router  # noqa: E402

ISSUE = 24
ROWS, CHAIN_ROWS = (1, 8, 64, 256), (1, 2, 4, 8, 32, 64)
TP, LAYERS = 2, 8
TURNS = 15
GIVEN = "none: experts given"
Choice = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def choices(files: list[Path], folder: Path) -> dict[str, Choice]:
    """By name; ours as the newest releases compute softplus."""
    in_pairs = triton_adds_in_pairs()
    found: dict[str, Choice] = {OURS: lambda logits, bias: router_topk(logits, bias, TOPK, in_pairs=in_pairs)}
    for number, file in enumerate(files):
        module = triton_router.load(triton_router.source_of(file.read_text()), folder / f"router_{number}.py")
        found[f"SGLang's of {file.stem}"] = lambda logits, bias, m=module: triton_router.moe_fused_gate(
            m, logits, bias, TOPK
        )
    return found


def check(stock: Choice) -> tuple[str, float]:
    """(which softplus this one computes, our error); other ids or bits end the benchmark."""
    generator = torch.Generator("cuda").manual_seed(1)
    low, in_pairs = make_inputs(256, generator, kind="low"), triton_adds_in_pairs()
    log1p = torch.equal(stock(low.logits, low.bias)[0], router_topk(low.logits, low.bias, TOPK, in_pairs=in_pairs)[0])
    for kind in KINDS:
        inputs = make_inputs(4096, generator, kind=kind)
        theirs = stock(inputs.logits, inputs.bias)
        for rows in (1, 4096):
            given = (inputs.logits[:rows], inputs.bias, TOPK)
            weights, ids = router_topk(*given, log1p=log1p, in_pairs=in_pairs)
            same = torch.equal(ids, theirs[1][:rows]) and torch.equal(
                weights.view(torch.int32), theirs[0][:rows].view(torch.int32)
            )
            common.gate(f"{kind}, {rows} rows", 0.0 if same else 1.0, 0.0, "other ids or bits than SGLang's")
        if kind == "normal":
            found = error(OURS, (weights, ids), inputs)
    return "log1p" if log1p else "log", found


@torch.no_grad()
def layer(generator: torch.Generator, seed: int) -> dict:
    """What a layer behind the attention has on a rank."""
    moe = moe_spec.Shape(2048, inter=FLASH.expert_width // TP)  # so many rows that every expert is named
    experts = moe_spec.make_inputs(moe, seed=seed).arguments()
    matrices = {m.name: m for m in fp8_spec.matrices(TP)}
    shared = [fp8_spec.make_loaded_weights(matrices[f"shared_{name}"], 1, generator)[0] for name in ("gate_up", "down")]
    return {
        "boundary": mhc_spec.make_inputs(mhc_spec.Shape(1), seed=seed),
        "router": linear_spec.make_weight(FLASH.experts, generator),
        "bias": torch.randn(FLASH.experts, generator=generator, device="cuda") * 0.1,
        "experts": {name: experts[name] for name in ("w13", "w13_scale", "w2", "w2_scale")},
        "shared": [tuple(t[0] for t in pair) for pair in shared],
    }


def chain(layers: list[dict], start: mhc_spec.Inputs, choose: Choice | None, given, side: torch.cuda.Stream):
    """The layers one behind the other; `given`: weights and experts of each, where nobody chooses."""
    main, chosen = torch.cuda.current_stream(), []
    f, streams, post, comb = start.f, start.streams, start.post, start.comb
    for number, one in enumerate(layers):
        b = one["boundary"]
        streams, post, comb, y = mhc(f, streams, post, comb, b.fn, b.scale, b.base, norm_weight=b.norm_weight)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            gate, up = fp8_linear(y, *one["shared"][0]).chunk(2, dim=1)
            shared = fp8_linear(torch.nn.functional.silu(gate) * up, *one["shared"][1])
        logits = bf16_linear(y, one["router"])
        weights, ids = choose(logits, one["bias"]) if choose else given[number]
        chosen.append((weights, ids))
        routed = mxfp4_moe(y, ids, weights, **one["experts"], routed_scaling=1.5)
        main.wait_stream(side)
        f = add_shared(shared, routed)
    return f, chosen


def chains(layers: list[dict], rows: int, named: dict[str, Choice]) -> dict[str, float]:
    """Microseconds a layer, in turns; all have the same experts."""
    side, start = torch.cuda.Stream(), mhc_spec.make_inputs(mhc_spec.Shape(rows), seed=9)
    graphs = {name: common.captured(lambda c=c: chain(layers, start, c, None, side)) for name, c in named.items()}
    given = [tuple(one.clone() for one in pair) for pair in graphs[OURS][1][1]]
    graphs[GIVEN] = common.captured(lambda: chain(layers, start, None, given, side))
    replayed = {name: graph for name, (graph, _) in graphs.items()}
    found = common.microseconds_in_turns(replayed, turns=TURNS, replays=max(2, 8 // rows))
    return {name: us / len(layers) for name, us in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stock", type=Path, nargs="+", required=True, help="moe_fused_gate.py as RELEASE.py")
    parser.add_argument("--commit", default=None, help="of the measured tree (default: the build's)")
    parser.add_argument("--out", type=Path, default=REPO / "bench/results/router_topk_h200.json")
    arguments = parser.parse_args()
    report = common.Report("router_topk", arguments.commit or extension.build_info()["git_commit"], common.ceilings())
    with tempfile.TemporaryDirectory() as folder:
        named = choices(arguments.stock, Path(folder))
        for name, stock in list(named.items())[1:]:
            softplus, found = check(stock)
            print(f"{name} ({softplus}): the same ids and bits", flush=True)
            report.add(common.row(ISSUE, "ids and bits", OURS, "relative_error", found, ROUTER_TOPK.truth))
        for rows in ROWS:
            inputs = [make_inputs(rows, torch.Generator("cuda").manual_seed(n)) for n in range(64)]
            for name, choose in named.items():
                us = common.graph_microseconds([lambda i=i, c=choose: c(i.logits, i.bias) for i in inputs])
                report.add(common.row(ISSUE, f"alone, {rows} rows", name, "us", round(us, 2)))
                print(f"alone, {rows} rows, {name}: {us:.2f} us", flush=True)
        generator = torch.Generator("cuda").manual_seed(0)
        layers = [layer(generator, seed) for seed in range(LAYERS)]
        for rows in CHAIN_ROWS:
            for name, us in chains(layers, rows, named).items():
                report.add(common.row(ISSUE, f"a layer of a chain, {rows} rows", name, "us", round(us, 2)))
                print(f"chain, {rows} rows, {name}: {us:.2f} us a layer", flush=True)
    report.write(arguments.out)


if __name__ == "__main__":
    main()

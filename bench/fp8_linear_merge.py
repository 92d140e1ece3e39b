#!/usr/bin/env python3
"""Splits of fp8_linear, added by a second launch or in the launch itself: `fp8_linear_merge.py DIGESTS OUT [PACKAGE]`.

PACKAGE: the folder of the build whose operator is timed; DIGESTS: of the results, written by the first run, compared by
the next. For the decision only.
"""

import hashlib
import json
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PACKAGE = Path(sys.argv[3]).resolve() if len(sys.argv) > 3 else REPO
sys.path[:0] = [str(PACKAGE), str(REPO / "bench")]

import common  # noqa: E402
import torch  # noqa: E402

from deepseek_v4_sm120.commands.calibrate.timing import graph_microseconds, replay_microseconds  # noqa: E402
from deepseek_v4_sm120.ops import bf16_linear
from deepseek_v4_sm120.ops import fp8_linear as op  # noqa: E402
from deepseek_v4_sm120.ops import wo_a  # noqa: E402
from deepseek_v4_sm120.specs.fp8_linear import make_weight, make_x  # noqa: E402
from deepseek_v4_sm120.specs.wo_a import make_freqs_cis  # noqa: E402

# (name, groups, outputs, inputs, rotated)
SHAPES = [
    ("wqkv_a", 1, 1536, 4096, False),
    ("wo_a TP1", 8, 1024, 4096, True),
    ("wo_a TP2", 4, 1024, 4096, True),
    ("wo_b TP1", 1, 4096, 8192, False),
    ("wo_b TP2, gate_up", 1, 4096, 4096, False),
    ("gate_up TP2", 1, 2048, 4096, False),
    ("down", 1, 4096, 2048, False),
    ("index_wq_b", 1, 8192, 1024, False),
]
CHAIN = ("wqkv_a", "index_wq_b", "wo_a TP2", "wo_b TP2, gate_up", "gate_up TP2", "down")  # some layer of TP2
ROWS = (8, 16, 32, 64)
BASE = PACKAGE != REPO
MODES = {"base": {}} if BASE else {"launch": {"merge": 1}, "blind": {"merge": 4}, "block": {"merge": 5}}
DEVICE = torch.device("cuda")


SMALL = torch.zeros(4096, device="cuda")
X, WEIGHT = (torch.randn(n, 4096, device="cuda").bfloat16() for n in (16, 256))
# nothing, a kernel of ours, which starts early, and one that does not
BEHIND = {"": None, "+": lambda: bf16_linear.bf16_linear(X, WEIGHT), "n": lambda: torch.neg(SMALL)}


class Layer:
    def __init__(self, shape, count):
        self.name, self.groups, self.outputs, self.inputs, self.rotated = shape
        generator = torch.Generator("cuda").manual_seed(self.outputs + self.inputs)
        weight, scale = make_weight(count * self.groups, self.outputs, self.inputs, generator)
        self.weights = weight.view(count, self.groups, *weight.shape[1:])
        self.scales = scale.view(count, self.groups, *scale.shape[1:])
        self.x = make_x(64, self.groups, self.inputs, generator)
        self.positions = torch.randint(0, 500, (64,), generator=generator, device="cuda")
        self.freqs = make_freqs_cis(500, DEVICE)

    def __call__(self, i, rows, x=None, **tuning):
        out = torch.empty(rows, self.groups, self.outputs, dtype=torch.bfloat16, device="cuda")
        rotation = wo_a._rotation(self.freqs, self.positions[:rows]) if self.rotated else op.NO_ROTATION
        op._run(self.x[:rows], self.weights[i], self.scales[i], out, rotation=rotation, **tuning)
        return out


def digest(tensor):
    return hashlib.sha256(tensor.view(torch.int16).cpu().numpy().tobytes()).hexdigest()[:16]


def side_by_side(layer, rows, tuning, times=60):
    """Two eager streams and two graphs at once, over and over: how many results differ from a call's by itself."""
    good = layer(0, rows, **{**tuning, "merge": 1})
    torch.cuda.synchronize()
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [layer(0, rows, **tuning) for _ in range(8)]
        graphs.append((graph, outs))
    streams = [torch.cuda.Stream() for _ in range(4)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    kept = []
    for turn in range(times):
        eager = []
        for stream, (graph, _) in zip(streams, graphs, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        for stream in streams[2:]:
            with torch.cuda.stream(stream):
                eager += [layer(0, rows, **tuning) for _ in range(8)]
        if turn % 10 == 9:
            torch.cuda.synchronize()
            for out in [*kept, *eager, *(o for _, outs in graphs for o in outs)]:
                wrong += (out.view(torch.int16) != good.view(torch.int16)).any()
            kept = []
        else:
            kept += eager
    torch.cuda.synchronize()
    return int(wrong)


def main():
    path = Path(sys.argv[1])
    known = json.loads(path.read_text()) if path.exists() else {}
    wrong, lines = [], []
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    print(torch.cuda.get_device_name(), "base" if BASE else "new", flush=True)
    for shape in SHAPES:
        name, groups, outputs, inputs, _ = shape
        layer = Layer(shape, max(4, -(-22 * l2 // (10 * groups * outputs * inputs))))
        count = len(layer.weights)
        calls = count * -(-40 // count)
        for rows in ROWS:
            if rows == 8 and name != "wo_b TP1":
                continue
            cells = {}
            for mode, tuning in MODES.items():
                for i in (0, 1):
                    key = f"{name} {rows} {i}"
                    mine = digest(layer(i, rows, **tuning))
                    if known.setdefault(key, mine) != mine:
                        wrong.append(f"{key} {mode}")
            for _ in range(1 if BASE else 2):
                for mode, tuning in MODES.items():
                    for end, behind in BEHIND.items():

                        def one(i):
                            kept = layer(i % count, rows, **tuning)
                            return kept, behind and behind()

                        took = graph_microseconds([lambda i=i: one(i) for i in range(calls)])
                        cells[mode + end] = min(cells.get(mode + end, took), took)
            lines.append((f"{name} {rows}", cells))
            print(name, rows, {k: round(v, 2) for k, v in cells.items()}, flush=True)
            if not BASE and rows in (64, 8):
                for mode in ("blind", "block"):
                    bad = side_by_side(layer, rows, MODES[mode])
                    if bad:
                        wrong.append(f"{name} {rows} {mode}: {bad} side by side")
    layers = [Layer(next(s for s in SHAPES if s[0] == name), 6) for name in CHAIN]
    for rows in ROWS[1:]:
        cells = {}
        for mode, tuning in [*MODES.items()] * 2:
            for end, behind in BEHIND.items():
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    kept = [(one(i, rows, **tuning), behind and behind()) for i in range(6) for one in layers]
                took = replay_microseconds(graph) / 6
                cells[mode + end] = min(cells.get(mode + end, took), took)
                del kept
        lines.append((f"layer {rows}", cells))
        print("layer", rows, {k: round(v, 2) for k, v in cells.items()}, flush=True)
    path.write_text(json.dumps(known))
    out = Path(sys.argv[2])
    everything = json.loads(out.read_text()) if out.exists() else {}
    for name, cells in lines:
        merged = everything.setdefault(name, {})
        for mode, value in cells.items():
            if mode in merged:
                mode += "'"
            merged[mode] = value
    out.write_text(json.dumps(everything, indent=1))
    names = list(dict.fromkeys(m for cells in everything.values() for m in cells))
    print(
        common.table(
            ("case", *names),
            [(case, *(f"{cells[m]:.2f}" if m in cells else "" for m in names)) for case, cells in everything.items()],
        )
    )
    print("bits:", wrong or "all the same")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""The inputs of every sublayer that an engine was seen to compute (layers_plugin) beside the model's own, in float64.

usage: layers_compare.py MODEL RECORDS OUT.json

Each sublayer is given what the engine gave it, and must make of it what the engine gave the next one; so nothing of an
error is handed on but what the streams keep of it. Of a request's rows a layer's attention sees what was written last
at each position, as an engine's cache does: prompts in chunks, single tokens, drafts that were refused.

A sublayer's error is mostly what FP8 rounds away, per cents of its output, under which a fault of less may hide. So
each known fault (reference/model.py, Rules) is computed, too: its share in the error is the error's projection upon
what that fault would have made of it, 0 where the engine has it not and 1 where it has. `reach` is the share's
deviation if the error had nothing to do with the fault: a fault of which that is not small cannot be told.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(REPO)]

import torch  # noqa: E402

from deepseek_v4_sm120.reference import model  # noqa: E402
from deepseek_v4_sm120.reference.model import Rules  # noqa: E402

OUTLIER = 0.5  # of a row: an expert, or an entry of the index, that was chosen otherwise by a near tie
ATTENTION = {
    "a window of 127": Rules(window=127),
    "a window of 129": Rules(window=129),
    "not itself": Rules(sees_itself=False),
    "queries a position too far": Rules(position=1),
    "no sink": Rules(sink=False),
    "not rotated back": Rules(rotates_back=False),
    "queries not of unit length": Rules(unit_queries=False),
}
OF_RATIO = {
    0: {"YaRN in layers without entries": Rules(yarn_without_entries=True)},
    4: {
        "an entry too early": Rules(entries_early=1),
        "an entry too late": Rules(entries_early=-1),
        "groups do not overlap": Rules(overlap=False),
        "no ape": Rules(ape=False),
        "no YaRN": Rules(yarn=False),
        "three quarters of the index's entries": Rules(index_topk=384),
        "all entries": Rules(index_topk=1 << 30),
    },
    128: {
        "an entry too early": Rules(entries_early=1),
        "an entry too late": Rules(entries_early=-1),
        "no ape": Rules(ape=False),
        "no YaRN": Rules(yarn=False),
    },
}
EXPERTS = {
    "weights not normalised": Rules(renormalize=False),
    "no routed scale": Rules(routed_scale=1.0),
    "no shared expert": Rules(shared_expert=False),
}
BIASED = {"bias in the weights": Rules(bias_in_weights=True)}
HASHED = {"not by the token's number": Rules(hashed=False)}
MIXING = {"streams mixed the other way": Rules(mixing_turned=True)}
BLIND = "blind behind the first draft"


@dataclass
class Share:
    along: float = 0.0
    square: float = 0.0


@dataclass
class Group:
    """Rows of one kind of sublayer in one kind of pass."""

    rows: int = 0
    outliers: int = 0
    error: float = 0.0
    size: float = 0.0
    worst: float = 0.0
    shares: dict = field(default_factory=lambda: defaultdict(Share))

    def add(self, seen, truth, effects):
        error = seen.double() - truth
        by_row = error.norm(dim=1) / truth.norm(dim=1)
        kept = by_row < OUTLIER
        self.rows += len(by_row)
        self.outliers += int((~kept).sum())
        self.worst = max(self.worst, float(by_row.max()))
        self.error += float(error[kept].square().sum())
        self.size += float(truth[kept].square().sum())
        for name, changed in effects.items():
            effect = (changed - truth)[kept]
            self.shares[name].along += float((error[kept] * effect).sum())
            self.shares[name].square += float(effect.square().sum())

    def summary(self, hidden):
        found = {"rows": self.rows, "outliers": self.outliers, "worst": self.worst}
        found["error"] = (self.error / self.size) ** 0.5 if self.size else None
        numbers = (self.rows - self.outliers) * hidden
        found["faults"] = {
            name: {
                "share": s.along / s.square,
                "reach": (self.error / s.square / numbers) ** 0.5,
                "strength": (s.square / self.size) ** 0.5,
            }
            for name, s in self.shares.items()
            if s.square > 0
        }
        return found


class Kept(model.Weights):
    """Weights whose dequantised tensors stay, but for the experts'."""

    def __init__(self, tensors, prefix="", kept=None):
        super().__init__(tensors, prefix)
        self.kept = {} if kept is None else kept

    def under(self, prefix):
        return Kept(self.tensors, self.prefix + prefix, self.kept)

    def __call__(self, name):
        if ".experts." in self.prefix:
            return super().__call__(name)
        if self.prefix + name not in self.kept:
            self.kept[self.prefix + name] = super().__call__(name)
        return self.kept[self.prefix + name]


class Judge:
    """faults: the names of those that are looked for; None: all."""

    def __init__(self, config: dict, tensors, device="cpu", faults=None):
        self.faults = faults
        self.config, self.weights, self.device = model.Config.of(config), Kept(tensors), device
        self.hidden, self.layers = config["hidden_size"], config["num_hidden_layers"]
        self.histories = {}  # (kind, request) -> a layer's inputs by position, newest request last
        self.first_draft = {}  # request -> the position of the first draft that is under way
        self.groups = defaultdict(Group)

    def sublayers(self, kind):
        """(weights, ratio, hashed) of each layer."""
        if kind == "draft":
            return [(self.weights.under("mtp.0."), 0, False)]
        ratios = self.config.ratios
        return [
            (self.weights.under(f"layers.{i}."), ratios[i], i < self.config.hash_layers) for i in range(self.layers)
        ]

    def take(self, record: dict) -> None:
        """One pass, as the plugin wrote it."""
        record = {k: v.to(self.device) if hasattr(v, "to") else v for k, v in record.items()}
        segments = self.segments(record)
        rows = torch.cat([torch.arange(s.start, s.stop, device=self.device) for _, s in segments])
        tokens, layers = record["tokens"][rows].long(), self.sublayers(record["kind"])
        if len(record["y"]) != 2 * len(layers):
            raise ValueError(f"a pass has {len(record['y'])} inputs of sublayers, expected {2 * len(layers)}")
        y = [one.to(self.device)[rows] for one in record["y"]]
        embedded = self.weights.raw("embed.weight")[tokens]
        streams = embedded.double()[:, None].expand(-1, 4, -1)
        if record["kind"] == "draft":
            hidden = record["hidden"][rows].view(len(rows), 4, -1)
            streams = model.draft_streams(self.config, self.weights.under("mtp.0."), embedded, hidden)
        what, effects, mode = "embedding", {}, f"{record['kind']}, {record['mode'].lower()}"
        for number, (weights, ratio, hashed) in enumerate(layers):
            for kind in ("attn", "ffn"):
                seen = y[2 * number + (kind == "ffn")]
                truth, post, comb = self.mixed(weights, kind, streams)
                changed = {name: self.mixed(weights, kind, other)[0] for name, other in effects.items()}
                self.groups[what, mode].add(seen, truth, changed)
                if kind == "attn":
                    made = self.attention(record, segments, number, weights.under("attn."), ratio, seen)
                    what = f"attention, ratio {ratio}"
                else:
                    made = self.experts(weights.under("ffn."), seen, tokens, hashed)
                    what = "experts, hashed" if hashed else "experts, routed"
                effects = {name: model.behind(f, streams, post, comb) for name, f in made.items()}
                for name, rules in self.asked(MIXING).items():
                    if name is not None:
                        effects[name] = model.behind(made[None], streams, post, comb, rules)
                streams = effects.pop(None)
        of_head = self.weights.under("mtp.0.") if record["kind"] == "draft" else self.weights
        truth = model.head(self.config, of_head, streams)
        changed = {name: model.head(self.config, of_head, other) for name, other in effects.items()}
        self.groups[what, mode].add(record["out"][rows], truth, changed)

    def mixed(self, weights, kind, streams):
        return model.mixing(self.config, weights, kind, f"{kind}_norm", streams)

    def segments(self, record) -> list:
        """[(request, its rows)], without what fills a captured pass up: rows at position 0 that are no prompt's."""
        positions, requests = record["positions"].tolist(), record["requests"].tolist()
        lengths = record.get("lengths")
        each = [len(positions) // len(requests)] * len(requests) if lengths is None else lengths.tolist()
        found, begin = [], 0
        for request, length in zip(requests, each, strict=True):
            rows = slice(begin, begin + length)
            begin += length
            at = positions[rows]
            if not at or (lengths is None and at[0] == 0):
                continue
            if at != list(range(at[0], at[0] + length)):
                raise ValueError(f"rows of a request are at positions {at}, expected one after the other")
            found.append((request, rows))
            if is_chained(record):
                self.first_draft.setdefault(request, at[0])
        if not is_chained(record):
            self.first_draft.clear()
        return found

    def attention(self, record, segments, number, weights, ratio, seen) -> dict:
        """{fault or None: the sublayer's output [rows, hidden]}."""
        found, begin, kind = defaultdict(list), 0, record["kind"]
        for request, rows in segments:
            length = rows.stop - rows.start
            start = int(record["positions"][rows.start])
            history = self.history(kind, request, number, start)
            history = torch.cat([history[:start], seen[begin : begin + length]])
            self.histories[kind, request][number] = history
            begin += length
            faults = ATTENTION | OF_RATIO[ratio]
            if is_chained(record):
                faults[BLIND] = Rules(sees_before=self.first_draft[request])
            for name, rules in self.asked(faults).items():
                made = model.attention(self.config, weights, history, ratio, first=start, rules=rules)
                found[name].append(made)
        return {name: torch.cat(parts) for name, parts in found.items()}

    def history(self, kind, request, number, start):
        """A layer's inputs of the request up to `start`: its own, or of the newest request whose prefix it has."""
        own = self.histories.pop((kind, request), {})
        if start == 0 and number == 0:
            own = {}
        if number not in own or len(own[number]) < start:
            others = [
                h[number] for (k, _), h in self.histories.items() if k == kind and len(h.get(number, ())) >= start
            ]
            if start and not others:
                raise ValueError(f"nothing is known of the first {start} tokens of a request of a {kind}")
            own[number] = others[-1] if start else torch.empty(0, self.hidden, device=self.device, dtype=torch.bfloat16)
        self.histories[kind, request] = own
        return own[number]

    def experts(self, weights, seen, tokens, hashed) -> dict:
        faults = EXPERTS | (HASHED if hashed else BIASED)
        return {
            name: model.experts(self.config, weights, seen, tokens, hashed=hashed, rules=rules)
            for name, rules in self.asked(faults).items()
        }

    def asked(self, faults) -> dict:
        """The model itself, under None, and the faults that are looked for."""
        return {None: Rules()} | {k: v for k, v in faults.items() if self.faults is None or k in self.faults}

    def summary(self) -> list:
        return [{"what": what, "mode": mode} | g.summary(self.hidden) for (what, mode), g in self.groups.items()]


def is_chained(record) -> bool:
    """Whether a pass drafts behind other drafts: one row a request, by the MTP block."""
    return record["kind"] == "draft" and record["mode"] == "DECODE"


def tensors_of(folder: Path, device: str) -> dict:
    from safetensors import safe_open

    found = {}
    for name in sorted(set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())):
        with safe_open(folder / name, "pt", device=device) as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return found


def main():
    folder, records, out = map(Path, sys.argv[1:4])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = json.loads((folder / "config.json").read_text())
    judge = Judge(config, tensors_of(folder, device), device)
    paths = sorted(records.glob("*.pt"))
    with torch.inference_mode():
        for path in paths:
            judge.take(torch.load(path))
    out.write_text(json.dumps({"passes": len(paths), "groups": judge.summary()}, indent=1))


if __name__ == "__main__":
    main()

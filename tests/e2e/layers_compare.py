#!/usr/bin/env python3
"""The inputs of every sublayer that an engine was seen to compute (layers_plugin) beside the model's own, in float64.

usage: layers_compare.py MODEL RECORDS OUT.json

Nothing is rounded here but what caches store. Each sublayer is given what the engine gave it, and must make of it what
the engine gave the next one; so nothing of an error is handed on but what the streams keep of it. Of a request's rows a
layer's attention sees what was written last at each position, as an engine's cache does: prompts in chunks, single
tokens, drafts that were refused.

A sublayer's error is mostly what FP8 rounds away, per cents of its output, under which a fault of less may hide. So
each known fault (reference/model.py, Rules) is computed, too: its share in the error is the error's projection upon
what that fault would have made of it, 0 where the engine has it not and 1 where it has. What only the index's choice
tells is a fault apart: near ties that an engine's rounding decides otherwise lend those some share, and none to others.
`reach` is the share's deviation if the error had nothing to do with the fault: a fault of which that is not small
cannot be told. Of the passes of a mode, FAULTY are given the faults: a pass costs as many computations of the model as
there are.
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

BLOCK = 1024  # rows at a time
FAULTY = 16
OUTLIER = 0.5  # of a row: an expert, or an entry of the index, that was chosen otherwise by a near tie
ATTENTION = {
    "a window of 127": Rules(window=127),
    "a window of 129": Rules(window=129),
    "not itself": Rules(sees_itself=False),
    "queries a position too far": Rules(position=1, index=Rules()),
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
        "no YaRN": Rules(yarn=False, index=Rules()),
        "the index without YaRN": Rules(index=Rules(yarn=False)),
        "the index's queries a position too far": Rules(index=Rules(position=1)),
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


@dataclass
class Pass:
    """A pass of the model: its requests' rows, without what fills a captured one up."""

    mode: str
    segments: list  # (request, first position, rows of the pass)
    tokens: torch.Tensor
    y: list
    out: torch.Tensor
    hidden: torch.Tensor | None
    first_drafts: dict  # request -> where the drafts began, of which this is one


@dataclass
class Before:
    """The last sublayer, and what else it could have made: {fault or None: f [rows, hidden]}."""

    what: str
    streams: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    made: dict


class Judge:
    """faults: the names of those that are looked for; None: all."""

    def __init__(self, config: dict, tensors, device="cpu", faults=None):
        self.config, self.weights, self.device = model.Config.of(config), Kept(tensors), device
        self.faults, self.hidden, self.layers = faults, config["hidden_size"], config["num_hidden_layers"]
        self.passes = {"target": [], "draft": []}
        self.first_drafts = {}  # request -> the position of the first draft that is under way
        self.groups = defaultdict(Group)

    def sublayers(self, kind):
        """(weights, ratio, hashed) of each layer."""
        if kind == "draft":
            return [(self.weights.under("mtp.0."), 0, False)]
        ratios, hashed = self.config.ratios, self.config.hash_layers
        return [(self.weights.under(f"layers.{i}."), ratios[i], i < hashed) for i in range(self.layers)]

    def take(self, record: dict) -> None:
        """One pass, as the plugin wrote it, in the order in which they ran."""
        kind, expected = record["kind"], 2 * len(self.sublayers(record["kind"]))
        if len(record["y"]) != expected:
            raise ValueError(f"a pass has {len(record['y'])} inputs of sublayers, expected {expected}")
        segments = self.segments(record)
        if not segments:
            return
        rows = torch.cat([torch.arange(s.start, s.stop) for _, _, s in segments])
        y, hidden = [one[rows] for one in record["y"]], record.get("hidden")
        hidden = None if hidden is None else hidden[rows]
        mode = f"{kind}, {record['mode'].lower()}"
        first = dict(self.first_drafts) if is_chained(record) else {}
        one = Pass(mode, segments, record["tokens"][rows].long(), y, record["out"][rows], hidden, first)
        self.passes[kind].append(one)

    def segments(self, record) -> list:
        """[(request, its first position, its rows)]; of a captured pass rows at position 0 are nobody's."""
        positions, requests = record["positions"].tolist(), record["requests"].tolist()
        lengths = record.get("lengths")
        each = [len(positions) // len(requests)] * len(requests) if lengths is None else lengths.tolist()
        found, begin = [], 0
        if not is_chained(record):
            self.first_drafts = {}
        for request, length in zip(requests, each, strict=True):
            rows = slice(begin, begin + length)
            begin += length
            at = positions[rows]
            if not at or (lengths is None and at[0] == 0):
                continue
            if at != list(range(at[0], at[0] + length)):
                raise ValueError(f"rows of a request are at positions {at}, expected one after the other")
            found.append((request, at[0], rows))
            if is_chained(record):
                self.first_drafts.setdefault(request, at[0])
        return found

    def finish(self) -> list:
        """What is known of each kind of sublayer in each kind of pass."""
        for kind, passes in self.passes.items():
            if passes:
                self.judge(kind, passes)
        return [{"what": what, "mode": mode} | g.summary(self.hidden) for (what, mode), g in self.groups.items()]

    def judge(self, kind, passes) -> None:
        """All passes at once, sublayer by sublayer."""
        modes = [(p.mode, len(p.tokens)) for p in passes]
        tokens = torch.cat([p.tokens for p in passes]).to(self.device)
        embedded = self.weights.raw("embed.weight")[tokens]
        streams = embedded.double()[:, None].expand(-1, 4, -1)
        if kind == "draft":
            hidden = torch.cat([p.hidden for p in passes]).to(self.device).view(len(tokens), 4, -1)
            streams = model.draft_streams(self.config, self.weights.under("mtp.0."), embedded, hidden)
        before = Before("embedding", streams, None, None, {})
        for number, (weights, ratio, hashed) in enumerate(self.sublayers(kind)):
            for part in ("attn", "ffn"):
                seen = torch.cat([p.y[2 * number + (part == "ffn")] for p in passes]).to(self.device)

                def mixed(streams, weights=weights, part=part):
                    return model.mixing(self.config, weights, part, f"{part}_norm", streams)

                streams, post, comb = self.boundary(before, modes, seen, mixed)
                if part == "attn":
                    what, made = f"attention, ratio {ratio}", self.attention(passes, number, weights, ratio)
                else:
                    what = "experts, hashed" if hashed else "experts, routed"
                    made = self.experts(weights.under("ffn."), seen, tokens, hashed)
                before = Before(what, streams, post, comb, made)
        of_head = self.weights.under("mtp.0.") if kind == "draft" else self.weights
        seen = torch.cat([p.out for p in passes]).to(self.device)
        self.boundary(before, modes, seen, lambda streams: (model.head(self.config, of_head, streams), None, None))

    def boundary(self, before: Before, modes, seen, mixed):
        """(streams, post, comb) in front of a sublayer whose inputs were `seen`, all rows in blocks."""
        found, begin, groups = [], 0, [self.groups[before.what, mode] for mode, rows in modes for _ in range(rows)]
        while begin < len(seen):
            end = begin + 1
            while end < min(begin + BLOCK, len(seen)) and groups[end] is groups[begin]:
                end += 1
            rows = slice(begin, end)
            streams = before.streams[rows]
            changed = {}
            if before.made:
                at = (streams, before.post[rows], before.comb[rows])
                faults = {name: model.behind(f[rows], *at) for name, f in before.made.items()}
                for name, rules in self.asked(MIXING).items():
                    if name is not None:
                        faults[name] = model.behind(before.made[None][rows], *at, rules)
                streams = faults.pop(None)
                changed = {name: mixed(other)[0] for name, other in faults.items()}
            truth, post, comb = mixed(streams)
            groups[begin].add(seen[rows], truth, changed)
            found.append((streams, post, comb))
            begin = end
        return [None if parts[0] is None else torch.cat(parts) for parts in zip(*found, strict=True)]

    def attention(self, passes, number, weights, ratio) -> dict:
        """{fault or None: the sublayer's output [rows, hidden]} of all passes."""
        found, histories, weights = defaultdict(list), {}, weights.under("attn.")
        faulty, every = faulty_ones(passes), ATTENTION | OF_RATIO[ratio]
        every = every | ({BLIND: None} if self.passes["draft"] is passes else {})
        for number_of_pass, one in enumerate(passes):
            begin, y = 0, one.y[2 * number].to(self.device)
            for request, start, rows in one.segments:
                history = known(histories, request, start, one.mode)
                end = begin + rows.stop - rows.start
                history = histories[request] = torch.cat([*([] if history is None else [history]), y[begin:end]])
                begin = end
                faults = {**every, BLIND: Rules(sees_before=one.first_drafts.get(request, model.FAR))}
                for name in self.asked(every):
                    rules = faults[name] if name is not None and number_of_pass in faulty else None
                    same = rules is None and name is not None
                    made = (
                        found[None][-1]
                        if same
                        else model.attention(self.config, weights, history, ratio, first=start, rules=rules)
                    )
                    found[name].append(made)
        return {name: torch.cat(parts) for name, parts in found.items()}

    def experts(self, weights, seen, tokens, hashed) -> dict:
        """{fault or None: the sublayer's output [rows, hidden]}."""
        x, limit = seen.double(), self.config.swiglu_limit
        shared, made = model.mlp(weights.under("shared_experts."), x, limit), {}
        chosen, found = None, {}
        for name, rules in self.asked(EXPERTS | (HASHED if hashed else BIASED)).items():
            ids, shares = model.routed(self.config, weights, x, tokens, hashed=hashed, rules=rules)
            if chosen is None or not torch.equal(ids, chosen):
                chosen, made = ids, model.outputs(weights, x, ids, limit)
            found[name] = torch.einsum("rkh,rk->rh", made, shares) + shared * rules.shared_expert
        return found

    def asked(self, faults) -> dict:
        """The model itself, under None, and the faults that are looked for."""
        return {None: Rules()} | {k: v for k, v in faults.items() if self.faults is None or k in self.faults}


def faulty_ones(passes) -> set:
    """The numbers of those that are given the faults: of each mode some, evenly spread, those of prompts all."""
    found, modes = set(), defaultdict(list)
    for number, one in enumerate(passes):
        modes[one.mode].append(number)
    for mode, numbers in modes.items():
        step = 1 if mode.endswith(", extend") else -(-len(numbers) // FAULTY)
        found.update(numbers[::step])
    return found


def known(histories, request, start, mode):
    """A layer's inputs of the request up to `start`: its own, or of the newest request that has as many."""
    own = histories.pop(request, None)  # the newest request stands last
    if start == 0:
        if own is not None:
            histories[object()] = own  # another request had its place
        return None
    if own is None or len(own) < start:
        others = [history for history in histories.values() if len(history) >= start]
        if not others:
            raise ValueError(f"nothing is known of the first {start} tokens of a request ({mode})")
        own = others[-1]
    return own[:start]


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
        found = judge.finish()
    out.write_text(json.dumps({"passes": len(paths), "groups": found}, indent=1))


if __name__ == "__main__":
    main()

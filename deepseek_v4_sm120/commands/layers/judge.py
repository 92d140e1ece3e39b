"""The inputs of every sublayer that an engine was seen to compute beside the model's own, in float64.

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

Weights are read and dequantised a sublayer at a time, of the experts those that were picked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from deepseek_v4_sm120.commands.layers.record import Segment, Unjudged
from deepseek_v4_sm120.commands.layers.verdict import EMBEDDING
from deepseek_v4_sm120.reference import model
from deepseek_v4_sm120.reference.model import Rules

BLOCK = 1024  # rows at a time
FAULTY = 16
MOST_DRAFTS = 16  # a pass has no more rows behind the last one whose inputs stay
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
    """Rows of one kind of sublayer, or of one, in one kind of pass."""

    rows: int = 0
    outliers: int = 0
    error: float = 0.0
    size: float = 0.0
    worst: float = 0.0
    shares: dict = field(default_factory=lambda: defaultdict(Share))

    def add(self, seen, truth, effects):
        error = seen.double() - truth
        by_row = error.norm(dim=1) / truth.norm(dim=1)
        kept = by_row < OUTLIER  # not what is NaN
        self.rows += len(by_row)
        self.outliers += int((~kept).sum())
        self.worst = max(self.worst, float(by_row.max()))
        self.error += float(error[kept].square().sum())
        self.size += float(truth[kept].square().sum())
        for name, changed in effects.items():
            effect = (changed - truth)[kept]
            self.shares[name].along += float((error[kept] * effect).sum())
            self.shares[name].square += float(effect.square().sum())

    def merge(self, other: Group) -> None:
        for name in ("rows", "outliers", "error", "size"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.worst = max(self.worst, other.worst)
        for name, share in other.shares.items():
            self.shares[name].along += share.along
            self.shares[name].square += share.square

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
    """Weights on a device, whose dequantised tensors stay until `let_go`, but for the experts'; and their products with
    the requests' inputs, of which the next pass has some more, and each fault the same."""

    def __init__(self, tensors, prefix="", kept=None, device="cpu", made=None):
        super().__init__(tensors, prefix)
        self.kept, self.made, self.device = {} if kept is None else kept, {} if made is None else made, device

    def under(self, prefix):
        return Kept(self.tensors, self.prefix + prefix, self.kept, self.device, self.made)

    def product(self, name, x):
        every = self.made.setdefault(self.prefix + name, [])
        for one in every:
            rows = rows_alike(one[0], x)
            if rows == len(x):
                return one[1][:rows]
            if rows:
                one[:] = x, torch.cat([one[1][:rows], super().product(name, x[rows:])])
                return one[1]
        every.append([x, super().product(name, x)])
        return every[-1][1]

    def raw(self, name):
        if self.prefix + name not in self.tensors:
            raise Unjudged(f"the checkpoint has no {self.prefix}{name}")
        return super().raw(name).to(self.device)

    def rows(self, name, which):
        """Of a table that is large: those rows alone go to the device."""
        if self.prefix + name not in self.tensors:
            raise Unjudged(f"the checkpoint has no {self.prefix}{name}")
        if int(which.max()) >= len(self.tensors[self.prefix + name]) or int(which.min()) < 0:
            raise Unjudged("a token is none of the checkpoint's")
        return self.tensors[self.prefix + name][which.cpu()].to(self.device)

    def let_go(self) -> None:
        self.kept.clear()
        self.made.clear()

    def __call__(self, name):
        if ".experts." in self.prefix:
            return super().__call__(name)
        if self.prefix + name not in self.kept:
            self.kept[self.prefix + name] = super().__call__(name)
        return self.kept[self.prefix + name]


@dataclass
class Pass:
    """A pass of the model: its requests' rows, without what fills a captured one up. Of a request's the last are
    judged, at most `Judge.tail`; tokens, experts' inputs, out and hidden are those rows', attention's all."""

    mode: str
    segments: list[Segment]  # with rows of this pass
    tails: list[int]  # of each: how many rows are judged
    tokens: torch.Tensor
    y: list
    out: torch.Tensor
    hidden: torch.Tensor | None
    first_drafts: dict  # request -> where the drafts began, of which this is one


@dataclass
class Before:
    """The last sublayer, and what else it could have made: {fault or None: f [rows, hidden]}."""

    what: str
    number: int  # of its layer
    streams: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    made: dict


class Judge:
    """faults: the names of those that are looked for; None: all. tail: how many rows of each request's in a pass are
    judged, the last ones; None: all. tell(number, of how many): a layer was judged."""

    def __init__(self, config: dict, tensors, device="cpu", faults=None, tail=None, tell: Callable | None = None):
        self.config, self.weights, self.device = model.Config.of(config), Kept(tensors, device=device), device
        self.faults, self.hidden, self.layers = faults, config["hidden_size"], config["num_hidden_layers"]
        self.tail, self.tell = tail, tell or (lambda number, most: None)
        self.passes = {"target": [], "draft": []}
        self.first_drafts = {}  # request -> the position of the first draft that is under way
        self.groups = defaultdict(Group)

    def sublayers(self, kind):
        """(weights, ratio, hashed) of each layer."""
        if kind == "draft":
            return [(self.weights.under("mtp.0."), 0, False)]
        ratios, hashed = self.config.ratios, self.config.hash_layers
        return [(self.weights.under(f"layers.{i}."), ratios[i], i < hashed) for i in range(self.layers)]

    def take(self, record: dict, segments: list[Segment]) -> None:
        """One pass, as it was recorded, in the order in which they ran; segments: of the requests that are judged."""
        kind, expected = record["kind"], 2 * len(self.sublayers(record["kind"]))
        if len(record["y"]) != expected:
            raise Unjudged(f"a pass has {len(record['y'])} inputs of sublayers, expected {expected}")
        if record["out"].shape[-1] != self.hidden:
            raise Unjudged(f"rows have {record['out'].shape[-1]} numbers, expected {self.hidden}: another model")
        if not is_chained(record):
            self.first_drafts = {}
        if not segments:
            return
        if is_chained(record):
            for one in segments:
                self.first_drafts.setdefault(one.request, one.start)
        rows = torch.cat([torch.arange(one.rows.start, one.rows.stop) for one in segments])
        lengths = [one.end - one.start for one in segments]
        tails = [length if self.tail is None else min(length, self.tail) for length in lengths]
        judged = torch.cat(
            [torch.arange(one.rows.stop - tail, one.rows.stop) for one, tail in zip(segments, tails, strict=True)]
        )
        y = [one[judged if number % 2 else rows] for number, one in enumerate(record["y"])]
        hidden, begin, own = record.get("hidden"), 0, []
        for one, length in zip(segments, lengths, strict=True):
            own.append(Segment(one.request, one.start, slice(begin, begin + length), one.source))
            begin += length
        mode = f"{kind}, {record['mode'].lower()}"
        first = dict(self.first_drafts) if is_chained(record) else {}
        hidden = None if hidden is None else hidden[judged]
        out, tokens = record["out"][judged], record["tokens"][judged].long()
        self.passes[kind].append(Pass(mode, own, tails, tokens, y, out, hidden, first))

    @property
    def judged_rows(self) -> int:
        return sum(len(one.tokens) for passes in self.passes.values() for one in passes)

    def finish(self) -> list:
        """What is known of each kind of sublayer in each kind of pass, and of each layer of it."""
        for kind, passes in self.passes.items():
            if passes:
                self.judge(kind, passes)
        whole, layers = defaultdict(Group), defaultdict(dict)
        for (what, mode, number), group in self.groups.items():
            whole[what, mode].merge(group)
            layers[what, mode][number] = group.summary(self.hidden)
        return [
            {"what": what, "mode": mode, **group.summary(self.hidden), "layers": layers[what, mode]}
            for (what, mode), group in whole.items()
        ]

    def judge(self, kind, passes) -> None:
        """All passes at once, sublayer by sublayer."""
        modes = [(p.mode, len(p.tokens)) for p in passes]
        tokens = torch.cat([p.tokens for p in passes]).to(self.device)
        embedded = self.weights.rows("embed.weight", tokens)
        streams = embedded.double()[:, None].expand(-1, 4, -1)
        if kind == "draft":
            hidden = torch.cat([p.hidden for p in passes]).to(self.device).view(len(tokens), 4, -1)
            streams = model.draft_streams(self.config, self.weights.under("mtp.0."), embedded, hidden)
        before = Before(EMBEDDING, 0, streams, None, None, {})
        for number, (weights, ratio, hashed) in enumerate(self.sublayers(kind)):
            for part in ("attn", "ffn"):
                y = [p.y[2 * number + (part == "ffn")] for p in passes]
                judged = y if part == "ffn" else [y[tails_of(p)] for p, y in zip(passes, y, strict=True)]
                seen = torch.cat(judged).to(self.device)

                def mixed(streams, weights=weights, part=part):
                    return model.mixing(self.config, weights, part, f"{part}_norm", streams)

                streams, post, comb = self.boundary(before, modes, seen, mixed)
                if part == "attn":
                    what, made = f"attention, ratio {ratio}", self.attention(passes, number, weights, ratio)
                else:
                    what = "experts, hashed" if hashed else "experts, routed"
                    made = self.experts(weights.under("ffn."), seen, tokens, hashed)
                before = Before(what, number, streams, post, comb, made)
                weights.let_go()
            if kind == "target":
                self.tell(number + 1, self.layers)
        of_head = self.weights.under("mtp.0.") if kind == "draft" else self.weights
        seen = torch.cat([p.out for p in passes]).to(self.device)
        self.boundary(before, modes, seen, lambda streams: (model.head(self.config, of_head, streams), None, None))

    def boundary(self, before: Before, modes, seen, mixed):
        """(streams, post, comb) in front of a sublayer whose inputs were `seen`, all rows in blocks."""
        of = [self.groups[before.what, mode, before.number] for mode, rows in modes for _ in range(rows)]
        found, begin = [], 0
        while begin < len(seen):
            end = begin + 1
            while end < min(begin + BLOCK, len(seen)) and of[end] is of[begin]:
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
            of[begin].add(seen[rows], truth, changed)
            found.append((streams, post, comb))
            begin = end
        return [None if parts[0] is None else torch.cat(parts) for parts in zip(*found, strict=True)]

    def attention(self, passes, number, weights, ratio) -> dict:
        """{fault or None: the sublayer's output [rows, hidden]} of all passes."""
        found, histories, weights = defaultdict(list), {}, weights.under("attn.")
        faulty, every = faulty_ones(passes), ATTENTION | OF_RATIO[ratio]
        every = every | ({BLIND: None} if self.passes["draft"] is passes else {})
        for number_of_pass, one in enumerate(passes):
            y = one.y[2 * number].to(self.device)
            for segment, tail in zip(one.segments, one.tails, strict=True):
                before = [] if segment.source is None else [histories[segment.source][: segment.start]]
                history = histories[segment.request] = torch.cat([*before, y[segment.rows]])
                exact = history.double()  # once: by this are products found again
                faults = {**every, BLIND: Rules(sees_before=one.first_drafts.get(segment.request, model.FAR))}
                for name in self.asked(every):
                    rules = faults[name] if name is not None and number_of_pass in faulty else None
                    same = rules is None and name is not None
                    first = segment.end - tail
                    made = (
                        found[None][-1]
                        if same
                        else model.attention(self.config, weights, exact, ratio, first=first, rules=rules)
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


def rows_alike(old: torch.Tensor, new: torch.Tensor) -> int:
    """At the beginning of both; all, all but those of the last drafts, or none."""
    if old is new:
        return len(new)
    most = min(len(old), len(new))
    tried = (most, most - MOST_DRAFTS)
    return next((rows for rows in tried if rows > 0 and torch.equal(old[:rows], new[:rows])), 0)


def tails_of(one: Pass) -> torch.Tensor:
    """The judged ones of attention's rows."""
    parts = zip(one.segments, one.tails, strict=True)
    return torch.cat([torch.arange(segment.rows.stop - tail, segment.rows.stop) for segment, tail in parts])


def faulty_ones(passes) -> set:
    """The numbers of those that are given the faults: of each mode some, evenly spread, those of prompts all."""
    found, modes = set(), defaultdict(list)
    for number, one in enumerate(passes):
        modes[one.mode].append(number)
    for mode, numbers in modes.items():
        step = 1 if mode.endswith(", extend") else -(-len(numbers) // FAULTY)
        found.update(numbers[::step])
    return found


def is_chained(record) -> bool:
    """Whether a pass drafts behind other drafts: one row a request, by the MTP block."""
    return record["kind"] == "draft" and record["mode"] == "DECODE"

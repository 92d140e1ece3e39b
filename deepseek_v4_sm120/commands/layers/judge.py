"""The inputs of every sublayer that an engine was seen to compute beside the model's own, in float64.

Nothing is rounded here but what caches store. Each sublayer is given what the engine gave it, and must make of it what
the engine gave the next one; so nothing of an error is handed on but what the streams keep of it. Of a request's rows a
layer's attention sees what was written last at each position, as an engine's cache does: prompts in chunks, single
tokens, drafts that were refused.

A sublayer's error is mostly what FP8 rounds away, per cents of its output, under which a fault of less may hide. So
each known fault (reference/model.py, Rules) is computed, too: its share in the error is the error's projection upon
what that fault would have made of it, 0 where the engine has it not and 1 where it has. What only the index's choice
tells is a fault apart: near ties that an engine's rounding decides otherwise lend those some share, and none to others.
So are single heads, experts and pages of keys (groups.py). And each sublayer is computed once more as the coarsest
engine that is right rounds, handing on its own streams: what an error is measured by. Of the passes of a mode, FAULTY
are given the faults: a pass costs as many computations of the model as there are.

Weights are read and dequantised a sublayer at a time, of the experts those that were picked.
"""

from __future__ import annotations

import functools
import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from deepseek_v4_sm120.commands.layers import tokens as tokens_of
from deepseek_v4_sm120.commands.layers.chain import Chain
from deepseek_v4_sm120.commands.layers.groups import Group
from deepseek_v4_sm120.commands.layers.kept import Kept
from deepseek_v4_sm120.commands.layers.near_ties import NEAR, Other, next_experts
from deepseek_v4_sm120.commands.layers.record import BLOCK, CHAINED, VERIFY, Segment, Unjudged
from deepseek_v4_sm120.commands.layers.verdict import CONTEXT, EMBEDDING, GIVEN, NUMBERS, PART
from deepseek_v4_sm120.reference import draft_block, mhc, model
from deepseek_v4_sm120.reference.draft_block import BlockRules, Draft
from deepseek_v4_sm120.reference.model import DraftRules, Rules

FAULTY = 16
ROUNDED = Rules(rounds=True)
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
        "three quarters of the index's entries": Rules(index_share=0.75),
        "all entries": Rules(index_share=math.inf),
    },
    128: {
        "an entry too early": Rules(entries_early=1),
        "an entry too late": Rules(entries_early=-1),
        "no ape": Rules(ape=False),
        "no YaRN": Rules(yarn=False),
    },
}
OF_BLOCK = {  # DSPARK's drafts; with ATTENTION's, but what they say of a token itself
    "the context is not seen": BlockRules(context=False),
    "the context's newest is not seen": BlockRules(late=1),
    "half of the window was given back": Rules(window=64),
    "the block's others are not seen": BlockRules(others=False),
    "the block's later ones are not seen": BlockRules(ordered=True),
    "the context without its norm": BlockRules(normed=False),
    "YaRN in layers without entries": Rules(yarn_without_entries=True),
}
OF_DRAFT = {  # the MTP block's beginning
    "the token is not seen": DraftRules(token=False),
    "the streams are not seen": DraftRules(streams=False),
    "the token without its norm": DraftRules(token_normed=False),
    "the streams without their norm": DraftRules(streams_normed=False),
    "one norm of all four streams": DraftRules(each=False),
    "token and streams by each other's matrix": DraftRules(exchanged=True),
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
class Pass:
    """A pass of the model: its requests' rows, without what fills a captured one up. Of a request's the last are
    judged, at most `Judge.tail`, and as many others of a prompt; tokens, experts' inputs, out and hidden are those
    rows', attention's all."""

    mode: str
    segments: list[Segment]  # with rows of this pass
    picks: list[torch.Tensor]  # of each: which of its rows are judged
    tokens: torch.Tensor
    y: list
    out: torch.Tensor
    hidden: torch.Tensor | None
    first_drafts: dict  # request -> where the drafts began, of which this is one
    following: list  # of each judged row the token behind it, or None
    in_front: list = field(default_factory=list)  # of a block's judged rows: the token before what is drafted,
    anchors: list = field(default_factory=list)  # and the one that the block begins with
    context: torch.Tensor | None = None  # of the target's judged rows: what DSPARK's draft is given of them
    windows: list = field(default_factory=list)  # of a block's segments: the newest of that, and one more
    sources: list = field(default_factory=list)  # of a draft's judged rows: where their streams were made, or None
    begin: int = 0  # of its judged rows among those of all passes


@dataclass
class Judged:
    """The judged rows of a segment: what attention reads of them by any rules; whether they are asked of the faults."""

    read: Callable
    rows: int
    is_asked: bool
    faults: dict


@dataclass
class Made:
    """A sublayer's output [rows, hidden], what else it could have been, and what each unit of it adds."""

    truth: torch.Tensor
    rounded: torch.Tensor
    faulty: dict  # {fault: as the truth}
    units: list  # of (name, rows, what makes how much less the truth is there without it)
    other: Other | None = None  # what rows whose experts rounding chooses may be instead


@dataclass
class Before:
    """The last sublayer: its streams, and those of a coarse right engine."""

    what: str
    number: int  # of its layer
    streams: torch.Tensor
    rounded: torch.Tensor
    post: torch.Tensor | None = None
    comb: torch.Tensor | None = None
    made: Made | None = None
    begun: dict = field(default_factory=dict)  # {fault: the streams of a draft that begins so}


class Judge:
    """faults: the names of those that are looked for; None: all. tail: how many rows of each request's in a pass are
    judged, the last ones and as many of the others; None: all. tell(number, of how many): a layer was judged.
    index_fp4: the server's index cache is FP4."""

    def __init__(
        self, config: dict, tensors, device="cpu", faults=None, tail=None, tell: Callable | None = None, index_fp4=False
    ):
        self.config, self.device = replace(model.Config.of(config), index_fp4=index_fp4), device
        self.weights = Kept(tensors, device=device)
        self.faults, self.hidden, self.layers = faults, config["hidden_size"], config["num_hidden_layers"]
        self.drawn = random.Random()
        self.tail, self.tell = tail, tell or (lambda number, most: None)
        self.passes, self.draft = {"target": [], "draft": [], BLOCK: []}, Draft.of(config)
        self.context, self.drafting = {}, {}  # of each request: what the target gave, and the block that is under way
        self.chain, self.numbers = Chain(), defaultdict(lambda: [0, 0])  # of each mode all rows, and those without
        self.tokens = []  # what tokens.py says of each kind of pass
        self.first_drafts = {}  # request -> the position of the first draft that is under way
        self.groups = defaultdict(Group)

    def sublayers(self, kind):
        """(weights, ratio, hashed) of each layer."""
        if kind == "draft":
            return [(self.weights.under("mtp.0."), 0, False)]
        if kind == BLOCK:
            if self.draft is None:
                raise Unjudged(
                    "the checkpoint's config.json has no dspark_target_layer_ids, and the server drafts by them"
                )
            return [(self.weights.under(f"mtp.{i}."), 0, False) for i in range(self.draft.stages)]
        ratios, hashed = self.config.ratios, self.config.hash_layers
        return [(self.weights.under(f"layers.{i}."), ratios[i], i < hashed) for i in range(self.layers)]

    def take(self, record: dict, segments: list[Segment]) -> None:
        """One pass, as it was recorded, in the order in which they ran; segments: of the requests that are judged."""
        kind, expected = record["kind"], 2 * len(self.sublayers(record["kind"]))
        if len(record["y"]) != expected:
            raise Unjudged(f"a pass has {len(record['y'])} inputs of sublayers, expected {expected}")
        if record["out"].shape[-1] != self.hidden * (4 if kind == BLOCK else 1):
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
        picks = [
            self.chain.picked(record["mode"], one) if kind == "draft" and self.tail is not None else self.picked(length)
            for one, length in zip(segments, lengths, strict=True)
        ]
        judged = torch.cat([one.rows.start + pick for one, pick in zip(segments, picks, strict=True)])
        y = [one[judged if number % 2 else rows] for number, one in enumerate(record["y"])]
        hidden, begin, own = record.get("hidden"), 0, []
        for one, length in zip(segments, lengths, strict=True):
            own.append(Segment(one.request, one.start, slice(begin, begin + length), one.source))
            begin += length
        mode = f"{kind}, {record['mode'].lower()}"
        first = dict(self.first_drafts) if is_chained(record) else {}
        hidden = None if hidden is None else hidden[judged]
        out, tokens = record["out"][judged], record["tokens"][judged].long()
        following = [
            segment.following[row] if segment.following else None
            for segment, pick in zip(segments, picks, strict=True)
            for row in pick.tolist()
        ]
        made = Pass(mode, own, picks, tokens, y, out, hidden, first, following)
        self.passes[kind].append(made)
        self.chain.take(kind, record["mode"], made, segments, record["tokens"])
        self.count_numbers(mode, record, rows)
        if kind == BLOCK:
            self.begin_block(made, segments, record["tokens"])
        elif kind == "target" and "context" in record:
            made.context = record["context"][judged]
            self.keep_context(record, segments)

    def count_numbers(self, mode: str, record: dict, rows: torch.Tensor) -> None:
        """Of all rows, those besides that are not judged."""
        every = (*record["y"], record["out"], *(record[name] for name in ("hidden", "context") if name in record))
        are = torch.stack([one[rows].isfinite().all(dim=1) for one in every]).all(dim=0)
        self.numbers[mode][0] += len(rows)
        self.numbers[mode][1] += int((~are).sum())

    def picked(self, length: int) -> torch.Tensor:
        """The last rows, in which a token ends; and as many of the others, any, which are as good as unseen else."""
        if self.tail is None or length <= self.tail:
            return torch.arange(length)
        others = length - self.tail
        drawn = sorted(self.drawn.sample(range(others), min(self.tail, others)))
        return torch.tensor([*drawn, *range(others, length)])

    def begin_block(self, made: Pass, segments, tokens) -> None:
        """Its tokens are known when they are verified."""
        begin = 0
        made.following, made.in_front = [None] * len(made.tokens), [None] * len(made.tokens)
        for segment, pick in zip(segments, made.picks, strict=True):
            if segment.start and segment.source not in self.context:
                raise Unjudged("a block of drafts, and nothing of what the target gave it")
            window = self.context[segment.source][: segment.start] if segment.start else made.out[:0]
            made.windows.append(window[-(Rules().window + 1) :])
            made.anchors += [int(tokens[segment.rows.start])] * len(pick)
            if self.draft.mask is not None:
                behind = tokens[segment.rows].tolist()[1:]
                self.chain.count(made.mode, behind, (self.draft.mask,) * len(behind))
            self.drafting[segment.request] = made, begin, (segment.start + pick).tolist()
            begin += len(pick)

    def keep_context(self, record, segments) -> None:
        for one in segments:
            before = [] if one.source is None else [self.context[one.source][: one.start]]
            self.context[one.request] = torch.cat([*before, record["context"][one.rows]])
            block, begin, at = self.drafting.pop(one.request, (None, 0, []))
            if block is None or record["mode"] != VERIFY:
                continue
            tokens = record["tokens"][one.rows].tolist()
            for row, position in enumerate(at, begin):
                place = position - one.start
                if block.anchors[row] == tokens[0] and 0 <= place < len(tokens) - 1:
                    block.in_front[row], block.following[row] = tokens[place], tokens[place + 1]

    @property
    def judged_rows(self) -> int:
        return sum(len(one.tokens) for passes in self.passes.values() for one in passes)

    def finish(self) -> list:
        """What is known of each kind of sublayer in each kind of pass, and of each layer of it."""
        for kind, passes in self.passes.items():
            if passes:
                self.judge(kind, passes)
        self.tokens += self.chain.said()
        of_rows = {mode: {"rows": rows, "off": off} for mode, (rows, off) in self.numbers.items()}
        self.tokens += [{"what": NUMBERS, "mode": mode, "otherwise": {}, **one} for mode, one in of_rows.items()]
        whole, layers = defaultdict(Group), defaultdict(dict)
        for (what, mode, number), group in self.groups.items():
            whole[what, mode].merge(group)
            layers[what, mode][number] = group.summary()
        return [
            {"what": what, "mode": mode, **group.summary(), "layers": layers[what, mode]}
            for (what, mode), group in whole.items()
        ]

    def judge(self, kind, passes) -> None:
        """All passes at once, sublayer by sublayer."""
        modes = [p.mode for p in passes for _ in p.tokens]
        tokens = torch.cat([p.tokens for p in passes]).to(self.device)
        before = self.begun(kind, passes, tokens)
        for number, (weights, ratio, hashed) in enumerate(self.sublayers(kind)):
            for part in ("attn", "ffn"):
                y = [p.y[2 * number + (part == "ffn")] for p in passes]
                judged = y if part == "ffn" else [y[picks_of(p)] for p, y in zip(passes, y, strict=True)]
                seen = torch.cat(judged).to(self.device)
                at = (self.config, weights, part, f"{part}_norm")
                streams, rounded = self.boundary(
                    before, modes, seen, lambda streams, at=at: model.entering(*at, streams)
                )
                self.context_behind(before, passes, modes, streams, rounded)
                _, post, comb = model.mixing(*at, streams)
                if part == "attn":
                    what, made = f"attention, ratio {ratio}", self.attention(passes, number, weights, ratio)
                else:
                    what = "experts, hashed" if hashed else "experts, routed"
                    made = self.experts(weights.under("ffn."), seen, tokens, hashed)
                before = Before(what, number, streams, rounded, post, comb, made)
                weights.let_go()
            if kind == "target":
                self.tell(number + 1, self.layers)
        of_head = self.weights.under("mtp.0.") if kind == "draft" else self.weights
        seen = torch.cat([p.out for p in passes]).to(self.device)

        def behind(streams):
            return streams.flatten(1) if kind == BLOCK else model.head(self.config, of_head, streams)

        last = self.boundary(before, modes, seen, behind)
        self.context_behind(before, passes, modes, *last)
        if self.passes["draft"] and kind != BLOCK:
            self.chain.keep(kind, passes, *last)
        for mode, *given in self.chain.given(passes) if kind == "draft" else ():
            self.groups[GIVEN, mode, 0].add(*(one.to(self.device) for one in given), {})
        if self.faults is None:
            self.ask_tokens(kind, passes)

    def ask_tokens(self, kind, passes) -> None:
        for mode in dict.fromkeys(p.mode for p in passes):
            of_mode = [p for p in passes if p.mode == mode]
            rows = torch.cat([p.out for p in of_mode]).to(self.device)
            following, in_front, anchors = (
                [one for p in of_mode for one in getattr(p, name)] for name in ("following", "in_front", "anchors")
            )
            if kind == BLOCK:
                last = self.weights.under(f"mtp.{self.draft.stages - 1}.")
                rows = draft_block.behind_head(self.config, last, rows.view(len(rows), 4, -1))
                found = tokens_of.of_drafts(self.weights, rows, in_front, anchors, following)
            else:
                what = tokens_of.DRAFTED if kind == "draft" else tokens_of.NEXT
                found = tokens_of.of_answers(self.weights, rows, following, what)
            self.tokens += [] if found is None else [found | {"mode": mode}]

    def context_behind(self, before: Before, passes, modes, streams, rounded) -> None:
        """What the target gave DSPARK's draft of the streams behind this layer."""
        if self.draft is None or before.what == EMBEDDING or not before.what.startswith("experts"):
            return
        for place, number in enumerate(self.draft.layers):
            if number != before.number or any(p.context is None for p in passes):
                continue
            seen = torch.cat([p.context for p in passes]).to(self.device).unflatten(1, (-1, self.hidden))[:, place]
            for mode in dict.fromkeys(modes):
                rows = torch.tensor([i for i, one in enumerate(modes) if one == mode], device=self.device)
                truth, coarse = (one[rows].mean(dim=1) for one in (streams, rounded))
                self.groups[CONTEXT, mode, number].add(seen[rows], truth, coarse, {})

    def begun(self, kind, passes, tokens) -> Before:
        embedded = self.weights.rows("embed.weight", tokens)
        streams = rounded = embedded.double()[:, None].expand(-1, 4, -1)
        if kind != "draft":
            return Before(EMBEDDING, 0, streams, rounded)
        hidden = torch.cat([p.hidden for p in passes]).to(self.device).view(len(tokens), 4, -1)
        at = self.config, self.weights.under("mtp.0."), embedded, hidden
        found = Before(EMBEDDING, 0, model.draft_streams(*at), model.draft_streams(*at, ROUNDED))
        asked = {name: rules for name, rules in self.asked(OF_DRAFT).items() if name is not None}
        found.begun = {name: model.draft_streams(*at, draft=rules) for name, rules in asked.items()}
        return found

    def boundary(self, before: Before, modes, seen, entering):
        """(streams, those of a coarse right engine) in front of a sublayer whose inputs were `seen`."""
        streams, rounded, made = before.streams, before.rounded, before.made
        if made is not None:
            if made.other is not None:
                made.other.take(made, seen, (streams, before.post, before.comb), entering)
            streams = model.behind(made.truth, streams, before.post, before.comb)
            rounded = mhc.bf16(model.behind(made.rounded, rounded, before.post, before.comb))
        truth, coarse = entering(streams), mhc.bf16(entering(rounded))
        kept = torch.zeros(len(seen), dtype=torch.bool, device=self.device)
        for mode in dict.fromkeys(modes):
            rows = torch.tensor([i for i, one in enumerate(modes) if one == mode], device=self.device)
            group = self.groups[before.what, mode, before.number]
            effects = {name: entering(one[rows]) for name, one in before.begun.items()}
            effects |= {} if made is None else self.effects(before, rows, entering)
            kept[rows] = group.add(seen[rows], truth[rows], coarse[rows], effects)
        self.add_units(before, modes, streams, (seen, truth, coarse, kept), entering)
        return streams, rounded

    def add_units(self, before: Before, modes, streams, given, entering) -> None:
        """Of what a sublayer is made of, one by one, each of all rows at once; streams: behind it."""
        seen, truth, coarse, kept = given
        error, by_rounding = seen.double() - truth, coarse - truth
        of_mode = {mode: torch.tensor([one == mode for one in modes], device=self.device) for mode in {*modes}}
        for name, rows, less in before.made.units if before.made is not None else ():
            # the streams behind a sublayer are linear in its output
            without = streams[rows] + before.post[rows][:, :, None] * less()[:, None]
            effect = entering(without) - truth[rows]
            for mode in dict.fromkeys(modes[row] for row in rows.tolist()):
                here = kept[rows] & of_mode[mode][rows]
                unit = self.groups[before.what, mode, before.number].units[name]
                unit.add(error[rows][here], by_rounding[rows][here], effect[here], truth[rows][here])

    def effects(self, before: Before, rows, entering) -> dict:
        """{fault: what the next sublayer would have been given}."""
        at, made, found = (before.streams[rows], before.post[rows], before.comb[rows]), before.made, {}
        for name, f in made.faulty.items():
            found[name] = entering(model.behind(f[rows], *at))
        for name, rules in self.asked(MIXING).items():
            if name is not None:
                found[name] = entering(model.behind(made.truth[rows], *at, rules))
        return found

    def attention(self, passes, number, weights, ratio) -> Made:
        """Of all passes."""
        if passes is self.passes[BLOCK]:
            return self.block_attention(passes, number, weights.under("attn."))
        weights, histories, every = weights.under("attn."), {}, self.every_attention(passes, ratio)
        projected, found = iter(self.projected(passes, number, weights, ratio)), []
        for one, is_asked in zip(passes, faulty_ones(passes), strict=True):
            y = one.y[2 * number].to(self.device)
            for segment, pick in zip(one.segments, one.picks, strict=True):
                before = [] if segment.source is None else [histories[segment.source][: segment.start]]
                history = histories[segment.request] = torch.cat([*before, y[segment.rows]])
                at = (segment.start + pick).to(self.device)
                asked = model.Asked(self.config, weights, history, ratio, at, next(projected))
                blind = Rules(sees_before=one.first_drafts.get(segment.request, model.FAR))
                found.append(Judged(asked.read, len(at), is_asked, {name: every[name] or blind for name in every}))
        return self.made_of(weights, found, every)

    def every_attention(self, passes, ratio) -> dict:
        blind = {BLIND: None} if passes is self.passes["draft"] else {}  # whose rules are each request's own
        return {name: rules for name, rules in self.asked(ATTENTION | OF_RATIO[ratio] | blind).items() if name}

    def block_attention(self, passes, number, weights) -> Made:
        every = {name: rules for name, rules in ATTENTION.items() if rules.sees_itself} | OF_BLOCK
        every = {name: rules for name, rules in self.asked(every).items() if name}
        projected, found = iter(self.projected(passes, number, weights, 0)), []
        for one, is_asked in zip(passes, faulty_ones(passes), strict=True):
            y = one.y[2 * number].to(self.device)
            for segment, pick, window in zip(one.segments, one.picks, one.windows, strict=True):
                given = y[segment.rows], window.to(self.device), segment.start, pick.to(self.device)
                first = self.weights.under("mtp.0.")
                asked = draft_block.Asked(self.config, weights, first, *given, next(projected))
                found.append(Judged(asked.read, len(pick), is_asked, every))
        return self.made_of(weights, found, every)

    def projected(self, passes, number, weights, ratio) -> list[dict]:
        """Of each segment {rounds: what its judged rows' inputs make}: all at once, for each reads whole matrices."""
        rows = torch.cat([one.y[2 * number][picks_of(one)] for one in passes]).to(self.device).double()
        lengths, each = [len(pick) for one in passes for pick in one.picks], {}
        for rounds in (False, True):
            each[rounds] = model.Projected.of(self.config, weights, rows, ratio, rounds).split(lengths)
        return [dict(zip(each, pair, strict=True)) for pair in zip(*each.values(), strict=True)]

    def made_of(self, weights, judged: list[Judged], every) -> Made:
        """Both output projections, too, are of all rows at once."""
        config, asked = self.config, [one for one in judged if one.is_asked]
        faulty_rows = torch.cat([torch.full((one.rows,), one.is_asked) for one in judged]).nonzero()[:, 0]
        faulty_rows = faulty_rows.to(self.device)
        out = torch.cat([model.attended(weights, one.read(Rules())) for one in judged])
        truth = model.answered(config, weights, out)
        rounded = torch.cat([model.attended(weights, one.read(ROUNDED)) for one in judged])
        rounded, faulty, units = model.answered(config, weights, rounded, rounds=True), {}, []
        for name in every:
            other = torch.cat([model.attended(weights, one.read(one.faults[name])) for one in asked])
            faulty[name] = truth.index_copy(0, faulty_rows, model.answered(config, weights, other))
        if self.faults is None:
            matrices = weights("wo_a"), weights("wo_b")
            asked_out = out[faulty_rows]  # once: it is 256 KB a row, and there are 64 heads
            for head in range(config.heads):
                less = functools.partial(model.without_head, config, *matrices, head, asked_out)
                units.append((f"head {head}", faulty_rows, less))
            units += self.of_each_page(weights, judged, truth)
        return self.made(truth, rounded, faulty, units)

    def of_each_page(self, weights, judged: list[Judged], truth) -> list:
        """A page of all rows that see it at once."""
        found, units, begin = defaultdict(list), [], 0
        for one in judged:
            rows = torch.arange(begin, begin + one.rows, device=self.device)
            begin += one.rows
            read = one.read(Rules()) if one.is_asked else None
            for page in model.pages_of(read) if read is not None else ():
                found[page].append((rows, read))
        for page, every in found.items():
            rows = torch.cat([rows for rows, _ in every])
            out = torch.cat([model.without_page(weights, read, page) for _, read in every])
            less = functools.partial(torch.sub, model.answered(self.config, weights, out), truth[rows])
            units.append((f"page {page}", rows, less))
        return units

    def experts(self, weights, seen, tokens, hashed) -> Made:
        x, limit, found, units = seen.double(), self.config.swiglu_limit, {}, []
        is_draft = self.draft is not None and weights.prefix.startswith("mtp.")
        config = replace(self.config, topk=self.draft.topk) if is_draft else self.config
        shared, rounded = model.mlps(weights.under("shared_experts."), x, limit, (False, True))
        chosen, made, other = None, None, None
        for name, rules in self.asked(EXPERTS | (HASHED if hashed else BIASED)).items():
            ids, shares, margin = model.routed(config, weights, x, tokens, hashed=hashed, rules=rules)
            if chosen is None:
                chosen, (made, coarse) = ids, model.outputs(weights, x, ids, limit, False, True)
                if len(near := (margin <= NEAR).nonzero()[:, 0]):
                    every = torch.stack([made[near], coarse[near]]), torch.stack([shared[near], rounded[near]])
                    other = next_experts(config, weights, x[near], tokens[near], near, *every)
                rounded = rounded + torch.einsum("rkh,rk->rh", coarse, shares)
                units = self.of_each_expert(ids, made, shares, margin)
            elif not torch.equal(ids, chosen):
                chosen, made = ids, model.outputs(weights, x, ids, limit)
            found[name] = torch.einsum("rkh,rk->rh", made, shares) + shared * rules.shared_expert
        return replace(self.made(found.pop(None), rounded, found, units), other=other)

    def of_each_expert(self, ids, made, shares, margin) -> list:
        """But for rows that a rounding of the router's may have given others."""
        found = []
        for expert in ids.unique().tolist() if self.faults is None else ():
            rows, slots = ((ids == expert) & (margin > NEAR)[:, None]).nonzero(as_tuple=True)
            if len(rows):
                less = functools.partial(without_expert, made, shares, rows, slots)
                found.append((f"expert {expert}", rows, less))
        return found

    def made(self, truth, rounded, faulty, units) -> Made:
        if PART in self.asked({PART: None}):
            faulty[PART] = torch.zeros_like(truth)
        return Made(truth, rounded, faulty, units)

    def asked(self, faults) -> dict:
        """The model itself, under None, and the faults that are looked for."""
        return {None: Rules()} | {k: v for k, v in faults.items() if self.faults is None or k in self.faults}


def without_expert(made, shares, rows, slots) -> torch.Tensor:
    return -made[rows, slots] * shares[rows, slots, None]


def picks_of(one: Pass) -> torch.Tensor:
    """The judged ones of attention's rows."""
    return torch.cat([segment.rows.start + pick for segment, pick in zip(one.segments, one.picks, strict=True)])


def faulty_ones(passes) -> list[bool]:
    """Of each, whether it is given the faults: of each mode some are, evenly spread, those of prompts all."""
    found, modes = set(), defaultdict(list)
    for number, one in enumerate(passes):
        modes[one.mode].append(number)
    for mode, numbers in modes.items():
        step = 1 if mode.endswith(", extend") else -(-len(numbers) // FAULTY)
        found.update(numbers[::step])
    return [number in found for number in range(len(passes))]


def is_chained(record) -> bool:
    """Whether a pass drafts behind other drafts: one row a request, by the MTP block."""
    return record["kind"] == "draft" and record["mode"] == CHAINED

"""DSPARK's drafts in float64, from the checkpoint's own tensors: a block of tokens at once behind known ones.

    context   of each known token what the streams' mean was behind some of the target's layers, side by side, through
              main_proj and main_norm: x of the stages' keys, each by its own wkv
    block     the token that is known to be next, and as many masks as are drafted besides; embedded, four streams
    stage     a layer of ratio 0, routed; its attention sees the 128 newest of the context, counted from the block's
              first token, and the whole block, each row of it the same
    token i   the greatest of head(norm(streams of row i)) + W2 W1[the token before it]: greedy, in the block's order

Angles are those of layers without entries. Source: SGLang's models/deepseek_v4_dspark.py and dspark_attn_metadata.py of
0.5.16 to 0.5.23, which agree in this; DeepSeek's own code for it is not public.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from deepseek_v4_sm120.reference import model
from deepseek_v4_sm120.reference.model import Projected, Read, Rules, Weights

VOCABULARY = 8192  # of the head's rows at a time


@dataclass(frozen=True)
class BlockRules:
    """Where an engine's drafts may differ from the rest of a layer's Rules."""

    context: bool = True  # is seen
    others: bool = True  # the block's other rows are
    ordered: bool = False  # a row sees the block's earlier ones alone
    late: int = 0  # of the context's newest so many are not seen
    normed: bool = True  # the context, by main_norm


@dataclass(frozen=True)
class Draft:
    """What config.json says of the drafts."""

    stages: int
    layers: tuple[int, ...]  # of the target, behind which the context is taken
    topk: int
    mask: int | None = None  # the token of what is drafted

    @classmethod
    def of(cls, raw: Mapping) -> Draft | None:
        layers = raw.get("dspark_target_layer_ids")
        if not layers:
            return None
        topk = raw.get("dspark_num_experts_per_tok") or raw["num_experts_per_tok"]
        return cls(len(layers), tuple(layers), topk, raw.get("dspark_noise_token_id"))


def context_of(config, weights: Weights, hidden: torch.Tensor, rounds: bool, normed: bool) -> torch.Tensor:
    """[n, hidden] of `hidden` [n, layers * hidden], the target's; weights: the first stage's."""
    made = model.given(hidden.double(), rounds) @ weights("main_proj").T
    return model.rms_norm(made, weights("main_norm"), config.eps) if normed else made


class Asked:
    """A block's rows `of` its inputs x [rows, hidden], the first at `start`, right behind what is known of `hidden`, as
    model.Asked: whatever rules they are asked by, what those have alike is made once. first: the first stage's weights;
    projected: of these rows."""

    def __init__(self, config, weights: Weights, first: Weights, x, hidden, start: int, of, projected: Mapping):
        self.config, self.weights, self.first, self.hidden = config, weights, first, hidden
        self.x, self.start, self.of, self.projected = x.double(), start, of, projected
        for name in ("plain_keys", "keys"):
            setattr(self, name, functools.cache(getattr(self, name)))

    def plain_keys(self, rounds: bool, normed: bool) -> torch.Tensor:
        context = context_of(self.config, self.first, self.hidden, rounds, normed)
        return model.plain_keys_of(self.config, self.weights, torch.cat([context, self.x]), rounds)

    def keys(self, rounds: bool, normed: bool, yarn: bool, yarn_without_entries: bool) -> torch.Tensor:
        by = model.angles(self.config, 0, yarn, yarn_without_entries).to(self.x.device)
        return model.stored_key(model.rotated(self.plain_keys(rounds, normed), by * self.positions[:, None]))

    @property
    def positions(self) -> torch.Tensor:
        return torch.arange(self.start - len(self.hidden), self.start + len(self.x), device=self.x.device)

    def read(self, rules: Rules | BlockRules) -> Read:
        rules, block = (Rules(), rules) if isinstance(rules, BlockRules) else (rules, BlockRules())
        return self.read_by(rules, block)

    def read_by(self, rules: Rules, block: BlockRules) -> Read:
        n, rows = len(self.hidden), len(self.x)
        by = model.angles(self.config, 0, rules.yarn, rules.yarn_without_entries).to(self.x.device)
        turn = by * (self.positions[n + self.of] + rules.position)[:, None]
        keys = self.keys(rules.rounds, block.normed, rules.yarn, rules.yarn_without_entries)
        seen = seen_by(n, rows, rules, block, self.x.device)[self.of]
        queries, pages = self.projected[rules.rounds].queries, self.positions // model.PAGE
        return model.read_of(self.config, queries, keys, seen, pages, turn, rules)


def attention(config, weights, first, x, hidden, start: int, *, rules=None, block=None) -> torch.Tensor:
    """[rows, hidden] of a block's inputs x [rows, hidden]; hidden and first as `Asked` has them."""
    rules, x = rules or Rules(), x.double()
    of, rounds = torch.arange(len(x), device=x.device), rules.rounds
    projected = {rounds: Projected.of(config, weights, x, 0, rounds)}
    read = Asked(config, weights, first, x, hidden, start, of, projected).read_by(rules, block or BlockRules())
    return model.answered(config, weights, model.attended(weights, read), rounds)


def seen_by(n: int, rows: int, rules: Rules, block: BlockRules, device) -> torch.Tensor:
    """bool [rows, n + rows]."""
    known = torch.arange(n, device=device)
    of_context = (known >= n - rules.window) & (known < n - block.late) & block.context
    row, other = torch.arange(rows, device=device)[:, None], torch.arange(rows, device=device)
    of_block = (row == other) | block.others & ((other < row) | (not block.ordered))
    return torch.cat([of_context.expand(rows, -1), of_block], dim=1)


def logits(head: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[rows, vocabulary] float64 of x [rows, hidden]."""
    return torch.cat([x.double() @ part.to(x.device).double().T for part in head.split(VOCABULARY)], dim=1)


def markov(weights: Mapping, before: torch.Tensor) -> torch.Tensor:
    """[rows, vocabulary]: what is added for the tokens in front; weights: the checkpoint's."""
    first, second = (named(weights, names) for names in (("markov_w1", "embed"), ("markov_w2", "head")))
    return logits(second, first[before.cpu()].to(before.device))


def named(weights: Mapping, names: tuple[str, ...]) -> torch.Tensor:
    every = (f"mtp.{stage}.markov_head.{name}.weight" for stage in range(16) for name in names)
    return weights[next((name for name in every if name in weights), f"mtp.0.markov_head.{names[0]}.weight")]


def behind_head(config, weights: Weights, streams: torch.Tensor) -> torch.Tensor:
    """[rows, hidden]: what the vocabulary's weights are multiplied with; weights: the last stage's."""
    return model.head(config, weights, streams)

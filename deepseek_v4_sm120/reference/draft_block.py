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

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from deepseek_v4_sm120.reference import model
from deepseek_v4_sm120.reference.model import Rules, Weights

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

    @classmethod
    def of(cls, raw: Mapping) -> Draft | None:
        layers = raw.get("dspark_target_layer_ids")
        if not layers:
            return None
        return cls(len(layers), tuple(layers), raw.get("dspark_num_experts_per_tok") or raw["num_experts_per_tok"])


def context_of(config, weights: Weights, hidden: torch.Tensor, rules: Rules, block: BlockRules) -> torch.Tensor:
    """[n, hidden] of `hidden` [n, layers * hidden], the target's; weights: the first stage's."""
    made = model.given(hidden.double(), rules) @ weights("main_proj").T
    return model.rms_norm(made, weights("main_norm"), config.eps) if block.normed else made


def attention(config, weights, x, context, start: int, *, of=None, rules=None, block=None, parts=None) -> torch.Tensor:
    """[rows or `of`, hidden] of a block's inputs x [rows, hidden], the first at `start`, right behind `context`."""
    rules, block, x = rules or Rules(), block or BlockRules(), x.double()
    n, rows = len(context), len(x)
    by = model.angles(config, 0, rules).to(x.device)
    positions = torch.arange(start - n, start + rows, device=x.device)
    of = torch.arange(rows, device=x.device) if of is None else of
    at = positions[n + of] + rules.position
    _, queries = model.queries_of(config, weights, x[of], by * at[:, None], rules)
    keys = model.keys_of(config, weights, torch.cat([context, x]), by * positions[:, None], rules)
    seen = seen_by(n, rows, rules, block, x.device)[of]
    pages = positions // model.PAGE
    return model.answered(config, weights, queries, keys, seen, -by * at[:, None], rules, parts, pages)


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

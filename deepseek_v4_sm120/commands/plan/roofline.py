"""The least time of a decode step: every byte once at the card's bandwidth, all-reduces beside it. Never a promise.
Of a speculating one the same, and how many guesses must be right for one more draft to pay.

Cards and links: cards.py. Latencies of an all-reduce are what `calibrate` measured, where a profile has them, else
assumptions (a public one-shot kernel on PCIe cards; NCCL; a network's). Published figures are other people's, on their
cards, with their prompts.
"""

from __future__ import annotations

from collections.abc import Mapping

from deepseek_v4_sm120.commands.plan import memory
from deepseek_v4_sm120.commands.plan.cards import PCIE, PRO, Card, Link
from deepseek_v4_sm120.commands.plan.models import Model

# model.md section 19: measured step over ideal step, the better engines
TYPICAL_OVER_IDEAL = 2.0
HOP_S = 1.5e-6  # of a sum whose terms go by way of their owner, beside one that goes to everybody
CONTEXT = 8192  # tokens behind which a step is told, at most

# (cards, streams) -> (tokens/s of all streams, whose), without speculation, short context, Flash with FP4 experts
PUBLISHED = {
    (2, 1): (152.6, "LIL vLLM r7, cards behind a switch"),
    (2, 8): (479.0, "ormandj vLLM, 300 W cards"),
    (2, 16): (735.0, "ormandj vLLM, 300 W cards"),
    (2, 32): (1075.0, "ormandj vLLM, 300 W cards"),
    (4, 1): (183.5, "LIL vLLM r7"),
    (4, 8): (599.0, "stock vLLM 0.25.1 (Vercantez)"),
    (4, 16): (913.0, "stock vLLM 0.25.1 (Vercantez)"),
    (4, 32): (1308.0, "stock vLLM 0.25.1 (Vercantez)"),
}
PUBLISHED_PREFILL = {2: (7921.0, "ormandj SGLang, 8K prompts"), 4: (5937.0, "ambientlight SGLang, 8K in 1.38 s")}


def distinct_experts(m: Model, tokens: int) -> float:
    """Expected number of experts that `tokens` tokens touch in a layer, routed uniformly."""
    return m.experts * (1 - (1 - m.experts_per_token / m.experts) ** tokens)


def layer_bytes(m: Model, tp: int, ratio: int, rows: int, wo_a_bf16: bool) -> float:
    """Of a layer's weights, those that `rows` rows touch."""
    return sum(
        size * (distinct_experts(m, rows) if part == "routed" else 1) / (tp if is_divided else 1)
        for part, (size, is_divided) in memory.layer_weights(m, ratio, wo_a_bf16).items()
    )


def step_bytes(m: Model, tp: int, batch: int, context: int, *, wo_a_bf16: bool, rows: int = 1) -> float:
    """Bytes that one rank must read for a decode step of `batch` requests at `context` tokens each; for a verification
    of `rows` rows of each, which find what they share of a cache in the L2."""
    total = 2.0 * m.vocab * m.hidden / tp
    for ratio, layers in m.kinds():
        total += layers * layer_bytes(m, tp, ratio, batch * rows, wo_a_bf16)
        entries = min(m.window, context)
        entries += {0: 0, 4: min(m.index_topk, context // 4), 128: context // 128}[ratio]
        total += layers * batch * entries * memory.KV_TOKEN_BYTES
        if ratio == 4:
            keys = context // 4 * memory.INDEX_KEY_BYTES
            total += layers * batch * (keys + 8 * 4 * (m.head_dim + m.index_dim) * 4)
        if ratio == 128:
            total += layers * batch * 128 * 2 * m.head_dim * 4 / 128
    return total


def all_reduce_seconds(
    m: Model,
    tp: int,
    tokens: int,
    fast: bool,
    measured: Mapping[int, float] | None = None,
    layers: int | None = None,
    link: Link = PCIE,
) -> float:
    """Of one step: two per layer and one for the embedding. measured: rows -> microseconds of one."""
    if tp == 1:
        return 0.0
    sums = 2 * (m.layers if layers is None else layers) + 1
    known = [us for rows, us in sorted((measured or {}).items()) if rows >= tokens]
    if known:
        return sums * known[0] * 1e-6
    size = tokens * m.hidden * 2
    ring = link.nccl_s[tp] + 2 * (tp - 1) / tp * size / link.bytes_per_s
    one_hop = link.fast_s[tp] + (tp - 1) * size / link.bytes_per_s
    two_hops = link.fast_s[tp] + HOP_S + 2 * (tp - 1) / tp * size / link.bytes_per_s
    return sums * (min(one_hop, two_hops, ring) if fast else ring)


def step_seconds(
    m: Model,
    tp: int,
    batch: int,
    context: int,
    *,
    wo_a_bf16: bool,
    fast: bool = True,
    measured: Mapping[int, float] | None = None,
    card: Card = PRO,
    link: Link = PCIE,
) -> float:
    """The least time of a step."""
    read = step_bytes(m, tp, batch, context, wo_a_bf16=wo_a_bf16) / card.bytes_per_s
    return read + all_reduce_seconds(m, tp, batch, fast, measured, link=link)


def speculating_seconds(
    m: Model,
    tp: int,
    batch: int,
    context: int,
    drafts: int,
    *,
    wo_a_bf16: bool,
    head_bytes: float = 2.0,
    card: Card = PRO,
    link: Link = PCIE,
) -> float:
    """The least time of a step of EAGLE: a verification of drafts + 1 rows a request, the MTP block behind it over all
    those rows, then over one row a request for each further draft; each draft reads the head, of head_bytes a value."""
    rows = drafts + 1
    read = step_bytes(m, tp, batch, context, wo_a_bf16=wo_a_bf16, rows=rows)
    seconds = all_reduce_seconds(m, tp, batch * rows, True, link=link)
    for pass_rows in [batch * rows, *[batch] * (drafts - 1)][:drafts]:
        read += layer_bytes(m, tp, 0, pass_rows, wo_a_bf16) + 2 * memory.square_bytes(m)
        read += head_bytes * m.vocab * m.hidden / tp + batch * min(m.window, context) * memory.KV_TOKEN_BYTES
        seconds += all_reduce_seconds(m, tp, pass_rows, True, layers=1, link=link)
    return read / card.bytes_per_s + seconds


def pays_from(slower: float, drafts: int) -> float | None:
    """The share of right guesses from which the last of so many drafts pays, where with it a step takes `slower` times
    as long; None: never. Each guess behind right ones is right as often."""

    def faster(share: float) -> float:
        return 1 + share**drafts / sum(share**i for i in range(drafts))

    low, high = 0.0, 1.0
    if faster(high) <= slower:
        return None
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if faster(middle) < slower else (low, middle)
    return high

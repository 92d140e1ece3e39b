"""What a plan sets of DSV4_SM120_SET, and why: what a server does not do by itself, and pays where it was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepseek_v4_sm120.ops import all_reduce_sizes
from deepseek_v4_sm120.sglang_patches.adapters import prefill_graphs
from deepseek_v4_sm120.sglang_patches.defaults import CAPTURED_ROWS, HALF_ROWS

if TYPE_CHECKING:
    from deepseek_v4_sm120.commands.plan.launch import Plan, Request

DRAFT_HEAD, DRAFT_HEAD_SINCE = "draft_head", (0, 5, 14)
PREFILL_GRAPHS, PREFILL_GRAPHS_SINCE, WITH_MTP_SINCE = prefill_graphs.DEFAULT, (0, 5, 17), (0, 5, 23)
HALVES, IN_GRAPHS_SINCE = "prompts_in_halves", (0, 5, 23)
DEALT_STREAMS = "dealt_streams"
# on two cards, where it was seen; and the first release whose reproducible compressors are ours
DEALT_PRODUCTS, DEALT_SINCE, DEALT_SEEN, REPRODUCIBLE_SINCE = "dealt_products", (0, 5, 14), 2, (0, 5, 20)
DEALT_BY = ("all_reduce", "bf16_linear", "compressor")  # operators
INTERVAL, INTERVAL_0_5_17 = "prefill_decode_interval", "prefill_decode_interval_0_5_17"
YOURS = "as in your environment"


def of(plan: Plan, interval: str | None) -> list[tuple[str, str]]:
    """(choice, reason) each. interval: the reason for one between chunks, where a choice sets it."""
    r = plan.request
    found = [(f"{name}=off", YOURS) for name in r.switched_off]
    if r.draft_head is not None:
        found.append((f"{DRAFT_HEAD}={'on' if r.draft_head else 'off'}", YOURS))
    elif r.has_draft_head:
        found.append((f"{DRAFT_HEAD}=on", "a guess reads half of the head's bytes; the text is the model's own"))
    found += [(f"{name}={value}", YOURS) for name, value in r.also_set.items()]
    if interval is not None:
        found.append((f"{INTERVAL_0_5_17}={plan.interval}", interval))
    if r.prefill_graphs is not None:
        found.append((f"{PREFILL_GRAPHS}={_captured(r.prefill_graphs)}", YOURS))
    elif plan.captured:
        reason = f"prompts of up to {plan.captured:,} new tokens wait for their launches: {_graphs_seen(r)}"
        found.append((f"{PREFILL_GRAPHS}={_captured(plan.captured)}", reason))
    if plan.halves:
        seen = "a chunk 397 ms for 550 on two H200 through host memory"
        found.append(
            (f"{HALVES}={HALF_ROWS}", f"chunks in halves, the sums of one beside the other's products: {seen}")
        )
    if deals_products(r):
        seen = "3.67 ms a step for 3.70 on two H200, which read faster than an SM120"
        reason = f"each card reads its share of the compressors' weights, the same bits: {seen}"
        found.append((f"{DEALT_PRODUCTS}=on", reason))
    return found


def deals_products(r: Request) -> bool:
    """Whether the compressors' products are dealt to the cards: where that was seen, their sums are ours, and a step
    has no more rows than are dealt; not where the user has said what becomes of them."""
    is_seen = r.gpus == DEALT_SEEN and r.version >= DEALT_SINCE and set(DEALT_BY) <= set(r.replaced)
    has_ours = r.also_set.get("reproducible") != "on" or r.version >= REPRODUCIBLE_SINCE
    rows = r.concurrency * max(1, r.rows)
    return is_seen and has_ours and rows <= all_reduce_sizes.DEALT_ROWS and DEALT_PRODUCTS not in r.also_set


def _captured(rows: int) -> str:
    return {0: "off", CAPTURED_ROWS: "on"}.get(rows, str(rows))


def _graphs_seen(r: Request) -> str:
    """What graphs made of 1,024 tokens where it was measured, of the kind of server that is nearest."""
    if r.speculation is not None:
        return "107 ms for 206, beside EAGLE, on an H200"
    return {1: "99 ms for 147 on an H200", 2: "68 ms for 173 on two H200"}.get(r.gpus, "75 ms for 356 on four H100")

"""What a plan sets of DSV4_SM120_SET, and why: what a server does not do by itself, and pays where it was measured."""

from __future__ import annotations

from deepseek_v4_sm120 import OPS
from deepseek_v4_sm120.commands.doctor.software_checks import NOT_REPRODUCIBLE
from deepseek_v4_sm120.commands.plan.models import FP8
from deepseek_v4_sm120.commands.plan.request import DRAFT_HEAD, HALVES, PREFILL_GRAPHS, Plan, Request
from deepseek_v4_sm120.commands.speculation import EAGLE
from deepseek_v4_sm120.ops import all_reduce_sizes
from deepseek_v4_sm120.settings import asks_for
from deepseek_v4_sm120.sglang_patches.defaults import (
    CAPTURED_ROWS,
    DEALT_STREAMS,
    DEFAULTS,
    HALF_ROWS,
    REPRODUCIBLE,
)

# on two cards, where it was seen; and the first release whose reproducible compressors are ours
DEALT_PRODUCTS, DEALT_SINCE, DEALT_SEEN, REPRODUCIBLE_SINCE = "dealt_products", (0, 5, 14), 2, (0, 5, 20)
DEALT_BY = ("all_reduce", "bf16_linear", "compressor")  # operators
INTERVAL, INTERVAL_0_5_17 = "prefill_decode_interval", "prefill_decode_interval_0_5_17"
RANGES = {row.name: row.sglang for row in DEFAULTS}
OF_ONE_HOST = (PREFILL_GRAPHS, HALVES, DEALT_PRODUCTS, DEALT_STREAMS, "dealt_index")
NOT_BETWEEN_HOSTS = "it is for the cards of one host"
OF_TENSORS, NOT_OF_STAGES = (PREFILL_GRAPHS, HALVES, DEALT_PRODUCTS, DEALT_STREAMS), "not with stages (--pp-size)"
YOURS = "as in your environment"


def of(plan: Plan, interval: str | None) -> list[tuple[str, str]]:
    """(choice, reason) each. interval: the reason for one between chunks, where a choice sets it."""
    r = plan.request
    found = [(f"{name}=off", YOURS) for name in r.switched_off]
    if r.draft_head is not None:
        found.append((f"{DRAFT_HEAD}={'on' if r.draft_head else 'off'}", YOURS))
    elif r.has_draft_head:
        found.append((f"{DRAFT_HEAD}=on", "a guess reads a quarter of the head's bytes; the text is the model's own"))
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
    """Whether the compressors' products are dealt to the cards: where that was seen, nothing keeps them whole, and a
    step has no more rows than are dealt; not where the user has said what becomes of them."""
    is_seen = r.gpus == DEALT_SEEN and r.version >= DEALT_SINCE and why_whole(r) is None
    return is_seen and r.most_rows <= all_reduce_sizes.DEALT_ROWS and DEALT_PRODUCTS not in r.also_set


def why_whole(r: Request) -> str | None:
    """What keeps all of the compressors' products whole, of bf16_linear_dealt.why_whole's reasons those of a plan."""
    missing = [op for op in DEALT_BY if op not in r.replaced]
    halves = r.also_set.get(HALVES, "")
    if r.gpus == 1:
        return "one card has all of them"
    if r.nodes > 1:
        return NOT_BETWEEN_HOSTS
    if r.stages > 1:
        return NOT_OF_STAGES
    if missing:
        return f"{missing[0]} is left out"
    if r.most_rows > all_reduce_sizes.MAX_ROWS and not r.is_reproducible:
        return f"steps of {r.most_rows} rows are more than all_reduce takes"
    if r.is_reproducible and r.version < REPRODUCIBLE_SINCE:
        return "below 0.5.20 a reproducible server's compressors are SGLang's"
    if halves.isdigit() and 0 < int(halves) < 2 * all_reduce_sizes.DEALT_ROWS:
        return f"{HALVES}={halves} is less than {2 * all_reduce_sizes.DEALT_ROWS} rows"
    return None


def says_interval(r: Request) -> bool:
    """Whether the user has said how many steps run between chunks, where the release knows that word; "off" counts
    everywhere."""
    return INTERVAL in r.also_set and (not asks_for(r.also_set, INTERVAL) or _is_for(RANGES[INTERVAL], r))


def in_vain(r: Request) -> list[str]:
    """What the user's DSV4_SM120_SET asks for and a server of this plan does not do, with why."""
    if r.off:
        return []
    asked = [name for name in r.also_set if name in RANGES and asks_for(r.also_set, name)]
    asked += [DRAFT_HEAD] * bool(r.draft_head) + [PREFILL_GRAPHS] * bool(r.prefill_graphs)
    found = [f"DSV4_SM120_SET: {name} does nothing here: {why}" for name in asked if (why := _why_in_vain(r, name))]
    if "reproducible" in asked and _is_for(RANGES["reproducible"], r) and (theirs := _in_other_orders(r)):
        found.append(f"DSV4_SM120_SET: reproducible=on, and yet {NOT_REPRODUCIBLE}: SGLang's own are {theirs}")
    return found


def _in_other_orders(r: Request) -> str:
    """What of a server that is to be reproducible is SGLang's, and adds in an order that hangs on the rows."""
    theirs = [op for op in REPRODUCIBLE if op in OPS and op not in r.replaced]
    theirs += ["experts in FP8"] * (r.model.expert_format == FP8)
    theirs += ["all_reduce"] * (r.ranks > all_reduce_sizes.ONE_ORDER_RANKS and not r.sums_are_ours)
    return ", ".join(theirs)


def _why_in_vain(r: Request, name: str) -> str | None:
    if not _is_for(RANGES[name], r):
        return f"it is for SGLang {RANGES[name]}"
    if r.nodes > 1 and name in OF_ONE_HOST:
        return NOT_BETWEEN_HOSTS
    if r.stages > 1 and name in OF_TENSORS:
        return NOT_OF_STAGES
    if name == DRAFT_HEAD and not r.could_have_draft_head:
        return "bf16_linear is left out" if r.rows else "nothing drafts"
    if name == PREFILL_GRAPHS and not r.may_capture[0]:
        if "index_select" not in r.replaced:
            return "index_select is left out"
        return "with EAGLE it is for SGLang >=0.5.23" if r.speculation.algorithm == EAGLE else "not with other drafters"
    return why_whole(r) if name == DEALT_PRODUCTS else None


def _is_for(sglang: str, r: Request) -> bool:
    """sglang: a range of defaults.py, like ">=0.5.14,<0.6"."""
    first, end = (tuple(map(int, bound.lstrip("<>=").split("."))) for bound in sglang.split(","))
    return first <= r.version < end


def _captured(rows: int) -> str:
    return {0: "off", CAPTURED_ROWS: "on"}.get(rows, str(rows))


def _graphs_seen(r: Request) -> str:
    """What graphs made of 1,024 tokens where it was measured, of the kind of server that is nearest."""
    if r.speculation is not None:
        return "107 ms for 206, beside EAGLE, on an H200"
    return {1: "99 ms for 147 on an H200", 2: "68 ms for 173 on two H200"}.get(r.gpus, "75 ms for 356 on four H100")

"""What a plan says of prompts that the host's memory keeps where the KV cache has no room for them (--host-cache).

SGLang's hierarchical cache copies what the prefix cache has to the host, and back when a turn begins with it. Read in
each release: of this model all its pools go there, as many pages as the cards have, times --hicache-ratio; --hicache-
size is refused. From 0.5.21 on a start that says no ratio fails: SGLang's own sizing does not know these pools.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.doctor import control_group
from deepseek_v4_sm120.commands.plan import cards, memory
from deepseek_v4_sm120.commands.plan.request import Flag, Plan, Request

FLAG, RATIO, SIZE = "--enable-hierarchical-cache", "--hicache-ratio", "--hicache-size"
FLAGS = {FLAG, "--enable-hicache"}  # the second from 0.5.23 on
SINCE = (0, 5, 17)  # whose caches were driven by random load, with each slot's content beside it
UNSIZED_SINCE = (0, 5, 21)
# below it SGLang takes a tree for this model that knows none of its pools, but for this variable, and ends
BY_ITSELF_SINCE, TREE, YES = (0, 5, 13), "SGLANG_ENABLE_UNIFIED_RADIX_TREE", ("1", "true", "yes", "y")
LEAST_RATIO = 1.1  # the host has a copy of what the cards have: below it keeps nothing that they do not
DEFAULT_RATIO = 2.0  # SGLang's, where it has one: below UNSIZED_SINCE
LEFT_BY_SGLANG = 10 * memory.GIB  # of what is available in front of it; without, it does not start
# by which a server's pools are others than those of its plan, or what the host keeps is another part of them
RESIZED = {
    *("--mem-fraction-static", "--max-running-requests", "--max-total-tokens", "--chunked-prefill-size"),
    *("--swa-prefix-tails", "--swa-full-tokens-ratio", "--disable-overlap-schedule", "--max-prefill-tokens"),
    *("--enable-deepseek-v4-fp4-indexer", "--kv-cache-dtype", "--page-size", "--hicache-host-memory-mode"),
    *("--model-path", "--model", "--cpu-offload-gb", "--tp-size", "--tensor-parallel-size", "--tp", "--nnodes"),
    *("--dp-size", "--data-parallel-size", "--dp", "--enable-dp-attention", "--dsv4-kv-layout", "--config"),
}
DRAFTS = "--speculative"
EXAMPLE = 500_000  # tokens


def check(r: Request) -> None:
    """CommandError for a size that is none, and for what it is not planned beside."""
    if r.host_cache_gb is None:
        return
    if not 1 <= r.host_cache_gb <= 16384:
        raise CommandError(f"--host-cache must be 1 to 16384 GB of the host's memory, got {r.host_cache_gb:g}")
    if (why := why_none(r)) is not None:
        raise CommandError(f"--host-cache {r.host_cache_gb:g}{why}")


def why_none(r: Request) -> str | None:
    """Why it is not planned for this request, in words that go on from what was asked for; None: it is."""
    if r.version < SINCE:
        return f": of SGLang {r.sglang} nobody has tried this model's; take 0.5.17 or newer"
    if r.card.is_hosts:
        return f": the memory of a {r.card.name} is the host's, there is no other"
    if r.stages > 1:
        return f" with --pp-size {r.stages}: not planned beside stages"
    return None


def host_bytes(plan: Plan) -> float:
    """Of the host's memory, for a copy of what all of its cards have cached."""
    r = plan.request
    of_card = memory.cached_bytes(r.model, plan.tokens, plan.pools.window(plan.tokens), r.rows > 0)
    return of_card * r.gpus_of_host


def ratio(plan: Plan) -> float:
    """--hicache-ratio with which all cards of a host take at most --host-cache of it, in tenths."""
    return int(plan.request.host_cache_gb * 1e9 / host_bytes(plan) * 10) / 10


def taken_bytes(plan: Plan) -> float:
    """Of the host's memory, by that ratio."""
    return ratio(plan) * host_bytes(plan)


def flags(plan: Plan) -> list[Flag]:
    """CommandError where it keeps no more than the cards do."""
    if plan.request.host_cache_gb is None or not plan.fits:
        return []
    if (found := ratio(plan)) < LEAST_RATIO:
        least = LEAST_RATIO * host_bytes(plan) / 1e9
        raise CommandError(
            f"--host-cache {plan.request.host_cache_gb:g}: the host has a copy of what the cards have, "
            f"{plan.tokens:,} tokens; more of them take {math.ceil(least)} GB and up"
        )
    kept = int(found * plan.tokens)
    return [
        Flag(FLAG, "", "prompts that the KV cache has no room for come back from the host's memory"),
        Flag(RATIO, f"{found:g}", f"{kept:,} tokens there; a size in GB SGLang does not take for this model"),
    ]


def notes(plan: Plan) -> list[str]:
    r = plan.request
    if not plan.fits or why_none(r) is not None:
        return []
    a_million = host_bytes(plan) / plan.tokens * 1e6 / 1e9
    if r.host_cache_gb is None:
        return [
            f"conversations that have more than {plan.tokens:,} tokens together push each other out of the KV cache, "
            "and a turn of one that is gone reads all of it anew; --host-cache GB keeps them in the host's memory, "
            f"{a_million:.1f} GB for a million tokens, which it must have beside what the cards have"
        ]
    of_card = memory.cached_bytes(r.model, EXAMPLE, 0, r.rows > 0) / 1e9
    short = too_little(plan, ratio(plan), r.host_available)
    return [f"it does not start on this machine now: {short}"] * (short is not None) + [
        f"the host needs {taken_bytes(plan) / 1e9:.0f} GB for it that stay in memory, and {LEFT_BY_SGLANG / 1e9:.0f} "
        "more available at the start, which takes longer by locking them. "
        f"{EXAMPLE:,} tokens come back as {of_card:.1f} GB a card, some "
        f"{of_card * 1e9 / cards.PCIE.bytes_per_s * 1e3:.0f} ms over a whole {cards.PCIE.name}"
    ]


def refuse(plan: Plan, extra: Sequence[str], environ: Mapping[str, str]) -> None:
    """CommandError where what stands behind -- asks SGLang for it in a way that ends the start, after the weights."""
    own = _named(extra)
    is_planned = why_none(plan.request) is None  # and its size is known: beside stages it is another one
    instead = "say --host-cache GB in front of --" if is_planned else f"say {RATIO}"
    behind = f", or {RATIO} 2 ({2 * host_bytes(plan) / 1e9:.0f} GB of the host's memory) behind it" * is_planned
    if own.get(SIZE, "") not in ("", "0"):
        raise CommandError(f"{SIZE} behind --: SGLang has none for this model and ends its start; {instead}")
    if FLAGS & own.keys() and plan.request.version < BY_ITSELF_SINCE and environ.get(TREE, "").lower() not in YES:
        raise CommandError(
            f"{FLAG} behind --: SGLang {plan.request.sglang} has none for this model without {TREE}=1 and ends its "
            "start (sglang #26690); take 0.5.17 or newer"
        )
    has_ratio = RATIO in own or any(flag.name == RATIO for flag in plan.flags)
    if FLAGS & own.keys() and not has_ratio and plan.request.version >= UNSIZED_SINCE:
        raise CommandError(
            f"{FLAG} behind --, without {RATIO}: SGLang {plan.request.sglang} cannot size it for this model and ends "
            f"its start; {instead}{behind}"
        )


def asked_ratio(plan: Plan, extra: Sequence[str]) -> float | None:
    """Of the cards' pools, so many times a server keeps in the host's memory that is started by the plan and what
    stands behind --; None: nothing, or of other pools than the plan's."""
    said = {flag.name: flag.value for flag in plan.flags} | _named(extra)
    is_resized = any(name in RESIZED or name.startswith(DRAFTS) for name in _named(extra))
    if not FLAGS & said.keys() or is_resized or why_none(plan.request) is not None:
        return None
    try:
        return float(said.get(RATIO, DEFAULT_RATIO))
    except ValueError:  # SGLang's argparse says so
        return None


def _named(extra: Sequence[str]) -> dict[str, str]:
    """{argument: its last value}, "" where it has none."""
    found = {}
    for word, after in pairwise((*extra, "--")):
        name, is_joined, value = word.partition("=")
        if word.startswith("--"):
            found[name] = value if is_joined else "" if after.startswith("--") else after
    return found


def available_bytes(root: Path) -> int | None:
    """Of the host's memory, what a server may take now: of what the system says is available what this process's
    control groups leave it, in a container those that it was given; None: nothing tells. SGLang itself looks at the
    groups from 0.5.21 on."""
    told, left = cards.host_memory(root).get("MemAvailable"), control_group.memory_left(root)
    found = [one for one in (told and told << 20, left) if one is not None]
    return min(found) if found and told else None


def too_little(plan: Plan, asked: float | None, available: int | None) -> str | None:
    """Why the host's memory is too little for so many times the pools of all its cards. SGLang says it when the weights
    are loaded; up to 0.5.18 each card asks for itself whether all of the host has its own share."""
    if asked is None or available is None:
        return None
    left, once = max(0, available - LEFT_BY_SGLANG), host_bytes(plan)
    if asked * once <= left:
        return None
    if plan.request.host_cache_gb is not None and asked == ratio(plan):
        said, most = f"--host-cache {plan.request.host_cache_gb:g}", f"at most --host-cache {int(left / 1e9)}"
    else:
        said, most = f"{RATIO} {asked:g}", f"at most {RATIO} {int(left / once * 10) / 10:g}"
    if left < LEAST_RATIO * once:
        least = math.ceil((LEAST_RATIO * once + LEFT_BY_SGLANG) / 1e9)
        most = f"none fits that keeps more than the cards do, which takes {least} GB available"
    return (
        f"{said} takes {asked * once / 1e9:.0f} GB of the host's memory, of which {available / 1e9:.0f} are available; "
        f"SGLang leaves {LEFT_BY_SGLANG / 1e9:.0f} of them: {most}"
    )

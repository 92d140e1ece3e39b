"""What a plan says of prompts that the host's memory keeps where the KV cache has no room for them (--host-cache).

SGLang's hierarchical cache copies what the prefix cache has to the host, and back when a turn begins with it. Read in
each release: of this model all its pools go there, as many pages as the cards have, times --hicache-ratio; --hicache-
size is refused. From 0.5.21 on a start that says no ratio fails: SGLang's own sizing does not know these pools.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.plan import cards, memory
from deepseek_v4_sm120.commands.plan.request import Flag, Plan, Request

FLAG, RATIO, SIZE = "--enable-hierarchical-cache", "--hicache-ratio", "--hicache-size"
FLAGS = {FLAG, "--enable-hicache"}  # the second from 0.5.23 on
SINCE = (0, 5, 17)  # whose caches were driven by random load, with each slot's content beside it
UNSIZED_SINCE = (0, 5, 21)
LEAST_RATIO = 1.1  # the host has a copy of what the cards have: below it keeps nothing that they do not
LEFT_BY_SGLANG = 10 * memory.GIB  # of what is available in front of it; without, it does not start
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
    return [
        f"the host needs {taken_bytes(plan) / 1e9:.0f} GB for it that stay in memory, and {LEFT_BY_SGLANG / 1e9:.0f} "
        "more available at the start, which takes longer by locking them. "
        f"{EXAMPLE:,} tokens come back as {of_card:.1f} GB a card, some "
        f"{of_card * 1e9 / cards.PCIE.bytes_per_s * 1e3:.0f} ms over a whole {cards.PCIE.name}"
    ]


def refuse(plan: Plan, extra: Sequence[str]) -> None:
    """CommandError where what stands behind -- asks SGLang for it in a way that ends the start, after the weights."""
    own = {word.partition("=")[0]: word.partition("=")[2] for word in extra if word.startswith("--")}
    is_planned = why_none(plan.request) is None  # and its size is known: beside stages it is another one
    instead = "say --host-cache GB in front of --" if is_planned else f"say {RATIO}"
    behind = f", or {RATIO} 2 ({2 * host_bytes(plan) / 1e9:.0f} GB of the host's memory) behind it" * is_planned
    sizes = [extra[i + 1] for i, word in enumerate(extra[:-1]) if word == SIZE] + [own.get(SIZE, "")]
    if any(size not in ("", "0") for size in sizes):
        raise CommandError(f"{SIZE} behind --: SGLang has none for this model and ends its start; {instead}")
    has_ratio = RATIO in own or any(flag.name == RATIO for flag in plan.flags)
    if FLAGS & own.keys() and not has_ratio and plan.request.version >= UNSIZED_SINCE:
        raise CommandError(
            f"{FLAG} behind --, without {RATIO}: SGLang {plan.request.sglang} cannot size it for this model and ends "
            f"its start; {instead}{behind}"
        )


def too_little(plan: Plan, available_mib: int) -> str | None:
    """Why the host's memory is too little for it: what SGLang would say when the weights are loaded. available_mib:
    what the system says, 0 where it does not."""
    if not any(flag.name == RATIO for flag in plan.flags) or not available_mib:
        return None
    available = (available_mib << 20) - LEFT_BY_SGLANG
    if taken_bytes(plan) <= available:
        return None
    return (
        f"--host-cache {plan.request.host_cache_gb:g}: {(available_mib << 20) / 1e9:.0f} GB of the host's memory are "
        f"available, of which SGLang leaves {LEFT_BY_SGLANG / 1e9:.0f}: at most --host-cache "
        f"{max(0, int(available / 1e9))}"
    )

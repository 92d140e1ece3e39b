"""A running server's hierarchical cache, which keeps prompts in the host's memory: what goes wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from deepseek_v4_sm120.commands.doctor.finding import Finding, ok, warn
from deepseek_v4_sm120.commands.plan.host_cache import RATIO

if TYPE_CHECKING:
    from deepseek_v4_sm120.commands.doctor.server import Answers

CHECK = "host cache"
SHARED_SINCE = (0, 5, 15)  # what a running request shares of a beginning stays (sglang #29352)
WRITE_BACK = "write_back"


def findings(a: Answers) -> Iterator[Finding]:
    if not a.get("enable_hierarchical_cache") or not a.is_v4:
        return
    if a.version and a.version < SHARED_SINCE:
        cost = "what a running request shares of a beginning is freed under it: its answer goes on from another's text"
        yield warn(CHECK, f"SGLang {a.get('version')}", f"{cost} (sglang #29352)", "0.5.17 or newer")
    if a.get("hicache_write_policy") == WRITE_BACK:
        cost = "streams wait for each copy when the KV cache is full; 0.5.18 ends by it, 0.5.23 with little host memory"
        yield warn(CHECK, f"--hicache-write-policy {WRITE_BACK}", cost, "--hicache-write-policy write_through")
    tokens, metrics = a.get("max_total_num_tokens"), a.metrics or {}
    host, used = (metrics.get(f"hicache_host_{name}_tokens", 0) for name in ("total", "used"))
    if not host or not tokens:
        return
    if host <= tokens:
        found = f"{host:,.0f} tokens in the host's memory, {tokens:,} in the KV cache"
        cost = "the host has copies of what the KV cache has, and hardly a prompt that it has no room for"
        yield warn(CHECK, found, cost, f"{RATIO} 2 and more; `plan --host-cache` says what it takes")
    else:
        yield ok(CHECK, f"{used:,.0f} of {host:,.0f} tokens in the host's memory, {tokens:,} in the KV cache")

"""What a running server says of its load: prompts, drafts, KV cache and queue, by its metrics where it has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from deepseek_v4_sm120.commands.doctor.finding import Finding, not_run, ok, warn
from deepseek_v4_sm120.commands.plan import stages
from deepseek_v4_sm120.commands.plan.request import PREFILL_GRAPHS, PREFILL_GRAPHS_SINCE
from deepseek_v4_sm120.sglang_patches.adapters import prefill_graphs
from deepseek_v4_sm120.sglang_patches.defaults import CAPTURED_ROWS
from deepseek_v4_sm120.sglang_patches.rows.attention import DRAFT_CHAIN
from deepseek_v4_sm120.sglang_patches.rows.lm_head import DRAFT_HEAD

if TYPE_CHECKING:
    from deepseek_v4_sm120.commands.doctor.server import Answers

FULL_POOL, HALF_POOL = 0.95, 0.5
LOW_FRACTION = 0.8  # of memory; a start on two cards that says nothing of it has 0.86
LONG_PROMPT, OF_CONVERSATIONS = 8192, 0.7  # tokens of a prompt, and the share of them that was cached
EVICTED = 0.5  # of the tokens that were read and not cached: fewer are dropped by a cache that has room for them
LEAST_ACCEPTED = 1.3  # tokens a step, with the one that is no guess
# drafts a step -> (tokens of a step below which more is wrong than the text is hard, what others published). Three: on
# GSM8K by vLLM's own loop, and of SGLang on AMD, with the share of first guesses that were right; the last row is
# DSPARK's, both asked about as too few
EXPECTED = {
    1: (1.5, "1.9 (sglang #28520)"),
    2: (1.7, "2.0 at temperature 1 (vllm #41044)"),
    3: (2.0, "2.6 to 3.0 (ROCm/ATOM #1372, sglang #28520)"),
    5: (2.2, "2.8 and more (vllm #56797, vllm-ascend #13640)"),
}


def _may_capture(a: Answers) -> bool:
    """Whether the setting for them would do anything: by what they are not read beside, as far as the server tells."""
    beside = {name: value for name, value in prefill_graphs.PLAIN.items() if "cuda_graph" not in name}
    return a.attention_ranks == 1 and all(a.info.get(name) in (None, value) for name, value in beside.items())


def _short_prompts(a: Answers) -> Iterator[Finding]:
    """By the mean of what the server has read: new tokens of a prompt that wait for the host, not for the card."""
    asked, read = a.metrics.get("num_requests_total", 0), a.metrics.get("prompt_tokens_total")
    config = a.info.get("cuda_graph_config")
    prefill = config.get("prefill") if isinstance(config, dict) else None
    is_off = isinstance(prefill, dict) and prefill.get("backend") == "disabled"
    if not is_off or not asked or read is None or a.version < PREFILL_GRAPHS_SINCE or not _may_capture(a):
        return
    tokens = (read - a.metrics.get("cached_tokens_total", 0)) / asked
    rows = prefill_graphs.worth_capturing(a.get("tp_size") or 1)
    if not 0 < tokens <= rows or "index_select" not in (a.applied or ()):
        return
    if a.is_shadowed:
        found = f"{tokens:,.0f} new tokens a prompt, in shadow mode, whose times are not ours alone"
        yield not_run("short prompts", found, "start it without DSV4_SM120_SHADOW, and ask again")
        return
    cost = "they wait for their launches: 1,024 tokens took 147 ms to the first one, in graphs 99 (H200)"
    chunk = a.get("chunked_prefill_size") or 0
    choice = "on" if tokens <= CAPTURED_ROWS else min(rows, chunk) if chunk > 0 else rows  # no pass has more rows
    fix = f"DSV4_SM120_SET={PREFILL_GRAPHS}={choice}, and the memory that `plan` counts for it"
    yield warn("short prompts", f"{tokens:,.0f} new tokens a prompt, prefill not in graphs", cost, fix)


def checks(a: Answers) -> Iterator[Finding]:
    if a.metrics is None:
        yield not_run("metrics", a.metrics_problem, "--enable-metrics")
        return
    m = a.metrics
    if "token_usage" not in m:
        yield not_run("load", "its metrics do not tell how full the KV cache is: not those of an SGLang server")
        return
    yield from _short_prompts(a)
    yield from _cached(a, m)
    yield from _stages(a, m)
    complaints = [*_full(a, m), *_slots(a, m)]
    yield from complaints
    if not complaints:
        yield ok("load", f"KV cache {m['token_usage']:.0%} full, {m.get('num_queue_reqs', 0):.0f} waiting")
    yield from _accepted(a, m)


def _cached(a: Answers, m: Mapping[str, float]) -> Iterator[Finding]:
    """What prompts found in the prefix cache. Whether they are conversations that go on nothing tells."""
    asked, read = m.get("num_requests_total"), m.get("prompt_tokens_total")
    if not asked or not read or a.get("disable_radix_cache"):
        return
    share = min(m.get("cached_tokens_total", 0) / read, 1)
    found = f"{share:.0%} of {read / asked:,.0f} tokens a prompt were cached"
    if read / asked >= LONG_PROMPT and share < OF_CONVERSATIONS:
        found += ". Of conversations nine tenths are; what parts their prompts: docs/operating.md, An agent's turns"
        evicted = m.get("evicted_tokens_total", 0)
        if evicted >= EVICTED * (1 - share) * read:
            found += f". Or {_evicted(a, m, evicted)}"
    yield ok("cached prompts", found)


def _evicted(a: Answers, m: Mapping[str, float], evicted: float) -> str:
    """Where the KV cache has dropped about as much as was read: what keeps conversations that it has no room for. A
    cache that is full drops as much, too, where prompts have nothing in common: which of the two nothing tells."""
    tokens, host = a.get("max_total_num_tokens"), m.get("hicache_host_total_tokens", 0)
    holds = f" of {tokens:,} tokens" if tokens else ""
    more = "fewer at a time" if host else "`serve --host-cache GB` keeps them in the host's memory"
    if host:
        holds += f" (and {host:,.0f} in the host's memory)"
        more += ", or a larger --hicache-ratio"
    return (
        f"the KV cache{holds} dropped {evicted:,.0f} for others: conversations that have more together are read anew, "
        f"turn by turn ({more})"
    )


def _stages(a: Answers, m: Mapping[str, float]) -> Iterator[Finding]:
    """Stages where so much is written that they lost wherever they were measured."""
    written, read = m.get("generation_tokens_total"), m.get("prompt_tokens_total")
    if a.stages == 1 or not written or read is None:
        return
    new = max(0.0, read - m.get("cached_tokens_total", 0)) / written
    if new < stages.LEAST_READ:
        found = f"{a.stages}, and {new:.1f} new tokens of prompts for each that is written"
        cost = "a step took 1.6 to 2.4 times as long as by tensors on two H200; long prompts, or many, 28 to 30% less"
        yield warn("stages", found, cost, f"--tp-size {a.cards} in place of --pp-size {a.stages}; `plan` has its flags")


def _accepted(a: Answers, m: Mapping[str, float]) -> Iterator[Finding]:
    """Drafts that are wrong cost no answer, only time: by the last steps, beside what others' real text brings."""
    accepted, rows = m.get("spec_accept_length"), a.get("speculative_num_draft_tokens")
    drafts = max((n for n in EXPECTED if rows is not None and n < rows), default=None)
    fewest, published = EXPECTED[drafts] if drafts is not None else (LEAST_ACCEPTED, "")
    if not accepted or accepted >= fewest:
        return
    cost = "drafts cost more than they bring" if accepted < LEAST_ACCEPTED else "drafts bring less than they could"
    cost += f"; others have {published}" if published else ""
    fix = "fewer draft tokens, or none, where the text is made, or drawn at a high temperature. Of real text a draft "
    fix += (
        f"that guesses so is computed wrongly: is {DRAFT_CHAIN.name} in place (`status`), and whose are the drafter's "
    )
    fix += f"weights? Compare with DSV4_SM120_SET={DRAFT_HEAD.name}=off"
    yield warn("speculation", f"{accepted:.2f} tokens accepted a step", cost, fix)


def _full(a: Answers, m: Mapping[str, float]) -> Iterator[Finding]:
    complaints = [f"KV cache {m['token_usage']:.0%} full"] if m["token_usage"] > FULL_POOL else []
    if m.get("num_retracted_requests_total", 0) > 0:
        complaints.append(f"{m['num_retracted_requests_total']:.0f} requests retracted and computed again")
    if complaints:
        fix = "fewer --max-running-requests or a shorter context; `plan` says what fits"
        fraction = a.get("mem_fraction_static")
        if fraction is not None and fraction < LOW_FRACTION:
            complaints.append(f"--mem-fraction-static {fraction:g} leaves it little memory")
            fix = "a larger --mem-fraction-static: `plan` says which is safe"
        yield warn("load", ", ".join(complaints), "requests wait, or are computed twice", fix)


def _slots(a: Answers, m: Mapping[str, float]) -> Iterator[Finding]:
    """Requests that wait for a slot while the KV cache has room."""
    waiting, running = m.get("num_queue_reqs", 0), a.most_running
    if waiting > 0 and m["token_usage"] < HALF_POOL:
        found = f"{waiting:.0f} requests wait while the KV cache is {m['token_usage']:.0%} full"
        if running is not None and m.get("num_running_reqs", 0) >= running:
            found += f": all {a.get('max_running_requests')} request slots are taken"
            cost, fix = "they wait for a slot", "more --max-running-requests: `plan --concurrency` says what they cost"
        else:
            cost, fix = "they wait: for prompts in front of them, or for sliding windows", "ask again under steady load"
        yield warn("load", found, cost, fix)

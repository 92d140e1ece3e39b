"""The stage `host_cache43` of run_stage.py: a conversation that comes back, from the card's prefix cache, from the
host's memory (--enable-hierarchical-cache), and computed again; and what each takes of a stream beside it. Once more
with prefill graphs: what is computed of such a conversation is a few tokens, whose pass is bound by launches. Beside
it a new prompt of as many tokens, and what the card did in the pass: the rest is the conversation's."""

import asyncio
import time

PHASE = "returns"
LENGTHS = (8192, 32_000)  # tokens of the conversation
REPEATS = 2
POOL = 70_000  # tokens of the card's cache
FILLERS = (32_000,) * 3  # prompts that take all of it, one after the other
COMPUTED, CARD, LATER = "computed", "again at once", "again behind others"
FRESH = "a new prompt of as many tokens as are computed of it"
TRACED = 5  # the seed of Case.events
STREAM = 256  # tokens of the prompt of the stream beside
STREAM_NEW, BEGINS_AT = 400, 60  # its tokens, and the one with which the conversation is sent
HOST, GRAPHS, NO_HOST = "host_cache43", "graphs_host_cache43", "no_host_cache43"
IMPLEMENTATIONS = {
    HOST: "ours, every operator on, host memory behind the prefix cache",
    GRAPHS: "ours, every operator on, host memory behind the prefix cache, prefill graphs as planned",
    NO_HOST: "ours, every operator on, prefix cache of the card alone",
}
ISSUE = 23


def stages(make, timed, sets, ours, planned):
    """ours, planned: the environments of our operators, without and with prefill graphs."""
    options = [*timed, *sets(json_model_override_args='{"n_routed_experts": 32}'), "--mem", "0.97", "--radix"]
    options += ["--phases", PHASE, "--max-total-tokens", str(POOL)]
    hierarchical = sets(enable_hierarchical_cache=True, hicache_ratio=4.0)
    return {
        HOST: [
            make(HOST, options + hierarchical, environment=ours, takes_turns=True),
            make(GRAPHS, options + hierarchical, environment=planned, takes_turns=True),
            make(NO_HOST, options, environment=ours, takes_turns=True),
        ]
    }


# ---- in the engine


def measure(case, of_passes):
    """Of a Case of engine_case.py: of each length how a conversation came, alone and beside a stream. of_passes: of
    prompts_stage.py."""
    case.first_tokens(1, FILLERS[0], 9)
    return {f"{length}": of_length(case, length, of_passes) for length in LENGTHS}


def of_length(case, length, of_passes):
    found = {kind: {"ms": [], "cached": [], "sources": []} for kind in (COMPUTED, CARD, LATER, FRESH)}
    for i in range(REPEATS):
        for kind in (COMPUTED, CARD, LATER):
            if kind == LATER:
                fill(case, 50 * i)
            seconds, (answer,) = case.first_tokens(1, length, 1000 + i)
            tell(found[kind], answer["meta_info"], 1e3 * seconds)
    few = length - (found[CARD]["cached"][-1] or 0)
    for i in range(REPEATS):
        seconds, (answer,) = case.first_tokens(1, few, 3000 + length + i)
        tell(found[FRESH], answer["meta_info"], 1e3 * seconds)
    case.first_tokens(1, length, TRACED)
    (found["card"],) = of_passes(case.events(1, 0, length), 1)
    beside = {"alone": stream_beside(case, None)}
    fill(case, 500)
    beside[COMPUTED] = stream_beside(case, (length, 2000))
    fill(case, 600)
    beside[LATER] = stream_beside(case, (length, 2000))
    print(f"[{case.options.name}] {length}: {found} {beside}", flush=True)
    return found | {"beside": beside}


def tell(row, meta, ms):
    row["ms"].append(ms)
    row["cached"].append(meta.get("cached_tokens"))
    row["sources"].append(meta.get("cached_tokens_details"))


def fill(case, seed):
    """Others, which take all of the card's cache."""
    for number, length in enumerate(FILLERS):
        case.first_tokens(1, length, 5000 + seed + number)


def stream_beside(case, sent):
    """Milliseconds from token to token of one stream: their median, the longest one, and all from the token with which
    a conversation (length, seed; None: none) was sent until it had its own first token."""
    prompt = case.harness.ids(STREAM, case.vocabulary, 77)
    asked = {"temperature": 0, "max_new_tokens": STREAM_NEW, "ignore_eos": True}
    times, other = [], {}

    async def conversation():
        length, seed = sent
        once = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        other["began"] = time.perf_counter()
        answer = await case.engine.async_generate(
            input_ids=case.harness.ids(length, case.vocabulary, seed), sampling_params=once
        )
        other.update(ended=time.perf_counter(), cached=answer["meta_info"].get("cached_tokens"))

    async def together():
        task = None
        chunks = await case.engine.async_generate(input_ids=prompt, sampling_params=asked, stream=True)
        async for _ in chunks:
            times.append(time.perf_counter())
            if len(times) == BEGINS_AT and sent is not None:
                task = asyncio.ensure_future(conversation())
        if task is not None:
            await task

    case.engine.loop.run_until_complete(together())
    return of_gaps(times, other)


def of_gaps(times, other):
    gaps = [1e3 * (b - a) for a, b in zip(times, times[1:], strict=False)]
    row = {"median_ms": sorted(gaps)[len(gaps) // 2], "longest_ms": max(gaps[BEGINS_AT // 2 :])}
    if other:
        row |= {"conversation_ms": 1e3 * (other["ended"] - other["began"]), "cached": other["cached"]}
        row["ended_before_the_stream"] = other["ended"] < times[-1]
    return row


# ---- around it


def rows_of(row, name, case):
    """collect.py's rows of a case. row: its maker of rows."""
    impl, rows = IMPLEMENTATIONS[name], []
    for length, found in case.get(PHASE, {}).items():
        at = f"43 layers, 32 experts, a conversation of {int(length):,} tokens"

        def add(what, metric, value, bar=None, at=at):
            rows.append(row(f"{at}, {what}", impl, metric, value, bar, ISSUE))

        for kind in (COMPUTED, CARD, LATER, FRESH):
            seen = found[kind]
            add(kind, "time to all first tokens, ms, best", min(seen["ms"]))
            add(kind, "time to all first tokens, ms, worst", max(seen["ms"]))
            add(kind, "tokens from a cache, fewest", min(cached or 0 for cached in seen["cached"]))
        add(CARD, "traced, ms", found["card"]["ms"])
        add(CARD, "the card without a kernel, ms", found["card"]["idle_ms"])
        add(CARD, "launches", found["card"]["launches"])
        for kind, seen in found["beside"].items():
            what = "a stream alone" if kind == "alone" else f"{kind}, beside a stream"
            add(what, "from a token of the stream to the next, median, ms", seen["median_ms"])
            add(what, "from a token of the stream to the next, longest, ms", seen["longest_ms"])
            if "conversation_ms" in seen:
                add(what, "time to all first tokens, ms, best", seen["conversation_ms"])
                add(what, "tokens from a cache", seen["cached"] or 0)
                add(what, "first tokens behind the stream's end", int(not seen["ended_before_the_stream"]), 0)
    return rows

"""What the stage `host_cache43` makes of an engine's answers, and that it tells one that keeps nothing."""

import asyncio
import types

import pytest

from tests.e2e import collect, prompts_stage, returns_stage
from tests.e2e.stages import STAGES


class Engine:
    """A card that keeps the last two prompts, and behind it a host that keeps all, or none; a token a millisecond, by a
    clock of its own."""

    def __init__(self, host):
        self.loop, self.host, self.card, self.stored, self.busy = asyncio.new_event_loop(), host, [], set(), 0.0
        self.now = 0.0

    def first(self, prompt):
        at_once, kept = prompt in self.card, self.host and prompt in self.stored
        self.card = [*(one for one in self.card if one != prompt), prompt][-2:]
        self.stored.add(prompt)
        cached = prompt[1] - 1 if (at_once or kept) and prompt[1] > 1 else 0
        return {"meta_info": {"cached_tokens": cached}}, 0.001 if at_once else 0.002 if kept else 0.02

    async def async_generate(self, input_ids, sampling_params, stream=False):
        if stream:
            return self.tokens(sampling_params["max_new_tokens"])
        answer, self.busy = self.first(input_ids)
        while self.busy:
            await asyncio.sleep(0)
        return answer

    async def tokens(self, count):
        for _ in range(count):
            self.now, self.busy = self.now + 0.001 + self.busy, 0.0
            await asyncio.sleep(0)
            yield {}


def measured(host, monkeypatch):
    monkeypatch.setattr(returns_stage, "LENGTHS", (90,))
    harness = types.SimpleNamespace(ids=lambda length, vocabulary, seed: (seed, length))
    case = types.SimpleNamespace(
        engine=Engine(host), vocabulary=1, harness=harness, options=types.SimpleNamespace(name="n")
    )

    def first_tokens(batch, length, seed):
        answer, seconds = case.engine.first((seed, length))
        return seconds, [answer]

    def events(batch, new, length):
        """One kernel, as long as the pass."""
        seconds, _ = first_tokens(batch, length, returns_stage.TRACED)
        return [{"cat": "kernel", "name": "one", "ts": 0.0, "dur": 1e6 * seconds}]

    case.first_tokens, case.events = first_tokens, events
    monkeypatch.setattr(returns_stage, "time", types.SimpleNamespace(perf_counter=lambda: case.engine.now))
    try:
        return returns_stage.measure(case, prompts_stage.of_passes)
    finally:
        case.engine.loop.close()


@pytest.mark.parametrize("host", [True, False])
def test_a_conversation_comes_from_where_it_is_kept(host, monkeypatch):
    name = returns_stage.HOST if host else returns_stage.NO_HOST
    case = {"exit": 0, "patched": False, "command": "engine_case.py", returns_stage.PHASE: measured(host, monkeypatch)}
    rows = {(row["case"].split("tokens, ")[-1], row["metric"]): row["value"] for row in collect.case_rows(name, case)}
    for kind, cached in ((returns_stage.COMPUTED, 0), (returns_stage.CARD, 89), (returns_stage.LATER, 89 * host)):
        assert rows[kind, "tokens from a cache, fewest"] == cached
    assert rows[returns_stage.LATER, "time to all first tokens, ms, best"] == (2 if host else 20)
    assert (
        rows[returns_stage.FRESH, "time to all first tokens, ms, best"] == 20
    )  # this card takes as long for any prompt
    assert (rows[returns_stage.CARD, "traced, ms"], rows[returns_stage.CARD, "launches"]) == (1, 1)  # not computed: 20
    longest = "from a token of the stream to the next, longest, ms"
    computed, later = (
        rows[f"{kind}, beside a stream", longest] for kind in (returns_stage.COMPUTED, returns_stage.LATER)
    )
    assert (computed, later) == pytest.approx((21, 3 if host else 21))
    assert rows[f"{returns_stage.LATER}, beside a stream", "tokens from a cache"] == 89 * host
    assert ("a stream alone", longest) in rows
    assert rows[f"{returns_stage.LATER}, beside a stream", "first tokens behind the stream's end"] == 0


@pytest.mark.parametrize("ended", [0.3, 0.5])
def test_a_first_token_behind_the_streams_end_is_a_missed_bar(ended):
    times = [0.001 * i for i in range(400)]
    seen = returns_stage.of_gaps(times, {"began": 0.1, "ended": ended, "cached": None})
    kept = {"ms": [1.0], "cached": [None], "sources": [None]}
    kinds = (returns_stage.COMPUTED, returns_stage.CARD, returns_stage.LATER, returns_stage.FRESH)
    found = dict.fromkeys(kinds, kept) | {"card": {"ms": 1.0, "idle_ms": 0.0, "launches": 1}}
    case = {returns_stage.PHASE: {"90": found | {"beside": {returns_stage.COMPUTED: seen}}}}
    rows = returns_stage.rows_of(collect.row, returns_stage.HOST, case)
    assert [row["met"] for row in rows if row["bar"] is not None] == [ended < times[-1]]


def test_the_engines_differ_in_the_host_and_in_graphs_alone():
    with_host, graphs, without = STAGES[returns_stage.HOST]
    added = with_host.options[len(without.options) :]
    assert with_host.options[: len(without.options)] == without.options and "hicache_ratio=4.0" in added
    assert with_host.environment == without.environment and with_host.is_timed and "--radix" in without.options
    assert graphs.options == with_host.options and graphs.is_timed
    added = {name: value for name, value in graphs.environment.items() if with_host.environment.get(name) != value}
    assert added == {"DSV4_SM120_SET": "prefill_graphs=on"}


@pytest.mark.parametrize("ran", [0, 12])
def test_prefill_graphs_in_which_no_pass_ran_are_a_missed_bar(ran):
    _, graphs, _ = STAGES[returns_stage.HOST]
    command = " ".join(f"{name}={value}" for name, value in graphs.environment.items())
    case = {"exit": 0, "patched": False, "command": command, "prefills": {"true": ran}, returns_stage.PHASE: {}}
    rows = {row["metric"]: row["met"] for row in collect.case_rows(graphs.name, case)}
    assert rows["engines without a prefill pass in graphs"] is bool(ran)

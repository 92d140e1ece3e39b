"""The windows of cached prefixes that a plan keeps: what a chunk of a prompt leaves is SGLang's own arithmetic."""

from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.commands.plan import launch, memory, models
from deepseek_v4_sm120.commands.speculation import EAGLE, Speculation
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import content, every_release, fetch
from tests.test_plan import flags, request

M = models.FLASH
FIRST = "0.5.21"
SWITCH = "SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS = EnvBool(True)"


class Cached:
    """A request of whose prompt the tree has the first `protected` tokens."""

    def __init__(self, protected):
        self.req_pool_idx, self.holds_kv, self.cache_protected_len, self.evicted = 0, True, protected, 0

    def swa_dead_lo(self, page):
        return self.cache_protected_len

    def get_evicted_seqlen(self, component):
        return self.evicted

    def set_evicted_seqlen(self, component, length):
        self.evicted = length


class Rows:
    def __getitem__(self, at):
        return at[1]


class Allocator:
    def __init__(self):
        self.freed = []

    def free_swa_segment(self, slots, start_pos):
        self.freed.append(slots)


@every_release(FIRST)
@pytest.mark.parametrize("drafts", [0, 1])
@pytest.mark.parametrize("chunk", memory.CHUNKS)
def test_what_a_cached_chunk_keeps_of_its_windows(version, chunk, drafts):
    """By default a chunk's slots are freed but for the last pages; with drafts the tree's keys are a token shorter."""
    assert SWITCH in content(fetch(version), "sglang/srt/environ.py")
    module = "sglang.srt.mem_cache.common"
    names = {
        "ComponentType": SimpleNamespace(SWA="swa"),
        "Callable": (),
        "ceil_align": lambda a, b: -(-a // b) * b,
        "max": max,
        "min": min,
    }
    free = take(fetch(version), names, "free_swa_out_of_window_slots", module)
    given = {"sliding_window_size": M.window, "page_size": memory.PAGE_TOKENS}
    for chunks in (1, 2, 7):
        kv, allocator = Cached((chunks - 1) * chunk), Allocator()
        prefilled, rows = chunks * chunk - drafts - 1, SimpleNamespace(req_to_token=Rows())
        free(SimpleNamespace(kv=kv), prefilled, req_to_token_pool=rows, token_to_kv_pool_allocator=allocator, **given)
        left = chunks * chunk - kv.evicted
        assert M.window <= left <= memory.CACHED_CHUNK_TOKENS and left % memory.PAGE_TOKENS == 0
        assert allocator.freed == [slice((chunks - 1) * chunk, kv.evicted, None)]


@pytest.mark.parametrize("speculation", [None, Speculation(EAGLE, 2)])
@pytest.mark.parametrize(("gpus", "streams", "context"), [(2, 1, 393_216), (2, 8, 65_536), (4, 32, 131_072)])
def test_a_plan_keeps_the_windows_of_what_its_kv_cache_holds(gpus, streams, context, speculation):
    plan = launch.make(request(gpus=gpus, concurrency=streams, context=context, speculation=speculation))
    kept = memory.kept_prefix_tokens(M, plan.prefix_tails, plan.chunk)
    assert kept == pytest.approx(plan.tokens, rel=0.01, abs=4 * plan.chunk) and plan.tokens >= streams * context
    assert flags(plan)["--swa-prefix-tails"] == str(plan.prefix_tails)
    assert plan.prefix_tails > memory.CACHED_PREFIXES * streams == _by_default(plan).prefix_tails
    assert _by_default(plan).tokens(_room(plan)) > plan.tokens


def _room(plan):
    return plan.pool_bytes


def _by_default(plan):
    r = plan.request
    return memory.pools(M, r.version, requests=r.concurrency, chunk=plan.chunk, drafts=r.rows)


def test_all_streams_at_full_length_come_first():
    """Eight streams of 290,000 tokens fill two cards: the windows have what is left, also where the estimates of what
    the cards have for both are short."""
    plan = launch.make(request(concurrency=8, context=290_048))
    short = memory.static_off_by(plan.weights, plan.fraction)
    least = plan.pools.tokens(_room(plan) - short)
    assert 8 * 290_048 <= least < 8 * 290_048 + 16_384 and 0.6e9 < short < 0.8e9
    assert plan.prefix_tails > memory.CACHED_PREFIXES * 8
    (dropped,) = [note for note in plan.notes if "tokens drops what other conversations have cached" in note]
    assert "fewer streams" in dropped
    roomy = launch.make(request(concurrency=8, context=65_536))
    assert not any("tokens drops what" in note for note in roomy.notes)


@pytest.mark.parametrize(
    "changes",
    [
        {"sglang": "0.5.20"},  # a tenth of the tokens, whatever the requests
        {"replaced": tuple(op for op in launch.OPS if op != "sparse_decode")},  # SGLang's own holds a copy of the pool
        {"gpus": 4, "shadow": "1"},
    ],
)
def test_elsewhere_it_stays_sglangs_number(changes):
    plan = launch.make(request(context=131_072, **changes))
    assert plan.prefix_tails is None and "--swa-prefix-tails" not in flags(plan)


def test_where_no_plan_keeps_more_it_says_why():
    """And not that fewer streams would help, of which each has windows of its own."""
    own = tuple(op for op in launch.OPS if op != "sparse_decode")
    plan = launch.make(request(context=262_144, concurrency=8, replaced=own))
    (dropped,) = [note for note in plan.notes if "tokens drops what other conversations have cached" in note]
    assert "holds a copy of each sliding window" in dropped and "fewer streams" not in dropped


def test_as_many_as_doctor_says_keep_that_many_tokens():
    for tokens in (8192, 393_216, 1_048_576):
        for chunk in memory.CHUNKS:
            tails = memory.prefix_tails_for(M, tokens, chunk)
            assert memory.kept_prefix_tokens(M, tails, chunk) >= tokens > memory.kept_prefix_tokens(M, tails - 2, chunk)

"""What a request gives back where it ends, with --strip-thinking-cache: each release's own release of its slots on the
CPU, with ours in it and without. The stand-in of the prefix cache does what the releases' caches do with the length
that they are told."""

from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches.fixes import stripped_thoughts
from tests.patching.test_wheel_wo_a import QUIET, take
from tests.patching.wheels import every_release, fetch, since

REQUEST, RELEASE = "sglang.srt.managers.schedule_batch", "sglang.srt.mem_cache.common"
PAGE, PROMPT, ANSWERED, COMMITTED = 256, 600, 1000, 2000
CACHED = (PROMPT + ANSWERED) // PAGE * PAGE  # of a request that was retracted, and computed anew


class Record(SimpleNamespace):
    def __getattr__(self, name):
        return QUIET


class Cache(Record):
    """A prefix cache as far as a request's end asks it; `freed`: the places of the sequence whose slots it frees."""

    def checkpoint(self, req, *, up_to, **_):
        assert req.kv.cache_protected_len <= up_to // PAGE * PAGE + PAGE - 1

    def cache_finished_req(self, req, is_insert=True, kv_len_to_handle=None):
        length = req.pop_committed_kv_cache() if kv_len_to_handle is None else kv_len_to_handle
        self.freed |= set(range(length // PAGE * PAGE, length))

    def free_kv_row(self, kv, ranges):
        for start, end in ranges:
            self.freed |= set(range(start, end))


def name_of(version):
    return (
        "owned_kv_len"
        if since(version, "0.5.21")
        else "effective_kv_committed_len"
        if since(version, "0.5.16")
        else "_cache_commit_len"
    )


def ended(version, monkeypatch, *, ours, cached=CACHED, committed=COMMITTED, strip=True, thoughts=5, insert=True):
    """(how long its own is, which pages were freed) of a request that ends, or is retracted once more."""
    monkeypatch.setattr(stripped_thoughts, "is_ours", lambda: ours)
    wheel, has_records = fetch(version), since(version, "0.5.19")
    arguments = SimpleNamespace(strip_thinking_cache=strip, page_size=PAGE, speculative_algorithm=None)
    names = dict.fromkeys(("get_serving", "get_spec", "get_server_args", "get_global_server_args"), lambda: arguments)
    names |= {"isinstance": lambda *_: False, "ceil_align": lambda n, page: -(-n // page) * page}
    own = take(wheel, names, f"Req.{name_of(version)}", REQUEST)
    lengths = stripped_thoughts.replace_record_length if has_records else stripped_thoughts.replace_request_length
    methods = {name_of(version): lengths(own)}
    for name in ("pop_committed_kv_cache", "pop_overallocated_kv_cache"):
        methods |= {name: method} if (method := take(wheel, names, f"Req.{name}", REQUEST)) else {}
    record = Record(cache_protected_len=cached, kv_committed_len=committed, kv_allocated_len=committed, holds_kv=True)
    record.is_kv_released = False
    request = type("Request", (Record,), methods)(kv=record, req_pool_idx=0, mamba_pool_idx=None, finished_len=None)
    vars(request).update(vars(record)) if not has_records else None
    vars(request).update(
        origin_input_ids=[0] * PROMPT, output_ids=[0] * (committed - PROMPT), reasoning_tokens=thoughts
    )
    vars(request).update(kv_committed_freed=False, kv_overallocated_freed=False, skip_radix_cache_insert=False)
    cache = Cache(freed=set(), claim_kv_row=lambda req: False)
    cache.req_to_token_pool = Record(req_to_token=[range(committed)])
    cache.token_to_kv_pool_allocator = Record(page_size=PAGE, free=lambda slots: cache.freed.update(slots))
    cache.token_to_kv_pool_allocator.free_segment = lambda slots, start_pos: cache.freed.update(slots)
    length = getattr(request, name_of(version))()
    take(wheel, names, "_release_overallocated_kv_indices", RELEASE)
    kept = {"checkpoint" if since(version, "0.5.22") else "is_insert": insert}
    take(wheel, names, "release_kv_cache", RELEASE)(request, cache, **kept)
    return length, {place // PAGE for place in cache.freed}


@every_release()
@pytest.mark.parametrize("insert", [True, False])
def test_what_is_cached_of_a_retracted_request_is_not_freed(version, insert, monkeypatch):
    length, freed = ended(version, monkeypatch, ours=True, insert=insert)
    assert (length, freed) == (CACHED + 1, set(range(CACHED // PAGE, COMMITTED // PAGE + 1)))
    assert ended(version, monkeypatch, ours=True, committed=CACHED)[0] == CACHED
    assert ended(version, monkeypatch, ours=True, cached=PROMPT)[0] == PROMPT + 1, "what it owns is what is cached"


@every_release()
def test_sglang_alone_frees_it_or_ends(version, monkeypatch):
    if since(version, "0.5.22"):
        with pytest.raises(AssertionError):
            ended(version, monkeypatch, ours=False)
    length, freed = ended(version, monkeypatch, ours=False, insert=False)
    assert length == PROMPT and freed & set(range(CACHED // PAGE))  # so the row is needed


@every_release()
@pytest.mark.parametrize("what", [dict(cached=PROMPT // PAGE * PAGE), dict(strip=False), dict(thoughts=0)])
def test_others_give_back_what_they_did(version, what, monkeypatch):
    assert ended(version, monkeypatch, ours=True, **what) == ended(version, monkeypatch, ours=False, **what)

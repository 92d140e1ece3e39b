"""A pool of sliding windows that hardly holds a chunk: each release's own admission on an idle server, and `doctor`."""

import contextlib

import pytest

from deepseek_v4_sm120.commands.doctor.finding import WARN
from tests.doctor.test_server import STOCK, found
from tests.patching.test_wheel_longest_prompt import (
    ADMISSION,
    BUDGET,
    IN,
    NEVER,
    POLICY,
    AddReqResult,
    Ample,
    made,
    none,
)
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import every_release, fetch, since

PAGE, WINDOW, CHUNK, HELD = 256, 128, 8192, 1 << 20
SWA = ("_swa_budget_for_req", "_swa_reserved_tokens", "_swa_new_tokens", "_swa_chunk_cap", "_swa_req_never_fits")
SWA_BUDGET = ("check_prefill", "swa_tokens", "swa_never_fits", "_chunk_cap", "ceil_paged_tokens")
NEEDED = CHUNK + PAGE  # what every release asks for a chunk


def answer(version, slots, *, locked=0, chunk=CHUNK, prompt=3 * CHUNK):
    """What becomes of a prompt's rest on an idle server with so many slots of sliding windows, all free but the locked
    ones of its own cached beginning, which SGLang holds while it asks."""
    names = {"AddReqResult": AddReqResult, "CLIP_MAX_NEW_TOKENS": 4096, "isinstance": isinstance}
    estimate, wheel = "estimate_swa_kv_tokens", fetch(version)
    names[estimate] = take(wheel, names, estimate, BUDGET) if since(version, "0.5.21") else None
    tree, allocator = Ample(sliding_window_size=WINDOW), Ample(page_size=PAGE, size_swa=slots)
    given = dict(page_size=PAGE, tree_cache=tree, allocator=allocator, req_ring=False, remaining_total=HELD)
    budget = made(version, names, f"{BUDGET}:SWAPrefillBudget", SWA_BUDGET, **given, remaining_swa=slots)
    vars(budget).setdefault("ceil_paged_tokens", lambda tokens: -(-tokens // PAGE) * PAGE)
    methods = (*ADMISSION, *SWA, "_swa_admission_gate")
    adder = made(version, names, f"{POLICY}:PrefillAdder", methods, memory_budget=budget, rem_swa_tokens=slots)
    vars(adder).update(rem_total_tokens=HELD, rem_chunk_tokens=chunk, rem_input_tokens=HELD, page_size=PAGE)
    vars(adder).update(tree_cache=tree, token_to_kv_pool_allocator=allocator, _swa_req_ring=False, can_run_list=[])
    vars(adder).update(per_req_token_overhead=PAGE, is_hybrid_swa=True, prefill_max_requests=None, dllm_config=None)
    vars(adder).update(prefill_delayer_single_pass=None, rem_mamba_slots=None, kv_shard_scratch_spec=None)
    vars(adder).update(_mamba_gap_budget_for_req=none, _request_slot_reserve_for_req=none, _replay_len=none)
    vars(adder).update(_check_prefill_tile_budget=lambda *_: None, budget_state=lambda: AddReqResult.CONTINUE)

    @contextlib.contextmanager
    def lock(*_, **__):
        vars(adder).update(rem_swa_tokens=slots - locked)
        vars(budget).update(remaining_swa=slots - locked)
        yield

    vars(adder).update(_lock_node=lock)
    params = Ample(max_new_tokens=64, min_new_tokens=0, ignore_eos=False)
    request = Ample(sampling_params=params, output_ids=[], prefix_len=0, prefix_indices=[])
    hits = dict.fromkeys(("host_hit_length", "swa_host_hit_length", "auxiliary_swa_host_hit_length"), 0)
    vars(request).update(
        extend_input_len=prompt, full_untruncated_fill_ids=range(prompt), fill_ids=range(prompt), **hits
    )
    vars(request).update(needs_host_load_back=lambda: False)
    return NEVER if adder.add_one_req(request, False, None) == AddReqResult.NO_TOKEN else IN


def told(version, slots, **also):
    tokens = {"max_total_num_tokens": 10 * slots, "version": version, "max_running_requests": None, **also}
    return found(STOCK | {"prefill_decode_interval": 8} | tokens).get("sliding windows")


@every_release()
@pytest.mark.parametrize("slots", [NEEDED - PAGE, NEEDED, NEEDED + PAGE, NEEDED + 2 * PAGE, NEEDED + 3 * PAGE])
def test_what_would_wait_for_ever_is_told_and_nothing_else(version, slots):
    fresh, cached = answer(version, slots), [answer(version, slots, locked=pages * PAGE) for pages in (1, 2)]
    assert (NEVER in (fresh, *cached)) == (told(version, slots) is not None), (fresh, cached)
    warned = told(version, slots)
    if warned is not None:
        assert warned.state == WARN and warned.fix == f"--chunked-prefill-size {CHUNK // 2}"
        assert answer(version, slots, locked=2 * PAGE, chunk=CHUNK // 2) == IN
    if fresh == NEVER:
        assert not since(version, "0.5.16") and "a prompt that fills a chunk" in told(version, slots).cost
    elif NEVER in cached:
        assert "goes on from a cached" in told(version, slots).cost


def test_a_pool_of_another_size_and_a_server_without_a_prefix_cache_are_fine():
    slots = NEEDED + PAGE
    assert told("0.5.20", slots) and told("0.5.23", slots) and told("0.5.20", slots, max_running_requests=8)
    assert told("0.5.23", slots, max_running_requests=8) is None  # the pool is sized by the requests
    set_by_hand = {
        "swa_full_tokens_ratio": 0.1,
        "_swa_full_tokens_ratio_explicitly_set": True,
    }
    assert told("0.5.23", slots, max_running_requests=8, **set_by_hand)
    assert told("0.5.23", slots, disable_radix_cache=True) is None
    assert told("0.5.14", NEEDED, disable_radix_cache=True)  # no prompt that fills a chunk, cached or not
    for other in ({"max_total_num_tokens": None}, {"chunked_prefill_size": -1}):
        assert told("0.5.23", slots, **other) is None

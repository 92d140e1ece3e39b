"""A prompt's rest and its own cached beginning: each release's own admission on an idle server, with our cut and
without."""

import contextlib

import pytest

from deepseek_v4_sm120.sglang_patches.fixes import cached_beginning
from tests.patching.test_wheel_longest_prompt import ADMISSION, BUDGET, IN, NEVER, POLICY, Ample, made, none
from tests.patching.test_wheel_longest_prompt import AddReqResult as Result
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import every_release, fetch, since

PAGE, WINDOW, CHUNK, HELD = 256, 128, 8192, 1 << 20
SWA = ("_swa_budget_for_req", "_swa_reserved_tokens", "_swa_new_tokens", "_swa_chunk_cap", "_swa_req_never_fits")
SWA_BUDGET = ("check_prefill", "swa_tokens", "swa_never_fits", "_chunk_cap", "ceil_paged_tokens")
NEEDED = CHUNK + PAGE  # what every release asks for a chunk


def answer(version, slots, *, locked=0, chunk=CHUNK, prompt=3 * CHUNK, ours=False, runs=0):
    """What becomes of a prompt's rest on an idle server with so many slots of sliding windows, all free but the locked
    ones of its own cached beginning, which SGLang holds while it asks. `runs`: what others will still take."""
    names = {"AddReqResult": Result, "CLIP_MAX_NEW_TOKENS": 4096, "isinstance": isinstance}
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
    vars(adder).update(_check_prefill_tile_budget=lambda *_: None, budget_state=lambda: Result.CONTINUE)

    vars(budget).update(total_offset=runs)
    vars(adder).update(rem_total_token_offset=runs)
    for given, name, replace in (
        (adder, "_swa_req_never_fits", cached_beginning.replace_adder_never_fits),
        (budget, "swa_never_fits", cached_beginning.replace_budget_never_fits),
    ):
        if ours and name in vars(type(given)):
            setattr(type(given), name, replace(vars(type(given))[name]))

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
    return NEVER if adder.add_one_req(request, False, None) == Result.NO_TOKEN else IN


SLOTS = [(NEEDED + PAGE, PAGE), (NEEDED + PAGE, 2 * PAGE), (NEEDED + 2 * PAGE, 2 * PAGE)]


@every_release("0.5.18")
@pytest.mark.parametrize(("slots", "locked"), SLOTS)
def test_what_its_own_beginning_takes_is_cut_off_a_chunk(version, slots, locked, monkeypatch):
    monkeypatch.setattr(cached_beginning, "is_ours", lambda: True)
    assert answer(version, slots, locked=locked) == NEVER
    assert answer(version, slots, locked=locked, ours=True) == IN
    assert answer(version, slots, locked=locked, ours=True, runs=64) == NEVER  # what runs gives room when it ends
    monkeypatch.setattr(cached_beginning, "is_ours", lambda: False)
    assert answer(version, slots, locked=locked, ours=True) == NEVER


@every_release("0.5.18")
@pytest.mark.parametrize("runs", [0, 64])
def test_what_has_room_or_never_could_is_let_in_as_before(version, runs, monkeypatch):
    monkeypatch.setattr(cached_beginning, "is_ours", lambda: True)
    for slots, locked in ((NEEDED + 3 * PAGE, 2 * PAGE), (NEEDED, PAGE), (NEEDED - PAGE, 0)):
        assert answer(version, slots, locked=locked, runs=runs) == IN
        assert answer(version, slots, locked=locked, runs=runs, ours=True) == IN

"""Prompts about as long as the KV cache: each release's own limits and admission, with our limit and without."""

import contextlib
import enum
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches.fixes import longest_prompt
from deepseek_v4_sm120.sglang_patches.rows.scheduler import WORKER
from tests.patching.test_wheel_wo_a import QUIET, take
from tests.patching.wheels import WheelSources, every_release, fetch

PAGE, HELD, CHUNK = 256, 40 * 256, 1024
POLICY, SCHEDULER = "sglang.srt.managers.schedule_policy", "sglang.srt.managers.scheduler"
BUDGET, ALLOCATOR = "sglang.srt.mem_cache.prefill_budget", "sglang.srt.mem_cache.allocator.base"
TOKENS = ("max_total_num_tokens", "max_token_pool_size", "effective_max_total_num_tokens")
TOKENS += ("logical_max_total_num_tokens", "effective_logical_max_total_num_tokens")
ADMISSION = ("add_one_req", "_select_prefill_admission", "_check_prefill_budget", "ceil_paged_tokens")
REFUSED, NEVER, IN = "refused", "waits for ever", "is let in"


class AddReqResult(enum.Enum):
    CONTINUE, NO_TOKEN, OTHER = 1, 2, 3


class Ample:
    """What has, beside what it is given, everything that a release's code asks for, and says nothing by it."""

    def __init__(self, **given):
        vars(self).update(given)

    def __getattr__(self, name):
        return QUIET


def none(*_, **__):
    return 0


def made(version, names, where, methods, **given):
    """An object with these methods of the release's class, as far as it has them."""
    module, _, kind = where.partition(":")
    wheel = fetch(version)
    is_there = WheelSources(wheel).read(module) is not None
    taken = {name: take(wheel, names, f"{kind}.{name}", module) for name in methods if is_there}
    return type(kind, (Ample,), {name: method for name, method in taken.items() if method})(**given)


class Server:
    """An idle server of one release, whose KV cache holds HELD tokens; `context`: a request may have so many."""

    def __init__(self, version, monkeypatch, *, ours, context=1 << 20):
        monkeypatch.setattr(longest_prompt, "is_ours", lambda: ours)
        self.names = names = {"AddReqResult": AddReqResult, "CLIP_MAX_NEW_TOKENS": 4096}
        names |= {"page_interleave_shard_size": lambda allocator: 1, "isinstance": isinstance}
        names |= {"get_parallel": lambda: SimpleNamespace(attn_dcp_size=1)}
        budget = made(version, names, f"{BUDGET}:SWAPrefillBudget", ["check_prefill"], remaining_total=HELD)
        vars(budget).update(remaining_swa=HELD, swa_tokens=lambda *_, **__: 512, ceil_paged_tokens=lambda n: n)
        where, method = f"{ALLOCATOR}:BaseTokenToKVPoolAllocator", "max_new_tokens_for_memory"
        allocator = made(version, names, where, [method], page_size=PAGE)
        pool = Ample(schedulable_token_capacity=lambda tokens: tokens)
        runner = Ample(**dict.fromkeys(TOKENS, HELD), token_to_kv_pool_allocator=allocator, req_to_token_pool=pool)
        vars(runner).update(dcp_size=1)
        worker = made(version, names, WORKER, ["get_worker_info"], model_runner=runner, max_total_num_tokens=HELD)
        most = min(context, HELD) - 1
        vars(worker).update(model_config=Ample(context_len=context), dllm_algorithm=None, ps=Ample(attn_dcp_size=1))
        vars(worker).update(max_req_len=most, max_req_input_len=most - 5)  # 0.5.12 and 0.5.13 keep them
        self.told = longest_prompt.replace_worker_info(type(worker).get_worker_info)(worker)
        self.longest = self.told[longest_prompt.LONGEST]
        limits = dict(max_total_num_tokens=self.told[0], max_req_len=self.told[4], max_new_tokens_limit=None)
        self.scheduler = made(version, names, f"{SCHEDULER}:Scheduler", ["init_req_max_new_tokens"], **limits)
        vars(self.scheduler).update(page_size=PAGE, kv_shard_widening=1, token_to_kv_pool_allocator=allocator)
        vars(self.scheduler).update(server_args=Ample(dcp_size=1))
        self.validate = take(fetch(version), names, "validate_input_length", "sglang.srt.managers.utils")
        self.adder = adder = made(version, names, f"{POLICY}:PrefillAdder", ADMISSION, memory_budget=budget)
        vars(adder).update(rem_total_tokens=HELD, rem_swa_tokens=HELD, rem_chunk_tokens=CHUNK, rem_input_tokens=HELD)
        vars(adder).update(page_size=PAGE, per_req_token_overhead=PAGE, can_run_list=[], is_hybrid_swa=True)
        vars(adder).update(prefill_max_requests=None, prefill_delayer_single_pass=None, dllm_config=None)
        vars(adder).update(rem_mamba_slots=None, kv_shard_scratch_spec=None, _replay_len=none)
        vars(adder).update(_mamba_gap_budget_for_req=none, _request_slot_reserve_for_req=none, _swa_new_tokens=none)
        vars(adder).update(_swa_budget_for_req=lambda *_, **__: 512, _swa_admission_gate=lambda *_: (None, CHUNK))
        vars(adder).update(_check_prefill_tile_budget=lambda *_: None, budget_state=lambda: AddReqResult.CONTINUE)
        vars(adder).update(_lock_node=lambda *_: contextlib.nullcontext())

    def ask(self, tokens, *, truncate=False):
        """What becomes of a prompt of so many tokens, whose client set no max_tokens."""
        params = SimpleNamespace(max_new_tokens=None, min_new_tokens=0, ignore_eos=False)
        request = Ample(origin_input_ids=range(tokens), sampling_params=params, output_ids=[])
        self.scheduler.init_req_max_new_tokens(request)
        if self.validate(request, self.longest, truncate):
            return REFUSED
        prompt = request.origin_input_ids
        hits = dict.fromkeys(("host_hit_length", "swa_host_hit_length", "auxiliary_swa_host_hit_length"), 0)
        vars(request).update(prefix_len=0, prefix_indices=[], fill_ids=prompt, full_untruncated_fill_ids=prompt, **hits)
        vars(request).update(extend_input_len=len(prompt), needs_host_load_back=lambda: False)
        return NEVER if self.adder.add_one_req(request, False, None) == AddReqResult.NO_TOKEN else IN


@every_release()
def test_each_prompt_that_is_accepted_is_let_in(version, monkeypatch):
    lengths = (5000, HELD - PAGE - 2, HELD - PAGE, HELD - 7, HELD - 6)
    without, ours = (Server(version, monkeypatch, ours=ours) for ours in (False, True))
    assert [without.ask(tokens) for tokens in lengths] == [IN, IN, NEVER, NEVER, REFUSED]
    assert [ours.ask(tokens) for tokens in lengths] == [IN, IN, REFUSED, REFUSED, REFUSED]
    assert (without.ask(2 * HELD, truncate=True), ours.ask(2 * HELD, truncate=True)) == (NEVER, IN)


@every_release()
def test_where_a_request_may_have_less_than_the_cache_holds_nothing_changes(version, monkeypatch):
    without, ours = (Server(version, monkeypatch, ours=ours, context=HELD // 2) for ours in (False, True))
    assert without.told == ours.told and ours.longest == HELD // 2 - 6
    assert (ours.ask(HELD // 2 - 7), ours.ask(HELD // 2 - 6)) == (IN, REFUSED)


@pytest.mark.parametrize("held", [1000, 1024])
def test_pages_that_are_not_whole_hold_nothing_and_other_units_are_left_alone(held, monkeypatch):
    monkeypatch.setattr(longest_prompt, "is_ours", lambda: True)
    worker = SimpleNamespace(model_runner=SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(page_size=PAGE)))

    def limits(longest):
        return longest_prompt.replace_worker_info(lambda self: (held, 1, 2, 3, 4, longest, 6, 7))(worker)

    assert limits(held - 6) == (held, 1, 2, 3, 4, held // PAGE * PAGE - PAGE - 1, 6, 7)
    assert limits(2 * held) == (held, 1, 2, 3, 4, 2 * held, 6, 7)

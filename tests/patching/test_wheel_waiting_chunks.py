"""A prompt without a prefix cache that has no room for its next chunk: each release's own admission, with ours and
without, and its own function that gives back what a window has left."""

import ast
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches.fixes import waiting_chunks as fix
from deepseek_v4_sm120.sglang_patches.rows.scheduler import BATCH
from tests.patching.attributes import Release
from tests.patching.test_wheel_preempted_requests import CHUNK, PAGE, Prompt, add_chunk_of, reader_of
from tests.patching.test_wheel_wo_a import definition, take
from tests.patching.wheels import every_release, since

READ, LEFT = 2 * CHUNK, 200  # of a prompt
EVICT = f"{BATCH.partition(':')[2]}._evict_swa"


@pytest.fixture(autouse=True)
def served(monkeypatch):
    monkeypatch.setattr(fix, "is_ours", lambda: True)


def asked(wheel, version, *, ours=True, shares=False, in_flight=0, room=PAGE):
    """-> (what is left, the chunks that were let in, up to where windows were asked to be given back)"""
    adder, given_back = reader_of(wheel, version, room), []

    def free(request, length, **_):
        given_back.append(length)
        adder.rem_swa_tokens = adder.memory_budget.remaining_swa = 2 * CHUNK

    evict = take(wheel, {"free_swa_out_of_window_slots": free}, EVICT, BATCH.partition(":")[0])
    known = {"supports_swa": lambda: True, "evict_sliding_windows": free, "swa_retain_floor": lambda _: None}
    has_new_name = since(version, "0.5.22")
    known |= {"supports_prefix_sharing": lambda: shares} if has_new_name else {"is_chunk_cache": lambda: not shares}
    known |= {"sliding_window_size": 8, "page_size": PAGE, "req_to_token_pool": None}
    adder.tree_cache, adder.token_to_kv_pool_allocator = SimpleNamespace(**known), None
    adder.running_batch = type("Batch", (), {"_evict_swa": evict, "reqs": (), "batch_size": lambda _: 0})()
    prompt = Prompt(READ + LEFT)
    prompt.read(version, READ)
    prompt.inflight_middle_chunks = in_flight
    add = add_chunk_of(wheel)
    return (fix.replace_add_chunk(add) if ours else add)(adder, prompt), adder.can_run_list, given_back


@every_release("0.5.17")
def test_it_gives_back_what_its_window_has_left_and_is_let_in(version, sglang_wheel, monkeypatch):
    wheel = sglang_wheel(version)
    left, let_in, given_back = asked(wheel, version)
    assert left is let_in[0] and len(let_in) == 1 and given_back == [READ]
    left, let_in, given_back = asked(wheel, version, ours=False)
    assert left is not None and not let_in and not given_back, "SGLang alone waits"
    monkeypatch.setattr(fix, "is_ours", lambda: False)
    assert asked(wheel, version)[1:] == ([], []), "another's model is left alone"


@every_release("0.5.17")
@pytest.mark.parametrize("why", [{"in_flight": 1}, {"shares": True}])
def test_a_window_that_a_pass_reads_or_that_a_prefix_cache_keeps_stays(version, why, sglang_wheel):
    assert asked(sglang_wheel(version), version, **why)[1:] == ([], [])


@every_release("0.5.17")
def test_a_prompt_that_has_room_gives_back_as_ever(version, sglang_wheel):
    _, let_in, given_back = asked(sglang_wheel(version), version, room=2 * CHUNK)
    assert len(let_in) == 1 and not given_back


@every_release("0.5.17")
def test_what_is_in_flight_is_counted_and_all_that_the_function_asks_of_a_batch_is_given(version, sglang_wheel):
    wheel = sglang_wheel(version)
    scheduler = ast.unparse(definition(wheel, "Scheduler._get_new_batch_prefill_raw", "sglang.srt.managers.scheduler"))
    assert "self.chunked_req.inflight_middle_chunks += 1" in scheduler
    results = Release(wheel).text("sglang.srt.managers.scheduler_components.batch_result_processor")
    assert "req.inflight_middle_chunks -= 1" in results
    asks = {
        node.attr
        for node in ast.walk(definition(wheel, EVICT, BATCH.partition(":")[0]))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    assert asks <= {"tree_cache", "req_to_token_pool", "token_to_kv_pool_allocator"}

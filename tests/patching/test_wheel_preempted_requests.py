"""Requests that give way to a higher priority: each release's own choice of them, with ours around it and without; and
where its scheduler puts them back."""

import ast
import re
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches.fixes import preempted_requests as fix
from deepseek_v4_sm120.sglang_patches.rows.scheduler import ADDER, SCHEDULER
from deepseek_v4_sm120.sglang_patches.rows.scheduler import SWA_BUDGET as BUDGET
from tests.patching.test_wheel_wo_a import definition, take
from tests.patching.wheels import every_release, since

MENDED = "0.5.22"
BUDGETS = "0.5.21"  # a class of their own for what the windows leave
POLICY, SCHEDULERS = ADDER.partition(":")[0], SCHEDULER.partition(":")[0]


@pytest.fixture(autouse=True)
def served(monkeypatch):
    monkeypatch.setattr(fix, "is_ours", lambda: True)
    fix._asked.clear()


class Request:
    """address: what a set orders it by."""

    def __init__(self, name, address, priority=0):
        self.name, self.address, self.priority = name, address, priority
        self.time_stats = SimpleNamespace(wait_queue_entry_time=0.0)
        self.full_untruncated_fill_ids, self.extend_input_len = [0] * 30, 30
        self.prefix_indices, self.prefix_len, self.sampling_params = [], 0, SimpleNamespace(max_new_tokens=10)

    def __hash__(self):
        return self.address

    def __repr__(self):
        return self.name

    def finished(self):
        return False


class Batch:
    def __init__(self, reqs):
        self.reqs, self.freed = reqs, []

    def release_req(self, at, *_):
        self.freed.append(self.reqs[at])

    def filter_batch(self, keep_indices):
        self.reqs = [self.reqs[at] for at in keep_indices]


class Adder(SimpleNamespace):
    __hash__ = object.__hash__


def adder_of(running):
    return Adder(
        running_batch=Batch(running),
        new_chunked_req=None,
        preempt_list=[],
        priority_scheduling_preemption_threshold=0,
        rem_total_tokens=0,
        rem_total_token_offset=0,
        memory_budget=SimpleNamespace(total_offset=0),  # 0.5.22 and later
        _get_running_request_total_token_offset=lambda request: 12,  # so that all four must go
        _request_slot_reserve_for_req=lambda request: 0,
    )


def gave_way(wheel, addresses, *, ours):
    """The order in which four gave way to one, on a card where they lie at these addresses."""
    schedule = SimpleNamespace(schedule_low_priority_values_first=False)
    names = {"get_schedule": lambda: schedule, "CLIP_MAX_NEW_TOKENS": 4096}
    choose = take(wheel, names, f"{ADDER.partition(':')[2]}.preempt_to_schedule", POLICY)
    running = [Request(f"request {number}", address) for number, address in enumerate(addresses)]
    adder, arguments = (
        adder_of(running),
        ast.unparse(definition(wheel, "PrefillAdder.preempt_to_schedule", POLICY).args),
    )
    given = (Request("urgent", 0, priority=9), *([schedule] if "server_args" in arguments else []))
    assert (fix.replace_preempt(choose) if ours else choose)(adder, *given) is True
    assert len(adder.running_batch.freed) == 4 == len(adder.preempt_list) and not adder.running_batch.reqs
    return [request.name for request in adder.preempt_list], adder


ON_TWO_CARDS = ((1, 2, 3, 4), (4, 1, 3, 2))


@every_release()
def test_the_order_is_that_of_the_batch_on_every_card(version, sglang_wheel):
    wheel, stood = sglang_wheel(version), [f"request {number}" for number in range(4)]
    stock = [gave_way(wheel, addresses, ours=False)[0] for addresses in ON_TWO_CARDS]
    assert stock[0] != stock[1] and all(sorted(order) == stood for order in stock), "SGLang's own, by addresses"
    assert [gave_way(wheel, addresses, ours=True)[0] for addresses in ON_TWO_CARDS] == [stood, stood]


@every_release()
def test_who_gave_way_before_stays_in_front(version, sglang_wheel):
    wheel = sglang_wheel(version)
    names, adder = gave_way(wheel, (3, 1, 2, 4), ours=True)
    later = [Request("request 4", 9), Request("request 5", 7)]
    adder.running_batch = Batch([later[0], Request("one that stays", 8), later[1]])

    def both(self, request):
        self.preempt_list.extend(reversed(later))
        return True

    fix.replace_preempt(both)(adder, request=None)
    assert [request.name for request in adder.preempt_list] == [*names, "request 4", "request 5"]


def test_nobody_gives_way(monkeypatch):
    adder = adder_of([Request("request 0", 1)])
    assert fix.replace_preempt(lambda self, request: False)(adder, None) is False and fix._asked == []
    monkeypatch.setattr(fix, "is_ours", lambda: False)
    given = [Request("request 1", 2), Request("request 0", 1)]

    def all_of_them(self, request):
        self.preempt_list.extend(given)
        return True

    adder.running_batch = Batch(given[::-1])
    assert fix.replace_preempt(all_of_them)(adder, None) is True
    assert adder.preempt_list == given and fix._asked == [], "another's model is left alone"


# ---- beside a prompt that is read in chunks

PAGE, CHUNK = 16, 64


class Prompt(Request):
    """One that is read in chunks; so far nothing of it is read."""

    extend_len = property(lambda self: self.extend_end - self.prefix_len)

    def set_extend_range(self, start, end):
        self.extend_range = SimpleNamespace(length=end - start)

    def set_extend_input_len(self, length):
        self.extend_input_len = length

    def read(self, version, tokens):
        """So many of it are; under the one name that the release has for it."""
        del self.prefix_indices, self.prefix_len
        vars(self).update({"prefix_len": tokens} if since(version, "0.5.22") else {"prefix_indices": [0] * tokens})

    def __init__(self, tokens):
        super().__init__("the prompt", 0)
        self.full_untruncated_fill_ids = self.fill_ids = [0] * tokens
        self.extend_input_len, self.retracted_stain = tokens, False


class Budget:
    """0.5.21 and later: what the windows leave, by that release's own class."""

    def __init__(self, wheel, room):
        self.allocator, self.page_size, self.req_ring, self.total_offset = None, PAGE, False, 0
        self.remaining_total, self.remaining_swa = 1000, room
        names = f"{BUDGET.partition(':')[2]}.available_chunk_tokens"
        self.available_chunk_tokens = take(wheel, {}, names, BUDGET.partition(":")[0]).__get__(self)

    def fit_chunk(self, *, chunk_limit, **_):
        return chunk_limit


def reader_of(wheel, version, room):
    """An adder that may let in a chunk of a prompt, where the windows have so much room; another one runs."""
    adder = adder_of([Request("request 0", 1)])
    nothing = ("prefill_delayer_single_pass", "chunked_req_limit", "kv_shard_granule", "dllm_config")
    zero = ("_update_prefill_budget", "_mamba_gap_budget_for_req", "_swa_new_tokens", "_request_slot_reserve_for_req")
    sizes = {"rem_chunk_tokens": CHUNK, "rem_total_tokens": 1000, "rem_swa_tokens": room, "page_size": PAGE}
    of_windows = {"is_hybrid_swa": True, "_swa_req_ring": False, "exact_chunk_fill": True, "can_run_list": []}
    functions = {"floor_chunked_tokens": lambda tokens, _: tokens, "_kv_shard_reserve_scratch": lambda **_: True}
    functions |= dict.fromkeys(zero, lambda *_, **__: 0)
    vars(adder).update(dict.fromkeys(nothing), **sizes, **of_windows, **functions)
    if since(version, BUDGETS):
        adder.memory_budget = Budget(wheel, room)
    return adder


def add_chunk_of(wheel):
    return take(wheel, {"CLIP_MAX_NEW_TOKENS": 4096}, f"{ADDER.partition(':')[2]}.add_chunked_req", POLICY)


def read_on(wheel, version, room, tokens, *, ours):
    """An adder whose scheduler has asked for a next chunk of a prompt with so many tokens left, and the windows' room;
    another one has the only place -> the adder, whether the other one gives way to a third."""
    adder, own, add = reader_of(wheel, version, room), f"{ADDER.partition(':')[2]}.", add_chunk_of(wheel)
    schedule = SimpleNamespace(schedule_low_priority_values_first=False)
    give = take(wheel, {"get_schedule": lambda: schedule}, f"{own}preempt_to_schedule", POLICY)
    if ours:
        add, give = fix.replace_add_chunk(add), fix.replace_preempt(give)
    add(adder, Prompt(tokens))
    arguments = ast.unparse(definition(wheel, f"{own}preempt_to_schedule", POLICY).args)
    given = (Request("urgent", 0, priority=9), *([schedule] if "server_args" in arguments else []))
    return adder, give(adder, *given)


@every_release()
def test_nobody_gives_way_beside_a_prompt_that_waits_for_its_next_chunk(version, sglang_wheel):
    wheel = sglang_wheel(version)
    stock, gives_way = read_on(wheel, version, PAGE, 200, ours=False)
    assert gives_way and not stock.can_run_list and len(stock.preempt_list) == 1, "so in SGLang alone"
    adder, gives_way = read_on(wheel, version, PAGE, 200, ours=True)
    assert not gives_way and not adder.preempt_list and not adder.running_batch.freed
    assert read_on(wheel, version, 3 * CHUNK, CHUNK, ours=True)[1], "its last chunk is read"
    fix.is_ours = lambda: False
    assert read_on(wheel, version, PAGE, 200, ours=True)[1], "another's model is left alone"


@every_release()
def test_nobody_gives_way_beside_a_chunk_that_the_windows_have_cut(version, sglang_wheel):
    wheel = sglang_wheel(version)
    adder, gives_way = read_on(wheel, version, PAGE + CHUNK // 2, 200, ours=True)
    assert len(adder.can_run_list) == 1 and not gives_way
    assert read_on(wheel, version, PAGE + CHUNK // 2, 200, ours=False)[1]


@every_release()
def test_nobody_gives_way_behind_a_prompt_of_the_pass_that_was_cut(version, sglang_wheel):
    adder = adder_of([Request("request 0", 1)])
    adder.new_chunked_req = Prompt(200)
    assert fix.replace_preempt(lambda *_: pytest.fail("asked"))(adder, Request("urgent", 0, priority=9)) is False


@every_release()
def test_which_releases_count_a_chunk_that_did_not_run_and_cut_two_prompts(version, sglang_wheel):
    wheel = sglang_wheel(version)
    text = ast.unparse(definition(wheel, SCHEDULER.partition(":")[2] + "._get_new_batch_prefill_raw", SCHEDULERS))
    counted = "inflight_middle_chunks" if since(version, "0.5.13") else "is_chunked"
    assert re.search(rf"if self\.chunked_req is not None:\s+self\.chunked_req\.{counted} \+= 1", text)
    assert re.search(r"if adder\.new_chunked_req is not None:\s+assert self\.chunked_req is None", text)
    adder = ast.unparse(definition(wheel, ADDER.partition(":")[2], POLICY))
    assert "self.new_chunked_req = req" in adder and "if self.new_chunked_req" not in adder


# ---- back into the queue


class Scheduler:
    def __init__(self, adder, found):
        self.adder, self.found, self.queue = adder, found, []

    def _add_request_to_queue(self, request):
        self.queue.append(request)

    def look(self, *given, **named):
        def preempt(adder, request):
            adder.preempt_list.append(request)
            return True

        for request in self.adder.running_batch.reqs:  # for one after the other
            fix.replace_preempt(preempt)(self.adder, request)
        self.given = given, named
        return self.found

    look_with_ours = fix.replace_next_prompts(look)


@pytest.mark.parametrize("found", [None, (None, "running")])
def test_where_nobody_is_let_in_they_are_put_back(found):
    running = [Request("request 0", 2), Request("request 1", 1)]
    scheduler = Scheduler(adder_of(running), found)
    assert scheduler.look_with_ours("delayer", running_batch="running") == found and scheduler.queue == running
    assert scheduler.given == (("delayer",), {"running_batch": "running"})
    idle = Scheduler(adder_of([]), found)
    assert idle.look_with_ours() == found and idle.queue == [], "what one look found is not the next one's"


@pytest.mark.parametrize("found", ["batch", ("batch", "running")])
def test_where_somebody_is_let_in_sglang_puts_them_back(found):
    scheduler = Scheduler(adder_of([Request("request 0", 2)]), found)
    assert scheduler.look_with_ours() == found and scheduler.queue == []


@every_release()
def test_which_releases_put_them_back_themselves(version, sglang_wheel):
    """In front of the return with nobody, or only behind it."""
    function = definition(
        sglang_wheel(version), SCHEDULER.partition(":")[2] + "._get_new_batch_prefill_raw", SCHEDULERS
    )
    (nobody,) = (
        n for n in ast.walk(function) if isinstance(n, ast.If) and ast.unparse(n.test) == "len(can_run_list) == 0"
    )
    assert ("_add_request_to_queue" in ast.unparse(nobody)) is since(version, MENDED)
    text = ast.unparse(function)
    assert text.count("adder.preempt_to_schedule(") == 1
    assert text.count("for req in adder.preempt_list") == 1 + since(version, MENDED)
    returns = {ast.unparse(n.value) for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None}
    assert ({"(None, running_batch)"} if since(version, "0.5.16") else {"None"}) <= returns

"""Requests that give way to a higher priority: each release's own choice of them, with ours around it and without; and
where its scheduler puts them back."""

import ast
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches.fixes import preempted_requests as fix
from deepseek_v4_sm120.sglang_patches.rows.scheduler import ADDER, SCHEDULER
from tests.patching.test_wheel_wo_a import definition, take
from tests.patching.wheels import every_release, since

MENDED = "0.5.22"
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


def adder_of(running):
    return SimpleNamespace(
        running_batch=Batch(running),
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

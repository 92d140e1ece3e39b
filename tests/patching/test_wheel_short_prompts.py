"""Short prompts beside a long one's chunk: how much shorter it is, for whom, and when not; each release's own admission
with ours around it. The whole of it, on a release's own scheduler, is in test_wheel_slots.py."""

import ast
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches import scope
from deepseek_v4_sm120.sglang_patches.fixes import short_prompts as fix
from deepseek_v4_sm120.sglang_patches.rows.scheduler import ADDER, SCHEDULER
from tests.patching.test_wheel_preempted_requests import CHUNK, PAGE, POLICY, Prompt, add_chunk_of, reader_of
from tests.patching.test_wheel_wo_a import definition, take
from tests.patching.wheels import every_release, since

SINCE, LONG = "0.5.20", 1000
SELECT = f"{ADDER.partition(':')[2]}._select_prefill_admission"
OTHER = SimpleNamespace(AddReqResult=SimpleNamespace(OTHER="other", NO_TOKEN="no token"), CLIP_MAX_NEW_TOKENS=4096)


@pytest.fixture(autouse=True)
def served(monkeypatch):
    monkeypatch.setattr(scope, "is_ours", lambda: True)
    monkeypatch.setattr(scope.models_served, "has_several_hosts", lambda: False)
    monkeypatch.setattr(fix.importlib, "import_module", lambda _: OTHER)


class Waiting(Prompt):
    def __init__(self, rid, tokens, cached=0, on_the_host=0, priority=None):
        super().__init__(tokens)
        self.rid, self.cached, self.host_hit_length, self.session, self.output_ids = rid, cached, on_the_host, None, []
        self.priority = priority
        self.swa_host_hit_length = self.auxiliary_swa_host_hit_length = 0

    def init_next_round_input(self, tree_cache):
        assert tree_cache == "the cache"
        self.prefix_len = self.prefix_indices = None
        self.read(self.version, self.cached)


class Scheduler:
    """Its looks: each makes an adder, asks for the long prompt's chunk, and lets in whoever fits behind it."""

    def __init__(self, wheel, version, waiting, tokens=LONG, has_slot=True):
        self.wheel, self.version, self.has_slot = wheel, version, has_slot
        self.waiting_queue, self.chunked_req = waiting, Waiting("long", tokens)
        self.enable_priority_scheduling = self.schedule_low_priority_values_first = False
        self.enable_lora, self.truncation_align_size, self.pp_group = False, None, SimpleNamespace(world_size=1)
        self.tree_cache, self.free = SimpleNamespace(disable=False), 10_000

    def look(self, prefill_delayer_single_pass, running_batch):
        self.adder = adder = reader_of(self.wheel, self.version, 10 * CHUNK)
        for request in (*self.waiting_queue, self.chunked_req):
            request.version = self.version
        self.chunked_req.init_next_round_input("the cache")
        adder.tree_cache, adder.rem_total_tokens = "the cache", self.free
        adder._update_prefill_budget = lambda _, tokens, *__, **___: vars(adder).update(
            rem_chunk_tokens=adder.rem_chunk_tokens - tokens
        )
        self.left = fix.replace_add_chunk(add_chunk_of(self.wheel))(adder, self.chunked_req)
        self.seen = [request.rid for request in self.waiting_queue]
        for request in list(self.waiting_queue) if self.has_slot else ():
            request.init_next_round_input("the cache")
            pages = -(-(fix._unread(request) - request.host_hit_length) // PAGE)
            if pages * PAGE > adder.rem_chunk_tokens:
                break
            adder.can_run_list.append(request)
            adder.rem_chunk_tokens -= pages * PAGE
        self.waiting_queue = [request for request in self.waiting_queue if request not in adder.can_run_list]
        return "batch", running_batch

    look_with_ours = fix.replace_next_prompts(look)

    def pass_of(self, runs=0):
        """-> the chunk's tokens, who was let in beside it"""
        running = SimpleNamespace(reqs=[None] * runs)
        assert self.look_with_ours(prefill_delayer_single_pass=None, running_batch=running) == ("batch", running)
        assert not fix._looking
        (chunk, *others), request = self.adder.can_run_list, self.chunked_req
        assert chunk is request and self.left is request
        length = request.extend_range.length if self.version < "0.5.22" else request.extend_end - request.prefix_len
        assert (self.adder in fix._shared) is (length < CHUNK), "where no second prompt may be cut"
        return length, [other.rid for other in others]


@every_release(SINCE)
def test_every_second_chunk_is_shorter_by_what_others_need(version, sglang_wheel):
    scheduler = Scheduler(sglang_wheel(version), version, [Waiting("a", 20), Waiting("b", 10), Waiting("c", 16)])
    assert scheduler.pass_of() == (PAGE, ["a", "b"]), "a page stays the long one's, so c waits"
    assert [r.rid for r in scheduler.waiting_queue] == ["c"]
    assert scheduler.pass_of() == (CHUNK, []) and scheduler.pass_of() == (CHUNK - PAGE, ["c"])
    assert scheduler.pass_of() == (CHUNK, []), "nobody waits"


@every_release(SINCE)
def test_of_a_prompt_counts_what_is_not_cached(version, sglang_wheel):
    waiting = [Waiting("cached", 900, cached=890), Waiting("on the host", 900, cached=400, on_the_host=490)]
    scheduler = Scheduler(sglang_wheel(version), version, waiting)
    assert scheduler.pass_of() == (CHUNK - 2 * PAGE, ["cached", "on the host"])


@every_release(SINCE)
def test_who_does_not_fit_waits_as_before_and_keeps_its_place(version, sglang_wheel):
    waiting = [Waiting("second", 500), Waiting("a", 20), Waiting("third", 500)]
    scheduler = Scheduler(sglang_wheel(version), version, waiting)
    assert scheduler.pass_of() == (CHUNK - 2 * PAGE, ["a"]) and scheduler.seen == ["a", "second", "third"]
    assert [r.rid for r in scheduler.waiting_queue] == ["second", "third"]
    scheduler = Scheduler(sglang_wheel(version), version, waiting, has_slot=False)
    assert scheduler.pass_of()[1] == [] and scheduler.waiting_queue == waiting, "the order is the old one"


@every_release(SINCE)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("of_long", "waiting", "let_in"),
    [
        (0, {"a": (20, 9), "b": (10, 9)}, ["a", "b"]),
        (0, {"urgent": (500, 9), "a": (20, 3)}, []),  # a's answer may be what the urgent one would wait for
        (3, {"urgent": (500, 9), "a": (20, 9), "b": (10, 3)}, ["a"]),
        (3, {"b": (10, 3), "c": (10, 2)}, ["b"]),  # nor has the long one half of its own passes
        (3, {"of a session": (20, 9), "a": (20, 3)}, []),
    ],
)
def test_nobody_is_let_in_before_a_higher_priority(version, sign, of_long, waiting, let_in, sglang_wheel):
    made = [Waiting(name, tokens, priority=sign * priority) for name, (tokens, priority) in waiting.items()]
    for request in made:
        request.session = "one" if request.rid == "of a session" else None
    scheduler = Scheduler(sglang_wheel(version), version, made)
    scheduler.chunked_req.priority = sign * of_long
    scheduler.enable_priority_scheduling, scheduler.schedule_low_priority_values_first = True, sign < 0
    assert scheduler.pass_of()[1] == let_in
    scheduler = Scheduler(sglang_wheel(version), version, made)
    assert len(scheduler.pass_of()[1]) >= len(let_in) + (not let_in), "who asks for no priorities has none"


@every_release(SINCE)
def test_the_kv_cache_keeps_what_the_long_prompt_still_needs(version, sglang_wheel):
    needs, wants = LONG + 10, 20 + 10 + PAGE  # each answer has 10 tokens
    for free, let_in in ((needs + wants, []), (needs + wants + 1, ["a"])):
        scheduler = Scheduler(sglang_wheel(version), version, [Waiting("a", 20)])
        scheduler.free = free
        assert scheduler.pass_of()[1] == let_in
    scheduler = Scheduler(sglang_wheel(version), version, [Waiting("a", 20), Waiting("b", 16)])
    scheduler.free = needs + 2 * wants - 5
    assert scheduler.pass_of()[0] == CHUNK - 2 * PAGE, "for a alone"
    for said, let_in in ((4, ["a"]), (90, [])):  # before they were retracted: 6 and 0 tokens are to come, not 10 each
        scheduler = Scheduler(sglang_wheel(version), version, [Waiting("a", 20)])
        scheduler.waiting_queue[0].output_ids = scheduler.chunked_req.output_ids = [0] * said
        scheduler.free = needs + wants - 7 if let_in else needs + wants - 20
        assert scheduler.pass_of()[1] == let_in


@every_release(SINCE)
def test_chunks_are_whole_again_where_nobody_was_let_in(version, sglang_wheel):
    scheduler = Scheduler(sglang_wheel(version), version, [Waiting("a", 20)], has_slot=False)
    assert [scheduler.pass_of(runs=3)[0] for _ in range(3)] == [CHUNK - 2 * PAGE, CHUNK, CHUNK]
    scheduler.has_slot = True
    assert scheduler.pass_of(runs=2) == (CHUNK - 2 * PAGE, ["a"]), "one that ran has ended"
    scheduler = Scheduler(sglang_wheel(version), version, [Waiting("a", 20)], has_slot=False)
    assert scheduler.pass_of()[0] < CHUNK
    scheduler.waiting_queue.append(Waiting("b", 16))
    assert scheduler.pass_of()[0] < CHUNK, "another one has come"


@every_release(SINCE)
def test_when_chunks_stay_whole(version, sglang_wheel, monkeypatch):
    def first_chunk(scheduler=None, **given):
        scheduler = Scheduler(sglang_wheel(version), version, [Waiting("a", 20)], has_slot=False)
        vars(scheduler).update(given)
        return scheduler.pass_of()[0]

    assert first_chunk() < CHUNK
    whole = {"enable_lora": True, "truncation_align_size": 64, "pp_group": SimpleNamespace(world_size=2)}
    whole |= {"tree_cache": SimpleNamespace(disable=True), "waiting_queue": []}
    assert {name: first_chunk(**{name: value}) for name, value in whole.items()} == dict.fromkeys(whole, CHUNK)
    last = Scheduler(sglang_wheel(version), version, [Waiting("a", 20)], tokens=CHUNK)
    last.look_with_ours(None, running_batch=SimpleNamespace(reqs=[]))
    assert last.left is None and len(last.adder.can_run_list) == 1, "its last chunk is whole"
    of_a_session = Waiting("a", 20)
    of_a_session.session = "one"
    assert first_chunk(waiting_queue=[of_a_session]) == CHUNK
    for owner, name, value in ((scope.models_served, "has_several_hosts", True), (scope, "is_ours", False)):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, lambda value=value: value)
            assert first_chunk() == CHUNK, name
            patched.setattr(scope.models_served, "_hosts_are_alike", True)
            assert (first_chunk() < CHUNK) is value, name


@every_release(SINCE)
def test_no_second_prompt_is_cut(version, sglang_wheel):
    """Each release's own choice, of a prompt that is longer than what is left of the pass."""
    wheel = sglang_wheel(version)
    schedule = SimpleNamespace(schedule_policy="fcfs")
    known = {"AddReqResult": OTHER.AddReqResult, "get_schedule": lambda: schedule}
    known["_PrefillAdmission"] = lambda *given: SimpleNamespace(is_chunked=given[3])
    stock = take(wheel, known, SELECT, POLICY)
    adder = reader_of(wheel, version, 10 * CHUNK)
    adder.exact_chunk_fill, adder._replay_len = False, lambda *_: 0
    adder.ceil_paged_tokens = lambda tokens: -(-tokens // PAGE) * PAGE
    adder._check_prefill_budget = lambda *_, **__: (True, adder.rem_chunk_tokens)
    adder._swa_admission_gate = lambda *_: (None, adder.rem_chunk_tokens)
    adder._check_prefill_tile_budget = lambda _: None
    given = {"total_tokens": 1, "host_hit_length": 0, "swa_host_hit_length": 0, "truncation_align_size": None}
    given |= {"has_chunked_req": True} if since(version, "0.5.21") else {}
    long, short = Waiting("long", 3 * CHUNK), Waiting("short", 20)
    ours = fix.replace_select(stock)
    assert ours(adder, long, **given).is_chunked and stock(adder, long, **given).is_chunked, "in other passes"
    fix._shared.add(adder)
    assert ours(adder, long, **given) == "other" and stock(adder, long, **given).is_chunked
    assert not ours(adder, short, **given).is_chunked
    adder._check_prefill_budget, adder._swa_admission_gate = lambda *_, **__: (False, 0), lambda *_: ("no token", 0)
    assert ours(adder, long, **given) == stock(adder, long, **given) == "no token", "why is SGLang's to say"


@every_release(SINCE)
def test_what_is_taken_for_granted_of_a_look(version, sglang_wheel):
    """The chunk is asked for in front of the queue, which is taken from the scheduler then."""
    module, _, name = SCHEDULER.partition(":")
    text = ast.unparse(definition(sglang_wheel(version), f"{name}._get_new_batch_prefill_raw", module))
    assert text.index("adder.add_chunked_req(self.chunked_req)") < text.index("for req in self.waiting_queue:")
    assert "req.init_next_round_input(self.tree_cache)" in text
    assert "assert self.chunked_req is None" in text, "one prompt in chunks"

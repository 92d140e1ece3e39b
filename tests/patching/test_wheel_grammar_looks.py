"""Steps beside a grammar that compiles: each release's own loops and looks, by a clock that only they move, with
SGLang's numbers and with those of the default `grammar_looks`."""

import re
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from packaging.specifiers import SpecifierSet

from deepseek_v4_sm120.patching.steering import NOT_APPLICABLE, ON, Steering
from deepseek_v4_sm120.settings import Settings
from deepseek_v4_sm120.sglang_patches.defaults import DEFAULTS
from tests.patching.test_wheel_wo_a import QUIET, take
from tests.patching.wheels import content, every_release

(ROW,) = (row for row in DEFAULTS if row.name == "grammar_looks")
INTERVAL, LOOKS = ROW.environment
MANAGER, SCHEDULER = "sglang.srt.constrained.grammar_manager", "sglang.srt.managers.scheduler"
OVERLAP, NORMAL = "event_loop_overlap", "event_loop_normal"
# seconds: of a step on the card, of its launch, of the rest of a turn of the loop, of ranks that tell each other what
# is ready, and how much later than asked a sleeping thread is woken
STEP, LAUNCH, REST, GATHER, WOKEN = 0.004, 0.001, 0.0005, 0.0003, 0.00006
TURN = 0.0002  # of a loop with nothing to run, at least
STEPS = 12
AT_ONCE = 1e-6


class Enough(Exception):
    pass


class Clock:
    now = 0.0

    def perf_counter(self):
        self.now += AT_ONCE
        return self.now

    def sleep(self, seconds):
        self.now += seconds + WOKEN


def numbers(wheel):
    """SGLang's (interval, looks)."""
    text = content(wheel, "sglang/srt/environ.py")
    return tuple(float(re.search(rf"    {name} = Env\w+\((.*)\)", text)[1]) for name in (INTERVAL, LOOKS))


OURS = tuple(float(ROW.environment[name]) for name in (INTERVAL, LOOKS))


def request(*, is_ready=False):
    grammar = Future()
    if is_ready:
        grammar.set_result(SimpleNamespace(copy=lambda: None))
    return SimpleNamespace(finished=lambda: False, grammar=grammar, grammar_wait_ct=0, grammar_key=("json", "{}"))


def manager(wheel, clock, asked, interval, looks):
    """The release's look, on one of two ranks that find the same."""

    def gather(found, own, group):
        clock.now += GATHER
        found[:] = [own] * len(found)

    names = {"time": clock, "futures": SimpleNamespace(Future=Future), "InvalidGrammarObject": type("Invalid", (), {})}
    names["InvalidGrammarObject"].__init__ = lambda self, message: None
    names["torch"] = SimpleNamespace(distributed=SimpleNamespace(all_gather_object=gather))
    look = take(wheel, names, "GrammarManager.get_ready_grammar_requests", MANAGER)
    made = type("GrammarManager", (), {"get_ready_grammar_requests": look})()
    made.grammar_queue, made.grammar_backend, made.grammar_sync_size = asked, SimpleNamespace(set_cache=QUIET), 2
    made.SGLANG_GRAMMAR_POLL_INTERVAL, made.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS = interval, looks
    made.grammar_sync_group, made.pp_rank, made._pp_sync_ready_failed = None, 0, lambda *found: found
    for name in ("_apply_request_reasoning_config", "_apply_request_reasoning_budget"):
        setattr(made, name, lambda request: None)
    for one in asked:
        one.set_finish_with_abort = lambda message: None
    return made


def step_takes(wheel, name, asked, interval, looks):
    """Seconds of a step in the release's own loop, once it goes on steadily. Of `asked` nothing is ever ready."""
    clock, ends, of_card = Clock(), [], SimpleNamespace(free=0.0)
    made = manager(wheel, clock, asked, interval, looks)
    is_no = {"SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"}
    names = {
        "envs": SimpleNamespace(**{one: SimpleNamespace(get=lambda: False) for one in is_no}),
        "DynamicGradMode": lambda: lambda function: function,
        "deque": deque,
    }
    decode = SimpleNamespace(is_extend=lambda: False, is_decode=lambda: True)
    batch = SimpleNamespace(forward_mode=decode, spec_algorithm=SimpleNamespace(is_none=lambda: True), is_spec_v2=False)
    batch.copy = lambda: batch

    def take_next(**last):
        if made.grammar_queue:
            assert made.get_ready_grammar_requests() == []
        return SimpleNamespace(batch_to_run=batch, running_batch=batch) if last else batch

    def run(batch):
        clock.now += LAUNCH
        of_card.free = max(of_card.free, clock.now) + STEP
        return SimpleNamespace(end=of_card.free)

    def look_at(batch, result):
        clock.now = max(clock.now, result.end) + REST
        ends.append(clock.now)
        if len(ends) == STEPS:
            raise Enough

    functions = {
        one: take(wheel, dict(names), f"Scheduler.{one}", SCHEDULER) for one in (name, "is_disable_overlap_for_batch")
    }
    scheduler = type("Scheduler", (), functions)()
    vars(scheduler).update(
        dict.fromkeys(
            ("gracefully_exit", "_engine_paused", "require_mlp_sync", "_war_barrier_enabled", "last_batch"), False
        ),
        get_next_batch_to_run=take_next,
        run_batch=run,
        process_batch_result=look_at,
        **dict.fromkeys(("server_args", "request_receiver", "running_batch", "enable_unified_memory"), QUIET),
        **dict.fromkeys(("ingest_requests", "recv_requests", "process_input_requests", "_apply_war_barrier"), QUIET),
        is_generation=True,
        launch_batch_sample_if_needed=QUIET,
    )
    with pytest.raises(Enough):
        getattr(scheduler, name)()
    return (ends[-1] - ends[3]) / (len(ends) - 4)


@every_release()
def test_a_step_of_all_streams_beside_a_grammar_that_compiles(version, sglang_wheel):
    """Steps that overlap hide what the card still has to do, which is less than SGLang's 5 ms."""
    wheel = sglang_wheel(version)
    stock = numbers(wheel)
    for loop, alone in ((OVERLAP, STEP), (NORMAL, STEP + LAUNCH + REST)):
        assert step_takes(wheel, loop, [], *stock) == pytest.approx(alone, abs=1e-5)
        waits = step_takes(wheel, loop, [request()], *stock)
        assert waits > stock[0] + LAUNCH + REST and waits > 1.6 * alone
        assert step_takes(wheel, loop, [request()], *OURS) < alone + (0 if loop == OVERLAP else GATHER + 0.0002) + 1e-5


@every_release()
def test_what_is_ready_is_taken_and_what_is_not_is_waited_for_as_long_as_before(version, sglang_wheel):
    """Of an idle server, whose loop turns fastest. An interval of 0 looks at nothing, ever."""
    wheel, given_up = sglang_wheel(version), []
    for interval, looks in (numbers(wheel), OURS):
        clock, ready, waits = Clock(), request(is_ready=True), request()
        made = manager(wheel, clock, [ready, waits], interval, looks)
        assert made.get_ready_grammar_requests() == [ready] and made.grammar_queue == [waits]
        given_up.append((clock.now - GATHER + TURN) * looks)
        waits.grammar_wait_ct = looks - 2
        assert made.get_ready_grammar_requests() == [] and made.get_ready_grammar_requests() == [waits]
    assert given_up[0] <= given_up[1] < 3 * given_up[0] and given_up[0] > 50
    assert manager(wheel, Clock(), [request(is_ready=True)], 0.0, 9).get_ready_grammar_requests() == []


@pytest.mark.parametrize(
    ("own", "state"),
    [({}, ON), ({LOOKS: "1000"}, NOT_APPLICABLE), ({LOOKS: ""}, NOT_APPLICABLE), ({INTERVAL: "1"}, NOT_APPLICABLE)],
)
def test_who_sets_how_often_it_is_looked_for_has_sglangs_interval(own, state):
    """1,000 looks of 5 ms are seconds, of 0.1 ms next to nothing."""
    steering, environ = Steering((ROW,), Settings(), lambda versions: True), dict(own)
    for _ in range(2):  # again by the same server's arguments: what we set is not the user's
        (outcome,) = steering.apply(environ, {}.get, None)
        assert outcome.state == state
    found = {name: environ[name] for name in ROW.environment if name in environ}
    assert found == (own if state == NOT_APPLICABLE else {**ROW.environment, **own})


@every_release()
def test_sglang_asks_in_front_of_each_batch_and_reads_both_numbers_once(version, sglang_wheel):
    wheel = sglang_wheel(version)
    assert SpecifierSet(ROW.sglang, prereleases=True).contains(version)
    text = content(wheel, "sglang/srt/constrained/grammar_manager.py")
    assert all(f"envs.{name}.get()" in text for name in (INTERVAL, LOOKS))
    assert "self.grammar_manager.get_ready_grammar_requests()" in content(wheel, "sglang/srt/managers/scheduler.py")

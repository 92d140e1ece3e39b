"""The first requests that ours ask: behind each release's own warm-up, in front of its "ready". That they meet the
forms of SGLang's kernels that random load on its scheduler asks for: test_wheel_slots.py."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Optional

import pytest

from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.sglang_patches import start_mark
from deepseek_v4_sm120.sglang_patches.fixes import first_requests
from deepseek_v4_sm120.sglang_patches.rows.first_uses import FIRST_REQUESTS, HTTP_SERVER
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import content, every_release, fetch

FIRST = FIRST_REQUESTS.targets[0].sglang.partition(",")[0].lstrip(">=")
READY = "The server is fired up and ready to roll!"
OWN = "SGLang's own"


class Status(Enum):
    Starting, Up = "starting", "up"


class Manager:
    """A tokenizer manager: what is asked of it, and how ready the server said it was then."""

    is_generation, context_len, max_req_input_len, tokenizer = True, 1 << 20, 40000, "a tokenizer"
    gracefully_exit, refused, hangs, left, is_deaf, takes_s = False, (), (), 0, False, 0

    def __init__(self, events, loop):
        self.events, self.event_loop, self.server_status, self.asked = events, loop, Status.Starting, []
        self.aborted, self.waiting = [], {}

    async def generate_request(self, request, of_client):
        self.asked.append(request)
        request.rid = f"name {len(self.asked)}"
        self.events.append((len(request["input_ids"]), self.server_status))
        if any(name in request["sampling_params"] for name in self.refused):
            raise ValueError("no grammar here")
        if len(self.asked) in self.hangs:
            self.waiting[request.rid] = asyncio.Event()
            try:
                await self.waiting[request.rid].wait()
            finally:
                self.left += 1
        await asyncio.sleep(self.takes_s)
        yield {}

    def abort_request(self, rid):
        self.aborted.append(rid)
        if not self.is_deaf:
            self.waiting[rid].set()


class Request(dict):
    """As it is given; its name is found by who answers it."""

    rid = None


@pytest.fixture
def loop():
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    # what hangs would end when it is collected, amid another test's ast.parse, which cannot bear a second one within
    for task in (left := asyncio.all_tasks(made)):
        task.cancel()
    if left:
        made.run_until_complete(asyncio.wait(left))
    made.close()


@pytest.fixture
def told(monkeypatch):
    lines = []
    for name in ("info", "warn"):
        monkeypatch.setattr(report, name, lambda text, name=name: lines.append((name, text)))
    monkeypatch.setattr(report, "_notes", {})
    return lines


@pytest.fixture
def start(monkeypatch, loop, told, tmp_path):
    """start(version, **of the server) -> (its manager, what happened in turn) of the release's own thread"""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def start(version, runs=True, own=None, ours=True, changes=(), lacks=(), **more):
        arguments = dict(dp_size=1, disaggregation_mode="null", chunked_prefill_size=8192, max_running_requests=4)
        arguments |= dict(grammar_backend="xgrammar", skip_server_warmup=False, is_ep_scale_joiner=False)
        arguments |= dict.fromkeys(
            ("checkpoint_engine_wait_weights_before_ready", "delete_ckpt_after_loading", "debug_tensor_dump_input_file")
        )
        server_args, events = SimpleNamespace(**arguments | more), []
        manager = Manager(events, loop)
        vars(manager).update(changes)
        for name in lacks:
            monkeypatch.delattr(manager if name in vars(manager) else Manager, name)

        def _execute_server_warmup(given):
            assert given is server_args
            events.append(OWN)
            manager.server_status = Status.Up
            return runs

        bag = SimpleNamespace(**vars(server_args), moe=server_args)
        names = {name: lambda: bag for name in ("get_serving", "get_model", "get_exec", "get_observability")}
        names |= dict(_execute_server_warmup=_execute_server_warmup, Callable=Callable, Optional=Optional)
        names |= dict(logger=SimpleNamespace(info=events.append, debug=lambda *_: None), ServerStatus=Status)
        names |= dict(_global_state=SimpleNamespace(tokenizer_manager=manager))
        names |= dict(_freeze_gc_after_server_warmup=lambda _: events.append("frozen"))
        stubs = {
            HTTP_SERVER: {"_global_state": names["_global_state"]},
            first_requests.REQUESTS: {"GenerateReqInput": Request},
        }
        for name, given in stubs.items():
            module = ModuleType(name)
            vars(module).update(given)
            monkeypatch.setitem(sys.modules, name, module)
        warm_up = take(fetch(version), names, "_wait_and_warmup", HTTP_SERVER)
        warm_up = first_requests.replace_warm_up(warm_up) if ours else warm_up
        warm_up(server_args, **({} if own is None else {"execute_warmup_func": own}))
        return manager, [event for event in events if event != "frozen"]

    return start


def asked_at(events):
    return [status for event in events if isinstance(event, tuple) for status in [event[1]]]


@every_release(FIRST)
def test_they_are_asked_behind_sglangs_own_and_in_front_of_ready(version, start, served_card, told, monkeypatch):
    assert start(version, ours=False)[1] == [OWN, READY]
    written = []
    monkeypatch.setattr(report, "write", lambda: written.append(report._notes[first_requests.PATCH][0]()))
    manager, events = start(version)
    assert (events[0], events[-1]) == (OWN, READY)
    assert asked_at(events) == [Status.Starting] * (len(events) - 2) != []  # so /health says 503 meanwhile
    assert manager.server_status is Status.Up
    assert [kind for kind, _ in told] == ["info", "info"]  # what is asked, and how to leave it out, before it may end
    assert "first_requests=off" in told[0][1] and "answered in" in told[1][1]
    assert len(written) == 1 and written[0].startswith(f"first_requests: first requests of {len(of(slots=4))} kinds")
    assert max(len(one["input_ids"]) for one in manager.asked) == 8192 + 1 + 128


def test_what_took_long_is_told(start, served_card, told, monkeypatch):
    start("0.5.23")
    monkeypatch.setattr(first_requests, "SLOW_S", 0.0)
    start("0.5.23")
    assert [" (a chunk and a row 0.0 s, " in text for _, text in told if "answered in" in text] == [False, True]
    assert " s (" not in told[1][1]


def test_limits_that_nobody_has_set_keep_nothing_from_being_asked(start, served_card, told, monkeypatch):
    monkeypatch.setattr(first_requests, "BEAT_S", 0.01)  # the loop is asked meanwhile whether it runs, and it does
    changes = {"max_req_input_len": None, "takes_s": 0.005}
    manager, _ = start("0.5.23", max_running_requests=None, changes=changes)
    at_most = sum(map(len, of(slots=32).values()))
    assert len(manager.asked) == at_most and all(kind == "info" for kind, _ in told)


@every_release(FIRST)
def test_a_server_that_does_not_start_is_asked_nothing(version, start, served_card):
    assert start(version, runs=False)[1] == [OWN]
    assert start(version, skip_server_warmup=True)[1] == [READY]


@pytest.mark.parametrize(
    "change",
    [
        {"dp_size": 2},
        {"attn_dp_size": 2},
        {"tokenizer_worker_num": 2},
        {"disaggregation_mode": "decode"},
        {"watchdog_timeout": 60.0},
        {"debug_tensor_dump_output_folder": "/tensors"},
        {"changes": {"is_generation": False}},
        {"changes": {"event_loop": None}},
    ],
)
def test_nor_one_that_serves_otherwise(change, start, served_card, told):
    assert start("0.5.23", **change)[1] == [OWN, READY] and told == []


def test_a_longer_watchdog_or_none_is_no_reason(start, served_card):
    for timeout in (300, 3600.0, None, 0):
        assert len(start("0.5.23", watchdog_timeout=timeout)[1]) > 2


def test_nor_one_of_another_model_or_card(start, elsewhere):
    assert start("0.5.23")[1] == [OWN, READY]


def test_a_warm_up_of_the_callers_own_runs_in_place_of_sglangs(start, served_card):
    assert start("0.5.23", own=lambda _: False)[1] == []


def test_what_is_refused_is_told_and_stops_nothing(start, served_card, told):
    manager, events = start("0.5.23", changes={"refused": ("json_schema",)})
    assert events[-1] == READY and manager.server_status is Status.Up
    assert sum("not answered: no grammar here" in text for kind, text in told if kind == "warn") == 1
    assert [len(one["input_ids"]) for one in manager.asked if "json_schema" in one["sampling_params"]] == [5]  # alone
    assert sum(one["sampling_params"]["temperature"] > 0 for one in manager.asked) == 2 + 4  # others' at once, as ever
    for without in ({"grammar_backend": "none"}, {"changes": {"tokenizer": None}}):
        manager, _ = start("0.5.23", **without)
        assert all("json_schema" not in one["sampling_params"] for one in manager.asked)
        assert sum(one["sampling_params"]["temperature"] > 0 for one in manager.asked) == 2 + 4


@pytest.mark.parametrize("is_deaf", [False, True])
def test_a_request_that_is_never_answered_is_aborted_by_name(start, served_card, told, monkeypatch, loop, is_deaf):
    """A task that is cancelled leaves its request in the scheduler's queue, in half of the releases."""
    monkeypatch.setattr(first_requests, "LIMIT_S", 0.2)
    monkeypatch.setattr(first_requests, "SILENT_S", 0.2)
    manager, events = start("0.5.23", changes={"hangs": (3,), "is_deaf": is_deaf})
    assert events[-1] == READY and manager.server_status is Status.Up and len(manager.asked) == 3
    assert manager.aborted == ["name 3"]
    (line,) = (text for kind, text in told if kind == "warn")
    assert line.endswith("behind more of it, from the cache: given up after 0 s, within sampled")
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result()
    assert manager.left == 1  # and nobody waits for it
    # where the scheduler stands still, SGLang's watchdog ends it behind "ready": the start behind that one has no more
    assert start_mark.path(first_requests.PATCH).exists() == is_deaf
    assert (start("0.5.23")[1] == [OWN, READY]) == is_deaf
    assert len(start("0.5.23")[1]) > 2


def test_all_that_are_asked_at_once_are_aborted(start, served_card, monkeypatch):
    monkeypatch.setattr(first_requests, "LIMIT_S", 0.2)
    manager, _ = start("0.5.23", changes={"hangs": range(6, 20)})
    assert sorted(manager.aborted) == sorted(f"name {number}" for number in range(6, 14))


@pytest.mark.parametrize("is_told", [False, True])
def test_a_loop_that_waits_for_this_thread_is_not_waited_for(start, served_card, told, monkeypatch, loop, is_told):
    """Where it ends it joins the thread of the warm-up: neither would ever go on. If nobody has told it to end, it may
    be by what was asked: the first process of a container cannot kill itself, and leaves so."""
    monkeypatch.setattr(first_requests, "BEAT_S", 0.01)
    monkeypatch.setattr(first_requests, "SILENT_S", 0.05)
    began, stands = time.monotonic(), []

    def stand():
        stands.append(True)
        time.sleep(0.5)

    loop.call_later(0.02, stand)
    monkeypatch.setattr(Manager, "gracefully_exit", property(lambda _: is_told and bool(stands)))
    _, events = start("0.5.23", changes={"hangs": (3,)})
    assert events[-1] == READY and time.monotonic() - began < 5
    assert "has ended or stands still" in [text for kind, text in told if kind == "warn"][0]
    assert start_mark.path(first_requests.PATCH).exists() == (not is_told)


def test_so_is_one_that_ends_its_tasks(start, served_card, told, loop):
    """As asyncio.run does behind an exit."""
    loop.call_later(0.1, lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
    assert start("0.5.23", changes={"hangs": (3,)})[1][-1] == READY
    assert "has ended or stands still" in [text for kind, text in told if kind == "warn"][0]
    assert start_mark.path(first_requests.PATCH).read_text() == "sampled"


def test_a_release_that_has_other_names_is_ready_without(start, served_card, told):
    for name in ("max_req_input_len", "event_loop"):
        _, events = start("0.5.23", lacks=(name,))
        assert events[-1] == READY and "not asked: AttributeError" in told[-1][1]


def test_nothing_more_is_asked_of_a_server_that_ends(start, served_card):
    assert start("0.5.23", changes={"gracefully_exit": True})[1] == [OWN, READY]


def test_a_start_behind_one_that_ended_within_them_is_without_them(start, served_card, told, monkeypatch):
    place, noted, note = start_mark.path(first_requests.PATCH), [], start_mark.Mark.note
    place.parent.mkdir()
    place.write_text("all at once")
    manager, events = start("0.5.23")
    assert events == [OWN, READY] and manager.server_status is Status.Up and not place.exists()
    assert [kind for kind, _ in told] == ["warn"]
    assert 'within "all at once"' in told[0][1] and "first_requests=off" in told[0][1]
    monkeypatch.setattr(start_mark.Mark, "note", lambda mark, at: (noted.append(at), note(mark, at)))
    assert len(start("0.5.23")[1]) > 2 and not place.exists()
    assert noted == list(of(slots=4))  # each before it is asked


def test_an_error_of_ours_does_not_keep_a_server_from_being_ready(start, served_card, told, monkeypatch):
    monkeypatch.setattr(first_requests, "body", None)
    _, events = start("0.5.23")
    assert events == [OWN, READY] and [kind for kind, _ in told] == ["info", "info", "warn"]


def of(chunk=8192, longest=40000, slots=8, has_grammars=True):
    return dict(first_requests.rounds(chunk, longest, slots, has_grammars))


def test_what_is_asked():
    found = of()
    first, second = (found[kind][0]["input_ids"] for kind in ("a chunk and a row", "more of it, from the cache"))
    assert len(first) == 8192 + 1 and second[: len(first)] == first and len(second) % 16 != 0
    beginnings = [tuple(one["input_ids"][:1]) for bodies in found.values() for one in bodies]
    assert len(set(beginnings)) == len(beginnings) - 1  # but for these two
    assert not any(found[kind][0]["sampling_params"]["ignore_eos"] for kind in list(found)[:2])  # the long ones
    assert all(0 < token < 128000 for bodies in found.values() for one in bodies for token in one["input_ids"])
    asked = [frozenset(one["sampling_params"]) for one in found["all at once"]]
    assert all(asked.count(one) >= 2 for one in asked) and any("json_schema" in one for one in asked)
    assert [one["sampling_params"]["temperature"] for one in found["sampled"]] == [1.0]
    assert {"top_k", "top_p"} < set(found["sampled of few tokens"][0]["sampling_params"])


@pytest.mark.parametrize("unbounded", [0, -1, None])
def test_where_chunks_have_no_bound_the_prompt_is_short(unbounded, start, served_card):
    """A longer one may fit no pool of windows, and waits for ever then, with all behind it."""
    manager, _ = start("0.5.23", chunked_prefill_size=unbounded)
    assert max(len(one["input_ids"]) for one in manager.asked) == 513 + 128


@pytest.mark.parametrize(
    "slots, batches", [(1, (1,)), (4, (1, 2, 4)), (6, (1, 2, 4, 8)), (500, first_requests.BATCHES)]
)
def test_batches_up_to_the_power_of_two_that_holds_the_slots(slots, batches):
    """Behind the first one, which is read alone, with rows that are a multiple of 16 and with such as are none."""
    found = [[len(one["input_ids"]) for one in bodies] for kind, bodies in of(slots=slots).items() if kind[0].isdigit()]
    assert [len(lengths) - 1 for lengths in found] == [batch for batch in batches for _ in range(2)]
    assert [sum(lengths[1:]) % 16 == 0 for lengths in found] == [False, True] * len(batches)


def test_prompts_fit_what_a_request_may_have():
    """And what admission asks for, which is up to two pages more."""
    assert max(len(one["input_ids"]) for bodies in of(longest=2000).values() for one in bodies) == 2000 - 640
    assert "a chunk and a row" not in of(longest=1000)


@every_release(FIRST)
def test_each_release_has_what_they_say(version):
    said = {name for bodies in of().values() for one in bodies for name in one}
    params = {name for bodies in of().values() for one in bodies for name in one["sampling_params"]}
    requests = content(fetch(version), f"{first_requests.REQUESTS.replace('.', '/')}.py")
    sampling = content(fetch(version), "sglang/srt/sampling/sampling_params.py")
    assert [name for name in said if f"\n    {name}: " not in requests] == []
    assert [name for name in params if f" {name}: " not in sampling] == []

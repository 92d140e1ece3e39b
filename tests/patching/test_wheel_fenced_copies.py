"""Behind which steps of the model a hierarchical cache copies: every release's own overlapping loop, barrier,
controller and engine of copies over stand-ins for CUDA's streams, with ours and without."""

from collections import deque
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from packaging.specifiers import SpecifierSet

from deepseek_v4_sm120.sglang_patches.fixes.fenced_copies import (
    FORWARDS,
    replace_run_event_loop,
    replace_start_loading,
    replace_start_writing,
)
from deepseek_v4_sm120.sglang_patches.table import FENCED_COPIES
from tests.patching.test_wheel_wo_a import Quiet, take
from tests.patching.wheels import every_release, fetch, since

SCHEDULER = "sglang.srt.managers.scheduler"
CONTROLLER = "sglang.srt.managers.cache_controller"
HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"
ENGINE = "sglang.srt.mem_cache.l2_transfer"
LAYERS = 2
RACES = {"load": lambda v: not since(v, "0.5.13") or (since(v, "0.5.14") and not since(v, "0.5.19"))}
RACES["write"] = lambda v: not since(v, "0.5.23")

pytestmark = pytest.mark.usefixtures("opened")


class Ended(Exception):
    """The loop has gone as far as it is looked at."""


class Stream:
    """What is behind what: the steps that are done when this stream comes to what is launched next."""

    def __init__(self, *_, **__):
        self.behind = set()

    def wait_stream(self, other):
        self.behind |= other.behind

    def wait_event(self, event):
        self.behind |= event.behind


class Device:
    """A device_module with a current stream."""

    Stream = Stream

    def __init__(self):
        self.now, device = Stream(), self

        class Event:
            def __init__(self, **_):
                self.behind = set()

            def record(self, stream=None):
                self.behind = set((stream or device.now).behind)

            def wait(self, stream):
                stream.wait_event(self)

            def query(self):
                return True

        self.Event = Event

    def current_stream(self):
        return self.now

    @contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before


class Pool(Quiet):
    """The host's pools: tells behind which steps it copies."""

    def __init__(self, device):
        self.device, self.copies, self.layer_num = device, {"load": [], "write": []}, LAYERS

    def tell(self, kind):
        self.copies[kind].append(set(self.device.now.behind))

    def load_to_device_per_layer(self, *_, **__):
        self.tell("load")

    def backup_from_device_all_layer(self, *_, **__):
        self.tell("write")

    load_to_device_per_layer_physical = load_to_device_per_layer
    backup_from_device_all_layer_physical = backup_from_device_all_layer

    def prepare_transfer_indices(self, host, device, *_):
        return host, device


class Transfer(SimpleNamespace):
    def _replace(self, **given):
        return Transfer(**vars(self) | given)


def controller(version, device, *, ours):
    """The release's controller of DeepSeek-V4's hierarchical cache: (it, its pool)"""
    wheel, pool, hybrid = fetch(version), Pool(device), not since(version, "0.5.18")
    names = {"device_module": device, "make_timing_event_pair": lambda: (device.Event(), device.Event(), False)}
    operation = SimpleNamespace(host_indices=(), device_indices=(), pool_transfers=None, node_ids=())
    names["CacheOperation"] = SimpleNamespace(merge_ops=lambda queue: operation)
    for name in ("LayerLoadingEvent", "LayerDoneCounter"):
        take(wheel, names, name, CONTROLLER)
    made, kind = Quiet(), "HybridCacheController" if hybrid else "HiCacheController"
    made.layer_done_counter = names["LayerDoneCounter"](LAYERS)
    vars(made).update(load_queue=[], write_queue=[], ack_load_queue=[], ack_write_queue=[], layer_num=LAYERS)
    vars(made).update(mem_pool_host=pool, load_stream=Stream(), write_stream=Stream(), transfer_layer_id_max=LAYERS)
    vars(made).update({FORWARDS: None, "load_fence_stream": None, "write_fence_stream": None})
    made.move_hybrid_indices = lambda *_: (Quiet(), Quiet(), Quiet())
    made._move_op_indices = made._move_write_operation = made.move_hybrid_indices
    if hybrid:
        made.l2_transfer_engine = None
    else:
        transfer = Transfer(host_pool=pool, host_indices=Quiet(), device_indices=Quiet(), layer_mapper=None)
        vars(transfer).update(device_pool=SimpleNamespace(), is_draft=False)
        made._l2_transfers = made._l2_load_transfers = lambda *_: [transfer]
        given = {"device_module": device, "contextmanager": contextmanager, "TransferCompletion": _completion}
        given |= {"make_timing_event_pair": names["make_timing_event_pair"], "shared_host_layout_domains": lambda _: []}
        made.l2_transfer_engine = take(wheel, given, "L2TransferEngine", ENGINE)("kernel")
    for name, replace in (("start_loading", replace_start_loading), ("start_writing", replace_start_writing)):
        original = take(wheel, names, f"{kind}.{name}", HYBRID if hybrid else CONTROLLER)
        setattr(made, name, (replace(original) if ours else original).__get__(made))
    return made, pool


def _completion(start_event, finish_event, *_):
    return SimpleNamespace(start_event=start_event, finish_event=finish_event, timing_enabled=False)


class Batch(SimpleNamespace):
    """A step of the model: of the loop and, from 0.5.18 on, the plan that it is given."""

    def __init__(self, number):
        super().__init__(number=number, running_batch=None)
        self.batch_to_run = self

    def copy(self):
        return self


class Scheduler(Quiet):
    """The release's overlapping loop around three steps. Behind the first one a request ends, while the second one
    writes its last token: what it held is kept on the host, and its last page is taken by what the third one's
    prompt brings back."""

    def __init__(self, version, device, *, ours):
        wheel, self.device, self.number = fetch(version), device, 0
        self.controller, self.pool = controller(version, device, ours=ours)
        self.tree_cache = SimpleNamespace(cache_controller=self.controller)
        self.schedule_stream, self.forward_stream = device.now, Stream()
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(forward_stream=self.forward_stream))
        self._war_barrier_enabled, self.is_generation, self.last_batch = True, True, None
        runner = SimpleNamespace(war_fastpath_read_done_event=None, shared_read_done_event=None)
        self.model_worker = SimpleNamespace(war_fastpath_runner=runner, last_shared_read_runner=runner)
        if since(version, "0.5.19"):
            self.controller.load_fence_stream = self.forward_stream
        if since(version, "0.5.23"):
            self.controller.write_fence_stream = self.forward_stream
        names = {"deque": deque, "DynamicGradMode": lambda: lambda function: function}
        barrier = take(wheel, names, "Scheduler._apply_war_barrier", SCHEDULER)
        if barrier is not None:
            self._apply_war_barrier = barrier.__get__(self)
        loop = take(wheel, names, "Scheduler.event_loop_overlap", SCHEDULER)
        self.run_event_loop = (replace_run_event_loop(loop) if ours else loop).__get__(self)

    def get_next_batch_to_run(self, *_, **__):
        self.number += 1
        if self.number == 3:
            self.controller.load_queue = ["a prefix"]
            self.controller.start_loading()
        if self.number > 3:
            raise Ended
        return Batch(self.number)

    def run_batch(self, batch, *_):
        self.forward_stream.wait_stream(self.schedule_stream)
        event, runner = self.device.Event(), self.model_worker.war_fastpath_runner
        event.record(self.forward_stream)  # as a graph has it: what it shares is read before it runs
        runner.war_fastpath_read_done_event = runner.shared_read_done_event = event
        self.forward_stream.behind.add(batch.number)

    def process_batch_result(self, batch, result):
        self.schedule_stream.behind.add(batch.number)  # the host has waited for its tokens
        if batch.number == 1:
            self.controller.write_queue = ["what has ended"]
            self.controller.start_writing()

    def is_disable_overlap_for_batch(self, *_, **__):
        return False


def copied(version, *, ours):
    """{kind: whether each of its copies is behind the step that still writes}"""
    scheduler = Scheduler(version, Device(), ours=ours)
    with pytest.raises(Ended):
        scheduler.run_event_loop()
    copies = scheduler.pool.copies
    assert len(copies["load"]) == LAYERS and len(copies["write"]) == 1
    assert all(1 in behind for kind in copies.values() for behind in kind)
    return {kind: all(2 in behind for behind in copies[kind]) for kind in copies}


@every_release()
def test_copies_are_behind_the_step_that_still_writes(version):
    assert copied(version, ours=True) == {"load": True, "write": True}


@every_release()
def test_in_sglang_alone_they_run_beside_it(version):
    assert copied(version, ours=False) == {kind: not races(version) for kind, races in RACES.items()}


@every_release()
@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_it_stays_sglangs(version, model, card, opened):
    opened(model, card)
    assert copied(version, ours=True) == copied(version, ours=False)


@every_release()
def test_the_row_is_for_the_releases_that_need_it(version):
    """A load is fenced where it races, and in 0.5.13, whose barrier is for all steps; a write where it races."""
    replaced = {
        target.where.rpartition(".")[2] for target in FENCED_COPIES.targets if version in SpecifierSet(target.sglang)
    }
    loads, writes = not since(version, "0.5.19"), RACES["write"](version)
    needed = {"start_loading": loads, "start_writing": writes, "run_event_loop": loads or writes}
    assert replaced == {name for name, there in needed.items() if there}


@pytest.mark.parametrize("cache", [SimpleNamespace(), SimpleNamespace(cache_controller=None)])
def test_a_server_without_a_hierarchical_cache_runs_as_ever(cache):
    assert replace_run_event_loop(lambda self: "ran")(SimpleNamespace(tree_cache=cache)) == "ran"

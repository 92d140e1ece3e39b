"""The chunks of a prompt with --prefill-decode-interval, in each release's own loops and choice of the next batch
taken out of the wheels: what is launched before what is waited for. Batches and the model are stand-ins."""

from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches.fixes import prompts_alone as fix
from tests.patching.test_wheel_mhc_sum import Part
from tests.patching.test_wheel_wo_a import QUIET, take
from tests.patching.wheels import every_release

FIRST, INTERVAL = "0.5.19", 8
SCHEDULER, STAGES = "sglang.srt.managers.scheduler", "sglang.srt.managers.scheduler_pp_mixin"
EVERY_LOOP = pytest.mark.parametrize("stages", [1, 3])


class Done(Exception):
    pass


class Batch:
    """reqs: each has `left` steps to decode."""

    is_prefill_only = batch_is_full = False

    def __init__(self, name, reqs, chunked=None):
        self.name, self.reqs, self.chunked_req = name, reqs, chunked
        self.is_extend_in_batch = name != "step"  # of a batch that is read; then it decodes
        self.forward_mode = SimpleNamespace(is_extend=lambda: self.name != "step")

    def is_empty(self):
        return not self.reqs

    def batch_size(self):
        return len(self.reqs)

    def filter_batch(self, reqs_to_exclude=(), chunked_req_to_exclude=()):  # the latter up to 0.5.21
        excluded = [*reqs_to_exclude, *chunked_req_to_exclude]
        self.reqs = [one for one in self.reqs if one not in excluded and one.left > 0]

    def merge_batch(self, other):
        self.reqs += other.reqs

    def copy(self):
        return Batch(self.name, list(self.reqs))


class Scheduler(Part):
    """Reads `prompts` in chunks; `events`: what was launched, and (in brackets) whose result was waited for."""

    def __init__(self, wheel, stages, patched, **given):
        self.events, self.prompts, self.turns = [], [], 0
        self.chunked_req = self.dllm_config = self.last_batch = None
        self.enable_hisparse = self.require_mlp_sync = self.gracefully_exit = self._engine_paused = False
        self._prefill_decode_interval_remaining, self.prefill_decode_interval = 0, INTERVAL
        self.prefill_decode_interval_min_bs, self.is_generation, self.stages = 0, False, stages
        self.running_batch = Batch("step", [])
        self.dp_attn_adapter = SimpleNamespace(
            **{"maybe_prepare_mlp_sync_batch": lambda batch, **_: batch, "maybe_convert_decode_to_extend": lambda b: b}
        )
        self.ngram_embedding_manager = SimpleNamespace(prepare_for_forward=lambda batch, **_: batch)
        self.pp_group, self.ps = (
            SimpleNamespace(is_last_rank=False, is_first_rank=True),
            SimpleNamespace(pp_size=stages),
        )
        plain = {
            **{"len": len, "list": list, "set": set, "range": range, "deque": deque, "nullcontext": nullcontext},
            **{"DynamicGradMode": lambda: lambda f: f, "scheduler_stage_method": lambda stage: lambda f: f},
            "scheduler_nvtx_method": lambda name: lambda f: f,
            "NextBatchPlan": SimpleNamespace,
            "get_parallel": lambda: SimpleNamespace(pp_size=stages, pp_async_batch_depth=0),
            "ScheduleBatch": lambda reqs, **_: Batch("step", reqs),
            "torch": SimpleNamespace(profiler=SimpleNamespace(record_function=lambda name: nullcontext())),
        }
        plain["_pp_exchange_outputs_before_forward"] = lambda **_: False
        kind = type(self)
        for name in ("_should_defer_prefill", "_arm_prefill_decode_interval"):
            setattr(kind, name, take(wheel, dict(plain), f"Scheduler.{name}", SCHEDULER))
        kind._next_batch = take(wheel, dict(plain), "Scheduler.get_next_batch_to_run", SCHEDULER)
        kind.event_loop_overlap = take(wheel, dict(plain), "Scheduler.event_loop_overlap", SCHEDULER)
        kind.event_loop_pp = take(wheel, dict(plain), "SchedulerPPMixin.event_loop_pp", STAGES)
        if patched:
            kind._should_defer_prefill = fix.replace_should_defer(kind._should_defer_prefill)
        vars(self).update(given)

    # ---- what the loops ask

    def get_next_batch_to_run(self, **given):
        self.turns += 1
        if self.turns > 100:
            raise Done
        return self._next_batch(**given)

    def get_new_batch_prefill(self, running_batch):
        batch = None
        if self.prompts:
            prompt = self.prompts[0]
            prompt.read += 1
            is_last = prompt.read == prompt.chunks
            self.chunked_req = None if is_last else prompt
            prompt.left = prompt.steps if is_last else 1
            batch = Batch(f"{prompt.name}{prompt.read}", [prompt], chunked=None if is_last else prompt)
            if is_last:
                self.prompts.pop(0)
        return SimpleNamespace(batch_to_run=batch, running_batch=running_batch)

    def update_running_batch(self, batch):
        batch.filter_batch()
        batch.name = "step"
        for one in batch.reqs:
            one.left -= 1
        return batch

    def launch(self, batch):
        self.events.append(batch.name)

    def run_batch(self, batch, *_):
        self.launch(batch)
        return QUIET

    def process_batch_result(self, batch, *_):
        self.events.append(f"({batch.name})")

    _pp_process_batch_result = process_batch_result

    def is_disable_overlap_for_batch(self, batch, *_, **__):
        return False

    # ---- the pipeline's first stage

    def init_pp_loop_state(self):
        self.pp_loop_size = self.stages
        self.mbs, self.last_mbs, self.mb_metadata = ([None] * self.stages for _ in range(3))
        self.running_mbs = [Batch("step", []) for _ in range(self.stages)]
        self.running_mbs[0] = self.running_batch

    def _pp_launch_batch(self, mb_id, batch, *_):
        self.launch(batch)
        return QUIET, QUIET

    def _pp_commit_send_output_work_and_preprocess_output_tensors(self, *_):
        return QUIET, QUIET, QUIET

    def run(self):
        with pytest.raises(Done):
            self.event_loop_overlap() if self.stages == 1 else self.event_loop_pp()
        return self.events


class Prompt(SimpleNamespace):
    __hash__, __eq__ = object.__hash__, object.__eq__


def prompt(name, chunks, steps=0):
    """steps: that it decodes."""
    return Prompt(
        **{"name": name, "chunks": chunks, "steps": steps, "read": 0, "left": 1},
        **{
            "extend_end": 0,
            "prefix_len": 0,
            "is_chunked": 0,
            "extend_range": SimpleNamespace(start=0, end=0),
            "prefix_indices": [],
        },
    )


@pytest.fixture(autouse=True)
def served(monkeypatch):
    monkeypatch.setattr(fix, "is_ours", lambda: True)
    monkeypatch.setattr(fix.models_served, "_announced", {"model_type": "deepseek_v4"})


def made(wheel, stages, *, patched, **given):
    return type("OfRelease", (Scheduler,), {})(wheel, stages, patched, **given)


@every_release(FIRST)
@EVERY_LOOP
def test_chunks_follow_each_other_while_nobody_decodes(version, stages, sglang_wheel):
    """As many as there are stages are launched before one is waited for, two where steps overlap."""
    found = {}
    for patched, interval in ((False, 0), (False, INTERVAL), (True, INTERVAL)):
        scheduler = made(sglang_wheel(version), stages, patched=patched, prefill_decode_interval=interval)
        scheduler.prompts = [prompt("a", chunks=5)]
        found[patched, interval] = scheduler.run()
    ahead = max(2, stages)
    chunks = [f"a{number}" for number in range(1, 6)]
    assert found[True, INTERVAL] == found[False, 0] and found[False, 0][:ahead] == chunks[:ahead]
    assert found[False, INTERVAL] == [event for name in chunks for event in (name, f"({name})")], "what it was"


def order(wheel, stages, *, patched, streams, prompts, **given):
    """streams: of each batch of the pipeline, the steps that a stream of it has left."""
    scheduler = made(wheel, stages, patched=patched, **given)
    scheduler.prompts = [prompt(name, chunks=chunks, steps=steps) for name, chunks, steps in prompts]
    scheduler.init_pp_loop_state()
    for batch, steps in zip(scheduler.running_mbs, streams, strict=True):
        batch.reqs = [Prompt(left=steps)] if steps else []
    scheduler.init_pp_loop_state = lambda: None
    return scheduler.run()


@every_release(FIRST)
@EVERY_LOOP
@pytest.mark.parametrize("who", ["one that runs", "one that is read", "one of another batch"])
def test_somebody_who_decodes_has_the_steps_between(version, stages, who, sglang_wheel):
    """As without ours, to the last turn, while there is somebody."""
    streams, prompts = [0] * stages, [("b", 2 * stages, 30)]
    if who == "one that is read":  # b is let in behind it, and waits as it decodes
        prompts = [("a", 1, 60), *prompts]
    else:
        streams[-1 if who == "one of another batch" else 0] = 60
    found = [
        order(sglang_wheel(version), stages, patched=patched, streams=streams, prompts=prompts)
        for patched in (False, True)
    ]
    turns = [event for event in found[1] if not event.startswith("(")]
    if stages == 1 or who != "one that is read":  # else it decodes once it is through all stages, where b's chunks are
        assert found[0] == found[1]
        assert "step" in turns[turns.index("b1") : turns.index("b2")]
    assert turns.index("step") < turns.index(f"b{2 * stages}") < len(turns) - INTERVAL
    if stages == 1:
        assert turns[turns.index("b1") + 1 : turns.index("b2")] == ["step"] * INTERVAL


@every_release(FIRST)
def test_once_the_last_stream_has_ended_chunks_follow_each_other(version, sglang_wheel):
    found = order(sglang_wheel(version), 1, patched=True, streams=[2], prompts=[("b", 4, 0)])
    assert found.index("b3") < found.index("(b2)") and found.index("step") < found.index("b2")


@every_release(FIRST)
@pytest.mark.parametrize("why", ["attention's ranks", "other hosts", "another model"])
def test_where_others_would_decide_otherwise_it_is_as_ever(version, why, sglang_wheel, monkeypatch):
    given = {"require_mlp_sync": True} if why == "attention's ranks" else {}
    if why == "other hosts":
        monkeypatch.setattr(fix.models_served, "_announced", {"model_type": "deepseek_v4", "several_hosts": True})
    if why == "another model":
        monkeypatch.setattr(fix, "is_ours", lambda: False)
    alone = {"streams": [0], "prompts": [("b", 4, 0)], **given}
    whole, ours = (order(sglang_wheel(version), 1, patched=patched, **alone) for patched in (False, True))
    assert whole == ours and ours.index("(b1)") < ours.index("b2")


def test_the_releases_least_streams_are_the_users():
    """0.5.23's --prefill-decode-interval-min-bs: with streams SGLang itself is asked, with what it was given."""
    asked = []
    should_defer = fix.replace_should_defer(lambda self, *given: asked.append(given) or True)
    scheduler = SimpleNamespace(require_mlp_sync=False, running_batch=Batch("step", [1]), last_batch=None)
    assert should_defer(scheduler, scheduler.running_batch) and asked == [(scheduler.running_batch,)]
    scheduler.running_batch.reqs = []
    assert should_defer(scheduler, scheduler.running_batch) is False and len(asked) == 1

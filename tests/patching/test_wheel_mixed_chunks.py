"""Answers beside a prompt's chunk (--enable-mixed-chunk): who sits out its pass, and how long a row is. The whole of
it, on a release's own scheduler, is in test_wheel_slots.py."""

import ast
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes import mixed_chunks as fix
from deepseek_v4_sm120.sglang_patches.rows.scheduler import BATCH
from tests.patching.test_wheel_wo_a import definition, take
from tests.patching.wheels import every_release, since

MODULE, _, NAME = BATCH.partition(":")


@pytest.fixture(autouse=True)
def served(monkeypatch):
    monkeypatch.setattr(fix, "is_ours", lambda: True)
    fix._looking.clear()


class Running:
    def __init__(self, has_room, finished=False):
        self.has_room, self.reqs, self.finished = has_room, ["an answer"], finished

    def is_empty(self):
        return not self.reqs

    def filter_batch(self):
        self.reqs = [] if self.finished else self.reqs

    def check_decode_mem(self):
        return self.has_room


class Scheduler:
    def __init__(self, mixes):
        self.is_mixed_chunk, self.prepared = mixes, []

    def look(self, prefill_delayer_single_pass, running_batch):
        fix.replace_prepare(self.prepared.append)("the prompts")
        return self.is_mixed_chunk, running_batch

    look_with_ours = fix.replace_next_prompts(look)


@pytest.mark.parametrize(("has_room", "finished"), [(True, False), (False, False), (False, True)])
def test_answers_without_room_sit_out_the_pass_and_no_other(has_room, finished):
    scheduler, running = Scheduler(True), Running(has_room, finished)
    found = scheduler.look_with_ours(prefill_delayer_single_pass=None, running_batch=running)
    assert found == (has_room or finished, running) and scheduler.is_mixed_chunk is True and not fix._looking
    assert scheduler.prepared == ["the prompts"]


def test_where_nothing_is_mixed_or_another_model_runs_nobody_is_asked(monkeypatch):
    assert Scheduler(False).look_with_ours(None, running_batch=Running(True))[0] is False
    fix.replace_prepare(lambda batch: None)("prompts of no scheduler that looks")
    empty = SimpleNamespace(is_empty=lambda: True)
    assert Scheduler(True).look_with_ours(None, running_batch=empty)[0] is True
    monkeypatch.setattr(fix, "is_ours", lambda: False)
    assert Scheduler(True).look_with_ours(None, running_batch=Running(False))[0] is True


@every_release("0.5.17")
def test_which_releases_ask_before_they_mix(version, sglang_wheel):
    where = "Scheduler._get_new_batch_prefill_raw", "sglang.srt.managers.scheduler"
    text = ast.unparse(definition(sglang_wheel(version), *where))
    assert ("running_batch.check_decode_mem()" in text) is since(version, "0.5.22")
    behind = text.partition("new_batch.prepare_for_extend()")[2]
    assert behind.index("if self.is_mixed_chunk and") < behind.index("running_batch.prepare_for_decode()")


@every_release("0.5.17")
def test_an_answer_that_sat_out_a_pass_is_as_long_as_its_row(version, sglang_wheel, monkeypatch):
    """Its prompt of 5 and its 3 tokens are all known; the last of them is what this pass reads, at 7."""
    if since(version, "0.5.19"):
        text = ast.unparse(definition(sglang_wheel(version), f"{NAME}.mix_with_running", MODULE))
        assert "running_batch.seq_lens_cpu" in text and "delta" not in text
        return
    mix = take(sglang_wheel(version), {}, f"{NAME}.mix_with_running", MODULE)

    def mixed(function):
        row = SimpleNamespace(origin_input_ids=[0] * 5, output_ids=[0] * 3, full_untruncated_fill_ids=[0] * 8)
        vars(row).update(_refresh_fill_ids=lambda: None, set_extend_range=lambda *_: None)
        running = SimpleNamespace(reqs=[row], batch_size=lambda: 1, req_pool_indices=None)
        vars(running).update(out_cache_loc=torch.tensor([9]), seq_lens_cpu=torch.tensor([8]))
        new = SimpleNamespace(out_cache_loc=torch.tensor([4]), merge_batch=lambda _: None, enable_overlap=True)
        vars(new).update(prefix_lens=[3], extend_lens=[1], extend_num_tokens=1, extend_logprob_start_lens=[0])
        function(new, running)
        return new.prefix_lens

    assert mixed(mix) == [3, 8] and mixed(fix.replace_mix(mix)) == [3, 7]
    monkeypatch.setattr(fix, "is_ours", lambda: False)
    assert mixed(fix.replace_mix(mix)) == [3, 8]

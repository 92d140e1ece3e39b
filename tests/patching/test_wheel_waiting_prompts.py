"""A long prompt that waits for room: how often SGLang is asked to look it up. Each release's own look is read for what
is taken for granted of it; the whole of it, on a release's own scheduler, is in test_wheel_slots.py."""

import ast
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches import scope
from deepseek_v4_sm120.sglang_patches.fixes import waiting_prompts as fix
from deepseek_v4_sm120.sglang_patches.rows.scheduler import SCHEDULER
from tests.patching.test_wheel_wo_a import definition
from tests.patching.wheels import every_release

STEP = fix.TOKENS_OF_A_STEP


@pytest.fixture(autouse=True)
def served(monkeypatch):
    monkeypatch.setattr(scope, "is_ours", lambda: True)
    monkeypatch.setattr(scope.models_served, "has_several_hosts", lambda: False)


class Running(SimpleNamespace):
    def is_empty(self):
        return not self.reqs


class Scheduler:
    def __init__(self, tokens, said=0, **given):
        self.waiting_queue = [self.prompt("head", tokens, said)]
        self.chunked_req, self.schedule_policy, self.pp_group = None, "fcfs", SimpleNamespace(world_size=1)
        self.enable_priority_scheduling = self.enable_lora = self.enable_hicache_storage = False
        self.batch, self.looked = None, 0
        vars(self).update(given)

    @staticmethod
    def prompt(rid, tokens, said=0):
        return SimpleNamespace(rid=rid, origin_input_ids=[0] * tokens, output_ids=[0] * said)

    def look(self, prefill_delayer_single_pass, running_batch):
        self.looked += 1
        return self.batch, running_batch

    look_with_ours = fix.replace_next_prompts(look)

    def looks(self, steps, running=2, delayer=None):
        """How often SGLang looked in so many steps."""
        before, batch = self.looked, Running(reqs=[None] * running)
        for _ in range(steps):
            found = self.look_with_ours(prefill_delayer_single_pass=delayer, running_batch=batch)
            assert found[1] is batch and found[0] in (None, self.batch)
        return self.looked - before


def test_it_is_looked_up_again_a_step_later_for_each_8192_tokens():
    assert STEP == 8192
    assert Scheduler(20 * STEP).looks(1 + 20) == 1 and Scheduler(20 * STEP).looks(1 + 20 + 1) == 2
    assert Scheduler(20 * STEP).looks(210) == 10
    assert Scheduler(2 * STEP, said=STEP).looks(4) == 1, "what it had answered before it was retracted counts"
    assert Scheduler(STEP - 1).looks(9) == 9, "a short one in front of every step"


def test_whoever_ends_and_another_head_are_looked_at_at_once():
    scheduler = Scheduler(20 * STEP)
    assert [scheduler.looks(3, running=n) for n in (3, 2, 2, 1)] == [1, 1, 0, 1]
    scheduler.waiting_queue.insert(0, Scheduler.prompt("another", 5 * STEP))
    assert scheduler.looks(5, running=1) == 1


def test_where_somebody_was_let_in_or_nobody_runs_it_is_looked_at():
    scheduler = Scheduler(20 * STEP, batch="a batch")
    assert scheduler.looks(3) == 3
    assert Scheduler(20 * STEP).looks(4, running=0) == 4


@pytest.mark.parametrize(
    "given",
    [
        {"schedule_policy": "lpm"},
        {"enable_priority_scheduling": True},
        {"enable_lora": True},
        {"enable_hicache_storage": True},
        {"enable_lmcache": True},
        {"pp_group": SimpleNamespace(world_size=2)},
        {"chunked_req": "a prompt in chunks"},
        {"waiting_queue": []},
    ],
)
def test_in_other_servers_sglang_looks_in_front_of_each_step(given):
    assert Scheduler(20 * STEP, **given).looks(5) == 5


def test_several_hosts_other_models_and_delayed_prompts_are_left_alone(monkeypatch):
    assert Scheduler(20 * STEP).looks(5, delayer="negotiates") == 5
    for owner, name, value in ((scope.models_served, "has_several_hosts", True), (scope, "is_ours", False)):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, lambda value=value: value)
            assert Scheduler(20 * STEP).looks(5) == 5
            patched.setattr(scope.models_served, "_hosts_are_alike", True)
            assert (Scheduler(20 * STEP).looks(5) < 5) is value


@every_release("0.5.17")
def test_where_the_head_has_no_room_sglang_looks_at_nobody_behind_it(version, sglang_wheel):
    module, _, name = SCHEDULER.partition(":")
    look = definition(sglang_wheel(version), f"{name}._get_new_batch_prefill_raw", module)
    (queue,) = (n for n in ast.walk(look) if isinstance(n, ast.For) and ast.unparse(n.iter) == "self.waiting_queue")
    (refused,) = (n for n in queue.body if isinstance(n, ast.If) and "AddReqResult.CONTINUE" in ast.unparse(n.test))
    assert ast.unparse(refused.test) == "res != AddReqResult.CONTINUE" and isinstance(refused.body[-1], ast.Break)
    assert "running_batch.batch_is_full = False" in ast.unparse(look), "so it is asked in front of each step"
    skipped = [n for n in ast.walk(queue) if isinstance(n, ast.If) and isinstance(n.body[-1], ast.Continue)]
    reasons = " ".join(ast.unparse(n.test) for n in skipped)
    assert all(word in reasons for word in ("lora", "prefetch")), "what may pass the head by"

"""Grammars of answers that run beside a prompt's chunk (--enable-mixed-chunk) where there are drafts: each release's
own look in front of a launch, and its own advance of grammars. A whole scheduler is in test_wheel_slots.py."""

import ast
from collections import deque
from http import HTTPStatus
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches.fixes import mixed_grammars as fix
from deepseek_v4_sm120.sglang_patches.rows.scheduler import SCHEDULER
from tests.patching.test_wheel_wo_a import definition, take
from tests.patching.wheels import content, every_release, since

MODULE, _, NAME = SCHEDULER.partition(":")
LOOK, ADVANCE = "is_disable_overlap_for_batch", "_advance_pending_grammar"
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor"


@pytest.fixture(autouse=True)
def served(monkeypatch):
    monkeypatch.setattr(fix, "is_ours", lambda: True)


def mode(name):
    return SimpleNamespace(**{f"is_{one}": lambda one=one: one == name for one in ("mixed", "decode")}, is_extend=bool)


def batch(name="mixed", *, has_grammar=True, drafts=True):
    algorithm = SimpleNamespace(is_none=lambda: not drafts)
    return SimpleNamespace(
        forward_mode=mode(name), has_grammar=has_grammar, spec_algorithm=algorithm, grammar_needs_sync=lambda: False
    )


def scheduler(version, wheel, pending, *, ours):
    """The release's own look and advance, over a queue of one step: two accepted tokens of an answer with a grammar."""
    environment = SimpleNamespace(SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP=SimpleNamespace(get=lambda: False))
    look = take(wheel, {"envs": environment}, f"{NAME}.{LOOK}", MODULE)
    accepts = ("advance_grammar_fsm", "_accept_grammar_tokens")
    names = {"_get_speculative_output_stride": lambda result: 3, "logger": None}
    own = {name: take(wheel, dict(names), f"SchedulerBatchResultProcessor.{name}", RESULTS) for name in accepts}
    methods = {LOOK: fix.replace_waits(look) if ours else look, ADVANCE: take(wheel, {}, f"{NAME}.{ADVANCE}", MODULE)}
    made = type("Scheduler", (), methods)()
    made.require_mlp_sync, made.result_queue = False, deque([pending])
    made.batch_result_processor = type("Processor", (), own)()
    return made


def step():
    """-> (a decode step's batch, its result), tokens that its grammar has taken"""
    taken, tokens = [], [11, 12, 0]
    grammar = SimpleNamespace(accept_token=taken.append, is_terminated=lambda: False)
    request = SimpleNamespace(grammar=grammar, is_retracted=False, finished=lambda: False, rid="a")
    of_step = SimpleNamespace(
        reqs=[request], has_grammar=True, forward_mode=mode("decode"), is_spec_v2=True, spec_algorithm=None
    )
    result = SimpleNamespace(
        grammar_advanced=False,
        copy_done=None,
        next_token_ids=SimpleNamespace(tolist=lambda: tokens),
        accept_lens=SimpleNamespace(tolist=lambda: [2]),
        speculative_num_draft_tokens=3,
    )
    return (of_step, result), taken


@every_release("0.5.19")
def test_a_grammar_has_the_last_steps_tokens_before_a_mixed_pass_is_launched(version, sglang_wheel):
    for ours, expected in ((False, []), (True, [11, 12])):
        pending, taken = step()
        one = scheduler(version, sglang_wheel(version), pending, ours=ours)
        assert one.is_disable_overlap_for_batch(batch(), last_batch=pending[0]) is False
        assert taken == expected
        one.is_disable_overlap_for_batch(batch(), last_batch=pending[0])
        assert taken == expected  # once


@every_release("0.5.19")
def test_an_answer_whose_grammar_refuses_a_token_breaks_off(version, sglang_wheel):
    """What docs/mended.md says: in silence up to 0.5.22, with an error 500 on 0.5.23."""

    def refuse(token):
        raise ValueError

    names = {"FINISH_ABORT": lambda *given: given, "HTTPStatus": HTTPStatus, "logger": SimpleNamespace(error=len)}
    accept = take(sglang_wheel(version), names, "SchedulerBatchResultProcessor._accept_grammar_tokens", RESULTS)
    request = SimpleNamespace(grammar=SimpleNamespace(accept_token=refuse), rid="a", to_finish=None)
    assert accept(None, request, [11, 12]) == []
    assert (HTTPStatus.INTERNAL_SERVER_ERROR in request.to_finish) is since(version, "0.5.23")


@pytest.mark.parametrize(
    "given",
    [None, batch("decode"), batch(has_grammar=False), batch(drafts=False)],
    ids=["none", "a step", "no grammar", "no drafts"],
)
def test_what_waits_for_its_results_itself_is_launched_as_before(given, sglang_wheel):
    pending, taken = step()
    one = scheduler("0.5.23", sglang_wheel("0.5.23"), pending, ours=True)
    assert not one.is_disable_overlap_for_batch(given, last_batch=pending[0])
    assert taken == []


def test_other_models_servers_stay_sglangs(monkeypatch, sglang_wheel):
    monkeypatch.setattr(fix, "is_ours", lambda: False)
    pending, taken = step()
    scheduler("0.5.23", sglang_wheel("0.5.23"), pending, ours=True).is_disable_overlap_for_batch(batch(), pending[0])
    assert taken == []


@every_release("0.5.17")
def test_why_it_is_needed_and_where_it_is_asked(version, sglang_wheel):
    """From 0.5.19 on drafts are no hindrance to mixed passes, whose worker draws at once where there are drafts; the
    loop looks before it launches."""
    wheel = sglang_wheel(version)
    kinds = "SpeculativeAlgorithm.supports_mixed_chunk", "sglang.srt.speculative.spec_info"
    if not since(version, "0.5.19"):
        assert "supports_mixed_chunk" not in content(wheel, "sglang/srt/speculative/spec_info.py")
        return
    allowed = ast.unparse(definition(wheel, *kinds))
    assert "SpeculativeAlgorithm.EAGLE" in allowed and "SpeculativeAlgorithm.DSPARK" in allowed
    worker = "TpModelWorker.forward_batch_generation", "sglang.srt.managers.tp_worker"
    assert "self.enable_overlap and (not self.enable_spec) and" in ast.unparse(definition(wheel, *worker))
    loop = ast.unparse(definition(wheel, f"{NAME}.event_loop_overlap", MODULE))
    assert -1 < loop.index(f"self.{LOOK}(batch") < loop.index("self.run_batch(batch")

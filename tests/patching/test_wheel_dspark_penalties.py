"""Penalties and min_tokens with DSPARK: each release's own penalizers, preparation of a step and adjustment of the
verified logits on the CPU, with ours and without."""

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes import dspark_penalties as adapter
from deepseek_v4_sm120.sglang_patches.rows.dspark import DSPARK_PENALTIES
from tests.patching.test_wheel_penalties import END, SEVERAL, VOCABULARY, Batch, expected, request, three
from tests.patching.test_wheel_wo_a import QUIET, take
from tests.patching.wheels import every_release, fetch

FIRST, WIDTH = "0.5.18", 4
SAMPLING = "sglang.srt.sampling"
SCALING = f"{SAMPLING}.penaltylib.repetition_penalty:apply_scaling_penalties"
METHODS = ("__len__", "update_penalties", "copy_for_forward", "apply_logits_bias")
METHODS += ("_apply_pre_grammar_logits_transforms", "_apply_post_grammar_logits_transforms")
ADJUST, PREPARE, NOOP = (target.where for target in DSPARK_PENALTIES.targets)
ALLOCATION = {"page_aligned_decode_alloc_lens": lambda requests, **_: ([0] * len(requests), [8] * len(requests), 8)}
LENGTHS = ("batch_seq_lens_cpu", "cur_kv_lens_cpu", "nxt_kv_lens_cpu", "cur_kv_lens_gpu", "nxt_kv_lens_gpu")
DRAFT = {f"_prepare_{name}_buf": torch.zeros(8, dtype=torch.int64) for name in LENGTHS}
SAID = torch.linspace(-2.0, 2.0, VOCABULARY)

pytestmark = pytest.mark.usefixtures("opened")


def taken(version, where, **names):
    module, _, qualname = where.partition(":")
    return take(fetch(version), {"torch": torch, "getattr": getattr, **names}, qualname, module)


def info_of(version, orchestrator, rows, bias=None):
    """The release's SamplingBatchInfo as far as a step asks."""
    scale = taken(version, SCALING, torch=SimpleNamespace(compile=lambda **_: lambda f: f, where=torch.where))
    taken_methods = {
        name: taken(
            version,
            f"{SAMPLING}.sampling_batch_info:SamplingBatchInfo.{name}",
            dataclasses=dataclasses,
            apply_scaling_penalties=scale,
        )
        for name in METHODS
    }
    values = dict(temperatures=torch.ones(rows, 1), vocab_size=VOCABULARY, has_custom_logit_processor=False)
    values |= dict.fromkeys(("acc_additive_penalties", "acc_scaling_penalties", "grammar_mask"))
    values |= dict(penalizer_orchestrator=orchestrator, logit_bias=bias)
    methods = {name: method for name, method in taken_methods.items() if method is not None}
    return dataclasses.make_dataclass("Info", values, namespace=methods)(**values)


class Steps(Batch):
    """A batch of DSPARK's: what its scheduler does before a step, and verification with the logits."""

    def __init__(self, version, requests, *, ours, bias=None):
        super().__init__(version, requests, ours=ours)
        orchestrator = self.sampling_info.penalizer_orchestrator
        self.sampling_info = info_of(version, orchestrator, len(requests), bias)
        names = {**ALLOCATION, "_get_overlap_plan_stream": lambda device: (None, contextlib.nullcontext())}
        names["get_spec"] = lambda: SimpleNamespace(speculative_num_draft_tokens=WIDTH)
        self.own_prepare = taken(version, PREPARE, **names)
        self.adjust, self.is_noop = taken(version, ADJUST), taken(version, NOOP)
        if ours:
            self.own_prepare = adapter.replace_prepare_for_decode(self.own_prepare)
            self.adjust, self.is_noop = adapter.replace_adjustments(self.adjust), adapter.replace_are_noop(self.is_noop)
        self.draft = SimpleNamespace(_ensure_prepare_length_buffers=lambda *_: None, **DRAFT)
        for one in requests:
            one.kv_committed_len, one.kv = 4, SimpleNamespace(kv_committed_len=4, kv_allocated_len=0)
            one.sampling_params.top_k = 1

    def __getattr__(self, name):
        return QUIET

    def batch_size(self):
        return len(self.reqs)

    def cumulate_penalty_output_tokens(self):
        self.count(self)

    def prepare(self):
        self.own_prepare(self.draft, self)

    def verified(self):
        """The logits of all rows, and whether a graph may decide on them as they are."""
        info, logits = self.sampling_info.copy_for_forward(), SAID.repeat(len(self.reqs) * WIDTH, 1)
        self.adjust(next_token_logits=logits, sampling_info=info, draft_token_num=WIDTH)
        return logits, self.is_noop(info)


def run(batch):
    """The prompts are read, then the steps run; one is prepared before the last one's tokens are known."""
    for step in range(len(SEVERAL[0])):
        batch.prepare()
        for one, steps in zip(batch.reqs, SEVERAL, strict=True):
            one.output_ids.extend(steps[step])
    batch.prepare()
    return batch.verified()


def penalised(requests):
    """The logits of all rows as every token of the answers, once, leaves them."""
    rows = []
    for one, (frequency, presence, repetition) in zip(requests, expected(requests), strict=True):
        logits, scale = SAID - torch.tensor(frequency) - torch.tensor(presence), torch.tensor(repetition)
        if len(one.output_ids) < one.sampling_params.min_new_tokens:
            logits[END] = -torch.inf
        rows += [torch.where(logits < 0, logits * scale, logits / scale)] * WIDTH
    return torch.stack(rows)


def several():
    """And one that may not end yet."""
    return [*three(), request(min_new_tokens=40)]


SEVERAL = (*SEVERAL, SEVERAL[2])


@every_release(FIRST)
def test_every_row_of_a_block_is_penalised(version):
    batch = Steps(version, several(), ours=True)
    logits, noop = run(batch)
    torch.testing.assert_close(logits, penalised(batch.reqs))
    assert not noop and not logits.isneginf().all(-1).any() and logits.isneginf().sum() == WIDTH
    assert [one.decode_batch_idx for one in batch.reqs] == [len(SEVERAL[0]) + 1] * 4


@every_release(FIRST)
def test_sglang_leaves_all_of_it_out(version):
    logits, noop = run(Steps(version, several(), ours=False))
    assert noop and torch.equal(logits, SAID.expand_as(logits))


@every_release(FIRST)
def test_a_bias_is_added_behind_it_and_once(version):
    bias = torch.zeros(4, VOCABULARY)
    bias[0, 3], bias[1, 9] = 1.5, -1.0
    batch = Steps(version, several(), ours=True, bias=bias)
    torch.testing.assert_close(run(batch)[0], penalised(batch.reqs) + bias.repeat_interleave(WIDTH, 0))


@every_release(FIRST)
def test_where_sglang_adds_the_sums_itself_they_are_added_once(version):
    """A mask of grammars in the batch's own state, which today's steps do not have, sends it that way."""
    batch = Steps(version, several(), ours=True)
    batch.sampling_info.grammar_mask = SimpleNamespace(apply=lambda logits: None)
    torch.testing.assert_close(run(batch)[0], penalised(batch.reqs))


@every_release(FIRST)
def test_without_penalties_it_is_sglangs(version):
    batch = Steps(version, [request() for _ in SEVERAL], ours=True)
    logits, noop = run(batch)
    assert noop and torch.equal(logits, SAID.expand_as(logits))


@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_it_stays_sglangs(model, card, opened):
    opened(model, card)
    logits, noop = run(Steps("0.5.23", several(), ours=True))
    assert noop and torch.equal(logits, SAID.expand_as(logits))


def test_idle_cards_are_asked_for_nothing():
    batch = Steps("0.5.23", [], ours=True)
    batch.prepare()
    assert batch.is_noop(None)
    batch.adjust(next_token_logits=SAID[None], sampling_info=None, draft_token_num=WIDTH)


def test_what_sglang_has_adjusted_is_no_less_adjusted_and_one_sum_is_enough():
    assert adapter.replace_are_noop(lambda info: False)(None) is False
    for added, scaled in ((None, "a sum"), ("a sum", None), ("a sum", "a sum"), (None, None)):
        info = SimpleNamespace(acc_additive_penalties=added, acc_scaling_penalties=scaled)
        assert adapter.is_penalised(info) is not (added is scaled is None)

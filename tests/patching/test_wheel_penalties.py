"""Penalties and min_tokens of requests whose steps bring several tokens: each release's own count and penalizers on
the CPU, with ours behind it and without."""

import abc
import weakref
from array import array
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes.penalties import COUNTED, replace_cumulate
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import content, every_release, fetch, since

FIRST = "0.5.14"
LIBRARY, BATCH = "sglang.srt.sampling.penaltylib", "sglang.srt.managers.schedule_batch"
PENALIZERS = {
    "frequency_penalty": "BatchedFrequencyPenalizer",
    "presence_penalty": "BatchedPresencePenalizer",
    "repetition_penalty": "BatchedRepetitionPenalizer",
    "min_new_tokens": "BatchedMinNewTokensPenalizer",
}
VOCABULARY, PROMPT, END = 16, 15, 0
ONE_BY_ONE = ([[3], [4], [3], [5], [3], [3]], [[7], [8], [7], [9], [7], [8]], [[1], [2], [1], [2], [1], [2]])
# the prompts' own tokens, then what each step brings
SEVERAL = ([[3], [4, 3], [5, 5, 3], [3], [6, 3]], [[7], [9, 8], [8], [9, 7, 7], [8]], [[1], [2, 2], [2], [1], [2]])

pytestmark = pytest.mark.usefixtures("opened")


def request(**params):
    plain = dict(frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, min_new_tokens=0)
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**plain | params, stop_token_ids=None),
        tokenizer=SimpleNamespace(eos_token_id=END, additional_stop_token_ids=None),
        origin_input_ids=array("q", [PROMPT]),
        output_ids=array("q"),
        **dict(decode_batch_idx=0, eos_token_ids=None),
    )


def three():
    return [
        request(frequency_penalty=0.5, presence_penalty=0.25),
        request(repetition_penalty=1.5, min_new_tokens=6),
        request(),
    ]


class Batch:
    """A release's own count of a batch's tokens over its own penalizers."""

    def __init__(self, version, requests, *, ours):
        wheel, names = fetch(version), {"torch": torch, "abc": abc, "weakref": weakref}
        names |= {"is_pin_memory_available": lambda *_: False, **{"hasattr": hasattr, "getattr": getattr}}
        for kind in ("_BatchedPenalizer", "BatchedPenalizerOrchestrator"):
            take(wheel, names, kind, f"{LIBRARY}.orchestrator")
        kinds = [
            take(wheel, names, kind, f"{LIBRARY}.{name}") for name, kind in PENALIZERS.items() if "min" not in name
        ]
        kinds.append(take(wheel, names, PENALIZERS["min_new_tokens"], f"{LIBRARY}.min_new_tokens"))
        count = take(wheel, names, "ScheduleBatch.cumulate_penalty_output_tokens", BATCH)
        self.count = replace_cumulate(count) if ours else count
        self.reqs, self.device = requests, "cpu"
        made = names["BatchedPenalizerOrchestrator"](VOCABULARY, self, kinds)
        self.sampling_info = SimpleNamespace(penalizer_orchestrator=made)

    def prepare(self):
        """What SGLang does before a decode step, in its order."""
        self.count(self)
        for one in self.reqs:
            one.decode_batch_idx += 1

    def filter(self, keep):
        """As SGLang does it: the penalizers look at those that stay."""
        self.reqs = [self.reqs[row] for row in keep]
        self.sampling_info.penalizer_orchestrator.filter(torch.tensor(keep))

    def told(self):
        """[(frequency, presence, repetition of each token, min_tokens' count)] of the requests."""
        of = {type(one).__name__: one for one in self.sampling_info.penalizer_orchestrator.penalizers.values()}
        tensors = [
            of["BatchedFrequencyPenalizer"].cumulated_frequency_penalties,
            of["BatchedPresencePenalizer"].cumulated_presence_penalties,
            of["BatchedRepetitionPenalizer"].cumulated_repetition_penalties,
            of["BatchedMinNewTokensPenalizer"].len_output_tokens,
        ]
        return [tuple(x[row].tolist() for x in tensors) for row in range(len(self.reqs))]


def answer(batch, brought, *, overlap):
    """The prompts are read, then the steps run; with overlap one is prepared before the last one's tokens are known."""
    for step in range(len(brought[0])):
        if overlap:
            batch.prepare()
        for one, steps in zip(batch.reqs, brought, strict=True):
            one.output_ids.extend(steps[step])
        if not overlap:
            batch.prepare()
    if overlap:
        batch.prepare()
    return batch.told()


def expected(requests, *, overlap):
    """What every token once gives, and the prompt's last, which SGLang takes for the first token where it does not know
    that yet."""
    found = []
    for one in requests:
        params, counts = one.sampling_params, Counter(one.output_ids)
        counts[PROMPT] += overlap
        there = [counts[token] > 0 for token in range(VOCABULARY)]
        found.append(
            (
                [params.frequency_penalty * counts[token] for token in range(VOCABULARY)],
                [params.presence_penalty * one for one in there],
                [params.repetition_penalty if one else 1.0 for one in there],
                [counts.total()],
            )
        )
    return found


def without_count(told):
    """min_tokens' count says something of those alone that ask for it."""
    return [(*row[:3], row[3] if number == 1 else None) for number, row in enumerate(told)]


@every_release(FIRST)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
def test_every_token_counts_once(version, overlap):
    batch = Batch(version, three(), ours=True)
    assert without_count(answer(batch, SEVERAL, overlap=overlap)) == without_count(
        expected(batch.reqs, overlap=overlap)
    )
    stock = Batch(version, three(), ours=False)
    alone = answer(stock, SEVERAL, overlap=overlap)
    frequency, presence, repetition, length = (alone[row][kind] for row, kind in ((0, 0), (0, 1), (1, 2), (1, 3)))
    assert frequency[5] == presence[5] == 0.0 and repetition[9] == 1.0  # that were said, and are not penalised
    assert length == [5 + overlap] and len(stock.reqs[1].output_ids) == 8  # of which min_tokens knows one a step


@every_release(FIRST)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
def test_without_speculation_it_is_sglangs(version, overlap):
    told = [answer(Batch(version, three(), ours=ours), ONE_BY_ONE, overlap=overlap) for ours in (False, True)]
    assert told[0] == told[1]


@every_release(FIRST)
def test_what_was_answered_before_a_request_was_retracted_counts(version):
    """It comes back in a batch of its own, with a new state, and with its answer so far as a part of its prompt."""
    for ours in (True, False):
        requests = three()
        answer(Batch(version, requests, ours=ours), SEVERAL, overlap=True)
        for one in requests:
            one.decode_batch_idx = 0
        again = Batch(version, requests, ours=ours)
        again.prepare()
        assert (without_count(again.told()) == without_count(expected(requests, overlap=False))) == ours


@every_release(FIRST)
def test_requests_that_leave_the_batch_take_nothing_along(version):
    batch = Batch(version, [request(), *three()], ours=True)
    answer(batch, ([[1]] * len(SEVERAL[0]), *SEVERAL), overlap=False)
    batch.filter([1, 2])
    left = [[[6, 4], [3]], [[9], [8, 8, 8]]]
    answer(batch, left, overlap=False)
    assert without_count(batch.told()) == without_count(expected(batch.reqs, overlap=False))


@every_release(FIRST)
@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_it_stays_sglangs(version, model, card, opened):
    opened(model, card)
    told = [answer(Batch(version, three(), ours=ours), SEVERAL, overlap=True) for ours in (False, True)]
    assert told[0] == told[1]


def test_requests_without_a_penalty_are_not_counted():
    requests = three()
    answer(Batch("0.5.23", requests, ours=True), SEVERAL, overlap=True)
    assert [hasattr(one, COUNTED) for one in requests] == [True, True, False]


@every_release(FIRST)
def test_when_sglang_counts(version):
    """Before a request's number of decode steps grows, which is 0 again when it is retracted."""
    batch = content(fetch(version), f"{BATCH.replace('.', '/')}.py")
    eagle = "eagle_utils" if since(version, "0.5.15") else "eagle_info_v2"
    for text, begins in (
        (batch, "    def prepare_for_decode("),
        (content(fetch(version), f"sglang/srt/speculative/{eagle}.py"), "prepare_for_decode("),
    ):
        prepared = text.partition(f"{begins}")[2]
        first, then = (prepared.index(word) for word in ("cumulate_penalty_output_tokens()", "decode_batch_idx += 1"))
        assert first < then
    retracted = batch.partition("    def reset_for_retract(")[2].partition("\n    def ")[0]
    assert "self.decode_batch_idx = 0" in retracted


@every_release("0.5.16")
def test_dspark_asks_for_penalties_by_a_name_that_nothing_has(version):
    """And nobody counts for it: docs/operating.md. Its batches go there without penalizers."""
    wheel = fetch(version)
    text = {
        name: content(wheel, f"sglang/srt/{name}.py")
        for name in ("speculative/dflash_utils", "speculative/dflash_info_v2", "sampling/sampling_batch_info")
    }
    asked = text["speculative/dflash_utils"].partition("def apply_dflash_verify_logits_adjustments(")[2]
    assert 'getattr(sampling_info, "acc_linear_penalties", None)' in asked.partition("\ndef ")[0]
    info = text["sampling/sampling_batch_info"]
    assert "acc_linear_penalties" not in info and "acc_additive_penalties: " in info
    copied = info.partition("def copy_for_forward(")[2].partition("\n    def ")[0]
    assert "penalizer_orchestrator=None" in copied
    assert "cumulate" not in text["speculative/dflash_info_v2"]


@every_release(FIRST)
def test_eagle_calls_no_custom_logit_processor(version):
    text = content(fetch(version), "sglang/srt/speculative/eagle_utils.py")
    assert "custom_logit_processor" not in text.partition("def eagle_sample(")[2].partition("\ndef ")[0]

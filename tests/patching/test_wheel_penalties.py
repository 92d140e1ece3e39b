"""Penalties and min_tokens of requests whose steps bring several tokens, or whose steps a prompt is read between: each
release's own count and penalizers on the CPU, with ours behind it and without."""

import abc
import itertools
import weakref
from array import array
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes import penalties
from deepseek_v4_sm120.sglang_patches.fixes.penalties import COUNTED, replace_apply, replace_cumulate
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
ONE_BY_ONE = ([[6], [4], [8], [5], [3], [3]], [[7], [8], [7], [9], [7], [8]], [[1], [2], [1], [2], [1], [2]])
# the prompts' own tokens, then what each step brings
# The orders of what is prepared (P) and what arrives (A): without overlap; with it, where a step is prepared before the
# last one's tokens are known; and with it where a prompt is read before the fourth step, whose end all is known at.
ORDERS = {"in turn": "AP", "overlap": "PA", "a prompt between": "PAPAAP"}
SEVERAL = ([[3], [4, 3], [5, 5, 3], [3], [6, 3]], [[7], [9, 8], [8], [9, 7, 7], [8]], [[1], [2, 2], [2], [1], [2]])

pytestmark = pytest.mark.usefixtures("opened")


def request(**params):
    plain = dict(frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, min_new_tokens=0)
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**plain | params, stop_token_ids=None),
        tokenizer=SimpleNamespace(eos_token_id=END, additional_stop_token_ids=None),
        origin_input_ids=array("q", [PROMPT - 1, PROMPT]),
        output_ids=array("q"),
        **dict(decode_batch_idx=0, eos_token_ids=None),
    )


def three():
    return [
        request(frequency_penalty=0.5, presence_penalty=0.25),
        request(repetition_penalty=1.5, min_new_tokens=6),
        request(),
    ]


def scale(logits, penalties):
    """SGLang's, which is compiled there."""
    logits[:] = torch.where(logits < 0, logits * penalties, logits / penalties)


class Batch:
    """A release's own count of a batch's tokens over its own penalizers."""

    def __init__(self, version, requests, *, ours, order=tuple(PENALIZERS)):
        wheel, names = fetch(version), {"torch": torch, "abc": abc, "weakref": weakref}
        names |= {"is_pin_memory_available": lambda *_: False, **{"hasattr": hasattr, "getattr": getattr}}
        for kind in ("_BatchedPenalizer", "BatchedPenalizerOrchestrator"):
            take(wheel, names, kind, f"{LIBRARY}.orchestrator")
        names["apply_scaling_penalties"] = scale
        kinds = [take(wheel, names, PENALIZERS[name], f"{LIBRARY}.{name}") for name in order]
        count = take(wheel, names, "ScheduleBatch.cumulate_penalty_output_tokens", BATCH)
        self.count = replace_cumulate(count) if ours else count
        self.reqs, self.device = requests, "cpu"
        made = names["BatchedPenalizerOrchestrator"](VOCABULARY, self, kinds)
        self.apply = (replace_apply if ours else lambda apply: apply)(type(made).apply)
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
        """[(frequency, presence, repetition of each token, min_tokens' count)] of the requests; None: nobody has it."""
        of = {type(one).__name__: one for one in self.sampling_info.penalizer_orchestrator.penalizers.values()}
        names = [name for _, name, _ in penalties.GIVEN.values()] + ["len_output_tokens"]
        tensors = [vars(of[kind]).get(name) for kind, name in zip(PENALIZERS.values(), names, strict=True)]
        return [tuple(None if x is None else x[row].tolist() for x in tensors) for row in range(len(self.reqs))]


def answer(batch, brought, order):
    """What arrives is what each step brings, the prompts' own first; behind the last one a step is prepared."""
    steps = len(brought[0])
    events = ORDERS[order] + (ORDERS["overlap"] if "PA" in ORDERS[order] else ORDERS[order]) * steps
    step = 0
    for event in events:
        if event == "P":
            batch.prepare()
            if step == steps:
                return batch.told()
        elif step < steps:
            for one, of_steps in zip(batch.reqs, brought, strict=True):
                one.output_ids.extend(of_steps[step])
            step += 1
    raise AssertionError("no step behind the last")


def expected(requests):
    """What every token once gives."""
    found = []
    for one in requests:
        params, counts = one.sampling_params, Counter(one.output_ids)
        there = [counts[token] > 0 for token in range(VOCABULARY)]
        found.append(
            (
                [params.frequency_penalty * counts[token] for token in range(VOCABULARY)],
                [params.presence_penalty * one for one in there],
                [params.repetition_penalty if one else 1.0 for one in there],
            )
        )
    return found


def sums(told):
    return [row[:3] for row in told]


@every_release(FIRST)
@pytest.mark.parametrize("order", ORDERS)
def test_every_token_counts_once(version, order):
    batch = Batch(version, three(), ours=True)
    told = answer(batch, SEVERAL, order)
    assert sums(told) == sums(expected(batch.reqs))
    ((length,), known) = told[1][3], len(batch.reqs[1].output_ids)
    assert known <= length <= known + (order != "in turn")
    stock = Batch(version, three(), ours=False)
    alone = answer(stock, SEVERAL, order)
    frequency, presence, length = (alone[row][kind] for row, kind in ((0, 0), (0, 1), (1, 3)))
    assert frequency[5] == presence[5] == 0.0  # that was said, and is not penalised
    assert length[0] < known == 8  # of which min_tokens knows one a step


@every_release(FIRST)
@pytest.mark.parametrize("params", [{name: 0.5 if "_p" in name else 6} for name in PENALIZERS], ids=str)
def test_a_batch_that_has_one_of_them(version, params):
    """The others are not prepared, and have no state."""
    batch = Batch(version, [request(**params)], ours=True)
    ((name, value),), told = params.items(), answer(batch, SEVERAL[:1], "in turn")
    (found,), known = [one for one in told[0] if one is not None], batch.reqs[0].output_ids
    times = Counter(known) if name == "frequency_penalty" else dict.fromkeys(known, 1)
    none = 1.0 if name == "repetition_penalty" else 0.0
    expected = [value * times[token] if token in times else none for token in range(VOCABULARY)]
    assert found == ([len(known)] if name == "min_new_tokens" else expected)


@every_release(FIRST)
@pytest.mark.parametrize("order", ORDERS)
def test_without_speculation(version, order):
    batch = Batch(version, three(), ours=True)
    told, stock = answer(batch, ONE_BY_ONE, order), answer(Batch(version, three(), ours=False), ONE_BY_ONE, order)
    assert sums(told) == sums(expected(batch.reqs))
    assert told[1][3] == stock[1][3] == [6 + (order != "in turn")]  # min_tokens knows of the step in flight
    assert (sums(told) == sums(stock)) == (order == "in turn")
    if order != "in turn":  # so the row is needed: the prompt's last token is penalised
        assert stock[0][0][PROMPT] == 0.5 and stock[0][1][PROMPT] == 0.25 and stock[1][2][PROMPT] == 1.5
    if order == "a prompt between":  # and of 6, 4, 8, 5, 3, 3 the second is not, and the third twice
        assert stock[0][0][4] == 0.0 and stock[0][0][8] == 0.5 * 2 and told[0][0][8] == 0.5


@every_release(FIRST)
def test_what_was_answered_before_a_request_was_retracted_counts(version):
    """It comes back in a batch of its own, with a new state, and with its answer so far as a part of its prompt."""
    for ours in (True, False):
        requests = three()
        answer(Batch(version, requests, ours=ours), SEVERAL, "overlap")
        for one in requests:
            one.decode_batch_idx = 0
        again = Batch(version, requests, ours=ours)
        again.prepare()
        assert (sums(again.told()) == sums(expected(requests))) == ours
        assert again.told()[1][3] == [8 if ours else 1]


@every_release(FIRST)
def test_requests_that_leave_the_batch_take_nothing_along(version):
    batch = Batch(version, [request(), *three()], ours=True)
    answer(batch, ([[1]] * len(SEVERAL[0]), *SEVERAL), "in turn")
    batch.filter([1, 2])
    answer(batch, [[[6, 4], [3]], [[9], [8, 8, 8]]], "in turn")
    assert sums(batch.told()) == sums(expected(batch.reqs))


@every_release(FIRST)
def test_each_card_applies_them_in_the_same_order(version):
    """SGLang's is that of a set of classes, which each process has its own of."""
    seen = {True: set(), False: set()}
    for ours, order in itertools.product(seen, (tuple(PENALIZERS), tuple(reversed(PENALIZERS)))):
        both = [request(frequency_penalty=0.3, presence_penalty=0.7, repetition_penalty=1.5), request(min_new_tokens=9)]
        batch = Batch(version, both, ours=ours, order=order)
        answer(batch, ONE_BY_ONE[:2], "in turn")
        logits = torch.linspace(-1, 2, 2 * VOCABULARY).reshape(2, -1) * 1.37
        for _ in range(2):
            batch.apply(batch.sampling_info.penalizer_orchestrator, logits)
        seen[ours].add(tuple(logits.flatten().tolist()))
    assert (len(seen[True]), len(seen[False])) == (1, 2)
    assert len(seen[True] & seen[False]) == 1  # which is that of an overlap: the repetition's last


@every_release(FIRST)
@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_it_stays_sglangs(version, model, card, opened):
    opened(model, card)
    batch = Batch(version, three(), ours=True)
    made = batch.sampling_info.penalizer_orchestrator
    kinds = list(made.penalizers)
    batch.apply(made, torch.zeros(3, VOCABULARY))
    assert list(made.penalizers) == kinds
    told = [answer(Batch(version, three(), ours=ours), SEVERAL, "overlap") for ours in (False, True)]
    assert told[0] == told[1]


def test_requests_without_a_penalty_are_not_counted():
    requests = three()
    answer(Batch("0.5.23", requests, ours=True), SEVERAL, "overlap")
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
    """And nobody counts for it: docs/mended.md. Its batches go there without penalizers."""
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

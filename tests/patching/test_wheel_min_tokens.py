"""min_tokens where drafts are verified: each release's own count, penalizers and verification on the CPU over whole
answers, by EAGLE and by DSPARK, with ours and without, beside the answer that needs no drafts."""

from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes import min_tokens
from tests.patching.test_wheel_dspark_penalties import ADJUST, Steps, taken
from tests.patching.test_wheel_dspark_penalties import adapter as dspark_penalties
from tests.patching.test_wheel_penalties import END, VOCABULARY, Batch, request
from tests.patching.test_wheel_sampling import GREEDY, WIDTH, eagle_sample_of, requests_of, walk
from tests.patching.test_wheel_wo_a import QUIET
from tests.patching.wheels import every_release

OTHER, OWN_END, STEPS = 3, 5, 6  # what is said where the end is forbidden, and an end that a request has for itself
LEAST, OWNER = (0, 1, 6, 7, 13), 2
ORDERS = ("in turn", "overlap")
EXECUTOR = "sglang.srt.speculative.dspark_components.dspark_verify:TargetVerifyExecutor.run_non_compact"

pytestmark = pytest.mark.usefixtures("opened")


def logits_of_blocks():
    """The model would end everywhere, one request by its own end; where it may not, it says OTHER."""
    logits = torch.zeros(len(LEAST), WIDTH, VOCABULARY)
    logits[:, :, END], logits[:, :, OTHER], logits[OWNER, :, OWN_END] = 3.0, 1.0, 2.0
    return logits.flatten(0, 1)


def several():
    asked = [request(min_new_tokens=least) for least in LEAST]
    asked[OWNER].sampling_params.stop_token_ids = {OWN_END}
    return asked


def algorithm(name):
    found = SimpleNamespace(is_eagle=lambda: name == "EAGLE")
    if name != "EAGLE":  # which releases without DSPARK have, too
        found.is_dspark = lambda: name == "DSPARK"
    return found


class Answers:
    """A batch with what a verification needs. said: by request, what its answer is on the GPU."""

    def __init__(self, version, requests, *, ours):
        super().__init__(version, requests, ours=True)  # penalties and min_tokens are counted token by token
        if ours:
            self.count = min_tokens.replace_cumulate(self.count)
        self.spec_algorithm, self.version, self.ours = algorithm(self.drafter), version, ours
        self.said = [[OTHER] for _ in requests]  # of the prompt's pass, where the end is forbidden, or not wanted

    @property
    def seq_lens(self):
        return torch.tensor(
            [len(one.origin_input_ids) + len(said) - 1 for one, said in zip(self.reqs, self.said, strict=True)]
        )

    def drafts(self):
        return torch.tensor([[said[-1], *[OTHER] * (WIDTH - 1)] for said in self.said])


class OfEagle(Answers, Batch):
    drafter = "EAGLE"

    def verified(self):
        """By request the tokens that a step brings."""
        rows = len(self.reqs)
        sample = eagle_sample_of(self.version, False)
        sample = min_tokens.replace_eagle_sample(sample) if self.ours else sample
        info = requests_of(self.version, [GREEDY] * rows)
        info.acc_additive_penalties = torch.zeros(rows, VOCABULARY)
        made = self.sampling_info.penalizer_orchestrator
        type(made).apply(made, info.acc_additive_penalties)
        batch = SimpleNamespace(device="cpu", forward_mode=QUIET, seq_lens=self.seq_lens, sampling_info=info)
        batch.return_logprob, batch.reqs = False, self.reqs
        positions = self.seq_lens[:, None] + torch.arange(WIDTH)
        given = {"draft_token_num": WIDTH, "max_tree_depth": WIDTH, "tree_topk": 1, "positions": positions.flatten()}
        given |= dict.fromkeys(("retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "grammar"))
        verify_input = SimpleNamespace(draft_token=self.drafts().flatten(), **given)
        output = SimpleNamespace(next_token_logits=logits_of_blocks())
        predict, lengths, accepted = sample(verify_input, batch, output, None)
        return [predict[places[:n].long()].tolist() for places, n in zip(accepted, lengths, strict=True)]


class OfDspark(Answers, Steps):
    drafter = "DSPARK"

    def verified(self):
        rows = len(self.reqs)
        adjust = dspark_penalties.replace_adjustments(taken(self.version, ADJUST))
        names = {"DFlashVerifyInput": SimpleNamespace, "CaptureHiddenMode": QUIET}
        run = taken(self.version, EXECUTOR, apply_dflash_verify_logits_adjustments=adjust, **names)
        run = min_tokens.replace_run_non_compact(run) if self.ours else run
        result = SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits_of_blocks()))
        executor = SimpleNamespace(verify_num_draft_tokens=WIDTH, _forward_prepared_verify=lambda **_: result)
        executor._verify_backend_self_adds_seq_lens = lambda: True
        info = self.sampling_info.copy_for_forward()
        given = {"draft_input": QUIET, "verify_ids_2d": QUIET, "verify_window": QUIET, "sampling_info": info}
        assert run(executor, batch=self, **given) is result
        assert not dspark_penalties.replace_are_noop(lambda info: True)(info)  # no graph has decided before
        targets = result.logits_output.next_token_logits.argmax(-1).view(rows, WIDTH)
        tokens, places = torch.zeros(rows * WIDTH, dtype=torch.long), torch.zeros(rows, WIDTH, dtype=torch.long)
        lengths = torch.zeros(rows, dtype=torch.long)
        walk(self.drafts(), targets, tokens, places, lengths)
        return [tokens[of_request[: n + 1]].tolist() for of_request, n in zip(places, lengths, strict=True)]


def ends(batch, order, steps=STEPS):
    """By request: how many tokens stand in front of its answer's first end. What a step brings is known before the
    next one is prepared, or behind that."""
    in_flight = [list(said) for said in batch.said]
    for _ in range(steps):
        if order == "overlap":
            batch.prepare()
        for one, tokens in zip(batch.reqs, in_flight, strict=True):
            one.output_ids.extend(tokens)
        if order == "in turn":
            batch.prepare()
        in_flight = batch.verified()
        for said, tokens in zip(batch.said, in_flight, strict=True):
            said.extend(tokens)
    assert all(OWN_END not in said for number, said in enumerate(batch.said) if number != OWNER)
    return [min(said.index(end) for end in (END, OWN_END) if end in said) for said in batch.said]


@every_release("0.5.14")
@pytest.mark.parametrize("order", ORDERS)
def test_answers_with_eagles_drafts_end_where_they_would_without(version, order):
    assert ends(OfEagle(version, several(), ours=True), order) == [1, 1, 6, 7, 13]
    stock = ends(OfEagle(version, several(), ours=False), order)
    assert all(found >= least for found, least in zip(stock, LEAST, strict=True))
    assert stock[OWNER] > 6


@every_release("0.5.18")
@pytest.mark.parametrize("order", ORDERS)
def test_answers_with_dsparks_drafts_end_where_they_would_without(version, order):
    assert ends(OfDspark(version, several(), ours=True), order) == [1, 1, 6, 7, 13]
    assert ends(OfDspark(version, several(), ours=False), order)[OWNER] > 6


def mixed_pass(version, kind, *, ours, mended):
    """A step is in flight. -> by request: whether it is known to be too short, whether the pass's draw has no end, the
    count; by the release's own penalizers, which become the pass's."""
    asked = several()
    asked[0].sampling_params.frequency_penalty = 0.5
    batch = kind(version, asked, ours=ours)
    batch.prepare()
    for brought in (1, WIDTH):  # by the prompts' pass and by a step; that of the next one is not known yet
        for one in batch.reqs:
            one.output_ids.extend([OTHER] * brought)
        batch.prepare()

    def mix_with_running(prompts, running_batch):
        made, logits = running_batch.sampling_info.penalizer_orchestrator, torch.zeros(len(LEAST), VOCABULARY)
        type(made).apply(made, logits)
        return logits[:, END].isneginf().tolist(), [told[3] for told in running_batch.told()]

    mix = min_tokens.replace_mix(mix_with_running) if mended else mix_with_running
    return [len(one.output_ids) < least for one, least in zip(batch.reqs, LEAST, strict=True)], *mix(None, batch)


@every_release("0.5.19")
@pytest.mark.parametrize("kind", [OfEagle, OfDspark])
def test_in_a_mixed_pass_an_answer_that_is_too_short_does_not_end(version, kind):
    short, found, _ = mixed_pass(version, kind, ours=True, mended=True)
    assert found == short and short[-1] and not short[0]
    assert mixed_pass(version, kind, ours=False, mended=False)[1][-1]  # SGLang's own count
    assert not any(mixed_pass(version, kind, ours=True, mended=False)[1])  # why it is needed with ours


def test_a_mixed_pass_without_drafts_or_without_min_tokens_stays_sglangs():
    batch = OfEagle("0.5.23", several(), ours=True)
    batch.prepare()
    batch.spec_algorithm = algorithm("NONE")
    seen = []
    min_tokens.replace_mix(lambda prompts, running: seen.append(running))(None, batch)
    assert seen == [batch] and [told[3] for told in batch.told()] == [[max(1, least)] for least in LEAST]
    for asked in ([request()], []):
        plain = OfEagle("0.5.23", asked, ours=True)
        min_tokens.replace_mix(lambda prompts, running: seen.append(running))(None, plain)
    assert len(seen) == 3


@pytest.mark.parametrize("kind", [OfEagle, OfDspark])
def test_behind_a_retraction(kind):
    """The answer so far counts, whether it is known as one or a part of what the pass reads."""
    batch = kind("0.5.23", several(), ours=True)
    batch.said = [[OTHER] * 5 for _ in batch.reqs]
    assert ends(batch, "in turn") == [5, 5, 6, 7, 13]


def test_a_compact_verification():
    batch = OfDspark("0.5.23", several(), ours=True)
    logits, hidden = logits_of_blocks(), object()
    result = SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits))
    run = min_tokens.replace_run_compact(lambda self, *, batch, layout: (result, hidden))
    assert run(None, batch=batch, layout=None) == (result, hidden)
    early = logits.view(len(LEAST), WIDTH, -1)[:, :, END].isneginf()
    assert early.sum(1).tolist() == [0, 0, WIDTH, WIDTH, WIDTH]  # one token is there


def test_a_request_that_is_long_enough_is_asked_for_nothing():
    asked = several()
    for one in asked:
        one.output_ids.extend([OTHER] * 6)
    assert {row for row, *_ in min_tokens.early_ends(asked)} == {3, 4}
    asked[3].tokenizer = None
    assert {row for row, *_ in min_tokens.early_ends(asked)} == {4}
    assert min_tokens.early_ends([]) == []


@pytest.mark.parametrize("kind", [OfEagle, OfDspark])
@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_it_stays_sglangs(model, card, kind, opened, monkeypatch):
    opened(model, card)
    monkeypatch.setattr(min_tokens, "forbid", None)
    monkeypatch.setattr(dspark_penalties, "is_ours", lambda: True)  # without it nothing is forbidden with DSPARK
    found, stock = (ends(kind("0.5.23", several(), ours=ours), "overlap", 14) for ours in (True, False))
    assert found == stock
    mended, alone = (mixed_pass("0.5.23", kind, ours=True, mended=mended)[2] for mended in (True, False))
    assert mended == alone == [[3]] * len(LEAST)


def test_without_speculation_the_count_is_sglangs():
    for ours in (True, False):
        batch = OfEagle("0.5.23", several(), ours=ours)
        batch.spec_algorithm = algorithm("NONE")
        batch.prepare()
        assert [told[3] for told in batch.told()] == [[1]] * len(LEAST)


def test_every_end_is_one_and_what_is_not_there_is_none():
    tokenizer = SimpleNamespace(additional_stop_token_ids={3}, eos_token_id=4)
    params = SimpleNamespace(stop_token_ids={1})
    assert min_tokens.ends_of(SimpleNamespace(sampling_params=params, eos_token_ids={2}, tokenizer=tokenizer)) == {
        *range(1, 5)
    }
    params, tokenizer = SimpleNamespace(stop_token_ids=None), SimpleNamespace(additional_stop_token_ids=None)
    tokenizer.eos_token_id = None
    for one in (None, tokenizer):
        asked = SimpleNamespace(sampling_params=params, eos_token_ids=None, tokenizer=one)
        assert min_tokens.ends_of(asked) == set()


def test_releases_without_dspark_do_not_know_its_name():
    assert min_tokens.is_verified(SimpleNamespace(is_eagle=lambda: False)) is False

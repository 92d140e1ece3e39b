"""Where each release takes the argmax of a step's logits, run on the CPU: with ours in place it is asked of ours, of
the same numbers, and all else is as without."""

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.adapters import greedy_argmax as ours
from tests.patching.test_wheel_sampling import (
    DRAFTS,
    FIRST,
    GREEDY,
    SAMPLES,
    VOCABULARY,
    eagle_sample_of,
    opened,  # noqa: F401
    requests_of,
    sampler_of,
    tied,
    verified,
)
from tests.patching.test_wheel_wo_a import QUIET, take
from tests.patching.wheels import every_release, fetch, since

OURS, WORKER = ours._ours, "sglang.srt.speculative.eagle_worker_v2"


@pytest.fixture(autouse=True)
def asked(monkeypatch, opened):  # noqa: F811
    """The shapes that ours was asked for."""
    opened("deepseek_v4")
    asked = []

    def argmax(x, dim, keepdim=False):
        asked.append(tuple(x.shape))
        return torch.argmax(x, dim, keepdim)

    ours._serve.cache_clear()
    monkeypatch.setattr(ours, "_ours", argmax)
    monkeypatch.setattr(ours, "FEWEST", VOCABULARY)
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    yield asked
    ours._serve.cache_clear()


@every_release(FIRST)
def test_a_step_of_sampling(version, asked, monkeypatch):
    logits = tied(3)

    def taken(wheel, names, qualname, *module):
        found = take(wheel, names, qualname, *module)
        return ours.replace_forward(found) if qualname == "Sampler.forward" else found

    stock_step = sampler_of(version, patched=False)
    monkeypatch.setattr("tests.patching.test_wheel_sampling.take", taken)
    step = sampler_of(version, patched=False)
    for top_ks, is_ours in (([GREEDY] * 3, True), ([GREEDY, SAMPLES, GREEDY], False)):
        stock = stock_step(logits, requests_of(version, top_ks))
        asked.clear()
        tokens, logprobs = step(logits, requests_of(version, top_ks))
        assert tokens == stock[0] and torch.equal(logprobs, stock[1]) and type(logprobs) is torch.Tensor
        assert asked == ([(3, VOCABULARY)] if is_ours else [])


@every_release(FIRST)
@pytest.mark.parametrize("top_ks", [[GREEDY] * 3, [GREEDY, SAMPLES, 40]], ids=["greedy", "mixed"])
def test_a_verification(version, top_ks, asked):
    stock = verified(version, False, top_ks, DRAFTS)
    asked.clear()
    sample = ours.replace_eagle_sample(eagle_sample_of(version, False))
    assert verified(version, False, top_ks, DRAFTS, sample=sample) == stock
    assert asked == ([(12, VOCABULARY)] if top_ks == [GREEDY] * 3 else [])
    assert verified(version, False, [], [], is_idle=True, sample=sample) == [0, 0, 0]


class Graphs:
    """The runner of the pass over what was verified: two requests of four rows, whose logits are `logits`."""

    def __init__(self, topk, draws, logits):
        self.eagle_worker = SimpleNamespace(topk=topk)
        self.model_runner = SimpleNamespace(server_args=SimpleNamespace(speculative_use_rejection_sampling=draws))
        self.logits = logits

    def can_run_graph(self, batch):
        return True

    @ours.replace_execute
    def execute(self, *_):
        return SimpleNamespace(next_token_logits=self.logits, hidden_states=torch.zeros(len(self.logits), 4))


def drafted(version, graphs):
    """The first drafts of the next step, by the release's own code behind its graph."""
    made = SimpleNamespace(
        topk=graphs.eagle_worker.topk, speculative_num_draft_tokens=4, device="cpu", plan_stream=None,
        plan_stream_ctx=contextlib.nullcontext(), prepare_for_draft_extend=QUIET,
        cuda_graph_runner_for_draft_extend=graphs,
        draft_runner=SimpleNamespace(canary_manager=None), seed_dsa_topk_from_draft_extend=False, hot_token_id=None,
        server_args=SimpleNamespace(speculative_use_rejection_sampling=False), speculative_num_steps=3,
    )  # fmt: skip
    names = {"torch": torch, "contextlib": contextlib, "_is_hip": False, "_is_cuda": True}
    names["get_spec"] = lambda: SimpleNamespace(speculative_use_rejection_sampling=False)
    names["renorm_draft_probs"] = lambda logits, *_: torch.softmax(logits, -1)
    names["fast_topk"] = lambda x, n, dim: torch.topk(x, n, dim)
    following = SimpleNamespace()
    result = SimpleNamespace(
        accept_lens=torch.tensor([2, 4], dtype=torch.int32), next_token_ids=torch.arange(8, dtype=torch.int32),
        logits_output=SimpleNamespace(hidden_states=torch.zeros(8, 4)), next_draft_input=following,
        prepared_draft_extend_inputs=None, new_seq_lens=torch.tensor([9, 9]),
    )  # fmt: skip
    batch = SimpleNamespace(seq_lens=torch.tensor([7, 5]), sampling_info=requests_of(version, [GREEDY] * 2))
    take(fetch(version), names, "EagleDraftWorker._draft_extend_for_decode", WORKER)(made, batch, result)
    return following.topk_index


@every_release(FIRST)
def test_what_follows_verification(version, asked):
    rows = 2 if since(version, "0.5.20") else 8  # since then the head has the last accepted rows alone
    logits = tied(rows)
    found = drafted(version, Graphs(1, False, logits))
    assert found.tolist() == [[7], [7]] and type(found) is torch.Tensor
    assert asked == [(2, VOCABULARY)]
    asked.clear()
    assert drafted(version, Graphs(2, False, logits)).shape == (2, 2) and not asked


def test_it_is_drawn_by_what_the_worker_asks(monkeypatch):
    """--speculative-use-block-verification turns it on (0.5.23) in what SGLang resolves, not in its arguments."""
    context = SimpleNamespace(get_spec=lambda: SimpleNamespace(speculative_use_rejection_sampling=True))
    monkeypatch.setitem(sys.modules, ours.CONTEXT, context)
    assert type(Graphs(1, False, tied(2)).execute().next_token_logits) is torch.Tensor


@pytest.mark.parametrize("topk, draws", [(2, False), (1, True)])
def test_drafts_that_are_drawn_or_several_get_plain_logits(topk, draws):
    assert type(Graphs(topk, draws, tied(2)).execute().next_token_logits) is torch.Tensor


def test_a_batch_that_samples_gets_plain_logits():
    seen = []

    def told(*given):
        seen.append(type(next(one for one in given if hasattr(one, "next_token_logits")).next_token_logits))

    forward, eagle_sample = ours.replace_forward(told), ours.replace_eagle_sample(told)
    for top_ks in ([GREEDY] * 2, [GREEDY, SAMPLES]):
        info, output = requests_of("0.5.23", top_ks), SimpleNamespace(next_token_logits=tied(2))
        forward(None, output, info)
        mode = SimpleNamespace(is_idle=lambda: False)
        eagle_sample(None, SimpleNamespace(sampling_info=info, forward_mode=mode), output)
    assert seen == [ours.StepLogits] * 2 + [torch.Tensor] * 2


def test_whose_argmax_it_is(monkeypatch):
    """Of a step's rows, however long they are, and of no more than is known of the call."""
    monkeypatch.setattr(ours, "STEP_ROWS", 8)
    assert ours.takes(tied(8), -1) and ours.takes(tied(8), dim=1) and not ours.takes(tied(8), 0)
    assert not ours.takes(tied(9), -1) and not ours.takes(tied(8), -1, out=torch.empty(8)) and not ours.takes(tied(8))


def test_a_kept_dimension(monkeypatch):
    monkeypatch.setattr(ours.op, "row_argmax", lambda x: x.argmax(-1))
    assert OURS(tied(3), -1).tolist() == [7] * 3 and OURS(tied(3), -1, True).tolist() == [[7]] * 3


@pytest.mark.parametrize("keep", ["1", "ours"])
def test_shadow_mode_compares_each_form_of_the_call(monkeypatch, keep):
    """dim is given by name in each release; a comparison that does not take it ends the server."""
    monkeypatch.setattr(shadow, "settings", lambda: settings.Settings(shadow=keep))
    shadow.reset()
    ours._serve.cache_clear()
    logits = tied(3).as_subclass(ours.StepLogits)
    forms = [torch.argmax(logits, dim=-1), logits.argmax(dim=-1), torch.argmax(logits, -1), logits.argmax(-1, True)]
    assert [found.flatten().tolist() for found in forms] == [[7] * 3] * 4
    (record,) = shadow.report()
    assert (record["patch"], record["calls"], record["bad_calls"]) == (ours.PATCH, 4, 0)
    assert record["shape"] == {"rows": 3, "vocabulary": VOCABULARY}
    shadow.reset()


def test_elsewhere_all_is_sglangs(opened):  # noqa: F811
    opened("llama")
    assert type(Graphs(1, False, tied(2)).execute().next_token_logits) is torch.Tensor


def test_what_is_lent_is_given_back():
    logits, output = tied(2), SimpleNamespace()
    output.next_token_logits = logits
    assert type(ours.lend(lambda: output.next_token_logits, output)) is ours.StepLogits
    assert output.next_token_logits is logits
    with pytest.raises(ValueError):
        ours.lend(lambda: int("x"), output)
    assert output.next_token_logits is logits
    other = tied(3)
    ours.lend(lambda: setattr(output, "next_token_logits", other), output)
    assert output.next_token_logits is other  # the callee's own, where it put another in its place


def test_all_but_the_argmax_of_a_steps_rows_is_torchs(asked):
    plain = tied(4)
    logits = plain.as_subclass(ours.StepLogits)
    for call in (
        lambda x: x.argmax(0), lambda x: x.argmax(), lambda x: torch.argmax(x.double(), -1), lambda x: x + 1,
        lambda x: x.softmax(-1), lambda x: x[:, :4].contiguous().argmax(-1), lambda x: torch.argmax(x.T, -1),
    ):  # fmt: skip
        found = call(logits)
        assert torch.equal(found, call(plain)) and not asked
    assert torch.equal(logits.argmax(-1), plain.argmax(-1)) and asked.pop() == (4, VOCABULARY)
    assert torch.equal(torch.argmax(logits, dim=1, keepdim=True), plain.argmax(1, keepdim=True)) and asked.pop()
    assert torch.equal(logits[torch.tensor([2, 0])].argmax(-1), plain[[2, 0]].argmax(-1)) and asked.pop() == (2, 32)
    logits.add_(1)
    assert torch.equal(logits, tied(4) + 1) and logits.shape == (4, VOCABULARY)

"""min_p where drafts are verified: the release's own EAGLE verification on the CPU, over stand-ins for its kernels,
with ours in it and without; and what stays without us in the other releases."""

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.adapters import sampling
from deepseek_v4_sm120.sglang_patches.fixes import min_p_verify
from deepseek_v4_sm120.sglang_patches.fixes.min_p_verify import replace_eagle_sample, replace_verify
from tests.patching.test_wheel_sampling import DRAFTS, EAGLE, GREEDY, SAMPLES, WIDTH, eagle_sample_of, verified, walk
from tests.patching.wheels import content, every_release, fetch, since

VERSION = "0.5.23"
MIN_PS = (0.3, 0.0, 0.05)
TREE, CHAIN = "tree_speculative_sampling_target_only", "chain_speculative_sampling_triton"

pytestmark = pytest.mark.usefixtures("opened")


def least_likely(probs):
    """What a draw may give at the worst."""
    return torch.where(probs > 0, probs, 2.0).argmin(-1)


def drawn(*, ours, top_ks=(SAMPLES, SAMPLES, SAMPLES), around=lambda sample: sample, **asked):
    """(the least likely tokens that verification may draw, the probabilities that it draws from)."""
    seen = []

    def draws(*, predicts, accept_index, accept_token_num, candidates, target_probs, **_):
        seen.append(target_probs.clone())
        walk(candidates, least_likely(target_probs), predicts, accept_index, accept_token_num)

    sample = eagle_sample_of(VERSION, False, replace_verify(draws) if ours else draws)
    sample = around(replace_eagle_sample(sample) if ours else sample)
    given = {"need_min_p_sampling": True, "min_ps": torch.tensor(MIN_PS)} | asked
    tokens = verified(VERSION, False, list(top_ks), DRAFTS, sample=sample, **given)
    return tokens, seen


@pytest.mark.parametrize("top_ks", [(SAMPLES, SAMPLES, SAMPLES), (20, SAMPLES, 4)], ids=["", "top_k"])
def test_what_min_p_forbids_is_not_drawn(top_ks):
    (_, (stock,)), (_, (probs,)) = (drawn(ours=ours, top_ks=top_ks) for ours in (False, True))
    for request, min_p in enumerate(MIN_PS):
        allowed = stock[request] >= min_p * stock[request].amax(-1, keepdim=True)
        is_there = stock[request] > 0
        assert torch.equal(probs[request] > 0, allowed & is_there)
        kept = torch.where(allowed, stock[request], 0.0)
        torch.testing.assert_close(probs[request], kept / kept.sum(-1, keepdim=True))
        assert bool((is_there & ~allowed).any()) == (min_p > 0 and top_ks[request] != 4)
    assert torch.equal(probs[1], stock[1])  # without min_p: to the bit


def test_sglang_draws_what_min_p_forbids():
    (stock, (probs,)), (ours, _) = (drawn(ours=ours) for ours in (False, True))
    assert stock[0] != ours[0] and stock[1] == ours[1]
    (token,) = stock[0][2]
    assert 0 < probs[0, 0, token] < MIN_PS[0] * probs[0, 0].max()
    (token,) = ours[0][2]
    assert probs[0, 0, token] >= MIN_PS[0] * probs[0, 0].max()


def test_batches_that_ask_for_none_are_verified_as_without_us():
    for other in ({"need_min_p_sampling": False}, {"top_ks": (GREEDY,) * 3}, {"is_all_greedy": True}):
        (tokens, probs), (theirs, their_probs) = (drawn(ours=ours, **other) for ours in (True, False))
        assert tokens == theirs and all(map(torch.equal, probs, their_probs))
    assert drawn(ours=True, is_idle=True) == ([0, 0, 0], [])


def test_the_next_batch_knows_nothing_of_this_one():
    def breaks(*, target_probs, **_):
        raise OSError("no kernel")

    kernel, probs = replace_verify(breaks), torch.full((1, WIDTH, 4), 0.25)
    sample = replace_eagle_sample(eagle_sample_of(VERSION, False, kernel))
    with pytest.raises(OSError, match="no kernel"):
        verified(VERSION, False, [SAMPLES] * 3, DRAFTS, sample=sample, need_min_p_sampling=True, min_ps=torch.ones(3))
    probs[0, 0, 0] = 0.5
    before = probs.clone()
    with pytest.raises(OSError, match="no kernel"):
        kernel(target_probs=probs)
    assert torch.equal(probs, before)


def test_a_later_release_that_calls_it_otherwise_verifies_as_without_us(monkeypatch):
    told, seen = [], []
    monkeypatch.setattr(min_p_verify.report, "warn_once", told.append)
    kernel = replace_verify(lambda *args, **given: seen.append((args, given)))
    monkeypatch.setattr(min_p_verify.of_batch, "min_ps", torch.ones(3))
    kernel("probabilities", other=1)
    assert seen == [(("probabilities",), {"other": 1})]
    assert told == ["min_p is ignored where drafts are verified: SGLang gives <lambda> no target_probs"]


def test_beside_a_reproducible_server():
    """Whichever of the two is in front: a greedy request has its argmax, the others what min_p leaves."""
    top_ks = (SAMPLES, GREEDY, SAMPLES)
    alone, _ = drawn(ours=True, top_ks=top_ks)
    in_front, _ = drawn(ours=True, top_ks=top_ks, around=sampling.replace_eagle_sample)
    assert [in_front[0], in_front[2]] == [alone[0], alone[2]] and in_front[1][2] == [7]


@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_it_stays_sglangs(model, card, opened):
    opened(model, card)
    (tokens, (probs,)), (theirs, (their_probs,)) = (drawn(ours=ours) for ours in (True, False))
    assert tokens == theirs and torch.equal(probs, their_probs)


def test_a_machine_without_the_kernel():
    assert replace_verify(None) is None


@every_release("0.5.14")
def test_sglangs_verification_does_not_know_min_p(version):
    """And what draws is a name of the module from 0.5.23 on; before, it is imported at the call."""
    text = content(fetch(version), f"{EAGLE.replace('.', '/')}.py")
    sample = text.partition("def eagle_sample(")[2].partition("\ndef ")[0]
    assert "top_p_renorm_prob(" in sample and f"{TREE}" in sample and CHAIN in sample
    assert "min_p" not in sample
    at_call = sample.partition("Sample tokens")[2].partition("sampling_fn(")[0]
    assert (f"    {TREE},\n" in at_call) == (not since(version, VERSION))


def test_what_has_just_as_much_as_is_asked_for_stays():
    """Of a min_p of 1 the likeliest, all of them where several are; of 0 everything, bit for bit."""
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125]).repeat(3, 1, 1)
    probs[0, 0] = torch.tensor([0.375, 0.375, 0.25, 0.0])
    min_p_verify.keep_min_p(probs, torch.tensor([1.0, 0.5, 0.0]))
    expected = [[0.5, 0.5, 0.0, 0.0], [2 / 3, 1 / 3, 0.0, 0.0], [0.5, 0.25, 0.125, 0.125]]
    torch.testing.assert_close(probs[:, 0], torch.tensor(expected))

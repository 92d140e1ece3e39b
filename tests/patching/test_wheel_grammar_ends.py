"""The end of a grammar that min_tokens forbids: each release's own mask, over a stand-in for XGrammar's kernel, behind
its own penalizers, with ours and without; and that every way of decoding goes through it."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes.grammar_ends import replace_apply
from deepseek_v4_sm120.sglang_patches.rows.scheduler import XGRAMMAR
from tests.patching.test_wheel_penalties import ONE_BY_ONE, VOCABULARY, Batch, answer, request
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import content, every_release, fetch, members, since

END, ALL = 5, range(VOCABULARY)

pytestmark = pytest.mark.usefixtures("opened")


class OnTheGpu(torch.Tensor):
    """Logits for which a release takes XGrammar's kernel."""

    device = SimpleNamespace(type="cuda")


def mask_of(*rows):
    """A bit for each token that its row allows: [rows, words] int32."""
    return torch.tensor([[sum(1 << token for token in allowed)] for allowed in rows], dtype=torch.int32)


def apply_bits(logits, bitmask, indices=None):
    """XGrammar's kernel, in place."""
    allowed = (bitmask >> torch.arange(logits.shape[-1])) & 1 == 1
    logits.masked_fill_(~allowed, -math.inf)


def masked(version, logits, vocab_mask, *, ours, strict=False):
    """By the release's own grammar; strict: by its backend, as --enable-strict-thinking has it for all requests."""
    names = {"apply_token_bitmask_inplace_triton": replace_apply(apply_bits) if ours else apply_bits}
    kind = "XGrammarGrammarBackend" if strict else "XGrammarGrammar"
    apply = take(fetch(version), names, f"{kind}.apply_vocab_mask", XGRAMMAR)
    logits = logits.clone().as_subclass(OnTheGpu)
    (apply.__func__ if strict else functools.partial(apply, None))(logits=logits, vocab_mask=vocab_mask)
    return logits.as_subclass(torch.Tensor)


def forbidden(*rows):
    """Logits where these tokens are -inf."""
    logits = torch.linspace(-2.0, 2.0, VOCABULARY).repeat(len(rows), 1)
    for row, tokens in enumerate(rows):
        logits[row, list(tokens)] = -math.inf
    return logits


@every_release()
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_what_the_grammar_leaves_alone_is_drawn(version, strict):
    logits, vocab_mask = forbidden([END], [END], [END, 7]), mask_of([END], ALL, [END, 7])
    stock, found = (masked(version, logits, vocab_mask, ours=ours, strict=strict) for ours in (False, True))
    assert stock[0].isneginf().all() and stock[0].argmax() == 0  # so the row is needed: a token that nothing allows
    with pytest.raises(RuntimeError, match="probability tensor"):  # as up to 0.5.19 it is drawn
        torch.multinomial(stock.softmax(-1), 1)
    probs = found.softmax(-1)
    assert probs[0, END] == 1.0 and probs[2, [END, 7]].tolist() == [0.5, 0.5]
    assert torch.equal(found[1], stock[1])


@every_release()
def test_rows_that_have_a_token_left_keep_their_bits(version):
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(3))
    logits[1, 4] = math.nan
    vocab_mask = mask_of(ALL, [4, 9], [0], [1, 2, 3])
    stock, found = (masked(version, logits, vocab_mask, ours=ours) for ours in (False, True))
    assert torch.equal(stock.view(torch.int32), found.view(torch.int32))


@every_release()
def test_of_a_grammar_that_allows_nothing_nothing_is_left(version):
    assert masked(version, forbidden([]), mask_of([]), ours=True).isneginf().all()


@every_release("0.5.14")
def test_a_schema_that_is_complete_before_min_tokens(version):
    """Behind the release's own penalizers; a request without min_tokens is beside it."""
    requests = [request(min_new_tokens=40), request(frequency_penalty=0.5)]
    requests[0].tokenizer.eos_token_id = END
    batch = Batch(version, requests, ours=False)
    answer(batch, ONE_BY_ONE[:2], "in turn")
    logits = forbidden([], [])
    batch.apply(batch.sampling_info.penalizer_orchestrator, logits)
    assert logits[0].isneginf().nonzero().flatten().tolist() == [END]
    stock, found = (masked(version, logits, mask_of([END], ALL), ours=ours) for ours in (False, True))
    assert stock[0].argmax() == 0 and found[0].argmax() == END and torch.equal(found[1], logits[1])


@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_it_stays_sglangs(model, card, opened):
    opened(model, card)
    assert masked("0.5.23", forbidden([END]), mask_of([END]), ours=True).isneginf().all()


def after(text, *words):
    """Whether the words stand in this order in a text."""
    places = [text.find(word) for word in words]
    return -1 not in places and places == sorted(places)


@every_release("0.5.14")
def test_every_way_of_decoding_masks_behind_its_penalties(version):
    """Steps, EAGLE's verification and DSPARK's."""
    named = since(version, "0.5.17")  # a batch's mask has a method of its own, which asks the grammar's
    applies = "grammar_mask.apply(" if named else "apply_mask_func("
    info = content(fetch(version), "sglang/srt/sampling/sampling_batch_info.py")
    penalties = "self._apply_pre_grammar_logits_transforms(" if since(version, "0.5.19") else "acc_scaling_penalties"
    assert after(info.partition("def apply_logits_bias(")[2], penalties, applies)
    eagle = content(fetch(version), "sglang/srt/speculative/eagle_utils.py").partition("def eagle_sample(")[2]
    assert after(eagle, "acc_scaling_penalties", applies if named else "grammar.apply_vocab_mask(")
    dspark = "sglang/srt/speculative/dspark_components/dspark_worker_v2.py"
    if named and dspark in members(fetch(version)):
        assert after(content(fetch(version), dspark), "run_non_compact(", "grammar_mask.apply(")
    base = content(fetch(version), "sglang/srt/constrained/base_grammar_backend.py")
    assert not named or "self.grammar.apply_vocab_mask(logits=logits, vocab_mask=self.vocab_mask)" in base

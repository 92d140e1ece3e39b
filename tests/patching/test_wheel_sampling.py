"""SGLang's own sampling and EAGLE's verification of each release, run on the CPU over stand-ins for its kernels, with a
greedy request beside one that samples: alone, beside it, and beside it with ours in place."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches import device_gate, models_served
from deepseek_v4_sm120.sglang_patches.adapters import sampling
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import every_release, fetch, since

FIRST, LOG_SOFTMAX_SINCE = "0.5.14", "0.5.17"
SAMPLER, EAGLE = "sglang.srt.layers.sampler", "sglang.srt.speculative.eagle_utils"
VOCABULARY, WIDTH = 32, 4
GREEDY, SAMPLES = 1, 1 << 30  # a request's top_k, as SGLang writes both


@pytest.fixture
def opened(monkeypatch):
    """opened(model_type, by the card): the gate, behind its own question for the model."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def opened(model_type, card=True):
        told = None if model_type is None else {"model_type": model_type}
        monkeypatch.setattr(models_served, "announced", lambda: told)
        monkeypatch.setattr(device_gate, "_ask", lambda index: card)

    return opened


@pytest.fixture(params=[False, True], ids=["SGLang's", "ours"])
def ours(request, opened):
    opened("deepseek_v4")
    return request.param


def requests_of(version, top_ks):
    """SamplingBatchInfo of as many requests; those that sample have a temperature of 0.7."""
    samples = torch.tensor(top_ks) != GREEDY
    counted = {"is_any_greedy": bool(not samples.all())} if since(version, "0.5.16") else {}
    return SimpleNamespace(
        **counted,
        top_ks=torch.tensor(top_ks, dtype=torch.int32),
        temperatures=torch.where(samples, 0.7, 1.0)[:, None],
        is_all_greedy=not samples.any(),
        need_top_k_sampling=any(k != SAMPLES for k in top_ks),
        **dict.fromkeys(("need_top_p_sampling", "need_min_p_sampling", "has_custom_logit_processor"), False),
        has_watermark_candidates=False,
        top_ps=torch.ones(len(top_ks)),
        **dict.fromkeys(("min_ps", "sampling_seed", "return_sampling_masks", "grammars"), None),
        **dict.fromkeys(("sampling_mask_batch_indices", "sampling_support_logprobs_capture_indices"), None),
        **dict.fromkeys(("acc_additive_penalties", "acc_scaling_penalties", "logit_bias"), None),
    )


def tied(rows):
    """Logits whose greatest is there three times."""
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(5))
    logits[:, [7, 11, 30]] = logits.max(1, keepdim=True).values + 0.5
    return logits


def last_of_the_greatest(probs):
    """What a draw among equals may give, and an argmax does not."""
    return probs.shape[-1] - 1 - probs.flip(-1).argmax(-1)


# ---- a step of decoding


def sampler_of(version, patched):
    made = SimpleNamespace(rl_on_policy_target=None)
    made.enable_deterministic = made.use_log_softmax_logprob = made.use_ascend_backend = False
    made._preprocess_logits = lambda logits, info: logits
    made._sync_token_ids_across_tp = lambda *_: None
    kept = {}

    class Logprobs:
        def compute_logprobs(self, logprobs, tops, ids, tokens):
            kept["logprobs"] = logprobs.clone()
            return SimpleNamespace(write_output_to=lambda output: None)

    made.output_logprob_processor = Logprobs()
    made._attach_logprobs_to_output = lambda output, logprobs, *_: kept.update(logprobs=logprobs.clone())
    backend = SimpleNamespace(sampling_backend="flashinfer")

    def drawn(probs, *_, **__):
        torch.testing.assert_close(probs.sum(-1), torch.ones(len(probs)))
        return last_of_the_greatest(probs).int()

    names = {
        "torch": torch,
        "top_k_top_p_sampling_from_probs": drawn,
        "sampler_softmax": lambda logits: torch.softmax(logits, -1),
        "get_exec": lambda: SimpleNamespace(kernel=backend),
        **dict.fromkeys(("get_global_server_args", "get_server_args", "get_flags"), lambda: backend),
        "get_top_logprobs": lambda logprobs, *_, **__: (kept.update(logprobs=logprobs.clone()), None),
        **dict.fromkeys(("SGLANG_RETURN_ORIGINAL_LOGPROB", "SYNC_TOKEN_IDS_ACROSS_TP", "_use_aiter", "_is_hip"), False),
    }
    wheel = fetch(version)
    draw = take(wheel, names, "Sampler._sample_from_probs", SAMPLER)
    if patched:
        draw = sampling.replace_sample_from_probs(draw)
        if since(version, LOG_SOFTMAX_SINCE):
            sampling.replace_sampler_init(lambda self: None)(made)
    made._sample_from_probs = lambda *given: draw(made, *given)
    forward = take(wheel, names, "Sampler.forward", SAMPLER)

    def step(logits, info):
        output = SimpleNamespace(next_token_logits=logits.clone())
        rows = len(logits)
        tokens = forward(made, output, info, True, [0] * rows, [None] * rows, torch.zeros(rows, dtype=torch.int64))
        return tokens.tolist(), kept["logprobs"]

    return step


@every_release(FIRST)
def test_a_greedy_request_beside_one_that_samples(version, ours):
    logits = tied(3)
    alone = sampler_of(version, patched=False)(logits, requests_of(version, [GREEDY] * 3))
    tokens, logprobs = sampler_of(version, patched=ours)(logits, requests_of(version, [GREEDY, SAMPLES, GREEDY]))
    assert alone[0] == [7, 7, 7] and tokens == ([7, 30, 7] if ours else [30, 30, 30])
    if ours and since(version, LOG_SOFTMAX_SINCE):
        assert torch.equal(logprobs[0::2], alone[1][0::2])
    torch.testing.assert_close(logprobs[0::2], alone[1][0::2])
    # what samples is drawn from what it was
    torch.testing.assert_close(logprobs[1], torch.log_softmax(logits[1] / 0.7, -1))


@every_release(FIRST)
def test_who_samples_from_a_few_is_not_greedy(version, ours):
    tokens, _ = sampler_of(version, patched=ours)(tied(3), requests_of(version, [40, GREEDY, 2]))
    assert tokens == [30, 7 if ours else 30, 30]


@every_release(FIRST)
def test_requests_that_all_sample(version, ours):
    tokens, _ = sampler_of(version, patched=ours)(tied(2), requests_of(version, [SAMPLES, 40]))
    assert tokens == [30, 30]


@every_release(FIRST)
@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_all_is_sglangs(version, model, card, opened):
    opened(model, card)
    mixed = requests_of(version, [GREEDY, SAMPLES])
    (tokens, logprobs), (theirs, their_logprobs) = (sampler_of(version, p)(tied(2), mixed) for p in (True, False))
    assert tokens == theirs == [30, 30] and torch.equal(logprobs, their_logprobs)
    top_ks = [GREEDY, SAMPLES, GREEDY]
    assert verified(version, True, top_ks, DRAFTS) == verified(version, False, top_ks, DRAFTS)


# ---- a verification


def walk(candidates, targets, predicts, accept_index, accept_token_num):
    """Of a chain of drafts: as many as are what `targets` says are accepted, and one follows."""
    for request, drafts in enumerate(candidates.tolist()):
        accepted = 0
        while accepted + 1 < len(drafts) and drafts[accepted + 1] == targets[request, accepted]:
            accepted += 1
        for place in range(accepted + 1):
            predicts[request * len(drafts) + place] = targets[request, place]
            accept_index[request, place] = request * len(drafts) + place
        accept_token_num[request] = accepted


def verify_greedily(*, predicts, accept_index, accept_token_num, candidates, target_predict, topk, **retrieved):
    assert topk == 1 and set(retrieved) == {"retrieve_index", "retrieve_next_token", "retrieve_next_sibling"}
    walk(candidates, target_predict, predicts, accept_index, accept_token_num)
    return predicts, accept_index, accept_token_num


def draw(*, predicts, accept_index, accept_token_num, candidates, target_probs, **_):
    walk(candidates, last_of_the_greatest(target_probs), predicts, accept_index, accept_token_num)


def keep_top_k(probs, top_ks):
    """FlashInfer's: whoever is not less than the k-th greatest stays."""
    order = probs.sort(-1, descending=True).values
    least = order.gather(-1, (top_ks.long().clamp(max=VOCABULARY) - 1)[:, None])
    kept = probs * (probs >= least)
    return kept / kept.sum(-1, keepdim=True)


def eagle_sample_of(version, patched, draws=draw):
    one_card = SimpleNamespace(world_size=1)
    parallel = SimpleNamespace(attn_tp_group=one_card, tp_group=one_card)
    settings = SimpleNamespace(
        speculative_use_rejection_sampling=False,
        **dict.fromkeys(("speculative_accept_threshold_single", "speculative_accept_threshold_acc"), 1.0),
    )
    given = {
        "F": torch.nn.functional,
        "torch.nn.functional": torch.nn.functional,
        "SIMULATE_ACC_LEN": 0,
        "get_tp_group": lambda: one_card,
        "get_parallel": lambda: parallel,
        "is_dp_attention_enabled": lambda: False,
        **dict.fromkeys(("get_global_server_args", "get_server_args", "get_spec"), lambda: settings),
        **dict.fromkeys(("top_k_renorm_prob", "top_k_renorm_probs"), keep_top_k),
        **dict.fromkeys(("top_p_renorm_prob", "top_p_renorm_probs"), lambda probs, top_ps: probs),
        "tree_speculative_sampling_target_only": draws,
        "borrow_graph_pool": lambda user: contextlib.nullcontext(),
    }
    names = {
        "torch": torch,
        "GIVEN": given,
        "sampling_softmax": lambda logits, temperatures: torch.softmax(logits / temperatures, -1),
        "verify_tree_greedy_func": verify_greedily,
        "_verify_coins": lambda **_: (None, None),
        "_verify_uses_greedy": lambda is_all_greedy, **_: is_all_greedy,
        "_can_use_sparse_uno_tree_target_sampling": lambda *_: False,
        **dict.fromkeys(("_is_cpu", "_is_npu", "_is_hip", "_is_xpu"), False),
        "_is_cuda": True,
        **given,
    }
    found = take(fetch(version), names, "eagle_sample", EAGLE)
    return sampling.replace_eagle_sample(found) if patched else found


class Mask:
    """A grammar that takes the first of the greatest away from the last request."""

    def apply(self, logits, **_):
        logits[-WIDTH:, 7] = -torch.inf

    apply_vocab_mask = apply


def verified(version, patched, top_ks, drafts, mask=None, is_idle=False, sample=None, **asked):
    """(tokens, how many, places) of requests with those drafts behind their last token, by `sample` or the release's
    own. asked: of the requests."""
    logits = tied(len(top_ks) * WIDTH)
    width = {"draft_token_num": WIDTH, "max_tree_depth": WIDTH, "tree_topk": 1, "grammar": Mask()}
    retrieved = dict.fromkeys(("retrieve_index", "retrieve_next_token", "retrieve_next_sibling"))
    verify_input = SimpleNamespace(draft_token=torch.tensor(drafts).flatten(), **width, **retrieved)
    batch = SimpleNamespace(
        device="cpu", forward_mode=SimpleNamespace(is_idle=lambda: is_idle), seq_lens=torch.ones(len(top_ks)),
        sampling_info=requests_of(version, top_ks), return_logprob=False,
    )  # fmt: skip
    vars(batch.sampling_info).update(asked)
    output = SimpleNamespace(next_token_logits=logits)
    sample = sample or eagle_sample_of(version, patched)
    predict, lengths, accepted = sample(verify_input, batch, output, mask)
    assert (predict.dtype, lengths.dtype, accepted.dtype) == (torch.int32,) * 3
    if is_idle:
        return [predict.numel(), lengths.numel(), accepted.numel()]
    return [
        (lengths[i].item(), accepted[i].tolist(), predict[accepted[i][accepted[i] >= 0].long()].tolist())
        for i in range(len(top_ks))
    ]


DRAFTS = [[3, 7, 7, 9], [3, 30, 9, 9], [3, 7, 7, 7]]


@every_release(FIRST)
@pytest.mark.parametrize("mask", [None, Mask()], ids=["", "grammar"])
def test_a_greedy_request_is_verified_as_alone(version, ours, mask):
    alone = verified(version, False, [GREEDY] * 3, DRAFTS, mask)
    drawn = verified(version, False, [SAMPLES] * 3, DRAFTS, mask)
    mixed = verified(version, ours, [GREEDY, SAMPLES, GREEDY], DRAFTS, mask)
    assert alone[0] == (3, [0, 1, 2, -1], [7, 7, 7]) and alone[2][2] == ([7] * 4 if mask is None else [11])
    assert drawn[1] == (2, [4, 5, -1, -1], [30, 30]) and drawn[0][2] == drawn[2][2] == [30]
    assert mixed == ([alone[0], drawn[1], alone[2]] if ours else drawn)


@every_release(FIRST)
def test_other_batches_are_verified_as_without_us(version, opened):
    opened("deepseek_v4")
    for top_ks in ([GREEDY] * 3, [SAMPLES] * 3, [SAMPLES, 40, 5]):
        assert verified(version, True, top_ks, DRAFTS) == verified(version, False, top_ks, DRAFTS)
    mixed = [GREEDY, SAMPLES, GREEDY]
    assert verified(version, True, mixed, DRAFTS, is_idle=True) == [0, 0, 0]
    # with a watermark the logits that are verified may be another copy than the one that is left
    marked = {"has_watermark_candidates": True}
    assert verified(version, True, mixed, DRAFTS, **marked) == verified(version, False, mixed, DRAFTS, **marked)

"""The drafts' head on processors, models and heads as SGLang makes them; the reference is in the operator's place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.ops.bf16_linear_draft_head import draft_head
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.reference.bf16_linear_draft_head import draft_head as reference
from deepseek_v4_sm120.sglang_patches import device_gate, models_served, shadow
from deepseek_v4_sm120.sglang_patches.adapters import bf16_linear_draft_head as adapter
from deepseek_v4_sm120.sglang_patches.adapters.kept_weights import KeptWeights

INPUTS, OUTPUTS = 1024, 320


class UnquantizedEmbeddingMethod:
    pass


class Head:
    def __init__(self, weight, **given):
        self.weight, self.quant_method = weight, UnquantizedEmbeddingMethod()
        vars(self).update(given)


class Processor:
    def __init__(self, **given):
        self.use_fp32_lm_head, self.rl_on_policy_target = False, None
        vars(self).update(given)


def stock(self, hidden_states, lm_head, embedding_bias=None, **kwargs):
    out = hidden_states.float() @ lm_head.weight.float().T
    return out if self.use_fp32_lm_head else out.bfloat16()


def random(rows, seed, inputs=INPUTS):
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)).bfloat16()


def parameter(seed=1):
    return torch.nn.Parameter(random(OUTPUTS, seed), requires_grad=False)


@pytest.fixture
def served(monkeypatch):
    """The gate is open for the CPU; the reference computes what passes the operator's own checks."""
    shapes = []

    def operator(x, copy, weight, *, out_dtype):
        with pytest.raises(RuntimeError, match="CUDA"):  # all else is right
            draft_head(x, copy, weight, out_dtype=out_dtype)
        shapes.append((tuple(x.shape), tuple(weight.shape)))
        return reference(x, copy, weight).to(out_dtype)

    monkeypatch.setattr(models_served, "announced", lambda: {"model_type": "deepseek_v4"})
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(adapter.op, "draft_head", operator)
    monkeypatch.setattr(adapter, "heads", [])
    monkeypatch.setattr(adapter, "kept", KeptWeights(adapter.PATCH, "in INT4"))
    return shapes


class Model:
    """DeepseekV4ForCausalLM and the MTP draft's: a head of its own, which gets the target's weight."""

    def __init__(self, weight):
        self.lm_head, self.logits_processor = Head(weight), Processor()

    def set_embed_and_head(self, embed, head):
        self.lm_head.weight = head

    def post_load_weights(self, is_nextn=False, weight_names=None):
        return "done"


Model.set_embed_and_head = adapter.replace_set_embed_and_head(Model.set_embed_and_head)
Model.post_load_weights = adapter.replace_loading(Model.post_load_weights)
compute = adapter.replace_lm_head(stock)


def target_and_draft():
    target, draft = Model(parameter()), Model(parameter(2))
    draft.set_embed_and_head(None, target.lm_head.weight)
    return target, draft


@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "float32"])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_the_drafts_logits_are_ours(served, rows, wide):
    target, draft = target_and_draft()
    draft.logits_processor.use_fp32_lm_head = wide
    x = random(rows, 5)
    found = compute(draft.logits_processor, x, draft.lm_head)
    assert served == [((rows, INPUTS), (OUTPUTS, INPUTS))]
    assert found.shape == (rows, OUTPUTS) and found.is_contiguous()
    assert found.dtype == (torch.float32 if wide else torch.bfloat16)
    assert 0.05 < relative_error(found, stock(draft.logits_processor, x, draft.lm_head).double()) < 0.14


def test_the_targets_logits_are_the_originals(served):
    target, draft = target_and_draft()
    x = random(4, 5)
    assert target.lm_head.weight is draft.lm_head.weight
    for processor, head in ((target.logits_processor, target.lm_head), (target.logits_processor, draft.lm_head)):
        assert torch.equal(compute(processor, x, head), stock(processor, x, head))
    assert served == []


@pytest.mark.parametrize(
    "change",
    [
        lambda draft: {"hidden_states": random(65, 3)},
        lambda draft: {"hidden_states": random(3, 3).float()},
        lambda draft: {"hidden_states": random(0, 3)},
        lambda draft: {"embedding_bias": torch.zeros(OUTPUTS)},
        lambda draft: {"lm_head": Head(parameter(9))},
        lambda draft: {"lm_head": Head(draft.lm_head.weight, set_lora=None)},
        lambda draft: {"lm_head": Head(draft.lm_head.weight, bias=torch.zeros(OUTPUTS))},
    ],
    ids=["65 rows", "float32", "no rows", "bias of the call", "another head", "LoRA", "bias"],
)
def test_what_is_the_originals(served, change):
    _, draft = target_and_draft()
    call = {"hidden_states": random(3, 3), "lm_head": draft.lm_head} | change(draft)
    expected = stock(draft.logits_processor, **call)
    assert torch.equal(compute(draft.logits_processor, **call), expected) and served == []


@pytest.mark.parametrize(
    "weight",
    [parameter().float(), parameter().t(), parameter()[:, :512].contiguous(), None, parameter()[:0], parameter()[:24]],
)
def test_heads_that_are_not_copied(served, weight):
    draft = Model(parameter())
    draft.set_embed_and_head(None, weight)
    assert not hasattr(draft.logits_processor, adapter.COPY) and adapter.heads == []


@pytest.mark.parametrize("closed", ["gate", "another model", "nobody told"])
def test_closed(served, monkeypatch, closed):
    told = {"another model": {"model_type": "deepseek_v41"}, "gate": {"model_type": "deepseek_v4"}}.get(closed)
    monkeypatch.setattr(models_served, "announced", lambda: told)
    monkeypatch.setattr(device_gate, "serves", lambda device: closed != "gate")
    _, draft = target_and_draft()
    assert not hasattr(draft.logits_processor, adapter.COPY)
    x = random(2, 1)
    assert torch.equal(compute(draft.logits_processor, x, draft.lm_head), stock(Processor(), x, draft.lm_head))


def test_weights_that_are_loaded_again(served):
    """SGLang writes the target's head in place, whoever loads; a captured graph reads our copy where it was."""
    target, draft = target_and_draft()
    (head,) = adapter.heads
    place = head.copy.data_ptr()
    x, other = random(2, 1), Model(parameter(4))
    before = compute(draft.logits_processor, x, draft.lm_head)
    target.lm_head.weight.data.copy_(random(OUTPUTS, 77))
    stale = compute(draft.logits_processor, x, draft.lm_head)
    assert stale.ne(before).sum() == 2 * 4, "the best are by the head as it is, the others by the copy"
    assert other.post_load_weights() == "done"
    assert torch.equal(compute(draft.logits_processor, x, draft.lm_head), stale), "another model's head"
    assert target.post_load_weights(weight_names=None) == "done"
    after = compute(draft.logits_processor, x, draft.lm_head)
    assert relative_error(after, stock(Processor(), x, target.lm_head).double()) < 0.14
    draft.set_embed_and_head(None, target.lm_head.weight)
    assert head.copy.data_ptr() == place and len(adapter.heads) == 1
    assert adapter.kept.layers == 1 and "0.00 GB in INT4" in adapter.kept.describe()


def test_a_copy_made_in_inference_mode_can_be_written_outside_of_it(served):
    with torch.inference_mode():
        target, draft = target_and_draft()
    target.post_load_weights()
    assert len(adapter.heads) == 1


@pytest.mark.parametrize("keep", ["1", "ours"])
def test_shadow_compares_with_the_bf16_head(served, monkeypatch, keep):
    monkeypatch.setattr(shadow, "settings", lambda: settings.Settings(shadow=keep))
    shadow.reset()
    both = adapter.replace_lm_head(stock)
    _, draft = target_and_draft()
    x = random(6, 2)
    found = both(draft.logits_processor, x, draft.lm_head)
    assert torch.equal(found, stock(Processor(), x, draft.lm_head)) is (keep == "1")
    records = {record["patch"]: record for record in shadow.report()}
    guesses, record = records.pop("draft_head_guesses"), records.pop("draft_head")
    assert not records and (record["calls"], record["bad_calls"]) == (1, 0)
    assert record["shape"] == {"rows": 6, "outputs": OUTPUTS} and 0.05 < record["relative_l2_max"] < 0.14
    assert (guesses["relative_l2_max"], guesses["rows"]) == (0, 6)
    best = stock(Processor(), x, draft.lm_head)[2].argmax()
    adapter.heads[0].copy[int(best) // 16] = 0  # tokens that are never guessed again
    both(draft.logits_processor, x, draft.lm_head)
    records = {record["patch"]: record for record in shadow.report()}
    guesses, others = records["draft_head_guesses"], stock(Processor(), x, draft.lm_head).argmax(-1).eq(best).sum()
    assert guesses["relative_l2_max"] == pytest.approx((int(others) / 6) ** 0.5) and guesses["bad_calls"] == 0
    adapter.heads[0].copy[...] = adapter.heads[0].copy.flip(0)
    both(draft.logits_processor, x, draft.lm_head)
    records = {record["patch"]: record for record in shadow.report()}
    assert records["draft_head"]["bad_calls"] > 0
    shadow.reset()


# ---- DSPARK


class Drafter:
    """DeepseekV4ForCausalLMDSpark: handed the target's head, which stays the target's."""

    def __init__(self, wide=False, sharded=False):
        self.stages = [None, SimpleNamespace(norm=lambda x: (2 * x.float()).bfloat16())]
        self._use_fp32_lm_head, self._opt_markov_w2_tp_shard = wide, sharded

    @adapter.replace_attach
    def attach_shared_modules(self, *, embed_tokens, lm_head):
        self.embed_tokens, self.lm_head = embed_tokens, lm_head


DSPARK = """
def _logits_from_x_post_hc(self, x_post_hc):
    x = self.stages[-1].norm(x_post_hc)
    weight = self.lm_head.weight
    local_logits = x.float() @ weight.float().T
    local_logits = local_logits if self._use_fp32_lm_head else local_logits.bfloat16()
    return local_logits if self._opt_markov_w2_tp_shard else gather_and_crop_vocab(local_logits, self.lm_head)
"""


@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "float32"])
@pytest.mark.parametrize("sharded", [False, True], ids=["gathered", "sharded"])
def test_dsparks_logits(served, wide, sharded):
    module = {"gather_and_crop_vocab": lambda local, head: local[:, :300]}
    exec(DSPARK, module)
    original = module["_logits_from_x_post_hc"]
    draft, target = Drafter(wide, sharded), Model(parameter())
    replaced = adapter.replace_dspark_logits(original)
    draft.attach_shared_modules(embed_tokens="embedding", lm_head=target.lm_head)
    x = random(12, 8)
    found, theirs = replaced(draft, x), original(draft, x)
    assert (found.shape, found.dtype) == (theirs.shape, theirs.dtype) and served == [((12, INPUTS), (OUTPUTS, INPUTS))]
    assert 0.05 < relative_error(found, theirs.double()) < 0.14
    assert torch.equal(replaced(draft, random(300, 8)), original(draft, random(300, 8)))
    assert len(served) == 1
    assert torch.equal(compute(target.logits_processor, x, target.lm_head), stock(Processor(), x, target.lm_head))
    assert len(served) == 1, "the target's own head"


def test_dspark_without_a_head_is_the_originals(served):
    draft = Drafter()
    draft.lm_head = None
    assert adapter.replace_dspark_logits(lambda self, x: "original")(draft, random(2, 1)) == "original"

"""The beginning of a draft's block by each release's own forward, with ours in its place and without."""

from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.ops import fp8_linear_draft_input as op
from deepseek_v4_sm120.reference import fp8_linear as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.adapters import fp8_linear as products
from deepseek_v4_sm120.sglang_patches.adapters import fp8_linear_draft_input as ours
from deepseek_v4_sm120.specs.bounds import DRAFT_INPUT
from deepseek_v4_sm120.specs.fp8_linear import make_draft_input
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import every_release, fetch, since

MODULE, FIRST = "sglang.srt.models.deepseek_v4_nextn", "0.5.14"
TOKENS, STREAMS, HIDDEN, ENTRIES, EPS = 5, 4, 256, 11, 1e-6
SUMMED = 2.0  # what a card that has a part of the vocabulary gets of a sum between cards: here so many times the row


class RMSNorm:
    variance_epsilon = EPS

    def __init__(self, weight, calls):
        self.weight, self.calls = torch.nn.Parameter(weight, requires_grad=False), calls

    def __call__(self, x):
        self.calls.append("norm")
        return reference.latent_norm(x, self.weight, EPS).bfloat16()


class ReplicatedLinear:
    bias = None
    quant_method = SimpleNamespace(block_quant=True, use_marlin=False, use_mxfp8=False)

    def __init__(self, weight, scale, calls):
        self.weight, self.weight_scale_inv, self.calls = weight, scale, calls

    def __call__(self, x):
        self.calls.append("product")
        return reference.fp8_linear(x, self.weight, self.weight_scale_inv).bfloat16(), None


class UnquantizedEmbeddingMethod:
    pass


class VocabParallelEmbedding:
    output_dtype = None

    def __init__(self, weight, calls, tp_size):
        self.weight, self.calls, self.tp_size = torch.nn.Parameter(weight, requires_grad=False), calls, tp_size
        self.quant_method = UnquantizedEmbeddingMethod()

    def __call__(self, ids):
        self.calls.append("embedding")
        found = torch.nn.functional.embedding(ids, self.weight)
        return found if self.tp_size == 1 else found * SUMMED


class Draft:
    """A model with its batch, and what was called of it."""

    def __init__(self, tokens=TOKENS, tp_size=1):
        generator, self.calls = torch.Generator().manual_seed(3), []
        given, by = make_draft_input(max(tokens, 1), HIDDEN, HIDDEN, generator, streams=STREAMS, entries=ENTRIES)
        self.hidden, table, of_hidden, of_embedded = given
        self.ids = by["ids"][:tokens]
        halves = {"h": of_hidden, "e": of_embedded}
        model = {f"{name}norm": RMSNorm(half.norm, self.calls) for name, half in halves.items()}
        model |= {
            f"{name}_proj": ReplicatedLinear(half.weight, half.weight_scale, self.calls)
            for name, half in halves.items()
        }
        self.model = SimpleNamespace(
            **model,
            **{"config": SimpleNamespace(hidden_size=HIDDEN), "hc_mult": STREAMS, "rms_norm_eps": EPS, "hc_eps": EPS},
            **dict.fromkeys(("hc_head_fn", "hc_head_base", "hc_head_scale")),
            embed_tokens=VocabParallelEmbedding(table.contiguous(), self.calls, tp_size),
            shared_head=SimpleNamespace(norm=lambda x: x),
            hc_head=lambda streams, *_: streams[:, 0],
        )
        spec = SimpleNamespace(hidden_states=self.hidden[:tokens].flatten(1))
        self.batch = SimpleNamespace(spec_info=spec)

    def right(self) -> torch.Tensor:
        """float64, of what the embedding gives."""
        model = self.model
        embedded = model.embed_tokens(self.ids)
        given = (self.hidden[: len(self.ids)], embedded, *ours.halves(model))
        self.calls.clear()
        return reference.draft_input(*given)


def forward_of(version):
    """(the release's own forward, which gives what its layer was given)"""
    deferred = (None, None, None) if since(version, "0.5.13") else ()
    entered = []

    def decoder(*, hidden_states, **_):
        entered.append(hidden_states)
        return (hidden_states, *deferred) if deferred else hidden_states

    alone = {"get_parallel": lambda: SimpleNamespace(attn_dp_size=1), "get_attention_dp_size": lambda: 1}
    names = {"torch": torch, "F": torch.nn.functional, "_is_cuda": False, "_is_npu": False} | alone
    asked = ("dsa_use_prefill_cp", "nsa_use_prefill_cp", "is_cp_active", "is_cp_v2_active")
    names |= dict.fromkeys(asked, lambda batch: False)
    forward = take(fetch(version), names, "DeepseekV4ModelNextN.forward", MODULE)

    def run(draft, call=None, **more):
        draft.model.decoder = decoder
        (call or forward)(draft.model, draft.ids, torch.arange(len(draft.ids)), draft.batch, **more)
        return entered.pop()

    return forward, run


@pytest.fixture
def served(monkeypatch):
    """The gate is open for the CPU; the reference computes what passes the operator's own checks."""
    calls, real = [], op.draft_input

    def operator(hidden, embedded, of_hidden, of_embedded, *, ids=None):
        nothing = (hidden[:0], embedded if ids is not None else embedded[:0], of_hidden, of_embedded)
        assert not len(real(*nothing, ids=None if ids is None else ids[:0]))
        calls.append("ids" if ids is not None else "rows")
        return reference.draft_input(hidden, embedded, of_hidden, of_embedded, ids=ids).bfloat16()

    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(products.process, "has_our_model", True)
    monkeypatch.setattr(op.Call, "on_cuda", lambda self: None)
    monkeypatch.setattr(op, "draft_input", operator)
    return calls


@every_release(FIRST)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_steps_rows_are_ours(version, tp_size, served):
    """What the layer is given is SGLang's, without a norm or a product of it; nor an embedding, where all rows are."""
    forward, run = forward_of(version)
    draft = Draft(tp_size=tp_size)
    right = draft.right()
    stock = run(draft)
    assert draft.calls.count("norm") == draft.calls.count("product") == 2 and served == []
    draft.calls.clear()
    found = run(draft, ours.replace_forward(forward))
    assert draft.calls == (["embedding"] if tp_size > 1 else []) and served == ["rows" if tp_size > 1 else "ids"]
    assert found.shape == stock.shape == (TOKENS, STREAMS, HIDDEN) and found.dtype == stock.dtype
    assert relative_error(found, right) < DRAFT_INPUT.truth and relative_error(stock, right) < DRAFT_INPUT.truth


@every_release(FIRST)
def test_a_batch_of_no_tokens_and_embeddings_that_are_given_are_sglangs(version, served):
    forward, run = forward_of(version)
    idle = Draft(tokens=0)
    assert run(idle, ours.replace_forward(forward)).shape == (0, STREAMS, HIDDEN) and served == []
    draft = Draft()
    embedded = torch.ones(TOKENS, HIDDEN).bfloat16()
    found = run(draft, ours.replace_forward(forward), input_embeds=embedded)
    assert torch.equal(found, run(draft, input_embeds=embedded)) and served == []


def change(path, value):
    def changed(draft):
        *owners, name = path.split(".")
        owner = draft.model
        for one in owners:
            owner = getattr(owner, one)
        setattr(owner, name, value)

    return changed


class AnotherLinear(ReplicatedLinear):
    pass


OTHERS = {
    "a bias": change("h_proj.bias", torch.zeros(HIDDEN)),
    "a projection around it": lambda d: setattr(d.model, "e_proj", AnotherLinear(*vars(d.model.e_proj).values())),
    "no scales by blocks": change("e_proj.quant_method", SimpleNamespace(block_quant=False)),
    "packed scales": lambda d: change("h_proj.weight_scale_inv", d.model.h_proj.weight_scale_inv.int())(d),
    "a norm of a part": change("hnorm.variance_size_override", 128),
    "a norm that rounds in between": change("enorm.cast_x_before_out_mul", True),
    "a norm in float32": lambda d: change("enorm.weight", d.model.enorm.weight.data.float())(d),
    "more rows than a step's": lambda d: setattr(ours.dense_rows, "MOST_ROWS", TOKENS * STREAMS - 1),
    "another model": lambda d: setattr(products.process, "has_our_model", False),
    "no hidden states": lambda d: setattr(d.batch.spec_info, "hidden_states", None),
    "no speculation": lambda d: setattr(d.batch, "spec_info", None),
    "hidden states with gaps": lambda d: setattr(
        d.batch.spec_info, "hidden_states", torch.cat([d.hidden.flatten(1)] * 2, 1)[:, : STREAMS * HIDDEN]
    ),
    "hidden states in halves with gaps": lambda d: setattr(
        d.batch.spec_info,
        "hidden_states",
        torch.cat([d.hidden.view(2 * TOKENS, -1)] * 2, 1)[:, : STREAMS * HIDDEN // 2],
    ),
    "hidden states of other tokens": lambda d: setattr(d.batch.spec_info, "hidden_states", d.hidden[:3].flatten(1)),
    "hidden states in float32": lambda d: setattr(d.batch.spec_info, "hidden_states", d.hidden.flatten(1).float()),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_else_there_is_stays_sglangs(what, served, monkeypatch):
    monkeypatch.setattr(ours.dense_rows, "MOST_ROWS", 256)
    draft = Draft()
    assert ours.takes(draft.model, draft.ids, draft.batch)
    OTHERS[what](draft)
    assert not ours.takes(draft.model, draft.ids, draft.batch)
    given = []
    forward = ours.replace_forward(lambda *call: given.append(call))
    forward(draft.model, draft.ids, None, draft.batch)
    assert given == [(draft.model, draft.ids, None, draft.batch, None)] and served == []


@pytest.mark.parametrize(
    "path, value",
    [
        ("tp_size", 2),
        ("output_dtype", torch.float32),
        ("quant_method", SimpleNamespace()),
        ("weight", torch.zeros(ENTRIES, HIDDEN)),
        ("weight", torch.zeros(ENTRIES, 2 * HIDDEN).bfloat16()),
        ("weight", torch.zeros(HIDDEN, ENTRIES).bfloat16().T),
    ],
)
def test_an_embedding_of_another_kind_is_asked_for(path, value):
    draft = Draft()
    assert ours.has_whole(draft.model.embed_tokens, draft.hidden)
    setattr(draft.model.embed_tokens, path, value)
    assert not ours.has_whole(draft.model.embed_tokens, draft.hidden)
    assert not ours.has_whole(SimpleNamespace(**vars(Draft().model.embed_tokens)), draft.hidden)


def test_in_shadow_mode_both_are_made_and_compared(served, monkeypatch):
    seen = []
    monkeypatch.setattr(shadow, "settings", lambda: settings.Settings(shadow="original"))
    monkeypatch.setattr(shadow, "record", lambda patch, pairs, **given: seen.append((patch, pairs, given)))
    draft, entered = Draft(), []
    right = draft.right()
    forward = ours.replace_forward(lambda *call: entered.append(call[-1].unsqueeze(1).repeat(1, STREAMS, 1)))
    forward(draft.model, draft.ids, None, draft.batch)
    [(patch, [(own, original)], given)] = seen
    assert patch == "draft_input" and given["shape"] == {"rows": TOKENS, "streams": STREAMS} and served == ["ids"]
    assert torch.equal(entered[0].flatten(0, 1), original) and draft.calls.count("product") == 2
    for one in (own, original):
        assert relative_error(one, right.flatten(0, 1)) < DRAFT_INPUT.truth

"""The MTP block of each release is the one that DeepSeek trained: its own forward and head beside the formula of the
model's public code. What a draft computes wrongly costs no answer, so no engine of random weights shows it."""

from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.reference import mhc as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import mhc
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import every_release, fetch, since

MODULE = "sglang.srt.models.deepseek_v4_nextn"
TOKENS, STREAMS, HIDDEN, EPS = 5, 4, 256, 1e-6


class Weights:
    """Of the block around its layer, and what is handed to it: the four streams behind the model's last layer, and the
    embeddings of the tokens that follow."""

    def __init__(self):
        made = torch.Generator().manual_seed(0)

        def random(*shape):
            return torch.randn(*shape, generator=made)

        self.to_embedding, self.to_hidden = (random(HIDDEN, HIDDEN) / HIDDEN**0.5 for _ in range(2))
        self.of_embedding, self.of_hidden, self.of_head = (1 + 0.1 * random(HIDDEN) for _ in range(3))
        self.head = random(STREAMS, STREAMS * HIDDEN) / HIDDEN**0.5, random(1), random(STREAMS)
        self.streams = random(TOKENS, STREAMS, HIDDEN).bfloat16()
        self.embedded = random(TOKENS, HIDDEN).bfloat16()


def normal(x, weight):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def layer(streams):
    return torch.tanh(streams) + streams.roll(1, 1)


def trained(given: Weights):
    """(what the vocabulary is multiplied with, what the next draft reads): MTPBlock.forward of inference/model.py."""
    entered = (normal(given.embedded, given.of_embedding) @ given.to_embedding).unsqueeze(1)
    entered = entered + normal(given.streams, given.of_hidden) @ given.to_hidden
    streams = layer(entered)
    fn, scale, base = given.head
    flat = streams.flatten(1)
    weights = torch.sigmoid(normal(flat, 1.0) @ fn.T * scale + base) + EPS
    return normal((weights.unsqueeze(-1) * streams).sum(1), given.of_head), streams


def by_sglang(version, given: Weights, *, ours):
    """The same by a release's own forward, with its own hc_head or ours around it."""
    wheel = fetch(version)
    torches = {"torch": torch, "F": torch.nn.functional}
    head = take(wheel, dict(torches), "DeepseekV4ModelNextN.hc_head", MODULE)
    head = mhc.replace_hc_head(head) if ours else head
    fn, scale, base = given.head
    model = SimpleNamespace(
        **{"config": SimpleNamespace(hidden_size=HIDDEN), "hc_mult": STREAMS, "rms_norm_eps": EPS, "hc_eps": EPS},
        **{"hc_head_fn": fn, "hc_head_scale": scale, "hc_head_base": base},
        embed_tokens=lambda tokens: given.embedded,
        enorm=lambda x: normal(x, given.of_embedding),
        hnorm=lambda x: normal(x, given.of_hidden),
        e_proj=lambda x: (x @ given.to_embedding, None),
        h_proj=lambda x: (x @ given.to_hidden, None),
        shared_head=SimpleNamespace(norm=lambda x: normal(x, given.of_head)),
    )
    model.hc_head = lambda *given: head(model, *given)
    deferred = (None, None, None) if since(version, "0.5.13") else ()

    def decoder(*, hidden_states, **_):
        streams = layer(hidden_states)
        return (streams, *deferred) if deferred else streams

    model.decoder = decoder
    alone = {"get_parallel": lambda: SimpleNamespace(attn_dp_size=1), "get_attention_dp_size": lambda: 1}
    names = torches | alone | {"_is_cuda": False, "_is_npu": False}
    names |= dict.fromkeys(("dsa_use_prefill_cp", "nsa_use_prefill_cp", "is_cp_active"), lambda batch: False)
    forward = take(wheel, names, "DeepseekV4ModelNextN.forward", MODULE)
    batch = SimpleNamespace(spec_info=SimpleNamespace(hidden_states=given.streams.flatten(1)))
    found, handed_on = forward(model, torch.arange(TOKENS), torch.arange(TOKENS), batch)
    return found, handed_on.view(TOKENS, STREAMS, HIDDEN)


@every_release()
@pytest.mark.parametrize("ours", [False, True])
def test_it_is_what_was_trained(version, ours, monkeypatch):
    calls = []

    def operator(streams, *mixes, rms_eps, hc_eps):
        calls.append(streams.shape)
        return reference.mhc_head(streams, *mixes, rms_eps=rms_eps, eps=hc_eps)

    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(mhc.op, "mhc_head", operator)
    monkeypatch.setattr(mhc, "_takes", lambda *_: ours)
    given = Weights()
    found, handed_on = by_sglang(version, given, ours=ours)
    right, streams = trained(given)
    assert torch.equal(handed_on, streams)
    bound = 0.004 if ours else 1e-5  # ours gives bfloat16, as the model's streams are
    assert relative_error(found, right.double()) < bound and len(calls) == ours

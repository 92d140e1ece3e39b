"""What the window's keys are made of, on the stream that makes them: each release's own code that deals a layer's work
to streams, run on the CPU, asked where the first stream waits for the others whether it is still there."""

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes.held_latents import replace_prepare
from deepseek_v4_sm120.sglang_patches.names import ATTENTION
from deepseek_v4_sm120.sglang_patches.rows.attention import HELD_LATENTS
from tests.patching.review import is_for
from tests.patching.test_wheel_dspark_penalties import taken
from tests.patching.wheels import RELEASES, since

MENDED = "0.5.19"
BEFORE = [release for release in RELEASES if not since(release, MENDED)]
pytestmark = pytest.mark.usefixtures("opened")


class Streams:
    """torch.cuda's. `waited`: what is told at each wait of the first stream for one of the others."""

    def __init__(self, waited):
        self.first = SimpleNamespace(wait_stream=waited, wait_event=None, record_event=object)
        others = dict(wait_stream=lambda other: None, wait_event=lambda event: None, record_event=object)
        self.others = [SimpleNamespace(**others) for _ in range(5)]

    def current_stream(self):
        return self.first

    @contextmanager
    def stream(self, stream):
        yield


class Product(torch.nn.Module):
    """wqkv_a: what it has given is known, and is not held."""

    def forward(self, x):
        self.given = torch.zeros(x.shape[0], 24)
        result, self.given = self.given, weakref.ref(self.given)
        return result, None


class Attention(torch.nn.Module):
    def __init__(self, *, fused=True):
        super().__init__()
        self.fuse_wqa_wkv, self.indexer, self.compressor, self.alive = fused, None, None, []
        self.streams = Streams(lambda other: self.alive.append(self.wqkv_a.given() is not None) if fused else None)
        self.alt_streams = self.streams.others[:3]
        if fused:
            self.wqkv_a = Product()

    def _compute_q_a(self, x, qkv_a=None):
        latent = (x if qkv_a is None else qkv_a)[..., :16].clone()
        return (latent, latent) if self.pair else latent

    def _compute_kv_to_cache(self, x, positions, forward_batch, *backend, qkv_a=None):
        assert (qkv_a is not None) == self.fuse_wqa_wkv

    def _compute_q_b(self, latent, positions, q_out=None):
        return latent + 1


def prepared(version, attention, *, ours):
    attention.pair = since(version, "0.5.21")
    found = taken(version, f"{ATTENTION}._forward_prepare_multi_stream", torch=SimpleNamespace(cuda=attention.streams))
    found = replace_prepare(found) if ours else found
    return found(attention, torch.ones(3, 24), torch.arange(3), None, None)


@pytest.mark.parametrize("version", [*BEFORE, MENDED], scope="module")
def test_they_are_there_until_the_keys_are_made(version):
    attention = Attention()
    ours = any(is_for(target.sglang, version) for target in HELD_LATENTS.targets)
    found = prepared(version, attention, ours=ours)
    assert attention.alive == [True] * 3 and torch.equal(found, torch.ones(3, 16))
    assert attention.wqkv_a.given() is None and not attention.wqkv_a._forward_hooks, "and no longer"
    assert ours == (version in BEFORE)


@pytest.mark.parametrize("version", BEFORE, scope="module")
def test_in_sglang_alone_they_are_not(version):
    attention = Attention()
    prepared(version, attention, ours=False)
    assert attention.alive == [False] * 3


@pytest.mark.parametrize("version", BEFORE[-1:])
@pytest.mark.parametrize(("model", "card"), [("llama", True), ("deepseek_v4", False)])
def test_elsewhere_it_stays_sglangs(version, model, card, opened):
    opened(model, card)
    attention = Attention()
    prepared(version, attention, ours=True)
    assert attention.alive == [False] * 3


@pytest.mark.parametrize("version", BEFORE, scope="module")
def test_two_products_have_nothing_to_hold(version):
    """SGLANG_OPT_FUSE_WQA_WKV=0: the keys' latents are made on the keys' stream."""
    attention = Attention(fused=False)
    attention.wq_a = lambda x: (x, None)
    assert torch.equal(prepared(version, attention, ours=True), prepared(version, attention, ours=False))


def test_what_fails_leaves_no_hook():
    attention = Attention()

    def fails(self):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replace_prepare(fails)(attention)
    assert not attention.wqkv_a._forward_hooks

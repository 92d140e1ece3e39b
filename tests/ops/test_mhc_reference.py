"""The reference of the hyper-connections: two formulations, and what can be worked out by hand."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.reference import mhc as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.reference.all_reduce import all_reduce
from deepseek_v4_sm120.specs.mhc import Shape, make_inputs, make_terms

SMALL = Shape(5, hidden=256)


@pytest.mark.parametrize("x_scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("normed", [True, False])
def test_two_formulations_agree(x_scale, normed):
    inputs = make_inputs(Shape(5, hidden=256, x_scale=x_scale), device="cpu")
    arguments = inputs.boundary() if normed else {**inputs.boundary(), "norm_weight": None}
    one, other = reference.mhc(**arguments), reference.mhc_by_products(**arguments)
    for name in ("streams", "post", "comb", "y"):
        assert float(getattr(one, name).abs().max()) > 0
        # a sum that differs in its last bit may round to the other bf16
        assert relative_error(getattr(other, name), getattr(one, name)) < (1e-12 if name in ("post", "comb") else 1e-4)


def test_sinkhorn_ends_on_columns_and_is_nearly_doubly_stochastic():
    logits = torch.randn(50, 4, 4, dtype=torch.float64) * 3
    comb = reference.sinkhorn(logits)
    assert float((comb.sum(1) - 1).abs().max()) < 1e-5
    assert float((comb.sum(2) - 1).abs().max()) < 0.05
    once = reference.sinkhorn(logits, iters=1)
    softmax = torch.softmax(logits, 2) + 1e-6
    assert torch.allclose(once, softmax / (softmax.sum(1, keepdim=True) + 1e-6))


def test_the_first_index_of_comb_is_the_old_stream():
    """By hand: one stream's weight moved to another, and nothing of f."""
    streams = torch.zeros(1, 4, 8)
    streams[0, 2] = 3.0
    comb = torch.zeros(1, 4, 4)
    comb[0, 2, 1] = 0.5
    new = reference.mhc_post(torch.ones(1, 8), streams, torch.tensor([[0.0, 0, 0, 2.0]]), comb)
    assert new[0, :, 0].tolist() == [0.0, 1.5, 0.0, 2.0]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_the_cards_add_is_f(ranks):
    """Against float32 in the order of ranks, which rounds to the other bf16 now and then."""
    inputs = make_inputs(Shape(64, hidden=256), device="cpu")
    terms = make_terms(inputs, ranks)
    found = reference.summed(terms)
    assert 0.9 < float(found.std() / inputs.f.double().std()) < 1.1
    assert float((found != all_reduce(terms).double()).double().mean()) < 1e-3
    assert relative_error(all_reduce(terms), found) < 1e-4
    exact = [torch.full((1, 8), value).bfloat16() for value in (1.0, 2.0**-8, 2.0**-9)]
    assert reference.summed(exact).tolist() == [[1 + 2.0**-7] * 8]  # rounded once: one by one it stays 1


def test_equal_logits_give_equal_parts():
    """fn of zeros: pre is sigmoid(base) + eps, comb a quarter everywhere."""
    inputs = make_inputs(SMALL, device="cpu")
    base = torch.zeros(24)
    y, post, comb = reference.mhc_pre(inputs.streams, inputs.fn * 0, inputs.scale, base)
    assert torch.allclose(post, torch.ones_like(post)) and torch.allclose(comb, torch.full_like(comb, 0.25), rtol=1e-5)
    expected = (0.5 + 1e-6) * inputs.streams.double().sum(1)
    assert relative_error(y, expected) < 0.003


def test_the_mixes_do_not_see_the_streams_size():
    inputs = make_inputs(SMALL, device="cpu")
    one = reference.mixes(inputs.streams, inputs.fn)
    assert torch.allclose(one, reference.mixes(inputs.streams * 256, inputs.fn), rtol=1e-5)


def test_the_norm_divides_by_the_unrounded_sum_and_multiplies_the_rounded_one():
    inputs = make_inputs(SMALL, device="cpu")
    pre = torch.rand(5, 4, dtype=torch.float64)
    plain = reference.collapse(inputs.streams, pre)
    normed = reference.collapse(inputs.streams, pre, inputs.norm_weight)
    root = (plain.square().mean(1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(normed, reference.bf16(plain) / root * inputs.norm_weight.double())
    assert not torch.equal(normed, plain / root * inputs.norm_weight.double())


def test_the_head_is_a_pre_without_post_and_comb():
    inputs = make_inputs(SMALL, device="cpu")
    fn = torch.cat((inputs.head_fn, torch.zeros(20, inputs.head_fn.shape[1])))
    scale = torch.cat((inputs.head_scale, torch.ones(2)))
    base = torch.cat((inputs.head_base, torch.zeros(20)))
    assert torch.equal(reference.mhc_head(**inputs.head()), reference.mhc_pre(inputs.streams, fn, scale, base)[0])

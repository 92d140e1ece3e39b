"""Weights made E4M3: the nearest code of every number, by slices, and what a head of them guesses otherwise."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.ops import fp8_linear_weights as op
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.reference.fp8_linear import E4M3_MAX, dequantized

CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
VALUES = CODES[CODES.isfinite()].unique()


def make(outputs, inputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    weight *= torch.exp(torch.randn(outputs, 1, generator=generator))  # tokens of different size
    return weight.bfloat16()


def made(weight):
    codes, scale = op.empty(weight)
    codes.view(torch.uint8).fill_(0x7F)
    op.quantize(weight, codes, scale)
    return codes, scale


@pytest.mark.parametrize("outputs, inputs", [(128, 128), (384, 256), (320, 640), (1, 128), (129, 256)])
@pytest.mark.parametrize("numbers", [1 << 23, 1 << 15, 1], ids=["at once", "slices", "a block's rows"])
def test_every_number_has_its_nearest_code(outputs, inputs, numbers, monkeypatch):
    monkeypatch.setattr(op, "SLICE_NUMBERS", numbers)
    weight = make(outputs, inputs)
    codes, scale = made(weight)
    rows = op.padded(outputs)
    assert codes.shape == (rows, inputs) and rows % 128 == 0 and outputs <= rows < outputs + 128
    assert not codes[outputs:].double().any(), "padding is 0"
    whole = torch.zeros(rows, inputs, dtype=torch.float64)
    whole[:outputs] = weight.double()
    greatest = whole.view(rows // 128, 128, inputs // 128, 128).abs().amax((1, 3))
    torch.testing.assert_close(scale.double(), greatest / E4M3_MAX, rtol=1e-6, atol=1e-37)
    each = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    wanted = whole / each
    place = torch.searchsorted(VALUES, wanted).clamp(1, len(VALUES) - 1)
    below, above = VALUES[place - 1], VALUES[place]
    nearest = torch.minimum((wanted - below).abs(), (wanted - above).abs())
    error = (codes.double() - wanted).abs()
    assert bool((error <= nearest * (1 + 1e-6) + 1e-6 * wanted.abs()).all())
    assert relative_error(dequantized(codes, scale)[:outputs], weight.double()) < 0.035


def test_blocks_of_zeros_and_of_extremes():
    weight = torch.zeros(256, 256).bfloat16()
    weight[:128, 128:] = torch.finfo(torch.bfloat16).max
    weight[128:, :128] = 1e-40  # below float32's normal numbers
    codes, scale = made(weight)
    found = dequantized(codes, scale)
    assert bool(found.isfinite().all()) and not found[:128, :128].any() and not found[128:, 128:].any()
    assert relative_error(found[:128, 128:], weight[:128, 128:].double()) < 1e-6
    assert bool((found[128:, :128].abs() < 2e-40).all())


@pytest.mark.parametrize("numbers", [1 << 23, 1 << 15, 1], ids=["at once", "slices", "a block's rows"])
@pytest.mark.parametrize("greatest", [448.0, 256.0, 240.0, 2.0**-9])
def test_what_was_expanded_comes_back(greatest, numbers, monkeypatch):
    """Every code up to a block's greatest, by every power of two that a scale of the checkpoint's can be in bf16."""
    monkeypatch.setattr(op, "SLICE_NUMBERS", numbers)
    within = VALUES[VALUES.abs() <= greatest]
    generator = torch.Generator().manual_seed(int(greatest))
    codes = within[torch.randint(len(within), (256, 2, 128), generator=generator)]
    codes[::128, :, 0] = greatest
    codes[:128, 1] = 0  # a block of zeros
    for power in (-100, -9, 0, 20, 110):
        weight = (codes * 2.0**power).bfloat16().view(256, 256)
        assert torch.equal(weight.double(), (codes * 2.0**power).view(256, 256)), "as it is in bf16"
        found, scale = op.recovered(weight)
        assert torch.equal(dequantized(found, scale), weight.double())
        assert bool((torch.frexp(scale)[0] == 0.5).all())


def test_what_was_not_expanded_does_not():
    weight = torch.ones(256, 256).bfloat16()
    for number in (1 + 2**-4, 2.0**-15 * (1 + 2**-3), 2.0**-18, float("nan"), float("inf")):
        changed = weight.clone()
        changed[200, 7] = number
        assert op.recovered(changed) is None, number
    assert op.recovered(make(256, 256)) is None
    with pytest.raises(TypeError, match="weight.dtype must be torch.bfloat16"):
        op.recovered(weight.float())


def test_refusals():
    weight = make(200, 256)
    codes, scale = op.empty(weight)
    for call, error, words in (
        ((weight.float(), codes, scale), TypeError, "weight.dtype must be torch.bfloat16"),
        ((weight[:, :200], codes, scale), ValueError, "weight must be contiguous"),
        ((weight[:, :200].contiguous(), codes, scale), ValueError, "positive multiple of 128"),
        ((weight, codes[:200], scale), ValueError, r"codes.shape must be \[256, 256\]"),
        ((weight, codes, scale[:1]), ValueError, r"scale.shape must be \[2, 2\]"),
        ((weight, codes, scale.double()), TypeError, "scale.dtype"),
    ):
        with pytest.raises(error, match=words):
            op.quantize(*call)


# ---- what it does to guesses


def guesses(peak, tokens=256, vocabulary=16_384, inputs=1024):
    """A made draft: hidden states that lean towards a token's row by `peak` standard deviations of the logits.

    Returns its own probability of what it guesses in bf16 and in E4M3, means over the tokens, and the share of tokens
    that are guessed otherwise. The former is what is accepted where the model judges as the draft does; a guess that
    was nearly another one is as likely to be right.
    """
    generator = torch.Generator().manual_seed(int(10 * peak))
    weight = (torch.randn(vocabulary, inputs, generator=generator) / inputs**0.5).bfloat16()
    meant = torch.randint(0, vocabulary, (tokens,), generator=generator)
    towards = torch.randn(tokens, 1, generator=generator).abs() * peak
    hidden = 3 * (torch.randn(tokens, inputs, generator=generator) + towards * weight[meant].float()).bfloat16()
    codes, scale = made(weight)
    exact = hidden.double() @ weight.double().T
    coarse = (hidden.double() @ dequantized(codes, scale).T).bfloat16()
    bf16 = exact.bfloat16().argmax(-1)
    probabilities = exact.softmax(-1)
    of = [probabilities.gather(1, guess[:, None]).mean().item() for guess in (bf16, coarse.argmax(-1))]
    return *of, (bf16 != coarse.argmax(-1)).double().mean().item()


@pytest.mark.parametrize(
    "peak, sure, otherwise", [(0, (0.0, 0.2), 0.15), (4, (0.3, 0.8), 0.08), (8, (0.5, 0.95), 0.05)]
)
def test_what_a_head_in_e4m3_guesses_otherwise(peak, sure, otherwise):
    bf16, e4m3, changed = guesses(peak)
    print(f"\npeak {peak}: p {bf16:.4f} {e4m3:.4f}, {changed:.4f} guessed otherwise")
    assert sure[0] <= bf16 <= sure[1], "the made draft is as sure as it is meant to be"
    assert 0 < changed < otherwise or (peak == 8 and changed < otherwise)
    assert bf16 - e4m3 < 0.01

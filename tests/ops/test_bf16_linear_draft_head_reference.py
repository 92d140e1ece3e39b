"""A head's copy in INT4: the nearest code of every number, where the kernel reads it, and what such a head guesses."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.ops import bf16_linear_draft_head as op
from deepseek_v4_sm120.ops.shared import extension
from deepseek_v4_sm120.reference import bf16_linear_draft_head as reference
from deepseek_v4_sm120.reference.accuracy import relative_error

VALUES = torch.arange(-7.0, 8.0, dtype=torch.float64)


def make(outputs, inputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    weight *= torch.exp(torch.randn(outputs, 1, generator=generator))  # tokens of different size
    return weight.bfloat16()


def made(weight):
    copy = op.empty(weight).fill_(0xA5)
    op.fill(weight, copy)
    return copy


@pytest.mark.parametrize("outputs, inputs", [(16, 1024), (48, 2048)])
@pytest.mark.parametrize("numbers", [1 << 23, 1 << 14, 1], ids=["at once", "slices", "a tile's rows"])
def test_every_number_has_its_nearest_code(outputs, inputs, numbers, monkeypatch):
    monkeypatch.setattr(op, "SLICE_NUMBERS", numbers)
    weight = make(outputs, inputs)
    found = reference.dequantised(made(weight)).view(outputs, -1, op.SCALE_INPUTS)
    groups = weight.double().view(found.shape)
    scales = (groups.abs().amax(2, keepdim=True) / 7).float().bfloat16().double()
    nearest = (groups[..., None] - scales[..., None] * VALUES).abs().amin(-1)
    assert bool(((found - groups).abs() <= nearest * (1 + 1e-5)).all())
    assert relative_error(found.flatten(), groups.flatten()) < 0.13


def test_one_number_lies_where_one_word_has_it():
    """The layout, said once more: by lanes of the product, from the instruction's own operands."""
    weight = torch.zeros(32, 1024, dtype=torch.bfloat16)
    weight[16 + 11, 256 + 64 * 2 + 16 * 3 + 4 * 1 + 2] = 7.0
    copy = made(weight)
    unit = copy[1, 1]
    # row 11: lane g = 3 and the upper row; inputs of lane t = 3, word 1; of four inputs the third: second pair's first
    # lie in the lower mantissa bits, of a word turned by 8 for the upper row
    lane = 3 * 4 + 3
    zero = sum(8 << bit for bit in (6, 22, 2, 18))
    zero |= (zero << 8 | zero >> 24) & 0xFFFFFFFF
    words = unit[:2048].view(torch.int32).view(4, 32, 4).long() & 0xFFFFFFFF
    assert words[2, lane, 1].item() ^ zero == (8 ^ 15) << 2 + 8 and words.ne(zero).sum() == 1
    scales = unit[2048:].view(torch.bfloat16).view(8, 4, 2)
    assert scales[3, 2, 1].item() == 1.0 and scales.count_nonzero() == 1
    assert (copy[0, 0, :2048].view(torch.int32).long() & 0xFFFFFFFF).eq(zero).all() and not copy[0, 0, 2048:].any()


def test_groups_of_zeros_of_extremes_and_of_no_numbers():
    weight = torch.zeros(16, 1024).bfloat16()
    weight[0, :64], weight[1, :64] = torch.finfo(torch.bfloat16).max, 1e-40
    weight[2, :64], weight[2, 5] = 1.0, torch.nan
    weight[3, 7] = -2.0
    found = reference.dequantised(made(weight))
    assert relative_error(found[0, :64], weight[0, :64].double()) < 0.01
    assert bool((found[1] >= 0).all()) and found[1].max() < 2e-40
    assert bool(found[2, :64].isnan().all()) and bool(found[[0, 1, 3]].isfinite().all())
    assert abs(found[3, 7] + 2) < 0.01 and found[3].count_nonzero() == 1 and not found[4:].any()


def test_refusals():
    weight = make(32, 1024)
    copy = op.empty(weight)
    x = torch.zeros(2, 1024, dtype=torch.bfloat16)
    for call, error, words in (
        ((weight.float(), copy), TypeError, "weight.dtype must be torch.bfloat16"),
        ((weight[:, :512], copy), ValueError, "weight must be contiguous"),
        ((weight[:, :512].contiguous(), copy), ValueError, "positive multiple of 1024"),
        ((weight[:8], copy), ValueError, "positive multiple of 16"),
        ((weight, copy[:1]), ValueError, r"copy.shape must be \[2, 4, 2176\]"),
        ((weight, copy.short()), TypeError, "copy.dtype"),
        ((weight.new_zeros(16, 33_792), copy), ValueError, "at most 32768 inputs"),
    ):
        with pytest.raises(error, match=words):
            op.fill(*call)
        with pytest.raises(error, match=words):
            op.draft_head(x if call[0].shape[1] == 1024 else x.new_zeros(2, call[0].shape[1]), *reversed(call))
    for call, error, words in (
        ({"x": x.float()}, TypeError, "x.dtype must be torch.bfloat16"),
        ({"x": x[:0]}, ValueError, "have 1 to 65535 rows"),
        ({"x": x[:, :512]}, ValueError, r"weight.shape"),
        ({"out_dtype": torch.float16}, TypeError, "out_dtype must be one of"),
        ({}, RuntimeError, "CUDA"),
    ):
        with pytest.raises(error, match=words) as raised:
            op.draft_head(**{"x": x, "copy": copy, "weight": weight} | call)
        assert str(raised.value).startswith("draft_head: ")


def test_the_layout_is_the_kernels():
    layout = op.TILE_OUTPUTS, op.SCALE_INPUTS, op.UNIT_INPUTS, op.UNIT_BYTES, op.PART_OUTPUTS, op.BEST
    assert extension.load().draft_head_layout == layout


# ---- what it does to guesses


def guesses(peak, tokens=96, vocabulary=4096, inputs=1024):
    """A made draft: hidden states that lean towards a token's row by `peak` standard deviations of the logits.

    Returns the bf16 head's guesses, those of the copy alone, and ours.
    """
    generator = torch.Generator().manual_seed(int(10 * peak))
    weight = (torch.randn(vocabulary, inputs, generator=generator) / inputs**0.5).bfloat16()
    meant = torch.randint(0, vocabulary, (tokens,), generator=generator)
    towards = torch.randn(tokens, 1, generator=generator).abs() * peak
    hidden = 3 * (torch.randn(tokens, inputs, generator=generator) + towards * weight[meant].float()).bfloat16()
    copy = made(weight)
    scores, ours = reference.scores(hidden, copy), reference.draft_head(hidden, copy, weight)
    exact = hidden.double() @ weight.double().T
    assert 0.08 < relative_error(scores, exact) < 0.13
    return exact.argmax(-1), scores.argmax(-1), ours.argmax(-1)


@pytest.mark.parametrize("peak", [0, 8])
def test_what_a_head_in_int4_guesses_otherwise_the_best_of_each_part_do_not(peak):
    head, copy, ours = guesses(peak)
    otherwise, changed = ((head != found).double().mean().item() for found in (copy, ours))
    print(f"\npeak {peak}: {otherwise:.4f} of the copy's guesses are others, {changed:.4f} of ours")
    # of two parts; the model's head has 64, and the GPU's test asks all of it
    assert otherwise > (0.1 if peak == 0 else 0.01) and changed <= (0.05 if peak == 0 else 0)

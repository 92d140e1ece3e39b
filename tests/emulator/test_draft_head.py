"""The drafts' head as PTX for SM120: scores by its copy, the best of each part by the head, rows alone and together."""

from __future__ import annotations

import functools

import pytest
import torch

from deepseek_v4_sm120.ops import bf16_linear_draft_head as op
from deepseek_v4_sm120.reference import bf16_linear_draft_head as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from tests.emulator.emulated import emulated, ran

CHOICES = {"seed": 1, "most_instructions": 400, "multiprocessors": 3}
OUTPUTS, INPUTS = op.PART_OUTPUTS + 48, 1024
ROWS = 11  # of a block of two tiles, which has half of the inputs


@functools.cache
def made():
    """(x, copy, weight): rows of any size, among wider ones"""
    generator = torch.Generator().manual_seed(3)
    weight = (torch.randn(OUTPUTS, INPUTS, generator=generator) * 0.02).bfloat16()
    copy = op.empty(weight)
    op.fill(weight, copy)
    x = torch.randn(ROWS, INPUTS + 16, generator=generator)[:, :INPUTS] * 10.0 ** torch.arange(-6, 5)[:, None]
    return x.bfloat16(), copy, weight


@functools.cache
def found():
    x, copy, weight = made()
    with emulated(**CHOICES):
        logits = op.draft_head(x, copy, weight)
        assert ran("draft_head_kernel") == 1 and ran("draft_head_best_kernel") == 1
    return logits


def test_scores_are_the_copys_and_the_best_are_the_heads():
    x, copy, weight = made()
    scores, exact = reference.scores(x, copy), x.double() @ weight.double().T
    for row in range(ROWS):
        anew = (found()[row].double() - exact[row]).abs() < 1e-5 * exact[row].abs().max()
        near = (found()[row].double() - scores[row]).abs() < 1e-3 * scores[row].abs().max()
        assert bool((anew | near).all()), row
        for part in (slice(0, op.PART_OUTPUTS), slice(op.PART_OUTPUTS, OUTPUTS)):
            best = scores[row, part].topk(op.BEST).indices
            assert bool(anew[part][best].all()), "or two are as good to the last bits"
            assert int((anew & ~near)[part].sum()) <= op.BEST
        others = ~anew
        assert relative_error(found()[row][others], scores[row][others]) < 2e-4
        assert found()[row].argmax() == exact[row].argmax()


@pytest.mark.parametrize("row", [0, 10])
def test_a_row_alone_has_the_bits_of_a_row_among_others(row):
    x, copy, weight = made()
    with emulated(**CHOICES | {"seed": 2, "multiprocessors": 1}):
        alone = op.draft_head(x[row : row + 1], copy, weight)
        rounded = op.draft_head(x[row : row + 1], copy, weight, out_dtype=torch.bfloat16)
    assert torch.equal(alone[0], found()[row]) and torch.equal(rounded[0], found()[row].bfloat16())


def test_what_is_no_number_and_what_is_alike():
    """NaN and infinity in one row change no bit of another; of equals the first are computed anew."""
    x, copy, weight = (t.clone() for t in made())
    x, expected = x[:4].contiguous(), found()
    x[1, 5], x[2, 1007] = torch.nan, torch.inf
    with emulated(**CHOICES):
        logits = op.draft_head(x, copy, weight)
        x[3] = 0
        alike = op.draft_head(x[3:], copy, weight)
    assert bool(logits[1].isnan().all()) and not bool(logits[2].isfinite().any())
    assert torch.equal(logits[[0, 3]], expected[[0, 3]]) and not alike.any()

"""The drafts' head on the GPU: the copy's bits, logits at the heads' sizes and all rows, graphs, memory."""

from __future__ import annotations

import functools

import pytest
import torch

from deepseek_v4_sm120.ops import bf16_linear_draft_head as op
from deepseek_v4_sm120.reference import bf16_linear_draft_head as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.specs.bounds import DRAFT_HEAD

pytestmark = pytest.mark.gpu

VOCABULARY, HIDDEN = 129_280, 4096
TPS = (1, 2, 4, 8)
ROWS = (1, 2, 3, 5, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65)


def copied(weight):
    copy = op.empty(weight)
    op.fill(weight, copy)
    return copy


@functools.lru_cache(maxsize=1)
def make(tp, hidden=HIDDEN):
    """(bf16 head of a card, its copy, more than a step's rows)"""
    generator = torch.Generator("cuda").manual_seed(tp)
    weight = torch.empty((VOCABULARY // tp, hidden), dtype=torch.bfloat16, device="cuda")
    weight.normal_(generator=generator).mul_(torch.rand(weight.shape[0], 1, generator=generator, device="cuda") * 0.02)
    x = torch.randn(max(ROWS), hidden, generator=generator, device="cuda").bfloat16()
    return weight, copied(weight), x


def test_the_copy_is_the_one_that_the_cpu_makes():
    weight = torch.randn(5040, 1024, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert torch.equal(copied(weight.cuda()).cpu(), copied(weight))


@pytest.mark.parametrize("tp, hidden", [*((tp, HIDDEN) for tp in TPS), (8, 7168), (8, 1024)])
def test_logits_of_all_rows(tp, hidden):
    """By the copy in float64, the best by the head; a row alone as among others; guesses are the bf16 head's."""
    weight, copy, x = make(tp, hidden)
    together = op.draft_head(x, copy, weight)
    exact = torch.cat([x.double() @ part.double().T for part in weight.split(16_384)], 1)
    for first in range(0, weight.shape[0], 8 * op.PART_OUTPUTS):
        some = slice(first, first + 8 * op.PART_OUTPUTS)
        scores = reference.scores(x, copy[first // 16 : some.stop // 16])
        anew = torch.zeros_like(scores, dtype=torch.bool)
        for column in range(0, scores.shape[1], op.PART_OUTPUTS):
            part = slice(column, column + op.PART_OUTPUTS)
            anew[:, part] = reference.chosen(scores[:, part])
        out = together[:, some].double()
        # where two scores are alike to the last bits, another one may have been chosen
        is_exact = (out - exact[:, some]).abs() <= 1e-5 * exact[:, some].abs().amax(1, keepdim=True)
        assert (is_exact & anew).sum() >= 0.995 * anew.sum(), first
        others = ~anew & ~is_exact
        assert relative_error(out[others], scores[others]) < DRAFT_HEAD.truth, first
        assert others.sum() > 0.99 * (~anew).sum()
    assert torch.equal(together.argmax(1), exact.float().argmax(1))
    error = relative_error(together, exact)
    assert 0.05 < error < DRAFT_HEAD.shadow
    for rows in ROWS:
        assert torch.equal(op.draft_head(x[:rows], copy, weight), together[:rows]), rows
        assert torch.equal(op.draft_head(x[rows - 1 : rows], copy, weight)[0], together[rows - 1]), rows
    rounded = op.draft_head(x[:9], copy, weight, out_dtype=torch.bfloat16)
    assert torch.equal(rounded, together[:9].bfloat16())


def test_what_is_no_number_stays_in_its_row():
    weight, copy, x = make(8)
    expected = op.draft_head(x[:8], copy, weight)
    spoilt = x[:8].clone()
    spoilt[3, 17], spoilt[5, 4000] = torch.nan, -torch.inf
    found = op.draft_head(spoilt, copy, weight)
    kept = [0, 1, 2, 4, 6, 7]
    assert torch.equal(found[kept], expected[kept])
    assert bool(found[3].isnan().all()) and not bool(found[5].isfinite().any())


def test_a_graph_replays_it_and_sees_weights_that_were_copied_again():
    weight, copy, x = make(8)
    for rows in (1, 8, 40):
        static = torch.zeros_like(x[:rows])
        op.draft_head(static, copy, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = op.draft_head(static, copy, weight)
        static.copy_(x[:rows])
        graph.replay()
        assert torch.equal(out, op.draft_head(x[:rows], copy, weight))
        before = out.clone()
        weight.mul_(-2)
        op.fill(weight, copy)
        graph.replay()
        assert torch.equal(out, op.draft_head(x[:rows], copy, weight)) and not torch.equal(out, before)


def test_a_copy_needs_little_beside_itself_and_waits_for_nothing():
    weight, copy, _ = make(2)
    op.fill(weight, copy)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        op.fill(weight, copy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 400 << 20


def test_dependent_launches():
    """The launch reads the copy ahead of the end of the kernel that makes x, and the next reads what this one wrote."""
    weight, copy, x = make(8)
    square = weight[:HIDDEN].contiguous()
    of_square = copied(square)
    for rows in (1, 8, 20):
        apart = op.draft_head(x[:rows], of_square, square, out_dtype=torch.bfloat16)
        torch.cuda.synchronize()
        expected = op.draft_head(apart, copy, weight)
        for _ in range(20):
            first = op.draft_head(x[:rows], of_square, square, out_dtype=torch.bfloat16)
            assert torch.equal(op.draft_head(first, copy, weight), expected)

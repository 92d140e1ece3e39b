"""The drafts' head on the GPU: the copy's bits, the product's at the heads' sizes and all rows, graphs, memory."""

from __future__ import annotations

import functools

import pytest
import torch

from deepseek_v4_sm120.ops import fp8_linear_weights
from deepseek_v4_sm120.ops.fp8_linear import fp8_linear
from deepseek_v4_sm120.reference import fp8_linear as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.sglang_patches.adapters.fp8_linear_draft_head import DraftHead
from deepseek_v4_sm120.specs.bounds import DRAFT_HEAD
from deepseek_v4_sm120.specs.fp8_linear import make_x

pytestmark = pytest.mark.gpu

VOCABULARY, HIDDEN = 129_280, 4096
TPS = (1, 2, 4, 8)  # 4 and 8: not in whole blocks of 128
ROWS = (1, 2, 3, 5, 8, 9, 16, 17, 31, 32, 33, 48, 63, 64, 65, 127, 128, 129, 200, 256)


@functools.lru_cache(maxsize=1)
def make(tp):
    """(bf16 head of a card, its copy, a step's most rows)"""
    generator = torch.Generator("cuda").manual_seed(tp)
    weight = torch.empty((VOCABULARY // tp, HIDDEN), dtype=torch.bfloat16, device="cuda")
    weight.normal_(generator=generator).mul_(torch.rand(weight.shape[0], 1, generator=generator, device="cuda"))
    return weight, DraftHead.of(weight), make_x(256, 1, HIDDEN, generator)[:, 0]


def bits(tensor):
    return tensor.view(torch.int16)


@pytest.mark.parametrize("outputs", [128, 320, 5000])
def test_the_copy_is_the_one_that_the_cpu_makes(outputs):
    weight = torch.randn(outputs, 1024, generator=torch.Generator().manual_seed(outputs)).bfloat16()
    made = []
    for device in ("cpu", "cuda"):
        there = weight.to(device)
        made.append(fp8_linear_weights.empty(there))
        fp8_linear_weights.quantize(there, *made[-1])
    for one, other in zip(*made, strict=True):
        assert torch.equal(one.view(torch.uint8), other.cpu().view(torch.uint8))


@pytest.mark.parametrize("tp", TPS)
def test_logits_of_all_rows(tp):
    """Against float64 where outputs begin, end and change blocks; beside the bf16 head as a draft has it now."""
    weight, head, x = make(tp)
    together = head.logits(x, torch.bfloat16)
    assert together.shape == (256, VOCABULARY // tp) and together.is_contiguous()
    outputs = weight.shape[0]
    for first in (0, 128 * (outputs // 256) - 128, (outputs - 256) // 128 * 128):
        codes = head.codes[first : first + 384]
        truth = reference.fp8_linear(x, codes, head.scale[first // 128 : first // 128 + len(codes) // 128])
        found = together[:, first : first + 384]
        assert relative_error(found, truth[:, : found.shape[1]]) < DRAFT_HEAD.truth, first
    stock = torch.matmul(x, weight.T)
    assert 0.005 < relative_error(together, stock.double()) < DRAFT_HEAD.shadow
    alone = torch.cat([head.logits(x[row : row + 1], torch.bfloat16) for row in (0, 7, 63, 255)])
    assert torch.equal(bits(alone), bits(together[[0, 7, 63, 255]]))
    for rows in ROWS:
        assert torch.equal(bits(head.logits(x[:rows], torch.bfloat16)), bits(together[:rows])), rows
    wide = head.logits(x[:5], torch.float32)
    assert wide.dtype == torch.float32 and torch.equal(wide, together[:5].float())


def test_a_graph_replays_it_and_sees_weights_that_were_loaded_again():
    weight, head, x = make(8)
    for rows in (1, 8, 40, 256):
        static = torch.zeros_like(x[:rows])
        head.logits(static, torch.bfloat16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = head.logits(static, torch.bfloat16)
        static.copy_(x[:rows])
        graph.replay()
        assert torch.equal(bits(out), bits(head.logits(x[:rows], torch.bfloat16)))
        weight.mul_(-2)
        before = out.clone()
        graph.replay()
        assert torch.equal(bits(out), bits(before)), "the copy, not the head"
        head.fill()
        graph.replay()
        assert torch.equal(out.float(), -2 * before.float())


def test_a_copy_needs_little_beside_itself_and_waits_for_nothing():
    weight, _, _ = make(2)
    codes, scale = fp8_linear_weights.empty(weight)
    fp8_linear_weights.quantize(weight, codes, scale)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fp8_linear_weights.quantize(weight, codes, scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 200 << 20


def test_dependent_launches():
    """The head's launch reads its weights ahead of the end of the kernel that makes x."""
    weight, head, x = make(8)
    square = fp8_linear_weights.empty(weight[:HIDDEN])
    fp8_linear_weights.quantize(weight[:HIDDEN], *square)
    for rows in (1, 20, 130):
        apart = fp8_linear(x[:rows] * 0.01, *square)
        torch.cuda.synchronize()
        expected = head.logits(apart, torch.bfloat16)
        for _ in range(20):
            found = head.logits(fp8_linear(x[:rows] * 0.01, *square), torch.bfloat16)
            assert torch.equal(bits(found), bits(expected))

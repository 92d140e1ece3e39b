"""ops.router_topk on the GPU against float64, on hostile logits; bits, ties, padding, graphs."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.ops.router_topk import PART_NUMBERS, router_topk, row_argmax
from deepseek_v4_sm120.ops.shared.limits import STEP_ROWS
from deepseek_v4_sm120.reference import router_topk as reference
from deepseek_v4_sm120.specs.bounds import ROUTER_TOPK
from deepseek_v4_sm120.specs.provider import OURS
from deepseek_v4_sm120.specs.router_topk import KINDS, LOGITS, TOPK, Inputs, error, make_inputs, make_logits

pytestmark = pytest.mark.gpu

EXPERTS = (256, 384, 8, 16, 33, 64, 100, 128, 160, 511, 512)


def make(rows, device, *, experts=256, kind="normal", seed=0) -> Inputs:
    return make_inputs(rows, torch.Generator(device).manual_seed(seed), experts=experts, kind=kind)


def same_bits(one, other) -> bool:
    return torch.equal(one[0].view(torch.int32), other[0].view(torch.int32)) and torch.equal(one[1], other[1])


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("kind", ["normal", "ties", "low", "wide"])
@pytest.mark.parametrize("rows", [1, 2, 77])
def test_against_the_reference(rows, kind, experts, device):
    inputs = make(rows, device, experts=experts, kind=kind, seed=rows)
    assert error(OURS, router_topk(inputs.logits, inputs.bias, TOPK), inputs) < ROUTER_TOPK.truth
    if kind == "normal":
        before = router_topk(inputs.logits, inputs.bias, TOPK, log1p=False)
        assert error(OURS, before, inputs) < ROUTER_TOPK.truth


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind != "low"]
)  # whose scores are lost in a bias of float32
@pytest.mark.parametrize("experts", [256, 384, 64, 100])
def test_ids_are_the_references(kind, experts, device):
    """A few values of logits, far apart: which is chosen hangs on ties, NaN and infinity alone."""
    inputs = make(300, device, experts=experts, kind=kind)
    logits, bias = (inputs.logits * 2).round() / 2, (inputs.bias * 4).round() / 4
    found, expected = router_topk(logits, bias, TOPK), reference.router_topk(logits, bias, TOPK)
    assert torch.equal(found[1].long(), expected[1])
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("topk", range(1, 9))
@pytest.mark.parametrize("renormalize, scale", [(True, 1.0), (True, 1.5), (False, 2.5)])
def test_numbers_of_experts_and_scales(topk, renormalize, scale, device):
    inputs = make(40, device)
    found = router_topk(inputs.logits, inputs.bias, topk, renormalize=renormalize, scale=scale)
    expected = reference.router_topk(inputs.logits, inputs.bias, topk, renormalize=renormalize, scale=scale)
    assert torch.equal(found[1].long(), expected[1])
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_and_among_others(kind, device):
    inputs = make(STEP_ROWS, device, kind=kind)
    together = router_topk(inputs.logits, inputs.bias, TOPK)
    alone = [router_topk(row[None], inputs.bias, TOPK) for row in inputs.logits]
    assert same_bits(together, [torch.cat(parts) for parts in zip(*alone, strict=True)])
    prompt = inputs.logits.repeat(40, 1)
    assert same_bits(router_topk(prompt, inputs.bias, TOPK), [one.repeat(40, 1) for one in together])


def test_bf16_strides_and_padding(device):
    inputs = make(50, device)
    logits, bias = inputs.logits.bfloat16(), inputs.bias.bfloat16()
    found = router_topk(logits, bias, TOPK)
    assert same_bits(found, router_topk(logits.float(), bias.float(), TOPK))
    wide = torch.full((50, 301), torch.nan, device=device)
    wide[:, 1:257] = logits
    assert same_bits(found, router_topk(wide[:, 1:257], bias, TOPK))
    for real in (0, 1, 49, 50, 60):
        count = torch.tensor([real], dtype=torch.int32, device=device)
        weights, ids = router_topk(logits, bias, TOPK, real_rows=count)
        assert same_bits((weights[:real], ids[:real]), [one[:real] for one in found])
        assert bool((weights[real:] == 0).all()) and bool((ids[real:] == -1).all())
    assert router_topk(logits[:0], bias, TOPK)[1].shape == (0, TOPK)


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_graph_replay_behind_the_kernel_that_writes_the_logits(rows, device):
    """The kernel begins before its logits are there."""
    bias, source = make(rows, device).bias, torch.empty(rows, 256, device=device)
    router_topk(source, bias, TOPK)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = source * 2
        for _ in range(3):
            logits = logits + 1
        found = router_topk(logits, bias, TOPK)
    for seed in range(4):
        source.copy_(make(rows, device, seed=seed + 50).logits)
        graph.replay()
        assert same_bits(found, router_topk(source * 2 + 1 + 1 + 1, bias, TOPK))


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("columns", [4, 1028, PART_NUMBERS, 2 * PART_NUMBERS + 260, 32_320, 129_280])
def test_row_argmax(kind, columns, device):
    for rows in (1, 4, 37, 256):
        made = make_logits(kind, torch.Generator(device).manual_seed(rows), rows=rows, columns=columns + 8)[:, :columns]
        found = row_argmax(made)
        assert torch.equal(found, made.argmax(-1)) and torch.equal(found, reference.row_argmax(made))
        assert torch.equal(row_argmax(made[rows // 2 : rows // 2 + 1]), found[rows // 2 : rows // 2 + 1])


def test_row_argmax_in_a_graph_behind_what_makes_its_rows(device):
    base = make_logits("ties", torch.Generator(device).manual_seed(1), rows=4, columns=129_280)
    x, places = torch.empty_like(base), []
    torch.add(base, 1, out=x)
    row_argmax(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(20):  # each written right in front of it, and written over right behind
            x.copy_(torch.roll(base, i * 1000 + 1, 1))
            places.append(row_argmax(x))
            x.fill_(float("nan"))
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        for i, found in enumerate(places):
            assert torch.equal(found, torch.roll(base, i * 1000 + 1, 1).argmax(-1))

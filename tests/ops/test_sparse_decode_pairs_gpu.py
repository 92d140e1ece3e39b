"""The kernel for few rows in pairs: the bits of the kernel for few rows, whatever the call."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from deepseek_v4_sm120.ops import sparse_decode as op
from deepseek_v4_sm120.reference import kv_pages
from deepseek_v4_sm120.reference.accuracy import strict_error
from deepseek_v4_sm120.reference.sparse_decode import sparse_decode as reference
from deepseek_v4_sm120.specs.bounds import SPARSE_DECODE
from deepseek_v4_sm120.specs.sparse_decode import CacheShape, Inputs, Shape, make_inputs

pytestmark = pytest.mark.gpu

HEADS = (8, 16, 32, 1, 5, 24, 48, 64, 128)
RAGGED = (128, 0, 1, 31, 32, 33, 127, -7, 2**31 - 1, -(2**31), 64)
WINDOW = CacheShape(256, 128, lengths=RAGGED, masked=0.1)
EXTRAS = {
    "window": None,
    "C4": CacheShape(64, 512, lengths=(512, 300, 0, 511, 1), masked=0.05),
    "C4 Pro": CacheShape(64, 1024, lengths=(1024, 801, 2**31 - 1, -1)),
    "C128": CacheShape(2, 1152, lengths=(1152, 64, 1, 250), ascending=True),
    "odd pages": CacheShape(3, 77, lengths=(77, 40), masked=0.3),
}
PER_ROW = ("q", "indices", "topk_length", "extra_indices", "extra_topk_length")


def call(inputs: Inputs, pairs: bool, **more):
    return op.sparse_decode(**(inputs.arguments() | more), return_lse=True, prefill=False, pairs=pairs)


def rows_of(inputs: Inputs, rows) -> Inputs:
    there = [name for name in PER_ROW if getattr(inputs, name) is not None]
    return dataclasses.replace(inputs, **{name: getattr(inputs, name)[rows].contiguous() for name in there})


def equal(case: str, ours, expected) -> None:
    for name, one, other in zip(("out", "lse"), ours, expected, strict=True):
        different = int((one.contiguous().view(torch.int16) != other.contiguous().view(torch.int16)).sum())
        assert different == 0, f"{case}: {name} differs in {different} of {one.numel()} elements"


def check(case: str, inputs: Inputs) -> None:
    equal(f"{case}, {inputs.shape}", call(inputs, True), call(inputs, False))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_the_bits_of_few_rows(extra, heads, device):
    """One row and several, fewer groups than blocks and several rows a group; lengths of all kinds, masked slots, NaN
    in every byte that is not to be read."""
    for rows in (1, 2, 7, 300, 700):
        if rows * heads <= 700 * 32:
            check(extra, make_inputs(Shape(rows, heads, WINDOW, EXTRAS[extra]), seed=rows, device=device))


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_the_bits_of_few_rows_for_other_numbers(heads, device):
    """Infinite sinks, references that move within a row, exponents far apart, no sink, rows without lengths."""
    c4 = CacheShape(64, 512, masked=0.1)
    shapes = [
        Shape(90, heads, WINDOW, c4, flashmla=True),
        Shape(90, heads, WINDOW, c4, query_scale=60.0),
        Shape(90, heads, WINDOW, c4, wide_scales=True),
        Shape(90, heads, CacheShape(64, 128), None, sink=False),
        Shape(90, heads, CacheShape(1, 1), CacheShape(1, 1, lengths=(0, 1))),
    ]
    for shape in shapes:
        check("other numbers", make_inputs(shape, device=device))


@pytest.mark.parametrize("heads", [8, 16, 32])
@pytest.mark.parametrize("rows", [2048, 8192])
def test_a_prompts_rows(rows, heads, device):
    """Against float64 on some rows, and each of them has the bits that it has alone, in another order, in a captured
    call."""
    shape = Shape(rows, heads, CacheShape(256, 128, lengths=128), CacheShape(64, 512, lengths=512))
    inputs = make_inputs(shape, device=device)
    result = call(inputs, True)
    chosen = torch.tensor([0, 1, 263, 264, 265, rows // 2 + 1, rows - 2, rows - 1], device=device)
    some = rows_of(inputs, chosen)
    truth, _ = reference(**some.arguments())
    error = strict_error(result[0][chosen], truth)
    assert error <= SPARSE_DECODE.truth, f"relative error {error:.5f}"
    equal("in another call", call(some, True), tuple(part[chosen] for part in result))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).to(device)
    equal("in another order", call(rows_of(inputs, order), True), tuple(part[order] for part in result))
    graph, out = torch.cuda.CUDAGraph(), torch.full_like(inputs.q, float("nan"))
    with torch.cuda.graph(graph):
        op.sparse_decode(**inputs.arguments(), prefill=False, pairs=True, out=out)
    graph.replay()
    assert torch.equal(out, result[0])


@pytest.mark.parametrize("heads", [16, 32])
def test_half_of_the_heads_alone(heads, device):
    inputs = make_inputs(Shape(300, heads, WINDOW, EXTRAS["C4"]), device=device)
    whole, half = call(inputs, True), heads // 2
    for part in (slice(0, half), slice(half, heads)):
        alone = call(
            dataclasses.replace(inputs, q=inputs.q[:, :, part], attn_sink=inputs.attn_sink[part].clone()), True
        )
        equal(f"{half} of {heads} heads", alone, (whole[0][:, :, part], whole[1][:, part]))


@pytest.mark.parametrize("heads", [8, 32])
def test_by_page_table(heads, device):
    extra = CacheShape(64, 512, lengths=(512, 0, 77, 300), tables=3, masked=0.1)
    inputs = make_inputs(Shape(700, heads, WINDOW, extra), device=device)
    by_table = op.sparse_decode(**inputs.table_arguments(), return_lse=True, prefill=False, pairs=True)
    equal("table and list", by_table, call(inputs, False))


@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("spoil", ["rotary", "scale"])
def test_what_is_not_finite_stays_with_the_row_that_asks_for_it(spoil, heads, device):
    inputs = make_inputs(Shape(400, heads, CacheShape(64, 128), CacheShape(64, 512)), device=device)
    before, row = call(inputs, True), 266
    pool = inputs.extra_kv_pages
    flat = pool.view(torch.uint8).as_strided((pool.shape[0], pool.stride(0)), (pool.stride(0), 1))
    named = torch.zeros(pool.shape[0] * 64, dtype=torch.bool, device=device)
    named[inputs.extra_indices.long()] = True
    slot = int((~named).nonzero()[0])
    kv_pages.write_rows(pool, torch.tensor([slot], device=device), torch.ones(1, 512, device=device))
    page, entry = slot // 64, slot % 64
    at = entry * 576 + 448 if spoil == "rotary" else 64 * 576 + entry * 8 + 3
    flat[page, at : at + (2 if spoil == "rotary" else 1)] = 0xFF
    inputs.extra_indices[row, 0, 100] = slot
    result = call(inputs, True)
    equal("both kernels", result, call(inputs, False))
    assert spoil == "scale" or bool(result[0][row].isnan().all())
    others = [other for other in range(400) if other != row]
    equal("its neighbours", tuple(part[others] for part in result), tuple(part[others] for part in before))

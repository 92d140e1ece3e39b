"""Candidates from a page table (extra_page_table) against the list that it stands for: the same bits, all kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from deepseek_v4_sm120.ops.sparse_decode import MAX_TABLE_WIDTH, sparse_decode
from deepseek_v4_sm120.reference import kv_pages
from deepseek_v4_sm120.reference.accuracy import strict_error
from deepseek_v4_sm120.reference.sparse_decode import indices_of_page_table
from deepseek_v4_sm120.reference.sparse_decode import sparse_decode as reference
from deepseek_v4_sm120.specs.bounds import SPARSE_DECODE
from deepseek_v4_sm120.specs.sparse_decode import CacheShape, Inputs, Shape, make_inputs

pytestmark = pytest.mark.gpu

WINDOW = CacheShape(256, 128, lengths=(128, 77, 0))
RAGGED = (0, 1, 31, 32, 33, 64, 255, 256, -7, 2**31 - 1, -(2**31), 250)


@pytest.fixture(autouse=True, params=["few rows", "few rows in pairs", "many rows"])
def prefill(request, monkeypatch):
    """Every test runs through all kernels."""
    pairs = request.param == "few rows in pairs"
    monkeypatch.setattr("deepseek_v4_sm120.ops.sparse_decode.PAIR_ROWS", 1 if pairs else 10**9)
    return request.param == "many rows"


def by_list(inputs: Inputs, prefill: bool):
    """The list is made from the table, so that a test may change the table."""
    num_pages, page_size = inputs.extra_kv_pages.shape[:2]
    listed = indices_of_page_table(inputs.page_table, page_size, num_pages, inputs.page_table_rows)
    return sparse_decode(**{**inputs.arguments(), "extra_indices": listed}, prefill=prefill, return_lse=True)


def by_table(inputs: Inputs, prefill: bool):
    return sparse_decode(**inputs.table_arguments(), prefill=prefill, return_lse=True)


def check(case, inputs: Inputs, prefill: bool) -> None:
    expected, found = by_list(inputs, prefill), by_table(inputs, prefill)
    for name, one, other in zip(("out", "lse"), found, expected, strict=True):
        different = int((one != other).sum())
        assert torch.equal(one, other), f"{case}: {name} differs in {different} of {one.numel()} elements"


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128, 5])
@pytest.mark.parametrize("page_size", [2, 64, 3, 1, 48])
def test_the_same_bits_as_the_list(page_size, heads, prefill, device):
    for rows in (1, 12, 70):
        extra = CacheShape(page_size, 256, lengths=RAGGED, tables=3, masked=0.1)
        inputs = make_inputs(Shape(rows, heads, WINDOW, extra), seed=rows, device=device)
        check(f"{rows} rows", inputs, prefill)
        own = dataclasses.replace(inputs, page_table=inputs.page_table[inputs.page_table_rows], page_table_rows=None)
        check(f"{rows} rows, a table each", own, prefill)


@pytest.mark.parametrize("page_size", [2, 64])
@pytest.mark.parametrize("heads", [8, 64])
def test_accuracy(heads, page_size, prefill, device):
    extra = CacheShape(page_size, 1024, lengths=(1024, 0, 700, 1), tables=2)
    inputs = make_inputs(Shape(9, heads, WINDOW, extra), device=device)
    out, _ = by_table(inputs, prefill)
    error = strict_error(out, reference(**inputs.table_arguments())[0])
    assert error <= SPARSE_DECODE.truth, f"relative error {error:.5f}, allowed {SPARSE_DECODE.truth}"


@pytest.mark.parametrize("rows", [1, 3, 64, 700])
def test_a_context_of_1m_tokens(rows, prefill, device):
    """8,192 entries in 2-token pages; 700 rows of 64 heads are several launches of the kernel for few rows."""
    extra = CacheShape(2, 8192, lengths=(8192, 64, 4097, 8), tables=2)
    inputs = make_inputs(Shape(rows, 64 if rows < 700 else 17, WINDOW, extra), device=device)
    check("tables of requests", inputs, prefill)
    own = dataclasses.replace(inputs, page_table=inputs.page_table[inputs.page_table_rows], page_table_rows=None)
    check("a table for each row", own, prefill)


def test_a_table_of_1m_entries(prefill, device):
    extra = CacheShape(64, 1 << 20, lengths=(600, 64, 1300, 0), tables=1)
    inputs = make_inputs(Shape(4, 16, WINDOW, extra), device=device)
    check("1M entries", inputs, prefill)


def test_the_widest_table_there_may_be(prefill, device):
    """2^30 entries; a row's bits do not depend on the width."""
    inputs = make_inputs(Shape(5, 16, WINDOW, CacheShape(64, 1024, lengths=(1024, 3, 700), tables=1)), device=device)
    wide = torch.full((1, MAX_TABLE_WIDTH // 64), 2**31 - 1, dtype=torch.int32, device=device)
    wide[:, :16] = inputs.page_table
    found, expected = by_table(dataclasses.replace(inputs, page_table=wide), prefill), by_list(inputs, prefill)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_rows_of_no_table_and_tables_with_gaps(prefill, device):
    inputs = make_inputs(Shape(32, 16, WINDOW, CacheShape(2, 512, tables=3, masked=0.1)), device=device)
    check("no lengths", inputs, prefill)
    inputs.page_table_rows[:6] = torch.tensor([-1, 3, 2**31 - 1, -(2**31), 0, 2], device=device)
    check("rows of no table", inputs, prefill)
    wide = torch.full((3, 300), 1, dtype=torch.int32, device=device)
    wide[:, 7:263] = inputs.page_table
    check("strided", dataclasses.replace(inputs, page_table=wide[:, 7:263]), prefill)
    last = inputs.extra_kv_pages.shape[0] - 1
    slots, rows = torch.tensor([2 * last, 2 * last + 1], device=device), torch.ones(2, 512, device=device)
    kv_pages.write_rows(inputs.extra_kv_pages, slots, rows)
    inputs.page_table[:, 0], inputs.page_table[:, 1] = last, last + 1
    check("the pool's end", inputs, prefill)
    none = dataclasses.replace(inputs, page_table=inputs.page_table[:, :0])
    alone = dataclasses.replace(inputs, extra_kv_pages=None, extra_indices=None, extra_topk_length=None)
    expected = sparse_decode(**alone.arguments(), prefill=prefill, return_lse=True)
    assert all(torch.equal(one, other) for one, other in zip(by_table(none, prefill), expected, strict=True))


@pytest.mark.parametrize("page_size", [64, 2])
def test_pages_past_2_to_the_31_bytes(page_size, prefill, device):
    pages = -(-int(2.3 * 2**30) // kv_pages.page_bytes(page_size))
    pool = kv_pages.new_pages(pages, page_size, fill=0xFF, device=device)
    inputs = make_inputs(Shape(4, 16, WINDOW, CacheShape(page_size, 128, tables=2)), device=device)
    table = pages - 1 - torch.arange(2 * 128 // page_size, device=device).to(torch.int32).view(2, -1)
    slots = table[:, :, None] * page_size + torch.arange(page_size, device=device)
    kv_pages.write_rows(pool, slots.flatten(), torch.randn(256, 512, device=device))
    large = dataclasses.replace(inputs, extra_kv_pages=pool, page_table=table.contiguous())
    check("large pool", large, prefill)
    assert not bool(by_table(large, prefill)[0].isnan().any())


def test_graph_replay_with_another_table(prefill, device):
    shape = Shape(8, 64, WINDOW, CacheShape(2, 1024, lengths=(1024, 7, 600), tables=3))
    static = make_inputs(shape, device=device)
    by_table(static, prefill)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = by_table(static, prefill)
    for seed in (1, 2):
        fresh = make_inputs(shape, seed=seed, device=device)
        expected = by_list(fresh, prefill)
        for name, value in {**vars(static)}.items():
            if torch.is_tensor(value):
                value.copy_(getattr(fresh, name))
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(captured, expected, strict=True))

"""Prompts with at most 32 heads: rows that share tiles in the kernel for many rows, and the bits they have alone."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from deepseek_v4_sm120.ops import sparse_decode as op
from deepseek_v4_sm120.reference import kv_pages
from deepseek_v4_sm120.reference.accuracy import strict_error
from deepseek_v4_sm120.reference.sparse_decode import sparse_decode as reference
from deepseek_v4_sm120.specs.bounds import SPARSE_DECODE
from deepseek_v4_sm120.specs.sparse_decode import CacheShape, Inputs, Shape, make_inputs, rms_rows

pytestmark = pytest.mark.gpu

WINDOW, SWA_PAGE, C128_PAGE, RATIO = 128, 256, 2, 128
HEADS = (8, 16, 32, 1, 5, 24)
PER_ROW = ("q", "indices", "topk_length", "extra_indices", "extra_topk_length")


def prompt(first: int, rows: int, heads: int, device, *, seed: int = 0, width: int | None = None) -> Inputs:
    """Tokens first .. first + rows - 1 of one request as SGLang lists them: windows newest first, C128 causal and
    padded with -1, pages in no order; slots that no row names are NaN."""
    generator = torch.Generator(device=device).manual_seed(seed)
    position = torch.arange(first, first + rows, device=device)
    order = torch.randperm(-(-(first + rows) // SWA_PAGE) + 3, generator=generator, device=device)
    tokens = position[:, None] - torch.arange(WINDOW, device=device)
    slots = order[tokens.clamp(min=0) // SWA_PAGE] * SWA_PAGE + tokens.clamp(min=0) % SWA_PAGE
    indices = slots.masked_fill(tokens < 0, -1).to(torch.int32)[:, None]
    main = kv_pages.new_pages(order.numel(), SWA_PAGE, fill=0xFF, device=device)
    live = indices[indices >= 0].unique()
    kv_pages.write_rows(main, live, rms_rows(live.numel(), generator))

    lengths = ((position + 1) // RATIO).to(torch.int32)
    width = width or -(-max(1, int(lengths.max())) // 64) * 64
    entries = torch.arange(width, device=device)
    pages = torch.randperm(width // C128_PAGE + 5, generator=generator, device=device)
    listed = (pages[entries // C128_PAGE] * C128_PAGE + entries % C128_PAGE).expand(rows, -1)
    extra_indices = listed.masked_fill(entries >= lengths[:, None], -1).to(torch.int32)[:, None].contiguous()
    extra = kv_pages.new_pages(pages.numel(), C128_PAGE, fill=0xFF, device=device)
    live = extra_indices[extra_indices >= 0].unique()
    kv_pages.write_rows(extra, live, rms_rows(live.numel(), generator))
    q = torch.randn((rows, 1, heads, kv_pages.HEAD_DIM), generator=generator, device=device)
    return Inputs(
        q=q.to(torch.bfloat16),
        kv_pages=main,
        indices=indices,
        topk_length=(position + 1).clamp(max=WINDOW).to(torch.int32),
        attn_sink=torch.randn((heads,), generator=generator, device=device),
        extra_kv_pages=extra,
        extra_indices=extra_indices,
        extra_topk_length=lengths.clamp(min=1),
    )


def call(inputs: Inputs):
    return op.sparse_decode(**inputs.arguments(), return_lse=True, prefill=True)


def rows_of(inputs: Inputs, rows) -> Inputs:
    return dataclasses.replace(inputs, **{name: getattr(inputs, name)[rows].contiguous() for name in PER_ROW})


def verify(case: str, inputs: Inputs, result) -> None:
    truth, true_lse = reference(**inputs.arguments())
    error = strict_error(result[0], truth)
    assert error <= SPARSE_DECODE.truth, f"{case}: relative error {error:.5f}, allowed {SPARSE_DECODE.truth}"
    finite = torch.isfinite(true_lse)
    assert torch.equal(finite, torch.isfinite(result[1])), f"{case}: other rows are empty"
    assert float((result[1] - true_lse)[finite].abs().max()) <= 1e-4, f"{case}: lse"


def alone(case: str, inputs: Inputs, result, rows) -> None:
    """These rows, each in a call of its own, give what they gave in `result`, bit by bit."""
    for row in rows:
        for name, one, whole in zip(("out", "lse"), call(rows_of(inputs, slice(row, row + 1))), result, strict=True):
            different = int((one[0].view(torch.int16) != whole[row].view(torch.int16)).sum())
            assert different == 0, f"{case}: {name} of row {row} differs in {different} elements from the row alone"


@pytest.mark.parametrize("first", [0, 1000, 4000, 32700])
@pytest.mark.parametrize("heads", HEADS)
def test_rows_of_a_prompt(heads, first, device):
    """From its beginning, over the edge of a page of the window (1024, 4096), over ends of C128 entries."""
    inputs = prompt(first, 157, heads, device)
    result = call(inputs)
    verify(f"{heads} heads from {first}", inputs, result)
    alone(f"{heads} heads from {first}", inputs, result, (*range(20, 30), 95, 96, 97, 155, 156))


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_other_neighbours_give_the_same_bits(heads, device):
    inputs = prompt(3990, 120, heads, device)
    whole = call(inputs)
    for shift in range(1, 8):
        for one, other in zip(call(rows_of(inputs, slice(shift, None))), whole, strict=True):
            assert torch.equal(one, other[shift:]), f"without the first {shift} rows"
    order = torch.randperm(120, generator=torch.Generator().manual_seed(1)).to(device)
    for one, other in zip(call(rows_of(inputs, order)), whole, strict=True):
        assert torch.equal(one, other[order]), "in another order"
    for rows in range(1, 18):  # last stacks that are not full
        for one, other in zip(call(rows_of(inputs, slice(rows))), whole, strict=True):
            assert torch.equal(one, other[:rows]), f"the first {rows} rows"


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_rows_of_several_requests(heads, device):
    """Neighbours of different requests share slots only by chance, some twice in a call."""
    inputs = prompt(5000, 90, heads, device)
    generator = torch.Generator(device=device).manual_seed(3)
    slots = inputs.extra_indices[-1, 0][inputs.extra_indices[-1, 0] >= 0]
    for row in range(0, 90, 3):
        order = torch.randperm(slots.numel(), generator=generator, device=device)
        inputs.extra_indices[row, 0, : slots.numel()] = slots[order]
        inputs.extra_topk_length[row] = slots.numel() - row % 5
        inputs.indices[row] = inputs.indices[(row * 7) % 90]
    result = call(inputs)
    verify("several requests", inputs, result)
    alone("several requests", inputs, result, range(0, 90, 4))


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_lists_that_are_equal_but_for_an_entry(heads, device):
    """Another slot, -1, a slot beyond the pool, a shorter list, none at all: in one of neighbouring rows."""
    inputs = prompt(9000, 64, heads, device)
    result = call(inputs)
    before = [part.clone() for part in result]
    changed = {3: ("extra_indices", 40, 2), 9: ("extra_indices", 5, -1), 14: ("extra_indices", 69, 2**31 - 1)}
    changed |= {20: ("indices", 77, 5), 26: ("indices", 0, -1), 33: ("indices", 127, -(2**31))}
    for row, (name, column, slot) in changed.items():
        known = getattr(inputs, name)[row, 0]
        known[column] = int(known[slot]) if 0 <= slot < 128 else slot
    lengths = {38: (0, 0), 41: (0, 70), 44: (128, 0), 47: (33, 33), 50: (1, 1), 53: (127, 31), 56: (-7, 2**31 - 1)}
    for row, (main, extra) in lengths.items():
        inputs.topk_length[row], inputs.extra_topk_length[row] = main, extra
    result = call(inputs)
    verify("one entry", inputs, result)
    touched = sorted({*changed, *lengths})
    alone("one entry", inputs, result, touched)
    others = [row for row in range(64) if row not in touched]
    for one, other in zip(result, before, strict=True):
        assert torch.equal(one[others], other[others]), "a row's bits depend on its neighbours' lists"
        assert not torch.equal(one[touched], other[touched])
    assert float(result[0][38].abs().max()) == 0.0 and bool((result[1][38] == math.inf).all())


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_lists_that_share_nothing(heads, device):
    """C4's picks, masked entries, lengths of all kinds, pages of every size."""
    for page_size, lengths in ((64, (512, 300, 0, 31)), (48, (320, 33)), (1, (64, 65, 1))):
        window = CacheShape(page_size, 128, lengths=(128, 77, 0, 128), masked=0.1)
        extra = CacheShape(page_size, max(lengths), lengths=lengths, masked=0.1)
        inputs = make_inputs(Shape(21, heads, window, extra), device=device)
        result = call(inputs)
        verify(f"page size {page_size}", inputs, result)
        alone(f"page size {page_size}", inputs, result, range(21))


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_runs_that_look_like_windows_and_are_none(heads, device):
    """Falling runs that end at 32-slot edges inside lists, of one slot, over page edges, rising, repeated."""
    inputs = prompt(2000, 48, heads, device, width=64)
    pool = inputs.kv_pages.shape[0] * SWA_PAGE
    every = torch.arange(pool, device=device)
    kv_pages.write_rows(inputs.kv_pages, every, rms_rows(pool, torch.Generator(device=device).manual_seed(5)))
    falling = torch.arange(700, 700 - 128, -1, device=device)
    patterns = [
        falling,
        falling.flip(0),
        torch.cat([falling[:40], falling[:88]]),
        falling // 32 * 32,
        torch.cat([falling[60:61], falling[:127]]),
        falling.masked_fill(falling % 37 == 0, -1),
        torch.cat([falling[:61], falling[93:], falling[61:93]]),
        (falling * 97) % pool,
    ]
    for row in range(48):
        inputs.indices[row, 0] = patterns[row * 5 % 8].roll(row // 8).to(torch.int32)
        inputs.topk_length[row] = (128, 96, 61, 33)[row % 4]
    result = call(inputs)
    verify("runs", inputs, result)
    alone("runs", inputs, result, range(48))


@pytest.mark.parametrize("heads", [8, 16, 32])
@pytest.mark.parametrize("spoil", ["rotary", "scale"])
def test_what_is_not_finite_stays_with_the_rows_that_ask_for_it(spoil, heads, device):
    inputs = prompt(6000, 40, heads, device)
    before = call(inputs)
    row = 17
    for name, pages in (("indices", inputs.kv_pages), ("extra_indices", inputs.extra_kv_pages)):
        spoilt = rows_of(inputs, slice(None))
        slots = pages.shape[0] * pages.shape[1]
        named = torch.zeros(slots + 1, dtype=torch.bool, device=device)
        named[getattr(inputs, name)[getattr(inputs, name) >= 0]] = True
        slot = int((~named[:slots]).nonzero()[3])  # 0xFF all over: NaN rotary dimensions, scales of 2^128
        kv_pages.write_rows(pages, torch.tensor([slot], device=device), torch.ones(1, 512, device=device))
        page_size = pages.shape[1]
        flat = pages.view(torch.uint8).as_strided((pages.shape[0], pages.stride(0)), (pages.stride(0), 1))
        page, entry = slot // page_size, slot % page_size
        if spoil == "rotary":
            flat[page, entry * 576 + 448 + 17] = 0xFF
            flat[page, entry * 576 + 448 + 16] = 0x80
        else:
            flat[page, page_size * 576 + entry * 8 + 3] = 0xFF
        getattr(spoilt, name)[row, 0, 20] = slot
        result = call(spoilt)
        assert bool(result[0][row].isnan().all()), f"{name}: the row that asks for it"
        others = [other for other in range(40) if other != row]
        for one, other in zip(result, before, strict=True):
            assert torch.equal(one[others], other[others]), f"{name}: its neighbours"


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_page_tables_share_as_lists_do(heads, device):
    """Two requests by turns and in runs, tables that are none."""
    rows, columns = 75, 40
    generator = torch.Generator(device=device).manual_seed(2)
    inputs = prompt(9500, rows, heads, device, width=2 * columns)
    pages = inputs.extra_kv_pages.shape[0]
    kv_pages.write_rows(
        inputs.extra_kv_pages,
        torch.arange(2 * pages, device=device),
        rms_rows(2 * pages, generator),
    )
    table = torch.stack([torch.randperm(pages, generator=generator, device=device)[:columns] for _ in range(2)])
    table[1, 7] = -1
    of_row = torch.tensor([(row // 16) % 2 if row < 40 else row % 2 for row in range(rows)], device=device)
    of_row[[5, 50]] = 2
    inputs.page_table, inputs.page_table_rows = table.to(torch.int32), of_row.to(torch.int32)
    by_table = op.sparse_decode(**inputs.table_arguments(), return_lse=True, prefill=True)
    truth, _ = reference(**inputs.table_arguments())
    error = strict_error(by_table[0], truth)
    assert error <= SPARSE_DECODE.truth, f"relative error {error:.5f}"
    for row in (0, 5, 15, 16, 41, 50, 74):
        one = dataclasses.replace(
            rows_of(inputs, slice(row, row + 1)), page_table_rows=inputs.page_table_rows[row : row + 1].contiguous()
        )
        single = op.sparse_decode(**one.table_arguments(), return_lse=True, prefill=True)
        for part, whole in zip(single, by_table, strict=True):
            assert torch.equal(part[0], whole[row]), f"row {row}"


def test_more_rows_than_blocks(device):
    """Blocks that take several stacks; the default choice of the kernel."""
    inputs = prompt(20000, 1400, 8, device)
    result = op.sparse_decode(**inputs.arguments(), return_lse=True)
    assert op.takes_prefill(1400, 8, C128_PAGE, False)
    verify("1,400 rows", inputs, result)
    alone("1,400 rows", inputs, result, (0, 700, 1063, 1064, 1399))
    for one, other in zip(result, call(inputs), strict=True):
        assert torch.equal(one, other)

"""Sizes, strides and forms that ops.sparse_decode refuses, and what it hands to the extension. CPU only, with a
stand-in for `_C`. What else is refused is in test_checks.py.
"""

from __future__ import annotations

import functools
import importlib
import re
import types

import pytest
import torch

from deepseek_v4_sm120.ops.shared import extension
from deepseek_v4_sm120.reference import kv_pages

op = importlib.import_module("deepseek_v4_sm120.ops.sparse_decode")

ROWS, HEADS = 4, 16


pytestmark = pytest.mark.usefixtures("fake")


def good(**changes) -> dict:
    arguments = {
        "q": torch.zeros(ROWS, 1, HEADS, 512, dtype=torch.bfloat16),
        "kv_pages": kv_pages.new_pages(3, 256),
        "indices": torch.zeros(ROWS, 1, 128, dtype=torch.int32),
        "topk_length": torch.zeros(ROWS, dtype=torch.int32),
        "attn_sink": torch.zeros(HEADS),
        "extra_kv_pages": kv_pages.new_pages(5, 64),
        "extra_indices": torch.zeros(ROWS, 1, 512, dtype=torch.int32),
        "extra_topk_length": torch.zeros(ROWS, dtype=torch.int32),
    }
    return {**arguments, **changes}


def bf16(*shape) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def int32(*shape) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def strided_pages(stride: int) -> torch.Tensor:
    return torch.zeros(4 * stride + 584 * 64, dtype=torch.uint8).as_strided((3, 64, 1, 584), (stride, 584, 584, 1))


def shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """The same shape, starting `elements` past an aligned address."""
    return torch.zeros(tensor.numel() + elements, dtype=tensor.dtype)[elements:].view(tensor.shape)


def wide_pages(page_size: int) -> torch.Tensor:
    return torch.zeros(page_size * 584, dtype=torch.uint8).view(1, page_size, 1, 584)


def table(page_table, **changes) -> dict:
    """A call with a page table instead of the second cache's list."""
    return {"extra_indices": None, "extra_page_table": page_table, **changes}


REFUSALS = {
    "q second dim": (
        dict(q=bf16(ROWS, 2, HEADS, 512)),
        "q.shape must be [rows, 1, 1 to 128 heads, 512], got [4, 2, 16,",
    ),
    "q head dim": (
        dict(q=bf16(ROWS, 1, HEADS, 576)),
        "q.shape must be [rows, 1, 1 to 128 heads, 512], got [4, 1, 16, 576]",
    ),
    "too many heads": (
        dict(q=bf16(ROWS, 1, 129, 512)),
        "q.shape must be [rows, 1, 1 to 128 heads, 512], got [4, 1, 129,",
    ),
    "no heads": (dict(q=bf16(ROWS, 1, 0, 512)), "q.shape must be [rows, 1, 1 to 128 heads, 512], got [4, 1, 0, 512]"),
    "q strides": (
        dict(q=bf16(ROWS, 1, HEADS, 516)[..., :512]),
        "q must have strides [a multiple of 8, a multiple of 8, a multiple of 8, 1], got strides [8256, 8256, 516, 1]",
    ),
    "q address": (
        dict(q=shifted(bf16(ROWS, 1, HEADS, 512), 4)),
        "q must start on a 16-byte boundary, got an address 8 bytes past one",
    ),
    "pages KV heads": (
        dict(kv_pages=torch.zeros(3, 64, 2, 584, dtype=torch.uint8)),
        "kv_pages.shape must be [pages, page_size, 1, 584], none 0, got [3, 64, 2, 584]",
    ),
    "no pages": (
        dict(kv_pages=torch.zeros(0, 64, 1, 584, dtype=torch.uint8)),
        "kv_pages.shape must be [pages, page_size, 1, 584], none 0, got [0, 64, 1, 584]",
    ),
    "empty pages": (
        dict(kv_pages=torch.zeros(3, 0, 1, 584, dtype=torch.uint8)),
        "kv_pages.shape must be [pages, page_size",
    ),
    "token bytes": (
        dict(kv_pages=torch.zeros(3, 64, 1, 576, dtype=torch.uint8)),
        "kv_pages.shape must be [pages, page_size, 1, 584], none 0, got [3, 64, 1, 576]",
    ),
    "page stride not aligned": (
        dict(kv_pages=strided_pages(37_448)),
        "kv_pages.stride(0) must be a multiple of 16 and at least 37376 (page bytes), got 37448",
    ),
    "page stride too small": (
        dict(kv_pages=strided_pages(36_864)),
        "kv_pages.stride(0) must be a multiple of 16 and at least 37376 (page bytes), got 36864",
    ),
    "page address": (
        dict(kv_pages=shifted(torch.zeros(3, 64, 1, 584, dtype=torch.uint8), 8)),
        "kv_pages must start on a 16-byte boundary, got an address 8 bytes past one",
    ),
    "indices rows": (dict(indices=int32(3, 1, 128)), "indices.shape must be [4, 1, width], got [3, 1, 128]"),
    "indices heads": (dict(indices=int32(ROWS, 2, 128)), "indices.shape must be [4, 1, width], got [4, 2, 128]"),
    "indices stride": (dict(indices=int32(ROWS, 1, 256)[..., ::2]), "indices must have strides ["),
    "length shape": (dict(topk_length=int32(5)), "topk_length.shape must be [4], got [5]"),
    "length stride": (dict(topk_length=int32(8)[::2]), "topk_length must be contiguous, got strides [2]"),
    "sink shape": (dict(attn_sink=torch.zeros(64)), "attn_sink.shape must be [16], got [64]"),
    "extra pages alone": (
        dict(extra_indices=None, extra_topk_length=None),
        "extra_kv_pages and extra_indices or extra_page_table must be given together, extra_topk_length only with "
        "them, got extra_kv_pages = a tensor and extra_indices = None",
    ),
    "extra indices alone": (dict(extra_kv_pages=None), "got extra_kv_pages = None and extra_indices = a tensor"),
    "extra length alone": (
        dict(extra_kv_pages=None, extra_indices=None),
        "got extra_kv_pages = None and extra_indices = None",
    ),
    "extra token bytes": (
        dict(extra_kv_pages=torch.zeros(3, 64, 1, 656, dtype=torch.uint8)),
        "extra_kv_pages.shape must be [pages, page_size, 1, 584], none 0, got [3, 64, 1, 656]",
    ),
    "extra indices rows": (
        dict(extra_indices=int32(1, 1, 512)),
        "extra_indices.shape must be [4, 1, width], got [1, 1, 512]",
    ),
    "extra length": (dict(extra_topk_length=int32(1)), "extra_topk_length.shape must be [4], got [1]"),
    "list and page table": (
        dict(extra_page_table=int32(ROWS, 8)),
        "extra_page_table must be given with extra_kv_pages and without extra_indices, extra_page_table_rows only with "
        "it, got extra_page_table = a tensor, extra_kv_pages = a tensor and extra_indices = a tensor",
    ),
    "page table without pages": (
        table(int32(ROWS, 8), extra_kv_pages=None),
        "got extra_page_table = a tensor, extra_kv_pages = None and extra_indices = None",
    ),
    "rows of no page table": (
        dict(extra_page_table_rows=int32(ROWS)),
        "got extra_page_table = None, extra_kv_pages = a tensor and extra_indices = a tensor",
    ),
    "page table rank": (table(int32(ROWS, 1, 8)), "extra_page_table.shape must be [tables, pages], got [4, 1, 8]"),
    "page table rows": (
        table(int32(2, 8)),
        "extra_page_table.shape[0] must be 4, or extra_page_table_rows given, got 2",
    ),
    "page table too wide": (
        dict(table(int32(1, 2**16 + 1).expand(ROWS, -1)), extra_kv_pages=wide_pages(2**14)),
        "extra_page_table must span at most 1073741824 entries, got 1073758208",
    ),
    "page table stride": (table(int32(ROWS, 16)[:, ::2]), "extra_page_table must have strides ["),
    "rows of page table": (
        table(int32(2, 8), extra_page_table_rows=int32(5)),
        "extra_page_table_rows.shape must be [4], got [5]",
    ),
    "page table and length": (
        table(int32(ROWS, 8), extra_topk_length=int32(5)),
        "extra_topk_length.shape must be [4], got [5]",
    ),
    "page table and token bytes": (
        table(int32(ROWS, 8), extra_kv_pages=torch.zeros(3, 64, 1, 656, dtype=torch.uint8)),
        "extra_kv_pages.shape must be [pages, page_size, 1, 584], none 0, got [3, 64, 1, 656]",
    ),
    "out shape": (dict(out=bf16(ROWS, 1, HEADS - 1, 512)), "out.shape must be [4, 1, 16, 512], got [4, 1, 15, 512]"),
    "out strides": (
        dict(out=bf16(ROWS, 1, HEADS, 516)[..., :512]),
        "out must have strides [a multiple of 8, a multiple of 8, a multiple of 8, 1], got strides [8256, 8256, 516,",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name, fake):
    changes, message = REFUSALS[name]
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        op.sparse_decode(**good(**changes))
    assert str(raised.value).startswith("sparse_decode: ")
    assert not fake.calls


def test_pages_are_uint8_or_float8():
    pages = kv_pages.new_pages(3, 256).view(torch.int8)
    with pytest.raises(TypeError, match="kv_pages.dtype must be torch.uint8 or torch.float8_e4m3fn, got torch.int8"):
        op.sparse_decode(**good(kv_pages=pages))


ACCEPTED = {
    "plain": {},
    "no lengths, no sink": dict(topk_length=None, attn_sink=None, extra_topk_length=None),
    "no extra cache": dict(extra_kv_pages=None, extra_indices=None, extra_topk_length=None),
    "float8 pages": dict(kv_pages=kv_pages.new_pages(3, 256).view(torch.float8_e4m3fn)),
    "padded q": dict(q=bf16(ROWS, 1, HEADS + 8, 640)[:, :, :HEADS, :512]),
    "heads before rows": dict(q=bf16(HEADS, ROWS, 1, 512).permute(1, 2, 0, 3)),
    "padded indices": dict(indices=int32(ROWS, 1, 200)[..., :128], extra_indices=int32(ROWS, 1, 600)[..., 3:515]),
    "one index row for all": dict(indices=int32(1, 1, 128).expand(ROWS, 1, 128)),
    "page table": table(int32(ROWS, 8)),
    "page table of a request": table(int32(3, 8), extra_page_table_rows=int32(ROWS)),
    "no page table at all": table(int32(0, 0), extra_page_table_rows=int32(ROWS)),
    "one page table for all": table(int32(1, 8).expand(ROWS, 8), extra_topk_length=None),
    "padded page table": table(int32(ROWS, 20)[:, 3:11], extra_kv_pages=kv_pages.new_pages(9, 2)),
    "out": dict(out=bf16(ROWS, 1, HEADS, 512)),
    "padded out": dict(out=bf16(ROWS, 1, 64, 512)[:, :, :HEADS]),
    "odd page size": dict(kv_pages=kv_pages.new_pages(7, 48), extra_kv_pages=kv_pages.new_pages(9, 3)),
    "single page without pad": dict(kv_pages=torch.zeros(1, 1, 1, 584, dtype=torch.uint8)),
    "no rows": dict(
        q=bf16(0, 1, HEADS, 512),
        indices=int32(0, 1, 128),
        topk_length=int32(0),
        extra_indices=int32(0, 1, 512),
        extra_topk_length=int32(0),
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name):
    """All checks pass: what is left to refuse is the CPU."""
    with pytest.raises(RuntimeError, match="CUDA device, got cpu"):
        op.sparse_decode(**good(**ACCEPTED[name]))


class Stream:
    """torch's current stream and capture state, as far as ops asks."""

    def __init__(self, monkeypatch):
        self.raw, self.capturing, self.capture = 77, False, 1
        extension.load().capture_id = lambda raw: self.capture
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.raw, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: self.capturing, raising=False)
        monkeypatch.setattr(op.cuda_tensors, "num_sms", lambda index: 132)
        monkeypatch.setattr(op, "_control_words", functools.cache(op._control_words.__wrapped__))
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **kind: zeros(*size, **kind))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index: types.SimpleNamespace(synchronize=lambda: None))


@pytest.fixture
def stream(fake, monkeypatch):
    return Stream(monkeypatch)


def launch(arguments, lse=None, prefill=None, pairs=None):
    extra = ("extra_kv_pages", "extra_indices", "extra_topk_length", "extra_page_table", "extra_page_table_rows")
    out = torch.empty_like(arguments["q"])
    caches = [arguments.get(name) for name in ("q", "kv_pages", "indices", "topk_length")]
    of_extra = tuple(arguments.get(name) for name in extra)
    op._launch(*caches, of_extra, arguments.get("attn_sink"), 0.125, out, lse, prefill, pairs)
    return out


def test_the_call_that_reaches_the_extension(fake, stream):
    arguments = good(q=bf16(ROWS, 1, 24, 512)[:, :, :HEADS], indices=int32(ROWS, 1, 192)[..., 64:])
    lse = torch.zeros(ROWS, HEADS)
    out = launch(arguments, lse)
    _, call = fake.calls[0]
    workspace = {name: call.pop(name) for name in ("partials", "partials_bytes", "control", "control_words")}
    assert call == dict(
        q=arguments["q"].data_ptr(),
        q_stride_row=24 * 512,
        q_stride_head=512,
        rows=ROWS,
        heads=HEADS,
        kv_pages=arguments["kv_pages"].data_ptr(),
        page_bytes=149_760,
        page_size=256,
        num_pages=3,
        indices=arguments["indices"].data_ptr(),
        indices_stride=192,
        indices_width=128,
        topk_length=arguments["topk_length"].data_ptr(),
        extra_kv_pages=arguments["extra_kv_pages"].data_ptr(),
        extra_page_bytes=37_440,
        extra_page_size=64,
        extra_num_pages=5,
        extra_indices=arguments["extra_indices"].data_ptr(),
        extra_indices_stride=512,
        extra_indices_width=512,
        extra_topk_length=arguments["extra_topk_length"].data_ptr(),
        extra_page_table=0,
        extra_page_table_stride=0,
        extra_num_page_tables=0,
        extra_page_table_rows=0,
        attn_sink=arguments["attn_sink"].data_ptr(),
        softmax_scale=0.125,
        out=out.data_ptr(),
        out_stride_row=24 * 512 if out.stride(0) == 24 * 512 else HEADS * 512,
        out_stride_head=512,
        lse=lse.data_ptr(),
        num_sms=132,
        prefill=False,
        pairs=False,
        pdl=True,
        stream=77,
    )
    assert workspace["partials"] and workspace["control"]
    assert (workspace["partials_bytes"], workspace["control_words"]) == (4096 * ROWS, 4 * ROWS)


def test_the_page_table_that_reaches_the_extension(fake, stream):
    page_table, rows = int32(3, 20)[:, 2:10], int32(ROWS)
    launch(good(**table(page_table, extra_page_table_rows=rows)))
    _, call = fake.calls[0]
    named = ("extra_page_table", "extra_page_table_stride", "extra_num_page_tables", "extra_page_table_rows")
    assert [call[name] for name in named] == [page_table.data_ptr(), 20, 3, rows.data_ptr()]
    assert (call["extra_indices"], call["extra_indices_width"], call["extra_page_size"]) == (0, 8 * 64, 64)


@pytest.mark.parametrize(
    ("rows", "heads", "page_size", "asked", "chosen"),
    [
        (op.PREFILL_ROWS, op.PREFILL_HEADS, 64, None, True),
        (op.PREFILL_ROWS - 1, op.PREFILL_HEADS, 64, None, False),
        (op.PREFILL_ROWS, op.PREFILL_HEADS - 1, 64, None, False),
        (op.SHARED_ROWS, 1, op.SHARED_PAGE_SIZE, None, True),
        (op.SHARED_ROWS, 1, op.SHARED_PAGE_SIZE + 1, None, False),
        (op.SHARED_ROWS - 1, 1, op.SHARED_PAGE_SIZE, None, False),
        (op.SHARED_ROWS, 1, None, None, True),
        (1, 1, 64, True, True),
        (op.PREFILL_ROWS, op.PREFILL_HEADS, 64, False, False),
    ],
)
def test_sizes_choose_the_kernel_and_the_one_for_many_rows_takes_no_scratch(
    fake, stream, rows, heads, page_size, asked, chosen
):
    few = dict(indices=int32(rows, 1, 128), topk_length=None, extra_kv_pages=None, extra_indices=None)
    if page_size is not None:
        few |= dict(extra_kv_pages=kv_pages.new_pages(3, page_size), extra_indices=int32(rows, 1, 128))
    launch(good(q=bf16(rows, 1, heads, 512), extra_topk_length=None, attn_sink=None, **few), prefill=asked)
    _, call = fake.calls[0]
    assert call["prefill"] is chosen and bool(call["partials_bytes"]) is not chosen


@pytest.mark.parametrize(
    ("rows", "asked", "pairs"),
    [(op.PAIR_ROWS, None, True), (op.PAIR_ROWS - 1, None, False), (1, True, True), (op.PAIR_ROWS, False, False)],
)
def test_from_so_many_rows_on_they_go_in_pairs(fake, stream, rows, asked, pairs):
    """And the scratch is that of the same kernel."""
    of_scratch = []
    fake.sparse_decode_workspace = lambda **sizes: of_scratch.append(sizes["pairs"]) or (0, 0)
    few = dict(indices=int32(rows, 1, 128), extra_indices=int32(rows, 1, 128), topk_length=None)
    launch(good(q=bf16(rows, 1, 32, 512), extra_topk_length=None, attn_sink=None, **few), pairs=asked)
    assert [fake.calls[0][1]["pairs"]] == of_scratch == [pairs]
    assert fake.calls[0][1]["prefill"] is False


def test_absent_arguments_are_zero(fake, stream):
    absent = ("topk_length", "attn_sink", "extra_kv_pages", "extra_indices", "extra_topk_length")
    launch(good(**dict.fromkeys(absent)))
    _, call = fake.calls[0]
    assert [call[name] for name in (*absent, "lse", "extra_page_bytes", "extra_num_pages", "extra_indices_width")] == [
        0
    ] * 9


def test_eager_calls_of_a_stream_share_control_words_and_streams_do_not(fake, stream):
    launch(good())
    launch(good())
    stream.raw = 78
    launch(good())
    first, second, other = (call["control"] for _, call in fake.calls)
    assert first == second and abs(other - first) >= 4 * 1024


def test_calls_of_a_capture_share_control_words_and_captures_do_not(fake, stream):
    launch(good())
    stream.capturing = True
    for stream.capture in (1, 1, 2):
        launch(good())
    eager, first, again, other = (call["control"] for _, call in fake.calls)
    assert first == again and len({eager, first, other}) == 3 and (other - first) % 128 == 0


def test_a_first_call_under_capture_zeroes_words_of_its_own(fake, stream):
    stream.capturing = True
    launch(good())
    assert op._control_words(None)._store is None and fake.calls[0][1]["control"]

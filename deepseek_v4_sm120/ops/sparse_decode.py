"""Public sparse decode: checks the arguments, owns the workspace, launches `_C.sparse_decode`."""

from __future__ import annotations

import functools

import torch

from deepseek_v4_sm120.ops.shared import cuda_tensors, extension
from deepseek_v4_sm120.ops.shared.checks import BF16, FP32, INT32, VECTOR, Call
from deepseek_v4_sm120.ops.shared.kv_page_layout import kv_page_layout
from deepseek_v4_sm120.ops.shared.zeroed_words import ZeroedWords

MAX_HEADS = 128
MAX_TABLE_WIDTH = 1 << 30  # entries of a row of extra_page_table
# From so many rows and heads on, the kernel for many rows takes a call. It is faster from about 100 rows on, but decode
# and verify must not change kernels with the size of the batch: their bits would differ.
PREFILL_ROWS, PREFILL_HEADS = 513, 33
# Where neighbouring rows of a prompt share their candidates, with any number of heads: a window alone, C128's pages,
# whose lists name all entries below a length. C4's 64-token pages hold picks of each row's own. From more rows on,
# because rows of different requests share nothing, and are then several times slower there: a batch that decodes is
# not that large.
SHARED_PAGE_SIZE, SHARED_ROWS = 2, 1025
# From so many rows on, what stays with the kernel for few rows takes it in pairs: the same bits. At 512 rows 2 to 12%
# less on an H200; a call of few takes 35 us in pairs, whatever it has.
PAIR_ROWS = 513
_STRIDES = 8  # that rows and heads have multiples of: 16 bytes
_CAPTURE_STORE_BYTES = 4 << 20  # room for 2,000 captures

_PAGE_DTYPES = (torch.uint8, torch.float8_e4m3fn)


def sparse_decode(
    q,
    kv_pages,
    indices,
    *,
    softmax_scale=None,
    topk_length=None,
    attn_sink=None,
    extra_kv_pages=None,
    extra_indices=None,
    extra_topk_length=None,
    extra_page_table=None,
    extra_page_table_rows=None,
    out=None,
    return_lse=False,
    prefill=None,
    pairs=None,
):
    """Sparse MLA over FP8 pages, for decode and for prefill: one softmax over one or two paged caches, with a sink.

    q                  [rows, 1, heads, 512] bf16, last dim contiguous, other strides multiples of 8; heads in 1..128
    kv_pages           [pages, page_size, 1, 584] uint8 or float8_e4m3fn, any page_size; stride(0) = page stride in
                       bytes, the inner strides do not describe the memory (csrc/kv_page_layout.h)
    indices            [rows, 1, width] int32 token slots, last dim contiguous, row stride free; a negative slot and one
                       beyond the pool have no weight in the softmax and are not read
    softmax_scale      float, default 512 ** -0.5
    topk_length        [rows] int32: only that many leading indices count, clamped to 0..width; None: all
    attn_sink          [heads] float32, natural-log logit without a value, or None; -inf is no sink, +inf gives out 0
    extra_kv_pages, extra_indices, extra_topk_length
                       the second cache (C4, C128), with page size, width and lengths of its own; pages come with
                       indices or with a page table, or not at all
    extra_page_table   [tables, pages] int32 page ids, last dim contiguous, row stride free; instead of extra_indices
                       where a row's candidates are all entries below its length (C128: (t + 1) // 128), a list of
                       which is page_size times as wide and per row. Candidate e is slot
                       page_table[table, e // page_size] * page_size + e % page_size, masked where the page is negative
                       or beyond the pool; lengths are clamped to 0..pages * page_size. To the bit as with that list.
                       At most 2^30 entries a row. SGLang's page_table is such a table of C128, with lengths seq // 128
    extra_page_table_rows
                       [rows] int32: the table of each row (its request's), all masked where that is no table; None:
                       a table for each row, tables = rows
    out                bf16 like q, written in place, or None; must not overlap q
    return_lse         also return lse
    prefill            True: the kernel for many rows, False: the one for few, None: takes_prefill decides, by sizes
                       alone. A row's bits depend on the kernel, by rounding, and on nothing else outside the row
    pairs              True: the kernel for few rows in pairs, for throughput, where no row can have more than 40 leaves
                       of 32 candidates, None: from PAIR_ROWS rows on. Where prefill does not decide; the same bits
    returns            out [rows, 1, heads, 512] bf16, or (out, lse); lse [rows, heads, 1] float32: natural log, without
                       the sink. A row without a candidate has out 0 and lse +inf
    raises             TypeError (dtype), ValueError (shape, stride, alignment, overlap, value),
                       RuntimeError (device, launch)
    cuda graphs        capture-safe: no host sync; allocates only out, lse and the split workspace, through torch
    streams            runs on the current stream of q's device; concurrent calls on several streams are independent,
                       and so are graphs replayed side by side
    source             semantics of FlashMLA's flash_mla_with_kvcache (sparse, FP8, MODEL1 pages), which masks only -1;
                       specification in reference/sparse_decode.py
    """
    check = Call("sparse_decode", "q", q)
    rows, heads = _check_query(check, q)
    _check_cache(check, "kv_pages", kv_pages, "indices", indices, "topk_length", topk_length, rows)
    extra = (extra_kv_pages, extra_indices, extra_topk_length, extra_page_table, extra_page_table_rows)
    _check_extra(check, *extra, rows)
    if attn_sink is not None:
        check.tensor("attn_sink", attn_sink, FP32, (heads,))
    if out is not None:
        check.tensor("out", out, BF16, q.shape, _STRIDES, VECTOR)
        check.written("q", q, ("out", out))
    check.on_cuda()
    if out is None:
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device) if return_lse else None
    if rows:
        with cuda_tensors.on_device_of(q):
            _launch(q, kv_pages, indices, topk_length, extra, attn_sink, softmax_scale, out, lse, prefill, pairs)
    return (out, lse.unsqueeze(-1)) if return_lse else out


def takes_prefill(rows: int, heads: int, extra_page_size: int, by_page_table: bool) -> bool:
    """Whether a call goes to the kernel for many rows; extra_page_size: 1 without a second cache.

    Up to 32 heads that kernel stacks 8, 4 or 2 neighbouring rows and pays where they share what they read; which rows
    do is found out on the GPU, and is no part of this choice.
    """
    shared = rows >= SHARED_ROWS and (by_page_table or extra_page_size <= SHARED_PAGE_SIZE)
    return rows >= PREFILL_ROWS and (heads >= PREFILL_HEADS or shared)


def _launch(q, kv_pages, indices, topk_length, extra, attn_sink, softmax_scale, out, lse, prefill, pairs):
    """Checked arguments to raw pointers; q's device is current."""
    extra_kv_pages, extra_indices, extra_topk_length, extra_page_table, extra_page_table_rows = extra
    rows, _, heads, dim = q.shape
    q_stride_row, _, q_stride_head, _ = q.stride()
    out_stride_row, _, out_stride_head, _ = out.stride()
    num_pages, page_size, _, _ = kv_pages.shape
    width = indices.shape[2]
    extra_num_pages, extra_page_size, extra_width = 0, 1, 0
    if extra_kv_pages is not None:
        extra_num_pages, extra_page_size, _, _ = extra_kv_pages.shape
        if extra_page_table is None:
            extra_width = extra_indices.shape[2]
        else:
            extra_width = extra_page_table.shape[1] * extra_page_size
    index = q.device.index
    stream = cuda_tensors.current_stream(index)
    num_sms = cuda_tensors.num_sms(index)
    if prefill is None:
        prefill = takes_prefill(rows, heads, extra_page_size, extra_page_table is not None)
    if pairs is None:
        pairs = rows >= PAIR_ROWS
    sizes = (rows, heads, width, extra_width, num_sms)
    partials_bytes, control_words = (0, 0) if prefill else _workspace(*sizes, pairs)
    partials = torch.empty((partials_bytes,), dtype=torch.uint8, device=q.device) if partials_bytes else None
    control = _control_words(index).take(stream, control_words)
    extension.load().sparse_decode(
        q=q.data_ptr(),
        q_stride_row=q_stride_row,
        q_stride_head=q_stride_head,
        rows=rows,
        heads=heads,
        kv_pages=kv_pages.data_ptr(),
        page_bytes=kv_pages.stride(0),
        page_size=page_size,
        num_pages=num_pages,
        indices=indices.data_ptr(),
        indices_stride=indices.stride(0),
        indices_width=width,
        topk_length=0 if topk_length is None else topk_length.data_ptr(),
        extra_kv_pages=0 if extra_kv_pages is None else extra_kv_pages.data_ptr(),
        extra_page_bytes=0 if extra_kv_pages is None else extra_kv_pages.stride(0),
        extra_page_size=extra_page_size,
        extra_num_pages=extra_num_pages,
        extra_indices=0 if extra_indices is None else extra_indices.data_ptr(),
        extra_indices_stride=0 if extra_indices is None else extra_indices.stride(0),
        extra_indices_width=extra_width,
        extra_topk_length=0 if extra_topk_length is None else extra_topk_length.data_ptr(),
        extra_page_table=0 if extra_page_table is None else extra_page_table.data_ptr(),
        extra_page_table_stride=0 if extra_page_table is None else extra_page_table.stride(0),
        extra_num_page_tables=0 if extra_page_table is None else extra_page_table.shape[0],
        extra_page_table_rows=0 if extra_page_table_rows is None else extra_page_table_rows.data_ptr(),
        attn_sink=0 if attn_sink is None else attn_sink.data_ptr(),
        softmax_scale=dim**-0.5 if softmax_scale is None else float(softmax_scale),
        out=out.data_ptr(),
        out_stride_row=out_stride_row,
        out_stride_head=out_stride_head,
        lse=0 if lse is None else lse.data_ptr(),
        partials=0 if partials is None else partials.data_ptr(),
        partials_bytes=partials_bytes,
        control=control.data_ptr(),
        control_words=control_words,
        num_sms=num_sms,
        prefill=prefill,
        pairs=pairs,
        pdl=True,
        stream=stream,
    )


# ---- workspace


@functools.lru_cache(maxsize=4096)
def _workspace(rows: int, heads: int, width: int, extra_width: int, num_sms: int, pairs: bool) -> tuple[int, int]:
    widths = {"indices_width": width, "extra_indices_width": extra_width}
    return extension.load().sparse_decode_workspace(rows=rows, heads=heads, **widths, num_sms=num_sms, pairs=pairs)


@functools.cache
def _control_words(index: int) -> ZeroedWords:
    words = extension.load().sparse_decode_max_control_words
    return ZeroedWords(f"cuda:{index}", words, _CAPTURE_STORE_BYTES)


# ---- checks


def _check_query(check: Call, q) -> tuple[int, int]:
    """(rows, heads)"""
    rows, one, heads, dim = check.tensor("q", q, BF16, "rows, 1, heads, head_dim", _STRIDES, VECTOR)
    if one != 1 or dim != kv_page_layout().head_dim or not 1 <= heads <= MAX_HEADS:
        expected = f"be [rows, 1, 1 to {MAX_HEADS} heads, {kv_page_layout().head_dim}]"
        check.refuse("shape", "q.shape", expected, list(q.shape))
    return rows, heads


def _check_cache(check: Call, pages_name, kv_pages, indices_name, indices, length_name, topk_length, rows) -> None:
    check.pages(pages_name, kv_pages, _PAGE_DTYPES, None, kv_page_layout().token_bytes)
    given, one, _ = check.tensor(indices_name, indices, INT32, "rows, 1, width", 1)
    if given != rows or one != 1:
        check.refuse("shape", f"{indices_name}.shape", f"be [{rows}, 1, width]", list(indices.shape))
    if topk_length is not None:
        check.tensor(length_name, topk_length, INT32, (rows,))


def _check_extra(check: Call, kv_pages, indices, topk_length, table, table_rows, rows: int) -> None:
    if table is not None or table_rows is not None:
        _check_page_table(check, table, table_rows, kv_pages, indices, topk_length, rows)
    elif kv_pages is not None and indices is not None:
        names = ("extra_kv_pages", "extra_indices", "extra_topk_length")
        _check_cache(check, names[0], kv_pages, names[1], indices, names[2], topk_length, rows)
    elif kv_pages is not None or indices is not None or topk_length is not None:
        expected = "be given together, extra_topk_length only with them"
        got = f"extra_kv_pages = {_given(kv_pages)} and extra_indices = {_given(indices)}"
        check.refuse("value", "extra_kv_pages and extra_indices or extra_page_table", expected, got)


def _check_page_table(check: Call, table, table_rows, kv_pages, indices, topk_length, rows: int) -> None:
    """The second cache where its candidates come from a page table."""
    if table is None or kv_pages is None or indices is not None:
        expected = "be given with extra_kv_pages and without extra_indices, extra_page_table_rows only with it"
        named = f"extra_page_table = {_given(table)}, extra_kv_pages = {_given(kv_pages)}"
        check.refuse("value", "extra_page_table", expected, f"{named} and extra_indices = {_given(indices)}")
    check.pages("extra_kv_pages", kv_pages, _PAGE_DTYPES, None, kv_page_layout().token_bytes)
    tables, pages = check.tensor("extra_page_table", table, INT32, "tables, pages", 1)
    if table_rows is None and tables != rows:
        check.refuse("shape", "extra_page_table.shape[0]", f"be {rows}, or extra_page_table_rows given", tables)
    if (width := pages * kv_pages.shape[1]) > MAX_TABLE_WIDTH:
        check.refuse("shape", "extra_page_table", f"span at most {MAX_TABLE_WIDTH} entries", width)
    if table_rows is not None:
        check.tensor("extra_page_table_rows", table_rows, INT32, (rows,))
    if topk_length is not None:
        check.tensor("extra_topk_length", topk_length, INT32, (rows,))


def _given(value) -> str:
    return "None" if value is None else "a tensor"

"""Public sparse decode: checks the arguments, owns the workspace, launches `_C.sparse_decode`."""

from __future__ import annotations

import functools

import torch

from deepseek_v4_sm120 import cuda_tensors, extension
from deepseek_v4_sm120.kv_page_layout import kv_page_layout
from deepseek_v4_sm120.zeroed_words import ZeroedWords

MAX_HEADS = 128
MAX_TABLE_WIDTH = 1 << 30  # entries of a row of extra_page_table
# From so many rows and heads on, the kernel for many rows takes a call. It is faster from about 100 rows on, but decode
# and verify must not change kernels with the size of the batch: their bits would differ.
PREFILL_ROWS, PREFILL_HEADS = 513, 33
MAX_NORM_ROWS = PREFILL_ROWS - 1  # rows of a q that is still to be normed: the kernel for many has no such form
ROTATED = 64  # of a head, its last
# Where neighbouring rows of a prompt share their candidates, with any number of heads: a window alone, C128's pages,
# whose lists name all entries below a length. C4's 64-token pages hold picks of each row's own. From more rows on,
# because rows of different requests share nothing, and are then several times slower there: a batch that decodes is
# not that large.
SHARED_PAGE_SIZE, SHARED_ROWS = 2, 1025
_ALIGN_BYTES = 16  # the kernel moves 16 bytes at a time
_BF16_BYTES = 2
_ALIGN_BF16 = _ALIGN_BYTES // _BF16_BYTES
_CAPTURE_STORE_BYTES = 4 << 20  # room for 2,000 captures

_PAGE_DTYPES = (torch.uint8, torch.float8_e4m3fn)
_POSITION_DTYPES = (torch.int32, torch.int64)


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
    q_norm_eps=None,
    freqs_cis=None,
    positions=None,
    out=None,
    return_lse=False,
    prefill=None,
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
    q_norm_eps         float: q is still to be normed and rotated (at most 512 rows): each head becomes
                       q * rsqrt(mean(q^2) + q_norm_eps), bf16; then its last 64, 32 pairs (a, b), become
                       (a c - b s, a s + b c), bf16. To the bit SGLang's fused_q_norm_rope. None: q is ready
    freqs_cis          with q_norm_eps: [any, 32] complex64 c + i s, contiguous, 16-byte aligned, a row for a position
    positions          with q_norm_eps: [rows] int32 or int64, contiguous, rows of freqs_cis (not checked, as slots)
    out                bf16 like q, written in place, or None; must not overlap q
    return_lse         also return lse
    prefill            True: the kernel for many rows, False: the one for few, None: takes_prefill decides, by sizes
                       alone. A row's bits depend on the kernel, by rounding, and on nothing else outside the row
    returns            out [rows, 1, heads, 512] bf16, or (out, lse); lse [rows, heads, 1] float32: natural log, without
                       the sink. A row without a candidate has out 0 and lse +inf
    raises             TypeError (dtype), ValueError (shape, stride, alignment: says name, expected, got),
                       RuntimeError (device, launch)
    cuda graphs        capture-safe: no host sync; allocates only out, lse and the split workspace, through torch
    streams            runs on the current stream of q's device; concurrent calls on several streams are independent,
                       and so are graphs replayed side by side
    source             semantics of FlashMLA's flash_mla_with_kvcache (sparse, FP8, MODEL1 pages), which masks only -1;
                       specification in reference/sparse_decode.py
    """
    _check_query(q)
    rows, _, heads, dim = q.shape
    device = q.device
    _check_cache("kv_pages", kv_pages, "indices", indices, "topk_length", topk_length, rows, device)
    extra = (extra_kv_pages, extra_indices, extra_topk_length, extra_page_table, extra_page_table_rows)
    _check_extra(*extra, rows, device)
    if attn_sink is not None:
        _check_vector("attn_sink", attn_sink, torch.float32, heads, "heads", device)
    query = _check_query_norm(q, q_norm_eps, freqs_cis, positions, prefill)
    _check_out(out, q)
    if device.type != "cuda":
        raise RuntimeError(f"sparse_decode: q.device must be a CUDA device, got {device}")
    if out is None:
        out = torch.empty((rows, 1, heads, dim), dtype=torch.bfloat16, device=device)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=device) if return_lse else None
    if rows:
        _launch_on(device, q, kv_pages, indices, topk_length, extra, attn_sink, softmax_scale, query, out, lse, prefill)
    return (out, lse.unsqueeze(-1)) if return_lse else out


def takes_prefill(rows: int, heads: int, extra_page_size: int, by_page_table: bool) -> bool:
    """Whether a call goes to the kernel for many rows; extra_page_size: 1 without a second cache.

    Up to 32 heads that kernel stacks 8, 4 or 2 neighbouring rows and pays where they share what they read; which rows
    do is found out on the GPU, and is no part of this choice.
    """
    shared = rows >= SHARED_ROWS and (by_page_table or extra_page_size <= SHARED_PAGE_SIZE)
    return rows >= PREFILL_ROWS and (heads >= PREFILL_HEADS or shared)


def _launch_on(device, *arguments):
    if device.index == torch._C._cuda_getDevice():
        _launch(*arguments)
    else:
        with torch.cuda.device(device):
            _launch(*arguments)


def _launch(q, kv_pages, indices, topk_length, extra, attn_sink, softmax_scale, query, out, lse, prefill):
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
    stream = torch._C._cuda_getCurrentRawStream(index)
    num_sms = cuda_tensors.num_sms(index)
    eps, freqs_cis, positions = query or (None, None, None)
    if prefill is None:
        prefill = takes_prefill(rows, heads, extra_page_size, extra_page_table is not None)
    partials_bytes, control_words = (0, 0) if prefill else _workspace(rows, heads, width, extra_width, num_sms)
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
        pdl=True,
        stream=stream,
        rotation=0 if query is None else freqs_cis.data_ptr(),
        positions=0 if query is None else positions.data_ptr(),
        position_bytes=8 if query is None else positions.element_size(),
        q_norm_eps=0.0 if query is None else eps,
    )


# ---- workspace


@functools.lru_cache(maxsize=4096)
def _workspace(rows: int, heads: int, width: int, extra_width: int, num_sms: int) -> tuple[int, int]:
    return extension.load().sparse_decode_workspace(
        rows=rows, heads=heads, indices_width=width, extra_indices_width=extra_width, num_sms=num_sms
    )


@functools.cache
def _control_words(index: int) -> ZeroedWords:
    words = extension.load().sparse_decode_max_control_words
    return ZeroedWords(f"cuda:{index}", words, _CAPTURE_STORE_BYTES)


# ---- checks: every message says argument, expected, got


def _check_query(q) -> None:
    head_dim = kv_page_layout().head_dim
    if q.dtype != torch.bfloat16:
        raise TypeError(f"sparse_decode: q.dtype must be torch.bfloat16, got {q.dtype}")
    shape = q.shape
    if len(shape) != 4 or shape[1] != 1 or shape[3] != head_dim:
        raise ValueError(f"sparse_decode: q.shape must be [rows, 1, heads, {head_dim}], got {list(shape)}")
    if not 1 <= shape[2] <= MAX_HEADS:
        raise ValueError(f"sparse_decode: q.shape[2] must be 1..{MAX_HEADS} (heads), got {shape[2]}")
    _check_vectors_of_8("q", q, shape)


def _check_query_norm(q, eps, freqs_cis, positions, prefill):
    """(eps, freqs_cis, positions) as the kernel reads them, or None where q is ready."""
    given = [value is not None for value in (eps, freqs_cis, positions)]
    if not any(given):
        return None
    if not all(given):
        got = ["None" if value is None else "a value" for value in (eps, freqs_cis, positions)]
        raise ValueError(
            "sparse_decode: q_norm_eps, freqs_cis and positions must be given together, "
            f"got {got[0]}, {got[1]} and {got[2]}"
        )
    rows = q.shape[0]
    if freqs_cis.dtype != torch.complex64:
        raise TypeError(f"sparse_decode: freqs_cis.dtype must be torch.complex64, got {freqs_cis.dtype}")
    if positions.dtype not in _POSITION_DTYPES:
        raise TypeError(f"sparse_decode: positions.dtype must be torch.int32 or torch.int64, got {positions.dtype}")
    if freqs_cis.dim() != 2 or freqs_cis.shape[1] != ROTATED // 2 or not freqs_cis.is_contiguous():
        got = f"{list(freqs_cis.shape)} with strides {list(freqs_cis.stride())}"
        raise ValueError(f"sparse_decode: freqs_cis must be contiguous [any, {ROTATED // 2}], got {got}")
    if positions.shape != (rows,) or not positions.is_contiguous():
        got = f"{list(positions.shape)} with strides {list(positions.stride())}"
        raise ValueError(f"sparse_decode: positions must be contiguous [{rows}], got {got}")
    _check_alignment("freqs_cis", freqs_cis)
    for name, tensor in (("freqs_cis", freqs_cis), ("positions", positions)):
        if tensor.device != q.device:
            raise RuntimeError(f"sparse_decode: {name}.device must be q's, {q.device}, got {tensor.device}")
    if rows > MAX_NORM_ROWS or prefill:
        got = "prefill=True" if prefill else f"{rows} rows"
        raise ValueError(
            f"sparse_decode: q_norm_eps must be None above {MAX_NORM_ROWS} rows and with prefill=True, got {got}: norm "
            "and rotate q before"
        )
    return float(eps), freqs_cis, positions


def _check_vectors_of_8(name, tensor, shape) -> None:
    """bf16 [rows, 1, heads, 512]: last dim contiguous, rows and heads on 16-byte boundaries."""
    strides = tensor.stride()
    if strides[3] != 1:
        raise ValueError(f"sparse_decode: {name}.stride(3) must be 1 (contiguous head dimension), got {strides[3]}")
    if (shape[0] > 1 and strides[0] % _ALIGN_BF16) or (shape[2] > 1 and strides[2] % _ALIGN_BF16):
        got = f"{strides[0]} and {strides[2]}"
        raise ValueError(
            f"sparse_decode: {name}.stride(0) and {name}.stride(2) must be multiples of {_ALIGN_BF16} (16 bytes), "
            f"got {got}"
        )
    _check_alignment(name, tensor)


def _check_alignment(name, tensor) -> None:
    if tensor.data_ptr() % _ALIGN_BYTES:
        got = f"an address {tensor.data_ptr() % _ALIGN_BYTES} bytes past one"
        raise ValueError(f"sparse_decode: {name} must start on a {_ALIGN_BYTES}-byte boundary, got {got}")


def _check_cache(pages_name, kv_pages, indices_name, indices, length_name, topk_length, rows, device) -> None:
    _check_pages(pages_name, kv_pages, device)
    if indices.dtype != torch.int32:
        raise TypeError(f"sparse_decode: {indices_name}.dtype must be torch.int32, got {indices.dtype}")
    shape = indices.shape
    if len(shape) != 3 or shape[0] != rows or shape[1] != 1:
        raise ValueError(f"sparse_decode: {indices_name}.shape must be [{rows}, 1, width], got {list(shape)}")
    if shape[2] > 1 and indices.stride(2) != 1:
        got = indices.stride(2)
        raise ValueError(f"sparse_decode: {indices_name}.stride(2) must be 1 (contiguous candidates), got {got}")
    if indices.device != device:
        raise RuntimeError(f"sparse_decode: {indices_name}.device must be q's, {device}, got {indices.device}")
    if topk_length is not None:
        _check_vector(length_name, topk_length, torch.int32, rows, "rows", device)


def _check_extra(kv_pages, indices, topk_length, table, table_rows, rows, device) -> None:
    if table is not None or table_rows is not None:
        _check_page_table(table, table_rows, kv_pages, indices, topk_length, rows, device)
    elif kv_pages is not None and indices is not None:
        names = ("extra_kv_pages", "extra_indices", "extra_topk_length")
        _check_cache(names[0], kv_pages, names[1], indices, names[2], topk_length, rows, device)
    elif not (kv_pages is None and indices is None and topk_length is None):
        _refuse_partial_extra(kv_pages, indices)


def _check_pages(pages_name, kv_pages, device) -> None:
    if kv_pages.dtype not in _PAGE_DTYPES:
        accepted = " or ".join(map(str, _PAGE_DTYPES))
        raise TypeError(f"sparse_decode: {pages_name}.dtype must be {accepted}, got {kv_pages.dtype}")
    shape = kv_pages.shape
    if len(shape) != 4 or shape[0] < 1 or shape[1] < 1 or shape[2] != 1:
        got = list(shape)
        raise ValueError(f"sparse_decode: {pages_name}.shape must be [pages, page_size, 1, bytes], none 0, got {got}")
    token_bytes = kv_page_layout().token_bytes
    if shape[3] != token_bytes:
        got = shape[3]
        raise ValueError(f"sparse_decode: {pages_name}.shape[-1] must be {token_bytes} (KV token bytes), got {got}")
    page_stride = kv_pages.stride(0)
    if shape[0] > 1 and (page_stride < shape[1] * token_bytes or page_stride % _ALIGN_BYTES):
        raise ValueError(
            f"sparse_decode: {pages_name}.stride(0) must be a multiple of {_ALIGN_BYTES} and at least "
            f"{shape[1] * token_bytes} (page bytes), got {page_stride}"
        )
    if kv_pages.device != device:
        raise RuntimeError(f"sparse_decode: {pages_name}.device must be q's, {device}, got {kv_pages.device}")
    _check_alignment(pages_name, kv_pages)


def _check_page_table(table, table_rows, kv_pages, indices, topk_length, rows, device) -> None:
    """The second cache where its candidates come from a page table."""
    if table is None or kv_pages is None or indices is not None:
        got = ["None" if value is None else "a tensor" for value in (table, kv_pages, indices)]
        raise ValueError(
            "sparse_decode: extra_page_table must be given with extra_kv_pages and without extra_indices, "
            "extra_page_table_rows only with it, "
            f"got extra_page_table = {got[0]}, extra_kv_pages = {got[1]} and extra_indices = {got[2]}"
        )
    _check_pages("extra_kv_pages", kv_pages, device)
    if table.dtype != torch.int32:
        raise TypeError(f"sparse_decode: extra_page_table.dtype must be torch.int32, got {table.dtype}")
    shape = table.shape
    if len(shape) != 2 or (table_rows is None and shape[0] != rows):
        tables = rows if table_rows is None else "tables"
        raise ValueError(f"sparse_decode: extra_page_table.shape must be [{tables}, pages], got {list(shape)}")
    if shape[1] * kv_pages.shape[1] > MAX_TABLE_WIDTH:
        got = f"{shape[1]} pages of {kv_pages.shape[1]}"
        raise ValueError(f"sparse_decode: extra_page_table must span at most {MAX_TABLE_WIDTH} entries, got {got}")
    if shape[1] > 1 and table.stride(1) != 1:
        got = table.stride(1)
        raise ValueError(f"sparse_decode: extra_page_table.stride(1) must be 1 (contiguous pages), got {got}")
    if table.device != device:
        raise RuntimeError(f"sparse_decode: extra_page_table.device must be q's, {device}, got {table.device}")
    if table_rows is not None:
        _check_vector("extra_page_table_rows", table_rows, torch.int32, rows, "rows", device)
    if topk_length is not None:
        _check_vector("extra_topk_length", topk_length, torch.int32, rows, "rows", device)


def _check_vector(name, tensor, dtype, size, meaning, device) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"sparse_decode: {name}.dtype must be {dtype}, got {tensor.dtype}")
    if tensor.shape != (size,):
        raise ValueError(f"sparse_decode: {name}.shape must be [{size}] ({meaning}), got {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"sparse_decode: {name}.stride(0) must be 1, got {tensor.stride(0)}")
    if tensor.device != device:
        raise RuntimeError(f"sparse_decode: {name}.device must be q's, {device}, got {tensor.device}")


def _refuse_partial_extra(extra_kv_pages, extra_indices) -> None:
    got = ["None" if value is None else "a tensor" for value in (extra_kv_pages, extra_indices)]
    raise ValueError(
        "sparse_decode: extra_kv_pages and extra_indices or extra_page_table must be given together, extra_topk_length "
        "only with them, "
        f"got extra_kv_pages = {got[0]} and extra_indices = {got[1]}"
    )


def _check_out(out, q) -> None:
    if out is None:
        return
    if out.dtype != torch.bfloat16:
        raise TypeError(f"sparse_decode: out.dtype must be torch.bfloat16, got {out.dtype}")
    if out.shape != q.shape:
        raise ValueError(f"sparse_decode: out.shape must be q's, {list(q.shape)}, got {list(out.shape)}")
    if out.device != q.device:
        raise RuntimeError(f"sparse_decode: out.device must be q's, {q.device}, got {out.device}")
    _check_vectors_of_8("out", out, out.shape)
    rows, _, heads, dim = out.shape
    row_stride, _, head_stride, _ = out.stride()
    if head_stride < dim or row_stride < heads * head_stride:  # else rows and heads follow each other
        _refuse_overlapping(out)
    if rows and _overlap(out, q):
        raise ValueError("sparse_decode: out must not overlap q, got memory that both cover")


def _refuse_overlapping(out) -> None:
    spans = sorted((stride, size) for size, stride in zip(out.shape, out.stride(), strict=True) if size > 1)
    end = 0
    for stride, size in spans:
        if stride <= end:
            raise ValueError(f"sparse_decode: out must not overlap itself, got strides {list(out.stride())}")
        end += stride * (size - 1)


def _overlap(one, other) -> bool:
    """Whether the address ranges of two bf16 tensors of the same shape [rows, 1, heads, 512] meet."""
    lower, upper = one.data_ptr(), other.data_ptr()
    if lower > upper:
        one, lower, upper = other, upper, lower
    rows, _, heads, dim = one.shape
    row_stride, _, head_stride, _ = one.stride()
    return upper < lower + ((rows - 1) * row_stride + (heads - 1) * head_stride + dim) * _BF16_BYTES

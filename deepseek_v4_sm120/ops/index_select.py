"""Public index selection: index logits, exact top-k, and the two in one without a logits tensor."""

from __future__ import annotations

import functools

import torch

from deepseek_v4_sm120.ops.shared import cuda_tensors, extension
from deepseek_v4_sm120.ops.shared.checks import E4M3, FP32, INT32, VECTOR, Call

FP8_ENTRY_BYTES = 132
FP4_ENTRY_BYTES = 68
MAX_WIDTH = 1 << 24
DECODE_ROWS = 256  # up to here a call counts as decode or verify
DECODE_SCRATCH_BYTES = 64 << 20
PREFILL_SCRATCH_BYTES = 256 << 20
_Q_STRIDES = 16  # bytes that rows and heads of q are multiples of
_DEALT_DTYPES = (torch.int32, torch.int16)
_FP4_DTYPES = (torch.int8, torch.uint8)
_PAGE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


def index_select(
    q,
    k_pages,
    weights,
    lengths,
    page_table,
    *,
    k=512,
    q_scales=None,
    rows_per_request=1,
    out=None,
    entries=None,
    logits=None,
):
    """The k entries of each row with the greatest index logits, as slots of the paged pool; no logits tensor.

        logit[r, j] = scale_j * sum_h weights[r, h] * relu(<q[r, h], k_j>),  fp32,  j < lengths[r]

    q                 FP8: [rows, 1, 64, 128] float8_e4m3fn; FP4: [rows, 1, 64, 64] int8 or uint8, two E2M1 a byte, the
                      even dimension in the low nibble. Last dim contiguous, other strides multiples of 16 bytes
    k_pages           FP8: [pages, 64, 1, 132], FP4: [pages, 64, 1, 68], uint8 or float8_e4m3fn. A page is 64 x 128
                      E4M3 (64 x 64 bytes of E2M1), then 64 fp32 scales (64 x 4 UE8M0 bytes, one per 32 dimensions,
                      66 to 192); stride(0) = page stride in bytes, a multiple of 16
    weights           [rows, 64] float32, with whatever scales of q are not in q_scales
    lengths           [rows] int32: entries of each row, clamped to 0..64 * columns of page_table
    page_table        [rows, columns] int32: page of each 64 entries; row stride free. Pages outside the pool are not
                      read; their entries rank last and have slot -1
    k                 1..1024
    q_scales          FP4 only: [rows, 1, 64] int32, four UE8M0 bytes per head
    rows_per_request  above 1: adjacent rows share pages more often than not (verify, prefill), so several rows are
                      scored per load of a page. A hint: results do not depend on it
    out, entries, logits
                      [rows, k], last dim contiguous: int32 slots (page * 64 + entry % 64); int32 entries; float32
                      logits of the chosen (-inf after the last). `out` is made if None; the others are optional. None
                      over another or over the first argument
    returns           out. The chosen of a row ascend by entry, then -1. Ties go to the lower entry, NaN ranks below
                      -inf, -0 equals +0; a row of at most k entries gets all of them
    raises            TypeError (dtype), ValueError (shape, stride, alignment, overlap, value), RuntimeError (device,
                      launch)
    cuda graphs       capture-safe: no host sync; allocates out and a scratch of at most 64 MiB (256 MiB above 256
                      rows) through torch; work follows the lengths, not the widths
    determinism       a row's result depends on that row alone, to the bit: not on the batch, the hint or the GPU's size
    slices            a part of a row's entries: pass its columns of page_table and its length, with entries and logits;
                      topk_select over the concatenated logits merges the parts
    source            SGLang's C4 indexer and topk_transform; specification in reference/index_select.py
    """
    check, rows, fp4 = _check_queries("index_select", q, k_pages, weights, q_scales)
    width = _check_rows(check, lengths, page_table, rows)
    if width > MAX_WIDTH:
        check.refuse("shape", "page_table", f"have at most {MAX_WIDTH} entries a row", width)
    _check_chosen(check, k, rows, "q", q, out, entries, logits)
    check.on_cuda()
    out = torch.empty((rows, k), dtype=torch.int32, device=q.device) if out is None else out
    if rows:
        with cuda_tensors.on_device_of(q):
            hint = min(int(rows_per_request), 2)
            scratch, limit = _scratch(q.device, rows, width, hint, True)
            extension.load().index_select(
                **_queries(q, q_scales, weights, k_pages),
                **_table(page_table),
                lengths=lengths.data_ptr(),
                rows=rows,
                width=width,
                k=k,
                rows_per_request=hint,
                fp4=fp4,
                fp8_mma=has_fp8_mma(q.device.index),
                **_outputs(out, entries, logits),
                scratch=scratch.data_ptr(),
                scratch_bytes=scratch.numel(),
                max_scratch_bytes=limit,
                pdl=True,
                stream=cuda_tensors.current_stream(q.device.index),
            )
    return out


def mqa_logits(q, k_pages, weights, lengths, page_table, *, q_scales=None, rows_per_request=1, out=None):
    """Index logits [rows, 64 * columns] float32, to the bit those by which index_select chooses.

    Arguments, errors and graphs as in index_select. out: [rows, 64 * columns] float32, last dim contiguous, or None.
    Entries from a row's length on are not written; NaN comes out as one NaN, -0 as +0.
    """
    check, rows, fp4 = _check_queries("mqa_logits", q, k_pages, weights, q_scales)
    width = _check_rows(check, lengths, page_table, rows)
    if out is not None:
        check.tensor("out", out, FP32, (rows, width), 1)
        check.written("q", q, ("out", out))
    check.on_cuda()
    out = torch.empty((rows, width), dtype=torch.float32, device=q.device) if out is None else out
    if rows:
        with cuda_tensors.on_device_of(q):
            extension.load().mqa_logits(
                **_queries(q, q_scales, weights, k_pages),
                **_table(page_table),
                lengths=lengths.data_ptr(),
                rows=rows,
                width=width,
                rows_per_request=min(int(rows_per_request), 2),
                fp4=fp4,
                fp8_mma=has_fp8_mma(q.device.index),
                logits=out.data_ptr(),
                logits_stride=out.stride(0),
                pdl=True,
                stream=cuda_tensors.current_stream(q.device.index),
            )
    return out


def topk_select(scores, lengths, *, k=512, page_table=None, num_pages=None, out=None, entries=None, logits=None):
    """The exact k greatest of the first lengths[r] scores of each row, in index_select's order and with its ties.

    scores      [rows, width] float32, last dim contiguous, row stride free
    page_table  [rows, at least width / 64] int32: `out` holds page * 64 + entry % 64; None: `out` holds the entries
    num_pages   pages of the pool; a page outside has slot -1. None: every non-negative page is one
    Other arguments, errors and graphs as in index_select.
    """
    check = Call("topk_select", "scores", scores)
    rows, width = check.tensor("scores", scores, FP32, "rows, width", 1)
    if not 1 <= width <= MAX_WIDTH:
        check.refuse("shape", "scores.shape[1]", f"be 1..{MAX_WIDTH}", width)
    table = page_table is not None
    check.tensor("lengths", lengths, INT32, (rows,))
    columns = _check_table(check, page_table, rows) if table else 0
    if table and columns < width:
        check.refuse("shape", "page_table", f"have {width} entries a row or more, scores' width", columns)
    if not table and entries is not None:
        check.refuse("value", "entries", "be None without page_table", "a tensor: out has them")
    _check_chosen(check, k, rows, "scores", scores, out, entries, logits)
    check.on_cuda()
    out = torch.empty((rows, k), dtype=torch.int32, device=scores.device) if out is None else out
    if rows:
        with cuda_tensors.on_device_of(scores):
            scratch, limit = _scratch(scores.device, rows, width, 1, False)
            extension.load().topk_select(
                logits=scores.data_ptr(),
                logits_stride=scores.stride(0),
                **(_table(page_table) if table else {"page_table": 0, "page_table_stride": 0}),
                num_pages=2**31 if num_pages is None else num_pages,
                lengths=lengths.data_ptr(),
                rows=rows,
                width=width,
                k=k,
                **(_outputs(out, entries, logits) if table else _outputs(None, out, logits)),
                scratch=scratch.data_ptr(),
                scratch_bytes=scratch.numel(),
                max_scratch_bytes=limit,
                pdl=True,
                stream=cuda_tensors.current_stream(scores.device.index),
            )
    return out


def is_narrow(page_table) -> bool:
    """Whether 16 bits hold every entry of its rows, and one more for none."""
    return page_table.shape[1] * extension.load().INDEX_PAGE < 1 << 16


def dealt_slots(dealt, page_table, *, num_pages, out=None, entries=None):
    """The slots of entries that ranks have chosen for each other's rows, by this rank's own pages.

    dealt       [ranks, ceil(rows / ranks), k] int32, contiguous: row r's list at [r % ranks, r // ranks], -1 behind its
                end; int16, the entries' low bits, where is_narrow(page_table)
    page_table  [rows, columns] int32, as index_select takes it: what is no entry of it has slot -1
    num_pages   pages of the pool; a page outside is not one, and has slot -1
    out, entries
                [rows, k] int32, last dim contiguous: slots, and if given the entries
    returns     out. A plain launch: the exchange in front lets nothing in early
    Other arguments, errors and graphs as in index_select.
    """
    check = Call("dealt_slots", "dealt", dealt)
    ranks, each, k = check.tensor("dealt", dealt, _DEALT_DTYPES, "ranks, rows, k")
    rows, columns = check.tensor("page_table", page_table, INT32, "rows, columns", 1)
    width = columns * extension.load().INDEX_PAGE
    if not columns or width > MAX_WIDTH:
        check.refuse("shape", "page_table", f"have 1 to {MAX_WIDTH} entries a row", width)
    if ranks < 1 or each != -(-rows // ranks):
        check.refuse("shape", "dealt", f"have {rows} rows as even parts, page_table's", list(dealt.shape))
    narrow = dealt.dtype != torch.int32
    if narrow and not is_narrow(page_table):
        check.refuse("dtype", "dealt.dtype", f"be torch.int32 for {width} entries a row", dealt.dtype)
    if not isinstance(num_pages, int) or num_pages < 1:
        check.refuse("value", "num_pages", "be an int of 1 or more", repr(num_pages))
    _check_chosen(check, k, rows, "dealt", dealt, out, entries, None)
    check.on_cuda()
    out = torch.empty((rows, k), dtype=torch.int32, device=dealt.device) if out is None else out
    if rows:
        with cuda_tensors.on_device_of(dealt):
            extension.load().dealt_slots(
                dealt=dealt.data_ptr(),
                narrow=narrow,
                ranks=ranks,
                rows=rows,
                width=width,
                k=k,
                **_table(page_table),
                num_pages=num_pages,
                slots=out.data_ptr(),
                slots_stride=out.stride(0),
                entries=0 if entries is None else entries.data_ptr(),
                entries_stride=0 if entries is None else entries.stride(0),
                pdl=False,
                stream=cuda_tensors.current_stream(dealt.device.index),
            )
    return out


# ---- checked arguments to raw pointers


def _queries(q, q_scales, weights, k_pages) -> dict[str, int]:
    return {
        "q": q.data_ptr(),
        "q_stride_row": q.stride(0),
        "q_stride_head": q.stride(2),
        "q_scales": 0 if q_scales is None else q_scales.data_ptr(),
        "q_scales_stride": 0 if q_scales is None else q_scales.stride(0),
        "weights": weights.data_ptr(),
        "weights_stride": weights.stride(0),
        "k_pages": k_pages.data_ptr(),
        "page_bytes": k_pages.stride(0),
        "num_pages": k_pages.shape[0],
    }


def _table(page_table) -> dict[str, int]:
    return {"page_table": page_table.data_ptr(), "page_table_stride": page_table.stride(0)}


def _outputs(slots, entries, logits) -> dict[str, int]:
    named = {"slots": slots, "entries": entries, "chosen_logits": logits}
    found = {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in named.items()}
    return found | {f"{name}_stride": 0 if tensor is None else tensor.stride(0) for name, tensor in named.items()}


def _scratch(device, rows: int, width: int, rows_per_request: int, score: bool) -> tuple[torch.Tensor, int]:
    """Scratch, to be held until the launch is queued, and the most that a call of so many rows may ask for."""
    limit = DECODE_SCRATCH_BYTES if rows <= DECODE_ROWS else PREFILL_SCRATCH_BYTES
    needed = _scratch_bytes(device.index, rows, width, rows_per_request, limit, score)
    return torch.empty((needed,), dtype=torch.uint8, device=device), limit


@functools.cache
def has_fp8_mma(index: int) -> bool:
    """SM120's FP8 MMA is native; on SM90 the instruction is emulated, and f16 MMA (exact as well) is faster."""
    return torch.cuda.get_device_capability(index)[0] >= 12


@functools.lru_cache(maxsize=4096)
def _scratch_bytes(index: int, rows: int, width: int, rows_per_request: int, limit: int, score: bool) -> int:
    """`index` is part of the key: the plan depends on the current device's size."""
    return extension.load().index_select_scratch_bytes(
        rows=rows, width=width, rows_per_request=rows_per_request, max_scratch_bytes=limit, score=score
    )


# ---- checks


def _check_queries(op: str, q, k_pages, weights, q_scales) -> tuple[Call, int, bool]:
    """(checks, rows, whether this is FP4) of queries, keys and weights that fit each other."""
    check, binary, fp4 = Call(op, "q", q), extension.load(), q_scales is not None
    heads, page = binary.INDEX_HEADS, binary.INDEX_PAGE
    dim = binary.INDEX_DIM // 2 if fp4 else binary.INDEX_DIM
    dtypes = _FP4_DTYPES if fp4 else E4M3
    rows, *_ = check.tensor("q", q, dtypes, ("rows", 1, heads, dim), _Q_STRIDES, VECTOR)
    check.pages("k_pages", k_pages, _PAGE_DTYPES, page, FP4_ENTRY_BYTES if fp4 else FP8_ENTRY_BYTES)
    check.tensor("weights", weights, FP32, (rows, heads), 1)
    if fp4:
        check.tensor("q_scales", q_scales, INT32, (rows, 1, heads), 1)
    return check, rows, fp4


def _check_rows(check: Call, lengths, page_table, rows: int) -> int:
    """As _check_table."""
    check.tensor("lengths", lengths, INT32, (rows,))
    return _check_table(check, page_table, rows)


def _check_table(check: Call, page_table, rows: int) -> int:
    """The greatest number of entries of a row by page_table."""
    _, columns = check.tensor("page_table", page_table, INT32, (rows, "columns"), 1)
    if not columns:
        check.refuse("shape", "page_table.shape[1]", "be 1 or more", columns)
    return columns * extension.load().INDEX_PAGE


def _check_chosen(check: Call, k: int, rows: int, first: str, tensor, out, entries, logits) -> None:
    most = extension.load().INDEX_MAX_K
    if not isinstance(k, int) or not 1 <= k <= most:
        check.refuse("value", "k", f"be an int in 1..{most}", repr(k))
    if out is not None:
        check.tensor("out", out, INT32, (rows, k), 1)
    if entries is not None:
        check.tensor("entries", entries, INT32, (rows, k), 1)
    if logits is not None:
        check.tensor("logits", logits, FP32, (rows, k), 1)
    if out is not None or entries is not None or logits is not None:
        check.written(first, tensor, ("out", out), ("entries", entries), ("logits", logits))

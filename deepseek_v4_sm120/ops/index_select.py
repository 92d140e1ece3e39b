"""Public index selection: index logits, exact top-k, and the two in one without a logits tensor."""

from __future__ import annotations

import functools

import torch

from deepseek_v4_sm120 import extension
from deepseek_v4_sm120.ops.index_select_checks import (
    MAX_WIDTH,
    check_int32_rows,
    check_k,
    check_logits,
    check_out,
    check_queries,
    check_table,
)

DECODE_ROWS = 256  # up to here a call counts as decode or verify
DECODE_SCRATCH_BYTES = 64 << 20
PREFILL_SCRATCH_BYTES = 256 << 20


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
                      logits of the chosen (-inf after the last). `out` is made if None; the others are optional
    returns           out. The chosen of a row ascend by entry, then -1. Ties go to the lower entry, NaN ranks below
                      -inf, -0 equals +0; a row of at most k entries gets all of them
    raises            TypeError (dtype), ValueError (shape, stride: says name, expected, got), RuntimeError (device)
    cuda graphs       capture-safe: no host sync; allocates out and a scratch of at most 64 MiB (256 MiB above 256
                      rows) through torch; work follows the lengths, not the widths
    determinism       a row's result depends on that row alone, to the bit: not on the batch, the hint or the GPU's size
    slices            a part of a row's entries: pass its columns of page_table and its length, with entries and logits;
                      topk_select over the concatenated logits merges the parts
    source            SGLang's C4 indexer and topk_transform; specification in reference/index_select.py
    """
    rows, fp4 = check_queries("index_select", q, k_pages, weights, q_scales)
    width = check_table("index_select", page_table, rows, q.device)
    check_int32_rows("index_select", "lengths", lengths, rows, q.device)
    check_k("index_select", k)
    for name, tensor, dtype in (("out", out, torch.int32), ("entries", entries, torch.int32), ("logits", logits, None)):
        check_out("index_select", name, tensor, dtype or torch.float32, rows, k, q.device)
    _check_cuda("index_select", q)
    out = torch.empty((rows, k), dtype=torch.int32, device=q.device) if out is None else out
    if rows:
        with _on(q.device):
            limit = DECODE_SCRATCH_BYTES if rows <= DECODE_ROWS else PREFILL_SCRATCH_BYTES
            hint = min(int(rows_per_request), 2)
            scratch_bytes = _scratch_bytes(q.device.index, rows, width, hint, limit, True)
            scratch = torch.empty((scratch_bytes,), dtype=torch.uint8, device=q.device)
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
                scratch_bytes=scratch_bytes,
                max_scratch_bytes=limit,
                pdl=True,
                stream=torch._C._cuda_getCurrentRawStream(q.device.index),
            )
    return out


def mqa_logits(q, k_pages, weights, lengths, page_table, *, q_scales=None, rows_per_request=1, out=None):
    """Index logits [rows, 64 * columns] float32, to the bit those by which index_select chooses.

    Arguments, errors and graphs as in index_select. out: [rows, 64 * columns] float32, last dim contiguous, or None.
    Entries from a row's length on are not written; NaN comes out as one NaN, -0 as +0.
    """
    rows, fp4 = check_queries("mqa_logits", q, k_pages, weights, q_scales)
    width = check_table("mqa_logits", page_table, rows, q.device)
    check_int32_rows("mqa_logits", "lengths", lengths, rows, q.device)
    check_out("mqa_logits", "out", out, torch.float32, rows, width, q.device)
    _check_cuda("mqa_logits", q)
    out = torch.empty((rows, width), dtype=torch.float32, device=q.device) if out is None else out
    if rows:
        with _on(q.device):
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
                stream=torch._C._cuda_getCurrentRawStream(q.device.index),
            )
    return out


def topk_select(scores, lengths, *, k=512, page_table=None, num_pages=None, out=None, entries=None, logits=None):
    """The exact k greatest of the first lengths[r] scores of each row, in index_select's order and with its ties.

    scores      [rows, width] float32, last dim contiguous, row stride free
    page_table  [rows, at least width / 64] int32: `out` holds page * 64 + entry % 64; None: `out` holds the entries
    num_pages   pages of the pool; a page outside has slot -1. None: every non-negative page is one
    Other arguments, errors and graphs as in index_select.
    """
    rows, width = check_logits("topk_select", scores)
    check_int32_rows("topk_select", "lengths", lengths, rows, scores.device)
    check_k("topk_select", k)
    if page_table is not None:
        columns = check_table("topk_select", page_table, rows, scores.device)
        if columns < width:
            raise ValueError(
                f"topk_select: page_table.shape[1] must be at least {-(-width // 64)} (width / 64), got {columns // 64}"
            )
    for name, tensor, dtype in (("out", out, torch.int32), ("entries", entries, torch.int32), ("logits", logits, None)):
        check_out("topk_select", name, tensor, dtype or torch.float32, rows, k, scores.device)
    _check_cuda("topk_select", scores)
    out = torch.empty((rows, k), dtype=torch.int32, device=scores.device) if out is None else out
    if rows:
        with _on(scores.device):
            limit = DECODE_SCRATCH_BYTES if rows <= DECODE_ROWS else PREFILL_SCRATCH_BYTES
            scratch_bytes = _scratch_bytes(scores.device.index, rows, width, 1, limit, False)
            scratch = torch.empty((scratch_bytes,), dtype=torch.uint8, device=scores.device)
            table = page_table is not None
            if not table and entries is not None:
                raise ValueError("topk_select: entries must be None without page_table, got a tensor: out has them")
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
                scratch_bytes=scratch_bytes,
                max_scratch_bytes=limit,
                pdl=True,
                stream=torch._C._cuda_getCurrentRawStream(scores.device.index),
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


def _check_cuda(op: str, tensor) -> None:
    if tensor.device.type != "cuda":
        raise RuntimeError(f"{op}: the tensors must be on a CUDA device, got {tensor.device}")


def _on(device):
    return torch.cuda.device(device)


@functools.cache
def has_fp8_mma(index: int) -> bool:
    """SM120's FP8 MMA is native; on SM90 the instruction is emulated, and f16 MMA (exact as well) is faster."""
    return torch.cuda.get_device_capability(index)[0] >= 12


@functools.lru_cache(maxsize=4096)
def _scratch_bytes(index: int, rows: int, width: int, rows_per_request: int, limit: int, score: bool) -> int:
    """`index` is part of the key: the plan depends on the current device's size."""
    if width > MAX_WIDTH:
        raise ValueError(f"index_select: at most {MAX_WIDTH} entries a row, got {width}")
    return extension.load().index_select_scratch_bytes(
        rows=rows, width=width, rows_per_request=rows_per_request, max_scratch_bytes=limit, score=score
    )

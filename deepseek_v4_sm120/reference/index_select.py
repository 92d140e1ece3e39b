"""Truth for ops/index_select.py, from the definition, in float64.

    logit[r, j] = scale_j * sum_h weights[r, h] * relu(<q[r, h], k_j>)        j < length_r
    FP4: q and k are E2M1 with one UE8M0 scale per 32 dimensions inside the product, and scale_j is 1

Top-k: order by (logit descending, entry ascending); NaN below -inf; -0 equals +0. The chosen ascend by entry, then -1.
An entry whose page is outside the pool has logit NaN and slot -1.

The page layout below is this module's own reading of the format, on purpose (csrc/index_select/config.h is the other).
"""

from __future__ import annotations

import math

import torch

PAGE = 64
HEADS = 64
DIM = 128
FP8_BYTES = 132
FP4_BYTES = 68
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CHUNK = 1 << 14  # entries at a time


def fp4_values(packed: torch.Tensor, dtype=torch.float64) -> torch.Tensor:
    """[..., n] bytes to [..., 2 n] E2M1 values, the low nibble first."""
    raw = packed.view(torch.uint8).to(torch.int64)
    codes = torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2)
    table = torch.tensor(E2M1 + tuple(-v for v in E2M1), dtype=dtype, device=packed.device)
    return table[codes]


def ue8m0(scales: torch.Tensor, dtype=torch.float64) -> torch.Tensor:
    return torch.exp2(scales.to(dtype) - 127)


def queries(q: torch.Tensor, q_scales: torch.Tensor | None) -> torch.Tensor:
    """[rows, 64, 128] float64."""
    if q_scales is None:
        return q[:, 0].to(torch.float32).to(torch.float64)
    exponents = torch.stack([(q_scales[:, 0].to(torch.int64) >> shift) & 255 for shift in (0, 8, 16, 24)], dim=-1)
    return fp4_values(q[:, 0]) * ue8m0(exponents).repeat_interleave(32, dim=-1)


def _section(k_pages: torch.Tensor, start: int, width: int) -> torch.Tensor:
    """[pages, 64, width] bytes: part of each page from byte `start` on."""
    raw = k_pages.view(torch.uint8)
    stride = raw.stride(0)
    return raw.as_strided((raw.shape[0], PAGE, width), (stride, width, 1), raw.storage_offset() + start)


def read_keys(k_pages: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(values [n, 128], scale [n]) float64 of slots [n], all inside the pool."""
    page, at = slots // PAGE, slots % PAGE
    if k_pages.shape[3] == FP8_BYTES:
        values = _section(k_pages, 0, DIM)[page, at].view(torch.float8_e4m3fn).to(torch.float32)
        scale = _section(k_pages, PAGE * DIM, 4)[page, at].contiguous().view(torch.float32)[:, 0]
        return values.to(torch.float64), scale.to(torch.float64)
    values = fp4_values(_section(k_pages, 0, DIM // 2)[page, at])
    scales = ue8m0(_section(k_pages, PAGE * DIM // 2, 4)[page, at])
    return values * scales.repeat_interleave(32, dim=-1), torch.ones(slots.shape, dtype=torch.float64).to(slots.device)


def write_keys(k_pages: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """Quantise [n, 128] floats as SGLang does, into the slots."""
    page, at = slots // PAGE, slots % PAGE
    keys = keys.to(torch.float32)
    if k_pages.shape[3] == FP8_BYTES:
        scale = keys.abs().amax(dim=-1).clamp_min(1e-4) / 448
        values = (keys / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        _section(k_pages, 0, DIM)[page, at] = values.view(torch.uint8)
        _section(k_pages, PAGE * DIM, 4)[page, at] = scale[:, None].contiguous().view(torch.uint8)
        return
    packed, exponents = quantise_fp4(keys)
    _section(k_pages, 0, DIM // 2)[page, at] = packed
    _section(k_pages, PAGE * DIM // 2, 4)[page, at] = exponents


def quantise_fp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., 128] to (bytes [..., 64], UE8M0 bytes [..., 4]): round-up scales, ties toward zero, -0 becomes +0."""
    groups = x.to(torch.float32).unflatten(-1, (-1, 32))
    exponent = torch.ceil(torch.log2(groups.abs().amax(dim=-1).clamp_min(1e-4) / 6))
    scaled = groups / torch.exp2(exponent)[..., None]
    thresholds = torch.tensor([(a + b) / 2 for a, b in zip(E2M1, E2M1[1:], strict=False)], device=x.device)
    code = (scaled.abs()[..., None] > thresholds).sum(dim=-1)
    code = torch.where((scaled < 0) & (code > 0), code + 8, code).flatten(-2).to(torch.uint8)
    return code[..., 0::2] | code[..., 1::2] << 4, (exponent + 127).to(torch.uint8)


def mqa_logits(q, k_pages, weights, lengths, page_table, *, q_scales=None) -> torch.Tensor:
    """[rows, 64 * columns] float64, -inf from a row's length on."""
    rows, width = q.shape[0], page_table.shape[1] * PAGE
    found = torch.full((rows, width), -math.inf, dtype=torch.float64, device=q.device)
    wide, head_weights = queries(q, q_scales), weights.to(torch.float64)
    for row in range(rows):
        length = min(max(int(lengths[row]), 0), width)
        for first in range(0, length, _CHUNK):
            entries = torch.arange(first, min(first + _CHUNK, length), device=q.device)
            page = page_table[row, entries // PAGE].to(torch.int64)
            inside = (page >= 0) & (page < k_pages.shape[0])
            keys, scale = read_keys(k_pages, (page * PAGE + entries % PAGE)[inside])
            scores = torch.einsum("hd,nd->nh", wide[row], keys)
            scores = torch.where(scores.isnan(), scores, scores.clamp_min(0))
            logits = torch.full(entries.shape, math.nan, dtype=torch.float64, device=q.device)
            logits[inside] = scale * (scores @ head_weights[row])
            found[row, entries] = logits
    return found


def topk_select(scores, lengths, *, k=512, page_table=None, num_pages=None) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots, entries), [rows, k] int32 each; slots are the entries without a page table."""
    rows, width = scores.shape
    entries = torch.full((rows, k), -1, dtype=torch.int32, device=scores.device)
    slots = entries.clone()
    for row in range(rows):
        length = min(max(int(lengths[row]), 0), width)
        values = scores[row, :length]
        numbers = torch.where(values.isnan(), torch.full_like(values, -math.inf), values + 0.0)
        # stable sorts: by entry already, then by logit, then numbers before NaN
        order = torch.sort(numbers, descending=True, stable=True).indices
        order = order[torch.sort(values.isnan()[order].to(torch.int8), stable=True).indices]
        chosen = order[:k].sort().values
        entries[row, : chosen.numel()] = chosen.to(torch.int32)
        slots[row, : chosen.numel()] = chosen.to(torch.int32)
        if page_table is not None:
            page = page_table[row, chosen // PAGE].to(torch.int64)
            outside = (page < 0) if num_pages is None else (page < 0) | (page >= num_pages)
            slot = torch.where(outside, torch.full_like(page, -1), page * PAGE + chosen % PAGE)
            slots[row, : chosen.numel()] = slot.to(torch.int32)
    return slots, entries


def index_select(
    q, k_pages, weights, lengths, page_table, *, k=512, q_scales=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots, entries) by the float64 logits. Entries within rounding of the k-th logit may differ from a kernel's."""
    logits = mqa_logits(q, k_pages, weights, lengths, page_table, q_scales=q_scales)
    return topk_select(logits, lengths, k=k, page_table=page_table, num_pages=k_pages.shape[0])


def dealt_slots(dealt, page_table, *, num_pages) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots, entries) [rows, k] int32 of lists [ranks, rows of a rank, k], row r's at [r % ranks, r // ranks]."""
    rows, width = page_table.shape[0], page_table.shape[1] * PAGE
    found = dealt.to(torch.int64) & (0xFFFF if dealt.dtype == torch.int16 else -1)
    found = found.transpose(0, 1).flatten(0, 1)[:rows]
    found = torch.where((found >= 0) & (found < width), found, -1)
    page = page_table.to(torch.int64).gather(1, found.clamp_min(0) // PAGE)
    is_slot = (found >= 0) & (page >= 0) & (page < num_pages)
    return torch.where(is_slot, page * PAGE + found % PAGE, -1).to(torch.int32), found.to(torch.int32)

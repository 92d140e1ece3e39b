"""Truth for ops/sparse_decode.py, from the definition. Two formulations that share no arithmetic.

    V_r = candidates of row r, both caches: position < length and 0 <= slot < pages * page_size
    s_i = scale * <q_h, k_i>      o_h = sum exp(s_i) k_i / (sum exp(s_i) + exp(sink_h))      K = V = the cache row

One softmax spans both caches; the sink is a logit without a value. A row with no candidate gives out 0 and lse +inf.
Conventions of LSE. `sparse_decode` returns FlashMLA's: natural logarithm, WITHOUT the sink, +inf for a row without
candidates. FlashInfer's SM120 kernel returns base 2 WITH the sink: `lse_base2_with_sink` converts. SGLang's Triton path
is natural with the sink, its torch path natural without it and -inf for an empty row.
"""

from __future__ import annotations

import math

import torch

from deepseek_v4_sm120.reference import kv_pages as pages_of

_CHUNK_BYTES = 1 << 30  # gathered rows held at a time


def valid_candidates(indices, num_slots: int, topk_length=None) -> torch.Tensor:
    """[rows, width] bool: position below the row's length (clamped to 0..width), slot inside the pool."""
    slots = indices[:, 0, :]
    valid = (slots >= 0) & (slots < num_slots)
    if topk_length is not None:
        valid &= torch.arange(slots.shape[1], device=slots.device) < topk_length[:, None]
    return valid


def indices_of_page_table(page_table, page_size: int, num_pages: int, table_rows=None) -> torch.Tensor:
    """The list [rows, 1, pages * page_size] int32 that extra_page_table stands for: every entry, -1 where masked."""
    pages = page_table.long()
    if table_rows is not None:
        known = (table_rows >= 0) & (table_rows < pages.shape[0])
        if not pages.shape[0]:
            pages = pages.new_full((1, pages.shape[1]), -1)
        pages = pages[torch.where(known, table_rows, 0).long()].masked_fill(~known[:, None], -1)
    slots = pages[:, :, None] * page_size + torch.arange(page_size, device=pages.device)
    inside = (pages >= 0) & (pages < num_pages)
    return slots.masked_fill(~inside[:, :, None], -1).flatten(1).to(torch.int32)[:, None, :]


def _gather(kv_pages, indices, topk_length, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows [rows, width, 512] with zeros where masked, mask [rows, width]); masked slots are not read."""
    valid = valid_candidates(indices, kv_pages.shape[0] * kv_pages.shape[1], topk_length)
    used = int(valid.any(dim=0).nonzero().max()) + 1 if bool(valid.any()) else 0
    valid = valid[:, :used]
    keys = torch.zeros((*valid.shape, pages_of.HEAD_DIM), dtype=dtype, device=kv_pages.device)
    keys[valid] = pages_of.read_rows(kv_pages, indices[:, 0, :used][valid], dtype)
    return keys, valid


def _attend(q, keys, valid, scale: float, attn_sink) -> tuple[torch.Tensor, torch.Tensor]:
    """Direct softmax over the whole candidate set: (out [rows, heads, 512], lse [rows, heads]) in q's dtype."""
    scores = torch.einsum("rhd,rnd->rhn", q, keys) * scale
    scores = scores.masked_fill(~valid[:, None, :], -math.inf)
    lse = torch.logsumexp(scores, dim=-1) if scores.shape[-1] else scores.new_full(scores.shape[:2], -math.inf)
    empty = lse == -math.inf
    shift = torch.where(empty, torch.zeros_like(lse), lse)
    out = torch.einsum("rhn,rnd->rhd", torch.exp(scores - shift[..., None]), keys)
    if attn_sink is not None:
        out = out / (1 + torch.exp(attn_sink.to(out.dtype) - shift))[..., None]
    out = torch.where(empty[..., None], torch.zeros_like(out), out)
    return out, torch.where(empty, torch.full_like(lse, math.inf), lse)


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
    dtype=torch.float64,
):
    """Arguments of ops.sparse_decode. Returns (out [rows, 1, heads, 512], lse [rows, heads, 1]) in `dtype`."""
    rows, _, heads, dim = q.shape
    if extra_page_table is not None:
        num_pages, page_size = extra_kv_pages.shape[:2]
        extra_indices = indices_of_page_table(extra_page_table, page_size, num_pages, extra_page_table_rows)
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    width = indices.shape[-1] + (extra_indices.shape[-1] if extra_indices is not None else 0)
    step = max(1, _CHUNK_BYTES // max(1, width * dim * dtype.itemsize))
    out = torch.zeros((rows, 1, heads, dim), dtype=dtype, device=q.device)
    lse = torch.full((rows, heads, 1), math.inf, dtype=dtype, device=q.device)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        keys, valid = _gather(kv_pages, indices[part], None if topk_length is None else topk_length[part], dtype)
        if extra_kv_pages is not None:
            length = None if extra_topk_length is None else extra_topk_length[part]
            extra_keys, extra_valid = _gather(extra_kv_pages, extra_indices[part], length, dtype)
            keys, valid = torch.cat([keys, extra_keys], dim=1), torch.cat([valid, extra_valid], dim=1)
        out[part, 0], lse[part, :, 0] = _attend(q[part, 0].to(dtype), keys, valid, scale, attn_sink)
    return out, lse


def lse_base2_with_sink(lse, attn_sink=None):
    """FlashInfer's convention from ours: log2(sum exp(s) + exp(sink)); the sink's logit where no candidate is valid."""
    natural = torch.where(lse == math.inf, torch.full_like(lse, -math.inf), lse)
    if attn_sink is not None:
        natural = torch.logaddexp(natural, attn_sink.to(lse.dtype)[None, :, None].expand_as(natural))
    return natural / math.log(2)


def _decode_bytes(kv_pages, slots) -> torch.Tensor:
    """float32 rows [n, 512] by integer arithmetic on single bytes: no FP8 dtype, no shared code with read_rows."""
    page_size, stride = kv_pages.shape[1], kv_pages.stride(0)
    flat = kv_pages.view(torch.uint8).as_strided((kv_pages.shape[0] * stride,), (1,))
    base = (slots.long() // page_size * stride)[:, None]
    entry = (slots.long() % page_size)[:, None]
    column = torch.arange(448, device=flat.device)
    code = flat[base + entry * 576 + column].int()
    exponent = flat[base + page_size * 576 + entry * 8 + column // 64].int()
    magnitude, fraction = code >> 3 & 15, code & 7
    value = torch.where(magnitude == 0, fraction * 2.0**-9, torch.ldexp(1 + fraction / 8, magnitude - 7))
    nope = torch.ldexp(torch.where(code >= 128, -value, value), exponent - 127)
    byte = flat[base + entry * 576 + 448 + torch.arange(128, device=flat.device)].int()
    rope = ((byte[:, 1::2] << 24) | (byte[:, 0::2] << 16)).view(torch.float32)
    return torch.cat([nope.float(), rope], dim=1)


def _attend_online(q, kv_pages, slots, scale: float, block: int):
    """One row against one cache: (maximum, sum, value sum), base-2 online softmax over blocks, float32."""
    maximum = torch.full((q.shape[0],), -math.inf)
    total, values = torch.zeros(q.shape[0]), torch.zeros(q.shape)
    for start in range(0, slots.numel(), block):
        keys = _decode_bytes(kv_pages, slots[start : start + block])
        scores = q @ keys.T * (scale * math.log2(math.e))
        higher = torch.maximum(maximum, scores.amax(dim=1))
        weights = torch.exp2(scores - higher[:, None])
        rescale = torch.exp2(maximum - higher)
        total = total * rescale + weights.sum(dim=1)
        values = values * rescale[:, None] + weights @ keys
        maximum = higher
    return maximum, total, values


def _slots(pages, candidates, length, table_row) -> torch.Tensor:
    """A row's valid slots one by one: from its list, or where `table_row` is given from the page table."""
    num_pages, page_size = pages.shape[:2]
    if table_row is None:
        count = candidates.shape[-1] if length is None else min(max(0, int(length)), candidates.shape[-1])
        slots = candidates[:count].tolist()
    elif not 0 <= table_row < candidates.shape[0]:
        return torch.tensor([], dtype=torch.int64)
    else:
        width = candidates.shape[1] * page_size
        count = width if length is None else min(max(0, int(length)), width)
        table = candidates[table_row].tolist()
        slots = [table[entry // page_size] * page_size + entry % page_size for entry in range(count)]
    return torch.tensor([slot for slot in slots if 0 <= slot < num_pages * page_size], dtype=torch.int64)


def sparse_decode_online(
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
    block=64,
):
    """The second formulation: float32, one row and one cache at a time, online in blocks, the caches merged by their
    maxima, the sink last. CPU tensors only, and slow. Same returns, in float32."""
    rows, _, heads, dim = q.shape
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    out, lse = torch.zeros((rows, 1, heads, dim)), torch.full((rows, heads, 1), math.inf)
    for row in range(rows):
        length = None if topk_length is None else topk_length[row]
        slots = [(kv_pages, _slots(kv_pages, indices[row, 0], length, None))]
        if extra_kv_pages is not None:
            length = None if extra_topk_length is None else extra_topk_length[row]
            if extra_page_table is None:
                extra = _slots(extra_kv_pages, extra_indices[row, 0], length, None)
            else:
                table_row = row if extra_page_table_rows is None else int(extra_page_table_rows[row])
                extra = _slots(extra_kv_pages, extra_page_table, length, table_row)
            slots.append((extra_kv_pages, extra))
        parts = [_attend_online(q[row, 0].float(), pages, some, scale, block) for pages, some in slots if some.numel()]
        if not parts:
            continue
        maximum = torch.stack([part[0] for part in parts]).amax(dim=0)
        total = sum(part[1] * torch.exp2(part[0] - maximum) for part in parts)
        values = sum(part[2] * torch.exp2(part[0] - maximum)[:, None] for part in parts)
        lse[row, :, 0] = (maximum + torch.log2(total)) * math.log(2)
        if attn_sink is not None:
            total = total + torch.exp2(attn_sink * math.log2(math.e) - maximum)
        out[row, 0] = values / total[:, None]
    return out, lse

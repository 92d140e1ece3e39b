"""SGLang's KV compressors, the decode step -> `ops.compressor`.

`CompressorBackendMixin._forward_compress_all_in_one` has everything of a compressor's call but its projection: state,
projection, weights, cache, slots; the plan it asks of the backend. SGLang launches two kernels there, ours is one. Core
and index compressors of all layers come through it, each on the stream that SGLang runs it on.

Served is a decode plan (one token a request) of at most 512 rows. The rest is the original's: prompts and speculative
verification, whose plans are others (their tokens are read from the projection, not from the state, and written
behind); groups of 128 as running sums (SGLANG_OPT_USE_ONLINE_COMPRESS); a bf16 state; caches of other layouts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from deepseek_v4_sm120.ops import compressor as op
from deepseek_v4_sm120.ops.shared.kv_page_layout import kv_page_layout
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.specs import bounds

PATCH = "compressor"

NEEDED = (
    *("kv_score_buffer", "kv_score_input", "ape", "head_dim", "norm", "freqs_cis_cache", "kv_cache"),
    *("is_indexer", "compress_ratio", "page_size", "out_loc"),
)
# What later releases or other platforms add -> what it must be; `rotate` is is_indexer's equal
OTHERS = {
    "rotate": lambda value: True,
    "use_fp4_indexer": lambda value: True,
    "bf16_store": lambda value: not value,
    "kv_scale_cache": lambda value: value is None,
    "rope_cache": lambda value: value is None,
    "kv_layout": lambda value: getattr(value, "name", None) == "V4",
    "fp8_2buff": lambda value: not value,
    "kv_cache_rope": lambda value: value is None,
}


def arguments(plan, given: Mapping) -> dict | None:
    """ops.compressor's arguments of a call, or None where the operator does not take it. No contents are looked at."""
    if not all(name in given for name in NEEDED) or not _are_known(given) or not getattr(plan, "is_decode", False):
        return None
    ratio, head_dim, is_indexer = given["compress_ratio"], given["head_dim"], given["is_indexer"]
    fp4 = bool(given.get("use_fp4_indexer", False))
    if (ratio, head_dim) not in _SHAPES or is_indexer != (head_dim == op.INDEX_DIM) or (fp4 and not is_indexer):
        return None
    state, token, steps, cache = given["kv_score_buffer"], given["kv_score_input"], plan[1], given["kv_cache"]
    ape, weight, freqs, slots = given["ape"], given["norm"].weight, given["freqs_cis_cache"], given["out_loc"]
    width, rows, page_size = op.width(ratio, head_dim), token.shape[0], given["page_size"]
    taken = (
        {state.dtype, token.dtype, ape.dtype, weight.dtype} == {torch.float32}
        and (freqs.dtype, slots.dtype, steps.dtype, cache.dtype)
        == (torch.complex64, torch.int64, torch.uint8, torch.uint8)
        and 0 < rows <= op.MAX_ROWS
        and tuple(steps.shape) == (rows, op.PLAN_BYTES)
        and tuple(slots.shape) == (rows,)
        and state.shape[-1] == token.shape[-1] == width
        and freqs.shape[-1] == op.ROTATED // 2
        and all(t.is_contiguous() for t in (state, token, ape, weight, freqs, slots, steps))
        and page_size > 0
        and page_size & (page_size - 1) == 0
        and cache.dim() == 2
        and cache.stride(1) == 1
        and device_gate.serves(state.device)
    )
    if not taken:
        return None
    return {
        "kv_score": token,
        "state": state.view(-1, ratio, width),
        "ape": ape.view(-1, head_dim),
        "plan": steps,
        "norm_weight": weight,
        "norm_eps": given["norm"].variance_epsilon,
        "freqs_cis": freqs,
        "out_loc": slots,
        "cache": cache,
        "page_size": page_size,
        "fp4": fp4,
    }


_SHAPES = ((op.SHORT, op.KV_DIM), (op.SHORT, op.INDEX_DIM), (op.LONG, op.KV_DIM))


def _are_known(given: Mapping) -> bool:
    others = {name: value for name, value in given.items() if name not in NEEDED}
    return all(name in OTHERS and OTHERS[name](value) for name, value in others.items())


def replace_all_in_one(original: Callable) -> Callable:
    """For CompressorBackendMixin._forward_compress_all_in_one(self, *, ...) -> None."""
    beside = settings().shadow

    @functools.wraps(original)
    def _forward_compress_all_in_one(self, **given):
        plan = self._get_paged_compress_metadata(given["compress_ratio"]) if "compress_ratio" in given else None
        call = arguments(plan, given)
        if call is None:
            return original(self, **given)
        if beside:
            return _serve_beside(call, lambda: original(self, **given))
        return op.compressor(**call)

    return _forward_compress_all_in_one


# ---- shadow mode: ours on a copy of what it reads and writes, before the original runs on the live tensors


def _serve_beside(call: dict, original: Callable[[], None]) -> None:
    own, ended = _own_copy(call)
    op.compressor(**own)
    original()
    rows, head_dim = call["kv_score"].shape[0], call["norm_weight"].shape[0]
    ours = _entries(own["cache"], call["page_size"], own["out_loc"], head_dim, call["fp4"])
    slots = torch.where(ended, call["out_loc"], 0)
    theirs = _entries(call["cache"], call["page_size"], slots, head_dim, call["fp4"])
    none = torch.zeros_like(ours)
    pairs = [(torch.where(ended[:, None], ours, none), torch.where(ended[:, None], theirs, none))]
    shape = {"rows": rows, "ratio": call["state"].shape[1], "head_dim": head_dim}
    shadow.record(PATCH, pairs, identity=call["cache"].data_ptr(), shape=shape, relative_l2=bounds.COMPRESSOR.shadow)
    if settings().shadow == "ours":
        op.compressor(**call)  # writes again what the original wrote to the state


def _own_copy(call: dict) -> tuple[dict, torch.Tensor]:
    """(the call on pages of its own, one or two of state for each row and an entry of cache; rows that end a group).

    Device operations only: a captured graph repeats them.
    """
    state, cache = call["state"], call["cache"]
    ratio, rows = state.shape[1], call["kv_score"].shape[0]
    each = torch.arange(rows, device=state.device)
    length, write, before, page = call["plan"].view(torch.int32).long().unbind(dim=1)

    def inside(index, size):
        return (index >= 0) & (index < size)

    own_before = torch.full_like(each, -1)
    copied = state[page.clamp(0, state.shape[0] - 1)]
    if ratio == op.SHORT:
        own_before = torch.where(inside(before, state.shape[0]), each + rows, -1)
        copied = torch.cat([copied, state[before.clamp(0, state.shape[0] - 1)]])
    own_page = torch.where(inside(page, state.shape[0]), each, -1)
    own_write = torch.where(inside(write, state.shape[0] * ratio), each * ratio + write % ratio, -1)
    own_slot = torch.where(inside(call["out_loc"], cache.shape[0] * call["page_size"]), each, -1)
    plan = torch.stack([length, own_write, own_before, own_page], dim=1).to(torch.int32).view(torch.uint8)
    pages = -(-rows // call["page_size"])
    own_cache = torch.zeros((pages, cache.stride(0)), dtype=torch.uint8, device=cache.device)
    ended = (length > 0) & (length % ratio == 0) & (own_slot >= 0) & (own_page >= 0)
    own = {**call, "state": copied, "plan": plan, "out_loc": own_slot, "cache": own_cache}
    return own, ended


def _entries(cache: torch.Tensor, page_size: int, slots: torch.Tensor, head_dim: int, fp4: bool) -> torch.Tensor:
    """The numbers [n, head_dim] float32 that slots [n] hold (slot 0 for -1); no constant comes from the host."""
    page, entry = slots.clamp_min(0) // page_size, slots.clamp_min(0) % page_size
    width = op.INDEX_DIM // 2 if fp4 else op.INDEX_DIM

    def section(start, size):
        strides = (cache.stride(0), size, 1)
        return cache.as_strided((cache.shape[0], page_size, size), strides, cache.storage_offset() + start)[page, entry]

    if head_dim == op.KV_DIM:
        layout = kv_page_layout()
        nope, tile = layout.nope_dim, layout.tile_dim
        data, exponents = section(0, layout.data_bytes), section(page_size * layout.data_bytes, layout.scale_bytes)
        powers = (exponents[:, : nope // tile].int() << 23).view(torch.float32)  # the exponent field itself; 255: inf
        values = data[:, :nope].view(torch.float8_e4m3fn).float()
        values *= powers.repeat_interleave(tile, dim=1, output_size=nope)
        return torch.cat([values, data[:, nope:].contiguous().view(torch.bfloat16).float()], dim=1)
    values, scales = section(0, width), section(page_size * width, op.INDEX_SCALE_BYTES)
    if not fp4:
        return values.view(torch.float8_e4m3fn).float() * scales.view(torch.float32)
    codes = torch.stack((values & 15, values >> 4), dim=-1).flatten(1).int()
    size = codes & 7
    normal = (2 + (size & 1)) * torch.exp2((size >> 1).float()) / 4
    magnitudes = torch.where(size < 2, size * 0.5, normal)
    powers = torch.exp2(scales.float() - 127).repeat_interleave(32, dim=1, output_size=op.INDEX_DIM)
    return torch.where(codes > 7, -magnitudes, magnitudes) * powers

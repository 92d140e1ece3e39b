"""SGLang's KV compressors -> `ops.compressor`.

`CompressorBackendMixin._forward_compress_all_in_one` has everything of a compressor's call but its projection: state,
projection, weights, cache, slots; the plan it asks of the backend. SGLang launches two kernels there for decode, three
for verification and prompts, ours is one. Core and index compressors of all layers come through it, each on the stream
that SGLang runs it on. The bits are SGLang's own, so that long prompts, which are the original's, go on where ours
ended; but for groups of 128 of releases before 0.5.20, so a reproducible server has SGLang's alone there.

Served are at most 512 rows, of decode (one token a request) or of verification and short prompts (plans of their own:
tokens are read from the projection, not from the state, and written behind). The rest is the original's: long prompts;
groups of 128 as running sums (SGLANG_OPT_USE_ONLINE_COMPRESS); a bf16 state; caches of other layouts.

Before 0.5.18 the plan of a verification has the state written for the last 4 tokens, or (built from host lists) for
those since the last group, so what a rejection goes back to is lost. `create_paged_compressor_data` is replaced there:
every row that a rejection may need is written.
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
STATE = "compressor_state"  # in shadow mode, which has a line for it
_in_place: set[Callable] = set()  # SGLang's functions that call ours

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
    if not all(name in given for name in NEEDED) or not _are_known(given) or not hasattr(plan, "is_decode"):
        return None
    ratio, head_dim, is_indexer = given["compress_ratio"], given["head_dim"], given["is_indexer"]
    fp4 = bool(given.get("use_fp4_indexer", False))
    if (ratio, head_dim) not in _SHAPES or is_indexer != (head_dim == op.INDEX_DIM) or (fp4 and not is_indexer):
        return None
    state, token, steps, cache = given["kv_score_buffer"], given["kv_score_input"], plan[1], given["kv_cache"]
    ape, weight, freqs, slots = given["ape"], given["norm"].weight, given["freqs_cis_cache"], given["out_loc"]
    width, rows, page_size = op.width(ratio, head_dim), token.shape[0], given["page_size"]
    writes = None if plan.is_decode else plan[2]
    if writes is not None:  # a slot for every token, read where a group ends
        slots = slots[:rows]
    taken = (
        {state.dtype, token.dtype, ape.dtype, weight.dtype} == {torch.float32}
        and (freqs.dtype, slots.dtype, cache.dtype) == (torch.complex64, torch.int64, torch.uint8)
        and _has_few_rows(given)
        and _has_plan(steps, op.PLAN_BYTES, rows if writes is None else None)
        and (writes is None or _has_plan(writes, op.WRITE_BYTES))
        and tuple(slots.shape) == (rows,)
        and state.shape[-1] == token.shape[-1] == width
        and freqs.shape[-1] == op.ROTATED // 2
        and all(t.is_contiguous() for t in (state, token, ape, weight, freqs, slots))
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
        "writes": writes,
    }


def is_in_place() -> bool:
    """Whether what comes behind a product of few rows in this process is ours, as far as layouts are ones it takes."""
    return bool(_in_place)


def _has_few_rows(given: Mapping) -> bool:
    """Asked first: a long prompt's calls are the original's, whatever else they have."""
    token = given.get("kv_score_input")
    return token is not None and 0 < token.shape[0] <= op.MAX_ROWS


def _has_plan(plan, width: int, rows: int | None = None) -> bool:
    """Whether it is [rows, width] bytes; by default any number of rows that the operator takes."""
    count = plan.shape[0] == rows if rows is not None else plan.shape[0] <= op.MAX_ROWS
    return plan.dim() == 2 and count and plan.shape[1] == width and plan.dtype == torch.uint8 and plan.is_contiguous()


_SHAPES = ((op.SHORT, op.KV_DIM), (op.SHORT, op.INDEX_DIM), (op.LONG, op.KV_DIM))


def _are_known(given: Mapping) -> bool:
    others = {name: value for name, value in given.items() if name not in NEEDED}
    return all(name in OTHERS and OTHERS[name](value) for name, value in others.items())


def replace_all_in_one_0_5_14(original: Callable) -> Callable:
    """The same up to 0.5.19, whose own kernels merge the 128 tokens of a group in another order than ours."""
    return _as_it_was(original) if settings().reproducible else replace_all_in_one(original)


def _as_it_was(original: Callable) -> Callable:
    @functools.wraps(original)
    def _forward_compress_all_in_one(self, **given):
        return original(self, **given)

    return _forward_compress_all_in_one


def replace_all_in_one(original: Callable) -> Callable:
    """For CompressorBackendMixin._forward_compress_all_in_one(self, *, ...) -> None."""
    beside = settings().shadow
    _in_place.add(original)

    @functools.wraps(original)
    def _forward_compress_all_in_one(self, **given):
        if not _has_few_rows(given):
            return original(self, **given)
        plan = self._get_paged_compress_metadata(given["compress_ratio"]) if "compress_ratio" in given else None
        call = arguments(plan, given)
        if call is None:
            return original(self, **given)
        if beside:
            return _serve_beside(call, lambda: original(self, **given))
        return op.compressor(**call)

    return _forward_compress_all_in_one


# ---- before 0.5.18: what of the state is written for a verification


def replace_create_data(original: Callable) -> Callable:
    """For create_paged_compressor_data, 0.5.14 to 0.5.17."""

    @functools.wraps(original)
    def create_paged_compressor_data(compress_ratio, *, is_prefill, token_to_kv_pool, **given):
        def create(**other):
            return original(compress_ratio, token_to_kv_pool=token_to_kv_pool, **other)

        plan = create(is_prefill=is_prefill, **given)
        # running sums have other plans
        if not is_prefill or plan.plan_w.shape[1] != op.WRITE_BYTES or not device_gate.serves(plan.plan_w.device):
            return plan
        window = 2 * op.SHORT if compress_ratio == op.SHORT else op.LONG
        spare = token_to_kv_pool.get_ring_size(compress_ratio=compress_ratio) - window
        if spare <= 0:  # no speculation: nothing is rejected
            return plan
        writes = _all_writes(plan.plan_w, create, spare + 2, **given)  # as many tokens as 0.5.18 keeps
        return plan._replace(plan_w=writes)

    return create_paged_compressor_data


def _all_writes(
    planned,
    create,
    kept,
    *,
    req_to_token,
    req_pool_indices,
    seq_lens,
    extend_lens,
    extend_lens_cpu=None,
    num_q_tokens=None,
    **_,
) -> torch.Tensor:
    """[rows, 8]: the rows of `planned` and the last `kept` of each request, each with the slot that decode's plan has.

    seq_lens, extend_lens [requests]: of a request, and how many of that are rows of this step. Device operations only:
    a captured graph repeats them.
    """
    rows = num_q_tokens if extend_lens_cpu is None else sum(extend_lens_cpu)
    row = torch.arange(rows, device=planned.device)
    ends = extend_lens.to(row).cumsum(0)
    request = torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)
    behind = ends[request] - row - 1  # tokens of the request, behind this one; negative: a row of none
    length = torch.where(behind >= 0, seq_lens.to(row)[request] - behind, 1)
    requests = req_pool_indices[request]
    steps = create(is_prefill=False, req_to_token=req_to_token, req_pool_indices=requests, seq_lens=length)
    of = planned.view(torch.int32)[:, 0].long()
    is_planned = torch.zeros(rows + 1, dtype=torch.bool, device=row.device)
    is_planned.scatter_(0, torch.where(of < 0, rows, of), True)
    wanted = (behind >= 0) & (is_planned[:rows] | (behind < kept))
    writes = torch.stack([row, steps[1].view(torch.int32)[:, 1].long()], dim=1)
    return torch.where(wanted[:, None], writes, -1).to(torch.int32).view(torch.uint8)


# ---- shadow mode: ours on a copy of what it reads and writes, before the original runs on the live tensors
#
# A capture's warm-up, and what pads a captured graph, has all its requests in slot 0 of requests, state and cache. What
# several rows write at once is chance, in SGLang's kernels as in ours: it is left out and counted, by the plan's own
# places, whatever the call is for.


def _serve_beside(call: dict, original: Callable[[], None]) -> None:
    own, ended, row = _own_copy(call)
    op.compressor(**own)
    original()
    rows, ratio, head_dim = call["kv_score"].shape[0], call["state"].shape[1], call["norm_weight"].shape[0]
    told = {"identity": call["cache"].data_ptr(), "shape": {"rows": rows, "ratio": ratio, "head_dim": head_dim}}
    if len(row):  # a prompt that ends no group has no line
        ours = _entries(own["cache"], call["page_size"], own["out_loc"][row], head_dim, call["fp4"])
        is_chance = ended & _is_chance(call, ended, row)
        kept = ended & ~is_chance
        theirs = _entries(call["cache"], call["page_size"], call["out_loc"][row] * kept, head_dim, call["fp4"])
        shadow.record(
            PATCH, [_where(kept, ours, theirs)], relative_l2=bounds.COMPRESSOR.shadow, left_out=is_chance.sum(), **told
        )
    written, own_written = _written(call, rows), _written(own, rows)
    if len(written):
        is_written = _inside(written, call["state"].shape[0] * ratio)
        is_chance = is_written & _is_shared(written, is_written)
        slots, own_slots = (state.view(-1, state.shape[2]) for state in (call["state"], own["state"]))
        kept = is_written & ~is_chance
        pair = _where(kept, own_slots[own_written.clamp_min(0)], slots[written * kept])
        shadow.record(STATE, [pair], relative_l2=0.0, left_out=is_chance.sum(), **told)
    if settings().shadow == "ours" and call["writes"] is None:
        op.compressor(**call)  # writes again what the original wrote to the state; of many tokens that is read before


def _own_copy(call: dict) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """(the call on pages of its own: one or two of state for each line of the plan, behind them a slot for each write
    of many tokens, an entry of cache for each row; lines that are an entry; their rows).

    Device operations only: a captured graph repeats them.
    """
    state, cache, many = call["state"], call["cache"], call["writes"] is not None
    ratio, rows = state.shape[1], call["kv_score"].shape[0]
    each = torch.arange(len(call["plan"]), device=state.device)
    length, write, before, page = call["plan"].view(torch.int32).long().unbind(dim=1)
    row = (write & 0xFFFF).clamp(max=rows - 1) if many else each
    own_before = torch.full_like(each, -1)
    copied = state[page.clamp(0, state.shape[0] - 1)]
    if ratio == op.SHORT:
        own_before = torch.where(_inside(before, state.shape[0]), each + len(each), -1)
        copied = torch.cat([copied, state[before.clamp(0, state.shape[0] - 1)]])
    own_page = torch.where(_inside(page, state.shape[0]), each, -1)
    own_write = torch.where(_inside(write, state.shape[0] * ratio), each * ratio + write % ratio, -1)
    slot = torch.arange(rows, device=state.device)
    own_slot = torch.where(_inside(call["out_loc"], cache.shape[0] * call["page_size"]), slot, -1)
    plan = torch.stack([length, write if many else own_write, own_before, own_page], dim=1)
    plan = plan.to(torch.int32).view(torch.uint8)
    pages = -(-rows // call["page_size"])
    own_cache = torch.zeros((pages, cache.stride(0)), dtype=torch.uint8, device=cache.device)
    ended = (length > 0) & (length % ratio == 0) & (own_slot[row] >= 0) & (many | (own_page >= 0))
    writes = None
    if many:
        of, written = call["writes"].view(torch.int32).unbind(dim=1)
        behind = torch.arange(len(of), dtype=torch.int32, device=of.device) + len(copied) * ratio
        behind = torch.where(_inside(written, state.shape[0] * ratio), behind, -1)
        writes = torch.stack([of, behind], dim=1).view(torch.uint8)
        copied = torch.cat([copied, copied.new_zeros(-(-len(of) // ratio), *copied.shape[1:])])
    own = {**call, "state": copied, "plan": plan, "out_loc": own_slot, "cache": own_cache, "writes": writes}
    return own, ended, row


def _is_chance(call: dict, ended: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """[lines]: entries whose slot of cache another line's entry takes too; and of decode, where rows put their tokens
    into the state before they read it, those whose groups another row writes to."""
    is_chance = _is_shared(call["out_loc"][row], ended)
    if call["writes"] is None:
        pages, ratio, _ = call["state"].shape
        length, write, before, page = call["plan"].view(torch.int32).long().unbind(dim=1)
        written = torch.where(_inside(write, pages * ratio), write // ratio, -1)
        reads = page[:, None] == written
        if ratio == op.SHORT:
            reads |= (length > ratio)[:, None] & (before[:, None] == written)
        is_chance |= reads.fill_diagonal_(False).any(dim=1)
    return is_chance


def _is_shared(places: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """[n]: whether a place is another's too, of those that count."""
    places = places.masked_fill(~of, -1)
    return (places[:, None] == places).sum(dim=1) > 1


def _written(call: dict, rows: int) -> torch.Tensor:
    """[rows or writes]: the slots of state that a call writes; -1 where a line of writes is none."""
    if call["writes"] is None:
        return call["plan"].view(torch.int32)[:, 1].long()
    of, slot = call["writes"].view(torch.int32).long().unbind(dim=1)
    return torch.where(_inside(of, rows), slot, -1)


def _inside(index: torch.Tensor, size: int) -> torch.Tensor:
    return (index >= 0) & (index < size)


def _where(kept: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both with zeros in the lines that are not compared."""
    none = torch.zeros_like(ours)
    return torch.where(kept[:, None], ours, none), torch.where(kept[:, None], theirs, none)


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

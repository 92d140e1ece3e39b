"""SGLang's C4 indexer -> `ops.index_select`: no logits tensor.

Inside `forward_c4_indexer` SGLang calls a function for the logits and right after it, with its result, one for top-k
and page transform. Everything around the two (query projection, capturers, HiSparse, row chunks) stays SGLang's.

    replace_logits      computes nothing: it returns a Deferred, which is the arguments of the call
    replace_topk        gets the Deferred and runs ops.index_select on the arguments of both
    replace_other_topk  SGLang was asked for another top-k (torch, FlashInfer): stock logits are computed after all
    replace_forward     is the scope in which logits may be deferred, and tells whether adjacent rows share pages

Prompts' rows are dealt to the cards of a tensor-parallel group (index_select_dealt.py).

A logits function called by anybody else, or with what `takes` does not know, is the original. DeepGEMM's logits are
deferred for the FP4 index cache, where SGLang has no other, and in DSV4_SM120_FORCE=ops; for the FP8 cache DeepGEMM is
an explicit choice (SGLANG_OPT_USE_TILELANG_INDEXER=0 and SGLANG_FP8_PAGED_MQA_LOGITS_TORCH=0) and is respected.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from deepseek_v4_sm120.ops.index_select import FP4_ENTRY_BYTES, FP8_ENTRY_BYTES, index_select, topk_select
from deepseek_v4_sm120.ops.shared import limits
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.adapters import index_select_dealt
from deepseek_v4_sm120.sglang_patches.adapters.waiting import Scope, Waiting
from deepseek_v4_sm120.sglang_patches.rows.index_select import DEEP_GEMM, DEEP_GEMM_LOGITS, DEEP_GEMM_LOGITS_FP4
from deepseek_v4_sm120.specs import bounds

PATCH = "index_select"
WITHIN_TOLERANCE = "index_select_within_tolerance"
PAGE = 64
SHARED_PAGES = 4  # rows_per_request where rows of a request are adjacent: any number above 1 says so


OF_SELECTION, BEHIND = 5, frozenset(("metadata", "out_raw_indices"))  # a top-k's arguments: so many, and these
_forward = Scope()  # forward_c4_indexer, of an indexer whose logits may be deferred


@dataclass(eq=False)
class Deferred(Waiting):
    """Stands for the logits between the two functions."""

    q: torch.Tensor
    q_scales: torch.Tensor | None
    k_pages: torch.Tensor
    weights: torch.Tensor
    rows_per_request: int
    original: Callable
    args: tuple

    @property
    def shape(self) -> tuple[int, int]:
        return self.q.shape[0], self.args[6]

    def run(self) -> torch.Tensor:
        return self.original(*self.args)


def _is_known_cache(cache: torch.Tensor, entry_bytes: int) -> bool:
    return cache.ndim == 4 and tuple(cache.shape[1:]) == (PAGE, 1, entry_bytes) and cache.element_size() == 1


def takes(args: tuple) -> bool:
    """True for (q, cache, weights, lengths, page table, schedule, width, clean) that ops.index_select computes."""
    if len(args) != 8:
        return False
    q, cache, weights, lengths, page_table = args[:5]
    fp4 = isinstance(q, tuple)
    values = q[0] if fp4 else q
    return (
        values.ndim == 4
        and values.shape[1] == 1
        and limits.takes(PATCH, index_heads=values.shape[2], index_dim=values.shape[3] * (2 if fp4 else 1))
        and (q[1].dtype == torch.int32 if fp4 else values.dtype == torch.float8_e4m3fn)
        and _is_known_cache(cache, FP4_ENTRY_BYTES if fp4 else FP8_ENTRY_BYTES)
        and weights.dtype == torch.float32
        and lengths.dtype == page_table.dtype == torch.int32
        and device_gate.serves(values.device)
    )


def takes_selection(seq_lens, page_tables, out, page_size) -> bool:
    """True for a top-k that ops.index_select makes: of so many entries, as slots of pages of 64."""
    return (
        page_size == PAGE
        and limits.takes(PATCH, index_topk=out.shape[1])
        and out.dtype == seq_lens.dtype == torch.int32
        and isinstance(page_tables, torch.Tensor)
        and page_tables.dtype == torch.int32
    )


def replace_logits(original: Callable) -> Callable:
    """For every function (q, cache, weights, lengths, page_table, schedule, width, clean_logits) -> logits."""

    @functools.wraps(original)
    def paged_mqa_logits(*args, **kwargs):
        if _forward.layer is None or kwargs or not takes(args):
            return original(*args, **kwargs)
        q, q_scales = args[0] if isinstance(args[0], tuple) else (args[0], None)
        return Deferred(q, q_scales, args[1], args[2], _forward.known["rows_per_request"], original, args)

    return paged_mqa_logits


def replace_topk(original: Callable) -> Callable:
    """For topk_transform_*(scores, seq_lens, page_tables, out, page_size, ...): fills out, and raw indices if given.

    The version 2 functions have a plan before the raw indices; ours needs none. What else one takes may mean anything.
    """
    serve = _serve_beside(original) if settings().shadow else _serve
    positional, *_, by_name, _, _ = inspect.getfullargspec(original)
    is_known = BEHIND.issuperset((*positional[OF_SELECTION:], *by_name))
    if not is_known:
        report.warn_once(f"{PATCH}: {original.__name__} of this SGLang takes more than we know; its own top-k runs")

    @functools.wraps(original)
    def topk_transform(scores, seq_lens, page_tables, out_page_indices, page_size, *rest, **kwargs):
        given = (seq_lens, page_tables, out_page_indices, page_size)
        if not isinstance(scores, Deferred):
            return original(scores, *given, *rest, **kwargs)
        if not (is_known and takes_selection(*given)):
            return original(scores.run(), *given, *rest, **kwargs)
        return serve(scores, *given, *rest, **kwargs)

    return topk_transform


def replace_other_topk(original: Callable) -> Callable:
    """For the functions of a top-k that was asked for explicitly: they get the original's logits."""
    told = False

    @functools.wraps(original)
    def topk_transform(scores, *args, **kwargs):
        nonlocal told
        if not isinstance(scores, Deferred):
            return original(scores, *args, **kwargs)
        if not told:
            told = True
            report.info(f"index_select: SGLang was asked for {original.__name__}; its own indexer runs")
        return original(scores.run(), *args, **kwargs)

    return topk_transform


def _raw_indices(rest: tuple, kwargs: dict, out: torch.Tensor) -> torch.Tensor | None:
    """Version 1 ends with them; version 2 has its plan there, which is no [rows, k] tensor, or both."""
    last = kwargs.get("out_raw_indices", rest[-1] if rest else None)
    return last if isinstance(last, torch.Tensor) and last.shape == out.shape else None


ALL = slice(None)


def _select(deferred: Deferred, seq_lens, page_tables, rows: slice, out, entries) -> None:
    def of_rows(tensor):
        return tensor if tensor is None or rows is ALL else tensor[rows]

    index_select(
        of_rows(deferred.q),
        deferred.k_pages,
        of_rows(deferred.weights),
        of_rows(seq_lens.reshape(-1)).contiguous(),
        of_rows(page_tables),
        k=out.shape[1],
        q_scales=of_rows(deferred.q_scales),
        rows_per_request=deferred.rows_per_request,
        out=out,
        entries=entries,
    )


def _who_deals(deferred, page_tables, out):
    """None with a schedule of DeepGEMM's: 0.5.21 and later cut rows with one by each card's own free memory."""
    return None if deferred.args[5] is not None else index_select_dealt.who_deals(out, page_tables)


def _serve(deferred, seq_lens, page_tables, out, page_size, *rest, **kwargs) -> None:
    select = functools.partial(_select, deferred, seq_lens, page_tables)
    entries = _raw_indices(rest, kwargs, out)
    coordinator = _who_deals(deferred, page_tables, out)
    if coordinator is None:
        select(ALL, out, entries)
    else:
        index_select_dealt.deal(coordinator, select, page_tables, len(deferred.k_pages), out, entries)


# ---- shadow mode


def _serve_beside(original: Callable) -> Callable:
    """Ours and the original, compared as sets; the result that the mode keeps is in SGLang's tensors at the end."""

    def serve(deferred, seq_lens, page_tables, out, page_size, *rest, **kwargs):
        select = functools.partial(_select, deferred, seq_lens, page_tables)
        slots, entries = torch.empty_like(out), torch.empty_like(out)
        select(ALL, slots, entries)
        coordinator = _who_deals(deferred, page_tables, out)
        if coordinator is not None:
            dealt = torch.empty_like(out), torch.empty_like(out)
            index_select_dealt.deal(coordinator, select, page_tables, len(deferred.k_pages), *dealt)
            _record(index_select_dealt.PATCH, deferred, out, _differing(dealt, (slots, entries)), 0.0)
            slots, entries = dealt
        scores = deferred.run()
        original(scores, seq_lens, page_tables, out, page_size, *rest, **kwargs)
        if out.shape[0]:
            wrong, tolerated = compare_sets(scores, seq_lens.reshape(-1), slots, entries, out)
            _record(PATCH, deferred, out, wrong, 0.0)
            _record(WITHIN_TOLERANCE, deferred, out, tolerated, 1.0)
        if settings().shadow == "ours":
            out.copy_(slots)
            if (raw := _raw_indices(rest, kwargs, out)) is not None:
                raw.copy_(entries)

    return serve


def compare_sets(scores, lengths, slots, entries, stock) -> tuple[torch.Tensor, torch.Tensor]:
    """(wrong, tolerated) [rows] float32: our entries that stock did not choose, beyond and within the tolerance.

    Within: stock's own logit of the entry is no further from the k-th greatest of stock's logits than the bound, as a
    share of the greatest. Rows that choose another number of entries have the difference among the wrong, and what is
    chosen twice, in whose place another is missing.
    """
    exact = torch.empty(slots.shape, dtype=torch.float32, device=slots.device)
    topk_select(scores, lengths, k=slots.shape[1], logits=exact)
    threshold = exact.masked_fill(exact == -torch.inf, torch.inf).amin(dim=1, keepdim=True)
    greatest = exact.abs().masked_fill(exact == -torch.inf, 0.0).nan_to_num().amax(dim=1, keepdim=True)
    ordered = stock.sort(dim=1).values
    at = torch.searchsorted(ordered, slots).clamp_max(slots.shape[1] - 1)
    only_ours = (ordered.gather(1, at) != slots) & (entries >= 0)
    values = scores.gather(1, entries.clamp_min(0).to(torch.int64))
    near = only_ours & ((values - threshold).abs() <= bounds.INDEX_SELECT.shadow * greatest)
    count = ((entries >= 0).sum(dim=1) - (stock >= 0).sum(dim=1)).abs()
    chosen = entries.sort(dim=1).values
    repeated = (chosen[:, 1:] == chosen[:, :-1]) & (chosen[:, 1:] >= 0)
    return ((only_ours & ~near).sum(dim=1) + count + repeated.sum(dim=1)).float(), near.sum(dim=1).float()


def _differing(some, others) -> torch.Tensor:
    """[rows] float32: places of the lists where they are not the same."""
    return torch.stack([a != b for a, b in zip(some, others, strict=True)]).any(dim=0).sum(dim=1).float()


def _record(name: str, deferred, out, count, relative_l2: float) -> None:
    """Of a call, a number of entries of each row, beside k: relative L2 is the share of entries that differ."""
    k = torch.full_like(count, out.shape[1])
    shape = {
        "rows": out.shape[0],
        "width": deferred.shape[1],
        "k": out.shape[1],
        "fp4": int(deferred.q_scales is not None),
    }
    pairs = [((k + count)[:, None], k[:, None])]
    shadow.record(name, pairs, identity=deferred.k_pages.data_ptr(), shape=shape, relative_l2=relative_l2)


# ---- the scope


_deep_gemm: dict[str, list] = {}  # name that is replaced -> [original, by how many forwards]
_deep_gemm_lock = threading.Lock()


@contextmanager
def _deferring_deep_gemm(names: tuple[str, ...]):
    """DeepGEMM's logits deferred for the duration: SGLang looks the function up in the package when it calls. Of
    forwards in several threads the first one replaces it, and the last one restores it."""
    if not names or (DEEP_GEMM not in sys.modules and importlib.util.find_spec(DEEP_GEMM) is None):
        yield
        return
    package = importlib.import_module(DEEP_GEMM)
    names = tuple(name for name in names if hasattr(package, name))
    with _deep_gemm_lock:
        for name in names:
            held = _deep_gemm.setdefault(name, [getattr(package, name), 0])
            held[1] += 1
            setattr(package, name, replace_logits(held[0]))
    try:
        yield
    finally:
        with _deep_gemm_lock:
            for name in names:
                _deep_gemm[name][1] -= 1
                if not _deep_gemm[name][1]:
                    setattr(package, name, _deep_gemm.pop(name)[0])


def _deep_gemm_names(c4_indexer) -> tuple[str, ...]:
    names = (DEEP_GEMM_LOGITS_FP4,) if getattr(c4_indexer, "use_fp4_indexer", False) else ()
    return (*names, DEEP_GEMM_LOGITS) if settings().force == "ops" else names


def replace_forward(original: Callable) -> Callable:
    """For C4IndexerBackendMixin.forward_c4_indexer."""

    @functools.wraps(original)
    def forward_c4_indexer(self, x, q_lora, c4_indexer, forward_batch, *args, **kwargs):
        served = device_gate.serves(x.device)
        rows_per_request = 1 if served and forward_batch.forward_mode.is_decode() else SHARED_PAGES
        names = _deep_gemm_names(c4_indexer) if served else ()
        with _forward.enter(self if served else None, rows_per_request=rows_per_request), _deferring_deep_gemm(names):
            return original(self, x, q_lora, c4_indexer, forward_batch, *args, **kwargs)

    return forward_c4_indexer

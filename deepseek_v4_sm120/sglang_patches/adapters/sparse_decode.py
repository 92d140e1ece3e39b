"""SGLang's sparse MLA calls -> `ops.sparse_decode`.

Four functions that SGLang calls for the same attention over the 584-byte FP8 pages, each with its own signature:

    replace_sm120                flash_mla_with_kvcache_sm120(**kwargs) of SGLang's SM120 branch (0.5.13 and later)
    replace_flash_mla            flash_mla_with_kvcache of the pip package flash_mla (0.5.12 and the preview image)
    replace_sgl_kernel           flash_mla_with_kvcache of sgl_kernel, SGLang's call on other GPUs
                                 (DSV4_SM120_FORCE=ops, up to 0.5.22)
    replace_flash_mla_interface  the same of SGLang's own module in front of the wheel sgl-flash-mla (0.5.23 and later)

Each computes a call that it `takes` and otherwise returns what the original returns for the very arguments.
Around them: the number of heads worth computing (replace_kernel_num_heads, replace_backend_forward), prompts that would
not come to these functions (replace_forward_prefill_sparse) and FlashMLA's scheduler metadata, which our kernel does
not use (replace_sched_meta).
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from deepseek_v4_sm120.ops import sparse_decode as op
from deepseek_v4_sm120.ops.shared import limits
from deepseek_v4_sm120.ops.shared.kv_page_layout import kv_page_layout
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.adapters.waiting import Scope
from deepseek_v4_sm120.sglang_patches.table import (
    FLASH_MLA,
    FLASH_MLA_INTERFACE,
    SGL_KERNEL,
    SM120_ATTENTION_0_5_14,
    SM120_KEYS,
)
from deepseek_v4_sm120.specs import bounds

PATCH = "sparse_decode"

_backend = Scope()  # the backend's forward; its layer tells how many heads of q carry data


@dataclass(slots=True)
class Call:
    """One sparse attention call, whatever its signature was, and how the original would be called."""

    q: torch.Tensor
    k_cache: torch.Tensor
    indices: torch.Tensor | None
    head_dim_v: int
    softmax_scale: float | None
    topk_length: torch.Tensor | None
    attn_sink: torch.Tensor | None
    extra_k_cache: torch.Tensor | None
    extra_indices: torch.Tensor | None
    extra_topk_length: torch.Tensor | None
    is_sparse_fp8: bool
    args: tuple
    kwargs: dict

    @property
    def heads(self) -> int:
        """Leading heads of q that carry data; the rest is padding."""
        padded = self.q.shape[2]
        return padded if _backend.layer is None else min(_backend.layer.tp_q_head_num, padded)


_REQUIRED = ("q", "k_cache", "head_dim_v")
_as_set = functools.cache(frozenset)


def _bind(where: str, names: tuple[str, ...], args: tuple, kwargs: dict) -> dict:
    """Arguments by name; like Python's own binding, with both lists in the message."""
    if not args and kwargs.keys() <= _as_set(names) and kwargs.keys() >= _as_set(_REQUIRED):
        return kwargs  # as SGLang calls it
    unknown = [name for name in kwargs if name not in names]
    if unknown or len(args) > len(names):
        raise TypeError(
            f"{where}: unknown arguments {unknown}, {len(args)} positional; this patch knows {list(names)}. "
            "This SGLang calls it in a way that the patch was not written for: run with DSV4_SM120=off and report it."
        )
    values = dict(zip(names, args, strict=False))
    twice = [name for name in values if name in kwargs]
    if twice:
        raise TypeError(f"{where}: {twice} given by position and by keyword; this patch knows {list(names)}")
    values.update(kwargs)
    missing = [name for name in _REQUIRED if name not in values]
    if missing:
        raise TypeError(f"{where}: missing arguments {missing}, got {list(values)}; this patch knows {list(names)}")
    return values


def _call(values: dict, args: tuple, kwargs: dict, *, is_sparse_fp8: bool) -> Call:
    return Call(
        q=values["q"],
        k_cache=values["k_cache"],
        indices=values.get("indices"),
        head_dim_v=values["head_dim_v"],
        softmax_scale=values.get("softmax_scale"),
        topk_length=values.get("topk_length"),
        attn_sink=values.get("attn_sink"),
        extra_k_cache=values.get("extra_k_cache"),
        extra_indices=values.get("extra_indices_in_kvcache"),
        extra_topk_length=values.get("extra_topk_length"),
        is_sparse_fp8=is_sparse_fp8,
        args=args,
        kwargs=kwargs,
    )


def _is_known_cache(cache: torch.Tensor, indices: torch.Tensor | None) -> bool:
    shape = cache.shape
    return (
        len(shape) == 4
        and shape[2] == 1
        and shape[3] == kv_page_layout().token_bytes
        and cache.element_size() == 1
        and indices is not None
        and indices.ndim == 3
        and indices.dtype == torch.int32
    )


def takes(call: Call) -> bool:
    """True for the calls that ops.sparse_decode computes, DeepSeek-V4's attention; the device gate has been asked."""
    q, shape = call.q, call.q.shape
    return (
        call.is_sparse_fp8
        and q.dtype == torch.bfloat16
        and len(shape) == 4
        and shape[1] == 1
        and limits.takes(PATCH, heads=shape[2], head_dim=shape[3])
        and shape[3] == call.head_dim_v
        and _is_known_cache(call.k_cache, call.indices)
        and (call.extra_k_cache is None) == (call.extra_indices is None)
        and (call.extra_k_cache is None or _is_known_cache(call.extra_k_cache, call.extra_indices))
    )


def _serve(call: Call, *, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out [rows, 1, heads, 512], lse [rows, heads, 1] or None). Padded heads of `out` are left uninitialised."""
    q, attn_sink, out, whole = call.q, call.attn_sink, None, None
    heads = call.heads
    if heads < q.shape[2]:
        whole = q.new_empty(q.shape)
        q, out = q[:, :, :heads], whole[:, :, :heads]
        attn_sink = None if attn_sink is None else attn_sink[:heads]
    result = op.sparse_decode(
        q,
        call.k_cache,
        call.indices,
        softmax_scale=call.softmax_scale,
        topk_length=call.topk_length,
        attn_sink=attn_sink,
        extra_kv_pages=call.extra_k_cache,
        extra_indices=call.extra_indices,
        extra_topk_length=call.extra_topk_length,
        out=out,
        return_lse=return_lse,
        prefill=False if settings().reproducible else None,
    )
    computed, lse = result if return_lse else (result, None)
    return (computed if whole is None else whole), lse


def _shape(call: Call) -> dict[str, int]:
    shape = {
        "rows": call.q.shape[0],
        "heads": call.heads,
        "width": call.indices.shape[-1],
        "page_size": call.k_cache.shape[1],
    }
    if call.extra_k_cache is not None:
        shape |= {"extra_width": call.extra_indices.shape[-1], "extra_page_size": call.extra_k_cache.shape[1]}
    return shape


# every layer has its own sliding-window cache, so its address stands for the layer
COMPARISON = shadow.Comparison(
    tensors=lambda ours, original, call: [(ours[0][:, 0, : call.heads], original[0][:, 0, : call.heads])],
    identity=lambda call: call.k_cache.data_ptr(),
    shape=_shape,
    relative_l2=bounds.SPARSE_DECODE.shadow,
)
# FlashInfer's SM120 kernels, SGLang's own from 0.5.15 on, round queries and weights to E4M3
COARSE_COMPARISON = replace(COMPARISON, relative_l2=bounds.SPARSE_DECODE.others)


def _server(original: Callable, *, return_lse: bool, comparison=COMPARISON) -> Callable[[Call], tuple]:
    """What computes a call that we take: ours, or ours and the original in shadow mode."""
    ours = functools.partial(_serve, return_lse=return_lse)
    return shadow.shadowed(PATCH, ours, lambda call: original(*call.args, **call.kwargs), comparison)


def replace_sm120(original: Callable) -> Callable:
    """For flash_mla_with_kvcache_sm120(**kwargs): returns (out, None), as SGLang's default backend does."""
    whose_kernels = getattr(sys.modules[original.__module__], "_sm120_default_backend", None)
    comparison = COARSE_COMPARISON if whose_kernels == "flashinfer" else COMPARISON
    serve = _server(original, return_lse=False, comparison=comparison)

    @functools.wraps(original)
    def flash_mla_with_kvcache_sm120(**kwargs):
        if not device_gate.serves(kwargs["q"].device):
            return original(**kwargs)
        values = _bind("flash_mla_with_kvcache_sm120", SM120_KEYS, (), kwargs)
        call = _call(values, (), kwargs, is_sparse_fp8=True)
        return serve(call) if takes(call) else original(**kwargs)

    return flash_mla_with_kvcache_sm120


def _replace_flash_mla_with_kvcache(original: Callable, where: str, names: tuple[str, ...]) -> Callable:
    serve = _server(original, return_lse=True)

    @functools.wraps(original)
    def flash_mla_with_kvcache(*args, **kwargs):
        q = args[0] if args else kwargs["q"]
        if not device_gate.serves(q.device):
            return original(*args, **kwargs)
        values = _bind(where, names, args, kwargs)
        is_sparse_fp8 = (
            bool(values.get("is_fp8_kvcache"))
            and not values.get("causal")
            and values.get("descale_q") is None
            and values.get("descale_k") is None
            and values.get("kv_format") is None
            and values.get("use_legacy", True)
        )
        call = _call(values, args, kwargs, is_sparse_fp8=is_sparse_fp8)
        return serve(call) if takes(call) else original(*args, **kwargs)

    return flash_mla_with_kvcache


def replace_flash_mla(original: Callable) -> Callable:
    """For flash_mla.flash_mla_with_kvcache, positional or by keyword: returns (out, lse) in FlashMLA's convention."""
    return _replace_flash_mla_with_kvcache(original, "flash_mla.flash_mla_with_kvcache", FLASH_MLA.names)


def replace_sgl_kernel(original: Callable) -> Callable:
    """For sgl_kernel.flash_mla.flash_mla_with_kvcache: returns (out, lse) in FlashMLA's convention.

    FlashMLASchedMeta objects fill themselves at the first original call that gets them; a call that we take leaves
    them empty, which is the state in which the next original call expects to find them.
    """
    where = "sgl_kernel.flash_mla.flash_mla_with_kvcache"
    return _replace_flash_mla_with_kvcache(original, where, SGL_KERNEL.names)


def replace_flash_mla_interface(original: Callable) -> Callable:
    """For sglang.kernels.ops.attention.flash_mla_interface.flash_mla_with_kvcache: as replace_sgl_kernel. Other cache
    formats, and the kernels of DeepSeek-V4.1's (use_legacy=False), are the original's."""
    where = "flash_mla_interface.flash_mla_with_kvcache"
    return _replace_flash_mla_with_kvcache(original, where, FLASH_MLA_INTERFACE.names)


def _runs_sm120_branches() -> bool:
    """False under DSV4_SM120_FORCE=ops, where SGLang runs another chip's branches, which stay as they are."""
    return settings().force != "ops"


def replace_kernel_num_heads(original: Callable) -> Callable:
    """For MqaAttentionBase._kernel_num_heads (0.5.20 and later): no padding, our kernel takes any number of heads.

    Only for an attention whose calls `takes` takes: SGLang's own kernels get the heads that they asked for. Those of
    DeepSeek-V4.1 read the padded heads as well, which SGLang has zeroed for them.
    """

    @functools.wraps(original)
    def _kernel_num_heads(self, num_tokens):
        ours = (
            _runs_sm120_branches()
            and not getattr(self, "is_dsv41", False)
            and limits.takes(PATCH, heads=self.n_local_heads, head_dim=self.head_dim)
            and device_gate.serves(self.attn_sink.device)
        )
        return self.n_local_heads if ours else original(self, num_tokens)

    return _kernel_num_heads


def replace_backend_forward(original: Callable) -> Callable:
    """For DeepseekV4AttnBackend.forward of 0.5.14 and later, whose q is padded to 64 heads above TP1: by the model up
    to 0.5.19 and on other GPUs (DSV4_SM120_FORCE=ops), by DSPARK's draft in every release.

    The caller writes the rank's heads to the front of q and takes the front of the result, so only those are computed,
    and compared in shadow mode: the others are whatever memory held. Not for 0.5.12 and 0.5.13, where the rank's heads
    lie at an offset that this call does not tell.
    """

    @functools.wraps(original)
    def forward(self, q, k, v, layer, *args, **kwargs):
        with _backend.enter(layer):
            return original(self, q, k, v, layer, *args, **kwargs)

    return forward


def _match_rows(tensor: torch.Tensor, rows: int, value: int) -> torch.Tensor:
    """The first rows, or `value` in the missing ones: a padded batch has more rows than its metadata, or fewer."""
    if tensor.shape[0] >= rows:
        return tensor[:rows]
    return torch.cat([tensor, tensor.new_full((rows - tensor.shape[0], *tensor.shape[1:]), value)])


def _paged_view(buffer: torch.Tensor, page_size: int, token_bytes: int) -> torch.Tensor:
    """A pool [pages, padded page bytes] as [pages, page_size, 1, token_bytes]."""
    return buffer[:, : page_size * token_bytes].view(buffer.shape[0], page_size, 1, token_bytes)


def _paged_call(backend, q, layer_id, compress_ratio, pool, metadata, attn_sink) -> dict:
    """Arguments of flash_mla_with_kvcache_sm120, made as DeepseekV4AttnBackend.forward of 0.5.13 to 0.5.15 makes them
    for calls that it does not hand to _forward_prefill_sparse."""
    rows, token_bytes = q.shape[0], pool.swa_kv_pool.kv_cache_total_dim
    extra_cache = extra_indices = extra_length = None
    if compress_ratio:
        extra_cache = _paged_view(pool.get_extra_key_buffer(layer_id), pool.page_size // compress_ratio, token_bytes)
        of_c4 = (metadata.c4_sparse_page_indices, metadata.c4_sparse_topk_lengths)
        of_c128 = (metadata.c128_page_indices, metadata.c128_topk_lengths_clamp1)
        extra_indices, extra_length = of_c4 if compress_ratio == 4 else of_c128
        extra_indices = _match_rows(extra_indices, rows, -1).view(rows, 1, -1)
        extra_length = _match_rows(extra_length, rows, 1)
    return {
        "q": q.unsqueeze(1) if q.ndim == 3 else q,
        "k_cache": _paged_view(pool.get_swa_key_buffer_radix(layer_id), pool.swa_window_size, token_bytes),
        "head_dim_v": backend.head_dim_v,
        "softmax_scale": backend.softmax_scale,
        "indices": _match_rows(metadata.swa_page_indices, rows, 0).view(rows, 1, -1),
        "topk_length": _match_rows(metadata.swa_topk_lengths, rows, 1),
        "attn_sink": attn_sink,
        "extra_k_cache": extra_cache,
        "extra_indices_in_kvcache": extra_indices,
        "extra_topk_length": extra_length,
    }


def replace_forward_prefill_sparse(original: Callable) -> Callable:
    """For DeepseekV4AttnBackend._forward_prefill_sparse of 0.5.13 to 0.5.15: a prompt's history copied to bf16, then
    flash_mla_sparse_fwd, which has no SM120 code. SGLang goes there with more than 11,673 rows, and with all rows where
    SGLANG_OPT_FLASHMLA_SPARSE_PREFILL is on (0.5.15's default). On the GPUs that we serve it makes the paged call of
    all other rows instead: through SGLang's own function, so through replace_sm120, and its shadow mode."""

    @functools.wraps(original)
    def _forward_prefill_sparse(
        self, q, layer_id, compress_ratio, forward_batch, token_to_kv_pool, core_attn_metadata, attn_sink
    ):
        if not (_runs_sm120_branches() and device_gate.serves(q.device)):
            batch = (forward_batch, token_to_kv_pool, core_attn_metadata)
            return original(self, q, layer_id, compress_ratio, *batch, attn_sink)
        call = _paged_call(self, q, layer_id, compress_ratio, token_to_kv_pool, core_attn_metadata, attn_sink)
        return importlib.import_module(SM120_ATTENTION_0_5_14).flash_mla_with_kvcache_sm120(**call)[0].squeeze(1)

    return _forward_prefill_sparse


def replace_sched_meta(original: Callable) -> Callable:
    """For flash_mla.get_mla_metadata: our kernel plans its own split, and FlashMLA's planner has no SM120 code."""

    @functools.wraps(original)
    def get_mla_metadata(*args, **kwargs):
        if _runs_sm120_branches() and device_gate.serves_current_device():
            return None, None
        return original(*args, **kwargs)

    return get_mla_metadata

"""Public compressor: a decode step of DeepSeek-V4's KV compressors. Checks the arguments, launches `_C.compressor`."""

from __future__ import annotations

import functools

import torch

from deepseek_v4_sm120 import extension
from deepseek_v4_sm120.kv_page_layout import kv_page_layout
from deepseek_v4_sm120.zeroed_words import ZeroedWords

MAX_ROWS = 512
SHORT, LONG = 4, 128  # tokens of a group
KV_DIM, INDEX_DIM = 512, 128
ROTATED = 64
PLAN_BYTES = 16
INDEX_SCALE_BYTES = 4  # of an entry
_CAPTURE_STORE_BYTES = 1 << 20  # room for 512 captures of the most rows
_ALIGN_BYTES = 16


def compressor(kv_score, state, ape, plan, *, norm_weight, norm_eps, freqs_cis, out_loc, cache, page_size, fp4=False):
    """Puts each row's token into its state and, where the token ends a group, stores the group's entry in the cache.

    kv_score     [rows, width] float32, last dim contiguous, row stride a multiple of 4: the projection of the token.
                 Groups of 4: values for the next group, values for its own, scores for the next, scores for its own,
                 head_dim each; groups of 128: values, scores
    state        [pages, ratio, width] float32, contiguous; written in place. ratio 4 or 128 is the size of a group
    ape          [8, head_dim] (ratio 4: first the group before, then its own) or [128, head_dim] float32, contiguous
    plan         [rows, 16] uint8, contiguous: uint32 length of the request with this token, int32 slot of state (page *
                 ratio + i) to write, int32 state pages of the group before and of the own; SGLang's DecodePlan
    norm_weight  [head_dim] float32, contiguous; head_dim 512, or 128 (the indexer's, ratio 4 only)
    norm_eps     of the RMSNorm, above 0
    freqs_cis    [positions, 32] complex64, contiguous: row p has the rotation of position p
    out_loc      [rows] int64, contiguous: the entry's slot in the cache; read where the row ends a group
    cache        [pages, page bytes] uint8, last dim contiguous; written in place. Pages of page_size entries: 512
                 values as kv_page_layout has them (page bytes: its page_bytes(page_size)); 128 values as page_size x
                 128 E4M3 and page_size float32 scales, or with fp4 page_size x 64 bytes of E2M1 pairs and page_size x 4
                 UE8M0 exponents, one for 32 values
    page_size    a power of two
    returns      None
    rows         at most 512. Two rows must not write the same slot of state or cache, but for rows whose contents
                 nobody reads (a captured graph's padding)
    entry        a row ends a group when its length is a positive multiple of ratio. Values are weighted by the softmax
                 of score + ape over the group (ratio 4: with the group before, if there is one, by its first halves),
                 RMSNorm, rotation of the last 64 at the group's first position; 512 values: rounded to bf16, then E4M3
                 with a power of two for 64; 128 values: Hadamard, then E4M3 with one scale, or E2M1
    outside      a slot, page or position that is not in state, cache or freqs_cis: nothing is written there. -1 is such
    accuracy     the bits of SGLang's two launches (flash_c4_decode and flash_c128_decode of 0.5.20 and later, then
                 fused_norm_rope): ops and their order are theirs. 0.5.14 to 0.5.19 merge the 128 tokens in another
                 order, an entry may be a quantisation step away
    determinism  the same bits in every run and in every batch
    raises       TypeError (dtype), ValueError (shape, stride, alignment, range: says name, expected, got), RuntimeError
                 (device, launch)
    cuda graphs  capture-safe: no host sync; allocates scratch through torch only (ratio 128). The first call of a
                 process on a device, if it is not captured, synchronises its stream once (ratio 128)
    streams      the current stream of state's device. ape, norm_weight and freqs_cis may be read while the kernel
                 before still runs: it must not write them, unless it is one that nothing starts ahead of its end
    source       SGLang 0.5.23, compressor_v2.py with c4_v2.cuh, c128_v2.cuh, fused_norm_rope_v2.cuh; DeepSeek's
                 inference/model.py (Compressor); specification in reference/compressor.py
    """
    ratio, head_dim = _check_state(state, norm_weight, fp4)
    rows = _check_token(kv_score, state)
    _check_exact("ape", ape, torch.float32, (2 * ratio if ratio == SHORT else ratio, head_dim))
    _check_exact("plan", plan, torch.uint8, (rows, PLAN_BYTES))
    _check_exact("norm_weight", norm_weight, torch.float32, (head_dim,))
    _check_exact("freqs_cis", freqs_cis, torch.complex64, (freqs_cis.shape[0], ROTATED // 2))
    _check_exact("out_loc", out_loc, torch.int64, (rows,))
    if not norm_eps > 0:
        raise ValueError(f"compressor: norm_eps must be above 0, got {norm_eps}")
    _check_cache(cache, page_size, head_dim, fp4)
    device = state.device
    tensors = {"kv_score": kv_score, "ape": ape, "plan": plan, "norm_weight": norm_weight, "freqs_cis": freqs_cis}
    for name, tensor in {**tensors, "out_loc": out_loc, "cache": cache}.items():
        if tensor.device != device:
            raise RuntimeError(f"compressor: {name}.device must be state's, {device}, got {tensor.device}")
    if device.type != "cuda":
        raise RuntimeError(f"compressor: state.device must be a CUDA device, got {device}")
    if rows > 0:
        _launch(kv_score, state, ape, plan, norm_weight, norm_eps, freqs_cis, out_loc, cache, page_size, fp4)


def _launch(kv_score, state, ape, plan, norm_weight, norm_eps, freqs_cis, out_loc, cache, page_size, fp4):
    """Scratch and launch; the arguments are checked."""
    device, rows, ratio, head_dim = state.device, kv_score.shape[0], state.shape[1], norm_weight.shape[0]
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    pooled = arrived = None
    if ratio == LONG:
        pooled = torch.empty((rows, head_dim), dtype=torch.float32, device=device)
        arrived = _arrivals(device.index).take(stream, rows)
    with torch.cuda.device(device):
        extension.load().compressor(
            kv_score=kv_score.data_ptr(),
            kv_score_stride=kv_score.stride(0),
            state=state.data_ptr(),
            state_slots=state.shape[0] * ratio,
            ape=ape.data_ptr(),
            norm_weight=norm_weight.data_ptr(),
            norm_eps=norm_eps,
            freqs=freqs_cis.data_ptr(),
            positions=freqs_cis.shape[0],
            plan=plan.data_ptr(),
            out_loc=out_loc.data_ptr(),
            cache=cache.data_ptr(),
            page_bytes=cache.stride(0),
            cache_slots=cache.shape[0] * page_size,
            page_shift=page_size.bit_length() - 1,
            rows=rows,
            pooled=0 if pooled is None else pooled.data_ptr(),
            arrived=0 if arrived is None else arrived.data_ptr(),
            ratio=ratio,
            index=head_dim == INDEX_DIM,
            fp4=fp4,
            pdl=True,
            stream=stream,
        )


@functools.cache
def _arrivals(index: int) -> ZeroedWords:
    return ZeroedWords(f"cuda:{index}", stream_words=MAX_ROWS, store_bytes=_CAPTURE_STORE_BYTES)


def width(ratio: int, head_dim: int) -> int:
    """Floats of a token's projection, and of its slot of state."""
    return (4 if ratio == SHORT else 2) * head_dim


def entry_page_bytes(page_size: int, head_dim: int, fp4: bool) -> int:
    """Bytes from one page of the cache to the next."""
    if head_dim == KV_DIM:
        return kv_page_layout().page_bytes(page_size)
    return page_size * ((INDEX_DIM // 2 if fp4 else INDEX_DIM) + INDEX_SCALE_BYTES)


def _check_state(state, norm_weight, fp4) -> tuple[int, int]:
    """(ratio, head_dim)"""
    if state.dtype != torch.float32:
        raise TypeError(f"compressor: state.dtype must be torch.float32, got {state.dtype}")
    if state.dim() != 3 or state.shape[1] not in (SHORT, LONG):
        raise ValueError(f"compressor: state.shape must be [pages, {SHORT} or {LONG}, width], got {list(state.shape)}")
    ratio, head_dim = state.shape[1], norm_weight.shape[-1] if norm_weight.dim() else 0
    if head_dim not in ((KV_DIM, INDEX_DIM) if ratio == SHORT else (KV_DIM,)):
        dims = f"{KV_DIM} or {INDEX_DIM}" if ratio == SHORT else f"{KV_DIM}"
        raise ValueError(f"compressor: norm_weight.shape must be [{dims}] for groups of {ratio}, got {head_dim}")
    if fp4 and head_dim != INDEX_DIM:
        raise ValueError(f"compressor: fp4 must be False for entries of {head_dim} values, got {fp4}")
    if state.shape[2] != width(ratio, head_dim) or not state.is_contiguous() or state.data_ptr() % _ALIGN_BYTES:
        raise ValueError(
            f"compressor: state must be [pages, {ratio}, {width(ratio, head_dim)}], contiguous and on a {_ALIGN_BYTES}-"
            f"byte boundary, got {list(state.shape)} with strides {list(state.stride())}"
        )
    return ratio, head_dim


def _check_token(kv_score, state) -> int:
    """rows"""
    if kv_score.dtype != torch.float32:
        raise TypeError(f"compressor: kv_score.dtype must be torch.float32, got {kv_score.dtype}")
    if kv_score.dim() != 2 or kv_score.shape[1] != state.shape[2]:
        raise ValueError(f"compressor: kv_score.shape must be [rows, {state.shape[2]}], got {list(kv_score.shape)}")
    if kv_score.stride(1) != 1 or kv_score.stride(0) % 4 or kv_score.data_ptr() % _ALIGN_BYTES:
        raise ValueError(
            f"compressor: kv_score must have strides [multiple of 4, 1] and start on a {_ALIGN_BYTES}-byte boundary, "
            f"got strides {list(kv_score.stride())}"
        )
    if kv_score.shape[0] > MAX_ROWS:
        raise ValueError(f"compressor: kv_score must have at most {MAX_ROWS} rows, got {kv_score.shape[0]}")
    return kv_score.shape[0]


def _check_exact(name: str, tensor, dtype, shape: tuple) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"compressor: {name}.dtype must be {dtype}, got {tensor.dtype}")
    if tuple(tensor.shape) != shape or not tensor.is_contiguous():
        got = f"{list(tensor.shape)} with strides {list(tensor.stride())}"
        raise ValueError(f"compressor: {name} must be contiguous {list(shape)}, got {got}")
    if tensor.numel() and tensor.data_ptr() % (tensor.element_size() if name == "out_loc" else _ALIGN_BYTES):
        raise ValueError(f"compressor: {name} must start on a {_ALIGN_BYTES}-byte boundary")


def _check_cache(cache, page_size: int, head_dim: int, fp4: bool) -> None:
    if cache.dtype != torch.uint8:
        raise TypeError(f"compressor: cache.dtype must be torch.uint8, got {cache.dtype}")
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"compressor: page_size must be a power of two, got {page_size}")
    needed = entry_page_bytes(page_size, head_dim, fp4)
    if cache.dim() != 2 or cache.stride(1) != 1 or cache.stride(0) < needed or cache.shape[1] > cache.stride(0):
        raise ValueError(
            f"compressor: cache must be [pages, bytes] with strides [{needed} or more, 1], got {list(cache.shape)} "
            f"with strides {list(cache.stride())}"
        )
    if cache.shape[1] < needed or cache.stride(0) % INDEX_SCALE_BYTES or cache.data_ptr() % _ALIGN_BYTES:
        raise ValueError(
            f"compressor: cache must have pages of {needed} bytes or more, at multiples of 4 from a {_ALIGN_BYTES}-"
            f"byte boundary, got {cache.shape[1]} bytes, {cache.stride(0)} apart"
        )

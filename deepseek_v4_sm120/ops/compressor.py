"""Public compressor: a step of DeepSeek-V4's KV compressors, and what rejected drafts left in their state. Checks the
arguments, launches `_C.compressor` and `_C.clear_drafts`."""

from __future__ import annotations

import functools
from array import array

import torch

from deepseek_v4_sm120.ops.shared import cuda_tensors, extension
from deepseek_v4_sm120.ops.shared.checks import COMPLEX, CONTIGUOUS, FP32, INT32, INT64, ROTATED, UINT8, VECTOR, Call
from deepseek_v4_sm120.ops.shared.kv_page_layout import kv_page_layout
from deepseek_v4_sm120.ops.shared.zeroed_words import ZeroedWords

MAX_ROWS = 512
SHORT, LONG = 4, 128  # tokens of a group
KV_DIM, INDEX_DIM = 512, 128
PLAN_BYTES, WRITE_BYTES = 16, 8
INDEX_SCALE_BYTES = 4  # of an entry
_CAPTURE_STORE_BYTES = 1 << 20  # room for 512 captures of the most rows
_STRIDES = 4  # that kv_score's rows have multiples of: 16 bytes


def compressor(
    kv_score, state, ape, plan, *, norm_weight, norm_eps, freqs_cis, out_loc, cache, page_size, fp4=False, writes=None
):
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
    writes       None: decode, each row of a request of its own. Or [writes, 8] uint8, contiguous, of a step that has
                 many tokens of a request (speculative verification, a short prompt), rows that follow each other:
                 uint32 row of kv_score (0xffffffff: none), int32 slot of state; SGLang's WritePlan. plan is then
                 [entries, 16], SGLang's CompressPlan, of each group that ends: uint32 length of the request with the
                 group's last token (0xffffffff: none), uint16 row of that token, uint16 how many of the window's
                 tokens, the first of the last 8 (ratio 4) or 128, are the state's, the others being rows; int32 state
                 pages of the group before and of the own. Every entry reads the state as it was before the step
    returns      None
    rows         at most 512, and as many entries and writes. Two rows must not write the same slot of state or cache,
                 but for rows whose contents nobody reads (a captured graph's padding)
    entry        a row ends a group when its length is a positive multiple of ratio; with writes, where there is an
                 entry. Values are weighted by the softmax of score + ape over the group (ratio 4: with the group
                 before, if there is one, by its first halves), RMSNorm, rotation of the last 64 at the group's first
                 position; 512 values: rounded to bf16, then E4M3 with a power of two for 64; 128 values: Hadamard,
                 then E4M3 with one scale, or E2M1
    outside      a slot, page, row or position that is not in state, cache, kv_score or freqs_cis: nothing is written
                 there. -1 is such
    accuracy     the bits of SGLang's launches (flash_c4_decode and flash_c128_decode of 0.5.20 and later, with writes
                 their prefill kernels, then fused_norm_rope): ops and their order are theirs. 0.5.14 to 0.5.19 merge
                 the 128 tokens in another order, an entry may be a quantisation step away
    determinism  the same bits in every run and in every batch
    raises       TypeError (dtype), ValueError (shape, stride, alignment, overlap, value), RuntimeError (device, launch)
    cuda graphs  capture-safe: no host sync; allocates scratch through torch only (ratio 128). The first call of a
                 process on a device, if it is not captured, synchronises its stream once (ratio 128)
    streams      the current stream of state's device. ape, norm_weight and freqs_cis may be read while the kernel
                 before still runs: it must not write them, unless it is one that nothing starts ahead of its end
    source       SGLang 0.5.23, compressor_v2.py with c4_v2.cuh, c128_v2.cuh, fused_norm_rope_v2.cuh; DeepSeek's
                 inference/model.py (Compressor); specification in reference/compressor.py
    """
    check = Call("compressor", "state", state)
    ratio, head_dim = _check_state(check, state, norm_weight, fp4)
    rows, _ = check.tensor("kv_score", kv_score, FP32, ("rows", state.shape[2]), _STRIDES, VECTOR)
    if rows > MAX_ROWS:
        check.refuse("shape", "kv_score", f"have at most {MAX_ROWS} rows", rows)
    check.tensor("ape", ape, FP32, (2 * ratio if ratio == SHORT else ratio, head_dim), CONTIGUOUS, VECTOR)
    check.tensor("plan", plan, UINT8, (rows if writes is None else "entries", PLAN_BYTES), CONTIGUOUS, VECTOR)
    if writes is not None:
        check.tensor("writes", writes, UINT8, ("writes", WRITE_BYTES), CONTIGUOUS, VECTOR)
        for name, of_step in (("plan", plan), ("writes", writes)):
            if of_step.shape[0] > MAX_ROWS:
                check.refuse("shape", name, f"have at most {MAX_ROWS} rows", of_step.shape[0])
    check.tensor("norm_weight", norm_weight, FP32, (head_dim,), CONTIGUOUS, VECTOR)
    check.tensor("freqs_cis", freqs_cis, COMPLEX, ("positions", ROTATED // 2), CONTIGUOUS, VECTOR)
    check.tensor("out_loc", out_loc, INT64, (rows,))
    if not norm_eps > 0:
        check.refuse("value", "norm_eps", "be above 0", norm_eps)
    _check_cache(check, cache, page_size, head_dim, fp4)
    check.on_cuda()
    if rows and (writes is None or len(plan) or len(writes)):
        with cuda_tensors.on_device_of(state):
            _launch(
                kv_score, state, ape, plan, norm_weight, norm_eps, freqs_cis, out_loc, cache, page_size, fp4, writes
            )


def _launch(kv_score, state, ape, plan, norm_weight, norm_eps, freqs_cis, out_loc, cache, page_size, fp4, writes):
    """Scratch and launch; the arguments are checked, state's device is current."""
    device, rows, ratio, head_dim = state.device, kv_score.shape[0], state.shape[1], norm_weight.shape[0]
    stream = cuda_tensors.current_stream(device.index)
    pooled = arrived = None
    if ratio == LONG:
        pooled = torch.empty((len(plan), head_dim), dtype=torch.float32, device=device)
        arrived = _arrivals(device.index).take(stream, len(plan))
    many = {}
    if writes is not None:
        many = {"writes": writes.data_ptr(), "entries": len(plan), "num_writes": len(writes)}
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
        many=writes is not None,
        **many,
        ratio=ratio,
        index=head_dim == INDEX_DIM,
        fp4=fp4,
        pdl=True,
        stream=stream,
    )


def clear_drafts(requests, lengths, accepted, *, states, ring, tokens):
    """Empties the slots of groups of 128 that tokens of a verification have who were not accepted, of all layers.

    requests   [requests] int64, contiguous: whose ring of slots, the r-th begins at slot r * ring
    lengths    [requests] int64, contiguous: in front of the step, 0 or more: token i has slot (length + i) % ring
    accepted   [requests] int32, contiguous: how many of the tokens stay, the first ones; all do where it is beyond them
    states     1 to 64 tensors [slots, 1024] float32, contiguous, of one shape: values, then scores; written in place
    ring       slots of a request
    tokens     of each request in the step
    returns    None; values are 0 and scores -inf in the slots of the other tokens, all else is as it was
    outside    a slot that is not in a state: nothing is written there
    accuracy   the bits of SGLang's clear_unaccepted_c128_draft_states, a launch for each layer
    raises     TypeError (dtype), ValueError (shape, stride, alignment, overlap, value), RuntimeError (device, launch)
    cuda graphs  capture-safe: no host sync, no allocation; a graph has the addresses of the states
    streams    the current stream of requests' device
    source     SGLang 0.5.23, dsv4_c128_cleanup.py and its caller in deepseek_v4_memory_pool.py
    """
    check = Call("clear_drafts", "requests", requests)
    (count,) = check.tensor("requests", requests, INT64, ("requests",))
    check.tensor("lengths", lengths, INT64, (count,))
    check.tensor("accepted", accepted, INT32, (count,))
    most = most_states()
    if not 0 < len(states) <= most:
        check.refuse("value", "states", f"be 1 to {most} tensors", len(states))
    slots = "slots"
    for i, state in enumerate(states):
        slots, _ = check.tensor(f"states[{i}]", state, FP32, (slots, width(LONG, KV_DIM)), CONTIGUOUS, VECTOR)
    for name, size in (("ring", ring), ("tokens", tokens)):
        if size < 1:
            check.refuse("value", name, "be 1 or more", size)
    check.on_cuda()
    if not count:
        return
    addresses = array("Q", [state.data_ptr() for state in states])
    with cuda_tensors.on_device_of(requests):
        extension.load().clear_drafts(
            requests=requests.data_ptr(),
            lengths=lengths.data_ptr(),
            accepted=accepted.data_ptr(),
            states=addresses.buffer_info()[0],
            num_states=len(states),
            state_slots=slots,
            num_requests=count,
            tokens=tokens,
            ring=ring,
            pdl=True,
            stream=cuda_tensors.current_stream(requests.device.index),
        )


@functools.cache
def _arrivals(index: int) -> ZeroedWords:
    return ZeroedWords(f"cuda:{index}", stream_words=MAX_ROWS, store_bytes=_CAPTURE_STORE_BYTES)


def most_states() -> int:
    """Of a call of clear_drafts."""
    return extension.load().CLEAR_DRAFTS_STATES


def width(ratio: int, head_dim: int) -> int:
    """Floats of a token's projection, and of its slot of state."""
    return (4 if ratio == SHORT else 2) * head_dim


def entry_page_bytes(page_size: int, head_dim: int, fp4: bool) -> int:
    """Bytes from one page of the cache to the next."""
    if head_dim == KV_DIM:
        return kv_page_layout().page_bytes(page_size)
    return page_size * ((INDEX_DIM // 2 if fp4 else INDEX_DIM) + INDEX_SCALE_BYTES)


def _check_state(check: Call, state, norm_weight, fp4) -> tuple[int, int]:
    """(ratio, head_dim)"""
    ratio = state.shape[1] if state.dim() == 3 else SHORT
    if ratio not in (SHORT, LONG):
        check.refuse("shape", "state.shape[1]", f"be {SHORT} or {LONG}", ratio)
    check.given("norm_weight", norm_weight)
    head_dim = norm_weight.shape[-1] if norm_weight.dim() else 0
    if head_dim not in ((KV_DIM, INDEX_DIM) if ratio == SHORT else (KV_DIM,)):
        dims = f"{KV_DIM} or {INDEX_DIM}" if ratio == SHORT else f"{KV_DIM}"
        check.refuse("shape", "norm_weight.shape", f"be [{dims}] for groups of {ratio}", list(norm_weight.shape))
    if fp4 and head_dim != INDEX_DIM:
        check.refuse("value", "fp4", f"be False for entries of {head_dim} values", fp4)
    check.tensor("state", state, FP32, ("pages", ratio, width(ratio, head_dim)), CONTIGUOUS, VECTOR)
    return ratio, head_dim


def _check_cache(check: Call, cache, page_size: int, head_dim: int, fp4: bool) -> None:
    if page_size < 1 or page_size & (page_size - 1):
        check.refuse("value", "page_size", "be a power of two", page_size)
    _, page_bytes = check.tensor("cache", cache, UINT8, "pages, bytes", INDEX_SCALE_BYTES, VECTOR)
    needed = entry_page_bytes(page_size, head_dim, fp4)
    if page_bytes < needed:
        check.refuse("shape", "cache.shape[1]", f"be {needed} bytes or more", page_bytes)
    if cache.stride(0) < page_bytes:
        check.refuse("overlap", "cache.stride(0)", f"be at least {page_bytes}", cache.stride(0))

"""Public hyper-connections (mHC): checks the arguments, owns the scratch, launches `_C.mhc`.

    mhc        a whole boundary: post of one sublayer, pre and RMSNorm of the next
    mhc_pre    pre and RMSNorm alone: the first layer, or where the streams exist already
    mhc_post   post alone: behind the last layer
    mhc_head   the collapse before the model's last norm, which it can do as well; with a post, if `f` is given

Three sets of kernels, by rows; where hidden is not 4096 it is always the second:

    fused   up to 128 rows: one launch; blocks that take a row wait for those that make its mixes
    split   two launches: mixes, spread over the whole card whatever the number of rows; then a block for each row
    many    from MANY_ROWS rows on, for `mhc` alone: one launch that reads the streams once

Blocks of `fused` and `many` wait for each other. Where the stream has too few multiprocessors for that (a green
context, a MIG slice; the 48 of a GB10 take 95 rows of `fused`), `split` takes the call, which needs one and no more.
`many` begins as a whole, so not where processes share the card (CUDA's multi-process service): it would wait for places
that another one's sums hold, and those perhaps for a card on which our other rank holds theirs.

The sums are the same in all, value by value: a row's bits depend on nothing outside the row, not on the number of rows
either.

With `sum_over`, f is this card's term of a sum between cards (ops/all_reduce.py). Of few rows (SUMMING_ROWS) `fused`
sends, adds and rounds on its way; of more, and wherever its blocks would not all be resident, a sum of its own comes
first. The bits are the same. All cards decide alike: by rows, and the multiprocessors of the smallest card. A stream
that has fewer than that takes is an error, since the other cards' boundaries wait for this one's.

What is left of f to add on this card (its parts, or `routed`) a boundary of few rows makes on its way, with a sum or
without (takes_own_terms).
"""

from __future__ import annotations

import functools

import torch

from deepseek_v4_sm120.ops.all_reduce import ONE_SHOT_ROWS, AllReduce
from deepseek_v4_sm120.ops.shared import cuda_tensors, extension
from deepseek_v4_sm120.ops.shared.checks import BF16, CONTIGUOUS, FP32, VECTOR, Call
from deepseek_v4_sm120.ops.shared.limits import LIMITS
from deepseek_v4_sm120.ops.shared.zeroed_words import ZeroedWords

STREAMS = 4
MIXES = STREAMS * (2 + STREAMS)
HIDDEN = LIMITS["mhc"]["hidden"].values  # Flash, Pro
KERNELS = ("fused", "split", "many")
FLASH_HIDDEN = 4096  # fused and many are for this width
MANY_ROWS = 257
OWN_TERM_ROWS = 64  # whose last addition a boundary without a sum makes
SUMMING_ROWS = {2: 64, 4: 16, 8: 4}  # by ranks: above, two hops of a sum alone move fewer bytes. Reckoned, not measured
# 16 KB a row of a capture's largest call: room for 1 to 128 rows in the sizes that SGLang captures, 17 MiB in all; and
# 24 KB a row of calls that sum, 7 MiB.
_CAPTURE_STORE_BYTES = 28 << 20
_MAX_ROWS = 1 << 26
TERM_SPLITS = 4  # parts of a term that comes unmerged; term.h has it too, and a test compares
_STRIDES = 8  # that rows have multiples of: 16 bytes


def mhc(
    f,
    streams,
    post,
    comb,
    fn,
    scale,
    base,
    *,
    norm_weight=None,
    norm_eps=1e-6,
    rms_eps=1e-6,
    hc_eps=1e-6,
    post_scale=2.0,
    sinkhorn_iters=20,
    sum_over=None,
    routed=None,
    scaling=1.0,
    tag=0,
    kernels=None,
):
    """A boundary between two sublayers: the new streams, their coefficients, and the next sublayer's normed input.

    f              [rows, hidden] bf16, the sublayer's output; last dim contiguous, row stride a multiple of 8. Or
                   [4, rows, hidden] float32, contiguous: what ops.fp8_linear_unmerged gives, and so this card's term is
                   `merge` of it
    streams        [rows, 4, hidden] bf16, the old streams; a row contiguous, row stride a multiple of 8
    post           [rows, 4] or [rows, 4, 1] float32, contiguous: how much of f each stream gets
    comb           [rows, 4, 4] float32, contiguous: first index the old stream, second the new one
    fn             [24, 4 * hidden] float32, contiguous; scale [3], base [24] float32: the next sublayer's
    norm_weight    [hidden] bf16, the RMSNorm behind the pre; None: y is not normed
    norm_eps, rms_eps, hc_eps
                   epsilons of that norm, of the mixes' mean square, and of gates and Sinkhorn
    post_scale     factor of the new post's sigmoid
    sinkhorn_iters 1 and more; the first is the softmax and one division by the column sums
    sum_over       the `AllReduce` of the cards whose f are to be added, in fp32 in the order of ranks, rounded to bf16
                   once; f contiguous, at most its max_rows. All ranks make the same call. None: f is complete
    routed         [rows, hidden] bf16, contiguous: this card's term is f + scaling * routed, as ops.add_shared has it;
                   f is not written, and contiguous. Terms of either kind only where `takes_terms`, or without
                   sum_over `takes_own_terms`
    tag            of a sum, as AllReduce has it
    kernels        "fused", "split" or "many", for tests and benchmarks; None: by rows and hidden
    returns        (streams [rows, 4, hidden] bf16, post [rows, 4] float32, comb [rows, 4, 4] float32, y [rows, hidden]
                   bf16), all new tensors
    sizes          hidden 4096 (Flash) or 7168 (Pro); any number of rows below 2^31 / 32
    accuracy       fn is used exactly (three bf16 parts), sums in fp32. Against float64, relative L2: post and comb
                   below 5e-6, streams and y below 0.0025, which is their rounding to bf16. y: sum of squares of
                   the unrounded sum, whose bf16 rounding the norm multiplies, as SGLang's fused kernel does
    determinism    the same bits in every run and in every batch, of NaN and infinity, too: a row keeps its own
    raises         TypeError (dtype), ValueError (shape, stride, alignment, overlap, value), RuntimeError (device,
                   launch)
    cuda graphs    capture-safe: no host sync; allocates results and scratch through torch. A process's first call on a
                   device, if it is not captured, synchronises its stream once
    streams (CUDA) the current stream of f's device; calls on several are independent, and graphs replayed side by side.
                   fn, scale, base and norm_weight may be read while the kernel before still runs: do not write them
                   in the same stream right before without a synchronisation
    source         DeepSeek's inference/model.py (hc_post, hc_pre); specification in reference/mhc.py
    """
    check, rows, hidden = _check_streams("mhc", streams)
    post = _check_sublayer(check, f, post, comb, rows, hidden, sum_over)
    term = _check_term(check, f, routed, scaling, sum_over, rows, hidden)
    _check_mixes(check, fn, scale, base, norm_weight, MIXES, 3, hidden)
    _check_numbers(check, norm_eps, rms_eps, hc_eps, sinkhorn_iters)
    _check_kernels(check, kernels, hidden, KERNELS)
    check.on_cuda()
    new = torch.empty((rows, STREAMS, hidden), dtype=torch.bfloat16, device=streams.device)
    y, new_post, new_comb = _results(rows, hidden, streams.device)
    options = _options(fn, scale, base, norm_weight, norm_eps, rms_eps, hc_eps, post_scale, sinkhorn_iters)
    options |= {"sum_over": sum_over, "tag": tag, "kernels": kernels, "term": term}
    _launch(streams, f, post, comb, new, y=y, post_out=new_post, comb_out=new_comb, **options)
    return new, new_post, new_comb, y


def mhc_pre(
    streams,
    fn,
    scale,
    base,
    *,
    norm_weight=None,
    norm_eps=1e-6,
    rms_eps=1e-6,
    hc_eps=1e-6,
    post_scale=2.0,
    sinkhorn_iters=20,
    kernels=None,
):
    """Pre and RMSNorm of given streams: (post, comb, y). Arguments, errors and bits as `mhc`'s; no kernels "many"."""
    check, rows, hidden = _check_streams("mhc_pre", streams)
    _check_mixes(check, fn, scale, base, norm_weight, MIXES, 3, hidden)
    _check_numbers(check, norm_eps, rms_eps, hc_eps, sinkhorn_iters)
    _check_kernels(check, kernels, hidden, KERNELS[:2])
    check.on_cuda()
    y, post, comb = _results(rows, hidden, streams.device)
    options = _options(fn, scale, base, norm_weight, norm_eps, rms_eps, hc_eps, post_scale, sinkhorn_iters)
    _launch(streams, None, None, None, None, y=y, post_out=post, comb_out=comb, kernels=kernels, **options)
    return post, comb, y


def mhc_post(f, streams, post, comb):
    """The new streams alone, [rows, 4, hidden] bf16. Arguments and errors as `mhc`'s; the same bits."""
    check, rows, hidden = _check_streams("mhc_post", streams)
    post = _check_sublayer(check, f, post, comb, rows, hidden)
    check.on_cuda()
    new = torch.empty((rows, STREAMS, hidden), dtype=torch.bfloat16, device=streams.device)
    _launch(streams, f, post, comb, new)
    return new


def mhc_head(
    streams,
    fn,
    scale,
    base,
    *,
    f=None,
    post=None,
    comb=None,
    norm_weight=None,
    norm_eps=1e-6,
    rms_eps=1e-6,
    hc_eps=1e-6,
    sum_over=None,
    tag=0,
    kernels=None,
):
    """The head's collapse y [rows, hidden] bf16; with f, post and comb of the last boundary: (streams, y).

    fn [4, 4 * hidden], scale [1], base [4] float32; norm_weight: the model's last norm, or None. f,
    post and comb together or not at all. The rest and errors as `mhc`'s; kernels: not "many".
    """
    check, rows, hidden = _check_streams("mhc_head", streams)
    device, new = streams.device, None
    has_post = check.together("f, post and comb", f, post, comb)
    _check_mixes(check, fn, scale, base, norm_weight, STREAMS, 1, hidden)
    _check_numbers(check, norm_eps, rms_eps, hc_eps, 1)
    _check_kernels(check, kernels, hidden, KERNELS[:2])
    if has_post:
        post = _check_sublayer(check, f, post, comb, rows, hidden, sum_over)
    elif sum_over is not None:
        check.refuse("value", "sum_over", "be None without f", sum_over)
    check.on_cuda()
    if has_post:
        new = torch.empty((rows, STREAMS, hidden), dtype=torch.bfloat16, device=device)
    y = torch.empty((rows, hidden), dtype=torch.bfloat16, device=device)
    options = _options(fn, scale, base, norm_weight, norm_eps, rms_eps, hc_eps, 0.0, 1)
    options |= {"sum_over": sum_over, "tag": tag, "kernels": kernels}
    _launch(streams, f, post, comb, new, y=y, head=True, **options)
    return y if new is None else (new, y)


# ---- launch


def _results(rows, hidden, device):
    y = torch.empty((rows, hidden), dtype=torch.bfloat16, device=device)
    post = torch.empty((rows, STREAMS), dtype=torch.float32, device=device)
    comb = torch.empty((rows, STREAMS, STREAMS), dtype=torch.float32, device=device)
    return y, post, comb


def _options(fn, scale, base, norm_weight, norm_eps, rms_eps, hc_eps, post_scale, sinkhorn_iters) -> dict:
    return {
        "fn": fn,
        "scale": scale,
        "base": base,
        "norm_weight": norm_weight,
        "numbers": {
            "norm_eps": float(norm_eps),
            "rms_eps": float(rms_eps),
            "hc_eps": float(hc_eps),
            "post_scale": float(post_scale),
            "sinkhorn_iters": int(sinkhorn_iters),
        },
    }


_WHOLE: dict[str, int | float] = {}  # a term without an addition that is left
_NOT_INSIDE = (
    "mhc: f float32 or with `routed` needs a boundary that makes its sum inside (takes_terms), got {} rows, kernels {}"
)
_NOT_ADDED = "mhc: f float32 or with `routed` needs a boundary of few rows (takes_own_terms), got {} rows, kernels {}"
_NO_NUMBERS = {"norm_eps": 0.0, "rms_eps": 0.0, "hc_eps": 0.0, "post_scale": 0.0, "sinkhorn_iters": 1}


def _launch(streams, *arguments, **options) -> None:
    if streams.shape[0]:
        with cuda_tensors.on_device_of(streams):
            _launch_here(streams, *arguments, **options)


def _launch_here(
    streams,
    f,
    post,
    comb,
    new,
    *,
    fn=None,
    scale=None,
    base=None,
    norm_weight=None,
    y=None,
    post_out=None,
    comb_out=None,
    numbers=_NO_NUMBERS,
    head=False,
    sum_over=None,
    tag=0,
    kernels=None,
    term=_WHOLE,
) -> None:
    """Checked arguments to raw pointers; streams' device is current."""
    rows, _, hidden = streams.shape
    index, device = streams.device.index, streams.device
    stream = cuda_tensors.current_stream(index)
    exchange_words = partials_bytes = counter_words = 0
    exchange = partials = counters = None
    asks = rows > 1 or sum_over is not None
    num_sms = cuda_tensors.stream_sms(index, stream) if asks else cuda_tensors.num_sms(index)
    sums = {}
    if sum_over is not None:
        if _sums_inside(kernels, rows, hidden, sum_over, index):
            # a stream of fewer multiprocessors than that takes is an error: the other cards wait for this kernel
            kernels, num_sms = "fused", min(num_sms, sum_over.num_sms)
            sums = {"sums": True, **term, **sum_over.arguments(tag)}
        elif term:
            raise ValueError(_NOT_INSIDE.format(rows, kernels))
        else:
            f = sum_over(f, tag=tag)
    elif term:
        if kernels not in (None, "fused") or not _fits_adding(rows, hidden, num_sms, index):
            raise ValueError(_NOT_ADDED.format(rows, kernels))
        kernels, sums = "fused", term
    if kernels is None:
        kernels = _kernels_of(rows, hidden, f is not None and not head, num_sms, index)
    if fn is not None:
        exchange_words, partials_bytes, counter_words = _workspace(rows, hidden, head, kernels, "sums" in sums)
        exchange = _exchange(index).take(stream, exchange_words) if exchange_words else None
        partials = torch.empty((partials_bytes,), dtype=torch.uint8, device=device) if partials_bytes else None
        counters = torch.zeros((counter_words,), dtype=torch.int32, device=device) if counter_words else None
    extension.load().mhc(
        **_sublayer(f, term),
        post=_address(post),
        comb=_address(comb),
        streams=_address(new),
        x=streams.data_ptr(),
        x_stride=streams.stride(0),
        fn=_address(fn),
        scale=_address(scale),
        base=_address(base),
        norm_weight=_address(norm_weight),
        y=_address(y),
        post_out=_address(post_out),
        comb_out=_address(comb_out),
        exchange=_address(exchange),
        exchange_words=exchange_words,
        partials=_address(partials),
        partials_bytes=partials_bytes,
        counters=_address(counters),
        counter_words=counter_words,
        rows=rows,
        hidden=hidden,
        head=head,
        kernels=kernels,
        num_sms=num_sms,
        pdl=True,
        stream=stream,
        **numbers,
        **sums,
    )


def _sublayer(f, term) -> dict[str, int]:
    if f is None or "partial" in term:
        return {"f": 0, "f_stride": 0}
    return {"f": f.data_ptr(), "f_stride": f.stride(0)}


def _address(tensor) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@functools.lru_cache(maxsize=4096)
def _kernels_of(rows: int, hidden: int, is_boundary: bool, num_sms: int, index: int) -> str:
    """The fastest kernels that can run on so many multiprocessors of this device, which is current."""
    found = "split"
    if hidden == FLASH_HIDDEN and rows <= extension.load().mhc_fused_rows:
        found = "fused"
    elif hidden == FLASH_HIDDEN and rows >= MANY_ROWS and is_boundary and not extension.load().mhc_card_is_shared():
        found = "many"
    return found if extension.load().mhc_fits(kernels=found, rows=rows, num_sms=num_sms) else "split"


def summing_rows(group: AllReduce) -> int:
    """The most rows of a boundary that has its sum inside."""
    return min(SUMMING_ROWS[group.ranks], group.one_shot_rows) if group.hidden == FLASH_HIDDEN else 0


def takes_sum(rows: int, hidden: int, group: AllReduce) -> bool:
    """Whether a boundary of so many rows can have its sum inside: where all its blocks are resident, it has."""
    return hidden == group.hidden and 1 <= rows <= summing_rows(group)


def takes_terms(rows: int, hidden: int, group: AllReduce) -> bool:
    """Whether a card's term may come to a boundary without its last addition: wherever its sum is made inside."""
    return _sums_inside(None, rows, hidden, group, group.device.index)


def takes_own_terms(like: torch.Tensor) -> bool:
    """Whether an f of this form may come to a boundary without its last addition, where no sum between cards is made:
    by the current stream of its device."""
    index = like.device.index
    with cuda_tensors.on_device_of(like):
        num_sms = cuda_tensors.stream_sms(index, cuda_tensors.current_stream(index))
        return _fits_adding(*like.shape, num_sms, index)


def _sums_inside(kernels, rows: int, hidden: int, group: AllReduce, index: int) -> bool:
    """Whether the boundary's kernel adds what the cards send, by what all ranks know alike; not by this stream."""
    if kernels is not None:
        return kernels == "fused"
    return takes_sum(rows, hidden, group) and _fits_summing(rows, group.num_sms, index)


@functools.lru_cache(maxsize=4096)
def _fits_summing(rows: int, num_sms: int, index: int) -> bool:
    return extension.load().mhc_fits_summing(rows=rows, num_sms=num_sms)


@functools.lru_cache(maxsize=4096)
def _fits_adding(rows: int, hidden: int, num_sms: int, index: int) -> bool:
    few = hidden == FLASH_HIDDEN and 1 <= rows <= OWN_TERM_ROWS
    return few and extension.load().mhc_fits_adding(rows=rows, num_sms=num_sms)


@functools.lru_cache(maxsize=4096)
def _workspace(rows: int, hidden: int, head: bool, kernels: str, sums: bool = False) -> tuple[int, int, int]:
    return extension.load().mhc_workspace(rows=rows, hidden=hidden, head=head, kernels=kernels, sums=sums)


@functools.cache
def _exchange(index: int) -> ZeroedWords:
    words, _, _ = _workspace(extension.load().mhc_fused_rows, FLASH_HIDDEN, False, "fused")
    summing_words, _, _ = _workspace(ONE_SHOT_ROWS, FLASH_HIDDEN, False, "fused", True)
    words = max(words, summing_words)
    return ZeroedWords(f"cuda:{index}", words, _CAPTURE_STORE_BYTES)


# ---- checks


def _check_streams(op: str, streams) -> tuple[Call, int, int]:
    """(checks, rows, hidden)"""
    check = Call(op, "streams", streams)
    rows, count, hidden = check.tensor("streams", streams, BF16, "rows, streams, hidden", _STRIDES, VECTOR)
    if count != STREAMS:
        check.refuse("shape", "streams.shape[1]", f"be {STREAMS}", count)
    if hidden not in HIDDEN:
        check.refuse("shape", "streams.shape[2]", f"be {' or '.join(map(str, HIDDEN))} (hidden)", hidden)
    if rows > _MAX_ROWS:
        check.refuse("shape", "streams.shape[0]", f"be at most {_MAX_ROWS} (rows)", rows)
    if not streams.is_contiguous() and streams.stride(1) != hidden:
        check.refuse("stride", "streams.stride(1)", f"be {hidden} (hidden)", streams.stride(1))
    return check, rows, hidden


def _check_sublayer(check: Call, f, post, comb, rows, hidden, sum_over=None):
    """post as the kernels read it, [rows, 4]"""
    if not _is_unmerged(f):
        check.tensor("f", f, BF16, (rows, hidden), _STRIDES if sum_over is None else CONTIGUOUS, VECTOR)
    if sum_over is not None:
        _check_group(check, sum_over, rows, hidden)
    check.given("post", post)
    if post.dim() == 3 and post.shape[2] == 1:
        post = post.squeeze(2)
    check.tensor("post", post, FP32, (rows, STREAMS))
    check.tensor("comb", comb, FP32, (rows, STREAMS, STREAMS))
    return post


def _is_unmerged(f) -> bool:
    return isinstance(f, torch.Tensor) and f.dtype == torch.float32


def _check_term(check: Call, f, routed, scaling, sum_over, rows, hidden) -> dict[str, int | float]:
    """What the kernel has to add first, of this card's own."""
    if not _is_unmerged(f) and routed is None:
        return _WHOLE
    if routed is not None:
        check.tensor("f", f, BF16, (rows, hidden), CONTIGUOUS, VECTOR)
        check.tensor("routed", routed, BF16, (rows, hidden), CONTIGUOUS, VECTOR)
        return {"routed": routed.data_ptr(), "scaling": float(scaling)}
    check.tensor("f", f, FP32, (TERM_SPLITS, rows, hidden), CONTIGUOUS, VECTOR)
    return {"partial": f.data_ptr()}


def _check_group(check: Call, group: AllReduce, rows, hidden) -> None:
    if not isinstance(group, AllReduce):
        check.refuse("value", "sum_over", "be an AllReduce or None", repr(group))
    if group.hidden != hidden:
        check.refuse("shape", "sum_over.hidden", f"be {hidden} (hidden)", group.hidden)
    if rows > group.max_rows:
        check.refuse("shape", "sum_over.max_rows", f"be at least {rows} (rows)", group.max_rows)
    if group.device != check.device:
        check.refuse("device", "sum_over.device", f"be streams's, {check.device}", group.device)


def _check_mixes(check: Call, fn, scale, base, norm_weight, mixes, scales, hidden) -> None:
    check.tensor("fn", fn, FP32, (mixes, STREAMS * hidden), CONTIGUOUS, VECTOR)
    check.tensor("scale", scale, FP32, (scales,))
    check.tensor("base", base, FP32, (mixes,))
    if norm_weight is not None:
        check.tensor("norm_weight", norm_weight, BF16, (hidden,), CONTIGUOUS, VECTOR)


def _check_kernels(check: Call, kernels, hidden, allowed) -> None:
    if kernels is None:
        return
    check.one_of("kernels", kernels, allowed)
    if kernels != "split" and hidden != FLASH_HIDDEN:
        check.refuse("value", "kernels", f'be "split" or None but for hidden {FLASH_HIDDEN}', f"{kernels}, {hidden}")


def _check_numbers(check: Call, norm_eps, rms_eps, hc_eps, sinkhorn_iters) -> None:
    for name, value in (("norm_eps", norm_eps), ("rms_eps", rms_eps), ("hc_eps", hc_eps)):
        if not value >= 0:
            check.refuse("value", name, "be 0 or more", value)
    if sinkhorn_iters < 1:
        check.refuse("value", "sinkhorn_iters", "be 1 or more", sinkhorn_iters)

"""Public MXFP4 experts: checks the arguments, chooses the regime, owns the scratch, launches.

Few rows (up to DECODE_ROWS): `_C.mxfp4_moe`, which streams the touched experts' weights once. More rows, sorted by
expert: `_C.mxfp4_moe_sorted`, with the bits of few rows (csrc/mxfp4_moe/sorted.cuh) or without (wide.cuh);
`_C.mxfp4_moe_scaled`, with MXFP8 activations.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from deepseek_v4_sm120.ops.shared import cuda_tensors, extension
from deepseek_v4_sm120.ops.shared.checks import ANY, BF16, FP32, INT32, VECTOR, Call

DECODE_ROWS = 256
GROUP = 32  # inputs per scale byte
BLOCK_SCALED_MAJOR = 12  # compute capability with mma.sync of block-scaled FP8
_STRIDES = 8  # that rows of bf16 have multiples of: 16 bytes
_PACKED_DTYPES = (torch.uint8, torch.int8)
_SCALE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)
ACTIVATIONS = ("bf16", "mxfp8")
# of csrc/mxfp4_moe/wide.cuh, scaled.cuh: weight rows of a unit, inputs of a stage, and of a place of scales
_UNIT_ROWS, _STAGE_INPUTS, _SCALE_INPUTS = 256, 128, 512
_SORTED_SCALES = 4  # bytes: csrc/mxfp4_moe/sorted.cuh counts scales in fours and codes in VECTOR, both in 32 bits


def mxfp4_moe(
    hidden,
    topk_ids,
    topk_weights,
    w13,
    w13_scale,
    w2,
    w2_scale,
    *,
    routed_scaling=1.0,
    swiglu_limit=10.0,
    first_expert=0,
    expert_map=None,
    up_first=False,
    activations="bf16",
    reproducible=False,
    out=None,
):
    """The routed experts of a layer on this rank: gate/up, SwiGLU with a clamp, down, weighted sum over each row's.

    hidden             [rows, hidden] bf16, last dim contiguous, row stride a multiple of 8
    topk_ids           [rows, topk] int32; an id that names no local expert (-1, another rank's) adds nothing and costs
                       nothing. The same expert twice in a row is allowed
    topk_weights       [rows, topk] float32, normalised by the router
    w13, w13_scale     [experts, 2 * inter, hidden / 2] uint8 or int8: E2M1, two a byte, even input in the low nibble;
                       [experts, 2 * inter, hidden / 32] uint8 or float8_e8m0fnu: UE8M0. The first half of the rows is
                       the gate (w1), the second up (w3): the checkpoint's bytes. Only the experts' stride is free
    w2, w2_scale       [experts, hidden, inter / 2] and [experts, hidden, inter / 32] likewise
    routed_scaling     factor of the whole sum, applied here and nowhere else; 1.0 where topk_weights already hold it
    swiglu_limit       h = silu(min(gate, limit)) * clamp(up, -limit, limit); None: no clamp
    first_expert       id of w13[0]; ids from there to first_expert + experts - 1 are local
    expert_map         [ids] int32: id -> local expert or -1, instead of first_expert; or None
    up_first           w13's first half is up, its second the gate
    activations        "bf16" (W4A16), or "mxfp8" (W4A8): above 256 rows both products read E4M3 with a UE8M0 scale per
                       32 values, by SM120's block-scaled instruction, elsewhere in bf16. Else it is bf16 (few rows)
    reproducible       True: one order of exact sums at any number of rows; sizes must be those of few rows
    out                [rows, hidden] bf16 written in place, last dim contiguous, row stride a multiple of 8, not over
                       hidden; or None
    returns            out [rows, hidden] bf16: this rank's part of the sum, without the shared expert
    accuracy           relative L2 against float64: W4A16 below 0.004 (bf16 h and bf16 out), W4A8 about 0.045
    determinism        the same bits in every run; up to 256 rows, and if reproducible at any number, also in every
                       batch: a row alone equals the row among others. There weights are exact (a scale byte of 0 counts
                       as zero, 255 as NaN); above for scale bytes 34 to 160
    sizes              up to 256 rows: hidden 4096 or 7168, inter 256 to 3072 (Flash, Pro), 512 experts, 3072 pairs at
                       most; others take the other regime: hidden a multiple of 256, inter of 128 and not 128 more
                       than one of 512, at most 1024 experts
    raises             TypeError (dtype), ValueError (shape, stride, alignment, overlap, value), RuntimeError (device,
                       launch)
    cuda graphs        capture-safe: no host sync; allocates only out and scratch, through torch
    streams            the current stream of hidden's device; scratch is the call's own, so calls on several streams and
                       the shared expert beside it are independent
    source             DeepSeek's inference/model.py (Expert, MoE); specification in reference/mxfp4_moe.py
    """
    check = Call("mxfp4_moe", "hidden", hidden)
    sizes = _check_experts(check, hidden, w13, w13_scale, w2, w2_scale)
    weights = Weights(w13, w13_scale, w2, w2_scale, up_first)
    rows, topk = _check_routing(check, topk_ids, topk_weights, expert_map, hidden.shape[0])
    if out is not None:
        check.tensor("out", out, BF16, hidden.shape, _STRIDES, VECTOR)
        check.written("hidden", hidden, ("out", out))
    check.one_of("activations", activations, ACTIVATIONS)
    if reproducible:
        _check_reproducible(check, sizes, weights)
    check.on_cuda()
    few = rows <= DECODE_ROWS and not _few_rows_problem(*sizes, rows * topk)
    if not few and not reproducible:
        _check_many(check, *sizes, weights)
    if out is None:
        out = torch.empty(hidden.shape, dtype=torch.bfloat16, device=hidden.device)
    if rows == 0:
        return out
    routing = Routing(topk_ids, topk_weights, first_expert, expert_map, routed_scaling)
    limit = math.inf if swiglu_limit is None else float(swiglu_limit)
    with cuda_tensors.on_device_of(hidden):
        if few:
            _few_rows(hidden, weights, routing, limit, out, exact=reproducible)
        else:
            _many_rows(hidden, weights, routing, limit, out, activations, reproducible)
    return out


def add_shared(shared, routed, *, scaling=1.0):
    """shared + scaling * routed, in place: the shared expert's output and the routed experts'.

    shared    [rows, hidden] bf16, hidden and row stride multiples of 8, last dim contiguous; written
    routed    [rows, hidden] bf16 likewise, not over shared
    scaling   factor of routed
    returns   shared
    accuracy  float32, rounded once: torch's `shared.add_(routed, alpha=scaling)` to the bit
    raises    TypeError (dtype), ValueError (shape, stride, alignment, overlap, value), RuntimeError (device, launch)
    source    SGLang's maybe_fuse_routed_scale_and_shared_add; a kernel of its own because torch's lets no successor
              start before it has ended
    """
    check = Call("add_shared", "shared", shared)
    rows, hidden = check.tensor("shared", shared, BF16, "rows, hidden", _STRIDES, VECTOR)
    check.tensor("routed", routed, BF16, shared.shape, _STRIDES, VECTOR)
    check.written("routed", routed, ("shared", shared))
    check.on_cuda()
    if rows == 0:
        return shared
    with cuda_tensors.on_device_of(shared):
        extension.load().mxfp4_moe_shared(
            shared=shared.data_ptr(),
            shared_stride=shared.stride(0),
            routed=routed.data_ptr(),
            routed_stride=routed.stride(0),
            rows=rows,
            hidden=hidden,
            scaling=float(scaling),
            pdl=True,
            stream=cuda_tensors.current_stream(shared.device.index),
        )
    return shared


@dataclass(frozen=True)
class Weights:
    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    up_first: bool


@dataclass(frozen=True)
class Routing:
    ids: torch.Tensor
    weights: torch.Tensor
    first_expert: int
    expert_map: torch.Tensor | None
    scaling: float


def multiplies_block_scaled(device=None) -> bool:
    """Whether "mxfp8" is worth it: products by the block-scaled instruction, else bf16 products of the same values."""
    return torch.cuda.get_device_capability(device)[0] == BLOCK_SCALED_MAJOR


# ---- few rows


@functools.lru_cache(maxsize=4096)
def _few_rows_problem(hidden: int, inter: int, experts: int, pairs: int) -> str:
    return extension.load().mxfp4_moe_problem(hidden=hidden, inter=inter, experts=experts, pairs=pairs)


def _few_rows(hidden, weights: Weights, routing: Routing, limit: float, out, *, exact: bool) -> None:
    """Checked arguments to raw pointers; hidden's device is current."""
    pairs, width, inter = routing.ids.numel(), hidden.shape[1], weights.w13.shape[1] // 2
    h = torch.empty((pairs, inter), dtype=torch.bfloat16, device=hidden.device)
    y = torch.empty((pairs, width), dtype=torch.float32, device=hidden.device)
    given = _arguments(hidden, weights, routing, limit, out)
    extension.load().mxfp4_moe(**given, h=h.data_ptr(), y=y.data_ptr(), exact=exact)


# ---- many rows


def _many_rows(hidden, weights: Weights, routing: Routing, limit: float, out, activations, reproducible) -> None:
    if activations == "mxfp8" and not reproducible:
        return _scaled_rows(hidden, weights, routing, limit, out)
    return _sorted_rows(hidden, weights, routing, limit, out, exact=reproducible)


def _sorted_rows(hidden, weights: Weights, routing: Routing, limit: float, out, *, exact: bool) -> None:
    """Any number of rows: pairs by expert, a weight decoded for a tile. exact: the bits of few that are exact."""
    given = _arguments(hidden, weights, routing, limit, out)
    sizes = _sorted_scratch_bytes(*(given[name] for name in ("rows", "topk", "experts", "hidden", "inter")), exact)
    scratch = torch.empty(sizes, dtype=torch.uint8, device=hidden.device)
    extension.load().mxfp4_moe_sorted(**given, scratch=scratch.data_ptr(), exact=exact)


@functools.lru_cache(maxsize=4096)
def _sorted_scratch_bytes(rows: int, topk: int, experts: int, hidden: int, inter: int, exact: bool) -> int:
    return extension.load().mxfp4_moe_sorted_scratch_bytes(
        rows=rows, topk=topk, experts=experts, hidden=hidden, inter=inter, exact=exact
    )


def _scaled_rows(hidden, weights: Weights, routing: Routing, limit: float, out) -> None:
    """Activations in MXFP8, by SM120's block-scaled instruction; elsewhere, for tests, bf16 products of the same."""
    given = _arguments(hidden, weights, routing, limit, out)
    sizes = (given[name] for name in ("rows", "topk", "experts", "hidden", "inter"))
    scratch = torch.empty(_scaled_scratch_bytes(*sizes), dtype=torch.uint8, device=hidden.device)
    extension.load().mxfp4_moe_scaled(**given, scratch=scratch.data_ptr())


@functools.lru_cache(maxsize=4096)
def _scaled_scratch_bytes(rows: int, topk: int, experts: int, hidden: int, inter: int) -> int:
    return extension.load().mxfp4_moe_scaled_scratch_bytes(
        rows=rows, topk=topk, experts=experts, hidden=hidden, inter=inter
    )


def _arguments(hidden, weights: Weights, routing: Routing, limit: float, out) -> dict:
    """Those that all have."""
    (rows, topk), index = routing.ids.shape, hidden.device.index
    expert_map = routing.expert_map
    return dict(
        x=hidden.data_ptr(),
        x_stride=hidden.stride(0),
        topk_ids=routing.ids.data_ptr(),
        ids_stride=routing.ids.stride(0),
        topk_weights=routing.weights.data_ptr(),
        weights_stride=routing.weights.stride(0),
        expert_map=0 if expert_map is None else expert_map.data_ptr(),
        map_size=0 if expert_map is None else expert_map.numel(),
        first_expert=routing.first_expert,
        w13=weights.w13.data_ptr(),
        w13_stride=weights.w13.stride(0),
        w13_scale=weights.w13_scale.data_ptr(),
        w13_scale_stride=weights.w13_scale.stride(0),
        w2=weights.w2.data_ptr(),
        w2_stride=weights.w2.stride(0),
        w2_scale=weights.w2_scale.data_ptr(),
        w2_scale_stride=weights.w2_scale.stride(0),
        out=out.data_ptr(),
        out_stride=out.stride(0),
        limit=limit,
        routed_scaling=routing.scaling,
        rows=rows,
        topk=topk,
        experts=weights.w13.shape[0],
        hidden=hidden.shape[1],
        inter=weights.w13.shape[1] // 2,
        up_first=weights.up_first,
        num_sms=cuda_tensors.num_sms(index),
        pdl=True,
        stream=cuda_tensors.current_stream(index),
    )


# ---- checks


def _check_experts(check: Call, hidden, w13, w13_scale, w2, w2_scale) -> tuple[int, int, int]:
    """(hidden, inter, experts)"""
    _, width = check.tensor("hidden", hidden, BF16, "rows, hidden", _STRIDES, VECTOR)
    check.given("w13", w13)
    if w13.dim() != 3 or w13.shape[1] % 2 or not w13.shape[0]:
        check.refuse("shape", "w13.shape", "be [experts, 2 * inter, hidden / 2]", list(w13.shape))
    experts, inter = w13.shape[0], w13.shape[1] // 2
    check.multiple("hidden.shape[1]", width, GROUP)
    check.multiple("w13.shape[1] / 2", inter, GROUP)
    for name, tensor, dtypes, shape in (
        ("w13", w13, _PACKED_DTYPES, (experts, 2 * inter, width // 2)),
        ("w13_scale", w13_scale, _SCALE_DTYPES, (experts, 2 * inter, width // GROUP)),
        ("w2", w2, _PACKED_DTYPES, (experts, width, inter // 2)),
        ("w2_scale", w2_scale, _SCALE_DTYPES, (experts, width, inter // GROUP)),
    ):
        check.tensor(name, tensor, dtypes, shape, ANY, VECTOR)
        stride = tensor.stride()
        if stride[2] != 1 or stride[1] != shape[2] or (experts > 1 and stride[0] % VECTOR):
            expected = f"have strides [a multiple of {VECTOR}, {shape[2]}, 1]"
            check.refuse("stride", name, expected, f"strides {list(stride)}")
    return width, inter, experts


def _check_reproducible(check: Call, sizes, weights: Weights) -> None:
    """Sizes of few rows, and 32 bits for the number of the last unit of each of the weights."""
    if problem := _few_rows_problem(*sizes, 0):
        check.refuse("value", "reproducible", f"be False for these sizes (few rows take {problem})", True)
    _check_reach(check, weights)


def _check_reach(check: Call, weights: Weights) -> None:
    """What kernels for many rows count in 32 bits."""
    for name, unit in dict(w13=VECTOR, w13_scale=_SORTED_SCALES, w2=VECTOR, w2_scale=_SORTED_SCALES).items():
        tensor = getattr(weights, name)
        experts, rows, row_bytes = tensor.shape
        span, most = (experts - 1) * tensor.stride(0) + rows * row_bytes, unit << 32
        if span > most:
            check.refuse("stride", name, f"span at most {most} bytes", span)


def _check_routing(check: Call, topk_ids, topk_weights, expert_map, rows: int) -> tuple[int, int]:
    """(rows, topk)"""
    shape = check.tensor("topk_ids", topk_ids, INT32, (rows, "topk"), 1)
    if not shape[1]:
        check.refuse("shape", "topk_ids.shape[1]", "be 1 or more", 0)
    check.tensor("topk_weights", topk_weights, FP32, shape, 1)
    if expert_map is not None:
        check.tensor("expert_map", expert_map, INT32, "ids")
        if not expert_map.numel():
            check.refuse("shape", "expert_map.shape", "be [1 or more]", [0])
    return shape


def _check_many(check: Call, hidden: int, inter: int, experts: int, weights: Weights) -> None:
    if experts > (most := extension.load().mxfp4_moe_max_tiled_experts):
        check.refuse("shape", "w13", f"have at most {most} experts", experts)
    check.multiple("hidden.shape[1]", hidden, _UNIT_ROWS)
    check.multiple("w13.shape[1] / 2", inter, _STAGE_INPUTS)
    if inter % _SCALE_INPUTS == _STAGE_INPUTS:  # a place of scales would have one stage
        rule = f"not be {_STAGE_INPUTS} more than a multiple of {_SCALE_INPUTS}"
        check.refuse("shape", "w13.shape[1] / 2", rule, inter)
    _check_reach(check, weights)

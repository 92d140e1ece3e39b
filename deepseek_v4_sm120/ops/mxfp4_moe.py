"""Public MXFP4 experts: checks the arguments, chooses the regime, owns the scratch, launches.

Few rows (up to DECODE_ROWS): `_C.mxfp4_moe`, which streams the touched experts' weights once. More rows, sorted by
expert: `_C.mxfp4_moe_sorted`, with the bits of few rows or, `wide`, without; `_C.mxfp4_moe_scaled`, with MXFP8
activations; or, in bf16, Triton's grouped GEMMs, with block sizes from triton/mxfp4_moe_table.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepseek_v4_sm120.ops.shared import cuda_tensors, extension
from deepseek_v4_sm120.ops.shared.checks import ANY, BF16, FP32, INT32, VECTOR, Call

DECODE_ROWS = 256
GROUP = 32  # inputs per scale byte
WGMMA_MAJOR = 9  # compute capability for which Triton multiplies by wgmma; ours is mma.sync
BLOCK_SCALED_MAJOR = 12  # compute capability with mma.sync of block-scaled FP8
_STRIDES = 8  # that rows of bf16 have multiples of: 16 bytes
_PACKED_DTYPES = (torch.uint8, torch.int8)
_SCALE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)
ACTIVATIONS = ("bf16", "mxfp8")
_GROUPED_MULTIPLE = 128  # of hidden and inter, above DECODE_ROWS rows
_WIDE_ROWS, _WIDE_SCALES = 256, 512  # of csrc/mxfp4_moe/wide.cuh, scaled.cuh: weight rows of a unit; inputs of a place
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
    wide=None,
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
    wide               of bf16 above 256 rows that need not be reproducible: True our kernels, False Triton's; None:
                       ours where Triton has no wgmma and their sizes fit
    out                [rows, hidden] bf16 written in place, last dim contiguous, row stride a multiple of 8, not over
                       hidden; or None
    returns            out [rows, hidden] bf16: this rank's part of the sum, without the shared expert
    accuracy           relative L2 against float64: W4A16 below 0.004 (bf16 h and bf16 out), W4A8 about 0.045
    determinism        the same bits in every run; up to 256 rows, and if reproducible at any number, also in every
                       batch: a row alone equals the row among others. There weights are exact (a scale byte of 0 counts
                       as zero, 255 as NaN); above for scale bytes 34 to 160
    sizes              up to 256 rows: hidden 4096 or 7168, inter 256 to 3072 (Flash, Pro), 512 experts, 3072 pairs at
                       most; others take the other regime: multiples of 128 (ours: hidden of 256, inter not 128, 640),
                       at most 1024 experts
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
    _check_ways(check, sizes, weights, activations, reproducible, wide)
    check.on_cuda()
    few = rows <= DECODE_ROWS and not _few_rows_problem(*sizes, rows * topk)
    if not few and not reproducible:
        _check_grouped(check, *sizes, weights, activations)
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
            _many_rows(hidden, weights, routing, limit, out, activations, reproducible, wide)
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


def _many_rows(hidden, weights: Weights, routing: Routing, limit: float, out, activations, reproducible, wide) -> None:
    """SM90 keeps Triton's kernels for bf16, which multiply by wgmma there."""
    if activations == "mxfp8" and not reproducible:
        return _scaled_rows(hidden, weights, routing, limit, out)
    if wide is None:
        wgmma = torch.cuda.get_device_capability(hidden.device)[0] == WGMMA_MAJOR
        wide = not wgmma and not _wide_problem(weights)
    if wide or reproducible:
        return _sorted_rows(hidden, weights, routing, limit, out, exact=reproducible)
    return _grouped(hidden, weights, routing, limit, out)


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


# ---- many rows


@dataclass(frozen=True)
class Tiles:
    """The pairs sorted by expert and cut into tiles: what every program of a grouped GEMM looks up.

    An expert's pairs are cut into tiles of block_m; what is left over becomes a tile of a quarter, a half, both, or
    a whole one, so that few rows are multiplied for nothing: 192 pairs are 128 + 64. A list for each of these heights;
    within an expert the order is the pairs' own. Specification: reference/mxfp4_moe.py, `tiles`.

    pairs        [pairs] int32: sorted position -> pair (row * topk + slot); undefined behind the last local pair
    pair_expert  [pairs] int32: local expert or -1
    lists        (height, (expert, begin, end)) of the lists that can hold a tile; each [tiles] int32: local expert or
                 -1 where there is no tile, first sorted position, position behind the last
    """

    pairs: torch.Tensor
    pair_expert: torch.Tensor
    lists: list[tuple[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]


def num_whole_tiles(pairs: int, block_m: int) -> int:
    """Length of the list of whole tiles: those that `pairs` can fill, however they are routed.

    A multiple of 4, so that all three lists begin on 16 bytes: for others Triton would compile its kernels once more.
    """
    return -(-(pairs // (block_m // 2 + block_m // 4)) // 4) * 4


def cut(table, num_whole: int, block_m: int) -> list[tuple[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """Tiles.lists of (expert, begin, end), each with the whole tiles, then the halves, then as many quarters."""
    pieces = (table[0].shape[0] - num_whole) // 2
    parts = zip(*(tensor.split((num_whole, pieces, pieces)) for tensor in table), strict=True)
    heights = (block_m, block_m // 2, block_m // 4)
    return [(height, part) for height, part in zip(heights, parts, strict=True) if part[0].numel()]


@functools.lru_cache(maxsize=4096)
def _tiles_scratch_words(pairs: int, experts: int) -> int:
    return extension.load().mxfp4_moe_tiles_scratch_words(pairs=pairs, experts=experts)


def make_tiles(routing: Routing, experts: int, block_m: int) -> Tiles:
    """Three launches, and work bounded by the shapes; routing's device is current."""
    ids, expert_map = routing.ids, routing.expert_map
    (rows, topk), device = ids.shape, ids.device
    num_whole = num_whole_tiles(ids.numel(), block_m)
    empty = functools.partial(torch.empty, dtype=torch.int32, device=device)
    pairs, pair_expert = empty(ids.numel()), empty(ids.numel())
    table = [empty(num_whole + 2 * experts) for _ in range(3)]
    scratch = empty(_tiles_scratch_words(ids.numel(), experts))
    extension.load().mxfp4_moe_tiles(
        topk_ids=ids.data_ptr(),
        ids_stride=ids.stride(0),
        expert_map=0 if expert_map is None else expert_map.data_ptr(),
        map_size=0 if expert_map is None else expert_map.numel(),
        first_expert=routing.first_expert,
        rows=rows,
        topk=topk,
        experts=experts,
        block_m=block_m,
        num_whole=num_whole,
        pairs=pairs.data_ptr(),
        pair_expert=pair_expert.data_ptr(),
        expert=table[0].data_ptr(),
        begin=table[1].data_ptr(),
        end=table[2].data_ptr(),
        scratch=scratch.data_ptr(),
        pdl=True,
        stream=cuda_tensors.current_stream(device.index),
    )
    return Tiles(pairs, pair_expert, cut(table, num_whole, block_m))


def _grouped(hidden, weights: Weights, routing: Routing, limit: float, out) -> None:
    from deepseek_v4_sm120.ops.triton import mxfp4_moe_table as table

    experts, inter = weights.w13.shape[0], weights.w13.shape[1] // 2
    rows_per_expert = routing.ids.numel() / experts
    major = torch.cuda.get_device_capability(hidden.device)[0]
    gate_up = table.choose(major, "gate_up", rows_per_expert, inter, hidden.shape[1])
    down = table.choose(major, "down", rows_per_expert, hidden.shape[1], inter, block_m=gate_up.block_m)
    tiles = make_tiles(routing, experts, gate_up.block_m)
    run_grouped(hidden, weights, routing, limit, out, tiles, "w4a16", gate_up, down)


def run_grouped(
    hidden, weights: Weights, routing: Routing, limit: float, out, tiles: Tiles, product: str, gate_up, down
) -> None:
    """The grouped GEMMs with given block sizes (of the tiles' block_m); also on the CPU, for Triton's interpreter."""
    from deepseek_v4_sm120.ops.triton import mxfp4_moe as kernels

    device, topk = hidden.device, routing.ids.shape[1]
    inter, pairs = weights.w13.shape[1] // 2, routing.ids.numel()
    packed = [t.view(torch.uint8) for t in (weights.w13, weights.w13_scale, weights.w2, weights.w2_scale)]
    h = torch.empty((pairs, inter), dtype=out.dtype, device=device)
    y = torch.empty((pairs, hidden.shape[1]), dtype=out.dtype, device=device)
    kernels.launch_gate_up(
        *(hidden, packed[0], packed[1], tiles, h),
        up_first=weights.up_first,
        limit=limit,
        topk=topk,
        product=product,
        blocks=gate_up,
    )
    kernels.launch_down(h, packed[2], packed[3], tiles, y, product=product, blocks=down)
    kernels.launch_combine(y, routing.weights, tiles.pair_expert, out, routed_scaling=routing.scaling)


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


def _check_ways(check: Call, sizes, weights: Weights, activations, reproducible, wide) -> None:
    check.one_of("activations", activations, ACTIVATIONS)
    check.one_of("wide", wide, (None, False, True))
    if reproducible:
        _check_reproducible(check, sizes, weights)
    if wide and (problem := _wide_problem(weights)):
        check.refuse("value", "wide", f"be False or None for {problem}", True)


def _check_reproducible(check: Call, sizes, weights: Weights) -> None:
    """Sizes of few rows, and 32 bits for the number of the last unit of each of the weights."""
    if problem := _few_rows_problem(*sizes, 0):
        check.refuse("value", "reproducible", f"be False for these sizes (few rows take {problem})", True)
    for name, span, most in _too_far(weights):
        check.refuse("stride", name, f"span at most {most} bytes to be reproducible", span)


def _too_far(weights: Weights) -> Iterator[tuple[str, int, int]]:
    """(name, bytes that it spans, most) of weights whose last unit has a number of more than 32 bits."""
    for name, unit in dict(w13=VECTOR, w13_scale=_SORTED_SCALES, w2=VECTOR, w2_scale=_SORTED_SCALES).items():
        tensor = getattr(weights, name)
        experts, rows, row_bytes = tensor.shape
        span, most = (experts - 1) * tensor.stride(0) + rows * row_bytes, unit << 32
        if span > most:
            yield name, span, most


def _wide_problem(weights: Weights) -> str:
    """What our kernels for many rows do not take; empty: they take it."""
    hidden, inter = weights.w2.shape[1], weights.w13.shape[1] // 2
    if hidden % _WIDE_ROWS:
        return f"hidden {hidden}, no multiple of {_WIDE_ROWS}"
    if inter % _WIDE_SCALES == _GROUPED_MULTIPLE:
        return f"inter {inter}, {_GROUPED_MULTIPLE} more than a multiple of {_WIDE_SCALES}"
    return next((f"{name} that spans {span} bytes, more than {most}" for name, span, most in _too_far(weights)), "")


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


def _check_grouped(check: Call, hidden: int, inter: int, experts: int, weights: Weights, activations: str) -> None:
    if experts > (most := extension.load().mxfp4_moe_max_tiled_experts):
        check.refuse("shape", "w13", f"have at most {most} experts", experts)
    check.multiple("hidden.shape[1]", hidden, _GROUPED_MULTIPLE)
    check.multiple("w13.shape[1] / 2", inter, _GROUPED_MULTIPLE)
    if activations == "mxfp8" and (problem := _wide_problem(weights)):
        check.refuse("value", "activations", f'be "bf16" for {problem}', "mxfp8")

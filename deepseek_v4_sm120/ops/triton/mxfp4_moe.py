"""Grouped GEMMs of the MXFP4 experts for many rows: gate/up with SwiGLU, down, and the sum over a row's experts.

    h[p]   = silu(min(W1 x, limit)) * clamp(W3 x, -limit, limit)        p: a (row, slot) pair, sorted by expert
    y[q]   = W2 h[p]                                                    q: the pair's place, row * topk + slot
    out[r] = routed_scaling * sum_slot weight[r, slot] * y[r, slot]

Weights are the checkpoint's own bytes: E2M1, low nibble first, one UE8M0 byte per 32 inputs. A program takes BLOCK_M
sorted pairs of one expert (tile_expert names it; a tile past the end has -1) and BLOCK_N outputs.

W4A16: activations bf16, weights exact, products bf16 x bf16 -> fp32.
"""

import triton
import triton.language as tl

COMBINE_BLOCK = 1024


@triton.jit
def _expand_bf16(packed, scale):
    """uint8 [n, k / 2] of two E2M1 codes and UE8M0 uint8 [n, k / 32] -> bf16 [n, k] (exact). Integer arithmetic."""
    wide = packed.to(tl.int32)
    low = ((wide & 0x08) << 28) | ((wide & 0x07) << 22)  # a float's sign, exponent and mantissa: the value * 2^-126
    high = ((wide & 0x80) << 24) | ((wide & 0x70) << 18)
    codes = tl.join(low, high).reshape(packed.shape[0], scale.shape[1], 32).to(tl.float32, bitcast=True)
    values = codes * 2.0**126 * _power(scale)[:, :, None]
    return values.reshape(packed.shape[0], 2 * packed.shape[1]).to(tl.bfloat16)


@triton.jit
def _power(scale):
    """UE8M0 uint8 -> float32 2^(byte - 127)."""
    wide = scale.to(tl.int32)
    return ((wide << 23) | ((wide == 0).to(tl.int32) << 22)).to(tl.float32, bitcast=True)


@triton.jit
def _multiply(acc, x, w, w_scale, PRODUCT: tl.constexpr):
    """acc [m, n] + x [m, k] times the weights w uint8 [n, k / 2], w_scale uint8 [n, k / 32]."""
    if PRODUCT == "w4a16":
        acc = tl.dot_scaled(x, None, "bf16", w.T, w_scale, "e2m1", acc, fast_math=True)
    else:  # Triton's interpreter multiplies neither bf16 nor scaled operands
        tl.static_assert(PRODUCT == "w4a16_interpreted")
        acc = tl.dot(x.to(tl.float32), _expand_bf16(w, w_scale).to(tl.float32).T, acc)
    return acc


@triton.jit
def _gate_up_kernel(
    x,
    w13,
    w13_scale,
    sorted_pairs,
    tile_expert,
    tile_begin,
    tile_end,
    h,
    stride_x,
    stride_expert,
    stride_expert_scale,
    gate_row,
    up_row,
    limit,
    hidden,
    inter,
    TOPK: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid = tl.program_id(0)
    tiles_n = inter // BLOCK_N
    tile = pid // tiles_n
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    begin = tl.load(tile_begin + tile)
    end = tl.load(tile_end + tile)
    first_n = (pid % tiles_n) * BLOCK_N
    w_gate = w13 + expert * stride_expert + gate_row * (hidden // 2)
    gate_scale = w13_scale + expert * stride_expert_scale + gate_row * (hidden // 32)
    up_distance = (up_row - gate_row) * (hidden // 2)
    up_scale_distance = (up_row - gate_row) * (hidden // 32)
    o_m = begin + tl.arange(0, BLOCK_M)
    m_m = o_m < end
    row = (tl.load(sorted_pairs + o_m, mask=m_m, other=0) // TOPK).to(tl.int64)
    o_n = first_n + tl.arange(0, BLOCK_N)
    o_group = tl.arange(0, BLOCK_K // 32)
    p_x = x + row[:, None] * stride_x + tl.arange(0, BLOCK_K)[None, :]
    p_w = w_gate + o_n[:, None] * (hidden // 2) + tl.arange(0, BLOCK_K // 2)[None, :]
    p_s = gate_scale + o_n[:, None] * (hidden // 32) + o_group[None, :]
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in tl.range(0, hidden // BLOCK_K, num_stages=STAGES):
        b_x = tl.load(p_x + k * BLOCK_K, mask=m_m[:, None], other=0.0)  # [BLOCK_M, BLOCK_K]
        b_w = tl.load(p_w + k * (BLOCK_K // 2))  # [BLOCK_N, BLOCK_K / 2]
        b_s = tl.load(p_s + k * (BLOCK_K // 32))  # [BLOCK_N, BLOCK_K / 32]
        gate = _multiply(gate, b_x, b_w, b_s, PRODUCT)
        b_w = tl.load(p_w + up_distance + k * (BLOCK_K // 2))
        b_s = tl.load(p_s + up_scale_distance + k * (BLOCK_K // 32))
        up = _multiply(up, b_x, b_w, b_s, PRODUCT)
    gate = _at_most(gate, limit)
    up = _at_most(up, limit)
    up = tl.where(up < -limit, up * 0.0 - limit, up)
    b_h = gate / (1.0 + tl.exp(-gate)) * up
    p_h = h + o_m.to(tl.int64)[:, None] * inter + o_n[None, :]
    tl.store(p_h, b_h.to(h.dtype.element_ty), mask=m_m[:, None])


@triton.jit
def _at_most(values, limit):
    """Triton's minimum gives the limit for a NaN, so that a row of them, or what a scale byte of 255 leaves, would come
    out as a plausible one. As in csrc/mxfp4_moe/swiglu.cuh: a NaN stays, and an infinity is one."""
    return tl.where(values > limit, values * 0.0 + limit, values)


@triton.jit
def _down_kernel(
    h,
    w2,
    w2_scale,
    sorted_pairs,
    tile_expert,
    tile_begin,
    tile_end,
    y,
    stride_expert,
    stride_expert_scale,
    hidden,
    inter,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid = tl.program_id(0)
    tiles_n = hidden // BLOCK_N
    tile = pid // tiles_n
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    begin = tl.load(tile_begin + tile)
    end = tl.load(tile_end + tile)
    first_n = (pid % tiles_n) * BLOCK_N
    w = w2 + expert * stride_expert
    w_scale = w2_scale + expert * stride_expert_scale
    o_m = begin + tl.arange(0, BLOCK_M)
    m_m = o_m < end
    o_n = first_n + tl.arange(0, BLOCK_N)
    o_group = tl.arange(0, BLOCK_K // 32)
    p_h = h + o_m.to(tl.int64)[:, None] * inter + tl.arange(0, BLOCK_K)[None, :]
    p_w = w + o_n[:, None] * (inter // 2) + tl.arange(0, BLOCK_K // 2)[None, :]
    p_s = w_scale + o_n[:, None] * (inter // 32) + o_group[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in tl.range(0, inter // BLOCK_K, num_stages=STAGES):
        b_h = tl.load(p_h + k * BLOCK_K, mask=m_m[:, None], other=0.0)  # [BLOCK_M, BLOCK_K]
        b_w = tl.load(p_w + k * (BLOCK_K // 2))  # [BLOCK_N, BLOCK_K / 2]
        b_s = tl.load(p_s + k * (BLOCK_K // 32))
        acc = _multiply(acc, b_h, b_w, b_s, PRODUCT)
    pair = tl.load(sorted_pairs + o_m, mask=m_m, other=0).to(tl.int64)
    tl.store(y + pair[:, None] * hidden + o_n[None, :], acc.to(y.dtype.element_ty), mask=m_m[:, None])


@triton.jit
def _combine_kernel(
    y,
    topk_weights,
    pair_expert,
    out,
    routed_scaling,
    stride_weights,
    stride_out,
    hidden,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[row] = routed_scaling * sum over the slots, in their order, of weight * y; pairs without an expert add 0."""
    row = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(TOPK):
        pair = row * TOPK + slot
        here = tl.load(pair_expert + pair) >= 0
        weight = tl.load(topk_weights + row * stride_weights + slot)
        b_y = tl.load(y + pair * hidden + o_n, mask=(o_n < hidden) & here, other=0.0).to(tl.float32)
        acc += tl.where(here, weight * b_y, 0.0)
    tl.store(out + row * stride_out + o_n, (acc * routed_scaling).to(out.dtype.element_ty), mask=o_n < hidden)


# ---- launches: grids and argument order, nothing else


def launch_gate_up(x, w13, w13_scale, tiles, h, *, up_first, limit, topk, product, blocks):
    """tiles: ops' Tiles; blocks: the table's Blocks. h is [pairs, inter] in sorted order.

    One launch for each height of tiles: block_m, and a half and a quarter of it for what is left over.
    """
    hidden, inter = x.shape[1], w13.shape[1] // 2
    for height, (expert, begin, end) in tiles.lists:
        _gate_up_kernel[(expert.shape[0] * (inter // blocks.block_n),)](
            *(x, w13, w13_scale, tiles.pairs, expert, begin, end, h),
            *(x.stride(0), w13.stride(0), w13_scale.stride(0)),
            *((inter, 0) if up_first else (0, inter)),
            *(limit, hidden, inter),
            TOPK=topk,
            PRODUCT=product,
            **_meta(height, blocks),
        )


def launch_down(h, w2, w2_scale, tiles, y, *, product, blocks):
    """y is [pairs, hidden] in the pairs' own order."""
    hidden, inter = w2.shape[1], h.shape[1]
    for height, (expert, begin, end) in tiles.lists:
        _down_kernel[(expert.shape[0] * (hidden // blocks.block_n),)](
            *(h, w2, w2_scale, tiles.pairs, expert, begin, end, y),
            *(w2.stride(0), w2_scale.stride(0), hidden, inter),
            PRODUCT=product,
            **_meta(height, blocks),
        )


def _meta(block_m: int, blocks) -> dict:
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": blocks.block_n,
        "BLOCK_K": blocks.block_k,
        "STAGES": blocks.stages,
        "num_warps": blocks.warps,
    }


def launch_combine(y, topk_weights, pair_expert, out, *, routed_scaling):
    rows, hidden = out.shape
    _combine_kernel[(rows, triton.cdiv(hidden, COMBINE_BLOCK))](
        *(y, topk_weights, pair_expert, out, routed_scaling, topk_weights.stride(0), out.stride(0), hidden),
        TOPK=topk_weights.shape[1],
        BLOCK=COMBINE_BLOCK,
        num_warps=4,
    )

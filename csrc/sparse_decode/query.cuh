// q normed and rotated on the way in, for callers that have it as the projection left it: each head of 512 is divided by its root
// mean square, rounded to bf16, and the last 64 of it are rotated by the row's position. To the bit what SGLang's fused_q_norm_rope
// (main_norm_rope.cuh) writes: a warp a head, the same order of the sum, the same products in the fused multiply-adds, the same roundings.
#pragma once

#include "roles.cuh"
#include "work.cuh"

namespace dsv4::sparse_decode {

// A block's q in shared memory: 16 bytes of a head at a time, xor-swizzled so that the operands of an mma load without bank conflicts.
// It lies where the first leaf's scores will.
using QueryRows = uint4[kBlockHeads][kHeadDim / 8];
static_assert(sizeof(QueryRows) <= sizeof(SharedMemoryPlan::scores[0]), "q in place of the first scores");
static_assert(kHeadDim == 2 * 32 * 8 && kRopeDim == 8 * 8, "a lane has two vectors of a head, the last eight lanes what is rotated");
static_assert(kBlockHeads % kScoreWarps == 0, "heads of a warp");

__device__ __forceinline__ QueryRows& query_rows(SharedMemoryPlan& sm) { return *reinterpret_cast<QueryRows*>(sm.scores[0]); }
__device__ __forceinline__ int query_swizzle(int head) { return (head & 3) << 1 | (head >> 2 & 1); }

// between the warps of the score team
__device__ __forceinline__ void score_sync() { sync_threads<3, 32 * kScoreWarps>(); }

__device__ __forceinline__ float sum_of_squares(float sum, const uint4& v) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = bf16_low(word_of(v, i)), high = bf16_high(word_of(v, i));
    sum = fmaf(high, high, fmaf(low, low, sum));
  }
  return sum;
}

__device__ __forceinline__ uint4 scaled(const uint4& v, float by) {
  const auto times = [by](uint32_t pair) { return pack_bf16x2(bf16_low(pair) * by, bf16_high(pair) * by); };
  return make_uint4(times(v.x), times(v.y), times(v.z), times(v.w));
}

// four pairs by (cosine, sine) of two pairs each
__device__ __forceinline__ uint4 rotated(const uint4& v, const float4& first, const float4& second) {
  const auto turn = [](uint32_t pair, float c, float s) {
    const float a = bf16_low(pair), b = bf16_high(pair);
    return pack_bf16x2(fmaf(a, c, -(b * s)), fmaf(a, s, b * c));
  };
  return make_uint4(turn(v.x, first.x, first.y), turn(v.y, first.z, first.w), turn(v.z, second.x, second.y), turn(v.w, second.z, second.w));
}

// The heads of this warp of the score team, from memory to query_rows().
__device__ __forceinline__ void norm_query(const Params& p, SharedMemoryPlan& sm, int row, int group, int warp) {
  constexpr int kHeads = kBlockHeads / kScoreWarps;
  const int lane = threadIdx.x & 31, first_head = warp * kHeads;
  uint4 v[kHeads][2];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const int head = group * kBlockHeads + first_head + h;
    const uint4* src = reinterpret_cast<const uint4*>(p.q + row * p.q_stride_row + head * p.q_stride_head) + lane;
    const bool live = head < p.heads;
    v[h][0] = live ? src[0] : make_uint4(0, 0, 0, 0);
    v[h][1] = live ? src[32] : make_uint4(0, 0, 0, 0);
  }
  const bool rotates = lane >= 24;
  float4 turn[2] = {};
  if (rotates) {
    const int64_t position = p.query.position_bytes == 8 ? __ldg(static_cast<const int64_t*>(p.query.positions) + row)
                                                         : __ldg(static_cast<const int32_t*>(p.query.positions) + row);
    const float4* from = reinterpret_cast<const float4*>(p.query.rotation + position * kRopeDim) + (lane - 24) * 2;
    turn[0] = __ldg(from);
    turn[1] = __ldg(from + 1);
  }
  float sum[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) sum[h] = sum_of_squares(sum_of_squares(0.f, v[h][0]), v[h][1]);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes >>= 1)
#pragma unroll
    for (int h = 0; h < kHeads; ++h) sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], lanes);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const float factor = rsqrtf(fmaf(sum[h], 1.f / kHeadDim, p.query.eps));
    uint4* to = query_rows(sm)[first_head + h];
    const int at = lane ^ query_swizzle(first_head + h);
    const uint4 last = scaled(v[h][1], factor);
    to[at] = scaled(v[h][0], factor);
    to[at + 32] = rotates ? rotated(last, turn[0], turn[1]) : last;
  }
}

}  // namespace dsv4::sparse_decode

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
constexpr int kNormWarps = kValueWarps + kScoreWarps;  // one a head: both teams have nothing else to do at first
constexpr int kTurnLanes = kRopeDim / 8;               // lanes whose second vector is rotated: the last
static_assert(kNormWarps == kBlockHeads, "a warp a head");
static_assert(sizeof(QueryRows) <= sizeof(SharedMemoryPlan::scores[0]), "q in place of the first scores");
static_assert(kHeadDim == 2 * 32 * 8 && kRopeDim % 8 == 0, "a lane has two vectors of a head");

__device__ __forceinline__ QueryRows& query_rows(SharedMemoryPlan& sm) { return *reinterpret_cast<QueryRows*>(sm.scores[0]); }
__device__ __forceinline__ int query_swizzle(int head) { return (head & 3) << 1 | (head >> 2 & 1); }

// between the warps that norm
__device__ __forceinline__ void norm_sync() { sync_threads<3, 32 * kNormWarps>(); }

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

// four pairs by (cosine, sine) of two pairs each, floats
__device__ __forceinline__ uint4 rotated(const uint4& v, const uint4& first, const uint4& second) {
  const auto turn = [](uint32_t pair, uint32_t cosine, uint32_t sine) {
    const float a = bf16_low(pair), b = bf16_high(pair), c = __uint_as_float(cosine), s = __uint_as_float(sine);
    return pack_bf16x2(fmaf(a, c, -(b * s)), fmaf(a, s, b * c));
  };
  return make_uint4(turn(v.x, first.x, first.y), turn(v.y, first.z, first.w), turn(v.z, second.x, second.y), turn(v.w, second.z, second.w));
}

// What a lane needs of its warp's head: asked for in front of the row's lengths, which come meanwhile.
struct RawQuery {
  uint4 v[2];
  uint32_t position;

  __device__ __forceinline__ void load(const Params& p, int row, int group, int warp) {
    const int head = min(group * kBlockHeads + warp, p.heads - 1);
    const uint16_t* src = p.q + row * p.q_stride_row + head * p.q_stride_head + 8 * (threadIdx.x & 31);
    v[0] = load_16_now(src);
    v[1] = load_16_now(src + 32 * 8);
    position = load_now(reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(p.query.positions) +
                                                          static_cast<int64_t>(row) * p.query.position_bytes));  // the low half
  }
};

// To query_rows(), by the warp that has the head.
__device__ __forceinline__ void norm_query(const Params& p, SharedMemoryPlan& sm, const RawQuery& q, int warp) {
  const int lane = threadIdx.x & 31;
  const float* from = p.query.rotation + static_cast<int64_t>(q.position) * kRopeDim + lane % kTurnLanes * 8;
  const uint4 first = load_16_now(from), second = load_16_now(from + 4);
  float sum = sum_of_squares(sum_of_squares(0.f, q.v[0]), q.v[1]);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  const float factor = rsqrtf(fmaf(sum, 1.f / kHeadDim, p.query.eps));
  uint4* to = query_rows(sm)[warp];
  const int at = lane ^ query_swizzle(warp);
  const uint4 last = scaled(q.v[1], factor), turned = rotated(last, first, second);
  to[at] = scaled(q.v[0], factor);
  to[at + 32] = lane >= 32 - kTurnLanes ? turned : last;
}

}  // namespace dsv4::sparse_decode

// The fold of softmax partials, the same arithmetic in registers and over memory: references are integers in log2, so every
// rescaling is by an exact power of two and the only rounding is that of the sum.
#pragma once

#include "../device/numbers.cuh"
#include "config.h"
#include "sparse_decode.h"

namespace dsv4::sparse_decode {

// what the old and the new part are multiplied with
__device__ __forceinline__ float2 fold_factors(float old_reference, float new_reference) {
  const float reference = fmaxf(old_reference, new_reference);
  return make_float2(pow2_exact(old_reference - reference), pow2_exact(new_reference - reference));
}

__device__ __forceinline__ float load_sink(const Params& p, int head) {
  return p.attn_sink != nullptr ? p.attn_sink[head] : -__int_as_float(0x7f800000);
}
// The output factor 1 / (sum + 2^(sink - reference)); 0 where nothing is valid or the sink is +inf.
__device__ __forceinline__ float output_factor(float sink, const Fold& fold) {
  const float total = fold.sum + exp2_approx(sink * kLog2e<float> - fold.reference);
  return fold.sum > 0.f ? reciprocal(total) : 0.f;
}
__device__ __forceinline__ float output_factor(const Params& p, int head, const Fold& fold) { return output_factor(load_sink(p, head), fold); }
__device__ __forceinline__ float lse_of(const Fold& fold) {
  return fold.sum > 0.f ? (fold.reference + log2f(fold.sum)) * 0.6931471805599453f : __int_as_float(0x7f800000);
}

// Accumulator of a thread of the value team: [segment of 16 of the warp's 64 dimensions][head g, g + 8][4]. The four are two tiles of an
// mma by its two columns: for an E4M3 tile the even and the odd dimensions, for the rotary tile two runs of eight.
using Accumulator = float[4][2][4];

// first of the two dimensions of pair `half` (of in_dimension_order) of a thread's four at (warp, segment, j)
__device__ __forceinline__ int dimension_of(int warp, int segment, int j, int half) {
  return warp * kTileDim + 16 * segment + (warp == kNumNopeTiles ? 2 * j + 8 * half : 4 * j + 2 * half);
}
__device__ __forceinline__ float4 in_dimension_order(const float (&v)[4], bool rotary) {
  return rotary ? make_float4(v[0], v[1], v[2], v[3]) : make_float4(v[0], v[2], v[1], v[3]);
}

// This block's head group, split and row. Read anew at every use: they are not worth registers in the loops.
__device__ __forceinline__ int block_group() {
  int v;
  asm volatile("mov.u32 %0, %ctaid.x;" : "=r"(v));
  return v;
}
__device__ __forceinline__ int block_split() {
  int v;
  asm volatile("mov.u32 %0, %ctaid.y;" : "=r"(v));
  return v;
}
__device__ __forceinline__ int block_row() {
  int v;
  asm volatile("mov.u32 %0, %ctaid.z;" : "=r"(v));
  return v;
}
__device__ __forceinline__ int item_slot() { return block_row() * gridDim.x + block_group(); }

__device__ __forceinline__ uint32_t* control_of(const Params& p) { return p.control + static_cast<int64_t>(item_slot()) * kControlWords; }

// Partials: [slot][unit][float4 of (warp, segment, head half, lane) in dimension order, then (reference, sum) per head].
__device__ __forceinline__ float* partial_of(const Params& p, int slot, int unit) {
  return p.partials + (static_cast<int64_t>(slot) * p.unit_slots + unit) * kPartialFloats;
}
__device__ __forceinline__ float4* vectors_of(float* partial, int warp) {
  return reinterpret_cast<float4*>(partial) + warp * (8 * 32) + (threadIdx.x & 31);
}
__device__ __forceinline__ float2* stats_of(float* partial) { return reinterpret_cast<float2*>(partial + 4 * kPartialVectors); }

__device__ __forceinline__ void store_vectors(float* partial, int warp, bool rotary, const Accumulator& acc) {
  float4* vectors = vectors_of(partial, warp);
#pragma unroll
  for (int i = 0; i < 8; ++i) __stcg(vectors + i * 32, in_dimension_order(acc[i >> 1][i & 1], rotary));
}

// acc = partial * factor.x + acc * factor.y, by the threads that wrote it; `factors` of the unit that is in acc, by head
__device__ __forceinline__ void fold_vectors(float* partial, const float2 (&factors)[kBlockHeads], int warp, bool rotary, Accumulator& acc) {
  const float4* vectors = vectors_of(partial, warp);
  const float2 factor[2] = {factors[(threadIdx.x & 31) >> 2], factors[((threadIdx.x & 31) >> 2) + 8]};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 stored = __ldcg(vectors + i * 32);
    const float4 old = rotary ? stored : make_float4(stored.x, stored.z, stored.y, stored.w);
    const float2 f = factor[i & 1];
    float (&v)[4] = acc[i >> 1][i & 1];
    v[0] = fmaf(v[0], f.y, old.x * f.x);
    v[1] = fmaf(v[1], f.y, old.y * f.x);
    v[2] = fmaf(v[2], f.y, old.z * f.x);
    v[3] = fmaf(v[3], f.y, old.w * f.x);
  }
}

}  // namespace dsv4::sparse_decode

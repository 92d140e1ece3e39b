// The last addition of what a sublayer gives on one card: by a kernel of its own (fp8_linear's merge_kernel, mxfp4_moe's add_shared), or
// where the sum between the cards reads it (mhc/term.cuh).
#pragma once

#include "numbers.cuh"

namespace dsv4 {

// Sums of parts of the inputs, in pairs.
template <int kSplits>
__device__ __forceinline__ float4 merged(float4 (&sum)[kSplits]) {
#pragma unroll
  for (int width = 1; width < kSplits; width *= 2) {
#pragma unroll
    for (int s = 0; s < kSplits; s += 2 * width) sum[s] = add(sum[s], sum[s + width]);
  }
  return sum[0];
}
__device__ __forceinline__ uint2 rounded(const float4& v) { return make_uint2(pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w)); }

// shared + scaling * routed, two of each: float32, rounded once, which is torch's add_ to the bit.
__device__ __forceinline__ uint32_t with_routed(uint32_t shared, uint32_t routed, float scaling) {
  return pack_bf16x2(fmaf(scaling, bf16_low(routed), bf16_low(shared)), fmaf(scaling, bf16_high(routed), bf16_high(shared)));
}
__device__ __forceinline__ uint4 with_routed(const uint4& shared, const uint4& routed, float scaling) {
  return make_uint4(with_routed(shared.x, routed.x, scaling), with_routed(shared.y, routed.y, scaling), with_routed(shared.z, routed.z, scaling),
                    with_routed(shared.w, routed.w, scaling));
}

}  // namespace dsv4

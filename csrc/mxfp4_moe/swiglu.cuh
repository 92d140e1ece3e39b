// Gate and up to what the down projection reads.
#pragma once

#include "../device/numbers.cuh"

namespace dsv4::mxfp4_moe {

// min and max that let a NaN through, and make one of an infinity: a scale byte of 255
__device__ __forceinline__ float clamp_above(float v, float limit) { return v > limit ? fmaf(v, 0.f, limit) : v; }
__device__ __forceinline__ float clamp_below(float v, float limit) { return v < limit ? fmaf(v, 0.f, limit) : v; }

__device__ __forceinline__ float swiglu_f32(float gate_sum, float up_sum, float limit) {
  const float gate = clamp_above(gate_sum, limit), up = clamp_below(clamp_above(up_sum, limit), -limit);
  return __fdividef(gate, 1.f + exp2_approx(-kLog2e<float> * gate)) * up;
}
__device__ __forceinline__ uint16_t swiglu(float gate_sum, float up_sum, float limit) {
  return static_cast<uint16_t>(pack_bf16x2(swiglu_f32(gate_sum, up_sum, limit), 0.f) & 0xffffu);
}

}  // namespace dsv4::mxfp4_moe

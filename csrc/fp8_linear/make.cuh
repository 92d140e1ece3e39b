// What is made of x before it is multiplied, 8 numbers at a time, by the product's kernel or by one of its own: the same bits.
//
//   SwiGLU   bf16(silu(min(gate, limit)) * clamp(up, -limit, limit)), clamped in bf16, the rest in fp32
//   norm     bf16(x * rsqrt(mean(x^2) + eps) * w), in fp32
#pragma once

#include "../device/barriers.cuh"
#include "../device/numbers.cuh"
#include "config.h"

namespace dsv4::fp8_linear {

constexpr int kUnit = 8;  // numbers of 16 bytes

// Two pairs. A NaN becomes the limit. These are the instructions of SGLang's kernel.
__device__ __forceinline__ uint32_t gated(uint32_t gates, uint32_t ups, uint32_t limits) {
  asm("min.bf16x2 %0, %0, %1;" : "+r"(gates) : "r"(limits));
  asm("max.bf16x2 %0, %0, %2; min.bf16x2 %0, %0, %1;" : "+r"(ups) : "r"(limits), "r"(limits ^ 0x80008000u));
  const auto product = [](float gate, float up) {
    float y;
    asm("{ .reg .f32 e; mul.ftz.f32 e, %1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.ftz.f32 e, e, 0f3F800000;\n"
        "  div.approx.ftz.f32 e, %1, e; mul.ftz.f32 %0, e, %2; }"
        : "=f"(y)
        : "f"(gate), "f"(up));
    return y;
  };
  return pack_bf16x2(product(bf16_low(gates), bf16_low(ups)), product(bf16_high(gates), bf16_high(ups)));
}
__device__ __forceinline__ uint4 gated(const uint4& g, const uint4& u, uint32_t limits) {
  return make_uint4(gated(g.x, u.x, limits), gated(g.y, u.y, limits), gated(g.z, u.z, limits), gated(g.w, u.w, limits));
}

// Squares are summed in so many sums of a lane: sum s has of each 1,024 inputs those from 256 * s on. Each is summed over the
// lanes, then the four: for 1,024 inputs the order of FlashInfer's CUDA kernel.
constexpr int kNormSums = 4;

__device__ __forceinline__ void add_squares(float& sum, const uint4& v) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = bf16_low(word_of(v, i)), high = bf16_high(word_of(v, i));
    sum = fmaf(high, high, fmaf(low, low, sum));
  }
}
__device__ __forceinline__ float root_of_sum(float a, float b, float c, float d, float inverse, float eps) {
  return rsqrtf(fmaf((a + c) + (b + d), inverse, eps));
}
__device__ __forceinline__ float root_of(const float (&sums)[kNormSums], float inverse, float eps) {
  return root_of_sum(sum_of_lanes(sums[0]), sum_of_lanes(sums[1]), sum_of_lanes(sums[2]), sum_of_lanes(sums[3]), inverse, eps);
}
__device__ __forceinline__ uint32_t normalized(uint32_t v, float root, uint32_t w) {
  return pack_bf16x2(bf16_low(v) * root * bf16_low(w), bf16_high(v) * root * bf16_high(w));
}
__device__ __forceinline__ uint4 normalized(const uint4& v, float root, const uint4& w) {
  return make_uint4(normalized(v.x, root, w.x), normalized(v.y, root, w.y), normalized(v.z, root, w.z), normalized(v.w, root, w.w));
}

}  // namespace dsv4::fp8_linear

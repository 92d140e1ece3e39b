// The arithmetic of SGLang's two launches, instruction by instruction, so that entries have its bits: it compiles the pooling
// with fast math (subnormals are zero, approximate exponential and quotient) and what follows without.
#pragma once

#include <cuda_fp8.h>

#include <cfloat>
#include <cstdint>

#include "../device/numbers.cuh"
#include "../kv_page_layout.h"
#include "compressor.h"

namespace dsv4::compressor {

constexpr float kScaleFloor = 1e-4f;  // of a tile's greatest value
constexpr float kE4m3Max = 448.f, kE2m1Max = 6.f;

__device__ __forceinline__ float add_ftz(float a, float b) {
  float d;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
__device__ __forceinline__ float mul_ftz(float a, float b) {
  float d;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
__device__ __forceinline__ float fma_ftz(float a, float b, float c) {
  float d;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}
__device__ __forceinline__ float divide_ftz(float a, float b) {
  float d;
  asm("div.full.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
// e^(a - b)
__device__ __forceinline__ float exp_of_difference(float a, float b) { return exp2_approx(mul_ftz(add_ftz(a, -b), kLog2e<float>)); }

// A softmax's parts over some tokens: greatest score, sum of the exponentials, and of the values times them.
struct Partial {
  float most, sum, product;

  __device__ __forceinline__ static Partial of(const float (&values)[8], const float (&scores)[8]) {
    Partial r = {scores[0], 0.f, 0.f};
#pragma unroll
    for (int j = 1; j < 8; ++j) r.most = fmaxf(r.most, scores[j]);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float power = exp_of_difference(scores[j], r.most);
      r.product = fma_ftz(values[j], power, r.product);
      r.sum = add_ftz(r.sum, power);
    }
    return r;
  }
  __device__ __forceinline__ float value() const { return divide_ftz(product, sum); }
};

template <int kLanes>
__device__ __forceinline__ float max_of_lanes(float x) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}

// (a, b) times the unit number of cosine and sine
__device__ __forceinline__ void rotate(float& a, float& b, float2 by) {
  const float real = fmaf(a, by.x, -(b * by.y));
  b = fmaf(a, by.y, b * by.x);
  a = real;
}

__device__ __forceinline__ uint16_t pack_e4m3(float low, float high) {
  const auto clip = [](float x) { return fmaxf(fminf(x, kE4m3Max), -kE4m3Max); };
  return __nv_cvt_float2_to_fp8x2(make_float2(clip(low), clip(high)), __NV_SATFINITE, __NV_E4M3);
}
// The exponent byte of the power of two at or above x; and the reciprocal of that power.
__device__ __forceinline__ int exponent_up(float x) {
  const uint32_t bits = __float_as_uint(x);
  return static_cast<int>(bits >> 23 & 0xff) + ((bits & 0x7fffff) != 0);
}
__device__ __forceinline__ float reciprocal_power(int exponent) { return __uint_as_float(static_cast<uint32_t>(254 - exponent) << 23); }

// by thresholds: ties go towards zero, and -0 is +0
__device__ __forceinline__ uint32_t e2m1(float x) {
  const float size = fminf(fabsf(x), kE2m1Max);
  const uint32_t code = (size > 0.25f) + (size > 0.75f) + (size > 1.25f) + (size > 1.75f) + (size > 2.5f) + (size > 3.5f) + (size > 5.f);
  return x < 0.f && code != 0 ? code | 8 : code;
}

}  // namespace dsv4::compressor

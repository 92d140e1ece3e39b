// A thread's eight numbers of a row that is x * rsqrt(mean(x^2) + eps) * weight, with the roundings of FlashInfer's CUDA kernel.
#pragma once

#include "../device/numbers.cuh"

namespace dsv4::fp8_linear {

__device__ __forceinline__ float sum_of_squares(const uint4& x) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = bf16_low(word_of(x, i)), high = bf16_high(word_of(x, i));
    sum = fmaf(high, high, fmaf(low, low, sum));
  }
  return sum;
}

__device__ __forceinline__ uint4 normed(const uint4& x, float root, const uint4& weight) {
  uint32_t y[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t v = word_of(x, i), w = word_of(weight, i);
    y[i] = pack_bf16x2(bf16_low(v) * root * bf16_low(w), bf16_high(v) * root * bf16_high(w));
  }
  return make_uint4(y[0], y[1], y[2], y[3]);
}

}  // namespace dsv4::fp8_linear

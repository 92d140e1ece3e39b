// A thread's eight numbers of a row that is x * rsqrt(mean(x^2) + eps) * weight, with the roundings of FlashInfer's CUDA kernel: their
// squares here, their product in times_weight.cuh.
#pragma once

#include "../device/numbers.cuh"
#include "../device/times_weight.cuh"

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

}  // namespace dsv4::fp8_linear

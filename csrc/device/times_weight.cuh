// The last step of a norm: eight numbers of a row, times the row's root and the weights, rounded to bf16 once.
#pragma once

#include "numbers.cuh"

namespace dsv4 {

__device__ __forceinline__ uint4 times_weight(const uint4& x, float root, const uint4& weight) {
  uint32_t y[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t v = word_of(x, i), w = word_of(weight, i);
    y[i] = pack_bf16x2(bf16_low(v) * root * bf16_low(w), bf16_high(v) * root * bf16_high(w));
  }
  return make_uint4(y[0], y[1], y[2], y[3]);
}

}  // namespace dsv4

// Keys whose unsigned order is that of the logits (config.h).
#pragma once

#include "config.h"

namespace dsv4::index_select {

__device__ __forceinline__ uint32_t ordered_key(float x) {
  if (x != x) return 0;
  const uint32_t bits = __float_as_uint(x + 0.f);  // -0 becomes +0
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float logit_of(uint32_t key) {
  if (key == 0) return __uint_as_float(0x7fffffffu);
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

}  // namespace dsv4::index_select

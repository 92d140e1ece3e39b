// The greatest of many numbers as torch.argmax has it: the first of equals, both zeros being equal, and the first NaN before all.
#pragma once

#include <cstdint>

namespace dsv4 {

constexpr uint32_t kNan = 0xffffffffu, kNowhere = 0xffffffffu;
constexpr unsigned kAll = 0xffffffffu;

// Greater where the number is, never 0; of a NaN the greatest of all.
__device__ __forceinline__ uint32_t key_of_number(float v) {
  const uint32_t bits = __float_as_uint(v == 0.f ? 0.f : v);
  return v == v ? bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u) : kNan;
}

// x: key, y: place. Of a warp's the greatest key's, of equal ones the first.
__device__ __forceinline__ uint2 first_greatest(const uint2& own) {
  const uint32_t greatest = __reduce_max_sync(kAll, own.x);
  return make_uint2(greatest, __reduce_min_sync(kAll, own.x == greatest ? own.y : kNowhere));
}

}  // namespace dsv4

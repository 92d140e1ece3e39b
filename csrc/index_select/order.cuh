// Ordered keys, and small block-wide steps.
#pragma once

#include "../device.cuh"
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

template <int kThreadsOfTeam>
__device__ __forceinline__ void sync_team(int id) {
  if constexpr (kThreadsOfTeam == 32) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreadsOfTeam) : "memory");
  }
}

__device__ __forceinline__ uint32_t inclusive_sum(uint32_t v) {  // over the warp
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, v, d);
    if (lane >= d) v += other;
  }
  return v;
}

// entries of a row that lie in its chunk from `first`
__device__ __forceinline__ int entries_in(int length, int first, int capacity) { return max(0, min(length - first, capacity)); }

// the greatest length of a group of rows, clamped to the width
__device__ __forceinline__ int group_length(const Split& s, int first_row) {
  int length = 0;
  for (int r = first_row; r < min(first_row + s.group_rows, s.rows); ++r) length = max(length, s.lengths[r]);
  return min(max(length, 0), s.width);
}

}  // namespace dsv4::index_select

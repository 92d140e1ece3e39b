// Ordered keys, and small block-wide steps.
#pragma once

#include <cstring>

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
    sync_threads<kThreadsOfTeam>(id);
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

__device__ __forceinline__ void cp_async_4(uint32_t dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}

// Loads where they stand in the code, in this order: queries, keys, scales and page ids are what kernels in front have written, so they
// are not loaded as memory that never changes (.nc).
__device__ __forceinline__ uint4 load_16(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
template <typename T>
__device__ __forceinline__ T load_word(const T* p) {
  static_assert(sizeof(T) == 4);
  uint32_t v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
  T word;
  memcpy(&word, &v, sizeof(word));
  return word;
}
__device__ __forceinline__ uint32_t load_byte(const uint8_t* p) {
  uint32_t v;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
// A word that was there before the kernel in front of this one's, for which that one has waited before it let this one start. At the scope
// of the device: what an L1 may still have from an earlier launch is not looked at.
__device__ __forceinline__ int32_t load_older(const int32_t* p) {
  int32_t v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// entries of a row that lie in its chunk from `first`
__device__ __forceinline__ int entries_in(int length, int first, int capacity) { return max(0, min(length - first, capacity)); }

// the greatest length of a group of rows, clamped to the width; kOlder: by load_older
template <bool kOlder = false>
__device__ __forceinline__ int group_length(const Split& s, int first_row) {
  int length = 0;
#pragma unroll
  for (int r = 0; r < kSharedRows; ++r)
    if (r < s.group_rows && first_row + r < s.rows) length = max(length, kOlder ? load_older(s.lengths + first_row + r) : s.lengths[first_row + r]);
  return min(max(length, 0), s.width);
}

}  // namespace dsv4::index_select

// How long a card's stores take to be seen by another: rounds of sending and answering, by one block.
#pragma once

#include "all_reduce.h"
#include "system.cuh"

namespace dsv4::all_reduce {

constexpr int kPingThreads = 512;
constexpr int kPingLooksBetween = 1024;  // looks at a place between two at the clock

// Waits until all words of a vector are `round`'s; false: out of patience.
__device__ __forceinline__ bool has_round(const uint4* place, uint32_t round, uint64_t patience_ns) {
  uint64_t start = 0;
#pragma unroll 1
  for (uint32_t looks = 1;; ++looks) {
    const uint4 v = load_system(place);
    if (v.x == round && v.y == round && v.z == round && v.w == round) return true;
    if (looks % kPingLooksBetween != 0) continue;
    const uint64_t now = now_ns();
    start = start == 0 ? now : start;
    if (now - start > patience_ns) return false;
  }
}

__global__ void __launch_bounds__(kPingThreads) ping_kernel(const __grid_constant__ Ping p) {
  uint64_t start = 0;
  int is_lost = 0;
#pragma unroll 1
  for (uint32_t round = 1; round <= p.rounds; ++round) {
    if (round == p.warm_ups + 1) start = now_ns();
    const uint4 word = make_uint4(round, round, round, round);
#pragma unroll 1
    for (int64_t v = threadIdx.x; v < p.vectors; v += kPingThreads) {
      if (p.sends) {
        store_system(p.there + v, word);
      } else if (!has_round(p.here + v, round, p.patience_ns)) {
        is_lost = 1;
        break;
      }
    }
    if (p.sends && threadIdx.x == 0 && !has_round(p.here, round, p.patience_ns)) is_lost = 1;
    if (__syncthreads_or(is_lost)) return;
    if (!p.sends && threadIdx.x == 0) store_system(p.there, word);
  }
  if (threadIdx.x == 0) *p.took_ns = now_ns() - start;
}

}  // namespace dsv4::all_reduce

// The splits' sums by the rest of the tree, in the launch that made them. The warps that have the same outputs, one of each split, find
// each other by a word, zero before a call and after it; none waits for another.
#pragma once

#include "../device/barriers.cuh"
#include "../device/numbers.cuh"
#include "config.h"

namespace dsv4::fp8_linear {

using dsv4::add;
__device__ __forceinline__ float2 add(const float2& a, const float2& b) { return make_float2(a.x + b.x, a.y + b.y); }

// What the splits of a tile exchange: `kCount` vectors of a lane.
template <typename Vector, int kCount>
struct Merge {
  static constexpr int kInFlight = kCount == 8 ? 24 : 12;  // vectors of a lane on their way
  uint32_t* word;
  Vector* partial;  // this lane's, of split 0
  int stride;       // between a lane's vectors
  int split;

  __device__ __forceinline__ Vector* of(int other) const { return partial + static_cast<int64_t>(other) * kCount * stride; }
  __device__ __forceinline__ void put(const Vector (&sums)[kCount], int at) const {
    Vector* const to = of(at);
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i * stride] = sums[i];
  }
  // to the word, from all lanes; what it was, to all lanes
  __device__ __forceinline__ uint32_t tell(uint32_t what) const {
    uint32_t old = 0;
    __syncwarp();
    if (threadIdx.x % 32 == 0) old = add_acq_rel(word, what);
    __syncwarp();
    return __shfl_sync(0xffffffff, old, 0);
  }
  __device__ __forceinline__ uint32_t look() const {
    uint32_t found = 0;
    if (threadIdx.x % 32 == 0) found = load_acquire(word);
    __syncwarp();
    return __shfl_sync(0xffffffff, found, 0);
  }
  __device__ __forceinline__ void clear() const {
    if (threadIdx.x % 32 == 0) *word = 0;
  }

  // Whether this warp came last: its sums then are all splits'.
  template <int kSplits>
  __device__ __forceinline__ bool flat(Vector (&sums)[kCount], int how) const {
    if (how == kMergeBlock) {
      put(sums, split);
      __syncthreads();
      int last = 0;
      if (threadIdx.x == 0) last = add_acq_rel(word, 1) == kSplits - 1;
      if (!__syncthreads_or(last)) return false;
    } else if (how == kMergeBlind || look() != kSplits - 1) {
      put(sums, split);
      if (tell(1) != kSplits - 1) return false;
    }
    constexpr int kTogether = kInFlight / (kSplits - 1) < 1 ? 1 : kInFlight / (kSplits - 1);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i > 0 && i % kTogether == 0) __syncwarp();
      Vector v[kSplits];
      v[0] = sums[i];
#pragma unroll
      for (int s = 1; s < kSplits; ++s) v[s] = __ldcg(of(split ^ s) + i * stride);
#pragma unroll
      for (int width = 1; width < kSplits; width *= 2) {
#pragma unroll
        for (int s = 0; s < kSplits; s += 2 * width) v[s] = add(v[s], v[s + width]);
      }
      sums[i] = v[0];
    }
    clear();
    return true;
  }

  static __device__ __forceinline__ uint32_t bit(int level, int node) { return 1u << (8 * level + node); }
  // The same pair by pair: the second of two adds the first's.
  __device__ __forceinline__ bool tree(Vector (&sums)[kCount], int splits) const {
    uint32_t known = look();
    if (splits == 4) {
      const uint32_t all = bit(0, split ^ 1) | bit(1, split / 2 ^ 1);
      if ((known & all) == all) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          if (i > 0 && i % (kInFlight / 2) == 0) __syncwarp();
          const Vector a = __ldcg(of(split ^ 1) + i * stride), b = __ldcg(of((split / 2 ^ 1) * 2) + i * stride);
          sums[i] = add(add(sums[i], a), b);
        }
        clear();
        return true;
      }
    }
    int node = split;
    for (int level = 0; 1 << level < splits; ++level, node /= 2) {
      const uint32_t theirs = bit(level, node ^ 1);
      if (!(known & theirs)) {
        put(sums, node << level);
        known = tell(bit(level, node));
        if (!(known & theirs)) return false;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i > 0 && i % kInFlight == 0) __syncwarp();
        sums[i] = add(sums[i], __ldcg(of((node ^ 1) << level) + i * stride));
      }
    }
    clear();
    return true;
  }

  __device__ __forceinline__ bool run(Vector (&sums)[kCount], int splits, int how) const {
    return how != kMergeTree && splits == 4 ? flat<4>(sums, how) : tree(sums, splits);
  }
};

}  // namespace dsv4::fp8_linear

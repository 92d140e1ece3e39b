// The merge of a row's units, in the same launch: every block of the row waits for the last one and folds its share of the outputs.
#pragma once

#include "config.h"
#include "fold.cuh"
#include "roles.cuh"
#include "sparse_decode.h"

namespace dsv4::sparse_decode {

constexpr long long kPatienceClocks = 200000;  // how long a block waits before it leaves its share to the last one
constexpr int kArrivalsLog2 = 6;               // a row's counter grows by 64 a call, so that it needs no reset
static_assert(kMaxUnits < 1 << kArrivalsLog2, "units of a row fit the counter");

__device__ __forceinline__ Shares plan_shares(const Work& w) {
  const int vectors = ceil_div(kPartialVectors, ceil_div(w.units, w.per_block));
  return {static_cast<uint16_t>(vectors), static_cast<uint16_t>(kMergeVectors / min(vectors, kMathThreads))};
}

constexpr uint32_t kWaitDone = 1, kWaitLast = 2;

// Counts this block's units in and waits for the others. Returns 0 if it gave up (its share then is the last block's, so that other
// kernels may keep blocks of this one off the device for as long as they like, without a deadlock), else kWaitDone, and kWaitLast for
// the block that came last. The first block counts in what is missing to 64.
__device__ __forceinline__ uint32_t arrive_and_wait(uint32_t* control, int my_units, int units, int participant) {
  const uint32_t arrivals = my_units + (participant == 0 ? (1 << kArrivalsLog2) - units : 0);
  const uint32_t old = add_acq_rel(&control[0], arrivals), call = old >> kArrivalsLog2;
  if ((old + arrivals) >> kArrivalsLog2 != call) return kWaitDone | kWaitLast;
  const long long start = clock64();
  while (load_acquire(&control[0]) >> kArrivalsLog2 == call) {
    if (clock64() - start > kPatienceClocks) {
      const uint32_t bit = 1u << participant;
      atomicOr(&control[1], bit);
      __threadfence();
      if (load_acquire(&control[0]) >> kArrivalsLog2 == call) return 0;   // the last block finds the bit
      return atomicAnd(&control[1], ~bit) & bit ? kWaitDone : 0;           // it may have looked before the bit was set
    }
  }
  return kWaitDone;
}

// Of a head, by a warp, a lane having a unit: the units' fold factors, the row's output factor and lse.
__device__ __forceinline__ void prepare_merge(const Params& p, SharedMemoryPlan& sm, MergeMemory& mm, float* partials, int units, int local_head) {
  const int lane = threadIdx.x & 31, head = block_group() * kBlockHeads + local_head;
  const bool live = head < p.heads;
  const float sink = live ? load_sink(p, head) : 0.f;
  Fold fold = {kEmpty, 0.f};
#pragma unroll 1
  for (int u0 = 0; u0 < units; u0 += 32) {
    const int unit = u0 + lane;
    float2 own = make_float2(kEmpty, 0.f);
    if (unit < units) own = __ldcg(stats_of(partials + static_cast<int64_t>(unit) * kPartialFloats) + local_head);
    float before = fold.reference, until = fmaxf(before, own.x);  // the references of the units in front
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) until = fmaxf(until, __shfl_up_sync(0xffffffffu, until, distance));
    const float up = __shfl_up_sync(0xffffffffu, until, 1);
    if (lane > 0) before = up;
    const float2 factor = fold_factors(before, own.x);
    if (unit < units) mm.factors[unit][local_head] = factor;
#pragma unroll 1
    for (int k0 = 0; k0 < min(units - u0, 32); k0 += 4) {  // the sum is what it was where there is no unit
#pragma unroll
      for (int k = k0; k < k0 + 4; ++k)
        fold.sum = fmaf(__shfl_sync(0xffffffffu, own.y, k), __shfl_sync(0xffffffffu, factor.y, k), fold.sum * __shfl_sync(0xffffffffu, factor.x, k));
    }
    fold.reference = __shfl_sync(0xffffffffu, until, 31);
  }
  if (lane == 0) {
    sm.output_factor[local_head] = live ? output_factor(sink, fold) : 0.f;
    if (p.lse != nullptr) mm.lse[local_head] = lse_of(fold);
  }
}

// Folds the units of the row in order, for share `share` of `shares` of the block's heads by dimensions, four dimensions a thread. What a
// loop does it does in few instructions: nobody ran them in this launch, and each costs more to fetch than to issue.
__device__ __forceinline__ void merge_share(const Params& p, SharedMemoryPlan& sm, MergeMemory& mm, float* partials, int units, int share,
                                            bool prepare) {
  const int vectors = sm.shares.vectors, at_once = sm.shares.units_at_once;
  const int first = share * vectors, end = min(first + vectors, kPartialVectors), pitch = min(vectors, kMathThreads);
  for (int e0 = first; e0 < end; e0 += kMathThreads) {
    const int e = e0 + threadIdx.x, lane = e & 31, i = e >> 5 & 7, local_head = (i & 1) * 8 + (lane >> 2);
    const bool live = e < end;
    const float4* mine = mm.vectors + threadIdx.x;
    float acc[4] = {};
#pragma unroll 1
    for (int u0 = 0; u0 < units; u0 += at_once) {
      const int count = min(units - u0, at_once);
      if (live) {
        uint64_t from = reinterpret_cast<uint64_t>(reinterpret_cast<const float4*>(partials + static_cast<int64_t>(u0) * kPartialFloats) + e);
        uint32_t to = shared_address(mine);
#pragma unroll 1
        for (int k = 0; k < count; ++k, from += kPartialFloats * 4, to += pitch * 16) cp_async_16(to, from, true);
      }
      if (prepare) {  // while the partials are on their way
        const int warp = uniform(threadIdx.x >> 5);
        if (warp < kBlockHeads) prepare_merge(p, sm, mm, partials, units, warp);
        math_sync();
      }
      prepare = false;
      cp_async_wait_all();
      if (live) {
        const float4* vector = mine;
        const float2* factor = &mm.factors[u0][local_head];
#pragma unroll 2
        for (int k = 0; k < count; ++k, vector += pitch, factor += kBlockHeads) {
          const float4 v = *vector;
          const float2 f = *factor;
          acc[0] = fmaf(v.x, f.y, acc[0] * f.x);
          acc[1] = fmaf(v.y, f.y, acc[1] * f.x);
          acc[2] = fmaf(v.z, f.y, acc[2] * f.x);
          acc[3] = fmaf(v.w, f.y, acc[3] * f.x);
        }
      }
    }
    const int row = block_row(), head = block_group() * kBlockHeads + local_head;
    if (!live || head >= p.heads) continue;
    const float f = sm.output_factor[local_head];
    uint16_t* out = p.out + row * p.out_stride_row + head * p.out_stride_head;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<uint32_t*>(out + dimension_of(e >> 8, i >> 1, lane & 3, half)) = pack_bf16x2(acc[2 * half] * f, acc[2 * half + 1] * f);
    if (p.lse != nullptr && dimension_of(e >> 8, i >> 1, lane & 3, 0) == 0) p.lse[static_cast<int64_t>(row) * p.heads + head] = mm.lse[local_head];
  }
}

__device__ __forceinline__ void merge_row(const Params& p, SharedMemoryPlan& sm) {
  const int split = block_split();
  math_sync();  // the partials of this block are written
  const int units = sm.work.units, per_block = sm.work.per_block;
  if (threadIdx.x == 0) sm.told = arrive_and_wait(control_of(p), min(per_block, units - split * per_block), units, split);
  math_sync();
  const uint32_t outcome = sm.told;
  if (outcome == 0) return;
  auto& mm = *reinterpret_cast<MergeMemory*>(sm.stages);
  float* partials = partial_of(p, item_slot(), 0);
  bool prepare = true, last = outcome & kWaitLast;
#pragma unroll 1
  for (uint32_t shares = 1u << split; shares != 0;) {
    merge_share(p, sm, mm, partials, units, __ffs(shares) - 1, prepare);
    prepare = false;
    shares &= shares - 1;
    if (shares == 0 && last) {  // and what others left
      if (threadIdx.x == 0) {
        __threadfence();
        sm.told = atomicExch(&control_of(p)[1], 0);
      }
      math_sync();
      shares = sm.told;
      last = false;
    }
  }
}

}  // namespace dsv4::sparse_decode

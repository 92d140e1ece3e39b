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

struct MergeMemory {  // over the gathered rows, which nobody needs any more
  float2 stats[kMaxUnits][kBlockHeads];
  float2 factors[kMaxUnits][kBlockHeads];
  float reference[kBlockHeads];
};
static_assert(sizeof(MergeMemory) <= sizeof(SharedMemoryPlan::stages), "merge memory");

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

// the fold factors of every unit and head, from running maxima
__device__ __forceinline__ void prepare_merge(MergeMemory& mm, const float* partials, int units) {
  for (int i = threadIdx.x; i < units * kBlockHeads; i += kMathThreads) {
    const float* stats = partials + static_cast<int64_t>(i / kBlockHeads) * kPartialFloats + 4 * kPartialVectors;
    mm.stats[i / kBlockHeads][i % kBlockHeads] = __ldcg(reinterpret_cast<const float2*>(stats) + i % kBlockHeads);
  }
  math_sync();
  for (int i = threadIdx.x; i < units * kBlockHeads; i += kMathThreads) {
    const int unit = i / kBlockHeads, head = i % kBlockHeads;
    float before = kEmpty;
#pragma unroll 4
    for (int u = 0; u < unit; ++u) before = fmaxf(before, mm.stats[u][head].x);
    const float own = mm.stats[unit][head].x;
    mm.factors[unit][head] = fold_factors(before, own);
    if (unit == units - 1) mm.reference[head] = fmaxf(before, own);
  }
  math_sync();
}

// Folds the units of the row in order, for share `share` of `shares` of the block's heads by dimensions.
__device__ __forceinline__ void merge_share(const Params& p, MergeMemory& mm, int row, int group, const float* partials, int units, int share,
                                            int shares, bool prepare) {
  constexpr int kPairs = 2 * kPartialVectors, kAhead = 20, kStride = kPartialFloats / 2;
  const int end = kPairs * (share + 1) / shares;
  for (int e0 = kPairs * share / shares; e0 < end; e0 += kMathThreads) {
    const int e = e0 + threadIdx.x;
    const bool live = e < end;
    const float2* src = reinterpret_cast<const float2*>(partials) + e;
    float2 v[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) v[k] = live && k < units ? __ldcg(src + static_cast<int64_t>(k) * kStride) : make_float2(0.f, 0.f);
    if (prepare) prepare_merge(mm, partials, units);  // while the partials are on their way
    prepare = false;
    const int vector = e >> 1, half = e & 1, lane = vector & 31, i = (vector >> 5) & 7, warp = vector >> 8;
    const int local_head = (i & 1) * 8 + (lane >> 2), head = group * kBlockHeads + local_head;
    if (!live || head >= p.heads) continue;
    float2 acc = make_float2(0.f, 0.f);
    float sum = 0.f;
    for (int u0 = 0; u0 < units; u0 += kAhead) {
      if (u0 > 0) {
#pragma unroll
        for (int k = 0; k < kAhead; ++k) v[k] = u0 + k < units ? __ldcg(src + static_cast<int64_t>(u0 + k) * kStride) : make_float2(0.f, 0.f);
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (u0 + k < units) {
          const float2 f = mm.factors[u0 + k][local_head];
          acc.x = fmaf(v[k].x, f.y, acc.x * f.x);
          acc.y = fmaf(v[k].y, f.y, acc.y * f.x);
          sum = fmaf(mm.stats[u0 + k][local_head].y, f.y, sum * f.x);
        }
      }
    }
    const Fold fold{mm.reference[local_head], sum};
    const float f = output_factor(p, head, fold);
    const int dimension = dimension_of(warp, i >> 1, lane & 3, half);
    *reinterpret_cast<uint32_t*>(p.out + row * p.out_stride_row + head * p.out_stride_head + dimension) = pack_bf16x2(acc.x * f, acc.y * f);
    if (dimension == 0 && p.lse != nullptr) p.lse[static_cast<int64_t>(row) * p.heads + head] = lse_of(fold);
  }
}

__device__ __forceinline__ void merge_row(const Params& p, SharedMemoryPlan& sm) {
  uint32_t* control = p.control + static_cast<int64_t>(item_slot()) * kControlWords;
  const int row = block_row(), group = block_group(), split = block_split();
  math_sync();  // the partials of this block are written
  const int units = sm.work.units, per_block = sm.work.per_block, participants = ceil_div(units, per_block);
  if (threadIdx.x == 0) sm.outcome = arrive_and_wait(control, min(per_block, units - split * per_block), units, split);
  math_sync();
  const uint32_t outcome = sm.outcome;
  if (outcome == 0) return;
  auto& mm = *reinterpret_cast<MergeMemory*>(sm.stages);
  const float* partials = partial_of(p, item_slot(), 0);
  bool prepare = true, last = outcome & kWaitLast;
  for (uint32_t shares = 1u << split; shares != 0;) {
    merge_share(p, mm, row, group, partials, units, __ffs(shares) - 1, participants, prepare);
    prepare = false;
    shares &= shares - 1;
    if (shares == 0 && last) {  // and what others left
      if (threadIdx.x == 0) {
        __threadfence();
        sm.abandoned = atomicExch(&control[1], 0);
      }
      math_sync();
      shares = sm.abandoned;
      last = false;
    }
  }
}

}  // namespace dsv4::sparse_decode

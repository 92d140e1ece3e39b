// Sparse MLA decode, one softmax over two FP8 paged caches and a sink:
//
//   s_i = scale <q_h, k_i>     o_h = sum_i exp(s_i) k_i / (sum_i exp(s_i) + exp(sink_h))     over the valid candidates i
//
// A block has 16 heads of one row and a range of its leaves (config.h). Its warps form teams that work on different leaves at a time:
//   gather   two warps copy rows to shared memory by cp.async, three stages; masked candidates become zeros
//   score    eight warps own 64 of the 512 dimensions each, seven E4M3 tiles and the rotary tile, so that one exponent per candidate and
//            warp scales all that the warp touches. E4M3 is converted to f16 in registers (exact), its exponent applied to the fp32 dot
//            product; q is scaled per head by a power of two into f16's range
//   softmax  two warps add the tiles' scores and make the weights; the reference is a coarse integer, so that every later rescaling is
//            exact, and rare
//   value    eight warps multiply a tile each; the exponents, relative to the leaf's greatest, go into the f16 weights
//   fold     accumulator = accumulator * 2^a + leaf * 2^b: the same bits whether a block folds in registers or partials in memory
// Not supported: head dimension other than 512, caches other than the 584-byte layout.
#pragma once

#include "gather.cuh"
#include "merge.cuh"
#include "score.cuh"
#include "softmax.cuh"
#include "sparse_decode.h"
#include "value.cuh"

namespace dsv4::sparse_decode {

__device__ __forceinline__ void init_barriers(SharedMemoryPlan& sm, int lane) {
  if (lane < kStages) {
    sm.barriers.full(lane).init((32 + 1) * kGatherWarps);  // the copies of each gathering lane, and the mask
    sm.barriers.free(lane).init(kScoreWarps + kValueWarps);
  } else if (lane < kStages + kBuffers) {
    const int buffer = lane - kStages;
    sm.barriers.scored(buffer).init(kScoreWarps);
    sm.barriers.scores_read(buffer).init(kSoftmaxWarps);
    sm.barriers.weighed(buffer).init(kSoftmaxWarps);
    sm.barriers.folded(buffer).init(kValueWarps);
  }
}

// To the L2, what the end of a block asks for.
template <bool kSplit>
__device__ __forceinline__ void prefetch_end(const Params& p) {
  if (p.attn_sink != nullptr) prefetch(p.attn_sink + min(block_group() * kBlockHeads, p.heads - 1));
  if (kSplit) prefetch(control_of(p));
}

template <bool kSplit, bool kTable>
__device__ __forceinline__ void run_gathering_warp(const Params& p, SharedMemoryPlan& sm, int first_row) {
  const int row = block_row(), split = block_split(), lane = threadIdx.x & 31, lane_row = first_row + lane % kGatherRows;
  const int main_length = load_length(p.main, row), extra_length = load_length(p.extra, row);
  // The first candidates are fetched beside the lengths, as if the row were as long as the tensors are wide, and as if its blocks had one
  // leaf each (lanes of the lower half) or two (of the upper); fetched again where it is otherwise.
  Work w;
  w.row = row;
  w.main_leaves = p.guess_main_leaves;
  w.main_length = p.main.width;
  w.extra_length = p.extra.width;
  const int32_t* table = table_of<kTable>(p.extra_table, row);
  const int long_leaf = kSplit ? split * p.guess_leaves : 0;
  int loaded = load_candidate<kTable>(p, w, table, long_leaf, lane_row), if_short = 0;
  if (kSplit) if_short = load_candidate<kTable>(p, w, table, split * (1 + lane / kGatherRows), lane_row);
  block_sync();
  w.main_length = uniform(main_length);
  w.extra_length = uniform(extra_length);
  plan_work<kSplit>(p, w, split);
  const int leaf = w.first_leaf;
  if (leaf >= w.end_leaf) return;
  const bool is_long = leaf == long_leaf, is_short = kSplit && (leaf == split || leaf == 2 * split);
  if ((is_long || is_short) && (leaf < w.main_leaves || w.main_leaves == p.guess_main_leaves)) {
    if (!is_long) loaded = __shfl_sync(0xffffffffu, if_short, lane % kGatherRows + (leaf == split ? 0 : kGatherRows));
    if (!within(w, leaf, lane_row)) loaded = -1;
  } else {
    loaded = load_candidate<kTable>(p, w, table, leaf, lane_row);
  }
  Gatherer<kTable>{p, w, sm, first_row, table}.run(loaded);
}

template <bool kSplit>
__device__ __forceinline__ void run_math_warp(const Params& p, SharedMemoryPlan& sm, int warp) {
  if (warp >= kValueWarps + kScoreWarps) {
    if (warp == kValueWarps + kScoreWarps) {
      const int main_length = load_length(p.main, block_row()), extra_length = load_length(p.extra, block_row());
      block_sync();
      Work w;
      w.row = block_row();
      w.main_length = uniform(main_length);
      w.extra_length = uniform(extra_length);
      plan_work<kSplit>(p, w, block_split());
      if ((threadIdx.x & 31) == 0) {
        sm.work = w;  // the teams read it there: their registers are for other things
        if (kSplit) sm.shares = plan_shares(w);
      }
    } else {
      block_sync();
    }
    run_softmax_team<kSplit>(p, sm);
  } else if (warp >= kValueWarps) {
    set_registers<kScoreRegisters, false>();
    run_score_team<kSplit>(p, sm, warp - kValueWarps);
    set_registers<kRegisters, true>();
  } else {
    block_sync();
    set_registers<kValueRegisters, true>();
    if (warp == kNumNopeTiles) {
      run_value_team<kSplit, true>(p, sm, kNumNopeTiles);
    } else {
      run_value_team<kSplit, false>(p, sm, warp);
    }
    set_registers<kRegisters, false>();
  }
  if (!sm.work.template whole_row<kSplit>() && !sm.work.is_empty()) merge_row(p, sm);
}

// kSplit: several blocks may share a row; kTable: the extra cache's candidates come from a page table, not a list
template <bool kSplit, bool kTable>
__global__ void __launch_bounds__(kThreads, 1) sparse_decode_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto& sm = *reinterpret_cast<SharedMemoryPlan*>(shared);
  const int warp = uniform(threadIdx.x >> 5);
  if (warp == kMathThreads / 32 - 1) init_barriers(sm, threadIdx.x & 31);
  if (threadIdx.x == 0) prefetch_end<kSplit>(p);
  pdl_wait();
  pdl_trigger();
  if (warp >= kMathThreads / 32) {
    run_gathering_warp<kSplit, kTable>(p, sm, (warp - kMathThreads / 32) * kGatherRows);
  } else {
    run_math_warp<kSplit>(p, sm, warp);
  }
}

}  // namespace dsv4::sparse_decode

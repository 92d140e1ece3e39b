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

template <bool kSplit, bool kTable>
__device__ __forceinline__ void run_row(const Params& p, SharedMemoryPlan& sm) {
  const int row = block_row(), split = block_split();
  const int warp = uniform(threadIdx.x >> 5);
  const int main_length = load_length(p.main, row), extra_length = load_length(p.extra, row);
  Work w;
  w.row = row;
  if (warp >= kMathThreads / 32) {
    // The first candidates are fetched as if the row were as long as the tensors are wide, beside the lengths; fetched again if not.
    const int guessed_leaf = kSplit ? split * p.guess_leaves : 0;
    const int first_row = (warp - kMathThreads / 32) * kGatherRows, lane_row = first_row + threadIdx.x % kGatherRows;
    w.main_leaves = p.guess_main_leaves;
    w.main_length = p.main.width;
    w.extra_length = p.extra.width;
    const int32_t* table = table_of<kTable>(p.extra_table, row);
    int loaded = load_candidate<kTable>(p, w, table, guessed_leaf, lane_row);
    w.main_length = uniform(main_length);
    w.extra_length = uniform(extra_length);
    plan_work<kSplit>(p, w, split);
    if (w.first_leaf != guessed_leaf || w.main_leaves != p.guess_main_leaves || w.extra_length != p.extra.width || w.main_length != p.main.width)
      loaded = load_candidate<kTable>(p, w, table, w.first_leaf, lane_row);
    Gatherer<kTable>{p, w, sm, first_row, table}.run(loaded);
    return;
  }
  w.main_length = uniform(main_length);
  w.extra_length = uniform(extra_length);
  plan_work<kSplit>(p, w, split);
  if (w.first_leaf >= w.end_leaf) return;
  if (threadIdx.x == 0) sm.work = w;  // the teams read it there: their registers are for other things
  if (warp >= kValueWarps + kScoreWarps) {
    run_softmax_team<kSplit>(p, sm);
  } else if (warp >= kValueWarps) {
    set_registers<kScoreRegisters, false>();
    run_score_team<kSplit>(p, sm, warp - kValueWarps);
    set_registers<kRegisters, true>();
  } else {
    set_registers<kValueRegisters, true>();
    if (warp == kNumNopeTiles) {
      run_value_team<kSplit, true>(p, sm, kNumNopeTiles);
    } else {
      run_value_team<kSplit, false>(p, sm, warp);
    }
    set_registers<kRegisters, false>();
  }
  if (!sm.work.template whole_row<kSplit>()) merge_row(p, sm);
}

// kSplit: several blocks may share a row; kTable: the extra cache's candidates come from a page table, not a list
template <bool kSplit, bool kTable>
__global__ void __launch_bounds__(kThreads, 1) sparse_decode_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto& sm = *reinterpret_cast<SharedMemoryPlan*>(shared);
  if (threadIdx.x < kStages) {
    sm.barriers.full(threadIdx.x).init((32 + 1) * kGatherWarps);  // the copies of each gathering lane, and the mask
    sm.barriers.free(threadIdx.x).init(kScoreWarps + kValueWarps);
  } else if (threadIdx.x < kStages + kBuffers) {
    const int buffer = threadIdx.x - kStages;
    sm.barriers.scored(buffer).init(kScoreWarps);
    sm.barriers.scores_read(buffer).init(kSoftmaxWarps);
    sm.barriers.weighed(buffer).init(kSoftmaxWarps);
    sm.barriers.folded(buffer).init(kValueWarps);
  }
  __syncthreads();
  pdl_wait();
  pdl_trigger();
  run_row<kSplit, kTable>(p, sm);
}

}  // namespace dsv4::sparse_decode

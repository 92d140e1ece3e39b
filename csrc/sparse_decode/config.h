// Sizes of the sparse decode kernel: tiles, the fold tree, shared memory.
//
// The fold tree decides every rounding, so it is a function of the row's own lengths alone (its candidates are main then extra, each
// filled up to whole leaves):
//   leaf  32 candidates: scores, softmax weights relative to an integer reference (power-of-two rescaling is exact), P V
//   unit  left fold of consecutive leaves: 1 leaf in a row of up to 40, else 2^j leaves with the least j >= 3 giving <= 20 units
//   row   left fold of its units
// A block computes either single units (written as partials, folded in order by whoever merges) or the whole row.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "../device/barriers.cuh"
#include "../kv_page_layout.h"

namespace dsv4::sparse_decode {

constexpr int kBlockHeads = 16;                       // of a block: one mma tile
constexpr int kTiles = kNumNopeTiles + 1;             // of 64 dimensions: 7 E4M3 tiles and the rotary tile
constexpr int kValueWarps = kTiles;                   // one a tile
constexpr int kScoreWarps = kTiles;                   // one a tile
constexpr int kSoftmaxWarps = 2;
constexpr int kGatherWarps = 2;
constexpr int kMathThreads = 32 * (kValueWarps + kScoreWarps + kSoftmaxWarps);  // in this order
constexpr int kThreads = kMathThreads + 32 * kGatherWarps;
constexpr int kGatherRows = 32 / kGatherWarps;        // candidates of a leaf for each gathering warp
constexpr int kLeaf = 32;                             // candidates of a leaf
constexpr int kStages = 3;                            // of gathered rows
constexpr int kMasks = 8;                             // of gathered rows: more than gathering may be ahead of the softmax
constexpr int kBuffers = 2;                           // of scores and of weights, between the teams
constexpr int kUnitBuffers = 2;                       // of a unit's fold factors, likewise

constexpr int kRegisters = 96;                        // a thread: 65536 / kThreads
constexpr int kScoreRegisters = 88;                   // a thread of the score team leaves some
constexpr int kValueRegisters = 104;                  // to one of the value team, which holds a leaf's values besides the accumulator

constexpr int kWholeLeaves = 5;                       // leaves up to which a row is one block's: it is done before a merge would be
constexpr int kShortLeaves = 40;                      // leaves up to which a unit is one leaf
constexpr int kMaxUnitsLong = 20;
constexpr int kMaxUnits = kShortLeaves;
constexpr int kMinLongUnitLog2 = 3;

constexpr int kRowPitch = 592;                        // bytes of a candidate in shared memory: 37 x 16, conflict-free for ldmatrix
constexpr int kWeightPitch = 2 * kLeaf + 16;          // bytes of a head's softmax weights: 5 x 16, conflict-free for ldmatrix
constexpr int kWeightLog2 = 7;                        // f16 weights, up to 2^(kReferenceStep / 2), are stored times 2^7
constexpr int kReferenceStep = 16;                    // softmax references are multiples of it (nearest to the maximum): they rarely move

constexpr int kControlWords = 2;                      // arrivals, abandoned shares
constexpr int kMaxSplitItems = 256;                   // rows * head groups up to which rows are split over blocks

constexpr int kPartialVectors = kBlockHeads * kHeadDim / 4;            // float4 of a partial
constexpr int kPartialFloats = 4 * kPartialVectors + 2 * kBlockHeads;  // then (reference, sum) per head

static_assert(kRowPitch >= kDataBytes && kRowPitch % 16 == 0 && kRowPitch / 16 % 2 == 1, "pitch");
static_assert(kWeightPitch / 16 % 2 == 1, "pitch");
static_assert(kBlockHeads == 8 * kSoftmaxWarps && kLeaf == 32, "four softmax lanes a head, eight candidates a lane");
static_assert(kValueWarps % 4 == 0 && kScoreWarps % 4 == 0, "registers are set for four warps at a time");
static_assert(kValueWarps * (kValueRegisters - kRegisters) == kScoreWarps * (kRegisters - kScoreRegisters), "as many taken as left");
static_assert(kThreads * kRegisters <= 65536, "registers");
static_assert(kMasks > kStages + kBuffers, "the mask outlives the stage");
// The last unit may be shorter than the buffers between the teams: then the softmax team is done with it, and writes its factors, while
// the value team may not yet have read those of the unit before. Of two units back it has: it was at the barrier between.
static_assert(kUnitBuffers == 2, "the units' fold factors, in turn");

struct Stage {
  alignas(128) uint8_t rows[kLeaf][kRowPitch];  // 18,944
  uint8_t scales[kLeaf][kScaleBytes];           //    256
};

using QueryAmax = float[kTiles][kBlockHeads];          // the greatest magnitudes of q

constexpr float kRounder = 12582912.f;                 // 1.5 * 2^23: adding it rounds to an integer, and its bits then order like it
constexpr float kEmpty = -kRounder * kReferenceStep;   // softmax reference of a set without valid candidates

struct Fold {
  float reference;  // log2, a multiple of kReferenceStep
  float sum;        // of 2^(x - reference)
};

// The split of a row into leaves and units, and this block's range of it.
struct Work {
  int row;
  int main_length, extra_length;
  int main_leaves, units;
  int fold_leaves;  // of a unit; 0: the leaves are folded straight into the row
  int first_leaf, end_leaf, per_block, leaves;

  // whether this block has all of the row
  template <bool kSplit>
  __device__ __forceinline__ bool whole_row() const {
    return !kSplit || fold_leaves == 0;
  }
  __device__ __forceinline__ bool is_empty() const { return first_leaf >= end_leaf; }
  __device__ __forceinline__ int unit_end(int leaf) const { return fold_leaves == 0 ? end_leaf : min(leaf + fold_leaves, end_leaf); }
  __device__ __forceinline__ int unit_before(int leaf) const { return (leaf - 1) >> (31 - __clz(fold_leaves)); }
  // where the factors of the unit before `leaf` are
  __device__ __forceinline__ int unit_buffer(int leaf) const { return unit_before(leaf) & (kUnitBuffers - 1); }
};

// Of a row that blocks share: its merge's vectors by four dimensions that a block has, and the units that it has room for at once.
struct Shares {
  uint16_t vectors, units_at_once;
};

struct TeamBarriers {
  static constexpr int kScored = 2 * kStages;
  Barriers<kScored + 4 * kBuffers> all;

  __device__ __forceinline__ Barrier full(int stage) const { return all.behind<0>(stage); }        // it is filled
  __device__ __forceinline__ Barrier free(int stage) const { return all.behind<kStages>(stage); }  // it may be filled
  // the scores of a leaf are there; they are read; its weights are there; they are used
  __device__ __forceinline__ Barrier scored(int buffer) const { return all.behind<kScored>(buffer); }
  __device__ __forceinline__ Barrier scores_read(int buffer) const { return all.behind<kScored + kBuffers>(buffer); }
  __device__ __forceinline__ Barrier weighed(int buffer) const { return all.behind<kScored + 2 * kBuffers>(buffer); }
  __device__ __forceinline__ Barrier folded(int buffer) const { return all.behind<kScored + 3 * kBuffers>(buffer); }
};

struct SharedMemoryPlan {
  Stage stages[kStages];                                             // 57,600
  alignas(128) float scores[kBuffers][kTiles][kBlockHeads][kLeaf];    // 32,768  columns xor-swizzled by head
  alignas(16) uint8_t weights_f16[kBuffers][kBlockHeads][kWeightPitch];   //  2,560
  alignas(16) uint8_t weights_bf16[kBuffers][kBlockHeads][kWeightPitch];  //  2,560
  alignas(16) float2 factors[kBuffers][kBlockHeads];                 //    256  (old, new) fold factors of a leaf
  alignas(16) float2 unit_factors[kUnitBuffers][kBlockHeads];        //    256  of a unit of a long row, units in turn
  alignas(16) QueryAmax q_amax;                                      //    512
  float output_factor[kBlockHeads];                                  //     64
  TeamBarriers barriers;                                             //    112
  alignas(4) uint16_t valid[kMasks][kGatherWarps];                   //     32  a bit a candidate
  Work work;                                                         //     40
  Shares shares;                                                     //      4
  uint32_t told;                                                     //      4  by who arrived: the outcome, later what others left
};
static_assert(sizeof(SharedMemoryPlan) <= kMaxSharedBytes);

// What a merge has over the gathered rows and the scores, which nobody needs any more: the units' fold factors, lse, vectors of partials.
using MergeFactors = float2[kMaxUnits][kBlockHeads];
using MergeLse = float[kBlockHeads];
constexpr int kMergeBytes = sizeof(SharedMemoryPlan::stages) + sizeof(SharedMemoryPlan::scores);
constexpr int kMergeVectors = (kMergeBytes - sizeof(MergeFactors) - sizeof(MergeLse)) / sizeof(float4);
struct MergeMemory {
  float4 vectors[kMergeVectors];  // of units in turn, each thread's where it stands among those of a share
  MergeFactors factors;
  MergeLse lse;
};
static_assert(offsetof(SharedMemoryPlan, stages) == 0 && offsetof(SharedMemoryPlan, weights_f16) >= sizeof(MergeMemory), "merge memory");

// log2 of the leaves per unit of a row
__host__ __device__ constexpr int unit_leaves_log2(int leaves) {
  if (leaves <= kShortLeaves) return 0;
  int log2 = kMinLongUnitLog2;
  while (leaves > kMaxUnitsLong << log2) ++log2;
  return log2;
}

// Whether blocks share a row: two for a short one spend on its partials, one a leaf, what they save.
__host__ __device__ constexpr bool worth_splitting(int leaves, int splits) {
  return leaves > kWholeLeaves && splits > (leaves <= kShortLeaves ? 2 : 1);
}

}  // namespace dsv4::sparse_decode

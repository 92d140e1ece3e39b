// Sizes of the sparse decode kernel: tiles, the fold tree, shared memory.
//
// The fold tree decides every rounding, so it is a function of the row's own lengths alone (n candidates = main then extra):
//   leaf  32 candidates: scores, softmax weights relative to an integer reference (power-of-two rescaling is exact), P V
//   unit  left fold of consecutive leaves: 1 leaf for n <= 1280, else 8 * 2^j leaves with the least j giving <= 20 units
//   row   left fold of its units
// A block computes either single units (written as partials, folded in order by whoever merges) or the whole row.
#pragma once

#include <cstdint>

#include "../kv_page_layout.h"

namespace dsv4::sparse_decode {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlockHeads = 16;                       // one m16 tile
constexpr int kLeaf = 32;                             // candidates of a leaf
constexpr int kStages = 2;
constexpr int kMinBlocksPerSm = 2;

constexpr int kShortRow = 1280;                       // candidates up to which a unit is one leaf
constexpr int kMaxUnitsLong = 20;
constexpr int kMaxUnits = kShortRow / kLeaf;          // 40
constexpr int kMinLongUnitLeaves = 8;

constexpr int kTilePairs = 4;                         // 7 E4M3 tiles and the rotary tile, two per warp pair
constexpr int kRowPitch = 592;                        // bytes of a candidate in shared memory: 37 x 16, conflict-free for ldmatrix
constexpr int kRowScale = kDataBytes;                 // its 8 scale bytes follow its data
constexpr int kWeightPitch = 2 * kLeaf + 16;          // bytes of a head's softmax weights: 5 x 16, conflict-free for ldmatrix
constexpr int kWeightLog2 = 14;                       // f16 weights are stored times 2^14

constexpr int kPartialVectors = kWarps * 32 * 8;      // float4 of one partial: a thread's 32 accumulators
constexpr int kPartialFloats = 4 * kPartialVectors + 2 * kBlockHeads;  // then (reference, sum) per head
constexpr int kControlWords = 4;                      // arrived, generation, abandoned, pad
constexpr int kMaxSplitItems = 256;                   // rows * head groups up to which rows are split over blocks

static_assert(kRowPitch >= kDataBytes + kScaleBytes && kRowPitch % 16 == 0 && kRowPitch / 16 % 2 == 1, "pitch");
static_assert(kWeightPitch / 16 % 2 == 1, "pitch");
static_assert(4 * kPartialVectors == kBlockHeads * kHeadDim, "a partial is the block's heads by the head dimension");
static_assert(kThreads == kLeaf * 8, "eight threads gather a candidate");
static_assert(kThreads == kBlockHeads * kLeaf / 2, "a softmax thread has one head and two candidates");

struct SharedMemoryPlan {
  alignas(128) uint8_t rows[kStages][kLeaf][kRowPitch];           // 37,888
  alignas(16) float scores[kTilePairs][kBlockHeads][kLeaf];       //  8,192  columns xor-swizzled by head; also the merge's factors
  alignas(16) uint8_t weights_f16[kBlockHeads][kWeightPitch];     //  1,280
  alignas(16) uint8_t weights_bf16[kBlockHeads][kWeightPitch];    //  1,280
  alignas(16) float2 factors[kBlockHeads];                        //    128  (old, new) fold factors
  alignas(16) float q_amax[kTilePairs][kBlockHeads];              //    256
  uint8_t valid[kStages][kLeaf];                                  //     64
  uint32_t generation, shares;                                    //      8
};
static_assert(sizeof(SharedMemoryPlan) <= 50176, "two blocks on an SM120 multiprocessor (102,400 B, 1 KB reserved each)");
static_assert(sizeof(float2) * kMaxUnits * kBlockHeads <= sizeof(SharedMemoryPlan::scores), "merge factors fit");

// leaves per unit of a row with n candidates
__host__ __device__ constexpr int unit_leaves(int n) {
  if (n <= kShortRow) return 1;
  int leaves = kMinLongUnitLeaves;
  while (n > leaves * kLeaf * kMaxUnitsLong) leaves *= 2;
  return leaves;
}

}  // namespace dsv4::sparse_decode

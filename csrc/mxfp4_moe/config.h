// Sizes of the kernels for few rows. A warp multiplies 16 weight rows by a slice of the inputs.
//
//   unit     what a block does between two barriers: kSubtiles x 16 weight rows, all inputs; 32 KB of codes (Flash)
//   group    up to kRows pairs of one expert, whose x is in shared memory
//   slice    the inputs of one warp: kSteps x 128; slices are added in order, so the sum does not depend on the batch
//
// One row: groups of 2, little shared memory and few registers, so that three blocks are on a multiprocessor, and down
// adds up the row's experts itself. Up to kMidPairs pairs: groups of 4, and y goes through memory; two blocks, whose
// shared memory leaves the L1 its greater part. More: groups of 8 (Pro 4).
//
// Shared memory of the largest (gate/up, hidden 4096): x 64 KB, scales 4 KB, partial sums 8 KB, routing 21 KB.
#pragma once

#include <cstdint>

#include "mxfp4_moe.h"

namespace dsv4::mxfp4_moe {

constexpr int kStepInputs = 128;   // 4 lanes x 32: each lane's 16 bytes share one scale
constexpr int kOneRowPairs = 16, kMidPairs = 384;

// What a unit of a group costs, in parts: a warp multiplies for 2 rows at a time.
__host__ __device__ constexpr int group_cost(int rows) { return rows <= 2 ? 8 : rows <= 4 ? 9 : 12; }

template <int kRows_, int kPairs_>
struct Routing {
  static constexpr int kRows = kRows_, kPairs = kPairs_, kGroups = kPairs <= kMaxExperts ? kPairs : kMaxExperts + kPairs / kRows;
  static_assert(kGroups < 4096 && kGroups * group_cost(kRows) < 65536);
  int32_t num_groups;
  uint16_t cost[kGroups + 1];  // of all groups before; not with kOneRowPairs, where all cost the same
  uint16_t expert[kGroups];
  uint16_t pairs[kGroups][kRows];
  uint8_t rows[kGroups];
};

// Of a warp's 16 weight rows and its slice.
template <int kSteps>
struct Scales {
  uint8_t bytes[16][kSteps * 4];
};

// What a warp has for itself: its slice of up to kRows rows of x (or h), and scales of this unit and the next.
template <int kSteps, int kRows>
struct alignas(16) WarpShared {
  uint4 x[kSteps * 4][kRows * 4];  // [step * 4 + word][row * 4 + lane of the quad]: 8 inputs in f16, paired as the codes are
  Scales<kSteps> scales[2];
  float power[kRows];              // what x lacks here, and what the codes lack
};

// kGated: rows 0-7 of the 16 are gate, 8-15 the up rows beside them; else 16 rows of the down projection. kMayBeExact: Params::exact is
// looked at.
template <int kWarps_, int kSlices_, int kSteps_, bool kGated_, int kRows_, int kPairs_, int kMinBlocks_, bool kMayBeExact_ = true>
struct Config {
  static constexpr int kWarps = kWarps_, kSlices = kSlices_, kSteps = kSteps_, kRows = kRows_, kPairs = kPairs_;
  static constexpr bool kGated = kGated_, kMayBeExact = kMayBeExact_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kSubtiles = kWarps / kSlices;
  static constexpr int kInputs = kSlices * kSteps * kStepInputs;
  static constexpr int kUnitOutputs = kSubtiles * (kGated ? 8 : 16);
  static constexpr int kMinBlocks = kMinBlocks_;  // of a multiprocessor: 80 or 128 registers a thread
  static_assert(kWarps % kSlices == 0 && kInputs % 128 == 0 && kRows % 2 == 0);

  struct Shared {
    WarpShared<kSteps, kRows> warps[kWarps];
    float partial[2][kRows / 2][kWarps][32];  // of a unit
    int32_t counts[kPairs == kOneRowPairs ? 32 : kMaxExperts];
    int32_t scan[32];
    Routing<kRows, kPairs> routing;
  };
  static_assert(sizeof(Shared) <= kMaxSharedBytes);
};

// Down for one row: a block has kSubtiles x 16 outputs, kSlots experts at a time.
template <int kSlices_, int kSteps_, int kSlots_, int kSubtiles_, bool kMayBeExact_>
struct SumConfig {
  static constexpr int kSlices = kSlices_, kSteps = kSteps_, kSlots = kSlots_, kSubtiles = kSubtiles_;
  static constexpr bool kMayBeExact = kMayBeExact_;
  static constexpr int kWarps = kSlices * kSlots * kSubtiles, kThreads = 32 * kWarps;
  static constexpr int kInputs = kSlices * kSteps * kStepInputs, kOutputs = kSubtiles * 16;
  static constexpr int kMinBlocks = 2;

  struct Shared {
    WarpShared<kSteps, 2> warps[kWarps];
    float partial[kOneRowPairs][kSlices][kOutputs];
    int32_t expert[kOneRowPairs];
  };
};

}  // namespace dsv4::mxfp4_moe

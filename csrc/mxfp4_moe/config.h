// Sizes of the kernels for few rows. A warp multiplies 16 weight rows by a slice of the inputs, for up to 8 rows of x.
//
//   unit     what a block does between two barriers: kSubtiles x 16 weight rows, all inputs; 32 KB of codes (Flash)
//   group    up to kRows pairs of one expert, whose x is in shared memory
//   slice    the inputs of one warp: kSteps x 128; slices are added in order, so the sum does not depend on the batch
//
// Shared memory of the largest (gate/up, hidden 4096): x 64 KB, partial sums 8 KB, routing 16 KB.
#pragma once

#include <cstdint>

#include "mxfp4_moe.h"

namespace dsv4::mxfp4_moe {

constexpr int kStepInputs = 128;   // 4 lanes x 32: each lane's 16 bytes share one scale
constexpr int kColumns = 8;        // n of m16n8k16
constexpr int kMaxGroups = 768;    // min(pairs, experts + pairs / kRows) for 1024 pairs, 512 experts, 4 rows
static_assert(kMaxGroups >= kMaxExperts + kMaxPairs / 4, "a group for every expert, and one more per 4 pairs");

struct Routing {
  int32_t num_groups;
  uint16_t expert[kMaxGroups];
  uint8_t rows[kMaxGroups];
  uint16_t pairs[kMaxGroups][kColumns];
};

// kGated: rows 0-7 of the 16 are gate, 8-15 the up rows beside them; else 16 rows of the down projection.
template <int kWarps_, int kSlices_, int kSteps_, int kRows_, bool kGated_>
struct Config {
  static constexpr int kWarps = kWarps_, kSlices = kSlices_, kSteps = kSteps_, kRows = kRows_;
  static constexpr bool kGated = kGated_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kSubtiles = kWarps / kSlices;
  static constexpr int kInputs = kSlices * kSteps * kStepInputs;
  static constexpr int kUnitOutputs = kSubtiles * (kGated ? 8 : 16);
  static constexpr int kMinBlocks = kWarps > 8 ? 1 : 2;  // 128 registers a thread
  static_assert(kWarps % kSlices == 0 && kInputs % 128 == 0 && kRows <= kColumns);

  struct Shared {
    uint4 x[kInputs / 32][kRows * 4];  // [step * 4 + word][row, lane of the quad]: 8 inputs, paired as the codes are
    float4 partial[2][kWarps][32];     // accumulators of a unit
    int32_t counts[kMaxExperts];
    int32_t scan[32];
    Routing routing;
  };
  static_assert(sizeof(Shared) <= 101376, "an SM120 block has 99 KiB");
};

}  // namespace dsv4::mxfp4_moe

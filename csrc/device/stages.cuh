// A ring of stages in shared memory, which some warps fill and others empty.
#pragma once

#include <cstdint>

namespace dsv4 {

// A place in the ring, and the number of its barriers' phase.
template <int kStages>
struct StagePlace {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

}  // namespace dsv4

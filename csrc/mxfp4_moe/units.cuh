// What the kernels for many rows go through: stages of shared memory, tiles of one expert's pairs.
#pragma once

#include <cstdint>

namespace dsv4::mxfp4_moe {

// A place in the ring of stages, and the number of its barriers' phase.
template <int kStages>
struct StagePlace {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

struct SortedTile {
  int expert, begin, count;  // no pair: there is no more
};
template <typename Tiles>
__device__ __forceinline__ SortedTile tile_of(const Tiles& p, int tile) {
  if (tile >= p.num_tiles) return {-1, 0, 0};
  const int begin = p.begin[tile];
  const int expert = p.expert[tile];
  return {expert, begin, expert < 0 ? 0 : p.end[tile] - begin};
}

}  // namespace dsv4::mxfp4_moe

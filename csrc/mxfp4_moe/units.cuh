// What the kernels for many rows go through: tiles of one expert's pairs, and units of their weight rows.
#pragma once

#include <cstdint>

#include "../device/barriers.cuh"
#include "../device/copies.cuh"
#include "../device/stages.cuh"

namespace dsv4::mxfp4_moe {

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

// A weight row's scales from the group on, as many as a place for 16 has; `all`: of the row.
__device__ __forceinline__ void copy_scales(uint8_t* to, const uint8_t* row, int group, int all) {
  if (all % 16 == 0) return cp_async<16>(to, row + group);
  for (int b = 0; b < min(16, all - group); b += 4) cp_async<4>(to + b, row + group + b);
}

// Units that a block asks for one after the other, the first by its number; of the last the expert is -1.
struct alignas(16) DealtUnit {
  unsigned number;
  int expert, begin, count;
};
constexpr int kUnitSlots = 4;
struct DealtUnits {
  DealtUnit units[kUnitSlots];
  Barriers<kUnitSlots> told;

  // by one thread, ahead of the others
  template <typename Params>
  __device__ __forceinline__ void tell(const Params& p, unsigned turn, unsigned number, unsigned units_of_tile) {
    const SortedTile tile = tile_of(p, number / units_of_tile);
    units[turn % kUnitSlots] = {number, tile.expert, tile.begin, tile.count};
    told[turn % kUnitSlots].arrive();
  }
  __device__ __forceinline__ DealtUnit look(unsigned turn) const {
    const uint4 words = load_shared(shared_address(&units[turn % kUnitSlots]));
    return {words.x, static_cast<int>(words.y), static_cast<int>(words.z), static_cast<int>(words.w)};
  }
  __device__ __forceinline__ DealtUnit ask(unsigned turn) const {
    told[turn % kUnitSlots].wait(turn / kUnitSlots % 2);
    return look(turn);
  }
};

}  // namespace dsv4::mxfp4_moe

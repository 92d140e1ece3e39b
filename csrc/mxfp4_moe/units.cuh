// What the kernels for many rows go through: tiles of one expert's pairs, and units of their weight rows.
#pragma once

#include <cstdint>
#include <type_traits>

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

// A block's units one after the other, of a tile of up to 64 pairs and kOutputs outputs: multiply(tile, the unit's first output, as many
// times 8 pairs, a constant).
template <int kOutputs, typename Params, typename Multiply>
__device__ __forceinline__ void each_unit(const Params& p, int units, Multiply multiply) {
  SortedTile next = tile_of(p, blockIdx.x / units);
  for (unsigned unit = blockIdx.x; next.count > 0; unit += gridDim.x) {
    const SortedTile tile = next;
    next = tile_of(p, (unit + gridDim.x) / units);
    const int output = static_cast<int>(unit % units) * kOutputs;
    if (tile.count > 48) {
      multiply(tile, output, std::integral_constant<int, 8>());
    } else if (tile.count > 32) {
      multiply(tile, output, std::integral_constant<int, 6>());
    } else if (tile.count > 16) {
      multiply(tile, output, std::integral_constant<int, 4>());
    } else {
      multiply(tile, output, std::integral_constant<int, 2>());
    }
  }
}

}  // namespace dsv4::mxfp4_moe

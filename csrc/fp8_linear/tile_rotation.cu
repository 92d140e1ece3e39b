// x rotated back on the way in, a block with many outputs.
#include <iterator>
#include <utility>

#include "tile.cuh"

namespace dsv4::fp8_linear {

namespace {

template <bool kRotates, size_t... kIndices>
const LinearKernel* instances(std::index_sequence<kIndices...>) {
  static constexpr LinearKernel kKernels[] = {
      &tile_kernel<TileConfig<kTileVariants[kIndices].column_tiles, kTileVariants[kIndices].row_tiles, kTileVariants[kIndices].warp_rows, kRotates>>...};
  return kKernels;
}

}  // namespace

template <>
const LinearKernel* tile_kernels<true>() {
  return instances<true>(std::make_index_sequence<std::size(kTileVariants)>());
}

}  // namespace dsv4::fp8_linear

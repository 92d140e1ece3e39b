// A block with many outputs: x as it is, or rotated back on the way in.
#include "tile.cuh"

namespace dsv4::fp8_linear {

template const LinearKernel* tile_kernels<false>();
template const LinearKernel* tile_kernels<true>();

}  // namespace dsv4::fp8_linear

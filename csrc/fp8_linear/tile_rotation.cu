// x rotated back on the way in, a block with many outputs.
#include "tile.cuh"

namespace dsv4::fp8_linear {

template const LinearKernel* tile_kernels<true>();

}  // namespace dsv4::fp8_linear

// x as it is, a block with many outputs.
#include "tile.cuh"

namespace dsv4::fp8_linear {

template const LinearKernel* tile_kernels<false>();

}  // namespace dsv4::fp8_linear

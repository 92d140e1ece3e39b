// x rotated back on the way in.
#include "instances.cuh"

namespace dsv4::fp8_linear {

template const LinearKernel* kernels<true>();

}  // namespace dsv4::fp8_linear

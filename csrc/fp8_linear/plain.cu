// x as it is.
#include "instances.cuh"

namespace dsv4::fp8_linear {

template const LinearKernel* kernels<false>();

}  // namespace dsv4::fp8_linear

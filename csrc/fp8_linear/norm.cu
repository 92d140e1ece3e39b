// RMSNorm on the way in.
#include "instances.cuh"

namespace dsv4::fp8_linear {

template const LinearKernel* kernels<Prologue::kNorm>();

}  // namespace dsv4::fp8_linear

// shared + scaling * routed, in place: float32, rounded once, which is torch's add_ to the bit.
//
// As torch's own kernel it is a microsecond; but that one lets nothing in early. This one's first instruction lets the boundary behind it
// start, which then has its weights when the sum is there.
#include "../device/barriers.cuh"
#include "../device/terms.cuh"
#include "../launch_kernel.h"
#include "shared.h"

namespace dsv4::mxfp4_moe {

namespace {

constexpr int kThreads = 128;
constexpr int kVector = 8;  // values of a thread

__global__ void __launch_bounds__(kThreads) add_shared_kernel(const __grid_constant__ SharedParams p) {
  pdl_trigger();
  pdl_wait();
  const int column = (blockIdx.y * kThreads + threadIdx.x) * kVector;
  if (column >= p.hidden) return;
  const int64_t row = blockIdx.x;
  uint4* shared = reinterpret_cast<uint4*>(p.shared + row * p.shared_stride + column);
  const uint4 a = *shared, b = *reinterpret_cast<const uint4*>(p.routed + row * p.routed_stride + column);
  *shared = with_routed(a, b, p.scaling);
}

}  // namespace

void launch_shared(const SharedParams& params, bool pdl, cudaStream_t stream) {
  const int blocks = (params.hidden + kThreads * kVector - 1) / (kThreads * kVector);
  Launcher{"add_shared", pdl, stream}(add_shared_kernel, dim3(params.rows, blocks), kThreads, 0, params);
}

}  // namespace dsv4::mxfp4_moe

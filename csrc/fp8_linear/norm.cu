// x * rsqrt(mean(x^2) + eps) * weight, with the bits of FlashInfer's CUDA kernel, which SGLang runs here: four warps' sums, 0 + 2 and 1 + 3.
//
// That kernel lets its successors in when it ends. This one does when its own wait is over: before, they would take the places of what
// runs beside it (docs/notes/fp8_linear.md); now they have asked for their first weights when it ends.
#include "../device/barriers.cuh"
#include "../device/memory.cuh"
#include "norm.cuh"
#include "norm.h"

namespace dsv4::fp8_linear {

namespace {

constexpr int kWarpsOfRow = 4, kNormThreads = 32 * kWarpsOfRow, kEach = 8;
static_assert(kNormThreads * kEach == kNormInputs);

// a block a row, 8 numbers a thread
__global__ void __launch_bounds__(kNormThreads) norm_kernel(const __grid_constant__ NormParams p) {
  __shared__ float sums[kWarpsOfRow];
  const uint4 w = load_stream_16(p.weight + threadIdx.x * kEach);
  pdl_wait();
  pdl_trigger();
  const uint4 x = load_16_now(p.x + blockIdx.x * p.x_stride + threadIdx.x * kEach);
  const float sum = sum_of_lanes(sum_of_squares(x));
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  const float root = rsqrtf(fmaf((sums[0] + sums[2]) + (sums[1] + sums[3]), 1.f / kNormInputs, p.eps));
  *reinterpret_cast<uint4*>(p.out + static_cast<int64_t>(blockIdx.x) * kNormInputs + threadIdx.x * kEach) = times_weight(x, root, w);
}

constexpr char kName[] = "latent_norm";

}  // namespace

void launch_norm(const NormParams& params, int rows, bool pdl, cudaStream_t stream) {
  Launcher{kName, pdl, stream}(norm_kernel, dim3(rows), kNormThreads, 0, params);
}

std::vector<KernelAttributes> norm_attributes() {
  return {attributes_of(kName, reinterpret_cast<const void*>(&norm_kernel), "fp8_linear_norm", kNormThreads, 0)};
}

}  // namespace dsv4::fp8_linear

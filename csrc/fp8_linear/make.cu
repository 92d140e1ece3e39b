// What is made of x, by kernels of its own: for more rows than the product's kernels make themselves. They let the product start at
// their end: its blocks, let in before, lie two on some multiprocessors and none on others.
#include "make.cuh"

namespace dsv4::fp8_linear {

namespace {

constexpr int kNormThreads = 32 * kNormSums, kGateThreads = 256;

__device__ __forceinline__ uint4 load(const uint16_t* p) { return *reinterpret_cast<const uint4*>(p); }

// a block a row, a warp a sum
__global__ void __launch_bounds__(kNormThreads) normalize_kernel(const __grid_constant__ Params p) {
  __shared__ float sums[kNormSums];
  pdl_wait();
  const uint16_t* const from = p.x + static_cast<uint64_t>(blockIdx.x) * p.x_stride;
  const int units = p.inputs / kUnit;
  float sum = 0;
  for (int unit = threadIdx.x; unit < units; unit += kNormThreads) add_squares(sum, load(from + unit * kUnit));
  sum = sum_of_lanes(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  const float root = root_of_sum(sums[0], sums[1], sums[2], sums[3], p.norm_inverse, p.norm_eps);
  uint4* const to = reinterpret_cast<uint4*>(p.out + static_cast<int64_t>(blockIdx.x) * p.out_stride);
  for (int unit = threadIdx.x; unit < units; unit += kNormThreads) {
    to[unit] = normalized(load(from + unit * kUnit), root, load(p.norm_weight + unit * kUnit));
  }
  pdl_trigger();
}

__global__ void __launch_bounds__(kGateThreads) gate_kernel(const __grid_constant__ Params p) {
  const int unit = blockIdx.y * kGateThreads + threadIdx.x;
  pdl_wait();
  if (unit * kUnit >= p.inputs) return;
  const uint16_t* const from = p.x + static_cast<uint64_t>(blockIdx.x) * p.x_stride + unit * kUnit;
  uint4* const to = reinterpret_cast<uint4*>(p.out + static_cast<int64_t>(blockIdx.x) * p.out_stride);
  to[unit] = gated(load(from), load(from + p.inputs), pack_bf16x2(p.swiglu_limit, p.swiglu_limit));
  pdl_trigger();
}

}  // namespace

void make(const Params& p, bool pdl, cudaStream_t stream) {
  const Launcher launcher = {"fp8_linear", pdl, stream};
  if (prologue_of(p) == Prologue::kNorm) {
    launcher(normalize_kernel, dim3(p.rows), kNormThreads, 0, p);
  } else {
    const unsigned parts = ceil_div(p.inputs / kUnit, kGateThreads);
    launcher(gate_kernel, dim3(p.rows, parts), kGateThreads, 0, p);
  }
}

}  // namespace dsv4::fp8_linear

// The place of a row's greatest number as torch.argmax has it: the first of equals, both zeros being equal, and the first NaN before all.
//
// Two launches, since a row is too long for the loads of one block: blocks have parts of it, then a warp has the parts.
#include <stdexcept>

#include "../device/barriers.cuh"
#include "../device/greatest.cuh"
#include "../device/memory.cuh"
#include "argmax.h"

namespace dsv4::router_topk {

namespace {

constexpr int kPartThreads = 256, kPartWarps = kPartThreads / 32, kLoads = kPartNumbers / (4 * kPartThreads);

// a block a part of a row
__global__ void __launch_bounds__(kPartThreads) argmax_part_kernel(const __grid_constant__ ArgmaxParams p) {
  __shared__ uint2 of_warps[kPartWarps];
  const int first = blockIdx.x * kPartNumbers + threadIdx.x * 4;
  const float* const row = p.x + blockIdx.y * p.x_stride;
  pdl_wait();
  pdl_trigger();
  float4 v[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int column = first + i * 4 * kPartThreads;
    if (column < p.columns) v[i] = load_now(reinterpret_cast<const float4*>(row + column));
  }
  uint2 best = make_uint2(0, kNowhere);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int column = first + i * 4 * kPartThreads;
    if (column >= p.columns) continue;
    const float each[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t key = key_of_number(each[j]);
      if (key > best.x) best = make_uint2(key, column + j);  // of equals the first stays
    }
  }
  best = first_greatest(best);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  best = first_greatest(threadIdx.x < kPartWarps ? of_warps[threadIdx.x] : make_uint2(0, kNowhere));
  if (threadIdx.x == 0) p.parts[blockIdx.y * gridDim.x + blockIdx.x] = best;
}

// a warp a row
__global__ void __launch_bounds__(32) argmax_row_kernel(const __grid_constant__ ArgmaxParams p) {
  const int parts = (p.columns + kPartNumbers - 1) / kPartNumbers;
  pdl_wait();
  pdl_trigger();
  uint2 best = make_uint2(0, kNowhere);
  for (int i = threadIdx.x; i < parts; i += 32) {
    const uint2 part = load_now(p.parts + blockIdx.x * parts + i);
    if (part.x > best.x) best = part;
  }
  best = first_greatest(best);
  if (threadIdx.x == 0) p.out[blockIdx.x] = best.y;
}

constexpr char kName[] = "row_argmax";

}  // namespace

void launch_argmax(const ArgmaxParams& params, int rows, bool pdl, cudaStream_t stream) {
  constexpr int kMostRows = 65535;  // of a grid's second dimension
  if (rows < 1 || rows > kMostRows || params.columns < 1 || params.columns % 4 != 0)
    throw std::runtime_error("row_argmax: takes 1 to " + std::to_string(kMostRows) + " rows of a multiple of 4 numbers");
  const Launcher launcher = {kName, pdl, stream};
  launcher(argmax_part_kernel, dim3((params.columns + kPartNumbers - 1) / kPartNumbers, rows), kPartThreads, 0, params);
  launcher(argmax_row_kernel, dim3(rows), 32, 0, params);
}

std::vector<KernelAttributes> argmax_attributes() {
  return {attributes_of(kName, reinterpret_cast<const void*>(&argmax_part_kernel), "row_argmax_part", kPartThreads, 0),
          attributes_of(kName, reinterpret_cast<const void*>(&argmax_row_kernel), "row_argmax", 32, 0)};
}

}  // namespace dsv4::router_topk

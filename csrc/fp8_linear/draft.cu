// Both norms are x * rsqrt(mean(x^2) + eps) * weight in the order of FlashInfer's CUDA kernel, which SGLang runs here: a thread's eight
// numbers, a warp's, the warps'. As norm.cu's, they let the product behind them in when their own wait is over.
//
// The sum rounds each product, as the product does by itself, before it adds them: so it has the bits of two products and torch's addition,
// and a row's bits do not depend on how many rows there are.
#include <stdexcept>
#include <string>

#include "../device/barriers.cuh"
#include "../device/memory.cuh"
#include "../device/numbers.cuh"
#include "../device/terms.cuh"
#include "draft.h"
#include "norm.cuh"

namespace dsv4::fp8_linear {

namespace {

constexpr int kMostThreads = kDraftMostInputs / kDraftVector, kSumThreads = 128;
constexpr uint32_t kNanPair = 0x7fff7fffu;

// a block a row: those of all streams, then those of the embedding
__global__ void __launch_bounds__(kMostThreads) draft_norms_kernel(const __grid_constant__ DraftNormParams p) {
  __shared__ float sums[32];
  const int of_streams = p.rows * p.streams, own = blockIdx.x, at = threadIdx.x * kDraftVector;
  const bool is_hidden = own < of_streams;
  const int row = is_hidden ? own : own - of_streams;
  float4 w = {};  // eight bf16
  load_where(is_hidden, w, reinterpret_cast<const float*>(p.hidden_norm + at));
  load_where(!is_hidden, w, reinterpret_cast<const float*>(p.embedded_norm + at));
  pdl_wait();
  pdl_trigger();
  const uint16_t* from = is_hidden ? p.hidden + static_cast<int64_t>(row) * p.inputs : p.embedded + row * p.embedded_stride;
  bool is_there = true;
  if (!is_hidden && p.table != nullptr) {
    const int64_t id = p.id_bytes == 8 ? load_now(static_cast<const int64_t*>(p.ids) + row)
                                       : static_cast<int64_t>(load_now(static_cast<const int32_t*>(p.ids) + row));
    is_there = id >= 0 && id < p.entries;
    from = p.table + (is_there ? id : 0) * p.embedded_stride;
  }
  uint4 x = load_16_now(from + at);
  if (!is_there) x = make_uint4(kNanPair, kNanPair, kNanPair, kNanPair);
  float sum = sum_of_lanes(sum_of_squares(x));
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = sum_of_lanes(threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.f);
  const float root = rsqrtf(sum / static_cast<float>(p.inputs) + (is_hidden ? p.hidden_eps : p.embedded_eps));
  const uint4 weight = make_uint4(__float_as_uint(w.x), __float_as_uint(w.y), __float_as_uint(w.z), __float_as_uint(w.w));
  uint16_t* const out = (is_hidden ? p.hidden_out : p.embedded_out) + static_cast<int64_t>(row) * p.inputs + at;
  *reinterpret_cast<uint4*>(out) = times_weight(x, root, weight);
}

// Four outputs of a row of a product's, rounded.
template <int kSplits>
struct Product {
  float4 sum[kSplits];
  __device__ __forceinline__ void load(const void* from, int64_t rows, int64_t row, int outputs, int output) {
#pragma unroll
    for (int s = 0; s < kSplits; ++s) sum[s] = load_now(static_cast<const float4*>(from) + ((s * rows + row) * outputs + output) / 4);
  }
  __device__ __forceinline__ uint2 rounded() { return dsv4::rounded(merged(sum)); }
};
template <>
struct Product<1> {
  uint2 whole;
  __device__ __forceinline__ void load(const void* from, int64_t, int64_t row, int outputs, int output) {
    whole = load_now(static_cast<const uint2*>(from) + (row * outputs + output) / 4);
  }
  __device__ __forceinline__ uint2 rounded() { return whole; }
};

__device__ __forceinline__ uint32_t added(uint32_t a, uint32_t b) { return pack_bf16x2(bf16_low(a) + bf16_low(b), bf16_high(a) + bf16_high(b)); }

// x of the grid: rows of all streams
template <int kSplits>
__global__ void __launch_bounds__(kSumThreads) draft_sum_kernel(const __grid_constant__ DraftSumParams p) {
  pdl_trigger();
  pdl_wait();
  const int output = (blockIdx.y * kSumThreads + threadIdx.x) * 4, row = blockIdx.x;
  if (output >= p.outputs) return;
  Product<kSplits> hidden, embedded;
  hidden.load(p.hidden, p.rows * p.streams, row, p.outputs, output);
  embedded.load(p.embedded, p.rows, row / p.streams, p.outputs, output);
  const uint2 a = embedded.rounded(), b = hidden.rounded();
  *reinterpret_cast<uint2*>(p.out + static_cast<int64_t>(row) * p.outputs + output) = make_uint2(added(a.x, b.x), added(a.y, b.y));
}

constexpr char kName[] = "draft_input";

using SumKernel = void (*)(DraftSumParams);
SumKernel sum_of(int splits) {
  switch (splits) {
    case 1: return draft_sum_kernel<1>;
    case 4: return draft_sum_kernel<4>;  // plans of up to kDraftMostInputs have no others
    default: throw std::runtime_error("draft_input: takes 1 or 4 splits, got " + std::to_string(splits));
  }
}

}  // namespace

void launch_draft_norms(const DraftNormParams& params, bool pdl, cudaStream_t stream) {
  constexpr int kWarpInputs = 32 * kDraftVector;
  if (params.inputs < kWarpInputs || params.inputs > kDraftMostInputs || params.inputs % kWarpInputs)
    throw std::runtime_error("draft_input: takes inputs up to " + std::to_string(kDraftMostInputs) + ", a multiple of " +
                             std::to_string(kWarpInputs) + ", got " + std::to_string(params.inputs));
  const dim3 grid(params.rows * (params.streams + 1));
  Launcher{kName, pdl, stream}(draft_norms_kernel, grid, params.inputs / kDraftVector, 0, params);
}

void launch_draft_sum(const DraftSumParams& params, int splits, bool pdl, cudaStream_t stream) {
  constexpr int kBlockOutputs = 4 * kSumThreads;
  const dim3 grid(params.rows * params.streams, (params.outputs + kBlockOutputs - 1) / kBlockOutputs);
  Launcher{kName, pdl, stream}(sum_of(splits), grid, kSumThreads, 0, params);
}

std::vector<KernelAttributes> draft_attributes() {
  const void* const norms = reinterpret_cast<const void*>(&draft_norms_kernel);
  std::vector<KernelAttributes> all = {attributes_of(kName, norms, "fp8_linear_draft_norms", kMostThreads, 0)};
  for (const int splits : {1, 4}) {
    const void* const sum = reinterpret_cast<const void*>(sum_of(splits));
    all.push_back(attributes_of(kName, sum, "fp8_linear_draft_sum_" + std::to_string(splits), kSumThreads, 0));
  }
  return all;
}

}  // namespace dsv4::fp8_linear

// Geometry and launch of the sparse decode kernel.
#include <algorithm>
#include <stdexcept>

#include "../check.h"
#include "kernel.cuh"

namespace dsv4::sparse_decode {

namespace {

constexpr int kMaxSplits = 32;                          // one bit each in the control word
constexpr int64_t kMaxPartialBytes = 40ll << 20;        // scratch of one call
constexpr int kMaxLongItems = 1024;                     // blocks that fold long rows through a slot of their own

int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <bool kSplit>
const void* kernel_function() {
  return reinterpret_cast<const void*>(&sparse_decode_kernel<kSplit>);
}

template <bool kSplit>
void configure() {  // once per device
  static uint64_t configured = 0;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "sparse_decode", "cudaGetDevice");
  if (device < 64 && (configured >> device & 1)) return;
  check_cuda(cudaFuncSetAttribute(kernel_function<kSplit>(), cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SharedMemoryPlan)),
             "sparse_decode", "cudaFuncSetAttribute");
  if (device < 64) configured |= uint64_t{1} << device;
}

template <bool kSplit>
void launch_kernel(const Params& params, int grid, bool pdl, cudaStream_t stream) {
  configure<kSplit>();
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(SharedMemoryPlan);
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = pdl ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, sparse_decode_kernel<kSplit>, params), "sparse_decode", "launch");
}

}  // namespace

FastDivisor make_divisor(int divisor) {
  if (divisor == 1) return {1, 0, 0};
  int log2 = 0;
  while ((1ll << log2) < divisor) ++log2;
  const int p = 31 + log2;
  const uint32_t multiplier = static_cast<uint32_t>(((1ull << p) + divisor - 1) / divisor);
  return {static_cast<uint32_t>(divisor), multiplier, static_cast<uint32_t>(p - 32)};
}

int head_groups(int heads) { return ceil_div(heads, kBlockHeads); }

int max_control_words() { return kMaxSplitItems * kControlWords; }

Plan make_plan(int rows, int heads, int max_candidates, int num_sms, int splits_override) {
  const int items = rows * head_groups(heads);
  const int max_leaves = std::max(ceil_div(max_candidates, kLeaf), 1) + 1;  // main and extra are rounded up on their own
  const int max_units = std::min(max_leaves, kMaxUnits);
  Plan plan = {};
  int splits = splits_override > 0 ? splits_override : num_sms / items;
  splits = std::min({splits, max_units, kMaxSplits});
  const int64_t split_bytes = static_cast<int64_t>(items) * max_units * kPartialFloats * 4;
  if (splits > 1 && items <= kMaxSplitItems && split_bytes <= kMaxPartialBytes) {
    plan.splits = splits;
    plan.unit_slots = max_units;
    plan.grid = items * splits;
    plan.partials_bytes = split_bytes;
    plan.control_words = items * kControlWords;
    return plan;
  }
  plan.splits = 1;
  plan.unit_slots = 1;
  plan.grid = items;
  if (max_leaves * kLeaf > kShortRow) {
    plan.grid = std::min(items, kMaxLongItems);
    plan.partials_bytes = static_cast<int64_t>(plan.grid) * kPartialFloats * 4;
  }
  return plan;
}

void launch(const Params& params, const Plan& plan, bool pdl, cudaStream_t stream) {
  if (plan.splits > 1) {
    launch_kernel<true>(params, plan.grid, pdl, stream);
  } else {
    launch_kernel<false>(params, plan.grid, pdl, stream);
  }
}

int shared_bytes() { return sizeof(SharedMemoryPlan); }

template <bool kSplit>
static KernelAttributes attributes_of(const char* name) {
  configure<kSplit>();
  cudaFuncAttributes a = {};
  check_cuda(cudaFuncGetAttributes(&a, kernel_function<kSplit>()), name, "cudaFuncGetAttributes");
  int blocks = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel_function<kSplit>(), kThreads, sizeof(SharedMemoryPlan)), name,
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return {name, a.numRegs, static_cast<int>(a.sharedSizeBytes) + static_cast<int>(sizeof(SharedMemoryPlan)),
          static_cast<int>(a.localSizeBytes), blocks};
}

std::vector<KernelAttributes> kernel_attributes() {
  return {attributes_of<true>("sparse_decode_split"), attributes_of<false>("sparse_decode_row")};
}

}  // namespace dsv4::sparse_decode

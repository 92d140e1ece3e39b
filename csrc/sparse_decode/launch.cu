// Geometry and launch of the sparse decode kernel.
#include <algorithm>
#include <stdexcept>

#include "../check.h"
#include "kernel.cuh"

namespace dsv4::sparse_decode {

namespace {

constexpr int kMaxSplits = 32;                          // one bit each in the control word
constexpr int64_t kMaxPartialBytes = 62ll << 20;        // scratch of one call
constexpr int kMaxLongItems = 1024;                     // blocks that fold long rows through a slot of their own

int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <bool kSplit>
void configure() {  // once per device
  static uint64_t configured = 0;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "sparse_decode", "cudaGetDevice");
  if (device < 64 && (configured >> device & 1)) return;
  check_cuda(cudaFuncSetAttribute(&sparse_decode_kernel<kSplit>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  sizeof(SharedMemoryPlan)),
             "sparse_decode", "cudaFuncSetAttribute");
  if (device < 64) configured |= uint64_t{1} << device;
}

template <bool kSplit>
void launch_kernel(const Params& params, dim3 grid, bool pdl, cudaStream_t stream) {
  configure<kSplit>();
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
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

void advance(Cache& cache, int rows) {
  cache.indices += rows * cache.indices_stride;
  if (cache.topk_length != nullptr) cache.topk_length += rows;
}

// Blocks per row and head group: as many as fit beside each other.
int auto_splits(int items, int max_leaves, int num_sms) {
  const int splits = num_sms / items;
  return worth_splitting(max_leaves, splits) ? splits : 1;
}

}  // namespace

FastDivisor make_divisor(int divisor) {
  uint32_t shift = 0;
  while ((1ll << shift) < divisor) ++shift;
  const uint64_t multiplier = ((1ull << (31 + shift)) + divisor - 1) / divisor;  // the excess over the true one is < divisor <= 2^shift
  return {static_cast<uint32_t>(divisor), static_cast<uint32_t>(multiplier), shift};
}

int max_control_words() { return kMaxSplitItems * kControlWords; }

Plan make_plan(int rows, int heads, int width, int extra_width, int num_sms, int splits_override) {
  const int max_leaves = std::max(ceil_div(width, kLeaf) + ceil_div(extra_width, kLeaf), 1);
  const int max_units = std::min(max_leaves, kMaxUnits), needed_units = std::min(max_leaves, kMaxUnitsLong);
  Plan plan = {};
  plan.head_groups = ceil_div(heads, kBlockHeads);
  const int items = rows * plan.head_groups;
  const int64_t partial_bytes = kPartialFloats * 4;
  const int splits = std::min({splits_override > 0 ? splits_override : auto_splits(items, max_leaves, num_sms), max_units, kMaxSplits});
  if (splits > 1 && items <= kMaxSplitItems && items * needed_units * partial_bytes <= kMaxPartialBytes) {
    plan.splits = splits;
    plan.unit_slots = static_cast<int>(std::min<int64_t>(max_units, kMaxPartialBytes / (items * partial_bytes)));
    plan.partials_bytes = items * plan.unit_slots * partial_bytes;
    plan.control_words = items * kControlWords;
    return plan;
  }
  plan.splits = 1;
  plan.unit_slots = 1;
  plan.rows_per_launch = std::min(rows, 65535);  // the grid's limit
  if (max_leaves > kShortLeaves) {
    plan.rows_per_launch = std::min(plan.rows_per_launch, std::max(kMaxLongItems / plan.head_groups, 1));
    plan.partials_bytes = plan.rows_per_launch * plan.head_groups * partial_bytes;
  }
  return plan;
}

void launch(Params p, const Plan& plan, bool pdl, cudaStream_t stream) {
  const int groups = plan.head_groups;
  p.splits = make_divisor(plan.splits);
  p.unit_slots = plan.unit_slots;
  p.guess_main_leaves = ceil_div(p.main.width, kLeaf);
  const int leaves = std::max(p.guess_main_leaves + ceil_div(p.extra.width, kLeaf), 1), unit_log2 = unit_leaves_log2(leaves);
  p.guess_leaves = ceil_div(ceil_div(leaves, 1 << unit_log2), plan.splits) << unit_log2;
  if (plan.splits > 1) {
    launch_kernel<true>(p, dim3(groups, plan.splits, p.rows), pdl, stream);
    return;
  }
  for (int rows = p.rows; rows > 0; rows -= plan.rows_per_launch) {
    p.rows = std::min(rows, plan.rows_per_launch);
    launch_kernel<false>(p, dim3(groups, 1, p.rows), pdl, stream);
    p.q += p.rows * p.q_stride_row;
    p.out += p.rows * p.out_stride_row;
    if (p.lse != nullptr) p.lse += static_cast<int64_t>(p.rows) * p.heads;
    advance(p.main, p.rows);
    advance(p.extra, p.rows);
  }
}

template <bool kSplit>
static KernelAttributes attributes_of() {
  configure<kSplit>();
  void (*const kernel)(Params) = &sparse_decode_kernel<kSplit>;
  const int shared = sizeof(SharedMemoryPlan);
  cudaFuncAttributes a = {};
  check_cuda(cudaFuncGetAttributes(&a, kernel), "sparse_decode", "cudaFuncGetAttributes");
  int blocks = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, shared), "sparse_decode", "occupancy query");
  const std::string name = kSplit ? "sparse_decode_split" : "sparse_decode_row";
  return {name, a.numRegs, static_cast<int>(a.sharedSizeBytes) + shared, static_cast<int>(a.localSizeBytes), blocks};
}

std::vector<KernelAttributes> kernel_attributes() {
  return {attributes_of<true>(), attributes_of<false>()};
}

int shared_bytes() { return sizeof(SharedMemoryPlan); }

}  // namespace dsv4::sparse_decode

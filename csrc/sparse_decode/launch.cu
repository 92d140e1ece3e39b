// Geometry and launch of the sparse decode kernel.
#include <algorithm>
#include <stdexcept>

#include "../check.h"
#include "kernel.cuh"
#include "prefill.cuh"

namespace dsv4::sparse_decode {

namespace {

constexpr int kMaxSplits = 32;                          // one bit each in the control word
constexpr int64_t kMaxPartialBytes = 62ll << 20;        // scratch of one call
constexpr int kMaxLongItems = 1024;                     // blocks that fold long rows through a slot of their own

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The kernels, by what a launch needs to know of them.
template <void (*kKernel)(Params), int kThreadCount, int kSharedBytes>
struct Kernel {
  static constexpr int kThreads = kThreadCount, kShared = kSharedBytes;

  static void configure() {  // once per device
    static uint64_t configured = 0;
    int device = 0;
    check_cuda(cudaGetDevice(&device), "sparse_decode", "cudaGetDevice");
    if (device < 64 && (configured >> device & 1)) return;
    check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), "sparse_decode", "cudaFuncSetAttribute");
    if (device < 64) configured |= uint64_t{1} << device;
  }
  static void* address() { return reinterpret_cast<void*>(kKernel); }
};
template <bool kTable>
using SplitKernel = Kernel<&sparse_decode_kernel<true, kTable>, kThreads, sizeof(SharedMemoryPlan)>;
template <bool kTable>
using RowKernel = Kernel<&sparse_decode_kernel<false, kTable>, kThreads, sizeof(SharedMemoryPlan)>;
template <bool kTable>
using PrefillKernel = Kernel<&prefill::sparse_prefill_kernel<kTable>, prefill::kThreads, sizeof(prefill::PrefillMemory)>;

template <typename K>
void launch_kernel(const Params& params, dim3 grid, bool pdl, cudaStream_t stream) {
  K::configure();
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(K::kThreads);
  config.dynamicSmemBytes = K::kShared;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = pdl ? 1 : 0;
  void* arguments[] = {const_cast<Params*>(&params)};
  check_cuda(cudaLaunchKernelExC(&config, K::address(), arguments), "sparse_decode", "launch");
}

void advance(Cache& cache, int rows) {
  cache.indices += rows * cache.indices_stride;
  if (cache.topk_length != nullptr) cache.topk_length += rows;
}

void advance(PageTable& table, int rows) {
  if (table.table_of_row != nullptr) {
    table.table_of_row += rows;
  } else {
    table.pages += rows * table.stride;
  }
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

Plan make_plan(int rows, int heads, int width, int extra_width, int num_sms, int splits_override, bool prefill) {
  const int max_leaves = std::max(ceil_div(width, kLeaf) + ceil_div(extra_width, kLeaf), 1);
  const int max_units = std::min(max_leaves, kMaxUnits), needed_units = std::min(max_leaves, kMaxUnitsLong);
  Plan plan = {};
  if (prefill) {
    plan.head_groups = ceil_div(heads, prefill::kHeads);
    plan.splits = 1;
    plan.prefill_blocks = static_cast<int>(std::min<int64_t>(static_cast<int64_t>(rows) * plan.head_groups, num_sms));
    return plan;
  }
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

namespace {

template <bool kTable>
void launch_kernels(Params p, const Plan& plan, bool pdl, cudaStream_t stream) {
  const int groups = plan.head_groups;
  if (plan.prefill_blocks > 0) {
    p.head_blocks = groups;
    launch_kernel<PrefillKernel<kTable>>(p, dim3(plan.prefill_blocks), pdl, stream);
    return;
  }
  p.splits = make_divisor(plan.splits);
  p.unit_slots = plan.unit_slots;
  p.guess_main_leaves = ceil_div(p.main.width, kLeaf);
  const int leaves = std::max(p.guess_main_leaves + ceil_div(p.extra.width, kLeaf), 1), unit_log2 = unit_leaves_log2(leaves);
  p.guess_leaves = ceil_div(ceil_div(leaves, 1 << unit_log2), plan.splits) << unit_log2;
  if (plan.splits > 1) {
    launch_kernel<SplitKernel<kTable>>(p, dim3(groups, plan.splits, p.rows), pdl, stream);
    return;
  }
  for (int rows = p.rows; rows > 0; rows -= plan.rows_per_launch) {
    p.rows = std::min(rows, plan.rows_per_launch);
    launch_kernel<RowKernel<kTable>>(p, dim3(groups, 1, p.rows), pdl, stream);
    p.q += p.rows * p.q_stride_row;
    p.out += p.rows * p.out_stride_row;
    if (p.lse != nullptr) p.lse += static_cast<int64_t>(p.rows) * p.heads;
    advance(p.main, p.rows);
    advance(p.extra, p.rows);
    if (kTable) advance(p.extra_table, p.rows);
  }
}

}  // namespace

void launch(const Params& params, const Plan& plan, bool pdl, cudaStream_t stream) {
  if (params.extra_table.pages != nullptr) {
    launch_kernels<true>(params, plan, pdl, stream);
  } else {
    launch_kernels<false>(params, plan, pdl, stream);
  }
}

template <typename K>
static KernelAttributes attributes_of(const char* name) {
  K::configure();
  cudaFuncAttributes a = {};
  check_cuda(cudaFuncGetAttributes(&a, K::address()), "sparse_decode", "cudaFuncGetAttributes");
  int blocks = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, K::address(), K::kThreads, K::kShared), "sparse_decode", "occupancy query");
  return {name, a.numRegs, static_cast<int>(a.sharedSizeBytes) + K::kShared, static_cast<int>(a.localSizeBytes), blocks};
}

std::vector<KernelAttributes> kernel_attributes() {
  return {attributes_of<SplitKernel<false>>("sparse_decode_split"),      attributes_of<RowKernel<false>>("sparse_decode_row"),
          attributes_of<PrefillKernel<false>>("sparse_prefill"),         attributes_of<SplitKernel<true>>("sparse_decode_split, page table"),
          attributes_of<RowKernel<true>>("sparse_decode_row, page table"), attributes_of<PrefillKernel<true>>("sparse_prefill, page table")};
}

std::vector<std::pair<std::string, int>> shared_bytes() {
  return {{"sparse_decode_kernel", SplitKernel<false>::kShared}, {"sparse_prefill_kernel", PrefillKernel<false>::kShared}};
}

}  // namespace dsv4::sparse_decode

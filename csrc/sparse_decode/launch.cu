// Geometry and launch of the sparse decode kernel.
#include <algorithm>

#include "kernel.cuh"
#include "kernels.h"

namespace dsv4::sparse_decode {

namespace {

constexpr int kMaxSplits = 32;                          // one bit each in the control word
constexpr int64_t kMaxPartialBytes = 62ll << 20;        // scratch of one call
constexpr int kMaxLongItems = 1024;                     // blocks that fold long rows through a slot of their own

template <bool kTable>
using SplitKernel = Kernel<&sparse_decode_kernel<true, kTable>, kThreads, sizeof(SharedMemoryPlan)>;
template <bool kTable>
using RowKernel = Kernel<&sparse_decode_kernel<false, kTable>, kThreads, sizeof(SharedMemoryPlan)>;

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

Plan make_plan(int rows, int heads, int width, int extra_width, int num_sms, int splits_override, bool prefill, bool pairs) {
  const int max_leaves = std::max(ceil_div(width, kLeaf) + ceil_div(extra_width, kLeaf), 1);
  const int max_units = std::min(max_leaves, kMaxUnits), needed_units = std::min(max_leaves, kMaxUnitsLong);
  Plan plan = {};
  if (!prefill && pairs && max_leaves <= kShortLeaves) {
    const int64_t groups = static_cast<int64_t>(rows) * ceil_div(heads, kBlockHeads);
    plan.pair_blocks = static_cast<int>(std::min<int64_t>((groups + pairs::kGroups - 1) / pairs::kGroups, num_sms));
    return plan;
  }
  if (prefill) {
    plan.splits = 1;
    if (heads <= 1 << prefill::kMaxStackedLog2) {
      plan.stacked_log2 = prefill::kMinStackedLog2;
      while (heads > 1 << plan.stacked_log2) ++plan.stacked_log2;
      plan.head_groups = 1;
      plan.prefill_blocks = std::min(ceil_div(rows, prefill::kHeads >> plan.stacked_log2), num_sms);
      return plan;
    }
    plan.head_groups = ceil_div(heads, prefill::kHeads);
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
void launch_decode(Params p, const Plan& plan, const Launcher& launcher) {
  const int groups = plan.head_groups;
  p.splits = make_divisor(plan.splits);
  p.unit_slots = plan.unit_slots;
  p.guess_main_leaves = ceil_div(p.main.width, kLeaf);
  const int leaves = std::max(p.guess_main_leaves + ceil_div(p.extra.width, kLeaf), 1), unit_log2 = unit_leaves_log2(leaves);
  p.guess_leaves = ceil_div(ceil_div(leaves, 1 << unit_log2), plan.splits) << unit_log2;
  if (plan.splits > 1) {
    SplitKernel<kTable>::launch(p, dim3(groups, plan.splits, p.rows), launcher);
    return;
  }
  for (int rows = p.rows; rows > 0; rows -= plan.rows_per_launch) {
    p.rows = std::min(rows, plan.rows_per_launch);
    RowKernel<kTable>::launch(p, dim3(groups, 1, p.rows), launcher);
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
  const Launcher launcher = {kName, pdl, stream};
  if (plan.pair_blocks > 0) {
    pairs::launch(params, plan, launcher);
  } else if (plan.prefill_blocks > 0) {
    prefill::launch(params, plan, launcher);
  } else if (params.extra_table.pages != nullptr) {
    launch_decode<true>(params, plan, launcher);
  } else {
    launch_decode<false>(params, plan, launcher);
  }
}

std::vector<KernelAttributes> kernel_attributes() {
  std::vector<KernelAttributes> all = {SplitKernel<false>::attributes("sparse_decode_split"), RowKernel<false>::attributes("sparse_decode_row"),
                                       SplitKernel<true>::attributes("sparse_decode_split, page table"),
                                       RowKernel<true>::attributes("sparse_decode_row, page table")};
  for (const auto& many : {prefill::kernel_attributes(), pairs::kernel_attributes()}) all.insert(all.end(), many.begin(), many.end());
  return all;
}

std::vector<std::pair<std::string, int>> shared_bytes() {
  std::vector<std::pair<std::string, int>> all = {{"sparse_decode_kernel", SplitKernel<false>::kShared}};
  for (const auto& many : {prefill::shared_bytes(), pairs::shared_bytes()}) all.insert(all.end(), many.begin(), many.end());
  return all;
}

}  // namespace dsv4::sparse_decode

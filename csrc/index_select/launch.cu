// Geometry and launches of the index selection; the score kernels are compiled in their own files.
#include <algorithm>

#include "merge.cuh"
#include "slots.cuh"

namespace dsv4::index_select {

namespace {

constexpr int kMaxGridRows = 65535;

int multiprocessors() {
  int device = 0, count = 0;
  check_cuda(cudaGetDevice(&device), "index_select", "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "index_select", "cudaDeviceGetAttribute");
  return count;
}

// Blocks for a group of rows: the count whose last wave wastes least, where starting a block costs as much as scoring `start` entries.
int best_splits(int groups, int width, int slots, int start) {
  const int64_t entries = std::clamp(width, kPage, 1 << 15);
  int best = 1;
  int64_t best_cost = INT64_MAX;
  for (int splits = 1; splits <= slots; ++splits) {
    const int64_t waves = ceil_div(static_cast<int64_t>(groups) * splits, slots);
    const int64_t cost = waves * (ceil_div(entries, splits) + start);
    if (cost < best_cost) best = splits, best_cost = cost;
  }
  return best;
}

int64_t round_up(int64_t n, int64_t unit) { return ceil_div(n, unit) * unit; }

void set_lists(Plan& plan, int width) {
  plan.chunk = chunk_of(plan.group_rows);
  const Range range = range_of(width, plan.splits, plan.chunk);
  plan.lists = plan.splits * std::max(range.lists, 1);
  plan.list_capacity = std::max(std::min(range.entries, plan.chunk), kPage);
}

// keys start on a 16-byte boundary, and so do offsets: a list has a multiple of 64 entries
int64_t bytes_of_row(const Plan& plan) { return plan.lists * (static_cast<int64_t>(sizeof(ListHeader)) + 6ll * plan.list_capacity); }

const void* allowed_merge_kernel() {
  static uint64_t configured = 0;
  const void* kernel = reinterpret_cast<const void*>(&merge_kernel);
  allow_shared(kName, kernel, sizeof(MergeShared), configured);
  return kernel;
}

}  // namespace

Plan make_plan(int rows, int width, int rows_per_request, int64_t max_scratch_bytes, bool score) {
  Plan plan = {};
  plan.group_rows = score && rows_per_request > 1 ? kSharedRows : 1;
  const int slots = score ? multiprocessors() : multiprocessors() / 4;
  const int start = plan.group_rows == 1 ? 512 : 256;
  for (int launches = std::max(ceil_div(rows, kMaxGridRows), 1);; ++launches) {  // equal ones, as few as the scratch allows
    plan.rows_per_launch = static_cast<int>(round_up(std::max(ceil_div(rows, launches), 1), plan.group_rows));
    plan.splits = best_splits(plan.rows_per_launch / plan.group_rows, width, slots, start);
    set_lists(plan, width);
    plan.scratch_bytes = plan.rows_per_launch * bytes_of_row(plan);
    if (plan.scratch_bytes <= max_scratch_bytes || plan.rows_per_launch <= plan.group_rows) return plan;
    launches = std::max(launches, static_cast<int>(plan.scratch_bytes / max_scratch_bytes) - 1);
  }
}

template <typename Params>
void advance_lengths(Params& p, int64_t first, int rows) {
  p.split.lengths += first;
  p.split.rows = rows;
}
ScoreParams rows_of(ScoreParams p, int64_t first, int rows) {
  advance_lengths(p, first, rows);
  p.table.pages += first * p.table.stride;
  p.q += first * p.q_stride_row;
  if (p.q_scales != nullptr) p.q_scales += first * p.q_scales_stride;
  p.weights += first * p.weights_stride;
  if (p.logits != nullptr) p.logits += first * p.logits_stride;
  return p;
}
ListParams rows_of(ListParams p, int64_t first, int rows) {
  advance_lengths(p, first, rows);
  p.logits += first * p.logits_stride;
  return p;
}
MergeParams rows_of(MergeParams p, int64_t first, int rows) {
  advance_lengths(p, first, rows);
  if (p.table.pages != nullptr) p.table.pages += first * p.table.stride;
  if (p.slots != nullptr) p.slots += first * p.slots_stride;
  if (p.entries != nullptr) p.entries += first * p.entries_stride;
  if (p.logits != nullptr) p.logits += first * p.logits_stride;
  return p;
}

Lists carve(uint8_t* scratch, const Plan& plan, int rows) {
  const int64_t lists = static_cast<int64_t>(rows) * plan.lists;
  uint8_t* keys = scratch + lists * sizeof(ListHeader);
  return {scratch, reinterpret_cast<uint32_t*>(keys), reinterpret_cast<uint16_t*>(keys + 4 * lists * plan.list_capacity)};
}

void launch_score(const ScoreParams& p, Format format, bool pdl, cudaStream_t stream) {
  switch (format) {
    case Format::kFp8Half: return launch_score_format<Format::kFp8Half>(p, pdl, stream);
    case Format::kFp8: return launch_score_format<Format::kFp8>(p, pdl, stream);
    case Format::kFp4: return launch_score_format<Format::kFp4>(p, pdl, stream);
  }
}

void launch_lists(const ListParams& p, bool pdl, cudaStream_t stream) {
  Launcher{kName, pdl, stream}(&list_kernel, dim3(p.split.splits, p.split.rows), kListThreads, 0, p);
}

void launch_merge(const MergeParams& p, bool pdl, cudaStream_t stream) {
  allowed_merge_kernel();
  Launcher{kName, pdl, stream}(&merge_kernel, dim3(p.split.rows), kMergeThreads, sizeof(MergeShared), p);
}

void launch_slots(const SlotParams& p, bool pdl, cudaStream_t stream) {
  Launcher{kName, pdl, stream}(p.narrow ? &slots_kernel<uint16_t> : &slots_kernel<int32_t>, dim3(p.rows), kSlotThreads, 0, p);
}

std::vector<KernelAttributes> kernel_attributes() {
  std::vector<KernelAttributes> all;
  for (const int group_rows : {1, kSharedRows}) {
    all.push_back(score_attributes<Format::kFp8Half>(group_rows));
    all.push_back(score_attributes<Format::kFp8>(group_rows));
    all.push_back(score_attributes<Format::kFp4>(group_rows));
  }
  all.push_back(attributes_of(kName, allowed_merge_kernel(), "index_merge", kMergeThreads, sizeof(MergeShared)));
  all.push_back(attributes_of(kName, reinterpret_cast<const void*>(&list_kernel), "index_lists", kListThreads, 0));
  all.push_back(attributes_of(kName, reinterpret_cast<const void*>(&slots_kernel<int32_t>), "index_slots", kSlotThreads, 0));
  all.push_back(attributes_of(kName, reinterpret_cast<const void*>(&slots_kernel<uint16_t>), "index_slots_narrow", kSlotThreads, 0));
  return all;
}

std::vector<std::pair<std::string, int>> shared_bytes() {
  return {{"index_score_row", sizeof(ScoreShared<Format::kFp8Half, 1>)},
          {"index_score_shared", sizeof(ScoreShared<Format::kFp8Half, kSharedRows>)},
          {"index_merge", sizeof(MergeShared)},
          {"index_lists", sizeof(StreamShared)}};
}

}  // namespace dsv4::index_select

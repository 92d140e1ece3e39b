// Choice and launch of the kernels.
#include <algorithm>
#include <stdexcept>

#include "kernel.cuh"

namespace dsv4::fp8_linear {

namespace {

constexpr char kName[] = "fp8_linear";

using LinearKernel = void (*)(Params, Plan);

struct Variant {
  int column_tiles, row_tiles, warp_rows;
  LinearKernel kernel;
};

template <int kColumnTiles, int kRowTiles, int kWarpRows>
Variant variant() {
  return {kColumnTiles, kRowTiles, kWarpRows, &linear_kernel<Config<kColumnTiles, kRowTiles, kWarpRows>>};
}

const Variant kVariants[] = {
    variant<1, 1, 1>(), variant<1, 2, 1>(), variant<1, 1, 2>(), variant<1, 1, 4>(), variant<1, 1, 8>(),
    variant<2, 1, 1>(), variant<2, 2, 1>(), variant<2, 1, 2>(), variant<2, 2, 2>(), variant<2, 1, 4>(), variant<2, 1, 8>(),
    variant<4, 1, 2>(), variant<4, 2, 2>(), variant<4, 1, 4>(), variant<4, 2, 4>(), variant<4, 1, 8>(),
    variant<8, 1, 4>(), variant<8, 1, 8>(),
};

const Variant* find(int column_tiles, int row_tiles, int warp_rows) {
  for (const Variant& v : kVariants) {
    if (v.column_tiles == column_tiles && v.row_tiles == row_tiles && v.warp_rows == warp_rows) return &v;
  }
  return nullptr;
}

int slices_of(int inputs) {
  int slices = kMaxSlices;
  while (slices > inputs / kBlock) slices /= 2;
  return slices;
}

int tiles_of(int64_t weight_rows, int row_tiles, int warp_rows) {
  const int rows = kTileRows * row_tiles * warp_rows;
  return static_cast<int>(weight_rows / rows);
}

// Warps beside each other share x, and the splits that this makes share its reading: with one, every block reads all of x.
// That is as much as the weights at 8 rows and 4,096 inputs, where a second launch for the splits' sum costs 0.7 us.
int warps_beside(int column_tiles, int rows, int inputs) {
  const bool long_inputs = inputs >= 2048;
  if (column_tiles == 8) return long_inputs ? 8 : 4;
  if (column_tiles == 4) return long_inputs ? 4 : 2;
  if (column_tiles == 2) return long_inputs ? 4 : 1;
  return rows > 4 && inputs >= 4096 ? 2 : 1;
}

// Row tiles of a warp: two where one would not keep enough on its way, if that leaves a tile for most multiprocessors.
void choose(Plan& plan, int rows, int groups, int outputs, int inputs, int num_sms, int asked_row_tiles, int asked_warp_rows) {
  const int64_t weight_rows = static_cast<int64_t>(groups) * outputs;
  const int least = kMaxSlices / plan.slices;
  plan.warp_rows = std::max(least, asked_warp_rows ? asked_warp_rows : warps_beside(plan.column_tiles, rows, inputs));
  const int blocks = inputs / kBlock / plan.slices;
  int row_tiles = asked_row_tiles;
  if (row_tiles == 0) {
    row_tiles = plan.column_tiles > 1 || blocks < steps_of(1) ? 2 : 1;
    const int splits = plan.slices * plan.warp_rows / kWarps;
    if (4 * tiles_of(weight_rows, row_tiles, plan.warp_rows) * splits < 3 * num_sms) row_tiles = 1;
  }
  while (row_tiles > 1 && (find(plan.column_tiles, row_tiles, plan.warp_rows) == nullptr || outputs % (kTileRows * row_tiles * plan.warp_rows))) {
    row_tiles /= 2;  // one is always possible: outputs are a multiple of 128
  }
  plan.row_tiles = row_tiles;
}

int x_shared(const Plan& plan, int rows, int slots) {
  const int here = kWarps / plan.warp_rows, kept = rows_in_shared(plan.column_tiles, rows);
  return x_bytes(kept, here, slots) + factor_bytes(kept, here, slots);
}

int shared_of(const Plan& plan, int rows) {
  return std::max(x_shared(plan, rows, plan.slots), plan.exchange + sum_bytes(rows, plan.row_tiles));
}

// x of all blocks of inputs beside the sums, or as many blocks as are on their way under them.
void place(Plan& plan, int rows) {
  plan.slots = plan.slice_blocks.each + (plan.slice_blocks.more > 0);
  plan.exchange = x_shared(plan, rows, plan.slots);
  if (shared_of(plan, rows) <= kMaxShared) return;
  const int ahead = ahead_of(plan.column_tiles, plan.row_tiles), most = plan.slots;
  plan.slots = ahead;
  while (plan.slots + ahead <= most && x_shared(plan, rows, plan.slots + ahead) <= kMaxShared) plan.slots += ahead;
  plan.exchange = 0;
}

void allow_shared(const Variant& v) {
  static uint64_t configured[std::size(kVariants)] = {};
  dsv4::allow_shared(kName, reinterpret_cast<const void*>(v.kernel), kMaxShared, configured[&v - kVariants]);
}

}  // namespace

// Shared memory of a multiprocessor of the current device; asked once.
int multiprocessor_shared() {
  static int known[64] = {};
  int device = 0;
  check_cuda(cudaGetDevice(&device), kName, "cudaGetDevice");
  int& bytes = known[device % 64];
  if (bytes == 0) {
    check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device), kName, "cudaDeviceGetAttribute");
  }
  return bytes;
}

std::string problem(int rows, int groups, int outputs, int inputs) {
  if (rows > kMaxRows) return "at most " + std::to_string(kMaxRows) + " rows, got " + std::to_string(rows);
  if (inputs % kBlock || inputs < kBlock) return "inputs a multiple of 128, got " + std::to_string(inputs);
  if (outputs % kBlock || outputs < kBlock) return "outputs a multiple of 128, got " + std::to_string(outputs);
  if (static_cast<int64_t>(groups) * outputs > 1 << 24) return "at most 2^24 outputs of all groups, got " + std::to_string(int64_t(groups) * outputs);
  if (inputs > 1 << 20) return "at most 2^20 inputs, got " + std::to_string(inputs);
  return "";
}

Plan make_plan(int rows, int groups, int outputs, int inputs, int num_sms, int sm_shared, int64_t prefetch, int row_tiles, int warp_rows,
               int blocks) {
  Plan plan = {};
  plan.column_tiles = rows <= 8 ? 1 : rows <= 16 ? 2 : rows <= 32 ? 4 : 8;
  plan.slices = slices_of(inputs);
  plan.slice_blocks = {inputs / kBlock / plan.slices, inputs / kBlock % plan.slices};
  choose(plan, rows, groups, outputs, inputs, num_sms, row_tiles, warp_rows);
  plan.splits = plan.slices * plan.warp_rows / kWarps;
  place(plan, rows);
  const int tiles = tiles_of(static_cast<int64_t>(groups) * outputs, plan.row_tiles, plan.warp_rows);
  plan.group_tiles = tiles / groups;
  // blocks of a multiprocessor: by registers, and by shared memory, of which each block takes 1 KB more
  const int resident = plan.column_tiles <= 2 && sm_shared >= 2 * (shared_of(plan, rows) + 1024) ? 2 : 1;
  // a second block of a multiprocessor only where the first would be busy for long: it is the next kernel's place
  const bool held = plan.slice_blocks.each + (plan.slice_blocks.more > 0) <= ahead_of(plan.column_tiles, plan.row_tiles);
  const bool few = plan.splits == 1 && tiles <= 2 * num_sms && held;
  plan.blocks = std::min(tiles, blocks ? blocks : std::max(1, (few ? 1 : resident) * num_sms / plan.splits));
  plan.block_tiles = {tiles / plan.blocks, tiles % plan.blocks};
  plan.prefetch_rows = static_cast<int32_t>(std::min<int64_t>(prefetch / (inputs / plan.splits), 1 << 20));
  if (plan.splits > 1) plan.partial_bytes = static_cast<int64_t>(plan.splits) * rows * groups * outputs * 4;
  return plan;
}

void launch(const Params& params, const Plan& plan, bool pdl, cudaStream_t stream) {
  const std::string why_not = problem(params.rows, params.groups, params.outputs, params.inputs);
  if (!why_not.empty()) throw std::runtime_error("fp8_linear: takes " + why_not);
  const Variant* const v = find(plan.column_tiles, plan.row_tiles, plan.warp_rows);
  if (v == nullptr || shared_of(plan, params.rows) > kMaxShared) throw std::runtime_error("fp8_linear: no kernel for this plan");
  allow_shared(*v);
  const Launcher launcher = {kName, pdl, stream};
  launcher(v->kernel, dim3(plan.blocks, plan.splits), kThreads, shared_of(plan, params.rows), params, plan);
  if (plan.splits == 1) return;
  const int64_t weight_rows = static_cast<int64_t>(params.groups) * params.outputs;
  const dim3 grid(static_cast<unsigned>((weight_rows / 4 + kMergeThreads - 1) / kMergeThreads), params.rows);
  void (*const merge)(Params) = plan.splits == 2 ? merge_kernel<2> : plan.splits == 4 ? merge_kernel<4> : merge_kernel<8>;
  launcher(merge, grid, kMergeThreads, 0, params);
}

std::vector<KernelAttributes> kernel_attributes() {
  std::vector<KernelAttributes> all;
  for (const Variant& v : kVariants) {
    allow_shared(v);
    const std::string name = "fp8_linear_" + std::to_string(v.column_tiles) + "_" + std::to_string(v.row_tiles) + "_" + std::to_string(v.warp_rows);
    all.push_back(attributes_of(kName, reinterpret_cast<const void*>(v.kernel), name, kThreads, sum_bytes(8 * v.column_tiles, v.row_tiles)));
  }
  return all;
}

int shared_bytes() { return kMaxShared; }

}  // namespace dsv4::fp8_linear

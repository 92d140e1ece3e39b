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
    variant<1, 1, 1>(), variant<1, 2, 1>(), variant<1, 1, 2>(), variant<1, 2, 2>(), variant<1, 1, 4>(), variant<1, 2, 4>(), variant<1, 1, 8>(),
    variant<2, 1, 1>(), variant<2, 1, 2>(), variant<2, 1, 4>(), variant<2, 2, 4>(), variant<2, 1, 8>(),
    variant<4, 1, 4>(), variant<4, 2, 4>(), variant<4, 1, 8>(), variant<4, 2, 8>(),
    variant<8, 1, 8>(), variant<8, 2, 8>(),
};

const Variant* find(int column_tiles, int row_tiles, int warp_rows) {
  for (const Variant& v : kVariants) {
    if (v.column_tiles == column_tiles && v.row_tiles == row_tiles && v.warp_rows == warp_rows) return &v;
  }
  return nullptr;
}

// By the inputs alone, as the bits depend on it: slices of 512 inputs at least, that a bulk copy of a row's part is long.
int slices_of(int inputs) {
  int slices = kMaxSlices;
  while (slices > 2 && inputs < 512 * slices) slices /= 2;
  return inputs >= 2 * kBlock ? slices : 1;
}

int tiles_of(int64_t weight_rows, int row_tiles, int warp_rows) {
  const int rows = kTileRows * row_tiles * warp_rows;
  return static_cast<int>(weight_rows / rows);
}

// Warps beside each other share x, and the splits that this makes share its reading: with one, every block reads all of x.
int warps_beside(int column_tiles, int rows, int inputs) {
  if (column_tiles == 8) return 8;
  if (inputs < 2048) return 1;
  if (column_tiles == 4) return 8;
  if (column_tiles == 2) return inputs >= 4096 ? 4 : 1;
  return rows > 4 && inputs >= 8192 ? 4 : 1;
}

// Row tiles of a warp: two where one would not keep enough on its way or x is read often, if that leaves a tile for most
// multiprocessors.
int row_tiles_of(const Plan& plan, int64_t weight_rows, int outputs, int num_sms, int asked) {
  const bool fits = outputs % (kTileRows * 2 * plan.warp_rows) == 0 && find(plan.column_tiles, 2, plan.warp_rows) != nullptr;
  const bool only = find(plan.column_tiles, 1, plan.warp_rows) == nullptr;
  const bool wanted = (plan.column_tiles > 1 || plan.slice_blocks.each < 4) &&
                      4 * tiles_of(weight_rows, 2, plan.warp_rows) * plan.splits >= 3 * num_sms;
  return fits && (only || asked == 2 || (asked == 0 && wanted)) ? 2 : 1;
}

int shared_of(const Plan& plan) { return plan.own + kWarps * plan.own_bytes; }

// x of all blocks of inputs in one stage, or two stages of as many blocks as fit; then first weights, as many as let two blocks
// stand on a multiprocessor, this kernel's and the next's, or else as many as fit.
void place(Plan& plan, int rows, int sm_shared) {
  const int here = kWarps / plan.warp_rows, kept = rows_in_shared(plan.column_tiles, rows);
  const int exchange = exchange_bytes(plan.column_tiles, plan.row_tiles, plan.warp_rows), ahead = ahead_of(plan.row_tiles);
  const auto behind_x = [&](int stages, int blocks) {
    return kBarrierBytes + stages * (x_bytes(kept, here, blocks) + factor_bytes(plan.column_tiles, here, blocks));
  };
  const int most = kMaxShared - kWarps * exchange;
  plan.stages = 1;
  plan.chunk_blocks = plan.slice_blocks.each + (plan.slice_blocks.more > 0);
  if (streams(plan.column_tiles) && behind_x(1, plan.chunk_blocks) > most) {
    plan.stages = kMaxStages;
    plan.chunk_blocks = ahead;
    while (behind_x(kMaxStages, 2 * plan.chunk_blocks) <= most) plan.chunk_blocks *= 2;
  }
  plan.own = behind_x(plan.stages, plan.chunk_blocks);
  const auto fits = [&](int blocks, int limit) { return plan.own + kWarps * std::max(exchange, first_bytes(plan.row_tiles, blocks)) <= limit; };
  const int all = plan.stages == 1 ? (plan.chunk_blocks + ahead - 1) / ahead * ahead : plan.chunk_blocks;
  for (const int limit : {std::min(kMaxShared, sm_shared / 2 - 1024), kMaxShared}) {
    plan.first_blocks = 0;
    for (int blocks = ahead; blocks <= all && first_bytes(plan.row_tiles, blocks) <= kMaxFirstBytes && fits(blocks, limit); blocks *= 2) {
      plan.first_blocks = blocks;
    }
    if (plan.first_blocks > 0) break;
  }
  plan.own_bytes = std::max(exchange, first_bytes(plan.row_tiles, plan.first_blocks));
}

// Everything but the blocks, for these column tiles.
void choose(Plan& plan, int rows, int groups, int outputs, int num_sms, int sm_shared, int row_tiles, int warp_rows) {
  const int64_t weight_rows = static_cast<int64_t>(groups) * outputs;
  plan.warp_rows = std::max(kWarps / plan.slices, warp_rows);
  plan.splits = plan.slices * plan.warp_rows / kWarps;
  plan.row_tiles = row_tiles_of(plan, weight_rows, outputs, num_sms, row_tiles);
  place(plan, rows, sm_shared);
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

Plan make_plan(int rows, int groups, int outputs, int inputs, int num_sms, int sm_shared, int row_tiles, int warp_rows, int blocks) {
  Plan plan = {};
  plan.slices = slices_of(inputs);
  plan.slice_blocks = {inputs / kBlock / plan.slices, inputs / kBlock % plan.slices};
  plan.column_tiles = rows <= 8 ? 1 : rows <= 16 ? 2 : rows <= 32 ? 4 : 8;
  const int beside = warp_rows ? warp_rows : warps_beside(plan.column_tiles, rows, inputs);
  choose(plan, rows, groups, outputs, num_sms, sm_shared, row_tiles, beside);
  if (shared_of(plan) > kMaxShared) {  // inputs so long that their x has to come in chunks, which the kernels for many rows do
    plan.column_tiles = std::max(plan.column_tiles, 4);
    choose(plan, rows, groups, outputs, num_sms, sm_shared, row_tiles, kWarps);
  }
  const int tiles = tiles_of(static_cast<int64_t>(groups) * outputs, plan.row_tiles, plan.warp_rows);
  plan.group_tiles = tiles / groups;
  // blocks of a multiprocessor: by registers, and by shared memory, of which each block takes 1 KB more
  const int resident = plan.column_tiles <= 2 && sm_shared >= 2 * (shared_of(plan) + 1024) ? 2 : 1;
  // a second block of a multiprocessor only where the first would be busy for long: it is the next kernel's place
  const bool held = plan.slice_blocks.each + (plan.slice_blocks.more > 0) <= plan.first_blocks;
  const bool few = plan.splits == 1 && tiles <= 2 * num_sms && held;
  plan.blocks = std::min(tiles, blocks ? blocks : std::max(1, (few ? 1 : resident) * num_sms / plan.splits));
  plan.block_tiles = {tiles / plan.blocks, tiles % plan.blocks};
  if (plan.splits > 1) plan.partial_bytes = static_cast<int64_t>(plan.splits) * rows * groups * outputs * 4;
  return plan;
}

void launch(const Params& params, const Plan& plan, bool pdl, cudaStream_t stream) {
  const std::string why_not = problem(params.rows, params.groups, params.outputs, params.inputs);
  if (!why_not.empty()) throw std::runtime_error("fp8_linear: takes " + why_not);
  const Variant* const v = find(plan.column_tiles, plan.row_tiles, plan.warp_rows);
  if (v == nullptr || shared_of(plan) > kMaxShared) throw std::runtime_error("fp8_linear: no kernel for this plan");
  allow_shared(*v);
  const Launcher launcher = {kName, pdl, stream};
  launcher(v->kernel, dim3(plan.blocks, plan.splits), kThreads, shared_of(plan), params, plan);
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
    all.push_back(attributes_of(kName, reinterpret_cast<const void*>(v.kernel), name, kThreads, kWarps * exchange_bytes(v.column_tiles, v.row_tiles, v.warp_rows)));
  }
  return all;
}

int shared_bytes() { return kMaxShared; }

}  // namespace dsv4::fp8_linear

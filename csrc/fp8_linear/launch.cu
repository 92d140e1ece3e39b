// Choice and launch of the kernels.
#include <algorithm>
#include <stdexcept>

#include "draft.h"
#include "kernel.cuh"
#include "many.h"
#include "norm.h"

namespace dsv4::fp8_linear {

namespace {

constexpr char kName[] = "fp8_linear";

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

namespace {

// By the inputs alone, as the bits depend on it. Slices of a block are warps that need not lie beside each other.
int slices_of(int inputs) { return inputs >= 2048 ? kMaxSlices : inputs >= 2 * kBlock ? 2 : 1; }

int index_of(int warp_rows) { return static_cast<int>(std::find(std::begin(kWarpRows), std::end(kWarpRows), warp_rows) - kWarpRows); }

LinearKernel kernel_of(int index, bool rotates) {
  static uint64_t configured[2][std::size(kWarpRows)] = {};
  const LinearKernel kernel = (rotates ? kernels<true>() : kernels<false>())[index];
  allow_shared(kName, reinterpret_cast<const void*>(kernel), kMaxSharedBytes, configured[rotates][index]);
  return kernel;
}

const TileVariant* find_tile(const Plan& plan) {
  for (const TileVariant& v : kTileVariants) {
    if (v.column_tiles == plan.column_tiles && v.row_tiles == plan.row_tiles && v.warp_rows == plan.warp_rows) return &v;
  }
  return nullptr;
}

LinearKernel tile_kernel_of(const TileVariant& v, bool rotates) {
  static uint64_t configured[2][std::size(kTileVariants)] = {};
  const std::ptrdiff_t index = &v - kTileVariants;
  const LinearKernel kernel = (rotates ? tile_kernels<true>() : tile_kernels<false>())[index];
  allow_shared(kName, reinterpret_cast<const void*>(kernel), std::max(kMaxSharedBytes, multiprocessor_shared() / 2), configured[rotates][index]);
  return kernel;
}

Plan sliced(int inputs) {
  Plan plan = {};
  plan.slices = slices_of(inputs);
  plan.slice_blocks = {inputs / kBlock / plan.slices, inputs / kBlock % plan.slices};
  plan.most_blocks = plan.slice_blocks.each + (plan.slice_blocks.more > 0);
  return plan;
}

constexpr int kSplitWarpRows = 4;

// For few rows: x of all inputs of a block lies in shared memory.
Plan make_few_plan(int rows, int groups, int outputs, int inputs, int num_sms, int sm_shared, int warp_rows, int blocks) {
  Plan plan = sliced(inputs);
  plan.warp_rows = std::max(kWarps / plan.slices, warp_rows);
  plan.splits = plan.slices * plan.warp_rows / kWarps;
  plan.row_tiles = plan.in_turn = 1;
  plan.exchange = kBarrierBytes + x_bytes(rows, kWarps / plan.warp_rows, plan.most_blocks);
  plan.shared_bytes = plan.exchange + exchange_bytes(plan.warp_rows);
  const int64_t weight_rows = static_cast<int64_t>(groups) * outputs;
  const int tiles = static_cast<int>(weight_rows / (kTileRows * plan.warp_rows));
  plan.group_tiles = tiles / groups;
  // blocks of a multiprocessor: by registers, and by shared memory, of which each block takes 1 KB more
  const int resident = sm_shared >= 2 * (plan.shared_bytes + 1024) ? 2 : 1;
  // a second block of a multiprocessor only where the first would be busy for long: it is the next kernel's place
  const bool few = plan.splits == 1 && tiles <= 2 * num_sms && plan.most_blocks <= kAhead;
  plan.blocks = std::min(tiles, blocks ? blocks : std::max(1, (few ? 1 : resident) * num_sms / plan.splits));
  plan.block_tiles = {tiles / plan.blocks, tiles % plan.blocks};
  set_partial_bytes(plan, rows, weight_rows);
  return plan;
}

// Whether there is such a kernel, and its shared memory suffices.
bool fits(const Plan& plan) { return plan.shared_bytes <= kMaxSharedBytes && index_of(plan.warp_rows) < static_cast<int>(std::size(kWarpRows)); }

// For more rows: a block has a tile of the outputs and one or two slices of the inputs.
Plan make_tile_plan(int rows, int groups, int outputs, int inputs, int num_sms, int sm_shared, const Tuning& tuning) {
  const int64_t weight_rows = static_cast<int64_t>(groups) * outputs;
  // of a head's outputs the splits' sums would be as many bytes as its weights
  const bool tuned = tuning.row_tiles || tuning.warp_rows || tuning.in_turn;
  const bool is_head = rows > kTileMostRows / 2 && weight_rows / kBlock > 2 * num_sms && !tuned;
  if (rows > kTileMostRows || is_head) return make_units_plan(sliced(inputs), rows, groups, outputs, inputs, num_sms, tuning);
  Plan plan = sliced(inputs);
  plan.column_tiles = rows <= 16 ? 2 : rows <= 32 ? 4 : 8;
  const auto choose = [&](int row_tiles, int warp_rows, int in_turn) {
    plan.row_tiles = row_tiles, plan.warp_rows = warp_rows, plan.in_turn = in_turn;
    const int tile = kTileRows * row_tiles * warp_rows, here = kWarps / warp_rows * in_turn;
    const bool possible = find_tile(plan) != nullptr && outputs % tile == 0 && in_turn <= (warp_rows == kWarps ? 2 : 1) &&
                          (plan.slices % here == 0 || (plan.slices == 1 && in_turn == 1));
    plan.splits = possible ? std::max(1, plan.slices / here) : 0;
    plan.blocks = static_cast<int>(weight_rows / tile);
    return possible;
  };
  if (tuned) {
    choose(std::max(1, tuning.row_tiles), std::max(1, tuning.warp_rows), std::max(1, tuning.in_turn));
  } else {
    // the largest tile of which there is one for most of the multiprocessors, up to 16 rows for half of them; or the smallest. But not half
    // a tile where there would be more than multiprocessors: on SM120 each has room for one, and a second turn is as long as the first
    const int least = num_sms * (plan.column_tiles == 2 ? 45 : 62) / 100;
    constexpr int kChoices[][3] = {{2, 8, 2}, {2, 4, 1}, {1, 4, 1}};
    for (const auto& c : kChoices) {
      const Plan larger = plan;
      if (!choose(c[0], c[1], c[2])) continue;
      if (larger.splits > 0 && plan.blocks * plan.splits > num_sms) {
        plan = larger;
        break;
      }
      if (plan.blocks * plan.splits >= least) break;
    }
  }
  plan.group_tiles = plan.blocks / groups;
  plan.shared_bytes = tile_shared_bytes(plan.column_tiles, plan.row_tiles, plan.warp_rows);
  // where there is a multiprocessor for each block, more than half of its shared memory: two must not lie on one
  if (plan.row_tiles == 2 && plan.blocks * plan.splits <= num_sms) plan.shared_bytes = std::max(plan.shared_bytes, sm_shared / 2);
  set_partial_bytes(plan, rows, weight_rows);
  if (plan.in_turn > 1 && stashes(plan.column_tiles, plan.row_tiles)) {
    plan.stash = plan.partial_bytes / 4;
    plan.partial_bytes += static_cast<int64_t>(plan.blocks) * plan.splits * kThreads * plan.row_tiles * plan.column_tiles * 16;
  }
  return plan;
}

// Why the kernels cannot take these sizes; empty: they can.
std::string problem(int rows, int groups, int outputs, int inputs) {
  if (rows > kMaxRows) return "at most " + std::to_string(kMaxRows) + " rows, got " + std::to_string(rows);
  if (inputs % kBlock || inputs < kBlock) return "inputs a multiple of 128, got " + std::to_string(inputs);
  if (outputs % kBlock || outputs < kBlock) return "outputs a multiple of 128, got " + std::to_string(outputs);
  if (static_cast<int64_t>(groups) * outputs > 1 << 24) return "at most 2^24 outputs of all groups, got " + std::to_string(int64_t(groups) * outputs);
  if (inputs > 1 << 20) return "at most 2^20 inputs, got " + std::to_string(inputs);
  return "";
}

}  // namespace

Plan make_plan(int rows, int groups, int outputs, int inputs, int num_sms, int sm_shared, const Tuning& tuning) {
  const std::string why_not = problem(rows, groups, outputs, inputs);
  if (!why_not.empty()) throw std::runtime_error("fp8_linear: takes " + why_not);
  if (rows <= kFewRows && !tuning.in_turn) {
    // the fewest warps beside each other: those have no splits to add, or few. Not where a multiprocessor has one to four tiles
    // of long inputs, as wo_b: split, they are faster between the kernels of a layer (docs/notes/fp8_linear.md)
    const int tiles = groups == 1 && slices_of(inputs) == kMaxSlices ? outputs / kTileRows : 0;
    const int least = tiles > num_sms && tiles <= 4 * num_sms ? kSplitWarpRows : 1;
    for (const int warp_rows : kWarpRows) {
      if (warp_rows < least) continue;
      const int beside = tuning.warp_rows ? tuning.warp_rows : warp_rows;
      const Plan plan = make_few_plan(rows, groups, outputs, inputs, num_sms, sm_shared, beside, tuning.blocks);
      if (tuning.warp_rows || fits(plan)) return plan;
    }
  }
  return make_tile_plan(rows, groups, outputs, inputs, num_sms, sm_shared, tuning);
}

void launch(const Params& params, const Plan& plan, bool merges, bool pdl, cudaStream_t stream) {
  const TileVariant* const tile = find_tile(plan);
  const bool few = plan.column_tiles == 0, rotates = params.rotation != nullptr;
  const Launcher launcher = {kName, pdl, stream};
  if (plan.units > 0) {
    launch_units(params, plan, launcher);
  } else {
    if (few ? !fits(plan) : tile == nullptr || plan.splits == 0) {
      throw std::runtime_error("fp8_linear: no kernel for this plan");
    }
    const LinearKernel kernel = few ? kernel_of(index_of(plan.warp_rows), rotates) : tile_kernel_of(*tile, rotates);
    launcher(kernel, dim3(plan.blocks, plan.splits), kThreads, plan.shared_bytes, params, plan);
  }
  if (plan.splits > 1 && merges) launch_merge(params, plan.splits, pdl, stream);
}

void launch_merge(const Params& params, int splits, bool pdl, cudaStream_t stream) {
  const int64_t weight_rows = static_cast<int64_t>(params.groups) * params.outputs;
  const dim3 grid(static_cast<unsigned>(ceil_div(weight_rows / 4, kMergeThreads)), params.rows);
  void (*const merge)(Params) = splits == 2 ? merge_kernel<2> : splits == 4 ? merge_kernel<4> : merge_kernel<8>;
  Launcher{kName, pdl, stream}(merge, grid, kMergeThreads, 0, params);
}

std::vector<KernelAttributes> kernel_attributes() {
  std::vector<KernelAttributes> all;
  for (int i = 0; i < static_cast<int>(std::size(kWarpRows)); ++i) {
    for (const bool rotates : {false, true}) {
      const std::string name = std::string("fp8_linear_") + (rotates ? "rotating_" : "") + std::to_string(kWarpRows[i]);
      const void* const kernel = reinterpret_cast<const void*>(kernel_of(i, rotates));
      all.push_back(attributes_of(kName, kernel, name, kThreads, exchange_bytes(kWarpRows[i])));
    }
  }
  for (const TileVariant& v : kTileVariants) {
    for (const bool rotates : {false, true}) {
      const std::string name = std::string("fp8_linear_tile_") + (rotates ? "rotating_" : "") + std::to_string(v.column_tiles) + "_" +
                               std::to_string(v.row_tiles) + "_" + std::to_string(v.warp_rows);
      const void* const kernel = reinterpret_cast<const void*>(tile_kernel_of(v, rotates));
      all.push_back(attributes_of(kName, kernel, name, kThreads, tile_shared_bytes(v.column_tiles, v.row_tiles, v.warp_rows)));
    }
  }
  for (const KernelAttributes& of_units : units_attributes()) all.push_back(of_units);
  for (const KernelAttributes& of_norm : norm_attributes()) all.push_back(of_norm);
  for (const KernelAttributes& of_draft : draft_attributes()) all.push_back(of_draft);
  return all;
}

int shared_bytes() { return kMaxSharedBytes; }

}  // namespace dsv4::fp8_linear

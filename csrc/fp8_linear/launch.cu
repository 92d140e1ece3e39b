// Choice and launch of the kernels.
#include <algorithm>
#include <stdexcept>

#include "kernel.cuh"

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

// of all prologues, by Prologue
const LinearKernel* const* all_kernels() {
  static const LinearKernel* const all[] = {kernels<Prologue::kNone>(), kernels<Prologue::kRotation>(), kernels<Prologue::kSwiglu>(),
                                            kernels<Prologue::kNorm>()};
  static_assert(std::size(all) == kPrologues);
  return all;
}
constexpr const char* kPrologueNames[kPrologues] = {"", "rotating_", "swiglu_", "norm_"};

template <size_t kCount>
const Variant* find(const Variant (&variants)[kCount], int column_tiles, int row_tiles, int warp_rows) {
  for (const Variant& v : variants) {
    if (v.column_tiles == column_tiles && v.row_tiles == row_tiles && v.warp_rows == warp_rows) return &v;
  }
  return nullptr;
}

// By the inputs alone, as the bits depend on it. Slices of a block are warps that need not lie beside each other.
int slices_of(int inputs) { return inputs >= 2048 ? kMaxSlices : inputs >= 2 * kBlock ? 2 : 1; }

int tiles_of(int64_t weight_rows, int row_tiles, int warp_rows) {
  const int rows = kTileRows * row_tiles * warp_rows;
  return static_cast<int>(weight_rows / rows);
}

// Warps beside each other share x, and the splits that this makes share its reading: with one, every block reads all of x.
// As measured; bench/NOTES.md.
int warps_beside(int column_tiles, int rows, int inputs) {
  if (column_tiles > 1) return kWarps;
  return rows > 2 && inputs >= 8192 ? 4 : 1;
}

bool makes(Prologue prologue) { return prologue == Prologue::kSwiglu || prologue == Prologue::kNorm; }

// Everything in shared memory: x of all blocks of inputs in one stage, or two stages of as many blocks as fit.
void place(Plan& plan, Prologue prologue, int rows, int inputs) {
  const int here = kWarps / plan.warp_rows, kept = rows_in_shared(plan.column_tiles, rows);
  const int slice_blocks = plan.slice_blocks.each + (plan.slice_blocks.more > 0);
  const int most = kMaxShared - exchange_bytes(plan.column_tiles, plan.row_tiles, plan.warp_rows);
  const auto behind_x = [&](int stages, int blocks) { return kBarrierBytes + stages * x_bytes(kept, here, blocks); };
  plan.stages = 1;
  plan.chunk_blocks = slice_blocks;
  if (streams(plan.column_tiles) && behind_x(1, plan.chunk_blocks) > most) {
    plan.stages = kMaxStages;
    plan.chunk_blocks = ahead_of(plan.column_tiles, plan.row_tiles);
    while (behind_x(kMaxStages, 2 * plan.chunk_blocks) <= most) plan.chunk_blocks *= 2;
  }
  plan.exchange = behind_x(plan.stages, plan.chunk_blocks);
  const int raw = !makes(prologue) ? 0 : rows * inputs * (prologue == Prologue::kSwiglu ? 4 : 2);
  plan.norm = plan.exchange + std::max(raw, kMaxShared - most);
  plan.shared_bytes = plan.norm + (prologue == Prologue::kNorm ? 2 * inputs : 0);
}

// Everything but the blocks, for these column tiles.
void choose(Plan& plan, Prologue prologue, int rows, int inputs, int warp_rows) {
  plan.warp_rows = std::max(kWarps / plan.slices, warp_rows);
  plan.splits = plan.slices * plan.warp_rows / kWarps;
  plan.row_tiles = 1;
  place(plan, prologue, rows, inputs);
}

LinearKernel kernel_of(const Variant& v, Prologue prologue) {
  static uint64_t configured[kPrologues][std::size(kVariants)] = {};
  const int which = static_cast<int>(prologue);
  const std::ptrdiff_t index = &v - kVariants;
  const LinearKernel kernel = all_kernels()[which][index];
  allow_shared(kName, reinterpret_cast<const void*>(kernel), kMaxShared, configured[which][index]);
  return kernel;
}

struct Tile {
  int row_tiles, warp_rows, in_turn;
};
constexpr Tile kTiles[] = {{2, 8, 2}, {2, 4, 1}, {1, 4, 1}};

LinearKernel tile_kernel_of(const Variant& v, bool rotates) {
  static uint64_t configured[2][std::size(kTileVariants)] = {};
  const std::ptrdiff_t index = &v - kTileVariants;
  const LinearKernel kernel = (rotates ? tile_kernels<true>() : tile_kernels<false>())[index];
  allow_shared(kName, reinterpret_cast<const void*>(kernel), std::max(kMaxShared, multiprocessor_shared() / 2), configured[rotates][index]);
  return kernel;
}

// For 9 rows and more: a block has a tile of the outputs, 16 row_tiles for each of warp_rows warps, and in_turn slices for each group of
// so many warps. splits 0: there is no such kernel.
Plan make_tile_plan(int rows, int groups, int outputs, int inputs, int num_sms, int sm_shared, int row_tiles, int warp_rows, int in_turn) {
  Plan plan = {};
  plan.slices = slices_of(inputs);
  plan.slice_blocks = {inputs / kBlock / plan.slices, inputs / kBlock % plan.slices};
  plan.column_tiles = rows <= 16 ? 2 : rows <= 32 ? 4 : 8;
  const int64_t weight_rows = static_cast<int64_t>(groups) * outputs;
  const auto choose = [&](const Tile& t) {
    plan.row_tiles = t.row_tiles, plan.warp_rows = t.warp_rows, plan.in_turn = t.in_turn;
    const int tile = kTileRows * t.row_tiles * t.warp_rows, here = kWarps / t.warp_rows * t.in_turn;
    const bool possible = find(kTileVariants, plan.column_tiles, t.row_tiles, t.warp_rows) != nullptr && outputs % tile == 0 &&
                          plan.slices % here == 0 && t.in_turn <= (t.warp_rows == kWarps ? 2 : 1);
    plan.splits = possible ? plan.slices / here : 0;
    plan.blocks = static_cast<int>(weight_rows / tile);
  };
  if (in_turn > 0) {
    choose({std::max(1, row_tiles), std::max(1, warp_rows), in_turn});
  } else {
    // the largest tile of which there is one for most of the multiprocessors, or the smallest
    for (const Tile& t : kTiles) {
      choose(t);
      if (plan.splits > 0 && 8 * plan.blocks * plan.splits >= 5 * num_sms) break;
    }
  }
  plan.group_tiles = plan.blocks / groups;
  plan.shared_bytes = tile_shared_bytes(plan.column_tiles, plan.row_tiles, plan.warp_rows);
  // where there is a multiprocessor for each block, more than half of its shared memory: two must not lie on one
  if (plan.row_tiles == 2 && plan.blocks * plan.splits <= num_sms) plan.shared_bytes = std::max(plan.shared_bytes, sm_shared / 2);
  if (plan.splits > 1) plan.partial_bytes = static_cast<int64_t>(plan.splits) * rows * groups * outputs * 4;
  return plan;
}

// Whether that plan is the faster one, as measured: not above 32 rows where blocks have to queue and the sums of splits come on top.
bool wants_tiles(const Plan& plan, int num_sms) {
  return plan.splits == 1 || (plan.splits > 1 && (plan.column_tiles < 8 || plan.blocks * plan.splits <= num_sms));
}

// Whether there is such a kernel, and its shared memory suffices. To make something of x a block needs all inputs.
bool fits(const Plan& plan, Prologue prologue) {
  return plan.shared_bytes <= kMaxShared && (!makes(prologue) || (plan.column_tiles == 1 && plan.splits == 1));
}

}  // namespace

std::string problem(Prologue prologue, int rows, int groups, int outputs, int inputs) {
  if (rows > kMaxRows) return "at most " + std::to_string(kMaxRows) + " rows, got " + std::to_string(rows);
  if (inputs % kBlock || inputs < kBlock) return "inputs a multiple of 128, got " + std::to_string(inputs);
  if (outputs % kBlock || outputs < kBlock) return "outputs a multiple of 128, got " + std::to_string(outputs);
  if (static_cast<int64_t>(groups) * outputs > 1 << 24) return "at most 2^24 outputs of all groups, got " + std::to_string(int64_t(groups) * outputs);
  if (inputs > 1 << 20) return "at most 2^20 inputs, got " + std::to_string(inputs);
  if (!makes(prologue)) return "";
  if (groups != 1) return "one group to be normalised or gated, got " + std::to_string(groups);
  if (rows > kMadeRows) return "at most " + std::to_string(kMadeRows) + " rows to be normalised or gated on their way in, got " + std::to_string(rows);
  if (!fits(make_plan(prologue, rows, groups, outputs, inputs, 1, 0, 0, 0, 0, 0), prologue)) {
    return "fewer inputs to be normalised or gated in shared memory, got " + std::to_string(inputs);
  }
  return "";
}

Plan make_plan(Prologue prologue, int rows, int groups, int outputs, int inputs, int num_sms, int sm_shared, int row_tiles, int warp_rows,
               int blocks, int in_turn) {
  if (in_turn > 0 || (rows > kColumns && !row_tiles && !warp_rows)) {
    const Plan plan = make_tile_plan(rows, groups, outputs, inputs, num_sms, sm_shared, row_tiles, warp_rows, in_turn);
    if (in_turn > 0 || wants_tiles(plan, num_sms)) return plan;
  }
  Plan plan = {};
  plan.slices = slices_of(inputs);
  plan.slice_blocks = {inputs / kBlock / plan.slices, inputs / kBlock % plan.slices};
  plan.column_tiles = rows <= kColumns ? 1 : 8;
  const int beside = warp_rows ? warp_rows : warps_beside(plan.column_tiles, rows, inputs);
  choose(plan, prologue, rows, inputs, beside);
  if (!fits(plan, prologue)) choose(plan, prologue, rows, inputs, kWarps);
  if (!fits(plan, prologue)) {  // inputs so long that their x has to come in chunks, which the kernel for many rows does
    plan.column_tiles = 8;
    choose(plan, prologue, rows, inputs, kWarps);
  }
  const int tiles = tiles_of(static_cast<int64_t>(groups) * outputs, plan.row_tiles, plan.warp_rows);
  plan.group_tiles = tiles / groups;
  // blocks of a multiprocessor: by registers, and by shared memory, of which each block takes 1 KB more. Each reads x: with 5 to
  // 8 rows that costs more than a second block gains, as measured.
  const bool reads_much = plan.column_tiles == 1 && rows > 4 && plan.splits == 1;
  const int resident = plan.column_tiles <= 2 && !reads_much && sm_shared >= 2 * (plan.shared_bytes + 1024) ? 2 : 1;
  // a second block of a multiprocessor only where the first would be busy for long: it is the next kernel's place
  const bool held = plan.slice_blocks.each + (plan.slice_blocks.more > 0) <= ahead_of(plan.column_tiles, plan.row_tiles);
  const bool few = plan.splits == 1 && tiles <= 2 * num_sms && held;
  plan.blocks = std::min(tiles, blocks ? blocks : std::max(1, (few ? 1 : resident) * num_sms / plan.splits));
  plan.block_tiles = {tiles / plan.blocks, tiles % plan.blocks};
  if (plan.splits > 1) plan.partial_bytes = static_cast<int64_t>(plan.splits) * rows * groups * outputs * 4;
  return plan;
}

void launch(const Params& params, const Plan& plan, bool pdl, cudaStream_t stream) {
  const Prologue prologue = prologue_of(params);
  const std::string why_not = problem(prologue, params.rows, params.groups, params.outputs, params.inputs);
  if (!why_not.empty()) throw std::runtime_error("fp8_linear: takes " + why_not);
  const bool tiles = plan.in_turn > 0;
  const Variant* const v = tiles ? find(kTileVariants, plan.column_tiles, plan.row_tiles, plan.warp_rows)
                                 : find(kVariants, plan.column_tiles, plan.row_tiles, plan.warp_rows);
  if (v == nullptr || (tiles ? plan.splits == 0 || makes(prologue) : !fits(plan, prologue))) {
    throw std::runtime_error("fp8_linear: no kernel for this plan");
  }
  const LinearKernel kernel = tiles ? tile_kernel_of(*v, prologue == Prologue::kRotation) : kernel_of(*v, prologue);
  const Launcher launcher = {kName, pdl, stream};
  launcher(kernel, dim3(plan.blocks, plan.splits), kThreads, plan.shared_bytes, params, plan);
  if (plan.splits == 1) return;
  const int64_t weight_rows = static_cast<int64_t>(params.groups) * params.outputs;
  const dim3 grid(static_cast<unsigned>((weight_rows / 4 + kMergeThreads - 1) / kMergeThreads), params.rows);
  void (*const merge)(Params) = plan.splits == 2 ? merge_kernel<2> : plan.splits == 4 ? merge_kernel<4> : merge_kernel<8>;
  launcher(merge, grid, kMergeThreads, 0, params);
}

std::vector<KernelAttributes> kernel_attributes() {
  std::vector<KernelAttributes> all;
  for (const Variant& v : kVariants) {
    for (int i = 0; i < kPrologues; ++i) {
      if (makes(static_cast<Prologue>(i)) && v.column_tiles > 1) continue;
      const std::string name = std::string("fp8_linear_") + kPrologueNames[i] + std::to_string(v.column_tiles) + "_" +
                               std::to_string(v.row_tiles) + "_" + std::to_string(v.warp_rows);
      const void* const kernel = reinterpret_cast<const void*>(kernel_of(v, static_cast<Prologue>(i)));
      all.push_back(attributes_of(kName, kernel, name, kThreads, exchange_bytes(v.column_tiles, v.row_tiles, v.warp_rows)));
    }
  }
  for (const Variant& v : kTileVariants) {
    for (const bool rotates : {false, true}) {
      const std::string name = std::string("fp8_linear_tile_") + (rotates ? "rotating_" : "") + std::to_string(v.column_tiles) + "_" +
                               std::to_string(v.row_tiles) + "_" + std::to_string(v.warp_rows);
      const void* const kernel = reinterpret_cast<const void*>(tile_kernel_of(v, rotates));
      all.push_back(attributes_of(kName, kernel, name, kThreads, tile_shared_bytes(v.column_tiles, v.row_tiles, v.warp_rows)));
    }
  }
  return all;
}

int shared_bytes() { return kMaxShared; }

}  // namespace dsv4::fp8_linear

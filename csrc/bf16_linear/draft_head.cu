// Launch of the head that drafts guess with.
#include <algorithm>
#include <stdexcept>

#include "draft_head.cuh"

namespace dsv4::bf16_linear {

namespace {

constexpr char kName[] = "draft_head";

// Rows of x for which a block of so many tiles has shared memory
int rows_of_a_block(int tiles, int inputs) {
  return std::min(tiles * kHeadRows, (kMaxSharedBytes - head_shared_bytes(tiles, 0, inputs)) / head_pitch(inputs / tiles));
}

template <int kTiles>
const void* allowed_head_kernel() {
  static uint64_t configured = 0;
  const void* const kernel = reinterpret_cast<const void*>(&draft_head_kernel<kTiles>);
  allow_shared(kName, kernel, kMaxSharedBytes, configured);
  return kernel;
}

}  // namespace

void launch_draft_head(const DraftHeadParams& params, int num_sms, bool pdl, cudaStream_t stream) {
  constexpr int kMostRows = 65535;  // of a grid's second dimension
  if (params.rows < 1 || params.rows > kMostRows || params.inputs < kHeadInputs || params.inputs % kHeadInputs != 0 ||
      params.outputs < kTileOutputs || params.outputs % kTileOutputs != 0 || rows_of_a_block(kHalves, params.inputs) < 1) {
    throw std::runtime_error("draft_head: takes 1 to " + std::to_string(kMostRows) + " rows, inputs that are a multiple of " +
                             std::to_string(kHeadInputs) + " and outputs of " + std::to_string(kTileOutputs));
  }
  const Launcher launcher = {kName, pdl, stream};
  const int tiles = params.rows <= rows_of_a_block(1, params.inputs) ? 1 : 2;
  const int groups = ceil_div(params.rows, rows_of_a_block(tiles, params.inputs)), each = ceil_div(params.rows, groups);
  // groups of rows lie beside each other in the grid, so that they find the copy in the L2
  const int blocks = std::clamp(num_sms / (groups * tiles), 1, params.outputs / kTileOutputs);
  const dim3 grid(groups, blocks, tiles);
  const int shared = head_shared_bytes(tiles, each, params.inputs);
  if (tiles == 1) {
    allowed_head_kernel<1>();
    launcher(&draft_head_kernel<1>, grid, head_threads(1), shared, params, each);
  } else {
    allowed_head_kernel<2>();
    launcher(&draft_head_kernel<2>, grid, head_threads(2), shared, params, each);
  }
  const dim3 parts(ceil_div(params.outputs, kPartOutputs), params.rows);
  launcher(params.bf16_out ? &draft_head_best_kernel<true> : &draft_head_best_kernel<false>, parts, kBestThreads, 0, params);
}

std::vector<KernelAttributes> draft_head_attributes() {
  constexpr int kFlashInputs = 4096;
  return {attributes_of(kName, allowed_head_kernel<1>(), "draft_head_8", head_threads(1), head_shared_bytes(1, kHeadRows, kFlashInputs)),
          attributes_of(kName, allowed_head_kernel<2>(), "draft_head_16", head_threads(2), head_shared_bytes(2, 2 * kHeadRows, kFlashInputs)),
          attributes_of(kName, reinterpret_cast<const void*>(&draft_head_best_kernel<false>), "draft_head_best_fp32", kBestThreads, 0),
          attributes_of(kName, reinterpret_cast<const void*>(&draft_head_best_kernel<true>), "draft_head_best_bf16", kBestThreads, 0)};
}

}  // namespace dsv4::bf16_linear

// Choice and launch of the bf16 linear kernels.
#include <algorithm>
#include <stdexcept>

#include "draft_head.h"
#include "tile.cuh"

namespace dsv4::bf16_linear {

namespace {

constexpr char kName[] = "bf16_linear";

constexpr int kFewWarps = kShares / 2;

template <int kOutputs, int kWarps, typename Use>
void with_tiles(int rows, Use use) {
  if (rows <= 8) return use(Config<kOutputs, 1, kWarps>{});
  if (rows <= 16 && kWarps == kShares) return use(Config<kOutputs, 2, kShares>{});  // of few warps it would spill
  use(Config<kOutputs, 4, kWarps>{});
}
template <int kOutputs, typename Use>
void with_warps(int rows, int warps, Use use) {
  if (rows > kBlockRows) return use(Config<kOutputs, 4, kShares, true>{});
  if (warps == kFewWarps) return with_tiles<kOutputs, kFewWarps>(rows, use);
  with_tiles<kOutputs, kShares>(rows, use);
}

// Few for what nothing waits for before the queries' products beside it are done: the compressors' products, and the index's head weights,
// which at more rows are as fast with all. All for the router's.
int warps_of(int rows, int outputs) {
  const bool is_beside = outputs >= kFewWarpsOutputs || (outputs <= kFewOutputs && rows <= kFewOutputsRows);
  return is_beside ? kFewWarps : kShares;
}

// The most weights a block that still leave more than half of the multiprocessors one; sums do not depend on it. Half as many weights are
// twice as many blocks, which all read x: where a block fills a multiprocessor, a second turn as long as the first.
int outputs_of_a_block(int rows, int outputs, int num_sms) {
  for (const int wanted : {16, 8}) {
    if (outputs % wanted == 0 && outputs / wanted * ceil_div(rows, kBlockRows) * 2 > num_sms) return wanted;
  }
  return 4;
}

template <typename Use>
void with_config(int rows, int outputs_a_block, int warps, Use use) {
  if (outputs_a_block == 16) return with_warps<16>(rows, warps, use);
  if (outputs_a_block == 8) return with_warps<8>(rows, warps, use);
  return with_warps<4>(rows, warps, use);
}

template <typename C>
const void* allowed_kernel() {
  static uint64_t configured = 0;
  const void* kernel = reinterpret_cast<const void*>(&bf16_linear_kernel<C>);
  allow_shared(kName, kernel, sizeof(typename C::Shared), configured);
  return kernel;
}

template <typename C>
KernelAttributes describe(const char* name) {
  return attributes_of(kName, allowed_kernel<C>(), name, C::kThreads, sizeof(typename C::Shared));
}

template <typename C>
const void* allowed_tile_kernel() {
  static uint64_t configured = 0;
  const void* kernel = reinterpret_cast<const void*>(&bf16_linear_tile_kernel<C>);
  allow_shared(kName, kernel, sizeof(typename C::Shared), configured);
  return kernel;
}

template <typename C>
KernelAttributes describe_tile(const char* name) {
  return attributes_of(kName, allowed_tile_kernel<C>(), name, kTileThreads, sizeof(typename C::Shared));
}

template <typename C>
int64_t tiles_of(const Params& p) {
  return static_cast<int64_t>(ceil_div(p.rows, C::kRows)) * ceil_div(p.outputs, C::kOutputs);
}

template <typename C>
void launch_tiles(const Params& params, const Launcher& launcher) {
  allowed_tile_kernel<C>();
  launcher(&bf16_linear_tile_kernel<C>, dim3(static_cast<unsigned>(tiles_of<C>(params))), kTileThreads, sizeof(typename C::Shared), params);
}

using Large = TileConfig<128, 128>;
using Small = TileConfig<64, 64>;

}  // namespace

void launch(const Params& params, int num_sms, int warps, bool pdl, cudaStream_t stream) {
  if (params.rows < 1 || params.rows > kMaxRows || params.inputs % kInputsMultiple || params.outputs % kOutputsMultiple)
    throw std::runtime_error("bf16_linear: takes 1 to 1048576 rows, inputs in multiples of 512, outputs of 4");
  const Launcher launcher = {kName, pdl, stream};
  // many rows: the larger tile where most multiprocessors get one, the smaller for a quarter of them; no choice changes a bit
  if (params.rows > kBlockRows && tiles_of<Large>(params) * 4 >= num_sms * 3) return launch_tiles<Large>(params, launcher);
  if (params.rows > kBlockRows && tiles_of<Small>(params) * 4 >= num_sms) return launch_tiles<Small>(params, launcher);
  if (warps != 0 && warps != kFewWarps && warps != kShares) throw std::runtime_error("bf16_linear: no kernel of so many warps");
  const int outputs_a_block = outputs_of_a_block(params.rows, params.outputs, num_sms);
  with_config(params.rows, outputs_a_block, warps != 0 ? warps : warps_of(params.rows, params.outputs), [&](auto c) {
    using C = decltype(c);
    allowed_kernel<C>();
    const unsigned blocks = params.outputs / C::kOutputs;
    const dim3 grid = C::kMany ? dim3(ceil_div(params.rows, C::kColumns), blocks) : dim3(blocks);
    launcher(&bf16_linear_kernel<C>, grid, C::kThreads, sizeof(typename C::Shared), params);
  });
}

std::vector<KernelAttributes> kernel_attributes() {
  std::vector<KernelAttributes> all = {describe<Config<16, 1>>("bf16_linear_16x8"),
                                       describe<Config<8, 1>>("bf16_linear_8x8"),
                                       describe<Config<4, 1>>("bf16_linear_4x8"),
                                       describe<Config<16, 4>>("bf16_linear_16x32"),
                                       describe<Config<16, 1, kFewWarps>>("bf16_linear_few_warps_16x8"),
                                       describe<Config<8, 1, kFewWarps>>("bf16_linear_few_warps_8x8"),
                                       describe<Config<4, 1, kFewWarps>>("bf16_linear_few_warps_4x8"),
                                       describe<Config<16, 4, kFewWarps>>("bf16_linear_few_warps_16x32"),
                                       describe<Config<16, 4, kShares, true>>("bf16_linear_many_16x32"),
                                       describe_tile<Small>("bf16_linear_64x64"),
                                       describe_tile<Large>("bf16_linear_128x128")};
  for (const KernelAttributes& of_head : draft_head_attributes()) all.push_back(of_head);
  return all;
}

int shared_bytes() { return std::max({sizeof(Config<16, 4>::Shared), sizeof(Small::Shared), sizeof(Large::Shared)}); }

}  // namespace dsv4::bf16_linear

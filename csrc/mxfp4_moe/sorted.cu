// Scratch and launches of the kernels for many rows with the bits of few.
#include "wide.cuh"

#include <algorithm>
#include <stdexcept>

#include "scratch.h"

namespace dsv4::mxfp4_moe {

namespace {

constexpr char kName[] = "mxfp4_moe, sorted";
constexpr int kSortedShared = sizeof(SortedShared), kWideShared = sizeof(WideShared);

// Where things begin in a call's scratch, in bytes.
struct Layout {
  Scratch scratch;
  int y_bytes, columns;  // columns: outputs of a row that y holds at a time
  Tiling tiling;
  int64_t x, x_powers, h, h_powers, y;

  Layout(int rows, int topk, int experts, int hidden, int inter, bool exact)
      : y_bytes(exact ? 4 : 2), columns(columns_of_y(int64_t{rows} * topk, hidden, y_bytes, exact ? kTileRows : kWideRows)),
        tiling(scratch, int64_t{rows} * topk, experts, exact ? kTilePairs : kWidePairs, exact ? 0 : launches_of(hidden, columns)) {
    const int64_t all = int64_t{rows} * topk;
    x = scratch.take(exact ? int64_t{rows} * hidden * 2 : 0);
    x_powers = scratch.take(exact ? int64_t{rows} * slices_of_hidden(hidden).slices * 4 : 0);
    h = scratch.take(all * inter * 2);
    h_powers = scratch.take(exact ? all * slices_of_inter(inter).slices * 4 : 0);
    y = scratch.take(all * columns * y_bytes);
  }
};

template <bool kGated, bool kExact>
constexpr void (*kernel_of)(SortedParams) = kExact ? sorted_kernel<kGated> : wide_kernel<kGated>;

template <bool kGated, bool kExact>
const void* allowed() {
  static uint64_t configured = 0;
  const void* const kernel = reinterpret_cast<const void*>(kernel_of<kGated, kExact>);
  allow_shared(kName, kernel, kExact ? kSortedShared : kWideShared, configured);
  return kernel;
}

template <bool kGated, bool kExact>
void launch_product(const SortedParams& p, int num_sms, const Launcher& launcher) {
  allowed<kGated, kExact>();
  launcher(kernel_of<kGated, kExact>, dim3(num_sms), kSortedThreads, kExact ? kSortedShared : kWideShared, p);
}
template <bool kGated>
void launch_product(const SortedParams& p, bool exact, int num_sms, const Launcher& launcher) {
  exact ? launch_product<kGated, true>(p, num_sms, launcher) : launch_product<kGated, false>(p, num_sms, launcher);
}

void launch_prepare(const PrepareParams& p, const Launcher& launcher) {
  const int64_t blocks = ceil_div(p.rows * p.slices, int64_t{kPrepareThreads / 32 * kPrepareItems});
  launcher(prepare_kernel, dim3(static_cast<unsigned>(blocks)), kPrepareThreads, 0, p);
}

}  // namespace

int64_t sorted_scratch_bytes(int rows, int topk, int experts, int hidden, int inter, bool exact) {
  return Layout(rows, topk, experts, hidden, inter, exact).scratch.size;
}

void launch_sorted(const Params& params, unsigned char* scratch, int num_sms, bool pdl, cudaStream_t stream) {
  const std::string why_not = params.exact ? problem(params.hidden, params.inter, params.experts, 0) : "";
  if (!why_not.empty()) throw std::runtime_error("mxfp4_moe: takes " + why_not);
  const Launcher launcher = {kName, pdl, stream};
  const Layout layout(params.rows, params.topk, params.experts, params.hidden, params.inter, params.exact);
  const TilesParams tiles = layout.tiling.of(params, scratch);
  launch_tiles(tiles, pdl, stream);

  Slices of_x = {}, of_h = {};  // of few rows
  if (params.exact) of_x = slices_of_hidden(params.hidden), of_h = slices_of_inter(params.inter);
  uint16_t *const x = reinterpret_cast<uint16_t*>(scratch + layout.x), *const h = reinterpret_cast<uint16_t*>(scratch + layout.h);
  float *const x_powers = reinterpret_cast<float*>(scratch + layout.x_powers), *const h_powers = reinterpret_cast<float*>(scratch + layout.h_powers);
  if (params.exact) launch_prepare({params.x, x, x_powers, params.x_stride, params.rows, of_x.slices, of_x.steps}, launcher);

  SortedParams product = product_of<SortedParams>(params, tiles);
  product.x = params.exact ? x : params.x, product.powers = x_powers, product.w = params.w13, product.h = h;
  product.x_row_chunks = static_cast<uint32_t>(params.x_stride / 8);
  product.inputs = params.hidden, product.slices = of_x.slices, product.steps = of_x.steps, product.outputs = params.inter;
  launch_product<true>(product, params.exact, num_sms, launcher);

  const int64_t all = static_cast<int64_t>(params.rows) * params.topk;
  if (params.exact) launch_prepare({h, h, h_powers, params.inter, all, of_h.slices, of_h.steps}, launcher);

  product.x_row_chunks = static_cast<uint32_t>(params.inter / 8);
  product.x = h, product.powers = h_powers, product.w = params.w2, product.y = reinterpret_cast<float*>(scratch + layout.y);
  product.inputs = params.inter, product.slices = of_h.slices, product.steps = of_h.steps, product.outputs = layout.columns;
  product.y16 = reinterpret_cast<uint16_t*>(scratch + layout.y);
  SumParams sum = sum_of(params, tiles, product.y, layout.columns);
  for (; product.first < params.hidden; product.first += layout.columns, sum.out += layout.columns) {
    ++product.taken;
    launch_product<false>(product, params.exact, num_sms, launcher);
    launch_sum(sum, !params.exact, launcher);
  }
}

void launch_sum(const SumParams& params, bool bf16, const Launcher& launcher) {
  const int64_t blocks = ceil_div(int64_t{params.rows} * (params.columns / 8), int64_t{kSumThreads});
  launcher(bf16 ? sorted_sum_kernel<uint16_t> : sorted_sum_kernel<float>, dim3(static_cast<unsigned>(blocks)), kSumThreads, 0, params);
}

std::vector<KernelAttributes> sorted_attributes() {
  return {attributes_of(kName, allowed<true, true>(), "mxfp4_moe_sorted_gate_up", kSortedThreads, kSortedShared),
          attributes_of(kName, allowed<false, true>(), "mxfp4_moe_sorted_down", kSortedThreads, kSortedShared),
          attributes_of(kName, allowed<true, false>(), "mxfp4_moe_wide_gate_up", kSortedThreads, kWideShared),
          attributes_of(kName, allowed<false, false>(), "mxfp4_moe_wide_down", kSortedThreads, kWideShared)};
}

int sorted_shared_bytes() { return std::max(kSortedShared, kWideShared); }

}  // namespace dsv4::mxfp4_moe

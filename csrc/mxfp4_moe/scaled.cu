// Scratch and launches of the kernels for many rows with MXFP8 activations.
#include "scaled.cuh"
#include "scratch.h"

namespace dsv4::mxfp4_moe {

namespace {

constexpr char kName[] = "mxfp4_moe, block-scaled";

// Where things begin in a call's scratch, in bytes.
struct Layout {
  Scratch scratch;
  int columns;  // outputs of a row that y holds at a time
  Tiling tiling;
  int64_t x, x_scales, h, h_scales, y;

  Layout(int rows, int topk, int experts, int hidden, int inter)
      : columns(columns_of_y(int64_t{rows} * topk, hidden, 2, kScaledRows)),
        tiling(scratch, int64_t{rows} * topk, experts, kScaledPairs, launches_of(hidden, columns)) {
    const int64_t all = int64_t{rows} * topk;
    x = scratch.take(int64_t{rows} * hidden);
    x_scales = scratch.take(int64_t{rows} * hidden / 32);
    h = scratch.take(all * inter);
    h_scales = scratch.take(all * inter / 32);
    y = scratch.take(all * columns * 2);
  }
};

template <bool kGated>
const void* allowed() {
  static uint64_t configured = 0;
  const void* const kernel = reinterpret_cast<const void*>(&scaled_kernel<kGated>);
  allow_shared(kName, kernel, sizeof(ScaledShared), configured);
  return kernel;
}

template <bool kGated>
void launch_product(const ScaledParams& p, int num_sms, const Launcher& launcher) {
  allowed<kGated>();
  launcher(scaled_kernel<kGated>, dim3(num_sms), kScaledThreads, sizeof(ScaledShared), p);
}

}  // namespace

int64_t scaled_scratch_bytes(int rows, int topk, int experts, int hidden, int inter) {
  return Layout(rows, topk, experts, hidden, inter).scratch.size;
}

void launch_scaled(const Params& params, unsigned char* scratch, int num_sms, bool pdl, cudaStream_t stream) {
  const Launcher launcher = {kName, pdl, stream};
  const Layout layout(params.rows, params.topk, params.experts, params.hidden, params.inter);
  const TilesParams tiles = layout.tiling.of(params, scratch);
  launch_tiles(tiles, pdl, stream);

  const Mxfp8 x = {scratch + layout.x, scratch + layout.x_scales}, h = {scratch + layout.h, scratch + layout.h_scales};
  const QuantizeParams quantize = {params.x, params.x_stride, x, params.rows, params.hidden};
  const int64_t blocks = ceil_div(static_cast<int64_t>(params.rows) * params.hidden / 8, int64_t{kQuantizeThreads});
  launcher(quantize_kernel, dim3(static_cast<unsigned>(blocks)), kQuantizeThreads, 0, quantize);

  ScaledParams product = product_of<ScaledParams>(params, tiles);
  product.x = x, product.w = params.w13, product.h = h;
  product.inputs = params.hidden, product.outputs = params.inter;
  launch_product<true>(product, num_sms, launcher);

  product.x = h, product.w = params.w2, product.y = reinterpret_cast<uint16_t*>(scratch + layout.y);
  product.inputs = params.inter, product.outputs = layout.columns;
  SumParams sum = sum_of(params, tiles, product.y, layout.columns);
  for (; product.first < params.hidden; product.first += layout.columns, sum.out += layout.columns) {
    ++product.taken;
    launch_product<false>(product, num_sms, launcher);
    launch_sum(sum, true, launcher);
  }
}

std::vector<KernelAttributes> scaled_attributes() {
  return {attributes_of(kName, allowed<true>(), "mxfp4_moe_scaled_gate_up", kScaledThreads, sizeof(ScaledShared)),
          attributes_of(kName, allowed<false>(), "mxfp4_moe_scaled_down", kScaledThreads, sizeof(ScaledShared))};
}

int scaled_shared_bytes() { return sizeof(ScaledShared); }

}  // namespace dsv4::mxfp4_moe

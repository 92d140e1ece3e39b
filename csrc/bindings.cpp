// The Python module _C: pybind11 over raw pointers, no framework header. Arguments are keyword-only; ops/ validates them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "bf16_linear/bf16_linear.h"
#include "card/bindings.h"
#include "compressor/bindings.h"
#include "fp8_linear/bindings.h"
#include "index_select/bindings.h"
#include "kv_page_layout.h"
#include "mhc/bindings.h"
#include "mxfp4_moe/mxfp4_moe.h"
#include "mxfp4_moe/tiles.h"
#include "sparse_decode/sparse_decode.h"
#include "stream.h"
#include "wo_a/bindings.h"

#ifndef DSV4_VERSION
#define DSV4_VERSION "unknown"
#endif
#ifndef DSV4_GIT_COMMIT
#define DSV4_GIT_COMMIT "unknown"
#endif
#ifndef DSV4_ARCHS
#define DSV4_ARCHS ""
#endif

namespace py = pybind11;
using namespace dsv4;

namespace {

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

sparse_decode::Cache make_cache(uintptr_t pages, int64_t page_bytes, int page_size, int64_t num_pages, uintptr_t indices,
                                int64_t indices_stride, int width, uintptr_t topk_length) {
  sparse_decode::Cache c = {};
  if (pages == 0) return c;
  c.pages = pointer<const uint8_t>(pages);
  c.page_bytes = static_cast<uint32_t>(page_bytes);
  c.num_slots = num_pages * page_size;
  c.page_size = sparse_decode::make_divisor(page_size);
  c.indices = pointer<const int32_t>(indices);
  c.indices_stride = indices_stride;
  c.width = width;
  c.topk_length = pointer<const int32_t>(topk_length);
  return c;
}

void run_sparse_decode(uintptr_t q, int64_t q_stride_row, int64_t q_stride_head, int rows, int heads, uintptr_t kv_pages,
                       int64_t page_bytes, int page_size, int64_t num_pages, uintptr_t indices, int64_t indices_stride,
                       int indices_width, uintptr_t topk_length, uintptr_t extra_kv_pages, int64_t extra_page_bytes,
                       int extra_page_size, int64_t extra_num_pages, uintptr_t extra_indices, int64_t extra_indices_stride,
                       int extra_indices_width, uintptr_t extra_topk_length, uintptr_t extra_page_table,
                       int64_t extra_page_table_stride, int extra_num_page_tables, uintptr_t extra_page_table_rows,
                       uintptr_t attn_sink, double softmax_scale, uintptr_t out, int64_t out_stride_row,
                       int64_t out_stride_head, uintptr_t lse, uintptr_t partials, int64_t partials_bytes, uintptr_t control,
                       int control_words, int num_sms, bool pdl, uintptr_t stream, uintptr_t rotation, uintptr_t positions,
                       int position_bytes, double q_norm_eps, int splits, bool prefill) {
  sparse_decode::Params p = {};
  p.q = pointer<const uint16_t>(q);
  p.q_stride_row = q_stride_row;
  p.q_stride_head = q_stride_head;
  p.out = pointer<uint16_t>(out);
  p.out_stride_row = out_stride_row;
  p.out_stride_head = out_stride_head;
  p.lse = pointer<float>(lse);
  p.attn_sink = pointer<const float>(attn_sink);
  p.scale_log2 = static_cast<float>(softmax_scale * kLog2e<double>);
  p.rows = rows;
  p.heads = heads;
  p.main = make_cache(kv_pages, page_bytes, page_size, num_pages, indices, indices_stride, indices_width, topk_length);
  p.extra = make_cache(extra_kv_pages, extra_page_bytes, extra_page_size, extra_num_pages, extra_indices, extra_indices_stride,
                       extra_indices_width, extra_topk_length);
  p.extra_table.pages = pointer<const int32_t>(extra_page_table);
  p.extra_table.stride = extra_page_table_stride;
  p.extra_table.table_of_row = pointer<const int32_t>(extra_page_table_rows);
  p.extra_table.num_tables = extra_num_page_tables;
  p.extra_table.num_pages = static_cast<int32_t>(std::min<int64_t>(extra_num_pages, INT32_MAX / extra_page_size));
  p.query.rotation = pointer<const float>(rotation);
  p.query.positions = pointer<const void>(positions);
  p.query.position_bytes = position_bytes;
  p.query.eps = static_cast<float>(q_norm_eps);
  const auto plan = sparse_decode::make_plan(rows, heads, p.main.width, p.extra.width, num_sms, splits, prefill);
  if (partials_bytes < plan.partials_bytes || control_words < plan.control_words)
    throw std::runtime_error("sparse_decode: workspace too small: needs " + std::to_string(plan.partials_bytes) + " bytes and " +
                             std::to_string(plan.control_words) + " control words, got " + std::to_string(partials_bytes) + " and " +
                             std::to_string(control_words));
  p.partials = pointer<float>(partials);
  p.control = pointer<uint32_t>(control);
  sparse_decode::launch(p, plan, pdl, pointer<CUstream_st>(stream));
}

void run_mxfp4_moe(uintptr_t x, int64_t x_stride, uintptr_t topk_ids, int64_t ids_stride, uintptr_t topk_weights,
                   int64_t weights_stride, uintptr_t expert_map, int map_size, int first_expert, uintptr_t w13, int64_t w13_stride,
                   uintptr_t w13_scale, int64_t w13_scale_stride, uintptr_t w2, int64_t w2_stride, uintptr_t w2_scale,
                   int64_t w2_scale_stride, uintptr_t h, uintptr_t y, uintptr_t out, int64_t out_stride, double limit,
                   double routed_scaling, int rows, int topk, int experts, int hidden, int inter, bool up_first, int num_sms, bool pdl,
                   uintptr_t stream) {
  mxfp4_moe::Params p = {};
  p.x = pointer<const uint16_t>(x);
  p.x_stride = x_stride;
  p.topk_ids = pointer<const int32_t>(topk_ids);
  p.ids_stride = ids_stride;
  p.topk_weights = pointer<const float>(topk_weights);
  p.weights_stride = weights_stride;
  p.expert_map = pointer<const int32_t>(expert_map);
  p.map_size = map_size;
  p.first_expert = first_expert;
  p.w13 = {pointer<const uint8_t>(w13), pointer<const uint8_t>(w13_scale), w13_stride, w13_scale_stride};
  p.w2 = {pointer<const uint8_t>(w2), pointer<const uint8_t>(w2_scale), w2_stride, w2_scale_stride};
  p.h = pointer<uint16_t>(h);
  p.y = pointer<float>(y);
  p.out = pointer<uint16_t>(out);
  p.out_stride = out_stride;
  p.limit = static_cast<float>(limit);
  p.routed_scaling = static_cast<float>(routed_scaling);
  p.rows = rows;
  p.topk = topk;
  p.experts = experts;
  p.hidden = hidden;
  p.inter = inter;
  p.gate_row = up_first ? inter : 0;
  p.up_row = up_first ? 0 : inter;
  mxfp4_moe::launch(p, num_sms, pdl, pointer<CUstream_st>(stream));
}

void run_mxfp4_moe_tiles(uintptr_t topk_ids, int64_t ids_stride, uintptr_t expert_map, int map_size, int first_expert, int rows, int topk,
                         int experts, int block_m, int num_whole, uintptr_t pairs, uintptr_t pair_expert, uintptr_t expert, uintptr_t begin,
                         uintptr_t end, uintptr_t scratch, bool pdl, uintptr_t stream) {
  mxfp4_moe::TilesParams p = {};
  p.topk_ids = pointer<const int32_t>(topk_ids);
  p.ids_stride = ids_stride;
  p.expert_map = pointer<const int32_t>(expert_map);
  p.map_size = map_size;
  p.first_expert = first_expert;
  p.rows = rows;
  p.topk = topk;
  p.experts = experts;
  p.block_m = block_m;
  p.num_whole = num_whole;
  p.pairs = pointer<int32_t>(pairs);
  p.pair_expert = pointer<int32_t>(pair_expert);
  p.expert = pointer<int32_t>(expert);
  p.begin = pointer<int32_t>(begin);
  p.end = pointer<int32_t>(end);
  p.scratch = pointer<int32_t>(scratch);
  mxfp4_moe::launch_tiles(p, pdl, pointer<CUstream_st>(stream));
}

void run_bf16_linear(uintptr_t x, int64_t x_stride, uintptr_t weight, int64_t weight_stride, uintptr_t out, int64_t out_stride,
                     bool bf16_out, int rows, int inputs, int outputs, int num_sms, bool pdl, uintptr_t stream) {
  bf16_linear::Params p = {};
  p.x = pointer<const uint16_t>(x);
  p.x_stride = x_stride;
  p.weight = pointer<const uint16_t>(weight);
  p.weight_stride = weight_stride;
  p.out = pointer<void>(out);
  p.out_stride = out_stride;
  p.rows = rows;
  p.inputs = inputs;
  p.outputs = outputs;
  p.bf16_out = bf16_out;
  bf16_linear::launch(p, num_sms, pdl, pointer<CUstream_st>(stream));
}

void append_attributes(py::list& all, const std::vector<KernelAttributes>& kernels) {
  for (const auto& a : kernels) {
    py::dict d;
    d["name"] = a.name;
    d["registers"] = a.registers;
    d["shared_bytes"] = a.shared_bytes;
    d["local_bytes"] = a.local_bytes;
    d["blocks_per_sm"] = a.blocks_per_sm;
    all.append(d);
  }
}

py::list kernel_attributes() {
  py::list all;
  append_attributes(all, sparse_decode::kernel_attributes());
  append_attributes(all, index_select::kernel_attributes());
  append_attributes(all, mxfp4_moe::kernel_attributes());
  append_attributes(all, bf16_linear::kernel_attributes());
  append_attributes(all, mhc::kernel_attributes());
  append_attributes(all, fp8_linear::kernel_attributes());
  append_attributes(all, wo_a::kernel_attributes());
  append_attributes(all, compressor::kernel_attributes());
  return all;
}

py::dict build_info() {
  py::dict d;
  py::list archs;
  std::string word;
  for (const char c : std::string(DSV4_ARCHS) + " ") {
    if (c != ' ') {
      word += c;
    } else if (!word.empty()) {
      archs.append(word);
      word.clear();
    }
  }
  d["version"] = DSV4_VERSION;
  d["git_commit"] = DSV4_GIT_COMMIT;
  d["cuda_version"] = std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  d["archs"] = archs;
  d["python"] = std::to_string(PY_MAJOR_VERSION) + "." + std::to_string(PY_MINOR_VERSION);
  return d;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.attr("KV_NOPE_DIM") = kNopeDim;
  m.attr("KV_ROPE_DIM") = kRopeDim;
  m.attr("KV_HEAD_DIM") = kHeadDim;
  m.attr("KV_DATA_BYTES") = kDataBytes;
  m.attr("KV_SCALE_BYTES") = kScaleBytes;
  m.attr("KV_TOKEN_BYTES") = kTokenBytes;
  m.attr("KV_TILE") = kTileDim;
  m.attr("KV_PAGE_ALIGN") = kPageAlign;
  m.def("kv_page_bytes", [](int64_t page_size) { return page_bytes(page_size); }, py::arg("page_size"));

  using namespace py::literals;
  m.def("sparse_decode", &run_sparse_decode, py::kw_only(), "q"_a, "q_stride_row"_a, "q_stride_head"_a, "rows"_a, "heads"_a,
        "kv_pages"_a, "page_bytes"_a, "page_size"_a, "num_pages"_a, "indices"_a, "indices_stride"_a, "indices_width"_a,
        "topk_length"_a, "extra_kv_pages"_a, "extra_page_bytes"_a, "extra_page_size"_a, "extra_num_pages"_a, "extra_indices"_a,
        "extra_indices_stride"_a, "extra_indices_width"_a, "extra_topk_length"_a, "extra_page_table"_a, "extra_page_table_stride"_a,
        "extra_num_page_tables"_a, "extra_page_table_rows"_a, "attn_sink"_a, "softmax_scale"_a, "out"_a,
        "out_stride_row"_a, "out_stride_head"_a, "lse"_a, "partials"_a, "partials_bytes"_a, "control"_a, "control_words"_a,
        "num_sms"_a, "pdl"_a, "stream"_a, "rotation"_a = 0, "positions"_a = 0, "position_bytes"_a = 8, "q_norm_eps"_a = 0.0,
        "splits"_a = 0, "prefill"_a = false);
  m.def(
      "sparse_decode_workspace",
      [](int rows, int heads, int indices_width, int extra_indices_width, int num_sms, int splits, bool prefill) {
        const auto plan = sparse_decode::make_plan(rows, heads, indices_width, extra_indices_width, num_sms, splits, prefill);
        return py::make_tuple(plan.partials_bytes, plan.control_words);
      },
      py::kw_only(), "rows"_a, "heads"_a, "indices_width"_a, "extra_indices_width"_a, "num_sms"_a, "splits"_a = 0, "prefill"_a = false);
  m.attr("sparse_decode_max_control_words") = sparse_decode::max_control_words();
  m.def("mxfp4_moe", &run_mxfp4_moe, py::kw_only(), "x"_a, "x_stride"_a, "topk_ids"_a, "ids_stride"_a, "topk_weights"_a,
        "weights_stride"_a, "expert_map"_a, "map_size"_a, "first_expert"_a, "w13"_a, "w13_stride"_a, "w13_scale"_a,
        "w13_scale_stride"_a, "w2"_a, "w2_stride"_a, "w2_scale"_a, "w2_scale_stride"_a, "h"_a, "y"_a, "out"_a, "out_stride"_a,
        "limit"_a, "routed_scaling"_a, "rows"_a, "topk"_a, "experts"_a, "hidden"_a, "inter"_a, "up_first"_a, "num_sms"_a, "pdl"_a,
        "stream"_a);
  m.def("mxfp4_moe_problem", &mxfp4_moe::problem, py::kw_only(), "hidden"_a, "inter"_a, "experts"_a, "pairs"_a);
  m.def("mxfp4_moe_tiles", &run_mxfp4_moe_tiles, py::kw_only(), "topk_ids"_a, "ids_stride"_a, "expert_map"_a, "map_size"_a,
        "first_expert"_a, "rows"_a, "topk"_a, "experts"_a, "block_m"_a, "num_whole"_a, "pairs"_a, "pair_expert"_a, "expert"_a, "begin"_a,
        "end"_a, "scratch"_a, "pdl"_a, "stream"_a);
  m.def("mxfp4_moe_tiles_scratch_words", &mxfp4_moe::tiles_scratch_words, py::kw_only(), "pairs"_a, "experts"_a);
  m.attr("mxfp4_moe_max_tiled_experts") = mxfp4_moe::kMaxTiledExperts;
  m.def("bf16_linear", &run_bf16_linear, py::kw_only(), "x"_a, "x_stride"_a, "weight"_a, "weight_stride"_a, "out"_a, "out_stride"_a,
        "bf16_out"_a, "rows"_a, "inputs"_a, "outputs"_a, "num_sms"_a, "pdl"_a, "stream"_a);
  m.attr("bf16_linear_limits") = py::make_tuple(bf16_linear::kMaxRows, bf16_linear::kInputsMultiple, bf16_linear::kOutputsMultiple);
  m.def("capture_id", [](uintptr_t stream) { return capture_id(pointer<CUstream_st>(stream)); }, "stream"_a);
  m.def("stream_sms", [](uintptr_t stream, int of_device) { return stream_sms(pointer<CUstream_st>(stream), of_device); }, "stream"_a,
        "of_device"_a);
  index_select::bind(m);
  mhc::bind(m);
  fp8_linear::bind(m);
  wo_a::bind(m);
  compressor::bind(m);
  card::bind(m);
  m.def("build_info", &build_info);
  m.def("kernel_attributes", &kernel_attributes);
  m.def("kernel_shared_bytes", [] {
    py::dict d;
    for (const auto& [kernel, bytes] : sparse_decode::shared_bytes()) d[kernel.c_str()] = bytes;
    for (const auto& [kernel, bytes] : index_select::shared_bytes()) d[kernel.c_str()] = bytes;
    d["experts_kernel"] = mxfp4_moe::shared_bytes();
    d["bf16_linear_kernel"] = bf16_linear::shared_bytes();
    d["many_kernel"] = mhc::shared_bytes();
    d["linear_kernel"] = fp8_linear::shared_bytes();
    return d;
  });
}

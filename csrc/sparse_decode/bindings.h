// The Python functions of the sparse attention: raw pointers and sizes, keyword-only; ops/ validates them.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "../arguments.h"
#include "sparse_decode.h"

namespace dsv4::sparse_decode {

inline Cache make_cache(const uint8_t* pages, uint32_t page_bytes, int page_size, int64_t num_pages, const int32_t* indices, int64_t indices_stride,
                        int width, const int32_t* topk_length) {
  if (pages == nullptr) return {};
  return {pages, page_bytes, num_pages * page_size, make_divisor(page_size), indices, indices_stride, width, topk_length};
}

inline void run(Arguments& a) {
  Params p = {};
  p.q = a["q"];
  p.q_stride_row = a["q_stride_row"];
  p.q_stride_head = a["q_stride_head"];
  p.rows = a["rows"];
  p.heads = a["heads"];
  p.main = make_cache(a["kv_pages"], a["page_bytes"], a["page_size"], a["num_pages"], a["indices"], a["indices_stride"], a["indices_width"],
                      a["topk_length"]);
  const int extra_page_size = a["extra_page_size"];
  const int64_t extra_num_pages = a["extra_num_pages"];
  p.extra = make_cache(a["extra_kv_pages"], a["extra_page_bytes"], extra_page_size, extra_num_pages, a["extra_indices"], a["extra_indices_stride"],
                       a["extra_indices_width"], a["extra_topk_length"]);
  p.extra_table.pages = a["extra_page_table"];
  p.extra_table.stride = a["extra_page_table_stride"];
  p.extra_table.num_tables = a["extra_num_page_tables"];
  p.extra_table.table_of_row = a["extra_page_table_rows"];
  p.extra_table.num_pages = static_cast<int32_t>(std::min<int64_t>(extra_num_pages, INT32_MAX / extra_page_size));
  p.attn_sink = a["attn_sink"];
  p.scale_log2 = static_cast<float>(static_cast<double>(a["softmax_scale"]) * kLog2e<double>);
  p.out = a["out"];
  p.out_stride_row = a["out_stride_row"];
  p.out_stride_head = a["out_stride_head"];
  p.lse = a["lse"];
  p.partials = a["partials"];
  const int64_t partials_bytes = a["partials_bytes"];
  p.control = a["control"];
  const int control_words = a["control_words"], num_sms = a["num_sms"];
  const bool prefill = a.get("prefill", false), pairs = a.get("pairs", false);
  const int splits = a.get("splits", 0);
  const LaunchArguments last = a.last();
  const Plan plan = make_plan(p.rows, p.heads, p.main.width, p.extra.width, num_sms, splits, prefill, pairs);
  if (partials_bytes < plan.partials_bytes || control_words < plan.control_words)
    throw std::runtime_error("sparse_decode: workspace too small: needs " + std::to_string(plan.partials_bytes) + " bytes and " +
                             std::to_string(plan.control_words) + " control words, got " + std::to_string(partials_bytes) + " and " +
                             std::to_string(control_words));
  launch(p, plan, last.pdl, last.stream);
}

inline void bind(py::module_& m) {
  using namespace py::literals;
  define(m, "sparse_decode", run);
  m.def(
      "sparse_decode_workspace",
      [](int rows, int heads, int indices_width, int extra_indices_width, int num_sms, int splits, bool prefill, bool pairs) {
        const Plan plan = make_plan(rows, heads, indices_width, extra_indices_width, num_sms, splits, prefill, pairs);
        return py::make_tuple(plan.partials_bytes, plan.control_words);
      },
      py::kw_only(), "rows"_a, "heads"_a, "indices_width"_a, "extra_indices_width"_a, "num_sms"_a, "splits"_a = 0, "prefill"_a = false,
      "pairs"_a = false);
  m.attr("sparse_decode_max_control_words") = max_control_words();
}

}  // namespace dsv4::sparse_decode

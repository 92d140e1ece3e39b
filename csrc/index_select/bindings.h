// The Python functions of the index selection: raw pointers and sizes, keyword-only; ops/ validates them.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "config.h"

namespace dsv4::index_select {

namespace py = pybind11;

template <typename T>
T* pointer_to(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline Split make_split(const Plan& plan, uintptr_t lengths, int width, int k) {
  return {0, plan.group_rows, plan.splits, plan.lists, plan.chunk, plan.list_capacity, pointer_to<const int32_t>(lengths), width, k, false};
}

inline void check_scratch(const Plan& plan, int64_t bytes) {
  if (bytes < plan.scratch_bytes)
    throw std::runtime_error("index_select: scratch too small: needs " + std::to_string(plan.scratch_bytes) + " bytes, got " +
                             std::to_string(bytes));
}

inline ScoreParams make_score(uintptr_t q, int64_t q_stride_row, int64_t q_stride_head, uintptr_t q_scales, int64_t q_scales_stride,
                              uintptr_t weights, int64_t weights_stride, uintptr_t k_pages, int64_t page_bytes, int64_t num_pages,
                              uintptr_t page_table, int64_t page_table_stride) {
  ScoreParams p = {};
  p.table = {pointer_to<const int32_t>(page_table), page_table_stride, num_pages};
  p.q = pointer_to<const uint8_t>(q);
  p.q_stride_row = q_stride_row;
  p.q_stride_head = q_stride_head;
  p.q_scales = pointer_to<const int32_t>(q_scales);
  p.q_scales_stride = q_scales_stride;
  p.weights = pointer_to<const float>(weights);
  p.weights_stride = weights_stride;
  p.k_pages = pointer_to<const uint8_t>(k_pages);
  p.page_bytes = page_bytes;
  return p;
}

inline MergeParams make_merge(const PageTable& table, uintptr_t slots, int64_t slots_stride, uintptr_t entries, int64_t entries_stride,
                              uintptr_t chosen_logits, int64_t chosen_logits_stride) {
  MergeParams p = {};
  p.table = table;
  p.slots = pointer_to<int32_t>(slots);
  p.slots_stride = slots_stride;
  p.entries = pointer_to<int32_t>(entries);
  p.entries_stride = entries_stride;
  p.logits = pointer_to<float>(chosen_logits);
  p.logits_stride = chosen_logits_stride;
  return p;
}

inline Format format_of(bool fp4, bool fp8_mma) { return fp4 ? Format::kFp4 : fp8_mma ? Format::kFp8 : Format::kFp8Half; }

inline void run_index_select(uintptr_t q, int64_t q_stride_row, int64_t q_stride_head, uintptr_t q_scales, int64_t q_scales_stride,
                             uintptr_t weights, int64_t weights_stride, uintptr_t k_pages, int64_t page_bytes, int64_t num_pages,
                             uintptr_t page_table, int64_t page_table_stride, uintptr_t lengths, int rows, int width, int k,
                             int rows_per_request, bool fp4, bool fp8_mma, uintptr_t slots, int64_t slots_stride, uintptr_t entries,
                             int64_t entries_stride, uintptr_t chosen_logits, int64_t chosen_logits_stride, uintptr_t scratch,
                             int64_t scratch_bytes, int64_t max_scratch_bytes, bool pdl, uintptr_t stream) {
  const Plan plan = make_plan(rows, width, rows_per_request, max_scratch_bytes, true);
  check_scratch(plan, scratch_bytes);
  ScoreParams score = make_score(q, q_stride_row, q_stride_head, q_scales, q_scales_stride, weights, weights_stride, k_pages, page_bytes,
                                 num_pages, page_table, page_table_stride);
  MergeParams merge = make_merge(score.table, slots, slots_stride, entries, entries_stride, chosen_logits, chosen_logits_stride);
  score.split = make_split(plan, lengths, width, k);
  score.split.short_lists = chosen_logits != 0;
  score.lists = carve(pointer_to<uint8_t>(scratch), plan, plan.rows_per_launch);
  merge.split = score.split;
  merge.lists = score.lists;
  for (int64_t first = 0; first < rows; first += plan.rows_per_launch) {
    const int count = static_cast<int>(std::min<int64_t>(plan.rows_per_launch, rows - first));
    launch_score(rows_of(score, first, count), format_of(fp4, fp8_mma), pdl, pointer_to<CUstream_st>(stream));
    launch_merge(rows_of(merge, first, count), pdl, pointer_to<CUstream_st>(stream));
  }
}

inline void run_mqa_logits(uintptr_t q, int64_t q_stride_row, int64_t q_stride_head, uintptr_t q_scales, int64_t q_scales_stride,
                           uintptr_t weights, int64_t weights_stride, uintptr_t k_pages, int64_t page_bytes, int64_t num_pages,
                           uintptr_t page_table, int64_t page_table_stride, uintptr_t lengths, int rows, int width, int rows_per_request,
                           bool fp4, bool fp8_mma, uintptr_t logits, int64_t logits_stride, bool pdl, uintptr_t stream) {
  const Plan plan = make_plan(rows, width, rows_per_request, INT64_MAX, true);
  ScoreParams score = make_score(q, q_stride_row, q_stride_head, q_scales, q_scales_stride, weights, weights_stride, k_pages, page_bytes,
                                 num_pages, page_table, page_table_stride);
  score.split = make_split(plan, lengths, width, 0);
  score.logits = pointer_to<float>(logits);
  score.logits_stride = logits_stride;
  for (int64_t first = 0; first < rows; first += plan.rows_per_launch) {
    const int count = static_cast<int>(std::min<int64_t>(plan.rows_per_launch, rows - first));
    launch_score(rows_of(score, first, count), format_of(fp4, fp8_mma), pdl, pointer_to<CUstream_st>(stream));
  }
}

inline void run_topk_select(uintptr_t logits, int64_t logits_stride, uintptr_t page_table, int64_t page_table_stride, int64_t num_pages,
                            uintptr_t lengths, int rows, int width, int k, uintptr_t slots, int64_t slots_stride, uintptr_t entries,
                            int64_t entries_stride, uintptr_t chosen_logits, int64_t chosen_logits_stride, uintptr_t scratch,
                            int64_t scratch_bytes, int64_t max_scratch_bytes, bool pdl, uintptr_t stream) {
  const Plan plan = make_plan(rows, width, 1, max_scratch_bytes, false);
  check_scratch(plan, scratch_bytes);
  ListParams list = {};
  list.split = make_split(plan, lengths, width, k);
  list.lists = carve(pointer_to<uint8_t>(scratch), plan, plan.rows_per_launch);
  list.logits = pointer_to<const float>(logits);
  list.logits_stride = logits_stride;
  const PageTable table = {pointer_to<const int32_t>(page_table), page_table_stride, num_pages};
  MergeParams merge = make_merge(table, slots, slots_stride, entries, entries_stride, chosen_logits, chosen_logits_stride);
  merge.split = list.split;
  merge.lists = list.lists;
  for (int64_t first = 0; first < rows; first += plan.rows_per_launch) {
    const int count = static_cast<int>(std::min<int64_t>(plan.rows_per_launch, rows - first));
    launch_lists(rows_of(list, first, count), pdl, pointer_to<CUstream_st>(stream));
    launch_merge(rows_of(merge, first, count), pdl, pointer_to<CUstream_st>(stream));
  }
}

inline void bind(py::module_& m) {
  using namespace py::literals;
  m.attr("INDEX_HEADS") = kHeads;
  m.attr("INDEX_DIM") = kDim;
  m.attr("INDEX_PAGE") = kPage;
  m.attr("INDEX_MAX_K") = kMaxK;
  m.def("index_select", &run_index_select, py::kw_only(), "q"_a, "q_stride_row"_a, "q_stride_head"_a, "q_scales"_a, "q_scales_stride"_a,
        "weights"_a, "weights_stride"_a, "k_pages"_a, "page_bytes"_a, "num_pages"_a, "page_table"_a, "page_table_stride"_a, "lengths"_a,
        "rows"_a, "width"_a, "k"_a, "rows_per_request"_a, "fp4"_a, "fp8_mma"_a, "slots"_a, "slots_stride"_a, "entries"_a,
        "entries_stride"_a, "chosen_logits"_a, "chosen_logits_stride"_a, "scratch"_a, "scratch_bytes"_a, "max_scratch_bytes"_a, "pdl"_a,
        "stream"_a);
  m.def("mqa_logits", &run_mqa_logits, py::kw_only(), "q"_a, "q_stride_row"_a, "q_stride_head"_a, "q_scales"_a, "q_scales_stride"_a,
        "weights"_a, "weights_stride"_a, "k_pages"_a, "page_bytes"_a, "num_pages"_a, "page_table"_a, "page_table_stride"_a, "lengths"_a,
        "rows"_a, "width"_a, "rows_per_request"_a, "fp4"_a, "fp8_mma"_a, "logits"_a, "logits_stride"_a, "pdl"_a, "stream"_a);
  m.def("topk_select", &run_topk_select, py::kw_only(), "logits"_a, "logits_stride"_a, "page_table"_a, "page_table_stride"_a, "num_pages"_a,
        "lengths"_a, "rows"_a, "width"_a, "k"_a, "slots"_a, "slots_stride"_a, "entries"_a, "entries_stride"_a, "chosen_logits"_a,
        "chosen_logits_stride"_a, "scratch"_a, "scratch_bytes"_a, "max_scratch_bytes"_a, "pdl"_a, "stream"_a);
  m.def(
      "index_select_scratch_bytes",
      [](int rows, int width, int rows_per_request, int64_t max_scratch_bytes, bool score) {
        return make_plan(rows, width, rows_per_request, max_scratch_bytes, score).scratch_bytes;
      },
      py::kw_only(), "rows"_a, "width"_a, "rows_per_request"_a, "max_scratch_bytes"_a, "score"_a);
}

}  // namespace dsv4::index_select

// The Python functions of the index selection: raw pointers and sizes, keyword-only; ops/ validates them.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "../arguments.h"
#include "config.h"

namespace dsv4::index_select {

inline Split read_split(Arguments& a, const Plan& plan, int width, int k) {
  return {0, plan.group_rows, plan.splits, plan.lists, plan.chunk, plan.list_capacity, a["lengths"], width, k, false};
}

inline PageTable read_table(Arguments& a) { return {a["page_table"], a["page_table_stride"], a["num_pages"]}; }

inline ScoreParams read_score(Arguments& a) {
  ScoreParams p = {};
  p.table = read_table(a);
  p.q = a["q"];
  p.q_stride_row = a["q_stride_row"];
  p.q_stride_head = a["q_stride_head"];
  p.q_scales = a["q_scales"];
  p.q_scales_stride = a["q_scales_stride"];
  p.weights = a["weights"];
  p.weights_stride = a["weights_stride"];
  p.k_pages = a["k_pages"];
  p.page_bytes = a["page_bytes"];
  return p;
}

inline MergeParams read_merge(Arguments& a, const PageTable& table) {
  MergeParams p = {};
  p.table = table;
  p.slots = a["slots"];
  p.slots_stride = a["slots_stride"];
  p.entries = a["entries"];
  p.entries_stride = a["entries_stride"];
  p.logits = a["chosen_logits"];
  p.logits_stride = a["chosen_logits_stride"];
  return p;
}

inline Format read_format(Arguments& a) {
  const bool fp4 = a["fp4"], fp8_mma = a["fp8_mma"];
  return fp4 ? Format::kFp4 : fp8_mma ? Format::kFp8 : Format::kFp8Half;
}

inline Lists read_lists(Arguments& a, const Plan& plan) {
  uint8_t* const scratch = a["scratch"];
  const int64_t bytes = a["scratch_bytes"];
  if (bytes < plan.scratch_bytes)
    throw std::runtime_error("index_select: scratch too small: needs " + std::to_string(plan.scratch_bytes) + " bytes, got " + std::to_string(bytes));
  return carve(scratch, plan, plan.rows_per_launch);
}

// launch(first row, rows) for all rows, so many at a time as the plan has it
template <typename Launch>
void in_turn(const Plan& plan, int rows, Launch launch) {
  for (int64_t first = 0; first < rows; first += plan.rows_per_launch)
    launch(first, static_cast<int>(std::min<int64_t>(plan.rows_per_launch, rows - first)));
}

inline void run_index_select(Arguments& a) {
  const int rows = a["rows"], width = a["width"], k = a["k"];
  const Plan plan = make_plan(rows, width, a["rows_per_request"], a["max_scratch_bytes"], true);
  ScoreParams score = read_score(a);
  MergeParams merge = read_merge(a, score.table);
  merge.split = score.split = read_split(a, plan, width, k);
  merge.split.short_lists = score.split.short_lists = merge.logits != nullptr;
  merge.lists = score.lists = read_lists(a, plan);
  const Format format = read_format(a);
  const LaunchArguments last = a.last();
  in_turn(plan, rows, [&](int64_t first, int count) {
    launch_score(rows_of(score, first, count), format, last.pdl, last.stream);
    launch_merge(rows_of(merge, first, count), last.pdl, last.stream);
  });
}

inline void run_mqa_logits(Arguments& a) {
  const int rows = a["rows"], width = a["width"];
  const Plan plan = make_plan(rows, width, a["rows_per_request"], INT64_MAX, true);
  ScoreParams score = read_score(a);
  score.split = read_split(a, plan, width, 0);
  score.logits = a["logits"];
  score.logits_stride = a["logits_stride"];
  const Format format = read_format(a);
  const LaunchArguments last = a.last();
  in_turn(plan, rows, [&](int64_t first, int count) { launch_score(rows_of(score, first, count), format, last.pdl, last.stream); });
}

inline void run_topk_select(Arguments& a) {
  const int rows = a["rows"], width = a["width"], k = a["k"];
  const Plan plan = make_plan(rows, width, 1, a["max_scratch_bytes"], false);
  ListParams list = {};
  MergeParams merge = read_merge(a, read_table(a));
  merge.split = list.split = read_split(a, plan, width, k);
  merge.lists = list.lists = read_lists(a, plan);
  list.logits = a["logits"];
  list.logits_stride = a["logits_stride"];
  const LaunchArguments last = a.last();
  in_turn(plan, rows, [&](int64_t first, int count) {
    launch_lists(rows_of(list, first, count), last.pdl, last.stream);
    launch_merge(rows_of(merge, first, count), last.pdl, last.stream);
  });
}

inline void run_dealt_slots(Arguments& a) {
  SlotParams p = {};
  p.rows = a["rows"];
  p.k = a["k"];
  p.ranks = a["ranks"];
  p.width = a["width"];
  p.dealt = a["dealt"];
  p.narrow = a["narrow"];
  p.table = read_table(a);
  p.slots = a["slots"];
  p.slots_stride = a["slots_stride"];
  p.entries = a["entries"];
  p.entries_stride = a["entries_stride"];
  const LaunchArguments last = a.last();
  launch_slots(p, last.pdl, last.stream);
}

inline void bind(py::module_& m) {
  using namespace py::literals;
  m.attr("INDEX_HEADS") = kHeads;
  m.attr("INDEX_DIM") = kDim;
  m.attr("INDEX_PAGE") = kPage;
  m.attr("INDEX_MAX_K") = kMaxK;
  define(m, "index_select", run_index_select);
  define(m, "mqa_logits", run_mqa_logits);
  define(m, "topk_select", run_topk_select);
  define(m, "dealt_slots", run_dealt_slots);
  m.def(
      "index_select_scratch_bytes",
      [](int rows, int width, int rows_per_request, int64_t max_scratch_bytes, bool score) {
        return make_plan(rows, width, rows_per_request, max_scratch_bytes, score).scratch_bytes;
      },
      py::kw_only(), "rows"_a, "width"_a, "rows_per_request"_a, "max_scratch_bytes"_a, "score"_a);
}

}  // namespace dsv4::index_select

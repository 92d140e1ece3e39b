// The Python functions of the FP8 linear: raw pointers and sizes, keyword-only; ops/ validates them.
#pragma once

#include <stdexcept>
#include <string>

#include "../arguments.h"
#include "config.h"
#include "draft.h"
#include "norm.h"

namespace dsv4::fp8_linear {

inline uint32_t checked_stride(int64_t stride) {
  if (stride < 0 || stride > UINT32_MAX) throw std::runtime_error("fp8_linear: takes strides below 2^32, got " + std::to_string(stride));
  return static_cast<uint32_t>(stride);
}

inline void run(Arguments& a) {
  Params p = {};
  p.x = a["x"];
  p.x_stride = checked_stride(a["x_stride"]);
  p.out = a["out"];
  p.out_stride = a["out_stride"];
  p.rows = a["rows"];
  p.inputs = a["inputs"];
  p.x_stride_group = checked_stride(a["x_stride_group"]);
  p.weight = a["weight"];
  p.weight_stride = checked_stride(a["weight_stride"]);
  p.scale = a["scale"];
  p.scale_bytes = a["scale_bytes"];
  p.scale_stride_output = checked_stride(static_cast<int64_t>(a["scale_stride_output"]) * p.scale_bytes);
  p.scale_stride_input = checked_stride(static_cast<int64_t>(a["scale_stride_input"]) * p.scale_bytes);
  p.out_stride_group = a["out_stride_group"];
  p.partial = a["partial"];
  const int64_t partial_bytes = a["partial_bytes"];
  p.groups = a["groups"];
  p.outputs = a["outputs"];
  p.rotation = a.get<const float*>("rotation", nullptr);
  p.positions = a.get<const void*>("positions", nullptr);
  p.position_bytes = a.get("position_bytes", 8);
  const Tuning tuning = {a.get("warp_rows", 0), a.get("blocks", 0), a.get("row_tiles", 0), a.get("in_turn", 0)};
  const int num_sms = a["num_sms"];
  const bool merges = a.get("merges", true);
  const LaunchArguments last = a.last();
  const Plan plan = make_plan(p.rows, p.groups, p.outputs, p.inputs, num_sms, multiprocessor_shared(), tuning);
  if (partial_bytes < plan.partial_bytes)
    throw std::runtime_error("fp8_linear: scratch too small: needs " + std::to_string(plan.partial_bytes) + " bytes, got " +
                             std::to_string(partial_bytes));
  launch(p, plan, merges, last.pdl, last.stream);
}

inline void run_merge(Arguments& a) {
  Params p = {};
  p.partial = a["partial"];
  p.out = a["out"];
  p.out_stride = a["out_stride"];
  p.rows = a["rows"];
  p.outputs = a["outputs"];
  p.groups = 1;
  const int splits = a["splits"];
  const LaunchArguments last = a.last();
  launch_merge(p, splits, last.pdl, last.stream);
}

inline void run_norm(Arguments& a) {
  NormParams p = {};
  p.x = a["x"];
  p.x_stride = a["x_stride"];
  p.weight = a["weight"];
  p.out = a["out"];
  p.eps = a["eps"];
  const int rows = a["rows"];
  const LaunchArguments last = a.last();
  launch_norm(p, rows, last.pdl, last.stream);
}

inline void run_draft_norms(Arguments& a) {
  DraftNormParams p = {};
  p.hidden = a["hidden"];
  p.embedded = a["embedded"];
  p.embedded_stride = a["embedded_stride"];
  p.table = a["table"];
  p.entries = a["entries"];
  p.ids = a["ids"];
  p.id_bytes = a["id_bytes"];
  p.hidden_norm = a["hidden_norm"];
  p.embedded_norm = a["embedded_norm"];
  p.hidden_out = a["hidden_out"];
  p.embedded_out = a["embedded_out"];
  p.rows = a["rows"];
  p.streams = a["streams"];
  p.inputs = a["inputs"];
  p.hidden_eps = a["hidden_eps"];
  p.embedded_eps = a["embedded_eps"];
  const LaunchArguments last = a.last();
  launch_draft_norms(p, last.pdl, last.stream);
}

inline void run_draft_sum(Arguments& a) {
  DraftSumParams p = {};
  p.hidden = a["hidden"];
  p.embedded = a["embedded"];
  p.out = a["out"];
  p.rows = a["rows"];
  p.streams = a["streams"];
  p.outputs = a["outputs"];
  const int splits = a["splits"];
  const LaunchArguments last = a.last();
  launch_draft_sum(p, splits, last.pdl, last.stream);
}

inline void bind(py::module_& m) {
  using namespace py::literals;
  m.attr("FP8_LINEAR_MAX_ROWS") = kMaxRows;
  define(m, "fp8_linear", run);
  define(m, "fp8_linear_merge", run_merge);
  define(m, "fp8_linear_norm", run_norm);
  define(m, "fp8_linear_draft_norms", run_draft_norms);
  define(m, "fp8_linear_draft_sum", run_draft_sum);
  m.attr("FP8_LINEAR_NORM_INPUTS") = kNormInputs;
  m.attr("FP8_LINEAR_DRAFT_NORM_STEP") = 32 * kDraftVector;
  m.attr("FP8_LINEAR_DRAFT_MOST_INPUTS") = kDraftMostInputs;
  m.attr("FP8_LINEAR_ROTATED") = kRotated;
  m.attr("FP8_LINEAR_HEAD_INPUTS") = kHeadBlocks * kBlock;
  m.def(
      "fp8_linear_splits",
      [](int rows, int outputs, int inputs, int num_sms) {
        const Plan plan = make_plan(rows, 1, outputs, inputs, num_sms, 0, {});
        return plan.stash == 0 && plan.units == 0 ? plan.splits : 1;  // else `partial` has more than the sums
      },
      py::kw_only(), "rows"_a, "outputs"_a, "inputs"_a, "num_sms"_a);
  m.def(
      "fp8_linear_scratch_bytes",
      [](int rows, int groups, int outputs, int inputs, int num_sms, int warp_rows, int blocks, int row_tiles, int in_turn) {
        return make_plan(rows, groups, outputs, inputs, num_sms, 0, {warp_rows, blocks, row_tiles, in_turn}).partial_bytes;
      },
      py::kw_only(), "rows"_a, "groups"_a, "outputs"_a, "inputs"_a, "num_sms"_a, "warp_rows"_a = 0, "blocks"_a = 0, "row_tiles"_a = 0,
      "in_turn"_a = 0);
}

}  // namespace dsv4::fp8_linear

// The Python functions of the bf16 linear and of the drafts' head: raw pointers and sizes, keyword-only; ops/ validates them.
#pragma once

#include "../arguments.h"
#include "bf16_linear.h"
#include "draft_head.h"

namespace dsv4::bf16_linear {

inline void run(Arguments& a) {
  Params p = {};
  p.x = a["x"];
  p.x_stride = a["x_stride"];
  p.weight = a["weight"];
  p.weight_stride = a["weight_stride"];
  p.out = a["out"];
  p.out_stride = a["out_stride"];
  p.bf16_out = a["bf16_out"];
  p.rows = a["rows"];
  p.inputs = a["inputs"];
  p.outputs = a["outputs"];
  const int num_sms = a["num_sms"], warps = a.get("warps", 0);
  const LaunchArguments last = a.last();
  launch(p, num_sms, warps, last.pdl, last.stream);
}

inline void run_draft_head(Arguments& a) {
  DraftHeadParams p = {};
  p.x = a["x"];
  p.x_stride = a["x_stride"];
  p.copy = a["copy"];
  p.weight = a["weight"];
  p.scores = a["scores"];
  p.out = a["out"];
  p.bf16_out = a["bf16_out"];
  p.rows = a["rows"];
  p.inputs = a["inputs"];
  p.outputs = a["outputs"];
  const int num_sms = a["num_sms"];
  const LaunchArguments last = a.last();
  launch_draft_head(p, num_sms, last.pdl, last.stream);
}

inline void bind(py::module_& m) {
  define(m, "bf16_linear", run);
  define(m, "draft_head", run_draft_head);
  m.attr("draft_head_layout") = py::make_tuple(kTileOutputs, kScaleInputs, kUnitInputs, kUnitBytes, kPartOutputs, kBest);
  m.attr("bf16_linear_limits") = py::make_tuple(kMaxRows, kInputsMultiple, kOutputsMultiple);
}

}  // namespace dsv4::bf16_linear

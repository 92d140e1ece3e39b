// The Python function of wo_a's expansion: raw pointers and sizes, keyword-only; ops/ validates them.
#pragma once

#include "../arguments.h"
#include "wo_a.h"

namespace dsv4::wo_a {

inline void run(Arguments& a) {
  Params p = {};
  p.weight = a["weight"];
  p.weight_stride = a["weight_stride"];
  p.scale = a["scale"];
  p.scale_bytes = a["scale_bytes"];
  p.scale_stride_output = static_cast<int64_t>(a["scale_stride_output"]) * p.scale_bytes;
  p.scale_stride_input = static_cast<int64_t>(a["scale_stride_input"]) * p.scale_bytes;
  p.out = a["out"];
  p.weight_rows = a["weight_rows"];
  p.inputs = a["inputs"];
  const LaunchArguments last = a.last();
  launch(p, last.pdl, last.stream);
}

inline void bind(py::module_& m) { define(m, "wo_a_expand", run); }

}  // namespace dsv4::wo_a

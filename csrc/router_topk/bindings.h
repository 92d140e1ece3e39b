// The Python functions of the router's top-k and of the argmax of long rows: raw pointers and sizes, keyword-only; ops/ validates them.
#pragma once

#include "../arguments.h"
#include "argmax.h"
#include "router_topk.h"

namespace dsv4::router_topk {

inline void run(Arguments& a) {
  Params p = {};
  p.logits = a["logits"];
  p.logits_stride = a["logits_stride"];
  p.logits_bf16 = a["logits_bf16"];
  p.bias = a["bias"];
  p.bias_bf16 = a["bias_bf16"];
  p.weights = a["weights"];
  p.ids = a["ids"];
  p.real_rows = a["real_rows"];
  p.scale = a["scale"];
  p.log1p = a["log1p"];
  p.renormalize = a["renormalize"];
  p.in_pairs = a["in_pairs"];
  p.rows = a["rows"];
  p.experts = a["experts"];
  p.topk = a["topk"];
  const LaunchArguments last = a.last();
  launch(p, last.pdl, last.stream);
}

inline void run_argmax(Arguments& a) {
  ArgmaxParams p = {};
  p.x = a["x"];
  p.x_stride = a["x_stride"];
  p.parts = a["parts"];
  p.out = a["out"];
  p.columns = a["columns"];
  const int rows = a["rows"];
  const LaunchArguments last = a.last();
  launch_argmax(p, rows, last.pdl, last.stream);
}

inline void bind(py::module_& m) {
  define(m, "router_topk", run);
  define(m, "row_argmax", run_argmax);
  m.attr("row_argmax_numbers") = kPartNumbers;
  m.attr("router_topk_limits") = py::make_tuple(kMaxExperts, kMaxTopk);
}

}  // namespace dsv4::router_topk

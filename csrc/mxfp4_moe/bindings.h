// The Python functions of the experts: raw pointers and sizes, keyword-only; ops/ validates them.
#pragma once

#include "../arguments.h"
#include "mxfp4_moe.h"
#include "scaled.h"
#include "shared.h"
#include "sorted.h"
#include "tiles.h"

namespace dsv4::mxfp4_moe {

inline Params read_params(Arguments& a) {
  Params p = {};
  p.topk_ids = a["topk_ids"];
  p.ids_stride = a["ids_stride"];
  p.expert_map = a["expert_map"];
  p.map_size = a["map_size"];
  p.first_expert = a["first_expert"];
  p.rows = a["rows"];
  p.topk = a["topk"];
  p.experts = a["experts"];
  p.x = a["x"];
  p.x_stride = a["x_stride"];
  p.topk_weights = a["topk_weights"];
  p.weights_stride = a["weights_stride"];
  p.w13 = {a["w13"], a["w13_scale"], a["w13_stride"], a["w13_scale_stride"]};
  p.w2 = {a["w2"], a["w2_scale"], a["w2_stride"], a["w2_scale_stride"]};
  p.out = a["out"];
  p.out_stride = a["out_stride"];
  p.limit = a["limit"];
  p.routed_scaling = a["routed_scaling"];
  p.hidden = a["hidden"];
  p.inter = a["inter"];
  const bool up_first = a["up_first"];
  p.gate_row = up_first ? p.inter : 0;
  p.up_row = up_first ? 0 : p.inter;
  return p;
}

inline void run(Arguments& a) {
  Params p = read_params(a);
  p.h = a["h"];
  p.y = a["y"];
  p.exact = a["exact"];
  const int num_sms = a["num_sms"];
  const LaunchArguments last = a.last();
  launch(p, num_sms, last.pdl, last.stream);
}

inline void run_sorted(Arguments& a) {
  Params p = read_params(a);
  p.exact = a["exact"];
  unsigned char* const scratch = a["scratch"];
  const int num_sms = a["num_sms"];
  const LaunchArguments last = a.last();
  launch_sorted(p, scratch, num_sms, last.pdl, last.stream);
}

inline void run_scaled(Arguments& a) {
  const Params p = read_params(a);
  unsigned char* const scratch = a["scratch"];
  const int num_sms = a["num_sms"];
  const LaunchArguments last = a.last();
  launch_scaled(p, scratch, num_sms, last.pdl, last.stream);
}

inline void run_shared(Arguments& a) {
  SharedParams p = {};
  p.shared = a["shared"];
  p.shared_stride = a["shared_stride"];
  p.routed = a["routed"];
  p.routed_stride = a["routed_stride"];
  p.rows = a["rows"];
  p.hidden = a["hidden"];
  p.scaling = a["scaling"];
  const LaunchArguments last = a.last();
  launch_shared(p, last.pdl, last.stream);
}

inline void bind(py::module_& m) {
  using namespace py::literals;
  define(m, "mxfp4_moe", run);
  m.def("mxfp4_moe_problem", &problem, py::kw_only(), "hidden"_a, "inter"_a, "experts"_a, "pairs"_a);
  define(m, "mxfp4_moe_sorted", run_sorted);
  m.def("mxfp4_moe_sorted_scratch_bytes", &sorted_scratch_bytes, py::kw_only(), "rows"_a, "topk"_a, "experts"_a, "hidden"_a, "inter"_a, "exact"_a);
  define(m, "mxfp4_moe_scaled", run_scaled);
  m.def("mxfp4_moe_scaled_scratch_bytes", &scaled_scratch_bytes, py::kw_only(), "rows"_a, "topk"_a, "experts"_a, "hidden"_a, "inter"_a);
  define(m, "mxfp4_moe_shared", run_shared);
  m.attr("mxfp4_moe_max_tiled_experts") = kMaxTiledExperts;
}

}  // namespace dsv4::mxfp4_moe

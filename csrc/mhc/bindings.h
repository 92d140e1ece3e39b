// The Python functions of the hyper-connections: raw pointers and sizes, keyword-only; ops/ validates them.
#pragma once

#include <stdexcept>
#include <string>

#include "../all_reduce/bindings.h"
#include "../arguments.h"
#include "mhc.h"

namespace dsv4::mhc {

// f is f, f and `routed`, or of `partial`; with `sums` and what else a group has, the sum of its ranks' such terms.
inline void run(Arguments& a) {
  SummingParams both = {};
  Params& p = both.boundary;
  p.f = a["f"];
  p.f_stride = a["f_stride"];
  p.post = a["post"];
  p.comb = a["comb"];
  p.streams = a["streams"];
  p.x = a["x"];
  p.x_stride = a["x_stride"];
  p.fn = a["fn"];
  p.scale = a["scale"];
  p.base = a["base"];
  p.norm_weight = a["norm_weight"];
  p.rms_eps = a["rms_eps"];
  p.hc_eps = a["hc_eps"];
  p.norm_eps = a["norm_eps"];
  p.post_scale = a["post_scale"];
  p.sinkhorn_iters = a["sinkhorn_iters"];
  p.y = a["y"];
  p.post_out = a["post_out"];
  p.comb_out = a["comb_out"];
  p.exchange = a["exchange"];
  p.partials = a["partials"];
  p.counters = a["counters"];
  p.rows = a["rows"];
  p.hidden = a["hidden"];
  p.inverse_hidden = 1.f / static_cast<float>(p.hidden);
  p.head = a["head"];
  p.patience = a.get("patience", kPatienceLooks);
  const Kernels kernels = kernels_of(a["kernels"].text());
  const int64_t exchange_words = a["exchange_words"], partials_bytes = a["partials_bytes"], counter_words = a["counter_words"];
  const int num_sms = a["num_sms"];
  const bool sums = a.get("sums", false);
  both.term.routed = a.get<const uint16_t*>("routed", nullptr);
  both.term.partial = a.get<const float*>("partial", nullptr);
  both.term.scaling = a.get("scaling", 1.f);
  const bool adds = !sums && (both.term.routed != nullptr || both.term.partial != nullptr);
  int ranks = 0;
  all_reduce::Transport transport = all_reduce::Transport::kPeer;
  if (sums) {
    ranks = all_reduce::read_group(a, both.sum);
    transport = all_reduce::transport_of(a["transport"].text());
    both.sum.x = p.f;
    both.sum.rows = p.rows;
    both.sum.vectors = static_cast<int64_t>(p.rows) * p.hidden * 2 / all_reduce::kVectorBytes;
  }
  const LaunchArguments last = a.last();
  if (p.fn != nullptr) {
    const Workspace needed = workspace(p.rows, p.hidden, p.head, kernels, sums);
    const auto enough = [](const char* what, int64_t got, int64_t least) {
      if (got < least)
        throw std::runtime_error("mhc: workspace too small: needs " + std::to_string(least) + " " + what + ", got " + std::to_string(got));
    };
    enough("words of exchange", exchange_words, needed.exchange_words);
    enough("bytes of partials", partials_bytes, needed.partials_bytes);
    enough("counters", counter_words, needed.counter_words);
  }
  if (sums) {
    launch(both, ranks, transport, num_sms, last.pdl, last.stream);
  } else if (adds) {
    launch(AddingParams{p, both.term}, num_sms, last.pdl, last.stream);
  } else {
    launch(p, kernels, num_sms, last.pdl, last.stream);
  }
}

inline void bind(py::module_& m) {
  using namespace py::literals;
  define(m, "mhc", run);
  m.attr("mhc_fused_rows") = fused_rows();
  m.attr("mhc_term_splits") = kTermSplits;
  m.def(
      "mhc_fits", [](const std::string& kernels, int rows, int num_sms) { return fits(kernels_of(kernels), rows, num_sms); }, py::kw_only(),
      "kernels"_a, "rows"_a, "num_sms"_a);
  m.def("mhc_card_is_shared", &card_is_shared);
  m.def("mhc_fits_summing", &fits_summing, py::kw_only(), "rows"_a, "num_sms"_a);
  m.def("mhc_fits_adding", &fits_adding, py::kw_only(), "rows"_a, "num_sms"_a);
  m.def("mhc_problem", &problem, py::kw_only(), "hidden"_a);
  m.def(
      "mhc_workspace",
      [](int rows, int hidden, bool head, const std::string& kernels, bool sums) {
        const Workspace w = workspace(rows, hidden, head, kernels_of(kernels), sums);
        return py::make_tuple(w.exchange_words, w.partials_bytes, w.counter_words);
      },
      py::kw_only(), "rows"_a, "hidden"_a, "head"_a, "kernels"_a, "sums"_a = false);
}

}  // namespace dsv4::mhc

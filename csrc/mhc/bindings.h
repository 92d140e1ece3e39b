// The Python functions of the hyper-connections: raw pointers and sizes, keyword-only; ops/ validates them.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "mhc.h"

namespace dsv4::mhc {

namespace py = pybind11;

template <typename T>
T* pointer_to(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline void run(uintptr_t f, int64_t f_stride, uintptr_t post, uintptr_t comb, uintptr_t streams, uintptr_t x, int64_t x_stride,
                uintptr_t fn, uintptr_t scale, uintptr_t base, uintptr_t norm_weight, double rms_eps, double hc_eps, double norm_eps,
                double post_scale, int sinkhorn_iters, uintptr_t y, uintptr_t post_out, uintptr_t comb_out, uintptr_t exchange,
                int64_t exchange_words, uintptr_t partials, int64_t partials_bytes, uintptr_t counters, int64_t counter_words, int rows,
                int hidden, bool head, const std::string& kernels, int num_sms, bool pdl, uintptr_t stream, uint32_t patience) {
  Params p = {};
  p.f = pointer_to<const uint16_t>(f);
  p.f_stride = f_stride;
  p.post = pointer_to<const float>(post);
  p.comb = pointer_to<const float>(comb);
  p.streams = pointer_to<uint16_t>(streams);
  p.x = pointer_to<const uint16_t>(x);
  p.x_stride = x_stride;
  p.fn = pointer_to<const float>(fn);
  p.scale = pointer_to<const float>(scale);
  p.base = pointer_to<const float>(base);
  p.norm_weight = pointer_to<const uint16_t>(norm_weight);
  p.rms_eps = static_cast<float>(rms_eps);
  p.hc_eps = static_cast<float>(hc_eps);
  p.norm_eps = static_cast<float>(norm_eps);
  p.post_scale = static_cast<float>(post_scale);
  p.sinkhorn_iters = sinkhorn_iters;
  p.y = pointer_to<uint16_t>(y);
  p.post_out = pointer_to<float>(post_out);
  p.comb_out = pointer_to<float>(comb_out);
  p.exchange = pointer_to<float>(exchange);
  p.partials = pointer_to<float>(partials);
  p.counters = pointer_to<uint32_t>(counters);
  p.rows = rows;
  p.hidden = hidden;
  p.inverse_hidden = 1.f / static_cast<float>(hidden);
  p.head = head;
  p.patience = patience;
  if (p.fn != nullptr) {
    const Workspace needed = workspace(rows, hidden, head, kernels_of(kernels));
    const auto enough = [](const char* what, int64_t got, int64_t least) {
      if (got < least)
        throw std::runtime_error("mhc: workspace too small: needs " + std::to_string(least) + " " + what + ", got " + std::to_string(got));
    };
    enough("words of exchange", exchange_words, needed.exchange_words);
    enough("bytes of partials", partials_bytes, needed.partials_bytes);
    enough("counters", counter_words, needed.counter_words);
  }
  launch(p, kernels_of(kernels), num_sms, pdl, pointer_to<CUstream_st>(stream));
}

inline void bind(py::module_& m) {
  using namespace py::literals;
  m.def("mhc", &run, py::kw_only(), "f"_a, "f_stride"_a, "post"_a, "comb"_a, "streams"_a, "x"_a, "x_stride"_a, "fn"_a, "scale"_a, "base"_a,
        "norm_weight"_a, "rms_eps"_a, "hc_eps"_a, "norm_eps"_a, "post_scale"_a, "sinkhorn_iters"_a, "y"_a, "post_out"_a, "comb_out"_a,
        "exchange"_a, "exchange_words"_a, "partials"_a, "partials_bytes"_a, "counters"_a, "counter_words"_a, "rows"_a, "hidden"_a, "head"_a,
        "kernels"_a, "num_sms"_a, "pdl"_a, "stream"_a, "patience"_a = kPatienceLooks);
  m.attr("mhc_fused_rows") = fused_rows();
  m.def(
      "mhc_fits", [](const std::string& kernels, int rows, int num_sms) { return fits(kernels_of(kernels), rows, num_sms); }, py::kw_only(),
      "kernels"_a, "rows"_a, "num_sms"_a);
  m.def("mhc_problem", &problem, py::kw_only(), "hidden"_a);
  m.def(
      "mhc_workspace",
      [](int rows, int hidden, bool head, const std::string& kernels) {
        const Workspace w = workspace(rows, hidden, head, kernels_of(kernels));
        return py::make_tuple(w.exchange_words, w.partials_bytes, w.counter_words);
      },
      py::kw_only(), "rows"_a, "hidden"_a, "head"_a, "kernels"_a);
}

}  // namespace dsv4::mhc

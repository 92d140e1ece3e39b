// The Python function of a compressor's decode step: raw pointers and sizes, keyword-only; ops/ validates them.
#pragma once

#include <pybind11/pybind11.h>

#include "compressor.h"

namespace dsv4::compressor {

namespace py = pybind11;

inline void run(uintptr_t kv_score, int64_t kv_score_stride, uintptr_t state, int64_t state_slots, uintptr_t ape, uintptr_t norm_weight,
                double norm_eps, uintptr_t freqs, int64_t positions, uintptr_t plan, uintptr_t out_loc, uintptr_t cache, int64_t page_bytes,
                int64_t cache_slots, int page_shift, int rows, uintptr_t pooled, uintptr_t arrived, int ratio, bool index, bool fp4, bool pdl,
                uintptr_t stream) {
  Params p = {};
  p.kv_score = reinterpret_cast<const float*>(kv_score);
  p.kv_score_stride = kv_score_stride;
  p.state = reinterpret_cast<float*>(state);
  p.state_slots = state_slots;
  p.ape = reinterpret_cast<const float*>(ape);
  p.norm_weight = reinterpret_cast<const float*>(norm_weight);
  p.freqs = reinterpret_cast<const float*>(freqs);
  p.positions = positions;
  p.plan = reinterpret_cast<const uint4*>(plan);
  p.out_loc = reinterpret_cast<const int64_t*>(out_loc);
  p.cache = reinterpret_cast<uint8_t*>(cache);
  p.page_bytes = page_bytes;
  p.cache_slots = cache_slots;
  p.page_shift = page_shift;
  p.rows = rows;
  p.eps = static_cast<float>(norm_eps);
  p.pooled = reinterpret_cast<float*>(pooled);
  p.arrived = reinterpret_cast<uint32_t*>(arrived);
  const Entry entry = !index ? Entry::kKv : fp4 ? Entry::kIndexFp4 : Entry::kIndexFp8;
  launch(p, ratio, entry, pdl, reinterpret_cast<cudaStream_t>(stream));
}

inline void bind(py::module_& m) {
  using namespace py::literals;
  m.def("compressor", &run, py::kw_only(), "kv_score"_a, "kv_score_stride"_a, "state"_a, "state_slots"_a, "ape"_a, "norm_weight"_a,
        "norm_eps"_a, "freqs"_a, "positions"_a, "plan"_a, "out_loc"_a, "cache"_a, "page_bytes"_a, "cache_slots"_a, "page_shift"_a, "rows"_a,
        "pooled"_a, "arrived"_a, "ratio"_a, "index"_a, "fp4"_a, "pdl"_a, "stream"_a);
}

}  // namespace dsv4::compressor

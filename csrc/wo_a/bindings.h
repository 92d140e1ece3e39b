// The Python function of wo_a's expansion: raw pointers and sizes, keyword-only; ops/ validates them.
#pragma once

#include <pybind11/pybind11.h>

#include "wo_a.h"

namespace dsv4::wo_a {

namespace py = pybind11;

inline void run(uintptr_t weight, int64_t weight_stride, uintptr_t scale, int64_t scale_stride_output, int64_t scale_stride_input,
                int scale_bytes, uintptr_t out, int weight_rows, int inputs, bool pdl, uintptr_t stream) {
  Params p = {};
  p.weight = reinterpret_cast<const uint8_t*>(weight);
  p.weight_stride = weight_stride;
  p.scale = reinterpret_cast<const void*>(scale);
  p.scale_stride_output = scale_stride_output * scale_bytes;
  p.scale_stride_input = scale_stride_input * scale_bytes;
  p.scale_bytes = scale_bytes;
  p.out = reinterpret_cast<uint16_t*>(out);
  p.weight_rows = weight_rows;
  p.inputs = inputs;
  launch(p, pdl, reinterpret_cast<cudaStream_t>(stream));
}

inline void bind(py::module_& m) {
  using namespace py::literals;
  m.def("wo_a_expand", &run, py::kw_only(), "weight"_a, "weight_stride"_a, "scale"_a, "scale_stride_output"_a, "scale_stride_input"_a,
        "scale_bytes"_a, "out"_a, "weight_rows"_a, "inputs"_a, "pdl"_a, "stream"_a);
}

}  // namespace dsv4::wo_a

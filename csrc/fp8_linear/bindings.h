// The Python functions of the FP8 linear: raw pointers and sizes, keyword-only; ops/ validates them.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "config.h"

namespace dsv4::fp8_linear {

namespace py = pybind11;

inline void run(uintptr_t x, int64_t x_stride, int64_t x_stride_group, uintptr_t weight, int64_t weight_stride, uintptr_t scale,
                int64_t scale_stride_output, int64_t scale_stride_input, int scale_bytes, uintptr_t out, int64_t out_stride,
                int64_t out_stride_group, uintptr_t partial, int64_t partial_bytes, int rows, int groups, int outputs, int inputs,
                int num_sms, bool pdl, uintptr_t stream, uintptr_t rotation,
                uintptr_t positions, int position_bytes, uintptr_t norm_weight, double norm_eps, double swiglu_limit, int warp_rows,
                int blocks, int row_tiles, int in_turn) {
  for (const int64_t stride : {x_stride, x_stride_group, weight_stride, scale_stride_output * scale_bytes, scale_stride_input * scale_bytes}) {
    if (stride < 0 || stride > UINT32_MAX) throw std::runtime_error("fp8_linear: takes strides below 2^32, got " + std::to_string(stride));
  }
  Params p = {};
  p.weight = reinterpret_cast<const uint8_t*>(weight);
  p.weight_stride = static_cast<uint32_t>(weight_stride);
  p.scale = reinterpret_cast<const void*>(scale);
  p.scale_stride_output = static_cast<uint32_t>(scale_stride_output * scale_bytes);
  p.scale_stride_input = static_cast<uint32_t>(scale_stride_input * scale_bytes);
  p.scale_bytes = scale_bytes;
  p.x = reinterpret_cast<const uint16_t*>(x);
  p.x_stride = static_cast<uint32_t>(x_stride);
  p.x_stride_group = static_cast<uint32_t>(x_stride_group);
  p.out = reinterpret_cast<uint16_t*>(out);
  p.out_stride = out_stride;
  p.out_stride_group = out_stride_group;
  p.partial = reinterpret_cast<float*>(partial);
  p.rotation = reinterpret_cast<const float*>(rotation);
  p.positions = reinterpret_cast<const void*>(positions);
  p.position_bytes = position_bytes;
  p.norm_weight = reinterpret_cast<const uint16_t*>(norm_weight);
  p.norm_inverse = 1.f / static_cast<float>(inputs);
  p.norm_eps = static_cast<float>(norm_eps);
  p.swiglu_limit = static_cast<float>(swiglu_limit);
  p.rows = rows;
  p.groups = groups;
  p.outputs = outputs;
  p.inputs = inputs;
  const Plan plan = make_plan(prologue_of(p), rows, groups, outputs, inputs, num_sms, multiprocessor_shared(),
                              {warp_rows, blocks, row_tiles, in_turn});
  if (partial_bytes < plan.partial_bytes)
    throw std::runtime_error("fp8_linear: scratch too small: needs " + std::to_string(plan.partial_bytes) + " bytes, got " +
                             std::to_string(partial_bytes));
  launch(p, plan, pdl, reinterpret_cast<cudaStream_t>(stream));
}

inline void run_make(uintptr_t x, int64_t x_stride, uintptr_t out, int64_t out_stride, int rows, int inputs, uintptr_t norm_weight,
                     double norm_eps, double swiglu_limit, bool pdl, uintptr_t stream) {
  if (x_stride < 0 || x_stride > UINT32_MAX) throw std::runtime_error("fp8_linear: takes strides below 2^32, got " + std::to_string(x_stride));
  Params p = {};
  p.x = reinterpret_cast<const uint16_t*>(x);
  p.x_stride = static_cast<uint32_t>(x_stride);
  p.out = reinterpret_cast<uint16_t*>(out);
  p.out_stride = out_stride;
  p.norm_weight = reinterpret_cast<const uint16_t*>(norm_weight);
  p.norm_inverse = 1.f / static_cast<float>(inputs);
  p.norm_eps = static_cast<float>(norm_eps);
  p.swiglu_limit = static_cast<float>(swiglu_limit);
  p.rows = rows;
  p.inputs = inputs;
  make(p, pdl, reinterpret_cast<cudaStream_t>(stream));
}

inline void bind(py::module_& m) {
  using namespace py::literals;
  m.attr("FP8_LINEAR_MAX_ROWS") = kMaxRows;
  m.def("fp8_linear", &run, py::kw_only(), "x"_a, "x_stride"_a, "x_stride_group"_a, "weight"_a, "weight_stride"_a, "scale"_a,
        "scale_stride_output"_a, "scale_stride_input"_a, "scale_bytes"_a, "out"_a, "out_stride"_a, "out_stride_group"_a, "partial"_a,
        "partial_bytes"_a, "rows"_a, "groups"_a, "outputs"_a, "inputs"_a, "num_sms"_a, "pdl"_a, "stream"_a,
        "rotation"_a = 0, "positions"_a = 0, "position_bytes"_a = 8, "norm_weight"_a = 0, "norm_eps"_a = 0., "swiglu_limit"_a = 0.,
        "warp_rows"_a = 0, "blocks"_a = 0, "row_tiles"_a = 0, "in_turn"_a = 0);
  m.def("fp8_linear_make", &run_make, py::kw_only(), "x"_a, "x_stride"_a, "out"_a, "out_stride"_a, "rows"_a, "inputs"_a,
        "norm_weight"_a = 0, "norm_eps"_a = 0., "swiglu_limit"_a = 0., "pdl"_a, "stream"_a);
  m.attr("FP8_LINEAR_MADE_ROWS") = kMadeRows;
  m.attr("FP8_LINEAR_ROTATED") = kRotated;
  m.attr("FP8_LINEAR_HEAD_INPUTS") = kHeadBlocks * kBlock;
  py::enum_<Prologue>(m, "Fp8LinearPrologue")
      .value("NONE", Prologue::kNone)
      .value("ROTATION", Prologue::kRotation)
      .value("SWIGLU", Prologue::kSwiglu)
      .value("NORM", Prologue::kNorm);
  m.def("fp8_linear_problem", &problem, py::kw_only(), "prologue"_a, "rows"_a, "groups"_a, "outputs"_a, "inputs"_a);
  m.def(
      "fp8_linear_scratch_bytes",
      [](Prologue prologue, int rows, int groups, int outputs, int inputs, int num_sms, int warp_rows, int blocks, int row_tiles,
         int in_turn) {
        return make_plan(prologue, rows, groups, outputs, inputs, num_sms, 0, {warp_rows, blocks, row_tiles, in_turn}).partial_bytes;
      },
      py::kw_only(), "prologue"_a, "rows"_a, "groups"_a, "outputs"_a, "inputs"_a, "num_sms"_a, "warp_rows"_a = 0, "blocks"_a = 0,
      "row_tiles"_a = 0, "in_turn"_a = 0);
}

}  // namespace dsv4::fp8_linear

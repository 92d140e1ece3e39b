// The Python module _C: pybind11 over raw pointers, no framework header. An operator binds its own functions, whose
// arguments are keyword-only; ops/ validates them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>

#include "all_reduce/bindings.h"
#include "bf16_linear/bindings.h"
#include "build_info.h"
#include "card/bindings.h"
#include "compressor/bindings.h"
#include "fp8_linear/bindings.h"
#include "index_select/bindings.h"
#include "kv_page_layout.h"
#include "mhc/bindings.h"
#include "mxfp4_moe/bindings.h"
#include "router_topk/bindings.h"
#include "sparse_decode/bindings.h"
#include "stream.h"
#include "wo_a/bindings.h"

using namespace dsv4;

namespace {

py::list kernel_attributes() {
  py::list all;
  for (const auto& kernels :
       {all_reduce::kernel_attributes(), sparse_decode::kernel_attributes(), index_select::kernel_attributes(), mxfp4_moe::kernel_attributes(),
        bf16_linear::kernel_attributes(), mhc::kernel_attributes(), fp8_linear::kernel_attributes(), wo_a::kernel_attributes(),
        compressor::kernel_attributes(), router_topk::kernel_attributes()}) {
    for (const KernelAttributes& a : kernels) {
      py::dict d;
      d["name"] = a.name;
      d["registers"] = a.registers;
      d["shared_bytes"] = a.shared_bytes;
      d["local_bytes"] = a.local_bytes;
      d["blocks_per_sm"] = a.blocks_per_sm;
      all.append(d);
    }
  }
  return all;
}

py::dict describe_build() {
  const BuildInfo built = build_info();
  py::dict d;
  d["version"] = built.version;
  d["git_commit"] = built.git_commit;
  d["cuda_version"] = std::to_string(built.cudart / 1000) + "." + std::to_string(built.cudart % 1000 / 10);
  d["archs"] = py::str(built.archs).attr("split")();
  d["python"] = std::to_string(PY_MAJOR_VERSION) + "." + std::to_string(PY_MINOR_VERSION);
  return d;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.attr("KV_NOPE_DIM") = kNopeDim;
  m.attr("KV_ROPE_DIM") = kRopeDim;
  m.attr("KV_HEAD_DIM") = kHeadDim;
  m.attr("KV_DATA_BYTES") = kDataBytes;
  m.attr("KV_SCALE_BYTES") = kScaleBytes;
  m.attr("KV_TOKEN_BYTES") = kTokenBytes;
  m.attr("KV_TILE") = kTileDim;
  m.attr("KV_PAGE_ALIGN") = kPageAlign;
  m.def("kv_page_bytes", [](int64_t page_size) { return page_bytes(page_size); }, py::arg("page_size"));

  using namespace py::literals;
  m.def("capture_id", [](uintptr_t stream) { return capture_id(pointer<CUstream_st>(stream)); }, "stream"_a);
  m.def("stream_sms", [](uintptr_t stream, int of_device) { return stream_sms(pointer<CUstream_st>(stream), of_device); }, "stream"_a, "of_device"_a);
  sparse_decode::bind(m);
  index_select::bind(m);
  mxfp4_moe::bind(m);
  all_reduce::bind(m);
  bf16_linear::bind(m);
  mhc::bind(m);
  fp8_linear::bind(m);
  wo_a::bind(m);
  compressor::bind(m);
  router_topk::bind(m);
  card::bind(m);
  m.def("build_info", &describe_build);
  m.def("kernel_attributes", &kernel_attributes);
  m.def("kernel_shared_bytes", [] {
    py::dict d;
    for (const auto& [kernel, bytes] : sparse_decode::shared_bytes()) d[kernel.c_str()] = bytes;
    for (const auto& [kernel, bytes] : index_select::shared_bytes()) d[kernel.c_str()] = bytes;
    d["experts_kernel"] = mxfp4_moe::shared_bytes();
    d["bf16_linear_kernel"] = bf16_linear::shared_bytes();
    d["many_kernel"] = mhc::shared_bytes();
    d["linear_kernel"] = fp8_linear::shared_bytes();
    return d;
  });
}

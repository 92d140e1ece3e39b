// The Python functions of the sums between cards: raw pointers and sizes, keyword-only; ops/ validates them.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "all_reduce.h"
#include "memory.h"

namespace dsv4::all_reduce {

namespace py = pybind11;

inline Places make_places(int ranks, int64_t one_shot_vectors, int64_t two_shot_vectors) {
  if (two_shot_vectors % ranks) throw std::runtime_error("all_reduce: two_shot_vectors must be a multiple of ranks");
  return {one_shot_vectors, two_shot_vectors, ranks};
}

inline void run(uintptr_t x, uintptr_t out, int64_t vectors, const std::vector<uintptr_t>& places, uintptr_t state, uintptr_t fault, int rank,
                int64_t one_shot_vectors, int64_t two_shot_vectors, const std::string& transport, const std::string& algorithm, uint32_t tag,
                uint32_t rows, double patience_s, bool traps, int num_sms, bool pdl, uintptr_t stream) {
  const int ranks = static_cast<int>(places.size());
  if (ranks > kMaxRanks || rank < 0 || rank >= ranks) throw std::runtime_error("all_reduce: rank is none of places");
  Params p = {};
  p.x = reinterpret_cast<const uint16_t*>(x);
  p.out = reinterpret_cast<uint16_t*>(out);
  p.vectors = vectors;
  for (int r = 0; r < ranks; ++r) p.places[r] = reinterpret_cast<uint4*>(places[r]);
  p.state = reinterpret_cast<State*>(state);
  p.fault = reinterpret_cast<Fault*>(fault);
  p.sizes = make_places(ranks, one_shot_vectors, two_shot_vectors);
  p.rank = rank;
  p.tag = tag;
  p.rows = rows;
  p.patience_ns = static_cast<uint64_t>(patience_s * 1e9);
  p.traps = traps;
  launch(p, ranks, transport_of(transport), algorithm_of(algorithm), num_sms, pdl, reinterpret_cast<cudaStream_t>(stream));
}

inline void bind(py::module_& m) {
  using namespace py::literals;
  m.def("all_reduce", &run, py::kw_only(), "x"_a, "out"_a, "vectors"_a, "places"_a, "state"_a, "fault"_a, "rank"_a, "one_shot_vectors"_a,
        "two_shot_vectors"_a, "transport"_a, "algorithm"_a, "tag"_a, "rows"_a, "patience_s"_a, "traps"_a, "num_sms"_a, "pdl"_a, "stream"_a);
  m.def(
      "all_reduce_places_bytes",
      [](int ranks, int64_t one_shot_vectors, int64_t two_shot_vectors, const std::string& transport) {
        return places_bytes(make_places(ranks, one_shot_vectors, two_shot_vectors), transport_of(transport));
      },
      py::kw_only(), "ranks"_a, "one_shot_vectors"_a, "two_shot_vectors"_a, "transport"_a);
  m.attr("all_reduce_state_words") = sizeof(State) / 4;
  m.attr("all_reduce_fault_words") = sizeof(Fault) / 4;
  m.def("all_reduce_allocate", [](int64_t bytes) { return reinterpret_cast<uintptr_t>(allocate(bytes)); }, py::kw_only(), "bytes"_a);
  m.def("all_reduce_release", [](uintptr_t memory) { release(reinterpret_cast<void*>(memory)); }, py::kw_only(), "memory"_a);
  m.def("all_reduce_handle", [](uintptr_t memory) { return py::bytes(handle_of(reinterpret_cast<void*>(memory))); }, py::kw_only(), "memory"_a);
  m.def("all_reduce_open", [](const py::bytes& handle) { return reinterpret_cast<uintptr_t>(open_handle(handle)); }, py::kw_only(), "handle"_a);
  m.def("all_reduce_close", [](uintptr_t memory) { close_handle(reinterpret_cast<void*>(memory)); }, py::kw_only(), "memory"_a);
  m.def(
      "all_reduce_register_host",
      [](uintptr_t memory, int64_t bytes) { return reinterpret_cast<uintptr_t>(register_host(reinterpret_cast<void*>(memory), bytes)); },
      py::kw_only(), "memory"_a, "bytes"_a);
  m.def("all_reduce_unregister_host", [](uintptr_t memory) { unregister_host(reinterpret_cast<void*>(memory)); }, py::kw_only(), "memory"_a);
}

}  // namespace dsv4::all_reduce

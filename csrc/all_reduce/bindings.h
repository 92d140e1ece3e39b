// The Python functions of the sums between cards: raw pointers and sizes, keyword-only; ops/ validates them.
#pragma once

#include <stdexcept>
#include <string>

#include "../arguments.h"
#include "all_reduce.h"
#include "memory.h"

namespace dsv4::all_reduce {

inline Places read_places(Arguments& a, int ranks) {
  const Places places = {a["one_shot_vectors"], a["two_shot_vectors"], ranks};
  if (ranks < 1 || ranks > kMaxRanks || places.two_shot_vectors % ranks)
    throw std::runtime_error("all_reduce: two_shot_vectors must be a multiple of ranks, which are at most " + std::to_string(kMaxRanks));
  return places;
}

// What belongs to the group and the call's number; returns the number of ranks. `places`: the address, on the host, of an address for
// each rank.
inline int read_group(Arguments& a, Params& p) {
  const int ranks = a["ranks"];
  p.sizes = read_places(a, ranks);
  uint4* const* const places = a["places"];
  for (int r = 0; r < ranks; ++r) p.places[r] = places[r];
  p.state = a["state"];
  p.fault = a["fault"];
  p.rank = a["rank"];
  p.tag = a["tag"];
  const double patience_s = a["patience_s"];
  p.patience_ns = static_cast<uint64_t>(patience_s * 1e9);
  p.traps = a["traps"];
  return ranks;
}

inline void run(Arguments& a) {
  Params p = {};
  p.x = a["x"];
  p.out = a["out"];
  p.vectors = a["vectors"];
  p.row_vectors = a.get("row_vectors", 0u);  // of a gather
  const int ranks = read_group(a, p);
  p.rows = a["rows"];
  const Transport transport = transport_of(a["transport"].text());
  const Algorithm algorithm = algorithm_of(a["algorithm"].text());
  const int num_sms = a["num_sms"];
  const LaunchArguments last = a.last();
  launch(p, ranks, transport, algorithm, num_sms, last.pdl, last.stream);
}

inline void run_ping(Arguments& a) {
  Ping p = {};
  p.there = a["there"];
  p.here = a["here"];
  p.vectors = a["vectors"];
  p.rounds = a["rounds"];
  p.warm_ups = a["warm_ups"];
  p.sends = a["sends"];
  const double patience_s = a["patience_s"];
  p.patience_ns = static_cast<uint64_t>(patience_s * 1e9);
  p.took_ns = a["took_ns"];
  cudaStream_t stream = a["stream"];
  a.done();
  ping(p, stream);
}

inline int64_t places_bytes_of(Arguments& a) {
  const Places places = read_places(a, a["ranks"]);
  const Transport transport = transport_of(a["transport"].text());
  a.done();
  return places_bytes(places, transport);
}

inline int64_t slot_vectors_of(Arguments& a) {
  const Places places = read_places(a, a["ranks"]);
  const Transport transport = transport_of(a["transport"].text());
  a.done();
  return most_vectors(places, transport, Algorithm::kGather);
}

inline void bind(py::module_& m) {
  define(m, "all_reduce", run);
  define(m, "all_reduce_ping", run_ping);
  define(m, "all_reduce_places_bytes", places_bytes_of);
  define(m, "all_reduce_slot_vectors", slot_vectors_of);
  m.attr("all_reduce_state_words") = sizeof(State) / 4;
  m.attr("all_reduce_fault_words") = sizeof(Fault) / 4;
  using namespace py::literals;
  m.def("all_reduce_allocate", [](int64_t bytes) { return reinterpret_cast<uintptr_t>(allocate(bytes)); }, py::kw_only(), "bytes"_a);
  m.def("all_reduce_release", [](uintptr_t memory) { release(pointer<void>(memory)); }, py::kw_only(), "memory"_a);
  m.def("all_reduce_handle", [](uintptr_t memory) { return py::bytes(handle_of(pointer<void>(memory))); }, py::kw_only(), "memory"_a);
  m.def("all_reduce_open", [](const std::string& handle) { return reinterpret_cast<uintptr_t>(open_handle(handle)); }, py::kw_only(), "handle"_a);
  m.def("all_reduce_close", [](uintptr_t memory) { close_handle(pointer<void>(memory)); }, py::kw_only(), "memory"_a);
  m.def(
      "all_reduce_register_host",
      [](uintptr_t memory, int64_t bytes) { return reinterpret_cast<uintptr_t>(register_host(pointer<void>(memory), bytes)); }, py::kw_only(),
      "memory"_a, "bytes"_a);
  m.def("all_reduce_unregister_host", [](uintptr_t memory) { unregister_host(pointer<void>(memory)); }, py::kw_only(), "memory"_a);
}

}  // namespace dsv4::all_reduce

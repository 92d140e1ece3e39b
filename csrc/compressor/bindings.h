// The Python functions of the compressors: raw pointers and sizes, keyword-only; ops/ validates them.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "../arguments.h"
#include "compressor.h"
#include "drafts.h"

namespace dsv4::compressor {

inline void run(Arguments& a) {
  Params p = {};
  p.kv_score = a["kv_score"];
  p.kv_score_stride = a["kv_score_stride"];
  p.state = a["state"];
  p.state_slots = a["state_slots"];
  p.ape = a["ape"];
  p.norm_weight = a["norm_weight"];
  p.eps = a["norm_eps"];
  p.freqs = a["freqs"];
  p.positions = a["positions"];
  p.plan = a["plan"];
  p.out_loc = a["out_loc"];
  p.cache = a["cache"];
  p.page_bytes = a["page_bytes"];
  p.cache_slots = a["cache_slots"];
  p.page_shift = a["page_shift"];
  p.rows = a["rows"];
  p.pooled = a["pooled"];
  p.arrived = a["arrived"];
  const bool many = a["many"];
  if (many) {
    p.writes = a["writes"];
    p.entries = a["entries"];
    p.num_writes = a["num_writes"];
  }
  const int ratio = a["ratio"];
  const bool index = a["index"], fp4 = a["fp4"];
  const LaunchArguments last = a.last();
  launch(p, ratio, !index ? Entry::kKv : fp4 ? Entry::kIndexFp4 : Entry::kIndexFp8, many, last.pdl, last.stream);
}

inline void clear_drafts(Arguments& a) {
  DraftsParams p = {};
  p.requests = a["requests"];
  p.lengths = a["lengths"];
  p.accepted = a["accepted"];
  float* const* const states = a["states"];  // on the host
  p.num_states = a["num_states"];
  p.state_slots = a["state_slots"];
  p.num_requests = a["num_requests"];
  p.tokens = a["tokens"];
  p.ring = a["ring"];
  const LaunchArguments last = a.last();
  if (p.num_states > kMostStates) throw std::runtime_error("clear_drafts: takes at most " + std::to_string(kMostStates) + " states");
  std::copy_n(states, p.num_states, p.states);
  launch_clear_drafts(p, last.pdl, last.stream);
}

inline void bind(py::module_& m) {
  m.attr("CLEAR_DRAFTS_STATES") = kMostStates;
  define(m, "compressor", run);
  define(m, "clear_drafts", clear_drafts);
}

}  // namespace dsv4::compressor

// How a row is split into leaves and units, and which of them a block has.
#pragma once

#include "config.h"
#include "device.cuh"
#include "sparse_decode.h"

namespace dsv4::sparse_decode {

__device__ __forceinline__ uint32_t divide(uint32_t n, const FastDivisor& d) { return __umulhi(n << 1, d.multiplier) >> d.shift; }

__device__ __forceinline__ int load_length(const Cache& c, int row) {
  return c.topk_length == nullptr ? c.width : min(max(c.topk_length[row], 0), c.width);
}

__device__ __forceinline__ void count_leaves(Work& w) {
  w.main_leaves = (w.main_length + kLeaf - 1) / kLeaf;
  w.leaves = w.main_leaves + (w.extra_length + kLeaf - 1) / kLeaf;
  if (w.leaves == 0) w.leaves = w.main_leaves = 1;  // no candidate: one masked leaf
}

template <bool kSplit>
__device__ __forceinline__ void plan_work(const Params& p, Work& w, int split) {
  count_leaves(w);
  const int unit_log2 = unit_leaves_log2(w.leaves);
  w.units = (w.leaves + (1 << unit_log2) - 1) >> unit_log2;
  w.fold_leaves = 1 << unit_log2;
  w.first_leaf = 0;
  w.end_leaf = w.leaves;
  w.per_block = w.units;
  if (kSplit && w.units <= p.unit_slots && worth_splitting(w.leaves, p.splits.divisor)) {
    w.per_block = divide(w.units + p.splits.divisor - 1, p.splits);
    w.first_leaf = split * w.per_block << unit_log2;
    w.end_leaf = min(w.first_leaf + (w.per_block << unit_log2), w.leaves);
  } else if (kSplit && split > 0) {
    w.first_leaf = w.end_leaf;  // too short, or more units, of a leaf each, than slots for them: the first block takes the row
  }
  if (w.per_block == w.units && unit_log2 == 0) {  // the left fold of the leaves is the row
    w.fold_leaves = 0;
    w.units = w.per_block = 1;
  }
}

// slot of candidate `lane_row` of a leaf, -1 where there is none
__device__ __forceinline__ int load_slot(const Params& p, const Work& w, int leaf, int lane_row) {
  const bool in_main = leaf < w.main_leaves;
  const int position = (in_main ? leaf : leaf - w.main_leaves) * kLeaf + lane_row;
  const int32_t* indices = in_main ? p.main.indices + w.row * p.main.indices_stride : p.extra.indices + w.row * p.extra.indices_stride;
  return position < (in_main ? w.main_length : w.extra_length) ? indices[position] : -1;
}

}  // namespace dsv4::sparse_decode

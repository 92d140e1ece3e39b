// How a row is split into leaves and units, and which of them a block has.
#pragma once

#include "../device/numbers.cuh"
#include "config.h"
#include "sparse_decode.h"

namespace dsv4::sparse_decode {

__device__ __forceinline__ uint32_t divide(uint32_t n, const FastDivisor& d) { return __umulhi(n << 1, d.multiplier) >> d.shift; }

__device__ __forceinline__ int load_length(const Cache& c, int row) {
  return c.topk_length == nullptr ? c.width : min(max(c.topk_length[row], 0), c.width);
}

__device__ __forceinline__ void count_leaves(Work& w) {
  w.main_leaves = ceil_div(w.main_length, kLeaf);
  w.leaves = w.main_leaves + ceil_div(w.extra_length, kLeaf);
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

// Where a candidate lies in its cache; page 0 where it is masked.
struct Place {
  bool valid;
  uint32_t page, entry;
};

// The page table of a row; nullptr where there is none, and in the kernels that are for lists.
template <bool kTable>
__device__ __forceinline__ const int32_t* table_of(const PageTable& t, int row) {
  if constexpr (!kTable) return nullptr;
  if (t.table_of_row == nullptr) return t.pages + row * t.stride;
  const int table = t.table_of_row[row];
  return static_cast<uint32_t>(table) < static_cast<uint32_t>(t.num_tables) ? t.pages + table * t.stride : nullptr;
}

// whether there is a candidate `lane_row` of a leaf
__device__ __forceinline__ bool within(const Work& w, int leaf, int lane_row) {
  const bool in_main = leaf < w.main_leaves;
  return (in_main ? leaf : leaf - w.main_leaves) * kLeaf + lane_row < (in_main ? w.main_length : w.extra_length);
}

// What there is in memory about candidate `lane_row` of a leaf: its slot, or with kTable and in the extra cache its page; -1 where there is
// none. Loaded ahead of its use by locate().
template <bool kTable>
__device__ __forceinline__ int load_candidate(const Params& p, const Work& w, const int32_t* table, int leaf, int lane_row) {
  const bool in_main = leaf < w.main_leaves;
  const int position = (in_main ? leaf : leaf - w.main_leaves) * kLeaf + lane_row;
  if (kTable && !in_main) return position < w.extra_length && table != nullptr ? table[divide(position, p.extra.page_size)] : -1;
  const int32_t* indices = in_main ? p.main.indices + w.row * p.main.indices_stride : p.extra.indices + w.row * p.extra.indices_stride;
  return position < (in_main ? w.main_length : w.extra_length) ? indices[position] : -1;
}

// `loaded` as load_candidate returned it
template <bool kTable>
__device__ __forceinline__ Place locate(const Params& p, const Work& w, int loaded, int leaf, int lane_row) {
  const bool in_main = leaf < w.main_leaves;
  const FastDivisor& size = in_main ? p.main.page_size : p.extra.page_size;
  if (kTable && !in_main) {
    const bool valid = static_cast<uint32_t>(loaded) < static_cast<uint32_t>(p.extra_table.num_pages);
    const uint32_t position = (leaf - w.main_leaves) * kLeaf + lane_row;
    return {valid, valid ? loaded : 0u, position - divide(position, size) * size.divisor};
  }
  const bool valid = loaded >= 0 && loaded < (in_main ? p.main.num_slots : p.extra.num_slots);
  const uint32_t index = valid ? loaded : 0, page = in_main ? divide(index, p.main.page_size) : divide(index, p.extra.page_size);
  return {valid, page, index - page * size.divisor};
}

}  // namespace dsv4::sparse_decode

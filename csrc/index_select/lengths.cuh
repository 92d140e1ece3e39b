// How many entries rows have.
#pragma once

#include "../device/memory.cuh"
#include "config.h"

namespace dsv4::index_select {

// entries of a row that lie in its chunk from `first`
__device__ __forceinline__ int entries_in(int length, int first, int capacity) { return max(0, min(length - first, capacity)); }

// the greatest length of a group of rows, clamped to the width; kOlder: by load_older
template <bool kOlder = false>
__device__ __forceinline__ int group_length(const Split& s, int first_row) {
  int length = 0;
#pragma unroll
  for (int r = 0; r < kSharedRows; ++r)
    if (r < s.group_rows && first_row + r < s.rows) length = max(length, kOlder ? load_older(s.lengths + first_row + r) : s.lengths[first_row + r]);
  return min(max(length, 0), s.width);
}

}  // namespace dsv4::index_select

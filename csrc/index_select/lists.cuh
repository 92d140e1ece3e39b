// One list of candidates from the ordered keys of a chunk of entries in shared memory.
#pragma once

#include "order.cuh"

namespace dsv4::index_select {

// The shared memory of one row, and the place of its list.
struct ListWork {
  const uint32_t* keys;
  uint32_t* counts;           // [kBins], zero on entry
  uint32_t* greatest;         // greatest key of the chunk
  uint32_t* floor;
  int32_t* cut;
  ListHeader* header;
  uint32_t* out_keys;
  uint16_t* out_offsets;
};

// Counts of a block's chunks so far, from bin `top` down; a lane of the team's first warp has two of them.
struct Running {
  uint32_t counts[2] = {};
  uint32_t top = 0;
};

// Adds the chunk's counts to those of the block's earlier chunks, and raises the floor to the bin of their k-th entry. The last bins are
// left out: too low a floor is right too.
__device__ __forceinline__ void raise_floor(const ListWork& w, Running& running, uint32_t top, uint32_t k) {
  const int lane = threadIdx.x & 31;
  const uint32_t new_top = max(running.top, top);
  const int old_shift = new_top - running.top, shift = new_top - top;
  uint32_t sums[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int bin = 2 * lane + i, from = bin - old_shift;
    const uint32_t even = __shfl_sync(0xffffffffu, running.counts[0], from >> 1 & 31);
    const uint32_t odd = __shfl_sync(0xffffffffu, running.counts[1], from >> 1 & 31);
    sums[i] = bin == kBins - 1 ? 0 : (from < 0 ? 0 : from & 1 ? odd : even) + (bin >= shift ? w.counts[bin - shift] : 0);
  }
  running = {{sums[0], sums[1]}, new_top};
  const uint32_t end = inclusive_sum(sums[0] + sums[1]);
  const uint32_t reached = __ballot_sync(0xffffffffu, end >= k);
  if (reached != 0 && lane == __ffs(reached) - 1) {
    const int bin = end - sums[1] >= k ? 2 * lane : 2 * lane + 1;
    *w.floor = max(*w.floor, (new_top - bin) << kBinShift);
  }
  __syncwarp();
}

// The bins in descending order: starts of each in the list, and the last bin that is kept.
__device__ __forceinline__ void count_to_starts(const ListWork& w, uint32_t top) {
  const int lane = threadIdx.x & 31;
  const uint32_t first = w.counts[2 * lane], second = w.counts[2 * lane + 1], floor_bin = *w.floor >> kBinShift;
  const uint32_t end = inclusive_sum(first + second), middle = end - second;
  // what lies below the floor is dropped: k entries of the row are above it
  const int above_floor = static_cast<int>(top - floor_bin);  // negative: all of the chunk is below
  const int cut = top < floor_bin ? -1 : min(above_floor, kBins - 1);
  const uint32_t kept = cut < 0 ? 0 : __shfl_sync(0xffffffffu, (cut & 1) ? end : middle, cut >> 1);
  w.counts[2 * lane] = end - second - first;
  w.counts[2 * lane + 1] = middle;
  reinterpret_cast<uint32_t*>(w.header->counts)[lane] = (2 * lane <= cut ? first : 0u) | (2 * lane + 1 <= cut ? second << 16 : 0u);
  if (lane == 0) {
    *reinterpret_cast<uint4*>(w.header) = make_uint4(top, kept, 0, 0);
    *w.cut = cut;
  }
}

// All threads of a team of kTeam; `thread` is the rank in it. Keys, greatest and counts are there (a barrier has passed); counts are
// to be zeroed after the next one, greatest is.
template <int kTeam>
__device__ __forceinline__ void emit_list(const ListWork& w, Running& running, int n, int k, int thread, int barrier) {
  const uint32_t floor = *w.floor, top = *w.greatest >> kBinShift;
  uint32_t lowest = 0;  // entries of the last bin: often most, so they are counted by the warp
#pragma unroll 4
  for (int i = thread; i < n; i += kTeam) {
    const uint32_t key = w.keys[i], bin = top - (key >> kBinShift);
    const bool counts = key >= floor, last = bin >= kBins - 1u;
    lowest += counts && last;
    if (counts && !last) atomicAdd(&w.counts[bin], 1u);
  }
  lowest = __reduce_add_sync(0xffffffffu, lowest);
  if ((threadIdx.x & 31) == 0 && lowest > 0) atomicAdd(&w.counts[kBins - 1], lowest);
  sync_team<kTeam>(barrier);
  if (thread < 32) {
    raise_floor(w, running, top, k);
    count_to_starts(w, top);
  }
  sync_team<kTeam>(barrier);
  if (thread == 0) *w.greatest = 0;
  const int cut = *w.cut;
#pragma unroll 4
  for (int i = thread; i < n; i += kTeam) {
    const uint32_t key = w.keys[i];
    const int bin = min(top - (key >> kBinShift), kBins - 1u);
    if (key >= floor && bin <= cut) {
      const uint32_t at = atomicAdd(&w.counts[bin], 1u);
      w.out_keys[at] = key;
      w.out_offsets[at] = static_cast<uint16_t>(i);
    }
  }
}

__device__ __forceinline__ ListHeader* header_of(const Lists& l, const Split& s, int row, int list) {
  return reinterpret_cast<ListHeader*>(l.headers) + (static_cast<int64_t>(row) * s.lists + list);
}
__device__ __forceinline__ int64_t place_of(const Split& s, int row, int list) {
  return (static_cast<int64_t>(row) * s.lists + list) * s.list_capacity;
}

}  // namespace dsv4::index_select

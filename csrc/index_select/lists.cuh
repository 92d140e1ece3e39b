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

// The bins in descending order: starts of each in the list, the last bin that is kept, and a floor for the row's next chunks.
__device__ __forceinline__ void count_to_starts(const ListWork& w, uint32_t top, int k) {
  const int lane = threadIdx.x & 31;
  const uint32_t first = w.counts[2 * lane], second = w.counts[2 * lane + 1];
  const uint32_t end = inclusive_sum(first + second), middle = end - second;
  // bins after the one in which the k-th entry lies are dropped
  const uint32_t wanted = static_cast<uint32_t>(k);
  const int cut_lane = __ffs(__ballot_sync(0xffffffffu, end >= wanted)) - 1;  // -1: all are kept
  const int cut_of_lane = middle >= wanted ? 2 * lane : 2 * lane + 1;
  const int cut = cut_lane < 0 ? kBins - 1 : __shfl_sync(0xffffffffu, cut_of_lane, cut_lane & 31);
  const uint32_t kept_of_lane = (cut & 1) ? end : middle;
  const uint32_t kept = __shfl_sync(0xffffffffu, kept_of_lane, cut >> 1);
  w.counts[2 * lane] = end - second - first;
  w.counts[2 * lane + 1] = middle;
  reinterpret_cast<uint32_t*>(w.header->counts)[lane] = (2 * lane <= cut ? first : 0u) | (2 * lane + 1 <= cut ? second << 16 : 0u);
  if (lane == 0) {
    *reinterpret_cast<uint4*>(w.header) = make_uint4(top, kept, 0, 0);
    *w.cut = cut;
    if (cut_lane >= 0 && cut < kBins - 1) *w.floor = max(*w.floor, (top - cut) << kBinShift);
  }
}

// All threads of a team of kTeam; `thread` is the rank in it. Keys, greatest and counts are there (a barrier has passed); counts are
// to be zeroed after the next one, greatest is.
template <int kTeam>
__device__ __forceinline__ void emit_list(const ListWork& w, int n, int k, int thread, int barrier) {
  const uint32_t floor = *w.floor, top = *w.greatest >> kBinShift;
  uint32_t lowest = 0;  // entries of the last bin: often most, so they are counted by the thread
  for (int i = thread; i < n; i += kTeam) {
    const uint32_t key = w.keys[i], bin = top - (key >> kBinShift);
    if (key >= floor) {
      if (bin >= kBins - 1u) {
        ++lowest;
      } else {
        atomicAdd(&w.counts[bin], 1u);
      }
    }
  }
  if (lowest > 0) atomicAdd(&w.counts[kBins - 1], lowest);
  sync_team<kTeam>(barrier);
  if (thread < 32) count_to_starts(w, top, k);
  sync_team<kTeam>(barrier);
  if (thread == 0) *w.greatest = 0;
  const uint32_t cut = *w.cut;
  for (int i = thread; i < n; i += kTeam) {
    const uint32_t key = w.keys[i], bin = min(top - (key >> kBinShift), kBins - 1u);
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

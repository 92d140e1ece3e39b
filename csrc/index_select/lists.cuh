// Lists of candidates from the ordered keys of a range of entries in shared memory.
#pragma once

#include "../device/barriers.cuh"
#include "../device/numbers.cuh"
#include "config.h"

namespace dsv4::index_select {

template <int kThreadsOfTeam>
__device__ __forceinline__ void sync_team(int id) {
  if constexpr (kThreadsOfTeam == 32) {
    __syncwarp();
  } else {
    sync_threads<kThreadsOfTeam>(id);
  }
}

__device__ __forceinline__ uint32_t inclusive_sum(uint32_t v) {  // over the warp
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, v, d);
    if (lane >= d) v += other;
  }
  return v;
}

// The shared memory of one row, and the place of its list.
struct ListWork {
  const uint32_t* keys;
  const uint16_t* offsets;    // of the keys; nullptr: their index
  uint32_t* counts;           // [kBins], zero on entry
  uint32_t* greatest;         // greatest key
  uint32_t* floor;
  uint32_t* start;            // grows by what the list keeps
  int32_t* cut;
  ListHeader* header;
  uint32_t first;             // entry of offset 0
  uint32_t* out_keys;
  uint16_t* out_offsets;
};

// Counts of a block's lists so far, from bin `top` down; a lane of the team's first warp has two of them.
struct Running {
  uint32_t counts[2] = {};
  uint32_t top = 0;
};

// Adds the list's counts to those of the block's earlier ones, and raises the floor to the bin of their k-th entry. The last bins are
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

// The bins in descending order: starts of each in the list, and the last bin that is kept. `place`: of the list, for its header.
__device__ __forceinline__ void count_to_starts(const ListWork& w, uint32_t top, uint32_t place) {
  const int lane = threadIdx.x & 31;
  const uint32_t first = w.counts[2 * lane], second = w.counts[2 * lane + 1], floor_bin = *w.floor >> kBinShift;
  const uint32_t end = inclusive_sum(first + second), middle = end - second;
  // what lies below the floor is dropped: k entries of the row are above it
  const int above_floor = static_cast<int>(top - floor_bin);  // negative: all of the list is below
  const int cut = top < floor_bin ? -1 : min(above_floor, kBins - 1);
  const uint32_t kept = cut < 0 ? 0 : __shfl_sync(0xffffffffu, (cut & 1) ? end : middle, cut >> 1);
  w.counts[2 * lane] = end - second - first;
  w.counts[2 * lane + 1] = middle;
  reinterpret_cast<uint32_t*>(w.header->counts)[lane] = (2 * lane <= cut ? first : 0u) | (2 * lane + 1 <= cut ? second << 16 : 0u);
  if (lane == 0) {
    *reinterpret_cast<uint4*>(w.header) = make_uint4(top, kept, w.first, place);
    *w.cut = cut;
    *w.start = place + kept;
  }
}

// All threads of a team of kTeam; `thread` is the rank in it. Keys, greatest and counts are there (a barrier has passed); counts are
// to be zeroed after the next one, greatest is.
template <int kTeam, bool kOffsets>
__device__ __forceinline__ void emit_list(const ListWork& w, Running& running, int n, int k, int thread, int barrier) {
  const uint32_t floor = *w.floor, top = *w.greatest >> kBinShift, place = *w.start;
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
    count_to_starts(w, top, place);
  }
  sync_team<kTeam>(barrier);
  if (thread == 0) *w.greatest = 0;
  const int cut = *w.cut;
#pragma unroll 4
  for (int i = thread; i < n; i += kTeam) {
    const uint32_t key = w.keys[i];
    const int bin = min(top - (key >> kBinShift), kBins - 1u);
    if (key >= floor && bin <= cut) {
      const uint32_t at = place + atomicAdd(&w.counts[bin], 1u);
      w.out_keys[at] = key;
      w.out_offsets[at] = kOffsets ? w.offsets[i] : static_cast<uint16_t>(i);
    }
  }
}

__device__ __forceinline__ ListHeader* header_of(const Lists& l, const Split& s, int row, int list) {
  return reinterpret_cast<ListHeader*>(l.headers) + (static_cast<int64_t>(row) * s.lists + list);
}
// where the keys and offsets of a row begin, and those of a block in them
__device__ __forceinline__ int64_t place_of(const Split& s, int row) { return static_cast<int64_t>(row) * s.lists * s.list_capacity; }
__device__ __forceinline__ uint32_t start_of(const Split& s, const Range& range, int block) { return block * range.lists * s.list_capacity; }

// The headers of lists that are not needed, by `threads` threads.
__device__ __forceinline__ void write_empty(const Lists& l, const Split& s, int row, int list, int end, int thread, int threads) {
  constexpr int kVectors = sizeof(ListHeader) / 16;
  uint4* headers = reinterpret_cast<uint4*>(header_of(l, s, row, list));
#pragma unroll 1
  for (int i = thread; i < (end - list) * kVectors; i += threads) headers[i] = make_uint4(0, 0, 0, 0);
}

// ---- one row: keys as they come

// Holds the keys from the floor up of a warp's entries. All lanes.
__device__ __forceinline__ void hold(StreamShared& s, uint32_t key, bool valid, int entry) {
  const bool keep = valid && key >= s.floor[0];
  const uint32_t keepers = __ballot_sync(0xffffffffu, keep);
  if (keepers == 0) return;
  const int lane = threadIdx.x & 31;
  const uint32_t greatest = __reduce_max_sync(0xffffffffu, keep ? key : 0);
  uint32_t at = 0;
  if (lane == 0) {
    atomicMax(&s.greatest[0], greatest);
    at = atomicAdd(&s.held, static_cast<uint32_t>(__popc(keepers)));
  }
  at = __shfl_sync(0xffffffffu, at, 0) + __popc(keepers & ((1u << lane) - 1));
  if (keep) {
    s.keys[0][at] = key;
    s.offsets[at] = static_cast<uint16_t>(entry - s.first);
  }
}

// Before the first keys of a block's range; a barrier must follow.
__device__ __forceinline__ void start_stream(StreamShared& s, const Split& split, const Range& range, int begin) {
  if (threadIdx.x < kBins) s.counts[0][threadIdx.x] = 0;
  if (threadIdx.x < 32) s.running[threadIdx.x][0] = s.running[threadIdx.x][1] = s.running[threadIdx.x][2] = 0;
  if (threadIdx.x == 0) {
    s.floor[0] = 0, s.greatest[0] = 0, s.held = 0, s.first = begin;
    s.list = blockIdx.x * range.lists, s.end_list = s.list + range.lists;
    s.start[0] = start_of(split, range, blockIdx.x);
  }
}

// After the entries of a range up to `next`; it ends at `end`. All threads of the block; the keys of the next chunk may follow at once.
template <int kThreads>
__device__ __forceinline__ void end_chunk(StreamShared& s, const Split& split, const Lists& lists, int row, int next, int end) {
  __syncthreads();
  const int held = s.held, first = s.first;
  if (next >= end || held > held_of(1) - chunk_of(1) || next + chunk_of(1) - first > kMaxSpan) {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread), "+r"(row));  // or the addresses that follow from them wait in registers while keys are scored
    const int64_t place = place_of(split, row);
    const int list = s.list, end_list = s.end_list;
    const ListWork work = {s.keys[0],
                           s.offsets,
                           s.counts[0],
                           &s.greatest[0],
                           &s.floor[0],
                           &s.start[0],
                           &s.cut[0],
                           header_of(lists, split, row, list),
                           static_cast<uint32_t>(first),
                           lists.keys + place,
                           lists.offsets + place};
    uint32_t* kept = s.running[thread & 31];
    Running running = {{kept[0], kept[1]}, kept[2]};
    emit_list<kThreads, true>(work, running, held, split.k, thread, 1);
    if (next >= end) return write_empty(lists, split, row, list + 1, end_list, threadIdx.x, kThreads);
    __syncthreads();
    if (threadIdx.x < 32) kept[0] = running.counts[0], kept[1] = running.counts[1], kept[2] = running.top;
    if (threadIdx.x < kBins) s.counts[0][threadIdx.x] = 0;
    if (threadIdx.x == 0) s.held = 0, s.first = next, s.list = list + 1;
  }
  __syncthreads();
}

}  // namespace dsv4::index_select

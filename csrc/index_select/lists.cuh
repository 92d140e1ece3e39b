// Lists of candidates from the ordered keys of a range of entries in shared memory.
#pragma once

#include "order.cuh"

namespace dsv4::index_select {

// The shared memory of one row, and the place of its list.
struct ListWork {
  const uint32_t* keys;       // of this thread's team, or of its warp alone
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

constexpr int kSearch = kBins;  // as a cut: the floor has to be searched first

// Counts of a block's lists so far, from bin `top` down; a lane of the team's first warp has two of them.
struct Running {
  uint32_t counts[2] = {};
  uint32_t top = 0;
};

// Adds the list's counts to those of the block's earlier ones, and raises the floor to the bin of their k-th entry. The last bins are
// left out: too low a floor is right too. False: the k-th lies in one.
__device__ __forceinline__ bool raise_floor(const ListWork& w, Running& running, uint32_t top, uint32_t k) {
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
  return reached != 0;
}

// Raises the floor to the k-th greatest of at least k keys, digit by digit: where the keys above a list's last bin are fewer than k, as in
// a row whose k-th logit is negative. All threads of a team; the counts are zero after it.
template <int kTeam, int kStep>
__device__ __forceinline__ void search_floor(const ListWork& w, int n, uint32_t k, int thread, int barrier) {
  constexpr int kBits = 6;
  static_assert(1 << kBits == kBins && kTeam >= kBins, "a count a thread");
  const int lane = threadIdx.x & 31;
  uint32_t prefix = 0;
#pragma unroll 1
  for (int shift = 32; shift > 0;) {
    const int below = max(shift - kBits, 0);
    sync_team<kTeam>(barrier);
    if (thread < kBins) w.counts[thread] = 0;
    sync_team<kTeam>(barrier);
#pragma unroll 1
    for (int i = thread % kStep; i < n; i += kStep) {
      const uint32_t key = w.keys[i];
      if (shift == 32 || key >> shift == prefix) atomicAdd(&w.counts[key >> below & ((1 << (shift - below)) - 1)], 1u);
    }
    sync_team<kTeam>(barrier);
    const uint32_t upper = w.counts[kBins - 1 - 2 * lane], lower = w.counts[kBins - 2 - 2 * lane];
    const uint32_t end = inclusive_sum(upper + lower);
    const int found = __ffs(__ballot_sync(0xffffffffu, end >= k)) - 1;
    const uint32_t above = __shfl_sync(0xffffffffu, end - upper - lower, found), first = __shfl_sync(0xffffffffu, upper, found);
    const bool second = above + first < k;
    prefix = prefix << (shift - below) | (kBins - 1 - 2 * found - second);
    k -= above + (second ? first : 0);
    shift = below;
  }
  sync_team<kTeam>(barrier);
  if (thread < kBins) w.counts[thread] = 0;
  if (thread == 0) *w.floor = max(*w.floor, prefix);
  sync_team<kTeam>(barrier);
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

// Counts the keys from `floor` up by bins; the counts are zero before it.
template <int kStep>
__device__ __forceinline__ void count_keys(const ListWork& w, uint32_t floor, uint32_t top, int n, int thread) {
  uint32_t lowest = 0;  // entries of the last bin: often most, so they are counted by the warp
#pragma unroll 4
  for (int i = thread % kStep; i < n; i += kStep) {
    const uint32_t key = w.keys[i], bin = top - (key >> kBinShift);
    const bool counts = key >= floor, last = bin >= kBins - 1u;
    lowest += counts && last;
    if (counts && !last) atomicAdd(&w.counts[bin], 1u);
  }
  lowest = __reduce_add_sync(0xffffffffu, lowest);
  if ((threadIdx.x & 31) == 0 && lowest > 0) atomicAdd(&w.counts[kBins - 1], lowest);
}

// All threads of a team of kTeam; `thread` is the rank in it. Keys, greatest and counts are there (a barrier has passed); counts are
// to be zeroed after the next one, greatest is. kStep: threads that share keys[n]. `last`: the block makes no list after this one.
template <int kTeam, int kStep>
__device__ __forceinline__ void emit_list(const ListWork& w, Running& running, int n, int k, bool last, int thread, int barrier) {
  const uint32_t top = *w.greatest >> kBinShift, place = *w.start;
  uint32_t floor = *w.floor;
  count_keys<kStep>(w, floor, top, n, thread);
  sync_team<kTeam>(barrier);
  if (thread < 32) {
    const bool few = last && running.top == 0 && __reduce_add_sync(0xffffffffu, w.counts[thread] + w.counts[thread + 32]) < k;
    const bool reached = few || raise_floor(w, running, top, k);
    const bool search = !reached && w.counts[kBins - 1] >= 2u * k;
    if (search && thread == 0) *w.cut = kSearch;
    if (!search) count_to_starts(w, top, place);
  }
  sync_team<kTeam>(barrier);
  if (*w.cut == kSearch) {
    search_floor<kTeam, kStep>(w, n, k, thread, barrier);
    floor = *w.floor;
    count_keys<kStep>(w, floor, top, n, thread);
    sync_team<kTeam>(barrier);
    if (thread < 32) count_to_starts(w, top, place);
    sync_team<kTeam>(barrier);
  }
  if (thread == 0) *w.greatest = 0;
  const int cut = *w.cut;
#pragma unroll 4
  for (int i = thread % kStep; i < n; i += kStep) {
    const uint32_t key = w.keys[i];
    const int bin = min(top - (key >> kBinShift), kBins - 1u);
    if (key >= floor && bin <= cut) {
      const uint32_t at = place + atomicAdd(&w.counts[bin], 1u);
      w.out_keys[at] = key;
      w.out_offsets[at] = w.offsets != nullptr ? w.offsets[i] : static_cast<uint16_t>(i);
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

// The part of a warp of a block of kThreads, and whether there is room for a chunk more.
template <int kThreads>
__device__ __forceinline__ int part_of_warp() {
  return static_cast<int>(threadIdx.x / 32) * (held_of(1) / (kThreads / 32));
}
template <int kThreads>
__device__ __forceinline__ bool has_room(int held) {
  constexpr int kWarps = kThreads / 32;
  static_assert(chunk_of(1) % (32 * kWarps) == 0, "as many entries for every warp");
  return held <= (held_of(1) - chunk_of(1)) / kWarps;
}

// Holds the keys from the floor up of a warp's entries, behind `held` that it has. All lanes.
template <int kThreads>
__device__ __forceinline__ void hold(StreamShared& s, int& held, uint32_t key, bool valid, int entry) {
  const bool keep = valid && key >= s.floor[0];
  const uint32_t keepers = __ballot_sync(0xffffffffu, keep);
  if (keep) {
    const int at = part_of_warp<kThreads>() + held + __popc(keepers & ((1u << (threadIdx.x & 31)) - 1));
    s.keys[0][at] = key;
    s.offsets[at] = static_cast<uint16_t>(entry - s.first);
  }
  held += __popc(keepers);
}

// Before the first keys of a block's range; a barrier must follow.
__device__ __forceinline__ void start_stream(StreamShared& s, const Split& split, const Range& range, int begin) {
  if (threadIdx.x < kBins) s.counts[0][threadIdx.x] = 0;
  if (threadIdx.x < 32) s.running[threadIdx.x][0] = s.running[threadIdx.x][1] = s.running[threadIdx.x][2] = 0;
  if (threadIdx.x == 0) {
    s.floor[0] = 0, s.greatest[0] = 0, s.first = begin;
    s.list = blockIdx.x * range.lists, s.end_list = s.list + range.lists;
    s.start[0] = start_of(split, range, blockIdx.x);
  }
}

// After the entries of a range up to `next`; it ends at `end`. All threads of the block; the keys of the next chunk may follow at once.
// Called before the first entry it practises: it makes an empty list, in whose place the first one goes, and so brings its code to the
// instruction caches while the first keys are on their way.
template <int kThreads>
__device__ __forceinline__ void end_chunk(StreamShared& s, const Split& split, const Lists& lists, int row, int& held, int next, int end) {
  const bool last = next >= end, practice = next == s.first;
  if (!last && !practice && !__syncthreads_or(!has_room<kThreads>(held) || next + chunk_of(1) - s.first > kMaxSpan)) return;
  const int64_t place = place_of(split, row);
  const int list = s.list, first = s.first, part = part_of_warp<kThreads>();
  const ListWork work = {s.keys[0] + part, s.offsets + part, s.counts[0], &s.greatest[0], &s.floor[0], &s.start[0], &s.cut[0],
                         header_of(lists, split, row, list), static_cast<uint32_t>(first), lists.keys + place, lists.offsets + place};
  uint32_t greatest = 0;
  __syncwarp();
#pragma unroll 1
  for (int i = threadIdx.x & 31; i < held; i += 32) greatest = max(greatest, work.keys[i]);
  greatest = __reduce_max_sync(0xffffffffu, greatest);
  if ((threadIdx.x & 31) == 0) atomicMax(&s.greatest[0], greatest);
  __syncthreads();
  uint32_t* kept = s.running[threadIdx.x & 31];
  Running running = {{kept[0], kept[1]}, kept[2]};
  emit_list<kThreads, 32>(work, running, held, split.k, last, threadIdx.x, 1);
  if (last) return write_empty(lists, split, row, list + 1, s.end_list, threadIdx.x, kThreads);
  held = 0;
  __syncthreads();
  if (threadIdx.x < 32) kept[0] = running.counts[0], kept[1] = running.counts[1], kept[2] = running.top;
  if (threadIdx.x < kBins) s.counts[0][threadIdx.x] = 0;
  if (threadIdx.x == 0) s.first = next, s.list = list + !practice;
  __syncthreads();
}

}  // namespace dsv4::index_select

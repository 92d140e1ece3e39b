// The exact k greatest of a row from its lists, in ascending order of entry, as page slots.
//
// One block a row. The lists' counts give the bin of the k-th greatest; only the front of each list, down to that bin, is read. A radix
// select over (key, inverted entry) finds the last chosen one: ties go to the lower entry. A bit for each chosen entry and a prefix sum
// over the bits rank them by entry, so that the order of the result is a function of the set alone.
//
// A block runs through its code once, so what it costs is latency: of memory, of barriers, and of the instructions themselves. Hence
// loops that are not unrolled, no divisions, and the length and zeros before the wait; page ids come while it selects.
#pragma once

#include "../device/copies.cuh"
#include "keys.cuh"
#include "lengths.cuh"
#include "lists.cuh"

namespace dsv4::index_select {

// Sum of v over the threads before this one's warp, and over all; the same for all lanes of a warp. One barrier inside.
__device__ __forceinline__ uint32_t sum_before(MergeShared& s, uint32_t warp_sum, uint32_t& all) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  if (lane == 0) s.warp_sums[warp] = warp_sum;
  __syncthreads();
  const uint32_t v = lane < kMergeWarps ? s.warp_sums[lane] : 0;
  all = __reduce_add_sync(0xffffffffu, v);
  return __reduce_add_sync(0xffffffffu, lane < warp ? v : 0u);
}
static_assert(kMergeWarps <= 32, "a lane for each warp");

// The digit, from the greatest down, in which the `wanted`-th lies: its index, how many are above it and in it. counts[kCount] is ready
// (a barrier has passed); the results are after the call.
template <int kCount>
__device__ __forceinline__ void find_digit(MergeShared& s, const uint32_t* counts, uint32_t wanted) {
  constexpr int kEach = kCount / kMergeThreads;
  static_assert(kEach % 4 == 0, "whole vectors");
  const uint4* own = reinterpret_cast<const uint4*>(counts + kCount - kEach * (threadIdx.x + 1));
  uint32_t mine[kEach], sum = 0, all;
#pragma unroll
  for (int i = 0; i < kEach; i += 4) {
    const uint4 v = own[i / 4];
    mine[i] = v.x, mine[i + 1] = v.y, mine[i + 2] = v.z, mine[i + 3] = v.w;
    sum += v.x + v.y + v.z + v.w;
  }
  const uint32_t within = inclusive_sum(sum);
  const uint32_t end = sum_before(s, __shfl_sync(0xffffffffu, within, 31), all) + within;
  if (end >= wanted && end - sum < wanted) {
    uint32_t above = end - sum;
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) {
      if (above < wanted && above + mine[i] >= wanted) {
        s.found = kCount - kEach * (threadIdx.x + 1) + i;
        s.found_above = above;
        s.found_count = mine[i];
      }
      above += mine[i];
    }
  }
  __syncthreads();
}

struct Row {
  int row;
  int length;
  int lists;
  const ListHeader* headers;
  const uint32_t* keys;
  const uint16_t* offsets;
};

// Eight counts of a list, this lane's of its group.
struct Counts {
  uint32_t pairs[4];
  __device__ __forceinline__ explicit Counts(const ListHeader& header) {
    const uint4 v = reinterpret_cast<const uint4*>(header.counts)[threadIdx.x % kGroup];
    pairs[0] = v.x, pairs[1] = v.y, pairs[2] = v.z, pairs[3] = v.w;
  }
  __device__ __forceinline__ uint32_t operator[](int i) const { return i % 2 ? pairs[i / 2] >> 16 : pairs[i / 2] & 0xffff; }
};
static_assert(kBins == 8 * kGroup, "eight counts a lane");

// Counts of the absolute bins. What a list has in its last bin is counted at the lowest: the bin found is never too high.
__device__ __forceinline__ void count_bins(MergeShared& s, const Row& r) {
  const int sub = threadIdx.x % kGroup;
#pragma unroll 3
  for (int list = threadIdx.x / kGroup; list < r.lists; list += kMergeThreads / kGroup) {
    const uint32_t top = r.headers[list].top_bin;
    const Counts counts(r.headers[list]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int bin = 8 * sub + i;
      if (counts[i] != 0) atomicAdd(&s.bins[bin == kBins - 1 ? 0 : top - bin], counts[i]);
    }
  }
}

// How many entries of this group's list lie in bins from `bin` up, and whether these include its last bin, which holds all smaller
// ones. All lanes of a warp call it.
__device__ __forceinline__ uint32_t front_of(const ListHeader* header, uint32_t bin, bool& lowest) {
  uint32_t mine = 0;
  lowest = false;
  if (header != nullptr) {
    const int sub = threadIdx.x % kGroup, bins = static_cast<int>(header->top_bin - bin) + 1 - 8 * sub;  // of this lane's counts
    const Counts counts(*header);
#pragma unroll
    for (int i = 0; i < 8; ++i) mine += i < bins ? counts[i] : 0;
    lowest = sub == kGroup - 1 && bins >= 8 && counts[7] != 0;
  }
#pragma unroll
  for (int d = 1; d < kGroup; d *= 2) mine += __shfl_xor_sync(0xffffffffu, mine, d);
  return mine;
}

__device__ __forceinline__ uint64_t candidate(uint32_t key, int entry) { return static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(entry); }
__device__ __forceinline__ int entry_of(uint64_t candidate) { return static_cast<int>(~static_cast<uint32_t>(candidate)); }

// Starts of the fronts of the lists from `begin` on among all candidates, the first of them at s.starts[kHeaders]; s.exact falls where a
// last bin is in one. All are there after the call.
__device__ __forceinline__ void start_fronts(MergeShared& s, const Row& r, int begin, uint32_t bin) {
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x / kGroup; i < kHeaders; i += kMergeThreads / kGroup) {
    bool lowest;
    const uint32_t n = front_of(begin + i < r.lists ? &r.headers[begin + i] : nullptr, bin, lowest);
    if (lowest) s.exact = 0;
    if (threadIdx.x % kGroup == 0) s.starts[i] = n;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    constexpr int kEach = kHeaders / 32;
    uint32_t n[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum += n[i] = s.starts[kEach * threadIdx.x + i];
    uint32_t start = s.starts[kHeaders] + inclusive_sum(sum) - sum;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      s.starts[kEach * threadIdx.x + i] = start;
      start += n[i];
    }
    if (threadIdx.x == 31) s.starts[kHeaders] = start;
  }
  __syncthreads();
}

// Candidate `i` of the fronts that start_fronts arranged.
__device__ __forceinline__ uint64_t read_candidate(const MergeShared& s, const Row& r, int begin, uint32_t i) {
  int list = 0;
#pragma unroll
  for (int step = kHeaders / 2; step > 0; step /= 2)
    if (s.starts[list + step] <= i) list += step;
  const uint4 header = *reinterpret_cast<const uint4*>(&r.headers[begin + list]);  // top_bin, kept, first, start
  const uint32_t place = header.w + (i - s.starts[list]);
  return candidate(r.keys[place], header.z + r.offsets[place]);
}
static_assert((kHeaders & (kHeaders - 1)) == 0, "halved to one");

// Visits every candidate; where they are too many to be held, every entry of every list, for too many are right as well.
template <typename Visit>
__device__ __forceinline__ void visit_all(const MergeShared& s, const Row& r, const Visit& visit) {
  const uint32_t total = s.starts[kHeaders];
  if (total <= kStaged) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < total; i += kMergeThreads) visit(s.candidates[i]);
    return;
  }
  const int team = r.lists < kMergeWarps ? kMergeThreads : 32;  // threads of a list
#pragma unroll 1
  for (int list = threadIdx.x / team; list < r.lists; list += kMergeThreads / team) {
    const uint4 header = *reinterpret_cast<const uint4*>(&r.headers[list]);
#pragma unroll 2
    for (uint32_t i = threadIdx.x % team; i < header.y; i += team) visit(candidate(r.keys[header.w + i], header.z + r.offsets[header.w + i]));
  }
}

__device__ __forceinline__ void zero_digits(MergeShared& s) {
  static_assert((1 << kDigitBits) == 4 * kMergeThreads, "a vector a thread");
  reinterpret_cast<uint4*>(s.digits)[threadIdx.x] = make_uint4(0, 0, 0, 0);
}

// The least of the `wanted` greatest candidates. `known` leading bits are `prefix` for all that matter; with `counted` the next digit has
// been counted among these, else the counts are zero. A barrier has passed.
__device__ __forceinline__ uint64_t least_chosen(MergeShared& s, const Row& r, uint64_t prefix, int known, uint32_t wanted, bool counted) {
  int shift = 64 - known;
#pragma unroll 1
  while (true) {
    const int bits = min(kDigitBits, shift), below = shift - bits;
    if (!counted) {
      visit_all(s, r, [&](uint64_t c) {
        if (shift == 64 || c >> shift == prefix) atomicAdd(&s.digits[c >> below & ((1u << bits) - 1)], 1u);
      });
      __syncthreads();
    }
    counted = false;
    find_digit<1 << kDigitBits>(s, s.digits, wanted);
    prefix = prefix << bits | s.found;
    wanted -= s.found_above;
    shift = below;
    if (wanted == s.found_count || shift == 0) return prefix << shift;
    zero_digits(s);
    __syncthreads();
  }
}

__device__ __forceinline__ void write(const MergeShared& s, const MergeParams& p, int row, int rank, int entry, float logit) {
  if (p.entries != nullptr) p.entries[row * p.entries_stride + rank] = entry;
  if (p.logits != nullptr) p.logits[row * p.logits_stride + rank] = logit;
  if (p.slots == nullptr) return;
  int slot = -1;
  if (entry >= 0) {
    const int at = entry / kPage;
    const int page = at < kHeldPages ? s.pages[at] : p.table.pages[row * p.table.stride + at];
    if (static_cast<uint32_t>(page) < p.table.num_pages) slot = page * kPage + entry % kPage;
  }
  p.slots[row * p.slots_stride + rank] = slot;
}

// ---- the chosen, kWindow entries at a time

__device__ __forceinline__ void clear_window(MergeShared& s, int words) {
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < padded(words); i += kMergeThreads) s.chosen[i] = 0;
  __syncthreads();
}

__device__ __forceinline__ void mark_chosen(MergeShared& s, const Row& r, uint64_t least, int window) {
  visit_all(s, r, [&](uint64_t c) {
    const int at = entry_of(c) - window;
    if (c >= least && at >= 0 && at < kWindow) atomicOr(&s.chosen[padded(at / 32)], 1u << (at % 32));
  });
  cp_async_wait_all();  // the page ids
  __syncthreads();
}

// s.before of the window's words; returns how many are chosen in all of them.
__device__ __forceinline__ uint32_t rank_words(MergeShared& s, int words, int each) {
  const int begin = min(static_cast<int>(threadIdx.x) * each, words), end = min(begin + each, words);
  uint32_t sum = 0, all;
#pragma unroll 4
  for (int i = begin; i < end; ++i) sum += __popc(s.chosen[padded(i)]);
  const uint32_t within = inclusive_sum(sum);
  uint32_t before = sum_before(s, __shfl_sync(0xffffffffu, within, 31), all) + within - sum;
#pragma unroll 4
  for (int i = begin; i < end; ++i) {
    s.before[padded_half(i)] = static_cast<uint16_t>(before);
    before += __popc(s.chosen[padded(i)]);
  }
  __syncthreads();
  return all;
}

// Ranks the chosen candidates by entry and writes them. The bits of the first window are zero.
__device__ __forceinline__ void write_chosen(MergeShared& s, const MergeParams& p, const Row& r, uint64_t least) {
  int rank_base = 0;
#pragma unroll 1
  for (int window = 0; window < r.length; window += kWindow) {
    const int words = ceil_div(min(r.length - window, kWindow), 32), each = ceil_div(words, kMergeThreads);
    if (window > 0) clear_window(s, words);
    mark_chosen(s, r, least, window);
    const uint32_t all = rank_words(s, words, each);
    visit_all(s, r, [&](uint64_t c) {
      const int entry = entry_of(c), at = entry - window;
      if (c < least || at < 0 || at >= kWindow) return;
      const int rank = s.before[padded_half(at / 32)] + __popc(s.chosen[padded(at / 32)] & ((1u << (at % 32)) - 1));
      write(s, p, r.row, rank_base + rank, entry, logit_of(static_cast<uint32_t>(c >> 32)));
    });
    rank_base += all;
  }
}

// ---- phases of the kernel

// The length is read before the wait: the kernel that this one waits for, always one of this operator's, has waited itself for what wrote
// it, before it let this one start.
__device__ __forceinline__ Row row_of(const MergeParams& p, int row) {
  Row r;
  r.row = row;
  r.length = min(max(load_older(p.split.lengths + row), 0), p.split.width);
  r.lists =
      p.split.splits * range_of(group_length<true>(p.split, row / p.split.group_rows * p.split.group_rows), p.split.splits, p.split.chunk).lists;
  r.headers = header_of(p.lists, p.split, row, 0);
  r.keys = p.lists.keys + place_of(p.split, row);
  r.offsets = p.lists.offsets + place_of(p.split, row);
  return r;
}

__device__ __forceinline__ void clear(MergeShared& s, int length) {
#pragma unroll
  for (int i = 0; i < kAllBins / 4; i += kMergeThreads) reinterpret_cast<uint4*>(s.bins)[i + threadIdx.x] = make_uint4(0, 0, 0, 0);
#pragma unroll 1
  for (int i = threadIdx.x; i < padded(ceil_div(min(length, kWindow), 32)) / 4 + 1; i += kMergeThreads)
    reinterpret_cast<uint4*>(s.chosen)[i] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x == 0) s.starts[kHeaders] = 0, s.exact = 1;
}

__device__ __forceinline__ void fetch_pages(MergeShared& s, const MergeParams& p, const Row& r) {
  const int pages = p.slots == nullptr ? 0 : min(ceil_div(r.length, kPage), kHeldPages);
#pragma unroll 1
  for (int i = threadIdx.x; i < pages; i += kMergeThreads) cp_async<4>(&s.pages[i], p.table.pages + r.row * p.table.stride + i);
}

// Of at most k entries all are chosen. Without logits the lists need not be there, and the row is done: returns whether it is. Else what lies
// behind its entries is written; the logits of these are not known here.
__device__ __forceinline__ bool write_short(MergeShared& s, const MergeParams& p, const Row& r) {
  cp_async_wait_all();
  __syncthreads();
  const bool all_known = p.logits == nullptr;
#pragma unroll 1
  for (int i = (all_known ? 0 : r.length) + threadIdx.x; i < p.split.k; i += kMergeThreads) write(s, p, r.row, i, i < r.length ? i : -1, -INFINITY);
  return all_known;
}

// The lists' fronts, down to `bin`; with `counts` the first digit of what is in it is counted.
__device__ __forceinline__ void gather_fronts(MergeShared& s, const Row& r, uint32_t bin, bool counts) {
#pragma unroll 1
  for (int begin = 0; begin < r.lists; begin += kHeaders) {
    start_fronts(s, r, begin, bin);
    const uint32_t total = s.starts[kHeaders];
#pragma unroll 1
    for (uint32_t i = s.starts[0] + threadIdx.x; i < total; i += kMergeThreads) {
      const uint64_t c = read_candidate(s, r, begin, i);
      if (i < kStaged) s.candidates[i] = c;
      if (counts && c >> (64 - (32 - kBinShift)) == bin)
        atomicAdd(&s.digits[c >> (64 - (32 - kBinShift) - kDigitBits) & ((1u << kDigitBits) - 1)], 1u);
    }
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kMergeThreads, 2) merge_kernel(const __grid_constant__ MergeParams p) {
  extern __shared__ __align__(16) uint8_t shared_memory[];
  auto& s = *reinterpret_cast<MergeShared*>(shared_memory);
  const int k = p.split.k;
  const Row r = row_of(p, blockIdx.x);
  clear(s, r.length);
  __syncthreads();
  pdl_wait();
  pdl_trigger();
  fetch_pages(s, p, r);
  if (r.length <= k && write_short(s, p, r)) return;
  uint64_t least = 0;
  uint32_t bin = 0, above = 0;
  if (r.length > k) {
    count_bins(s, r);
    __syncthreads();
    find_digit<kAllBins>(s, s.bins, k);
    bin = s.found;
    above = s.found_above;
    zero_digits(s);
  }
  gather_fronts(s, r, bin, r.length > k);
  if (r.length > k) {
    // where a list's last bin reaches up to here, its entries were counted too low: all bits are searched
    const bool exact = s.exact != 0;
    if (!exact) {
      zero_digits(s);
      __syncthreads();
    }
    least = least_chosen(s, r, exact ? bin : 0, exact ? 32 - kBinShift : 0, exact ? k - above : k, exact);
  }
  write_chosen(s, p, r, least);
}

// Lists from logits in memory: the counterpart of the score kernel.
__global__ void __launch_bounds__(kListThreads) list_kernel(const __grid_constant__ ListParams p) {
  __shared__ StreamShared s;
  pdl_wait();
  pdl_trigger();
  const int row = blockIdx.y, length = group_length(p.split, row);
  const Range range = range_of(length, p.split.splits, chunk_of(1));
  const int begin = blockIdx.x * range.entries, end = min(begin + range.entries, length), list = blockIdx.x * range.lists;
  if (begin >= end) return write_empty(p.lists, p.split, row, list, list + range.lists, threadIdx.x, kListThreads);
  start_stream(s, p.split, range, begin);
  __syncthreads();
  for (int first = begin; first < end; first += chunk_of(1)) {
    const int next = min(first + chunk_of(1), end);
#pragma unroll 4
    for (int at = first + threadIdx.x / 32 * 32; at < next; at += kListThreads) {
      const int i = at + (threadIdx.x & 31);
      const uint32_t key = i < next ? ordered_key(p.logits[row * p.logits_stride + i]) : 0;
      hold(s, key, i < next, i);
    }
    end_chunk<kListThreads>(s, p.split, p.lists, row, next, end);
  }
}

}  // namespace dsv4::index_select

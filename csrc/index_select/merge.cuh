// The exact k greatest of a row from its lists, in ascending order of entry, as page slots.
//
// One block a row. The lists' counts give the bin of the k-th greatest; only the front of each list, down to that bin, is read. A radix
// select over (key, inverted entry) finds the last chosen one: ties go to the lower entry. A bit for each chosen entry and a prefix sum
// over the bits rank them by entry, so that the order of the result is a function of the set alone.
#pragma once

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

struct RowLists {
  int length;                 // of the row
  int chunk;
  Range range;                // of its group's blocks
  int lists;

  __device__ __forceinline__ int first(int list) const {
    return range.lists == 1 ? list * range.entries : list / range.lists * range.entries + list % range.lists * chunk;
  }
  // whether the score kernel made it: blocks of short ranges have fewer lists than they could
  __device__ __forceinline__ bool made(int list) const {
    return first(list) < length && (range.lists == 1 || list % range.lists * chunk < range.entries);
  }
};

// Headers of kHeaders lists from `begin` on; those that were not made count nothing. All are there after the call.
__device__ __forceinline__ void load_headers(MergeShared& s, const MergeParams& p, int row, const RowLists& r, int begin) {
  constexpr int kVectors = sizeof(ListHeader) / 16;
  const uint4* headers = reinterpret_cast<const uint4*>(header_of(p.lists, p.split, row, begin));
  __syncthreads();
  for (int i = threadIdx.x; i < min(r.lists - begin, kHeaders) * kVectors; i += kMergeThreads)
    reinterpret_cast<uint4*>(s.headers)[i] = r.made(begin + i / kVectors) ? headers[i] : make_uint4(0, 0, 0, 0);
  __syncthreads();
}

// The lists of a batch, kGroup lanes each: how many entries of this group's list lie in bins from `bin` up, and whether these include its
// last bin, which holds all smaller ones. All lanes of a warp call it.
__device__ __forceinline__ int front_of(const ListHeader* header, uint32_t bin, bool& lowest) {
  static_assert(kBins == 8 * kGroup, "eight counts a lane");
  const int sub = threadIdx.x % kGroup;
  uint32_t mine = 0, last = 0;
  if (header != nullptr) {
    const uint32_t top = header->top_bin;
    const int bins = top < bin ? 0 : min(static_cast<int>(top - bin) + 1, kBins);
    const uint4 counts = reinterpret_cast<const uint4*>(header->counts)[sub];
    const uint32_t pairs[4] = {counts.x, counts.y, counts.z, counts.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = 8 * sub + 2 * i;
      mine += (first < bins ? pairs[i] & 0xffff : 0u) + (first + 1 < bins ? pairs[i] >> 16 : 0u);
    }
    last = bins == kBins && sub == kGroup - 1 ? pairs[3] >> 16 : 0;
  }
#pragma unroll
  for (int d = 1; d < kGroup; d *= 2) mine += __shfl_xor_sync(0xffffffffu, mine, d);
  lowest = last != 0;
  return static_cast<int>(mine);
}

__device__ __forceinline__ uint64_t candidate(uint32_t key, int entry) { return static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(entry); }
__device__ __forceinline__ int entry_of(uint64_t candidate) { return static_cast<int>(~static_cast<uint32_t>(candidate)); }

// Counts of the absolute bins. What a list has in its last bin is counted at the lowest: the bin found is never too high.
__device__ __forceinline__ void count_bins(MergeShared& s, int lists) {
  const int lane = threadIdx.x & 31;
  for (int list = threadIdx.x / 32; list < lists; list += kMergeWarps) {
    const ListHeader* header = &s.headers[list];
    const uint32_t top = header->top_bin, pair = reinterpret_cast<const uint32_t*>(header->counts)[lane];
    if (pair & 0xffff) atomicAdd(&s.bins[top - 2 * lane], pair & 0xffff);
    if (pair >> 16) atomicAdd(&s.bins[lane == 31 ? 0 : top - 2 * lane - 1], pair >> 16);
  }
}

// Starts of the fronts of the held lists among all candidates, the first of them at `base`; s.exact falls where a last bin is in one.
__device__ __forceinline__ void start_fronts(MergeShared& s, int lists, uint32_t bin, uint32_t base) {
  constexpr int kRounds = ceil_div(kHeaders, kMergeThreads / kGroup);
  const int group = threadIdx.x / kGroup;
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int list = group + i * (kMergeThreads / kGroup);
    bool lowest;
    const int n = front_of(list < lists ? &s.headers[list] : nullptr, bin, lowest);
    if (lowest) s.exact = 0;
    if (threadIdx.x % kGroup == 0 && list < kHeaders) s.starts[list] = n;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    constexpr int kEach = kHeaders / 32;
    uint32_t n[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum += n[i] = s.starts[kEach * threadIdx.x + i];
    uint32_t start = base + inclusive_sum(sum) - sum;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      s.starts[kEach * threadIdx.x + i] = start;
      start += n[i];
    }
    if (threadIdx.x == 31) s.starts[kHeaders] = s.total = start;
  }
  __syncthreads();
}

// Candidate `i` of the fronts that start_fronts arranged, whose lists begin with `begin`.
__device__ __forceinline__ uint64_t read_candidate(const MergeShared& s, const MergeParams& p, int row, const RowLists& r, int begin, uint32_t i) {
  int list = 0, step = 128;
#pragma unroll
  for (; step > 0; step /= 2)
    if (list + step < kHeaders && s.starts[list + step] <= i) list += step;
  const int64_t place = place_of(p.split, row, begin + list) + (i - s.starts[list]);
  return candidate(p.lists.keys[place], r.first(begin + list) + p.lists.offsets[place]);
}

// Visits every candidate, wherever they are. All threads. Fronts that are not held are counted again.
template <typename Visit>
__device__ __forceinline__ void visit_all(MergeShared& s, const MergeParams& p, int row, const RowLists& r, const Visit& visit) {
  if (s.total <= kStaged) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < s.total; i += kMergeThreads) visit(s.candidates[i]);
  } else if (r.lists <= kHeaders) {
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < s.total; i += kMergeThreads) visit(read_candidate(s, p, row, r, 0, i));
  } else {  // a warp per list: every one of its entries, for too many are right as well
#pragma unroll 1
    for (int list = threadIdx.x / 32; list < r.lists; list += kMergeWarps) {
      if (!r.made(list)) continue;
      const int kept = header_of(p.lists, p.split, row, list)->kept, first = r.first(list);
      const int64_t place = place_of(p.split, row, list);
#pragma unroll 4
      for (int i = threadIdx.x & 31; i < kept; i += 32) visit(candidate(p.lists.keys[place + i], first + p.lists.offsets[place + i]));
    }
  }
}

__device__ __forceinline__ void zero_digits(MergeShared& s) {
  for (int i = threadIdx.x; i < (1 << kDigitBits) / 4; i += kMergeThreads) reinterpret_cast<uint4*>(s.digits)[i] = make_uint4(0, 0, 0, 0);
}

// The least of the `wanted` greatest candidates. `known` leading bits are `prefix` for all that matter.
__device__ __forceinline__ uint64_t least_chosen(MergeShared& s, const MergeParams& p, int row, const RowLists& r, uint64_t prefix, int known, uint32_t wanted) {
  int shift = 64 - known;
  while (true) {  // the digits' counts are zero, and a barrier has passed
    const int bits = min(kDigitBits, shift), below = shift - bits;
    visit_all(s, p, row, r, [&](uint64_t c) {
      if (shift == 64 || c >> shift == prefix) atomicAdd(&s.digits[c >> below & ((1u << bits) - 1)], 1u);
    });
    __syncthreads();
    find_digit<1 << kDigitBits>(s, s.digits, wanted);
    prefix = prefix << bits | s.found;
    wanted -= s.found_above;
    shift = below;
    if (wanted == s.found_count || shift == 0) return prefix << shift;
    zero_digits(s);
    __syncthreads();
  }
}

__device__ __forceinline__ void write(const MergeParams& p, int row, int rank, int entry, float logit) {
  if (p.entries != nullptr) p.entries[row * p.entries_stride + rank] = entry;
  if (p.logits != nullptr) p.logits[row * p.logits_stride + rank] = logit;
  if (p.slots == nullptr) return;
  int slot = -1;
  if (entry >= 0) {
    const int page = p.table.pages[row * p.table.stride + entry / kPage];
    if (static_cast<uint32_t>(page) < p.table.num_pages) slot = page * kPage + entry % kPage;
  }
  p.slots[row * p.slots_stride + rank] = slot;
}

// Ranks the chosen candidates by entry and writes them, kWindow entries at a time. The bits of the first window are zero.
__device__ __forceinline__ void write_chosen(MergeShared& s, const MergeParams& p, int row, const RowLists& r, uint64_t least) {
  int rank_base = 0;
  for (int window = 0; window < r.length; window += kWindow) {
    const int words = ceil_div(min(r.length - window, kWindow), 32), each = ceil_div(words, kMergeThreads);
    if (window > 0) {
      __syncthreads();
      for (int i = threadIdx.x; i < words; i += kMergeThreads) s.chosen[i] = 0;
      __syncthreads();
    }
    visit_all(s, p, row, r, [&](uint64_t c) {
      const int at = entry_of(c) - window;
      if (c >= least && at >= 0 && at < kWindow) atomicOr(&s.chosen[at / 32], 1u << (at % 32));
    });
    __syncthreads();
    const int begin = min(static_cast<int>(threadIdx.x) * each, words), end = min(begin + each, words);
    uint32_t sum = 0, all;
#pragma unroll 1
    for (int i = begin; i < end; ++i) sum += __popc(s.chosen[i]);
    const uint32_t within = inclusive_sum(sum);
    uint32_t before = sum_before(s, __shfl_sync(0xffffffffu, within, 31), all) + within - sum;
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      s.before[i] = static_cast<uint16_t>(before);
      before += __popc(s.chosen[i]);
    }
    __syncthreads();
    visit_all(s, p, row, r, [&](uint64_t c) {
      const int entry = entry_of(c), at = entry - window;
      if (c < least || at < 0 || at >= kWindow) return;
      const int rank = s.before[at / 32] + __popc(s.chosen[at / 32] & ((1u << (at % 32)) - 1));
      write(p, row, rank_base + rank, entry, logit_of(static_cast<uint32_t>(c >> 32)));
    });
    rank_base += all;
  }
}

// The lists hold only rows longer than k; a shorter one is all of its entries, and its logits are not known here.
__device__ __forceinline__ void write_short(const MergeParams& p, int row, int length) {
  for (int i = threadIdx.x; i < p.split.k; i += kMergeThreads)
    write(p, row, i, i < length ? i : -1, i < length ? __uint_as_float(0x7fffffffu) : -INFINITY);
}

// The lengths are read before the wait: the kernel that this one waits for has waited itself for what wrote them.
__global__ void __launch_bounds__(kMergeThreads, 2) merge_kernel(const __grid_constant__ MergeParams p) {
  extern __shared__ __align__(16) uint8_t shared_memory[];
  auto& s = *reinterpret_cast<MergeShared*>(shared_memory);
  const int row = blockIdx.x, k = p.split.k;
  const int length = min(max(p.split.lengths[row], 0), p.split.width);
  RowLists r;
  r.length = length;
  r.chunk = p.split.chunk;
  r.range = range_of(group_length(p.split, row / p.split.group_rows * p.split.group_rows), p.split.splits, r.chunk);
  r.lists = p.split.splits * r.range.lists;
  for (int i = threadIdx.x; i < kAllBins; i += kMergeThreads) s.bins[i] = 0;
  if (threadIdx.x == 0) s.total = 0, s.exact = 1;
  pdl_wait();
  pdl_trigger();
  if (length <= k && p.logits == nullptr) return write_short(p, row, length);
  uint64_t least = 0;
  uint32_t bin = 0, above = 0;
  if (length > k) {
    for (int begin = 0; begin < r.lists; begin += kHeaders) {
      load_headers(s, p, row, r, begin);
      count_bins(s, min(r.lists - begin, kHeaders));
    }
    __syncthreads();
    find_digit<kAllBins>(s, s.bins, k);
    bin = s.found;
    above = s.found_above;
  } else {
    for (int i = length + threadIdx.x; i < k; i += kMergeThreads) write(p, row, i, -1, -INFINITY);
  }
  zero_digits(s);
  for (int begin = 0; begin < r.lists; begin += kHeaders) {
    if (length <= k || r.lists > kHeaders) load_headers(s, p, row, r, begin);
    const uint32_t before = s.total;
    __syncthreads();
    start_fronts(s, min(r.lists - begin, kHeaders), bin, before);
#pragma unroll 4
    for (uint32_t i = before + threadIdx.x; i < min(s.total, kStaged); i += kMergeThreads)
      s.candidates[i] = read_candidate(s, p, row, r, begin, i);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < ceil_div(min(length, kWindow), 32); i += kMergeThreads) s.chosen[i] = 0;  // where the headers were
  if (length <= k) __syncthreads();
  if (length > k) {
    // where a list's last bin reaches up to here, its entries were counted too low: all bits are searched
    const bool exact = s.exact != 0;
    least = least_chosen(s, p, row, r, exact ? bin : 0, exact ? 32 - kBinShift : 0, exact ? k - above : k);
  }
  write_chosen(s, p, row, r, least);
}

// Lists from logits in memory: the counterpart of the score kernel.
__global__ void __launch_bounds__(kListThreads) list_kernel(const __grid_constant__ ListParams p) {
  __shared__ RowShared<1> s;
  pdl_wait();
  pdl_trigger();
  const int row = blockIdx.y, length = group_length(p.split, row);
  const Range range = range_of(length, p.split.splits, chunk_of(1));
  const int begin = blockIdx.x * range.entries, end = min(begin + range.entries, length);
  if (begin >= end) return;
  if (threadIdx.x == 0) s.floor[0] = 0, s.greatest[0] = 0;
  Running running;
  for (int first = begin, list = blockIdx.x * range.lists; first < end; first += chunk_of(1), ++list) {
    const int n = min(end - first, chunk_of(1));
    if (threadIdx.x < kBins) s.counts[0][threadIdx.x] = 0;
    __syncthreads();
    uint32_t greatest = 0;
    for (int i = threadIdx.x; i < n; i += kListThreads) {
      const uint32_t key = ordered_key(p.logits[row * p.logits_stride + first + i]);
      s.keys[0][i] = key;
      greatest = max(greatest, key);
    }
    greatest = __reduce_max_sync(0xffffffffu, greatest);
    if ((threadIdx.x & 31) == 0) atomicMax(&s.greatest[0], greatest);
    __syncthreads();
    const int64_t place = place_of(p.split, row, list);
    const ListWork work = {s.keys[0], s.counts[0], &s.greatest[0], &s.floor[0], &s.cut[0], header_of(p.lists, p.split, row, list),
                           p.lists.keys + place, p.lists.offsets + place};
    emit_list<kListThreads>(work, running, n, p.split.k, threadIdx.x, 1);
    __syncthreads();
  }
}

}  // namespace dsv4::index_select

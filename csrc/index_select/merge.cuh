// The exact k greatest of a row from its lists, in ascending order of entry, as page slots.
//
// One block a row. The lists' counts give the bin of the k-th greatest; only the front of each list, down to that bin, is read. A radix
// select over (key, inverted entry) finds the last chosen one: ties go to the lower entry. A bit for each chosen entry and a prefix sum
// over the bits rank them by entry, so that the order of the result is a function of the set alone.
#pragma once

#include "lists.cuh"

namespace dsv4::index_select {

// The digit, from the greatest down, in which the `wanted`-th lies: its index, how many are above it and in it. counts[kCount] is ready
// (a barrier has passed); the results are after the call.
template <int kCount>
__device__ __forceinline__ void find_digit(MergeShared& s, const uint32_t* counts, uint32_t wanted) {
  constexpr int kEach = kCount / kMergeThreads;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread & 31;
  uint32_t mine[kEach], sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; i += 4) {
    const uint4 v = *reinterpret_cast<const uint4*>(counts + kCount - kEach * (thread + 1) + i);
    mine[i] = v.x, mine[i + 1] = v.y, mine[i + 2] = v.z, mine[i + 3] = v.w;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += mine[i];
  const uint32_t within = inclusive_sum(sum);
  if (lane == 31) s.warp_sums[warp] = within;
  __syncthreads();
  uint32_t end = within;
  for (int w = 0; w < warp; ++w) end += s.warp_sums[w];
  if (end >= wanted && end - sum < wanted) {
    uint32_t above = end - sum;
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) {
      if (above < wanted && above + mine[i] >= wanted) {
        s.found = kCount - kEach * (thread + 1) + i;
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
  Range range;                // of its group's blocks
  int lists;

  __device__ __forceinline__ int first(int list) const {
    return list / range.lists * range.entries + list % range.lists * kChunk;
  }
  // whether the score kernel made it: blocks of short ranges have fewer lists than they could
  __device__ __forceinline__ bool made(int list) const { return list % range.lists * kChunk < range.entries && first(list) < length; }
};

// How many entries of a list lie in bins from `bin` up; `lowest`: these include its last bin, which holds all smaller ones.
__device__ __forceinline__ int front_of(const ListHeader* header, uint32_t bin, bool& lowest) {
  const int lane = threadIdx.x & 31;
  const uint32_t top = header->top_bin, pair = reinterpret_cast<const uint32_t*>(header->counts)[lane];
  const int bins = top < bin ? 0 : min(static_cast<int>(top - bin) + 1, kBins);
  const uint32_t mine = (2 * lane < bins ? pair & 0xffff : 0u) + (2 * lane + 1 < bins ? pair >> 16 : 0u);
  lowest = bins == kBins && (__shfl_sync(0xffffffffu, pair, 31) >> 16) != 0;
  return static_cast<int>(__reduce_add_sync(0xffffffffu, mine));
}

__device__ __forceinline__ uint64_t candidate(uint32_t key, int entry) { return static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(entry); }
__device__ __forceinline__ int entry_of(uint64_t candidate) { return static_cast<int>(~static_cast<uint32_t>(candidate)); }

// Counts of the absolute bins. What a list has in its last bin is counted at the lowest: the bin found is never too high.
__device__ __forceinline__ void count_bins(MergeShared& s, const MergeParams& p, int row, const RowLists& r) {
  const int lane = threadIdx.x & 31;
  for (int list = threadIdx.x / 32; list < r.lists; list += kMergeWarps) {
    if (!r.made(list)) continue;
    const ListHeader* header = header_of(p.lists, p.split, row, list);
    const uint32_t top = header->top_bin, pair = reinterpret_cast<const uint32_t*>(header->counts)[lane];
    if (pair & 0xffff) atomicAdd(&s.bins[top - 2 * lane], pair & 0xffff);
    if (pair >> 16) atomicAdd(&s.bins[lane == 31 ? 0 : top - 2 * lane - 1], pair >> 16);
  }
}

// Reads the fronts of the lists; calls visit(candidate) for each.
template <typename Visit>
__device__ __forceinline__ void visit_lists(const MergeParams& p, int row, const RowLists& r, uint32_t bin, const Visit& visit) {
  const int lane = threadIdx.x & 31;
  for (int list = threadIdx.x / 32; list < r.lists; list += kMergeWarps) {
    if (!r.made(list)) continue;
    bool lowest;
    const int n = front_of(header_of(p.lists, p.split, row, list), bin, lowest), first = r.first(list);
    const int64_t place = place_of(p.split, row, list);
    for (int i = lane; i < n; i += 32) visit(candidate(p.lists.keys[place + i], first + p.lists.offsets[place + i]));
  }
}

// Brings the fronts to shared memory, as far as they fit; s.total is how many there are.
__device__ __forceinline__ void stage(MergeShared& s, const MergeParams& p, int row, const RowLists& r, uint32_t bin) {
  const int lane = threadIdx.x & 31;
  for (int list = threadIdx.x / 32; list < r.lists; list += kMergeWarps) {
    if (!r.made(list)) continue;
    bool lowest;
    const int n = front_of(header_of(p.lists, p.split, row, list), bin, lowest), first = r.first(list);
    if (n == 0) continue;
    uint32_t at = 0;
    if (lane == 0) {
      at = atomicAdd(&s.total, static_cast<uint32_t>(n));
      if (lowest) s.exact = 0;
    }
    at = __shfl_sync(0xffffffffu, at, 0);
    const int64_t place = place_of(p.split, row, list);
    for (int i = lane; i < n && at + i < kStaged; i += 32)
      s.candidates[at + i] = candidate(p.lists.keys[place + i], first + p.lists.offsets[place + i]);
  }
}

// Visits every candidate, wherever they are.
template <typename Visit>
__device__ __forceinline__ void visit_all(const MergeShared& s, const MergeParams& p, int row, const RowLists& r, uint32_t bin,
                                          const Visit& visit) {
  if (s.total <= kStaged) {
    for (uint32_t i = threadIdx.x; i < s.total; i += kMergeThreads) visit(s.candidates[i]);
  } else {
    visit_lists(p, row, r, bin, visit);
  }
}

// The least of the `wanted` greatest candidates. `known` leading bits are `prefix` for all that matter.
__device__ __forceinline__ uint64_t least_chosen(MergeShared& s, const MergeParams& p, int row, const RowLists& r, uint32_t bin,
                                                 uint64_t prefix, int known, uint32_t wanted) {
  int shift = 64 - known;
  while (true) {
    const int bits = min(kDigitBits, shift), below = shift - bits;
    for (int i = threadIdx.x; i < 1 << kDigitBits; i += kMergeThreads) s.digits[i] = 0;
    __syncthreads();
    visit_all(s, p, row, r, bin, [&](uint64_t c) {
      if (shift == 64 || c >> shift == prefix) atomicAdd(&s.digits[c >> below & ((1u << bits) - 1)], 1u);
    });
    __syncthreads();
    find_digit<1 << kDigitBits>(s, s.digits, wanted);
    prefix = prefix << bits | s.found;
    wanted -= s.found_above;
    shift = below;
    if (wanted == s.found_count || shift == 0) return prefix << shift;
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

// Ranks the chosen candidates by entry and writes them, kWindow entries at a time.
__device__ __forceinline__ void write_chosen(MergeShared& s, const MergeParams& p, int row, const RowLists& r, uint32_t bin, uint64_t least) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread & 31;
  int rank_base = 0;
  for (int window = 0; window < r.length; window += kWindow) {
    const int words = ceil_div(min(r.length - window, kWindow), 32), each = ceil_div(words, kMergeThreads);
    __syncthreads();
    for (int i = thread; i < words; i += kMergeThreads) s.chosen[i] = 0;
    __syncthreads();
    visit_all(s, p, row, r, bin, [&](uint64_t c) {
      const int at = entry_of(c) - window;
      if (c >= least && at >= 0 && at < kWindow) atomicOr(&s.chosen[at / 32], 1u << (at % 32));
    });
    __syncthreads();
    const int begin = min(thread * each, words), end = min(begin + each, words);
    uint32_t sum = 0;
    for (int i = begin; i < end; ++i) sum += __popc(s.chosen[i]);
    const uint32_t within = inclusive_sum(sum);
    if (lane == 31) s.warp_sums[warp] = within;
    __syncthreads();
    uint32_t before = within - sum, all = 0;
    for (int w = 0; w < kMergeWarps; ++w) {
      if (w < warp) before += s.warp_sums[w];
      all += s.warp_sums[w];
    }
    for (int i = begin; i < end; ++i) {
      s.before[i] = static_cast<uint16_t>(before);
      before += __popc(s.chosen[i]);
    }
    __syncthreads();
    visit_all(s, p, row, r, bin, [&](uint64_t c) {
      const int entry = entry_of(c), at = entry - window;
      if (c >= least && at >= 0 && at < kWindow) {
        const int rank = s.before[at / 32] + __popc(s.chosen[at / 32] & ((1u << (at % 32)) - 1));
        write(p, row, rank_base + rank, entry, logit_of(static_cast<uint32_t>(c >> 32)));
      }
    });
    rank_base += all;
  }
}

// The lists hold only rows longer than k; a shorter one is all of its entries, and its logits are not known here.
__device__ __forceinline__ void write_short(const MergeParams& p, int row, int length) {
  for (int i = threadIdx.x; i < p.split.k; i += kMergeThreads)
    write(p, row, i, i < length ? i : -1, i < length ? __uint_as_float(0x7fffffffu) : -INFINITY);
}

__global__ void __launch_bounds__(kMergeThreads, 1) merge_kernel(const __grid_constant__ MergeParams p) {
  extern __shared__ __align__(16) uint8_t shared_memory[];
  auto& s = *reinterpret_cast<MergeShared*>(shared_memory);
  const int row = blockIdx.x, k = p.split.k;
  for (int i = threadIdx.x; i < kAllBins; i += kMergeThreads) s.bins[i] = 0;
  if (threadIdx.x == 0) s.total = 0, s.exact = 1;
  pdl_wait();
  pdl_trigger();
  const int length = min(max(p.split.lengths[row], 0), p.split.width);
  if (length <= k && p.logits == nullptr) return write_short(p, row, length);
  RowLists r;
  r.length = length;
  r.range = range_of(group_length(p.split, row / p.split.group_rows * p.split.group_rows), p.split.splits);
  r.lists = r.range.lists == 0 ? 0 : p.split.splits * r.range.lists;
  __syncthreads();
  uint64_t least = 0;
  uint32_t bin = 0;
  if (length > k) {
    count_bins(s, p, row, r);
    __syncthreads();
    find_digit<kAllBins>(s, s.bins, k);
    bin = s.found;
    const uint32_t above = s.found_above;
    stage(s, p, row, r, bin);
    __syncthreads();
    // where a list's last bin reaches up to here, its entries were counted too low: all bits are searched
    const bool exact = s.exact != 0;
    least = least_chosen(s, p, row, r, bin, exact ? bin : 0, exact ? 32 - kBinShift : 0, exact ? k - above : k);
  } else {
    stage(s, p, row, r, 0);
    __syncthreads();
    for (int i = length + threadIdx.x; i < k; i += kMergeThreads) write(p, row, i, -1, -INFINITY);
  }
  write_chosen(s, p, row, r, bin, least);
}

// Lists from logits in memory: the counterpart of the score kernel.
__global__ void __launch_bounds__(kListThreads) list_kernel(const __grid_constant__ ListParams p) {
  __shared__ ListShared s;
  pdl_wait();
  pdl_trigger();
  const int row = blockIdx.y, length = group_length(p.split, row);
  const Range range = range_of(length, p.split.splits);
  const int begin = blockIdx.x * range.entries, end = min(begin + range.entries, length);
  if (begin >= end) return;
  if (threadIdx.x == 0) s.floor[0] = 0;
  for (int first = begin, list = blockIdx.x * range.lists; first < end; first += kChunk, ++list) {
    const int n = min(end - first, kChunk);
    if (threadIdx.x < kBins) s.counts[0][threadIdx.x] = 0;
    if (threadIdx.x == 0) s.greatest[0] = 0;
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
    emit_list<kListThreads>(work, n, p.split.k, threadIdx.x, 1);
    __syncthreads();
  }
}

}  // namespace dsv4::index_select

// Index logits of a group of rows over a range of entries, each chunk reduced to a list of candidates at once.
//
// Grid: splits x groups of rows. Every warp takes tiles of 16 kTiles entries (keys go from memory straight to MMA registers), scores
// them for each row of the group, and leaves ordered keys in shared memory: of one row, those that can still be among its k greatest;
// of several, all, and after each chunk a team of warps per row makes the row's list. Rows of a group whose page is the same share its
// load; a row on another page loads its own.
#pragma once

#include "fragments.cuh"
#include "keys.cuh"
#include "lengths.cuh"
#include "lists.cuh"

namespace dsv4::index_select {

__device__ __forceinline__ float relu(float x) {  // NaN stays
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(0.f));
  return y;
}

// v[j] summed over the four lanes of a quad; lane t gets v[t]. The pairs (0, 1) and (2, 3) are added first, whatever t.
__device__ __forceinline__ float sum_quad(const float (&v)[4]) {
  const int t = threadIdx.x & 3;
  const bool odd = t & 1, upper = t & 2;
  float a = odd ? v[1] : v[0], b = odd ? v[3] : v[2];
  a += __shfl_xor_sync(0xffffffffu, odd ? v[0] : v[1], 1);
  b += __shfl_xor_sync(0xffffffffu, odd ? v[2] : v[3], 1);
  const float keep = upper ? b : a;
  return keep + __shfl_xor_sync(0xffffffffu, upper ? a : b, 2);
}

// Weighted sums of a row for the warp's tiles: lane 4 g + t gets entries 16 (2 j + t / 2) + 8 (t % 2) + g, j = 0 .. kTiles / 2 - 1.
template <Format kFormat, int kTiles>
__device__ __forceinline__ void score_row(float (&score)[kTiles / 2], const Keys<kFormat, kTiles>& keys, const uint8_t* q, const float* weights) {
  constexpr int kBlocks = kTiles == 2 ? 2 : 1;  // of heads at once: four independent chains of MMAs
  float sums[kTiles][2] = {};
#pragma unroll 1
  for (int block = 0; block < kHeads / 8; block += kBlocks) {
    float c[kBlocks][kTiles][4] = {};
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) multiply<kFormat, kTiles>(c[b], keys, q, block + b);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const float2 w = *reinterpret_cast<const float2*>(weights + 8 * (block + b) + 2 * (threadIdx.x & 3));
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          sums[tile][half] = fmaf(relu(c[b][tile][2 * half]), w.x, sums[tile][half]);
          sums[tile][half] = fmaf(relu(c[b][tile][2 * half + 1]), w.y, sums[tile][half]);
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kTiles / 2; ++j) score[j] = sum_quad({sums[2 * j][0], sums[2 * j][1], sums[2 * j + 1][0], sums[2 * j + 1][1]});
}

__device__ __forceinline__ int entry_of_lane(int j) {
  const int lane = threadIdx.x & 31;
  return 16 * (2 * j + (lane >> 1 & 1)) + 8 * (lane & 1) + lane / 4;
}

// Scales of the entries of this lane. FP4 has them in the keys, but for a constant.
template <Format kFormat, int kTiles>
__device__ __forceinline__ void load_scales(float (&scale)[kTiles / 2], const uint8_t* page, int first) {
#pragma unroll
  for (int j = 0; j < kTiles / 2; ++j) {
    if (page == nullptr) {
      scale[j] = __uint_as_float(0x7fffffffu);
    } else if constexpr (kFormat == Format::kFp4) {
      scale[j] = kFp4Rescale;
    } else {
      const uint8_t* scales = page + kPage * Traits<kFormat>::kKeyBytes;
      scale[j] = load_now(reinterpret_cast<const float*>(scales + 4 * (first + entry_of_lane(j))));
    }
  }
}

// The queries and weights of the block's rows, on their way from memory.
template <Format kFormat, int kRows>
struct RawQueries {
  static constexpr int kPieces = kHeads * Traits<kFormat>::kKeyBytes / 16;  // of a row
  static constexpr int kEach = ceil_div(kPieces, threads_of(kRows));        // of a thread
  uint4 x[kEach];
  uint32_t scales[kEach];
  float weight;

  __device__ __forceinline__ void load(const ScoreParams& p, int64_t row) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int piece = threadIdx.x + i * threads_of(kRows), head = piece / (kPieces / kHeads);
      if (piece >= kPieces) break;
      x[i] = load_16_now(p.q + row * p.q_stride_row + head * p.q_stride_head + 16 * (piece % (kPieces / kHeads)));
      scales[i] = kFormat == Format::kFp4 ? static_cast<uint32_t>(load_now(p.q_scales + row * p.q_scales_stride + head)) : 0;
    }
    if (threadIdx.x < kHeads) weight = load_now(p.weights + row * p.weights_stride + threadIdx.x);
  }
  __device__ __forceinline__ void store(uint8_t* q, float* weights) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int piece = threadIdx.x + i * threads_of(kRows);
      if (piece >= kPieces) break;
      stage_query_piece<kFormat>(q, piece / (kPieces / kHeads), piece % (kPieces / kHeads), x[i], scales[i]);
    }
    if (threadIdx.x < kHeads) weights[threadIdx.x] = weight;
  }
};

__device__ __forceinline__ const uint8_t* page_address(const ScoreParams& p, int page) {
  return static_cast<uint32_t>(page) < p.table.num_pages ? p.k_pages + page * p.page_bytes : nullptr;
}

// Puts the row's keys of the warp's tiles in place, of several rows.
template <int kRows, int kTiles>
__device__ __forceinline__ void keep_keys(RowShared<kRows>& s, int r, int at, int valid, const float (&score)[kTiles / 2],
                                          const float (&scale)[kTiles / 2]) {
  uint32_t greatest = 0;
#pragma unroll
  for (int j = 0; j < kTiles / 2; ++j) {
    const int i = at + entry_of_lane(j);
    const uint32_t key = ordered_key(score[j] * scale[j]);
    if (i < valid) {
      s.keys[r][i] = key;
      greatest = max(greatest, key);
    }
  }
  greatest = __reduce_max_sync(0xffffffffu, greatest);
  if ((threadIdx.x & 31) == 0) atomicMax(&s.greatest[r], greatest);
}

// What becomes of the keys of a chunk of several rows: a list per row, or logits in memory. All threads, after a barrier; another one
// must follow.
template <int kRows>
__device__ __forceinline__ void finish_chunk(RowShared<kRows>& s, Running& running, const ScoreParams& p, const int32_t* lengths, int first_row,
                                             int rows, int list, int first, int entries) {
  constexpr int kTeam = threads_of(kRows) / kRows;
  const int r = threadIdx.x / kTeam, thread = threadIdx.x % kTeam, row = first_row + r;
  if (r >= rows) return;
  const int n = entries_in(lengths[r], first, entries);
  if (p.logits != nullptr) {
    float* out = p.logits + row * p.logits_stride + first;
    for (int i = thread; i < n; i += kTeam) out[i] = logit_of(s.keys[r][i]);
    return;
  }
  if (n == 0) return write_empty(p.lists, p.split, row, list, list + 1, thread, kTeam);
  const int64_t place = place_of(p.split, row);
  const ListWork work = {s.keys[r],
                         nullptr,
                         s.counts[r],
                         &s.greatest[r],
                         &s.floor[r],
                         &s.start[r],
                         &s.cut[r],
                         header_of(p.lists, p.split, row, list),
                         static_cast<uint32_t>(first),
                         p.lists.keys + place,
                         p.lists.offsets + place};
  emit_list<kTeam, false>(work, running, n, p.split.k, thread, 1 + r);
}

template <int kRows>
__device__ __forceinline__ void zero_counts(RowShared<kRows>& s) {
  for (int i = threadIdx.x; i < kRows * kBins; i += threads_of(kRows)) s.counts[i / kBins][i % kBins] = 0;
}

// One row: a warp's next keys are on their way while it scores, across chunks too, and its page id two tiles ahead.
template <Format kFormat>
__device__ __forceinline__ void score_one(ScoreShared<kFormat, 1>& s, const ScoreParams& p, int row, int begin, int end, const Range& range) {
  constexpr int kTiles = 2, kEntries = 16 * kTiles, kStep = warps_of(1) * kEntries, kChunk = chunk_of(1);
  const int32_t* pages = p.table.pages + row * p.table.stride;
  RawQueries<kFormat, 1> queries;
  queries.load(p, row);
  int at = begin + threadIdx.x / 32 * kEntries;
  RawKeys<kFormat, kTiles> raw;
  float next_scale[1];
  const auto load = [&](int entry, int page) {
    const uint8_t* address = page_address(p, page);
    load_keys<kFormat, kTiles>(raw, address, entry % kPage);
    load_scales<kFormat, kTiles>(next_scale, address, entry % kPage);
  };
  const auto page_of = [&](int entry) { return entry < end ? load_now(pages + entry / kPage) : -1; };
  const int first_page = page_of(at);
  int next_page = page_of(at + kStep);
  if (at < end) load(at, first_page);
  queries.store(s.q[0], s.weights[0]);
  start_stream(s.rows, p.split, range, begin);
  __syncthreads();
#pragma unroll 1
  for (int next_chunk = begin; next_chunk < end;) {
    next_chunk = min(next_chunk + kChunk, end);
#pragma unroll 1
    for (; at < next_chunk; at += kStep) {
      Keys<kFormat, kTiles> keys;
      widen_keys<kFormat, kTiles>(keys, raw);
      const float scale[1] = {next_scale[0]};
      const int next = at + kStep;
      if (next < end) load(next, next_page);
      next_page = page_of(next + kStep);
      float score[1];
      score_row<kFormat, kTiles>(score, keys, s.q[0], s.weights[0]);
      const int entry = at + entry_of_lane(0);
      const uint32_t key = ordered_key(score[0] * scale[0]);
      if (p.logits == nullptr) {
        hold(s.rows, key, entry < end, entry);
      } else if (entry < end) {
        p.logits[row * p.logits_stride + entry] = logit_of(key);
      }
    }
    if (p.logits == nullptr) end_chunk<threads_of(1)>(s.rows, p.split, p.lists, row, next_chunk, end);
  }
}

// Several rows: a page's keys are loaded once and scored for each row that has this page.
template <Format kFormat, int kRows>
__device__ __forceinline__ void score_chunk(ScoreShared<kFormat, kRows>& s, const ScoreParams& p, int rows, int first, int entries) {
  constexpr int kTiles = 4, kWarps = warps_of(kRows);
#pragma unroll 1
  for (int at = threadIdx.x / 32 * kPage; at < entries; at += kWarps * kPage) {
    Keys<kFormat, kTiles> keys;
    float scale[kTiles / 2], score[kTiles / 2];
    int64_t loaded = -1;  // no page
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
      const int valid = s.lengths[r] - first;
      if (at >= valid) continue;
      const int page = s.pages[r][at / kPage];
      if (loaded != static_cast<uint32_t>(page)) {
        const uint8_t* address = page_address(p, page);
        RawKeys<kFormat, kTiles> raw;
        load_keys<kFormat, kTiles>(raw, address, 0);
        load_scales<kFormat, kTiles>(scale, address, 0);
        widen_keys<kFormat, kTiles>(keys, raw);
        loaded = static_cast<uint32_t>(page);
      }
      score_row<kFormat, kTiles>(score, keys, s.q[r], s.weights[r]);
      keep_keys<kRows, kTiles>(s.rows, r, at, min(valid, entries), score, scale);
    }
  }
}

template <Format kFormat, int kRows>
__device__ __forceinline__ void score_shared(ScoreShared<kFormat, kRows>& s, const ScoreParams& p, int first_row, int rows, int begin, int end,
                                             const Range& range) {
  constexpr int kChunk = chunk_of(kRows), kPages = kChunk / kPage;
  int list = blockIdx.x * range.lists;
  const int end_list = list + range.lists;
  if (threadIdx.x < kRows) {
    s.lengths[threadIdx.x] = threadIdx.x < rows ? min(max(p.split.lengths[first_row + threadIdx.x], 0), p.split.width) : 0;
    s.rows.floor[threadIdx.x] = 0;
    s.rows.greatest[threadIdx.x] = 0;
    s.rows.start[threadIdx.x] = start_of(p.split, range, blockIdx.x);
  }
  for (int r = 0; r < rows; ++r) {
    RawQueries<kFormat, kRows> queries;
    queries.load(p, first_row + r);
    queries.store(s.q[r], s.weights[r]);
  }
  __syncthreads();
  Running running;
#pragma unroll 1
  for (int first = begin; first < end; first += kChunk, ++list) {
    const int entries = min(end - first, kChunk);
    for (int i = threadIdx.x; i < rows * kPages; i += threads_of(kRows)) {
      const int r = i / kPages, j = i % kPages;
      if (j < ceil_div(entries, kPage) && first + j * kPage < s.lengths[r])
        s.pages[r][j] = load_now(p.table.pages + (first_row + r) * p.table.stride + first / kPage + j);
    }
    zero_counts<kRows>(s.rows);
    __syncthreads();
    score_chunk<kFormat, kRows>(s, p, rows, first, entries);
    __syncthreads();
    finish_chunk<kRows>(s.rows, running, p, s.lengths, first_row, rows, list, first, entries);
    __syncthreads();
  }
  if (p.logits != nullptr) return;
  for (int r = 0; r < rows; ++r) write_empty(p.lists, p.split, first_row + r, list, end_list, threadIdx.x, threads_of(kRows));
}

// The format as a number: names of kernels stay plain.
template <int kFormatNumber, int kRows>
__global__ void __launch_bounds__(threads_of(kRows), 1) score_kernel(const __grid_constant__ ScoreParams p) {
  constexpr Format kFormat = static_cast<Format>(kFormatNumber);
  extern __shared__ __align__(16) uint8_t shared_memory[];
  auto& s = *reinterpret_cast<ScoreShared<kFormat, kRows>*>(shared_memory);
  const int first_row = blockIdx.y * kRows, rows = min(kRows, p.split.rows - first_row);
  pdl_wait();
  pdl_trigger();  // after the wait: what comes next may read, before its own wait, what was there before this kernel
  const int length = group_length(p.split, first_row);
  const Range range = range_of(length, p.split.splits, chunk_of(kRows));
  const int begin = blockIdx.x * range.entries, end = min(begin + range.entries, length);
  if (p.logits == nullptr && length <= p.split.k && !p.split.short_lists) return;
  if (begin >= end) {
    const int list = blockIdx.x * range.lists;
    if (p.logits == nullptr)
      for (int r = 0; r < rows; ++r) write_empty(p.lists, p.split, first_row + r, list, list + range.lists, threadIdx.x, threads_of(kRows));
    return;
  }
  if constexpr (kRows == 1) {
    score_one<kFormat>(s, p, first_row, begin, end, range);
  } else {
    score_shared<kFormat, kRows>(s, p, first_row, rows, begin, end, range);
  }
}

}  // namespace dsv4::index_select

// Sizes of the index selection: the index page, tiles, candidate lists, shared memory.
//
//   page of 64 entries      offset          bytes
//   FP8  values             i * 128         128 E4M3
//        scales             8192 + i * 4    fp32
//   FP4  values             i * 64          128 E2M1, the even dimension in the low nibble
//        scales             4096 + i * 4    4 UE8M0, one per 32 dimensions
//
//   logit[row, entry] = scale[entry] * sum over heads of weight[row, head] * relu(<q[row, head], k[entry]>)
//
// Every logit is computed by the same instructions in the same order whatever the tile, the split or the neighbours: one chain of MMAs
// over the dimensions, fp32 fused multiply-adds over the heads of a lane, two exchanges over four lanes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "index_select.h"

namespace dsv4::index_select {

constexpr int kHeads = 64;
constexpr int kDim = 128;
constexpr int kPage = 64;                              // entries of a page
constexpr int kSharedRows = 4;                         // rows of a block where adjacent rows share their entries
constexpr int warps_of(int rows) { return rows == 1 ? 12 : 8; }  // of a block: 168 or 255 registers a thread
constexpr int threads_of(int rows) { return 32 * warps_of(rows); }
constexpr int chunk_of(int rows) { return rows == 1 ? 2304 : 2048; }  // entries after which a list may end
constexpr int held_of(int rows) { return rows == 1 ? 2 * chunk_of(1) : chunk_of(rows); }  // keys that a block holds of a row
constexpr int kListThreads = 256;                      // of a block that makes lists from given logits
constexpr int kMaxK = 1024;
constexpr int kMaxSpan = 1 << 16;                      // entries from the first to the last of a list
static_assert(chunk_of(1) % (32 * warps_of(1)) == 0 && chunk_of(kSharedRows) % (kPage * warps_of(kSharedRows)) == 0, "whole rounds");

// Ordered keys: unsigned order is the order of the logits, -0 equals +0, NaN is 0 and so below everything.
// A bin is the key's top 12 bits: an eighth of an octave. A list counts the 63 bins from its own greatest down; the last is all below.
constexpr int kBins = 64;
constexpr int kBinShift = 20;
constexpr int kAllBins = 1 << (32 - kBinShift);

struct alignas(16) ListHeader {
  uint32_t top_bin;
  uint32_t kept;              // entries
  uint32_t first;             // the entry that has offset 0
  uint32_t start;             // place of its keys and offsets among those of the row
  uint16_t counts[kBins];     // of the kept entries, from top_bin down
};
static_assert(sizeof(ListHeader) == 144, "16 + 128");

template <Format kFormat>
struct Traits;
template <>
struct Traits<Format::kFp8Half> {
  static constexpr int kQueryBytes = 16384;  // of a row in shared memory: 64 x 128 f16, as MMA fragments
  static constexpr int kKeyBytes = 128;      // of an entry
  static constexpr int kVectors = 2;         // 16-byte loads of a lane for an entry
};
template <>
struct Traits<Format::kFp8> {
  static constexpr int kQueryBytes = 8192;
  static constexpr int kKeyBytes = 128;
  static constexpr int kVectors = 2;
};
template <>
struct Traits<Format::kFp4> {
  static constexpr int kQueryBytes = 16384;
  static constexpr int kKeyBytes = 64;
  static constexpr int kVectors = 1;
};

// What a row needs between its scores and its list.
template <int kRows>
struct RowShared {
  uint32_t keys[kRows][held_of(kRows)];
  uint32_t counts[kRows][kBins];
  uint32_t greatest[kRows];
  uint32_t floor[kRows];      // keys below it cannot be among the k greatest of the row
  uint32_t start[kRows];      // of the next list
  int32_t cut[kRows];
};
// One row alone: only keys from the floor up are held, so that a list covers as many entries as it takes to have enough of them.
struct StreamShared : RowShared<1> {
  uint16_t offsets[held_of(1)];
  uint32_t held;
  int32_t first;              // entry of offset 0
  uint32_t running[32][3];    // Running of the first warp's lanes
  int32_t list, end_list;     // the next list of the block, and behind its last one
};

template <Format kFormat, int kRows>
struct ScoreShared {
  alignas(16) uint8_t q[kRows][Traits<kFormat>::kQueryBytes];
  std::conditional_t<kRows == 1, StreamShared, RowShared<kRows>> rows;
  alignas(16) float weights[kRows][kHeads];
  int32_t pages[kRows][chunk_of(kRows) / kPage];
  int32_t lengths[kRows];
};
static_assert(sizeof(ScoreShared<Format::kFp8Half, kSharedRows>) <= kMaxSharedBytes);

constexpr int kMergeThreads = 512;
constexpr int kMergeWarps = kMergeThreads / 32;
constexpr int kHeaders = 256;                          // lists whose fronts are gathered at once
constexpr int kGroup = 8;                              // lanes that read a header
constexpr int kStaged = 4096;                          // candidates held in shared memory; more are read again for every digit
constexpr int kDigitBits = 11;
constexpr int kWindow = 1 << 18;                       // entries whose chosen ones are ranked at once
constexpr int kHeldPages = kWindow / kPage;            // of the row's page table

// Threads read runs of words; these keep the runs of a warp on different banks.
constexpr int padded(int word) { return word + word / 32; }
constexpr int padded_half(int word) { return word + word / 64 * 2; }

struct MergeShared {
  uint64_t candidates[kStaged];                        // key, then the inverted entry: greater is better, no two are equal
  alignas(16) uint32_t chosen[padded(kWindow / 32)];   // a bit for each entry
  union {
    alignas(16) uint32_t bins[kAllBins];
    uint32_t digits[1 << kDigitBits];
    uint16_t before[padded_half(kWindow / 32)];        // chosen entries before the word
  };
  int32_t pages[kHeldPages];
  alignas(16) uint32_t starts[kHeaders + 1];           // of the lists' fronts among the candidates
  uint32_t warp_sums[kMergeWarps];
  uint32_t exact;
  uint32_t found, found_above, found_count;
};
static_assert(sizeof(MergeShared) <= kMaxSharedBytes);

// The part of a row that one block scores: [first, first + entries), in at most a list for each chunk.
struct Range {
  int32_t entries;            // of every block but the last
  int32_t lists;              // of every block; those that it does not need are empty
};
__host__ __device__ inline Range range_of(int length, int splits, int chunk) {
  const int pages = ceil_div(ceil_div(length, kPage), splits);
  return {pages * kPage, ceil_div(pages * kPage, chunk)};
}

}  // namespace dsv4::index_select

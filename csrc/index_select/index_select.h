// Index logits and exact top-k of DeepSeek-V4's C4 indexer: parameters and launches. Sizes in config.h, device code in the .cuh files.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../launch_kernel.h"

namespace dsv4::index_select {

constexpr char kName[] = "index_select";

enum class Format {
  kFp8Half,  // E4M3 queries and keys, widened to f16 (exact) for f16 MMA with fp32 accumulators
  kFp8,      // the same by FP8 MMA: for chips where that instruction is native
  kFp4,      // E2M1 with UE8M0 per 32 values, widened to bf16 (exact)
};

// How the entries of a row are shared out. The lengths are on the device; both kernels derive the same ranges from them.
struct Split {
  int32_t rows;
  int32_t group_rows;         // adjacent rows that one block scores together
  int32_t splits;             // blocks per group of rows
  int32_t lists;              // of a row: splits * lists per block, from the greatest possible length
  int32_t chunk;              // entries after which a block may end a list, a multiple of 64
  int32_t list_capacity;      // a block has room for that many entries times its lists
  const int32_t* lengths;     // [rows] entries, clamped to 0..width
  int32_t width;
  int32_t k;
  bool short_lists;           // also for rows of at most k entries, whose result needs no logits
};

// Candidates of a row: [rows][lists] lists, each grouped by descending bin (config.h); those of a block lie one behind the other.
struct Lists {
  uint8_t* headers;           // [rows][lists] ListHeader
  uint32_t* keys;             // [rows][lists * list_capacity] ordered keys
  uint16_t* offsets;          // the same shape: entry = first entry of the list + offset
};

struct PageTable {
  const int32_t* pages;       // [rows, columns] page of each 64 entries; nullptr: no transform
  int64_t stride;             // elements between rows
  int64_t num_pages;          // a page outside 0..num_pages-1 is not read; its entries rank last, their slot is -1
};

struct ScoreParams {
  Split split;
  Lists lists;
  PageTable table;
  const uint8_t* q;           // [rows, 64 heads, 128 B (FP8) or 64 B (FP4)]
  int64_t q_stride_row, q_stride_head;  // bytes, multiples of 16
  const int32_t* q_scales;    // FP4: [rows, 64] four UE8M0 bytes
  int64_t q_scales_stride;
  const float* weights;       // [rows, 64]
  int64_t weights_stride;
  const uint8_t* k_pages;     // [num_pages] pages of 64 entries: values, then scales; 16-byte aligned
  int64_t page_bytes;         // stride between pages, multiple of 16
  float* logits;              // [rows, width] or nullptr: write logits and no lists
  int64_t logits_stride;
};

struct ListParams {           // lists from logits that somebody else computed
  Split split;
  Lists lists;
  const float* logits;
  int64_t logits_stride;
};

struct MergeParams {
  Split split;
  Lists lists;
  PageTable table;
  int32_t* slots;             // [rows, k] page * 64 + entry % 64, ascending by entry, then -1; nullptr: not wanted
  int64_t slots_stride;
  int32_t* entries;           // [rows, k] the entries themselves, or nullptr
  int64_t entries_stride;
  float* logits;              // [rows, k] the logits of the chosen, then -inf, or nullptr
  int64_t logits_stride;
};

struct SlotParams {           // slots of lists of entries that ranks have chosen, each rank the rows from its own number on, every ranks-th
  int32_t rows, k, ranks;
  int32_t width;              // entries of a row by the page table
  const void* dealt;          // [ranks, ceil(rows / ranks), k] entries of int32 or uint16, -1 behind a list's end
  bool narrow;                // uint16
  PageTable table;
  int32_t* slots;             // [rows, k]
  int64_t slots_stride;
  int32_t* entries;           // [rows, k] or nullptr
  int64_t entries_stride;
};

struct Plan {
  int32_t group_rows, splits, lists, chunk, list_capacity;
  int32_t rows_per_launch;
  int64_t scratch_bytes;      // headers, keys, offsets of one launch
};

// The geometry for a shape; sizes alone decide, never lengths. `score`: for score kernels (else for lists from logits).
Plan make_plan(int rows, int width, int rows_per_request, int64_t max_scratch_bytes, bool score);
Lists carve(uint8_t* scratch, const Plan& plan, int rows);

void launch_score(const ScoreParams& params, Format format, bool pdl, cudaStream_t stream);
void launch_lists(const ListParams& params, bool pdl, cudaStream_t stream);
void launch_merge(const MergeParams& params, bool pdl, cudaStream_t stream);
void launch_slots(const SlotParams& params, bool pdl, cudaStream_t stream);

// The same for the rows [first, first + rows) of the tensors that the parameters describe.
ScoreParams rows_of(ScoreParams params, int64_t first, int rows);
ListParams rows_of(ListParams params, int64_t first, int rows);
MergeParams rows_of(MergeParams params, int64_t first, int rows);

// one per format, in its own file so that they compile side by side
template <Format kFormat>
void launch_score_format(const ScoreParams& params, bool pdl, cudaStream_t stream);

std::vector<KernelAttributes> kernel_attributes();
template <Format kFormat>
KernelAttributes score_attributes(int group_rows);
std::vector<std::pair<std::string, int>> shared_bytes();  // of a block, by kernel

}  // namespace dsv4::index_select

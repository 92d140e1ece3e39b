// Sparse MLA decode over FP8 pages: parameters and launch. Device code in kernel.cuh, sizes in config.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../launch_kernel.h"

namespace dsv4::sparse_decode {

// n / divisor = (2 n * multiplier) >> (32 + shift) for 0 <= n < 2^31
struct FastDivisor {
  uint32_t divisor;
  uint32_t multiplier;
  uint32_t shift;
};

struct Cache {
  const uint8_t* pages;         // [num_pages] pages, 16-byte aligned; nullptr: absent
  uint32_t page_bytes;          // stride between pages, multiple of 16
  int64_t num_slots;            // num_pages * page_size; a slot >= num_slots is masked
  FastDivisor page_size;        // tokens per page
  const int32_t* indices;       // [rows, width] token slots, negative = masked
  int64_t indices_stride;       // elements between rows
  int32_t width;
  const int32_t* topk_length;   // [rows], clamped to 0..width; nullptr: width
};

// Candidates of the extra cache that no list names: candidate e of a row is entry e % page_size of page pages[e / page_size] of the row's table.
struct PageTable {
  const int32_t* pages;         // [num_tables, width / page_size] page ids, one outside the pool = masked; nullptr: the cache has a list
  int64_t stride;               // elements between tables
  const int32_t* table_of_row;  // [rows], one outside 0..num_tables = all masked; nullptr: a table for each row
  int32_t num_tables, num_pages;  // pages of the pool, as far as their slots are below 2^31
};

struct Params {
  const uint16_t* q;            // [rows, heads, 512] bf16
  int64_t q_stride_row, q_stride_head;  // elements, multiples of 8
  uint16_t* out;                // [rows, heads, 512] bf16
  int64_t out_stride_row, out_stride_head;
  float* lse;                   // [rows, heads] or nullptr: natural log, without the sink, +inf where no candidate is valid
  const float* attn_sink;       // [heads] natural-log logits or nullptr
  float scale_log2;             // softmax scale * log2(e)
  int32_t rows, heads, head_blocks;  // blocks for the heads of a row
  int32_t stacked_log2;         // where rows are stacked: log2 of the lines of a row
  Cache main, extra;
  float* partials;              // [slots][unit_slots][kPartialFloats]
  uint32_t* control;            // [rows * head_groups][kControlWords], a multiple of 64 and 0 between calls
  FastDivisor splits;           // blocks per row and head group; 1: no partials but for long rows
  int32_t unit_slots;           // partial slots per row and head group
  int32_t guess_leaves, guess_main_leaves;  // leaves per block and of the main cache for rows as long as the tensors are wide
  PageTable extra_table;        // instead of extra.indices
};

struct Plan {
  int32_t head_groups;      // blocks for the heads of a row
  int32_t splits, unit_slots;
  int32_t rows_per_launch;  // all of them but for thousands of long rows
  int64_t partials_bytes;
  int32_t control_words;
  int32_t prefill_blocks;   // 0: not the prefill kernels
  int32_t stacked_log2;     // of the lines of a row in the prefill kernel that stacks rows; 0: the one for more heads than it takes
  int32_t pair_blocks;      // 0: not the kernel for few rows in pairs
};

// The launch geometry for a shape; prefill: by the kernels for many rows; pairs: else by the one for few in pairs, if no row can be too long for
// it. Depends on sizes alone, never on the lengths (they are on the device); bounds the scratch.
Plan make_plan(int rows, int heads, int width, int extra_width, int num_sms, int splits_override, bool prefill, bool pairs);
int max_control_words();

FastDivisor make_divisor(int divisor);
// Fills in what the plan decides, and launches.
void launch(const Params& params, const Plan& plan, bool pdl, cudaStream_t stream);

std::vector<KernelAttributes> kernel_attributes();
std::vector<std::pair<std::string, int>> shared_bytes();  // of a block, by kernel

}  // namespace dsv4::sparse_decode

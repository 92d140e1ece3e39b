// A step of a KV compressor: a token's projection goes into its request's state, and where it ends a group of 4 or 128
// tokens, the group's pooled entry is normed, rotated, quantised and stored in its cache page. One launch, of decode: a token a
// request; or of verification and short prompts: many, with plans of their own.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "../launch_kernel.h"

namespace dsv4::compressor {

enum class Entry {
  kKv,        // 512 values, the attention's: kv_page_layout.h
  kIndexFp8,  // 128 values, the indexer's: 128 E4M3 bytes; behind a page's values one fp32 scale an entry
  kIndexFp4,  // 128 values: 64 bytes of E2M1 pairs; behind a page's values four UE8M0 bytes an entry
};

constexpr int kSplits = 8;  // of a row of 128-token groups: blocks side by side, which share out its 512 values

struct Params {
  const float* kv_score;         // [rows, width]: the token's values, then its scores
  int64_t kv_score_stride;       // floats between rows, multiple of 4
  float* state;                  // [state_slots, width] contiguous
  int64_t state_slots;
  const float* ape;              // [8 or 128, head_dim]: added to the scores
  const float* norm_weight;      // [head_dim]
  const float* freqs;            // [positions, 64]: cosine and sine of 32 pairs
  int64_t positions;
  const uint4* plan;             // [rows]: length with this token, state slot to write, state pages of the group before and this
  const int64_t* out_loc;        // [rows]: cache slot of the entry, where the row ends a group
  uint8_t* cache;                // [pages, page_bytes]
  int64_t page_bytes, cache_slots;
  int32_t page_shift;            // log2 of a page's entries
  int32_t rows;
  float eps;
  float* pooled;                 // groups of 128 only: [rows, 512], scratch
  uint32_t* arrived;             // groups of 128 only: [rows], zero before and after
  // Of many tokens a request: `plan` is [entries], `pooled` and `arrived` too, and an entry is
  //   length with the group's last token, 0xffffffff: none | its row of kv_score, 16 bits; how many tokens of its window (the last
  //   8 or 128) are the state's, 16 bits | state pages of the group before and of its own
  const uint2* writes;           // [num_writes]: row of kv_score, 0xffffffff: none | state slot
  int32_t entries, num_writes;
};

// ratio: 4, or 128 for Entry::kKv; many: tokens of a request
void launch(const Params& params, int ratio, Entry entry, bool many, bool pdl, cudaStream_t stream);

std::vector<KernelAttributes> kernel_attributes();

}  // namespace dsv4::compressor

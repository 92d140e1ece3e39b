// What a draft's block begins with, around two products: the norms of its two inputs, and the sum of both products.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "../launch_kernel.h"

namespace dsv4::fp8_linear {

constexpr int kDraftVector = 8, kDraftMostInputs = 1024 * kDraftVector;  // numbers of a thread; inputs are a multiple of 32 of them

struct DraftNormParams {
  const uint16_t* hidden_norm;    // [inputs] bf16
  const uint16_t* embedded_norm;  // [inputs] bf16
  const uint16_t* table;          // [entries, inputs] bf16, where ids choose its rows; null: `embedded` has them
  const uint16_t* hidden;         // [rows, streams, inputs] bf16, contiguous
  const uint16_t* embedded;       // [rows, inputs] bf16
  const void* ids;                // [rows]
  uint16_t* hidden_out;           // [rows, streams, inputs] bf16, contiguous
  uint16_t* embedded_out;         // [rows, inputs] bf16, contiguous
  int64_t embedded_stride;        // elements between rows of `embedded` or `table`, a multiple of 8
  int64_t entries;
  int32_t id_bytes;               // 4: int32, 8: int64
  int32_t rows, streams, inputs;
  float hidden_eps, embedded_eps;
};

struct DraftSumParams {
  const void* hidden;             // [splits, rows, streams, outputs] fp32, contiguous; of one split [rows, streams, outputs] bf16
  const void* embedded;           // [splits, rows, outputs], of the same kind
  uint16_t* out;                  // [rows, streams, outputs] bf16, contiguous
  int32_t rows, streams, outputs;
};

void launch_draft_norms(const DraftNormParams& params, bool pdl, cudaStream_t stream);
// splits: 1, 2, 4 or 8
void launch_draft_sum(const DraftSumParams& params, int splits, bool pdl, cudaStream_t stream);
std::vector<KernelAttributes> draft_attributes();

}  // namespace dsv4::fp8_linear

// A head that drafts guess with: parameters and launch. Device code in draft_head.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "../launch_kernel.h"

namespace dsv4::bf16_linear {

// ops/bf16_linear_draft_head.py has these, too, and a test compares
constexpr int kTileOutputs = 16;    // outputs that lie together in the copy
constexpr int kScaleInputs = 64;    // inputs of an output that have a scale
constexpr int kUnitInputs = 256;    // inputs that lie together in the copy
constexpr int kUnitBytes = kTileOutputs * kUnitInputs / 2 + kTileOutputs * kUnitInputs / kScaleInputs * 2;
constexpr int kPartOutputs = 2048;  // of which the best are computed anew
constexpr int kBest = 4;
constexpr int kHeadRows = 8;        // of a tile

struct DraftHeadParams {
  const uint16_t* x;       // [rows, inputs] bf16, 16 bytes aligned
  int64_t x_stride;        // elements, multiple of 8
  const uint8_t* copy;     // [outputs / 16, inputs / 256, kUnitBytes]: the head in INT4
  const uint16_t* weight;  // [outputs, inputs] bf16, contiguous: the head
  float* scores;           // [2, rows, outputs]: scratch, by halves of the inputs
  void* out;               // [rows, outputs] fp32 or bf16, contiguous, 16 bytes aligned
  int32_t rows, inputs, outputs;
  bool bf16_out;
};

void launch_draft_head(const DraftHeadParams& params, int num_sms, bool pdl, cudaStream_t stream);
std::vector<KernelAttributes> draft_head_attributes();

}  // namespace dsv4::bf16_linear

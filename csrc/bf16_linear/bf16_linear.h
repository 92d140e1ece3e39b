// bf16 linear layers: parameters and launch. Device code in kernel.cuh and tile.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../launch_kernel.h"

namespace dsv4::bf16_linear {

constexpr int kMaxRows = 1 << 20;
constexpr int kBlockRows = 32;  // of a block, where a block has all inputs
constexpr int kInputsMultiple = 512;  // 16 warps of 32 inputs
constexpr int kOutputsMultiple = 4;
// Matrices whose blocks have half as many warps: of so many outputs and more, and of so few while the rows are this few.
constexpr int kFewWarpsOutputs = 512;
constexpr int kFewOutputs = 64;
constexpr int kFewOutputsRows = 8;

struct Params {
  const uint16_t* x;       // [rows, inputs] bf16
  int64_t x_stride;        // elements, multiple of 8
  const uint16_t* weight;  // [outputs, inputs] bf16
  int64_t weight_stride;   // elements, multiple of 8
  void* out;               // [rows, outputs] fp32 or bf16
  int64_t out_stride;      // elements
  int32_t rows, inputs, outputs;
  bool bf16_out;
};

// warps: of a block, 8 or 16; 0: by the outputs (tests and bench choose). It changes no bit, and nothing from kBlockRows + 1 rows on.
void launch(const Params& params, int num_sms, int warps, bool pdl, cudaStream_t stream);

std::vector<KernelAttributes> kernel_attributes();
int shared_bytes();  // of the kernel that takes the most

}  // namespace dsv4::bf16_linear

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

void launch(const Params& params, int num_sms, bool pdl, cudaStream_t stream);

std::vector<KernelAttributes> kernel_attributes();
int shared_bytes();  // of the kernel that takes the most

}  // namespace dsv4::bf16_linear

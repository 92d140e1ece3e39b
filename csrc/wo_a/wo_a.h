// wo_a for many rows: its E4M3 weights as bf16, for a product that reads those. Few rows: fp8_linear, with x rotated back.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "../launch_kernel.h"

namespace dsv4::wo_a {

constexpr int kBlock = 128;  // weight rows and inputs of one scale

struct Params {
  const uint8_t* weight;         // [weight_rows, inputs] E4M3
  int64_t weight_stride;         // bytes between rows, multiple of 16
  const void* scale;             // [weight_rows / 128, inputs / 128]
  int64_t scale_stride_output, scale_stride_input;  // bytes
  int32_t scale_bytes;           // 4: fp32, 1: UE8M0
  uint16_t* out;                 // [weight_rows, inputs] bf16, contiguous: weight * scale in fp32, rounded once
  int32_t weight_rows, inputs;   // multiples of 128
};

void launch(const Params& params, bool pdl, cudaStream_t stream);

std::vector<KernelAttributes> kernel_attributes();

}  // namespace dsv4::wo_a

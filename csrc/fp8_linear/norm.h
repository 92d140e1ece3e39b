// RMSNorm of the queries' latent, in front of their second projections: parameters and launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "../launch_kernel.h"

namespace dsv4::fp8_linear {

constexpr int kNormInputs = 1024;

struct NormParams {
  const uint16_t* x;       // [rows, kNormInputs] bf16
  const uint16_t* weight;  // [kNormInputs] bf16
  uint16_t* out;           // [rows, kNormInputs] bf16, contiguous
  int64_t x_stride;        // elements, multiple of 8
  float eps;
};

void launch_norm(const NormParams& params, int rows, bool pdl, cudaStream_t stream);
std::vector<KernelAttributes> norm_attributes();

}  // namespace dsv4::fp8_linear

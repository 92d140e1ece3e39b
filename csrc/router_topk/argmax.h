// Where the greatest number of each of a few long rows is: parameters and launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "../launch_kernel.h"

namespace dsv4::router_topk {

constexpr int kPartNumbers = 4096;  // of a block; ops/router_topk.py has it too, and a test compares

struct ArgmaxParams {
  const float* x;    // [rows, columns] fp32, 16 bytes aligned
  uint2* parts;      // [rows, ceil(columns / kPartNumbers)]: of each part the greatest's key, and where it is
  int64_t* out;      // [rows]
  int64_t x_stride;  // elements, a multiple of 4
  int32_t columns;   // a multiple of 4
};

void launch_argmax(const ArgmaxParams& params, int rows, bool pdl, cudaStream_t stream);
std::vector<KernelAttributes> argmax_attributes();

}  // namespace dsv4::router_topk

// The shared expert's output and the routed experts': parameters and launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dsv4::mxfp4_moe {

struct SharedParams {
  uint16_t* shared;        // [rows, hidden] bf16, read and written
  int64_t shared_stride;   // elements, multiple of 8
  const uint16_t* routed;  // [rows, hidden] bf16
  int64_t routed_stride;
  int32_t rows, hidden;    // hidden a multiple of 8
  float scaling;
};

void launch_shared(const SharedParams& params, bool pdl, cudaStream_t stream);

}  // namespace dsv4::mxfp4_moe

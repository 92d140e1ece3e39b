// E4M3 weights with a scale per 128 x 128 block to bf16. A block of threads has 4 weight rows; a lane turns 8 bytes into 16.
#pragma once

#include "../device/barriers.cuh"
#include "../device/f16.cuh"
#include "../device/numbers.cuh"
#include "wo_a.h"

namespace dsv4::wo_a {

constexpr int kThreads = 256;
constexpr int kRows = 4;   // of a block of threads: they share their scales
constexpr int kInputs = 8;  // of a lane and row
static_assert(kBlock % kRows == 0 && kBlock % kInputs == 0);

__device__ __forceinline__ uint32_t load_stored(const uint8_t* p, int bytes) {
  return bytes == 4 ? load_now(reinterpret_cast<const uint32_t*>(p)) : load_now(p);
}

// four weights to two bf16 pairs
__device__ __forceinline__ uint2 expanded(uint32_t bytes, float scale) {
  uint32_t halves[2];
  e4m3x4_to_f16(bytes, halves[0], halves[1]);
  uint32_t pairs[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 two = floats_of_f16x2(halves[i]);
    pairs[i] = pack_bf16x2(two.x * scale, two.y * scale);
  }
  return make_uint2(pairs[0], pairs[1]);
}

__global__ void __launch_bounds__(kThreads) expand_kernel(const __grid_constant__ Params p) {
  pdl_trigger();
  const int row = blockIdx.x * kRows;
  const uint8_t* const weight = p.weight + row * p.weight_stride;
  const uint8_t* const scales = static_cast<const uint8_t*>(p.scale) + row / kBlock * p.scale_stride_output;
  uint16_t* const out = p.out + static_cast<int64_t>(row) * p.inputs;
  for (int input = threadIdx.x * kInputs; input < p.inputs; input += kThreads * kInputs) {
    uint2 bytes[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) bytes[r] = load_stream_8(weight + r * p.weight_stride + input);
    const uint8_t* const at = scales + input / kBlock * p.scale_stride_input;
    const float scale = block_scale(load_stored(at, p.scale_bytes), p.scale_bytes);
    pdl_wait();  // what is written here may still be read by a kernel in front
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint2 low = expanded(bytes[r].x, scale), high = expanded(bytes[r].y, scale);
      *reinterpret_cast<uint4*>(out + static_cast<int64_t>(r) * p.inputs + input) = make_uint4(low.x, low.y, high.x, high.y);
    }
  }
  pdl_wait();  // where there are more threads than inputs
}

}  // namespace dsv4::wo_a

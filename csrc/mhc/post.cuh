// Post without a pre: the last boundary.
#pragma once

#include "mix.cuh"

namespace dsv4::mhc {

__global__ void __launch_bounds__(kMixThreads) post_kernel(const Params p) {
  pdl_wait();
  pdl_trigger();
  const int64_t row = blockIdx.y + static_cast<int64_t>(blockIdx.z) * gridDim.y;
  const int column = (blockIdx.x * kMixThreads + threadIdx.x) * kLaneColumns;
  if (row >= p.rows || column >= p.hidden) return;
  uint4 old[kStreams];
  const uint16_t* const x = p.x + row * p.x_stride + column;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) old[j] = load_16(x + static_cast<int64_t>(j) * p.hidden);
  const uint4 f = load_16(p.f + row * p.f_stride + column);
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    float comb[kStreams];
#pragma unroll
    for (int j = 0; j < kStreams; ++j) comb[j] = p.comb[row * (kStreams * kStreams) + j * kStreams + i];
    *reinterpret_cast<uint4*>(p.streams + (row * kStreams + i) * p.hidden + column) = mix_streams(p.post[row * kStreams + i], f, comb, old);
  }
}

}  // namespace dsv4::mhc

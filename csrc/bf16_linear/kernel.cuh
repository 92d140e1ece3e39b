// out = x W^T for few rows of x: one pass over the weights, from memory through registers into mma.sync.
//
// A block owns kOutputs rows of W and all inputs, in 16 shares: a warp asks for everything of a share at once (at most 64
// registers a lane), of its first before it waits for the kernel in front; the shares' sums meet in shared memory and are
// added in their order. No scratch, no second launch, nothing that depends on the number of rows.
//
// 16 warps have a share each and with it nearly all registers of a multiprocessor. 8 have two in turn, and leave half to
// the kernels of other streams, which else wait for this one's end.
//
// More rows than a block has columns, of few outputs: blocks of rows beside each other. Of many outputs: tile.cuh.
//
// The weights are the 16 rows of the mma, the rows of x its columns. Which input an mma calls its k-th is a free choice,
// made for both operands alike: lane t of a group of four holds inputs 8 t to 8 t + 7 of 32, so that a load of 16 bytes is
// operands for two steps as it lies.
#pragma once

#include <cuda_bf16.h>

#include "../device/barriers.cuh"
#include "../device/mma.cuh"
#include "bf16_linear.h"

namespace dsv4::bf16_linear {

constexpr int kShares = 16;

template <int kOutputs_, int kTiles_, int kWarps_ = kShares, bool kMany_ = false>
struct Config {
  static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps;
  static constexpr int kOutputs = kOutputs_;                // rows of W a block: 4, 8 or 16
  static constexpr int kTiles = kTiles_;                    // eights of rows of x
  static constexpr bool kMany = kMany_;                     // blocks of rows
  static constexpr int kHalves = kOutputs > 8 ? 2 : 1;      // a lane holds rows g and g + 8
  static constexpr int kColumns = 8 * kTiles;
  static constexpr int kAhead = kOutputs * kTiles < 64 ? 8 : 4;  // loads of 32 inputs in flight for each of a lane's rows
  static constexpr int kTogether = 8 / kTiles;  // and of as many inputs of x: one after the other each would be a trip to the L2
  static_assert(kAhead % kTogether == 0);
  struct Shared {
    float sums[kShares][kOutputs][kColumns + 1];
  };
};

__device__ __forceinline__ void store(const Params& p, int64_t where, float sum) {
  if (p.bf16_out) {
    static_cast<__nv_bfloat16*>(p.out)[where] = __float2bfloat16_rn(sum);
  } else {
    static_cast<float*>(p.out)[where] = sum;
  }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, kShares / C::kWarps) bf16_linear_kernel(const Params p) {
  extern __shared__ float dynamic_shared[];
  auto& shared = *reinterpret_cast<typename C::Shared*>(dynamic_shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  const int first_output = (C::kMany ? blockIdx.y : blockIdx.x) * C::kOutputs, first_row = C::kMany ? blockIdx.x * C::kColumns : 0;
  const int rows = C::kMany ? min(p.rows - first_row, C::kColumns) : p.rows;
  const int steps = p.inputs / kInputsMultiple;  // of 32 inputs, of a share
  const bool has_row = group < C::kOutputs;
  const uint4 zero = make_uint4(0, 0, 0, 0);

  pdl_trigger();
#pragma unroll 1
  for (int turn = 0; turn < kShares / C::kWarps; ++turn) {
    const int share = turn * C::kWarps + warp;
    const int64_t begin = static_cast<int64_t>(share) * steps * 32 + quarter * 8;
    const uint16_t* weight = p.weight + static_cast<int64_t>(first_output + (has_row ? group : 0)) * p.weight_stride + begin;
    const uint16_t* x = p.x + first_row * p.x_stride + begin;
    uint4 held[C::kHalves][C::kAhead];
    float sums[C::kTiles][4] = {};
    int step = 0;
    do {
#pragma unroll
      for (int i = 0; i < C::kAhead; ++i) {
#pragma unroll
        for (int half = 0; half < C::kHalves; ++half) {
          const bool wanted = has_row && step + i < steps;
          held[half][i] = wanted ? load_stream(weight + half * 8 * p.weight_stride + (step + i) * 32) : zero;
        }
      }
      pdl_wait();  // but for the first time it has nothing to wait for
#pragma unroll
      for (int first = 0; first < C::kAhead; first += C::kTogether) {
        uint4 in[C::kTogether][C::kTiles];
#pragma unroll
        for (int i = 0; i < C::kTogether; ++i) {
#pragma unroll
          for (int tile = 0; tile < C::kTiles; ++tile) {
            const int row = tile * 8 + group;
            const bool wanted = row < rows && step + first + i < steps;
            in[i][tile] = wanted ? load_16_now(x + row * p.x_stride + (step + first + i) * 32) : zero;
          }
        }
#pragma unroll
        for (int i = 0; i < C::kTogether; ++i) {
          if (step + first + i >= steps) break;
          const uint4 low = held[0][first + i], high = C::kHalves == 2 ? held[C::kHalves - 1][first + i] : zero;
          const uint32_t even[4] = {low.x, high.x, low.y, high.y}, odd[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
          for (int tile = 0; tile < C::kTiles; ++tile) {
            mma_bf16(sums[tile], even, in[i][tile].x, in[i][tile].y);
            mma_bf16(sums[tile], odd, in[i][tile].z, in[i][tile].w);
          }
        }
      }
      step += C::kAhead;
    } while (step < steps);
#pragma unroll
    for (int tile = 0; tile < C::kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int output = group + (i / 2) * 8, column = tile * 8 + quarter * 2 + i % 2;
        if (output < C::kOutputs) shared.sums[share][output][column] = sums[tile][i];
      }
    }
  }
  __syncthreads();
  for (int item = threadIdx.x; item < C::kOutputs * rows; item += C::kThreads) {
    const int output = item % C::kOutputs, row = item / C::kOutputs;
    float sum = 0.f;
#pragma unroll
    for (int s = 0; s < kShares; ++s) sum += shared.sums[s][output][row];
    store(p, (first_row + row) * p.out_stride + first_output + output, sum);
  }
}

}  // namespace dsv4::bf16_linear

// What the warps of a sparse decode block share: barriers, the ring of stages.
#pragma once

#include "../device/copies.cuh"
#include "../device/mma.cuh"
#include "config.h"

namespace dsv4::sparse_decode {

// all warps, once: each has asked for what it begins with, and the barriers are there
__device__ __forceinline__ void block_sync() { sync_threads<0, kThreads>(); }
// all but the gathering warps
__device__ __forceinline__ void math_sync() { sync_threads<1, kMathThreads>(); }
// softmax and value team, at the end of a unit of a long row
__device__ __forceinline__ void unit_sync() { sync_threads<2, 32 * (kSoftmaxWarps + kValueWarps)>(); }

// This thread's number, read anew at every use: where what follows from it is not worth registers in the loops.
__device__ __forceinline__ int thread_now() {
  int v;
  asm volatile("mov.u32 %0, %tid.x;" : "=r"(v));
  return v;
}

// Position of leaf `i` of a block in the ring of stages, and in that of the buffers between the teams.
struct Ring {
  int i = 0, stage = 0;
  uint32_t stage_phase = 0;

  __device__ __forceinline__ int buffer() const { return i & 1; }
  __device__ __forceinline__ uint32_t buffer_phase() const { return i >> 1 & 1; }
  __device__ __forceinline__ void advance() {
    ++i;
    stage_phase ^= stage == kStages - 1;
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
};
static_assert(kBuffers == 2, "buffer index");

}  // namespace dsv4::sparse_decode

// MXFP4 experts for few rows: parameters and launch. Device code in experts.cuh, sizes in config.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../launch_kernel.h"

namespace dsv4::mxfp4_moe {

// One of the two products of every expert. Rows are outputs; two codes a byte, the even input in the low nibble.
struct Weights {
  const uint8_t* codes;          // [experts][outputs][inputs / 2] E2M1
  const uint8_t* scales;         // [experts][outputs][inputs / 32] UE8M0
  int64_t expert_bytes;          // between experts, multiple of 16
  int64_t expert_scale_bytes;    // multiple of 16
};

struct Params {
  const uint16_t* x;             // [rows, hidden] bf16
  int64_t x_stride;              // elements, multiple of 8
  const int32_t* topk_ids;       // [rows, topk]; an id that names no local expert is skipped
  int64_t ids_stride;
  const float* topk_weights;     // [rows, topk]
  int64_t weights_stride;
  const int32_t* expert_map;     // [map_size] id -> local expert or -1; nullptr: id - first_expert
  int32_t map_size, first_expert;
  Weights w13, w2;
  uint16_t* h;                   // [pairs, inter] bf16 scratch
  float* y;                      // [pairs, hidden] scratch
  uint16_t* out;                 // [rows, hidden] bf16
  int64_t out_stride;            // elements, multiple of 4
  float limit;                   // +inf: no clamp
  float routed_scaling;
  int32_t rows, topk, experts, hidden, inter;
  bool exact;                    // x and h on a grid, so that sums of 32 products have no rounding: as sorted.cuh has them
  int32_t gate_row, up_row;      // where gate and up begin in w13: 0 and inter, or the other way round
};

constexpr int kMaxPairs = 3072;
constexpr int kMaxExperts = 512;

// Why the kernels cannot take these sizes; empty: they can.
std::string problem(int hidden, int inter, int experts, int pairs);

// How few rows cut their inputs, and all that have their bits: so many slices of steps of 128. For sizes without a problem.
struct Slices {
  int slices, steps;
};
Slices slices_of_hidden(int hidden);
Slices slices_of_inter(int inter);

// Gate/up with SwiGLU, down, the sum over a row's experts; for one row the last two are one kernel.
void launch(const Params& params, int num_sms, bool pdl, cudaStream_t stream);

// The last of them where y went through memory: out of y.
void launch_combine(const Params& params, const Launcher& launcher);

std::vector<KernelAttributes> kernel_attributes();
int shared_bytes();  // of the kernel that takes the most

}  // namespace dsv4::mxfp4_moe

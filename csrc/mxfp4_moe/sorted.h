// MXFP4 experts for many rows with the bits of few: parameters and launch. Device code in sorted.cuh.
#pragma once

#include "mxfp4_moe.h"

namespace dsv4::mxfp4_moe {

// Rows of bf16 to f16, and a power of two for each of their slices.
struct PrepareParams {
  const uint16_t* from;  // [rows, slices * steps * 128]
  uint16_t* to;          // the same, contiguous; may be `from`
  float* powers;         // [rows, slices]
  int64_t from_stride;   // elements, multiple of 8
  int64_t rows;
  int32_t slices, steps;
};

// One of the two products of all pairs, or some of its outputs.
struct SortedParams {
  const uint16_t* x;       // [rows or positions, inputs] f16, prepared; wide.cuh: bf16
  const float* powers;     // [the same, slices]
  Weights w;
  const int32_t* pairs;    // sorted position -> pair
  const int32_t* expert;   // [num_tiles], with begin and end: tiles of kTilePairs positions at most, wide.cuh's of kWidePairs, then -1
  const int32_t* begin;
  const int32_t* end;
  uint16_t* h;             // gate/up: [positions, outputs] bf16
  float* y;                // down: [pairs, outputs]
  uint16_t* y16;           // wide.cuh: the same in bf16
  float limit;
  int32_t num_tiles, topk, inputs, slices, steps;
  int32_t first, outputs;  // of the weights' rows
  int32_t gate_row, up_row;
  uint32_t x_row_chunks;   // wide.cuh: of 8 inputs, from row to row
  uint32_t* taken;         // wide.cuh: units that blocks have asked for beside their first ones
};

// The sum over a row's experts.
struct SumParams {
  const void* y;               // [rows, topk, columns] float, or bf16
  const int32_t* pair_expert;  // [rows, topk]; -1: no local expert
  const float* topk_weights;
  uint16_t* out;
  int64_t weights_stride, out_stride;  // elements, of out a multiple of 8
  float routed_scaling;
  int32_t rows, topk, columns;
};

// Bytes of scratch that a call takes. `exact` as in Params: sorted.cuh, with the bits of few rows; else wide.cuh.
int64_t sorted_scratch_bytes(int rows, int topk, int experts, int hidden, int inter, bool exact);

// `params` as for few rows, but for h and y, which are in the scratch; any number of pairs.
void launch_sorted(const Params& params, unsigned char* scratch, int num_sms, bool pdl, cudaStream_t stream);

void launch_sum(const SumParams& params, bool bf16, const Launcher& launcher);

std::vector<KernelAttributes> sorted_attributes();
int sorted_shared_bytes();

}  // namespace dsv4::mxfp4_moe

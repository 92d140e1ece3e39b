// MXFP4 experts for many rows with MXFP8 activations: parameters and launch. Device code in scaled.cuh.
#pragma once

#include "mxfp4_moe.h"

namespace dsv4::mxfp4_moe {

// Numbers in MXFP8: E4M3 with a UE8M0 byte for each 32. Of 32 inputs those of even places come first, then those of odd ones.
struct Mxfp8 {
  uint8_t* numbers;  // [rows, inputs]
  uint8_t* scales;   // [rows, inputs / 32]
};

struct QuantizeParams {
  const uint16_t* from;  // [rows, inputs] bf16
  int64_t from_stride;   // elements, multiple of 8
  Mxfp8 to;
  int32_t rows, inputs;
};

// One of the two products of all pairs, or some of its outputs.
struct ScaledParams {
  Mxfp8 x;                // of rows; down: of positions
  Weights w;
  const int32_t* pairs;   // sorted position -> pair
  const int32_t* expert;  // [num_tiles], with begin and end: tiles of kScaledPairs positions at most, then -1
  const int32_t* begin;
  const int32_t* end;
  Mxfp8 h;                // gate/up: [positions, outputs]
  uint16_t* y;            // down: [pairs, outputs] bf16
  uint32_t* taken;        // units that blocks have asked for beside their first ones
  float limit;
  int32_t num_tiles, topk, inputs;
  int32_t first, outputs;  // of the weights' rows
  int32_t gate_row, up_row;
};

// Bytes of scratch that a call takes.
int64_t scaled_scratch_bytes(int rows, int topk, int experts, int hidden, int inter);

// `params` as for few rows, but for h and y, which are in the scratch; any number of pairs.
void launch_scaled(const Params& params, unsigned char* scratch, int num_sms, bool pdl, cudaStream_t stream);

std::vector<KernelAttributes> scaled_attributes();
int scaled_shared_bytes();

}  // namespace dsv4::mxfp4_moe

// FP8 block-scaled linear for few rows: parameters and launch. Device code in kernel.cuh, sizes in config.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

namespace dsv4::fp8_linear {

struct Params {
  const uint8_t* weight;         // [groups * outputs][inputs] E4M3
  int64_t weight_stride;         // bytes between rows, multiple of 16
  const void* scale;             // [groups * outputs / 128][inputs / 128]
  int64_t scale_stride_output, scale_stride_input;  // elements
  int32_t scale_bytes;           // 4: fp32, 1: UE8M0
  const uint16_t* x;             // [rows, groups, inputs] bf16
  int64_t x_stride, x_stride_group;  // elements, multiples of 8
  uint16_t* out;                 // [rows, groups, outputs] bf16
  int64_t out_stride, out_stride_group;  // elements, even
  float* partial;                // [splits][rows][groups * outputs], where the plan splits
  int32_t rows, groups, outputs, inputs;
};

// What the launcher does with these sizes. The number of slices, and so every bit, depends on the inputs alone.
struct Plan {
  int32_t column_tiles;          // of 8 rows of x
  int32_t row_tiles;             // of 16 weight rows, one warp's
  int32_t warp_rows;             // warps beside each other along the weight rows; the others share the inputs
  int32_t slices, splits;        // of the inputs; slices of one block = slices / splits
  int32_t slots;                 // of 128 inputs that a slice keeps in shared memory: all, or as many as are on their way
  int32_t exchange;              // where in shared memory warps exchange sums: behind x, or over it where x comes anew anyway
  int32_t tiles, blocks;         // of one split
  int64_t partial_bytes;
};

constexpr int kMaxRows = 64;

// Why the kernel cannot take these sizes; empty: it can.
std::string problem(int rows, int groups, int outputs, int inputs);

// Zero in `row_tiles`, `warp_rows`, `blocks`: the launcher's choice (tuning). No choice changes a bit of the result.
Plan make_plan(int rows, int groups, int outputs, int inputs, int num_sms, int row_tiles, int warp_rows, int blocks);

// One kernel, or two where the plan splits. At most `prefetch` bytes of a block's weights go to the L2 ahead of the predecessor's end.
void launch(const Params& params, const Plan& plan, int64_t prefetch, bool pdl, cudaStream_t stream);

struct KernelAttributes {
  std::string name;
  int registers, shared_bytes, local_bytes, blocks_per_sm;
};
std::vector<KernelAttributes> kernel_attributes();
int shared_bytes();  // of the kernel that takes the most

}  // namespace dsv4::fp8_linear

// FP8 block-scaled linear: parameters and launch. Device code in kernel.cuh, sizes in config.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../launch_kernel.h"

namespace dsv4::fp8_linear {

struct Params {
  const uint8_t* weight;         // [groups * outputs][inputs] E4M3
  const void* scale;             // [groups * outputs / 128][inputs / 128]
  uint32_t weight_stride;        // bytes between rows, multiple of 16
  uint32_t scale_stride_output, scale_stride_input;  // bytes
  int32_t scale_bytes;           // 4: fp32, 1: UE8M0
  const uint16_t* x;             // [rows, groups, inputs] bf16
  uint32_t x_stride, x_stride_group;  // elements, multiples of 8
  uint16_t* out;                 // [rows, groups, outputs] bf16
  int64_t out_stride, out_stride_group;  // elements, multiples of 4
  float* partial;                // [splits][rows][groups * outputs], where the plan splits
  const float* rotation;         // [positions][32] cosine, sine: x is rotated back by its row's position first; null: it is not
  const void* positions;         // [rows]
  int32_t position_bytes;        // 4: int32, 8: int64
  int32_t rows, groups, outputs, inputs;
};

// So many in each of `parts`, and one more in the first `more` of them.
struct Shares {
  int32_t each, more;
};

// What the launcher does with these sizes. The slices, and so every bit, depend on the inputs alone.
struct Plan {
  int32_t column_tiles;          // of 8 rows of x; 0: the kernel for few rows
  int32_t row_tiles;             // of 16 weight rows, one warp's
  int32_t warp_rows;             // warps beside each other along the weight rows; the others share the inputs
  int32_t in_turn;               // slices that a warp multiplies one after the other
  int32_t slices, splits;        // of the inputs; slices of one block = slices / splits
  Shares slice_blocks;           // blocks of 128 inputs of a slice
  int32_t most_blocks;           // blocks of 128 inputs of the longest slice
  int32_t exchange;              // where in shared memory warps exchange sums
  int32_t blocks;                // of one split
  Shares block_tiles;            // tiles of a block
  int32_t group_tiles;           // tiles of a group
  int64_t partial_bytes;
  int64_t stash;                 // floats of `partial` before the sums of slices that wait for their neighbours'
  int32_t shared_bytes;
  int32_t units, unit_rows;      // many.cuh: of all blocks, else 0; a unit's rows at most
  int32_t row_blocks, band;      // blocks of as many rows; how many of them outputs take turns with
};

// The launcher's choices, by hand (tests, bench); zero: the launcher's. None changes a bit of the result.
struct Tuning {
  int32_t warp_rows;
  int32_t blocks;                // of the kernels for few rows and for many
  int32_t row_tiles, in_turn;    // of the tile kernels, and of those for many rows, where a row tile is 64; in_turn above 0: not for few rows
};

constexpr int kMaxRows = 1 << 15;  // of a launch

using LinearKernel = void (*)(Params, Plan);

// The kernels for few rows, one for each of kWarpRows (config.h): x as it is, or rotated back, each in a file of its own.
template <bool kRotates>
const LinearKernel* kernels();
// The tile kernels, one for each of kTileVariants.
template <bool kRotates>
const LinearKernel* tile_kernels();

// Bytes of shared memory of a multiprocessor of the current device.
int multiprocessor_shared();

Plan make_plan(int rows, int groups, int outputs, int inputs, int num_sms, int sm_shared, const Tuning& tuning);

// One kernel, and where the plan splits launch_merge's; merges: else the splits' sums stay in `partial`, and there is no out.
void launch(const Params& params, const Plan& plan, bool merges, bool pdl, cudaStream_t stream);
// The splits' sums to out: of 2, 4 or 8.
void launch_merge(const Params& params, int splits, bool pdl, cudaStream_t stream);

std::vector<KernelAttributes> kernel_attributes();
int shared_bytes();  // of the kernel that takes the most

}  // namespace dsv4::fp8_linear

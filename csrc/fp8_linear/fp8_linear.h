// FP8 block-scaled linear: parameters and launch. Device code in kernel.cuh, sizes in config.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../launch_kernel.h"

namespace dsv4::fp8_linear {

// What is done to x on its way in, once, before it is multiplied.
enum class Prologue : int32_t {
  kNone,
  kRotation,  // the rotary position embedding of each head's last inputs is taken back (wo_a)
  kSwiglu,    // x is [rows, 2 * inputs], gates and then ups: silu(min(gate, limit)) * clamp(up, -limit, limit)
  kNorm,      // RMSNorm over all inputs
};
constexpr int kPrologues = 4;

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
  const uint16_t* norm_weight;   // [inputs] bf16: x is normalised first; null: it is not
  float norm_inverse, norm_eps;  // 1 / inputs
  float swiglu_limit;            // above 0: x holds gates and ups
};

inline Prologue prologue_of(const Params& p) {
  return p.rotation != nullptr      ? Prologue::kRotation
         : p.norm_weight != nullptr ? Prologue::kNorm
         : p.swiglu_limit > 0       ? Prologue::kSwiglu
                                    : Prologue::kNone;
}

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
  int32_t exchange;              // where in shared memory warps exchange sums, and before that rows of x are of which something is made
  int32_t blocks;                // of one split
  Shares block_tiles;            // tiles of a block
  int32_t group_tiles;           // tiles of a group
  int64_t partial_bytes;
  int64_t stash;                 // floats of `partial` before the sums of slices that wait for their neighbours'
  int32_t norm;                  // where the norm's weights are
  int32_t shared_bytes;
  int32_t row_blocks;            // above kTileMostRows: of so many rows each, beside each other in the grid; else 0
};

// The launcher's choices, by hand (tests, bench); zero: the launcher's. None changes a bit of the result.
struct Tuning {
  int32_t warp_rows;
  int32_t blocks;                // of the kernel for few rows
  int32_t row_tiles, in_turn;    // of the tile kernels; in_turn above 0: those, for however few rows
};

constexpr int kMaxRows = 1 << 15;  // of a launch
constexpr int kMadeRows = 4;  // that the product's kernels gate or normalise themselves, as measured; for more, `make` goes before

using LinearKernel = void (*)(Params, Plan);

// The kernels of a prologue for few rows, one for each of kWarpRows (config.h); each prologue has a file of its own.
template <Prologue kPrologue>
const LinearKernel* kernels();
// The tile kernels, one for each of kTileVariants: x as it is, or rotated back.
template <bool kRotates>
const LinearKernel* tile_kernels();

// Bytes of shared memory of a multiprocessor of the current device.
int multiprocessor_shared();

// Why the kernel cannot take these sizes; empty: it can.
std::string problem(Prologue prologue, int rows, int groups, int outputs, int inputs);

Plan make_plan(Prologue prologue, int rows, int groups, int outputs, int inputs, int num_sms, int sm_shared, const Tuning& tuning);

// One kernel, or two where the plan splits.
void launch(const Params& params, const Plan& plan, bool pdl, cudaStream_t stream);

// out [rows, inputs] = x normalised, or of gates and ups: any number of rows, by a launch of its own. Of `params` it reads x,
// out, rows, inputs and the prologue.
void make(const Params& params, bool pdl, cudaStream_t stream);

std::vector<KernelAttributes> kernel_attributes();
int shared_bytes();  // of the kernel that takes the most

}  // namespace dsv4::fp8_linear

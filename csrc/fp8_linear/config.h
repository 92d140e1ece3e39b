// Sizes of the FP8 linear.
//
//   slice    a part of the inputs, always whole blocks of 128; the slices' sums are added as a binary tree, in one block or
//            over several: the same bits
//
// Up to 8 rows (kernel.cuh): a warp multiplies 16 weight rows by a slice of the inputs, for all rows of x.
//
//   step     16 weight rows x 128 inputs of a warp: 64 bytes a lane, held in registers
//
// Shared memory: barriers | x [slices here][rows][a slice's inputs] | the sums that warps exchange
//
// 9 to 64 rows (tile.cuh): a warp multiplies 16 * row_tiles weight rows, for 8 * column_tiles rows of x, 64 inputs at a time.
//
// Shared memory: barriers | weights [warps][stages][16 row_tiles][64 inputs] | x [groups of warps][stages][rows][64 inputs]
//
// More rows: many.cuh, which has its own sizes.
#pragma once

#include <cstdint>

#include "fp8_linear.h"

namespace dsv4::fp8_linear {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kBlock = 128;                  // inputs and outputs of one scale
constexpr int kRotated = 64, kHeadBlocks = 4;  // inputs of a head that carry its position: the last 64 of 4 blocks
constexpr int kTileRows = 16;                // m of m16n8k16
constexpr int kColumns = 8;                  // n of m16n8k16
constexpr int kMaxSlices = 8;

constexpr int kFewRows = kColumns;           // at most, of the kernel for few rows
constexpr int kAhead = 4;                    // its steps of a warp on their way from memory: what 128 registers leave room for
constexpr int kBarrierBytes = 128;
// bytes between two rows of x: the padding keeps them on different banks
__host__ __device__ constexpr int x_pitch(int blocks) { return blocks * 2 * kBlock + 16; }
__host__ __device__ constexpr int x_bytes(int rows, int slices_here, int blocks) { return rows * slices_here * x_pitch(blocks); }
// floats between two rows of x in a warp's sums: 4 more than weight rows, so that lanes write to different banks
constexpr int kSumPitch = kTileRows + 4;
constexpr int exchange_bytes(int warp_rows) { return warp_rows == kWarps ? 0 : kWarps * kColumns * kSumPitch * 4; }
// Warps beside each other along the weight rows, of which there is a kernel; the others of a block share the inputs.
constexpr int kWarpRows[] = {1, 4, 8};

// The tile kernel: a ring of stages of 64 inputs, of weights for each warp and of x for each group of warps.
constexpr int kStageInputs = 64, kMaxTileStages = 8, kTileBarrierBytes = 16 * 2 * kMaxTileStages;
constexpr int tile_stage_bytes(int column_tiles, int row_tiles, int warp_rows) {
  return kWarps * row_tiles * kTileRows * kStageInputs + kWarps / warp_rows * column_tiles * kColumns * kStageInputs * 2;
}
constexpr int tile_stages(int column_tiles, int row_tiles, int warp_rows) {
  const int fit = (kMaxSharedBytes - kTileBarrierBytes) / tile_stage_bytes(column_tiles, row_tiles, warp_rows);
  return fit < kMaxTileStages ? fit : kMaxTileStages;
}
constexpr int tile_shared_bytes(int column_tiles, int row_tiles, int warp_rows) {
  return kTileBarrierBytes + tile_stages(column_tiles, row_tiles, warp_rows) * tile_stage_bytes(column_tiles, row_tiles, warp_rows);
}
// Of two slices in turn the first's sums wait in global memory: the registers have no room for them.
constexpr bool stashes(int column_tiles, int row_tiles) { return column_tiles * row_tiles >= 16; }

struct TileVariant {
  int column_tiles, row_tiles, warp_rows;
};
constexpr TileVariant kTileVariants[] = {{2, 1, 4}, {2, 2, 4}, {4, 1, 4}, {4, 2, 4}, {4, 2, 8}, {8, 1, 4}, {8, 2, 4}, {8, 2, 8}};
constexpr int kTileMostRows = 8 * kColumns;

inline void set_partial_bytes(Plan& plan, int rows, int64_t weight_rows) {
  if (plan.splits > 1) plan.partial_bytes = static_cast<int64_t>(plan.splits) * rows * weight_rows * 4;
}

}  // namespace dsv4::fp8_linear

// Sizes of the FP8 linear. A warp multiplies 16 * row_tiles weight rows by a slice of the inputs, for all rows of x.
//
//   slice    a part of the inputs, always whole blocks of 128; the slices' sums are added as a binary tree, in one block or
//            over several: the same bits
//   step     16 weight rows x 128 inputs of a warp: 64 bytes a lane, held in registers
//   chunk    the blocks of 128 inputs of x that a slice's buffer in shared memory takes at a time: all, where they fit
//
// tile.cuh, for 9 rows and more, has its own shared memory: barriers | weights [warps][stages] | x [groups of warps][stages].
//
// Shared memory: barriers | x [stages][slices here][rows][chunk] | the sums that warps exchange, before that [rows][inputs, or gates
// and ups] of which something is made | the norm's weights
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
constexpr int kMaxStages = 2;
// steps of a warp on their way from memory: what 128 registers leave room for
constexpr int steps_of(int column_tiles) { return column_tiles == 1 ? 4 : 2; }
// blocks of 128 inputs on their way
constexpr int ahead_of(int column_tiles, int row_tiles) { return steps_of(column_tiles) / row_tiles; }
// x may be more than shared memory takes: chunks take turns
constexpr bool streams(int column_tiles) { return column_tiles >= 4; }
constexpr int kMaxShared = 101376;           // of a block on SM120

constexpr int kBarrierBytes = 8 * kMaxStages * kMaxSlices;
// Rows of x in shared memory: all that an mma reads, but for up to 8 rows, where lanes read the last one again.
__host__ __device__ constexpr int rows_in_shared(int column_tiles, int rows) { return column_tiles == 1 ? rows : column_tiles * kColumns; }
// bytes between two rows of x: the padding keeps them on different banks
__host__ __device__ constexpr int x_pitch(int chunk_blocks) { return chunk_blocks * 2 * kBlock + 16; }
__host__ __device__ constexpr int x_bytes(int rows, int slices_here, int chunk_blocks) { return rows * slices_here * x_pitch(chunk_blocks); }

// Sums pass through shared memory for so many rows of x at a time.
constexpr int exchange_rows(int column_tiles) { return column_tiles <= 2 ? kColumns : 2 * kColumns; }
// floats between two rows of x in a warp's sums: 4 more than weight rows, so that lanes write to different banks
constexpr int sum_pitch(int row_tiles) { return row_tiles * kTileRows + 4; }
constexpr int exchange_bytes(int column_tiles, int row_tiles, int warp_rows) {
  return warp_rows == kWarps ? 0 : kWarps * exchange_rows(column_tiles) * sum_pitch(row_tiles) * 4;
}

// The tile kernel (tile.cuh): a ring of stages of 64 inputs, weights of all warps and x of each group of warps.
constexpr int kStageInputs = 64, kMaxTileStages = 8, kTileBarrierBytes = 16 * 2 * kMaxTileStages;
constexpr int tile_stage_bytes(int column_tiles, int row_tiles, int warp_rows) {
  return kWarps * row_tiles * kTileRows * kStageInputs + kWarps / warp_rows * column_tiles * kColumns * kStageInputs * 2;
}
constexpr int tile_stages(int column_tiles, int row_tiles, int warp_rows) {
  const int fit = (kMaxShared - kTileBarrierBytes) / tile_stage_bytes(column_tiles, row_tiles, warp_rows);
  return fit < kMaxTileStages ? fit : kMaxTileStages;
}
constexpr int tile_shared_bytes(int column_tiles, int row_tiles, int warp_rows) {
  return kTileBarrierBytes + tile_stages(column_tiles, row_tiles, warp_rows) * tile_stage_bytes(column_tiles, row_tiles, warp_rows);
}

struct Variant {
  int column_tiles, row_tiles, warp_rows;
};
// Those that make something of x have one column tile: the first kMakingVariants.
constexpr int kMakingVariants = 3;
constexpr Variant kVariants[] = {{1, 1, 1}, {1, 1, 4}, {1, 1, 8}, {8, 1, 8}};
constexpr Variant kTileVariants[] = {{2, 1, 4}, {2, 2, 4}, {4, 1, 4}, {4, 2, 4}, {4, 2, 8}, {8, 1, 4}, {8, 2, 4}};

}  // namespace dsv4::fp8_linear

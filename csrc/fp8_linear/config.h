// Sizes of the FP8 linear. A warp multiplies 16 * row_tiles weight rows by a slice of the inputs, for all rows of x.
//
//   slice    a part of the inputs, always whole blocks of 128; the slices' sums are added as a binary tree, in one block or
//            over several: the same bits
//   step     16 weight rows x 128 inputs of a warp: 64 bytes a lane
//   chunk    the blocks of 128 inputs of x that a slice's buffer in shared memory takes at a time: all, where they fit
//
// A warp's first weights come to shared memory, by bulk copies ahead of the predecessor's end; those behind them come to
// registers, after it.
//
// Shared memory: barriers | x [stages][slices here][rows][chunk] | its factors [stages][slices here][blocks][rows] | each warp's
// own: its first weights, and over them the sums that it gives to others
#pragma once

#include <cstdint>

#include "fp8_linear.h"

namespace dsv4::fp8_linear {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kBlock = 128;                  // inputs and outputs of one scale
constexpr int kTileRows = 16;                // m of m16n8k16
constexpr int kColumns = 8;                  // n of m16n8k16
constexpr int kMaxSlices = 8;
constexpr int kMaxStages = 2;
constexpr int kSteps = 2;                    // of a warp in registers, on their way from memory: 128 registers leave room for them
// blocks of 128 inputs on their way
constexpr int ahead_of(int row_tiles) { return kSteps / row_tiles; }
// x may be more than shared memory takes: chunks take turns
constexpr bool streams(int column_tiles) { return column_tiles >= 4; }
constexpr int kMaxShared = 101376;           // of a block on SM120

constexpr int kMaxFirstBytes = 8192;         // of a warp's first weights
constexpr int kBarrierBytes = 8 * (kMaxStages * kMaxSlices + kWarps);
// Rows of x in shared memory: all that an mma reads, but for up to 8 rows, where lanes read the last one again.
__host__ __device__ constexpr int rows_in_shared(int column_tiles, int rows) { return column_tiles == 1 ? rows : column_tiles * kColumns; }
// bytes between two rows of x: the padding keeps them on different banks
__host__ __device__ constexpr int x_pitch(int chunk_blocks) { return chunk_blocks * 2 * kBlock + 16; }
__host__ __device__ constexpr int x_bytes(int rows, int slices_here, int chunk_blocks) { return rows * slices_here * x_pitch(chunk_blocks); }

// a factor for each row and block of 128 inputs, those of the rows that an mma reads beyond x as well
__host__ __device__ constexpr int factor_bytes(int column_tiles, int slices_here, int chunk_blocks) {
  return column_tiles * kColumns * slices_here * chunk_blocks * 4;
}

// Sums pass through shared memory for so many rows of x at a time.
constexpr int exchange_rows(int column_tiles) { return column_tiles <= 2 ? kColumns : 2 * kColumns; }
// floats between two rows of x in a warp's sums: 4 more than weight rows, so that lanes write to different banks
constexpr int sum_pitch(int row_tiles) { return row_tiles * kTileRows + 4; }
constexpr int exchange_bytes(int column_tiles, int row_tiles, int warp_rows) {
  return warp_rows == kWarps ? 0 : exchange_rows(column_tiles) * sum_pitch(row_tiles) * 4;
}
// bytes of a warp's first weights
__host__ __device__ constexpr int first_bytes(int row_tiles, int blocks) { return row_tiles * kTileRows * kBlock * blocks; }

}  // namespace dsv4::fp8_linear

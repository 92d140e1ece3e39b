// Sizes of the FP8 linear. A warp multiplies 16 * row_tiles weight rows by a slice of the inputs, for all rows of x.
//
//   slice    an eighth of the inputs (fewer slices below 1,024 inputs), always whole blocks of 128; the slices' sums are
//            added as a binary tree, in one block or over several: the same bits
//   step     16 weight rows x 128 inputs of a warp: 64 bytes a lane, held in registers
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
// steps of a warp on their way from memory: what 128 registers leave room for
constexpr int steps_of(int column_tiles) { return column_tiles == 1 ? 4 : 2; }
// blocks of 128 inputs on their way
constexpr int ahead_of(int column_tiles, int row_tiles) { return steps_of(column_tiles) / row_tiles; }
constexpr int kRowBytes = 2 * kBlock + 16;   // of x in shared memory: the padding keeps two rows on different banks
constexpr int kMaxShared = 101376;           // of a block on SM120

// Rows of x in shared memory: all that an mma reads, but for up to 8 rows, where lanes read the last one again.
__host__ __device__ constexpr int rows_in_shared(int column_tiles, int rows) { return column_tiles == 1 ? rows : column_tiles * kColumns; }

// Bytes of shared memory: x, its factors, and the sums that warps exchange.
__host__ __device__ constexpr int x_bytes(int rows, int slices_here, int slots) { return rows * slices_here * slots * kRowBytes; }
__host__ __device__ constexpr int factor_bytes(int rows, int slices_here, int slots) {
  return (rows * slices_here * slots * 4 + 15) / 16 * 16;
}
// floats between two rows of x in a warp's sums: 4 more than weight rows, so that lanes write to different banks
constexpr int sum_pitch(int row_tiles) { return row_tiles * kTileRows + 4; }
constexpr int sum_bytes(int rows, int row_tiles) { return kWarps * rows * sum_pitch(row_tiles) * 4; }

}  // namespace dsv4::fp8_linear

// How the mixes are split and summed: the same for every number of rows, so that a row's bits never depend on them.
//
//   slice   32 columns of all four streams: 128 of the 4 * hidden inputs. A row's partial sums of a slice are 24 mixes and
//           one sum of squares (the head: 4 and one): per stream by mma.sync, then (stream 0 + 1) + (2 + 3)
//   octet   8 slices, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)); octets are added in order
//
// fn is fp32; an mma takes it as three bf16 parts, which together are fn exactly. The streams are bf16, so a product is
// exact and only the sums round, in fp32.
#pragma once

#include <cstdint>

#include "mhc.h"

namespace dsv4::mhc {

constexpr int kStreams = 4;
constexpr int kMixes = 24;            // 4 pre, 4 post, 16 comb
constexpr int kCoefficients = kStreams * kStreams + kStreams;  // of a post: comb and post
constexpr int kSliceColumns = 32;     // 4 lanes x 8
constexpr int kOctet = 8;             // slices
constexpr int kTileRows = 16;         // m of m16n8k16
constexpr int kParts = 3;             // bf16 parts of an fp32 weight
constexpr int kSumWords = 28;         // of a row in shared memory: mixes, sum of squares, padding; in fours
constexpr int kLaneColumns = 8;       // 16 bytes
constexpr int kFlashHidden = 4096;
constexpr int kProHidden = 7168;
constexpr int kOctetColumns = kOctet * kSliceColumns, kOctets = kFlashHidden / kOctetColumns, kSlices = kFlashHidden / kSliceColumns;

constexpr int kMixThreads = 32 * kStreams;  // a warp per stream
constexpr int kMixTiles = 6;                // blocks of rows side by side, at most

// values per row and slice in the workspace: the mixes, the sum of squares, padding
template <bool kHead>
constexpr int kWidth = kHead ? 8 : 32;
template <bool kHead>
constexpr int kOutputs = kHead ? kStreams : kMixes;

// Few rows: one launch, whose last blocks, one for each row, wait for the others.
constexpr int kFusedRows = 128;                         // at most
constexpr int kFusedWarps = 8;
constexpr int kFusedThreads = 32 * kFusedWarps;
constexpr int kFusedSlices = kFusedWarps / kStreams;    // of a block

// Many rows, with a post: a block keeps 128 columns, takes tiles of rows in turn, and finishes rows.
constexpr int kManySlices = 4;        // a warp each, which mixes; one more sums
constexpr int kManyColumns = kManySlices * kSliceColumns;
constexpr int kFinishers = 3;         // warps
constexpr int kManyThreads = 32 * (kManySlices + 1 + kFinishers);
constexpr int kCounterWords = 8;      // a tile's counter has a sector of its own

}  // namespace dsv4::mhc

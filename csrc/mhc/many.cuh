// Many rows: one kernel, in which X is read once from memory.
//
// A block keeps 128 columns and their part of fn, and takes groups of 64 rows in turn: it makes the new streams, writes
// them and their partial mixes; then it finishes a row or two of the group that it took before, whose streams are still
// in the L2. For that it waits until the other blocks of that group are done: all blocks are resident (cooperative launch).
//
// The sums are those of mix.cuh and finish.cuh, value by value: a row has the same bits as among few.
//
// Shared memory: the bf16 parts of fn 72 KB, coefficients 5 KB, sums of warps or of the finished rows' octets 14 KB, sums
// of the first two slices 7 KB.
#pragma once

#include "finish.cuh"

namespace dsv4::mhc {

constexpr int kManyTiles = kManyRows / kTileRows;       // of rows; a pair of warps each
constexpr int kPasses = kManySlices / 2;
constexpr int kTeams = 2, kTeamWarps = kManyThreads / 32 / kTeams;  // rows that are finished at a time
constexpr int kMixTilesN = kMixes / 8;
constexpr int kHidden = kFlashHidden, kColumnBlocks = kHidden / kManyColumns;
static_assert(kManyThreads == 32 * kManyTiles * 2, "two warps for 16 rows");

struct ManyShared {
  uint2 weights[kManySlices][kStreams][2][kParts][kMixTilesN][32];  // [slice][stream][step][part][mixes][lane]
  float coefficients[kManyRows][kStreams * kStreams + kStreams];  // comb by new stream, post
  union {
    float other[kPasses][kManyTiles][14][32];                   // sums for the other half's warp, by lane
    float octets[kTeams][kFlashHidden / 256][32];                // of the rows that are finished
  };
  float kept[14][kManyThreads / 2];                            // sums of the first pass, by the thread of the half
  float squares[kTeams][kFlashHidden / 256];
};
static_assert(sizeof(ManyShared) <= 101376, "an SM120 block has 99 KiB");

// Sums of a warp: 16 rows' mixes (rows g and g + 8 of each lane) and their sums of squares.
struct Sums {
  float d[kMixTilesN][4];
  float squares[2];

  __device__ __forceinline__ void add(const Sums& other) {
#pragma unroll
    for (int n = 0; n < kMixTilesN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) d[n][i] += other.d[n][i];
    }
    squares[0] += other.squares[0];
    squares[1] += other.squares[1];
  }
};

__device__ __forceinline__ uint4 load_once(const uint16_t* p) { return __ldcs(reinterpret_cast<const uint4*>(p)); }

// The bf16 parts of fn: four slices of all four streams, through registers into shared memory.
__device__ __forceinline__ void load_weights(const Params& p, ManyShared& s, int first_slice) {
  constexpr int kQuads = kManySlices * kStreams * kMixTilesN * 64, kPerThread = kQuads / kManyThreads;  // float4s
  static_assert(kQuads % kManyThreads == 0);
#pragma unroll 4
  for (int i = 0; i < kPerThread; ++i) {
    // step fastest, then the lane of the quad: eight threads read 128 consecutive bytes
    const int within = threadIdx.x % 64, at = (i * kManyThreads + threadIdx.x) / 64;
    const int n = at % kMixTilesN, stream = at / kMixTilesN % kStreams, slice = at / (kMixTilesN * kStreams);
    const int64_t mix = n * 8 + within / 8;
    const int column = (first_slice + slice) * kSliceColumns + within % 8 / 2 * kLaneColumns + within % 2 * 4;
    const float4 value = __ldg(reinterpret_cast<const float4*>(p.fn + (mix * kStreams + stream) * kHidden + column));
    uint32_t first[kParts], second[kParts];
    split_pair(value.x, value.y, first);
    split_pair(value.z, value.w, second);
#pragma unroll
    for (int part = 0; part < kParts; ++part) s.weights[slice][stream][within % 2][part][n][within / 2] = make_uint2(first[part], second[part]);
  }
}

// Sums of one stream of a slice.
__device__ __forceinline__ Sums sums_of(const ManyShared& s, int slice, int stream, const uint4& low, const uint4& high) {
  const int lane = threadIdx.x % 32;
  Sums sums;
  sums.squares[0] = sum_of_squares(low);
  sums.squares[1] = sum_of_squares(high);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sums.squares[r] += __shfl_xor_sync(0xffffffffu, sums.squares[r], 1);
    sums.squares[r] += __shfl_xor_sync(0xffffffffu, sums.squares[r], 2);
  }
  multiply(sums.d, low, high, [&](int n, int step, int part) { return s.weights[slice][stream][step][part][n][lane]; });
  return sums;
}

// One slice of 16 rows: the new streams, written, and their sums.
__device__ __forceinline__ Sums run_slice(const Params& p, const ManyShared& s, int first_row, int tile, int slice, int column) {
  const int lane = threadIdx.x % 32, group = lane / 4;
  uint4 x[2][kStreams], f[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + group + 8 * r;
    const bool real = row < p.rows;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) x[r][j] = real ? load_once(p.x + static_cast<int64_t>(row) * p.x_stride + j * kHidden + column) : make_uint4(0, 0, 0, 0);
    f[r] = real ? load_once(p.f + static_cast<int64_t>(row) * p.f_stride + column) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + group + 8 * r;
    __syncwarp();  // keeps the other row's coefficients from being loaded this early: registers
    mix_in_place(x[r], f[r], s.coefficients[tile * kTileRows + group + 8 * r]);
    if (row < p.rows) {
#pragma unroll
      for (int i = 0; i < kStreams; ++i) *reinterpret_cast<uint4*>(p.streams + (static_cast<int64_t>(row) * kStreams + i) * kHidden + column) = x[r][i];
    }
  }
  Sums sums = sums_of(s, slice, 0, x[0][0], x[1][0]);
  __syncwarp();
  sums.add(sums_of(s, slice, 1, x[0][1], x[1][1]));
  __syncwarp();
  Sums rest = sums_of(s, slice, 2, x[0][2], x[1][2]);
  __syncwarp();
  rest.add(sums_of(s, slice, 3, x[0][3], x[1][3]));
  sums.add(rest);
  return sums;
}

__device__ __forceinline__ void load_coefficients(const Params& p, ManyShared& s, int64_t first_row) {
  for (int at = threadIdx.x; at < kManyRows * 20; at += kManyThreads) {
    const int r = at / 20, c = at % 20;
    const int64_t row = first_row + r;
    float v = 0.f;
    if (row < p.rows) v = c < 16 ? p.comb[row * 16 + c % 4 * 4 + c / 4] : p.post[row * 4 + c - 16];
    s.coefficients[r][c] = v;
  }
}

// Slice 0 + 1 of the pass: of a warp's 14 sums its half keeps mixes 0-15, or 16-23 and the squares, and gives the others
// away. The first pass's are kept in shared memory meanwhile: registers are short.
__device__ __forceinline__ void add_halves(const Params& p, ManyShared& s, int first_row, int tile, int half, int pass, const Sums& sums) {
  const int lane = threadIdx.x % 32;
  float(&other)[14][32] = s.other[pass][tile];
  const auto value = [&](int i) { return i < 12 ? sums.d[i / 4][i % 4] : sums.squares[i - 12]; };
#pragma unroll
  for (int i = 0; i < 14; ++i) {
    if ((i < 8) == (half == 1)) other[i][lane] = value(i);
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + lane / 4 + 8 * r;
    float* const out = p.partials + (static_cast<int64_t>(row) * kColumnBlocks + blockIdx.x % kColumnBlocks) * kWidth<false>;
    const auto add = [&](int mix, int i) {
      const float sum = value(i) + other[i][lane];
      float& kept = s.kept[i][threadIdx.x % (kManyThreads / 2)];
      if (pass == 0) {
        kept = sum;
      } else if (row < p.rows) {
        out[mix] = kept + sum;
      }
    };
#pragma unroll
    for (int n = 0; n < kMixTilesN; ++n) {
      if ((n < 2) != (half == 0)) continue;
      add(n * 8 + lane % 4 * 2, n * 4 + 2 * r);
      add(n * 8 + lane % 4 * 2 + 1, n * 4 + 2 * r + 1);
    }
    if (half == 1 && lane % 4 == 0) add(kMixes, 12 + r);
  }
}

// Partial mixes of 64 rows and 128 columns, and the new streams.
__device__ __forceinline__ void mix_block(const Params& p, ManyShared& s, int group) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tile = warp % kManyTiles, half = warp / kManyTiles;
  const int first_row = group * kManyRows + tile * kTileRows;
  load_coefficients(p, s, group * kManyRows);
  __syncthreads();
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int slice = 2 * pass + half;
    const Sums sums = run_slice(p, s, first_row, tile, slice, (blockIdx.x % kColumnBlocks * kManySlices + slice) * kSliceColumns + lane % 4 * kLaneColumns);
    add_halves(p, s, first_row, tile, half, pass, sums);
  }
}

// One row by four warps: what finish_kernel does. `team`: which of the block's, barrier 1 + team.
__device__ __forceinline__ void finish_row(const Params& p, ManyShared& s, int64_t row, int team) {
  constexpr int kOctets = kHidden / 256, kTurns = kOctets / kTeamWarps;
  static_assert(kOctets % kTeamWarps == 0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kTeamWarps;
  const auto sync_team = [&] { asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(32 * kTeamWarps) : "memory"); };
  const float* const partial = p.partials + row * (kHidden / kManyColumns) * kWidth<false>;
  const uint16_t* const streams = p.streams + row * kStreams * kHidden;
  Gates<false> gates;
  gates.load(p, lane);
  uint4 x[kTurns][kStreams];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int octet = turn * kTeamWarps + warp;
    const float* const both = partial + 2 * octet * kWidth<false> + lane;
    s.octets[team][octet][lane] = lane <= kMixes ? __ldcg(both) + __ldcg(both + kWidth<false>) : 0.f;
#pragma unroll
    for (int j = 0; j < kStreams; ++j)
      x[turn][j] = __ldcg(reinterpret_cast<const uint4*>(streams + j * kHidden + octet * 256 + lane * kLaneColumns));
  }
  sync_team();
  const float z = fmaf(normed_mix<false>(s.octets[team], kOctets, p, lane), gates.scale, gates.base);
  const float gate = sigmoid(z) + p.hc_eps;
  float pre[kStreams];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) pre[j] = __shfl_sync(0xffffffffu, gate, j);
  uint4 y[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int octet = turn * kTeamWarps + warp;
    const float squares = warp_sum(collapse(pre, x[turn], y[turn]));
    if (lane == 0) s.squares[team][octet] = squares;
  }
  float inverse = 1.f;
  if (p.norm_weight != nullptr) {
    sync_team();
    float sum = 0.f;
    for (int w = 0; w < kOctets; ++w) sum += s.squares[team][w];
    inverse = rsqrtf(fmaf(sum, p.inverse_hidden, p.norm_eps));
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int octet = turn * kTeamWarps + warp;
    const int column = octet * 256 + lane * kLaneColumns;
    if (p.norm_weight != nullptr) y[turn] = times_weight(y[turn], inverse, load_16(p.norm_weight + column));
    __stcs(reinterpret_cast<uint4*>(p.y + row * kHidden + column), y[turn]);
  }
  if (warp == 0) write_coefficients(p, row, z, lane);
}

__device__ __forceinline__ void wait_for(const uint32_t* counter, uint32_t value) {
  while (load_acquire(counter) != value) __nanosleep(64);
}

// blocks on a multiprocessor: shared memory holds one on SM120, two on SM90
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kManyMinBlocks = 1;
#else
constexpr int kManyMinBlocks = 2;
#endif

__global__ void __launch_bounds__(kManyThreads, kManyMinBlocks) many_kernel(const Params p) {
  extern __shared__ __align__(16) unsigned char memory[];
  ManyShared& s = *reinterpret_cast<ManyShared*>(memory);
  const int num_groups = (p.rows + kManyRows - 1) / kManyRows;
  load_weights(p, s, blockIdx.x % kColumnBlocks * kManySlices);
  for (int group = blockIdx.x / kColumnBlocks;; group += gridDim.x / kColumnBlocks) {
    const int before = group - static_cast<int>(gridDim.x / kColumnBlocks);
    if (group < num_groups) {
      mix_block(p, s, group);
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) add_acq_rel(p.counters + group, 1);
    }
    if (before >= 0 && before < num_groups) {
      if (threadIdx.x == 0) wait_for(p.counters + before, kColumnBlocks);
      __syncthreads();
      const int team = threadIdx.x / (32 * kTeamWarps);
      for (int r = blockIdx.x % kColumnBlocks + team * kColumnBlocks; r < kManyRows; r += kTeams * kColumnBlocks) {
        const int64_t row = static_cast<int64_t>(before) * kManyRows + r;
        if (row < p.rows) finish_row(p, s, row, team);
      }
    }
    if (group >= num_groups) return;
  }
}

}  // namespace dsv4::mhc

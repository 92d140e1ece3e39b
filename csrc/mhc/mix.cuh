// In two launches, the first: the new streams, and the partial sums of their mixes by slice.
//
//   X'_i = post_i f + sum_j comb[j][i] X_j          fp32, in this order, rounded to bf16
//   partial[row, slice, o] = sum_k fn[o, k] x'_k     k: the slice's 32 columns of all four streams
//   partial[row, slice, 24] = sum_k x'_k^2
//
// Grid: slices x blocks of rows, so the whole card reads fn whatever the number of rows. A block's four warps take one
// stream each, for 16 rows at a time. fn does not depend on the predecessor and is read before the wait.
//
// The k of an mma is a free choice, made for both operands alike: a lane's eight consecutive columns are its four k of
// two instructions, so a row's bf16 pairs are operand A as they were loaded.
#pragma once

#include "../device/copies.cuh"
#include "../device/mma.cuh"
#include "../device/numbers.cuh"
#include "config.h"

namespace dsv4::mhc {

__device__ __forceinline__ uint4 load_16(const void* p) { return *static_cast<const uint4*>(p); }

// Two weights as three pairs of bf16, whose sum they are: 8 bits of the significand each.
__device__ __forceinline__ void split_pair(float low, float high, uint32_t (&part)[kParts]) {
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    part[i] = pack_bf16x2(low, high);
    low -= bf16_low(part[i]);
    high -= bf16_high(part[i]);
  }
}

// A lane's weights of one stream and slice: operand B of two instructions, for tiles of eight mixes.
template <bool kHead>
struct Weights {
  static constexpr int kTiles = kHead ? 1 : kMixes / 8;
  float4 value[kTiles][2];
  uint32_t part[kTiles][2][kParts][2];

  // Before the wait. Plain loads: the compiler moves __ldg behind it.
  __device__ __forceinline__ void load(const float* fn, int64_t mix_stride, int lane) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int mix = n * 8 + lane / 4;
      const float4* const p = reinterpret_cast<const float4*>(fn + mix * mix_stride + lane % 4 * kLaneColumns);
      const bool real = mix < kOutputs<kHead>;
      value[n][0] = real ? p[0] : make_float4(0.f, 0.f, 0.f, 0.f);
      value[n][1] = real ? p[1] : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }

  // After it, while the streams are on their way.
  __device__ __forceinline__ void split() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t first[kParts], second[kParts];
        split_pair(value[n][step].x, value[n][step].y, first);
        split_pair(value[n][step].z, value[n][step].w, second);
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          part[n][step][i][0] = first[i];
          part[n][step][i][1] = second[i];
        }
      }
    }
  }
};

// A pair of columns of one new stream of one row: post_i f + sum_j comb[j] x[j], rounded.
__device__ __forceinline__ uint32_t mix_pair(float post, uint32_t f, const float (&comb)[kStreams], const uint32_t (&x)[kStreams]) {
  float low = post * bf16_low(f), high = post * bf16_high(f);
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    low = fmaf(comb[j], bf16_low(x[j]), low);
    high = fmaf(comb[j], bf16_high(x[j]), high);
  }
  return pack_bf16x2(low, high);
}

// The same for a lane's eight columns.
__device__ __forceinline__ uint4 mix_streams(float post, const uint4& f, const float (&comb)[kStreams], const uint4 (&x)[kStreams]) {
  const uint32_t x0[kStreams] = {x[0].x, x[1].x, x[2].x, x[3].x}, x1[kStreams] = {x[0].y, x[1].y, x[2].y, x[3].y};
  const uint32_t x2[kStreams] = {x[0].z, x[1].z, x[2].z, x[3].z}, x3[kStreams] = {x[0].w, x[1].w, x[2].w, x[3].w};
  return make_uint4(mix_pair(post, f.x, comb, x0), mix_pair(post, f.y, comb, x1), mix_pair(post, f.z, comb, x2), mix_pair(post, f.w, comb, x3));
}

// A lane's eight columns of one row: the four old streams become the new ones, in place. `c`: the row's comb, by
// new stream, and post; 16-byte aligned.
__device__ __forceinline__ void mix_in_place(uint4 (&x)[kStreams], const uint4& f, const float* c) {
  float comb[kStreams][kStreams], post[kStreams];
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    const float4 v = *reinterpret_cast<const float4*>(c + i * kStreams);
    comb[i][0] = v.x, comb[i][1] = v.y, comb[i][2] = v.z, comb[i][3] = v.w;
    post[i] = c[kStreams * kStreams + i];
  }
  const auto mix_words = [&](uint32_t f_word, uint32_t& w0, uint32_t& w1, uint32_t& w2, uint32_t& w3) {
    const uint32_t old[kStreams] = {w0, w1, w2, w3};
    w0 = mix_pair(post[0], f_word, comb[0], old);
    w1 = mix_pair(post[1], f_word, comb[1], old);
    w2 = mix_pair(post[2], f_word, comb[2], old);
    w3 = mix_pair(post[3], f_word, comb[3], old);
  };
  mix_words(f.x, x[0].x, x[1].x, x[2].x, x[3].x);
  mix_words(f.y, x[0].y, x[1].y, x[2].y, x[3].y);
  mix_words(f.z, x[0].z, x[1].z, x[2].z, x[3].z);
  mix_words(f.w, x[0].w, x[1].w, x[2].w, x[3].w);
}

__device__ __forceinline__ float sum_of_squares(const uint4& v) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float low = bf16_low(word_of(v, w)), high = bf16_high(word_of(v, w));
    sum = fmaf(low, low, sum);
    sum = fmaf(high, high, sum);
  }
  return sum;
}

// d[n] = this lane's part of the 16 rows' mixes; rows g and g + 8 are `low` and `high`. B through `weight(n, step, part)`.
template <int kTiles, typename Weight>
__device__ __forceinline__ void multiply(float (&d)[kTiles][4], const uint4& low, const uint4& high, Weight weight) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) d[n][0] = d[n][1] = d[n][2] = d[n][3] = 0.f;
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const uint32_t a[4] = {word_of(low, 2 * step), word_of(high, 2 * step), word_of(low, 2 * step + 1), word_of(high, 2 * step + 1)};
#pragma unroll
    for (int part = kParts - 1; part >= 0; --part) {  // the smallest first
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const uint2 b = weight(n, step, part);
        mma_bf16(d[n], a, b.x, b.y);
      }
    }
  }
}

// Of rows g and g + 8 of a tile, by the lanes of a slice: the squares of their eight columns each to those of the slice.
__device__ __forceinline__ void sum_squares(const uint4& low, const uint4& high, float (&squares)[2]) {
  squares[0] = sum_of_squares(low);
  squares[1] = sum_of_squares(high);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    squares[r] += __shfl_xor_sync(0xffffffffu, squares[r], 1);
    squares[r] += __shfl_xor_sync(0xffffffffu, squares[r], 2);
  }
}

// One stream's partial sums of a slice, by row of the tile: the mixes, and behind them the squares.
template <bool kHead>
__device__ __forceinline__ void write_sums(const Weights<kHead>& weights, const uint4& low, const uint4& high, float (&out)[kTileRows][kSumWords],
                                           int lane) {
  const int group = lane / 4, quarter = lane % 4;
  float squares[2], d[Weights<kHead>::kTiles][4];
  sum_squares(low, high, squares);
  multiply(d, low, high, [&](int n, int step, int part) { return make_uint2(weights.part[n][step][part][0], weights.part[n][step][part][1]); });
#pragma unroll
  for (int n = 0; n < Weights<kHead>::kTiles; ++n) {
    const int mix = n * 8 + quarter * 2;
    if (mix >= kOutputs<kHead>) continue;
    *reinterpret_cast<float2*>(&out[group][mix]) = make_float2(d[n][0], d[n][1]);
    *reinterpret_cast<float2*>(&out[group + 8][mix]) = make_float2(d[n][2], d[n][3]);
  }
  if (quarter < 2) out[group + quarter * 8][kOutputs<kHead>] = quarter ? squares[1] : squares[0];
}

// What a lane needs for new stream `stream` of one row at its columns. Past the last row: the last row's.
template <bool kPost>
struct StreamInputs {
  uint4 x[kPost ? kStreams : 1], f;
  float comb[kStreams], post;

  __device__ __forceinline__ void load(const Params& p, int64_t row, int stream, int column) {
    row = row < p.rows ? row : p.rows - 1;
    const uint16_t* const from = p.x + row * p.x_stride + column;
    if constexpr (!kPost) {
      x[0] = load_16(from + static_cast<int64_t>(stream) * p.hidden);
    } else {
#pragma unroll
      for (int j = 0; j < kStreams; ++j) {
        x[j] = load_16(from + static_cast<int64_t>(j) * p.hidden);
        comb[j] = p.comb[row * (kStreams * kStreams) + j * kStreams + stream];
      }
      f = load_16(p.f + row * p.f_stride + column);
      post = p.post[row * kStreams + stream];
    }
  }
  // Where streams and f come otherwise.
  __device__ __forceinline__ void load_coefficients(const Params& p, int64_t row, int stream) {
    row = row < p.rows ? row : p.rows - 1;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) comb[j] = p.comb[row * (kStreams * kStreams) + j * kStreams + stream];
    post = p.post[row * kStreams + stream];
  }

  // The new stream, written where there is a post and the row exists.
  __device__ __forceinline__ uint4 mix(const Params& p, int64_t row, int stream, int column) const {
    if constexpr (!kPost) {
      return x[0];
    } else {
      const uint4 v = mix_streams(post, f, comb, x);
      if (row < p.rows) *reinterpret_cast<uint4*>(p.streams + (row * kStreams + stream) * p.hidden + column) = v;
      return v;
    }
  }
};

template <bool kPost, bool kHead>
__global__ void __launch_bounds__(kMixThreads, 4) mix_kernel(const Params p) {
  __shared__ __align__(16) float partial[2][kStreams][kTileRows][kSumWords];
  const int lane = threadIdx.x % 32, stream = threadIdx.x / 32, group = lane / 4;
  const int slice = blockIdx.x, num_slices = gridDim.x, column = slice * kSliceColumns + lane % 4 * kLaneColumns;
  Weights<kHead> weights;
  weights.load(p.fn + static_cast<int64_t>(stream) * p.hidden + slice * kSliceColumns, static_cast<int64_t>(kStreams) * p.hidden, lane);
  pdl_wait();
  pdl_trigger();
  const int num_tiles = ceil_div(p.rows, kTileRows);
  for (int tile = blockIdx.y, turn = 0; tile < num_tiles; tile += gridDim.y, turn ^= 1) {
    const int64_t first_row = static_cast<int64_t>(tile) * kTileRows;
    StreamInputs<kPost> inputs[2];
    inputs[0].load(p, first_row + group, stream, column);
    inputs[1].load(p, first_row + group + 8, stream, column);
    if (tile == blockIdx.y) weights.split();
    __syncwarp();  // the weights first: the streams come later
    const uint4 low = inputs[0].mix(p, first_row + group, stream, column), high = inputs[1].mix(p, first_row + group + 8, stream, column);
    write_sums<kHead>(weights, low, high, partial[turn][stream], lane);  // two turns: the next tile's need no barrier of their own
    __syncthreads();
    const int64_t row = first_row + threadIdx.x / 8;
    if (row >= p.rows) continue;
    float* const out = p.partials + (row * num_slices + slice) * kWidth<kHead>;
    for (int o = threadIdx.x % 8; o <= kOutputs<kHead>; o += 8) {
      const int r = threadIdx.x / 8;
      out[o] = (partial[turn][0][r][o] + partial[turn][1][r][o]) + (partial[turn][2][r][o] + partial[turn][3][r][o]);
    }
  }
}

}  // namespace dsv4::mhc

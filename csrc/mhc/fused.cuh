// Few rows: one launch, in which every row has a block of its own beside the blocks that make its mixes.
//
// The first blocks take two slices of 16 rows each and do what mix_kernel does; the last, one for each row, do what
// finish_kernel does. A row's block makes the row's new streams itself, for itself, so all that it waits for are the
// partial sums. These are their own flags: a word of the exchange is zero until its sum has come (a sum of zero comes as
// -0), and whoever has read it makes it zero again. So there is no fence, no counter, and nothing to clear between calls.
//
// Nobody waits for ever: blocks start in the order of their index, so what a waiting block waits for has begun; and
// however they are started, waiting ones (at most kFusedRows, two of which fit a multiprocessor) leave room for others.
//
// The sums are those of mix.cuh and finish.cuh, value by value.
#pragma once

#include "finish.cuh"

namespace dsv4::mhc {

constexpr int kFusedMixing = kFlashHidden / (kSliceColumns * kFusedSlices);  // blocks for 16 rows
constexpr int kVectorColumns = 28;                                           // mixes and the sum of squares, in fours

template <bool kHead>
constexpr int kVectors = kOutputs<kHead> / 4 + 1;  // the last has the sum of squares alone

__host__ __device__ constexpr int mixing_blocks(int rows) { return kFusedMixing * ((rows + kTileRows - 1) / kTileRows); }

union FusedShared {
  float sums[kFusedSlices][kStreams][kTileRows][kVectorColumns];
  struct {
    float octets[kFlashHidden / kOctetColumns][32];
    float squares[kFlashHidden / kOctetColumns];
  } row;
};

__device__ __forceinline__ float4 load_relaxed(const float* p) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_relaxed(float* p, const float4& v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

__device__ __forceinline__ float sent(float v) { return v == 0.f ? -0.f : v; }
__device__ __forceinline__ bool has_come(const float4& v) {
  return __float_as_uint(v.x) != 0 && __float_as_uint(v.y) != 0 && __float_as_uint(v.z) != 0 && __float_as_uint(v.w) != 0;
}

// The vector `vector` of one row and slice in the exchange.
template <bool kHead>
__device__ __forceinline__ float* exchanged(const Params& p, int64_t row, int slice, int vector) {
  return p.exchange + (row * (kFlashHidden / kSliceColumns) + slice) * kWidth<kHead> + vector * 4;
}

// Two slices of 16 rows: the new streams, and the partial sums for the rows' blocks. The ninth warp has nothing to do.
template <bool kPost, bool kHead>
__device__ __forceinline__ void mix_slices(const Params& p, FusedShared& s, int slices, int tile) {
  constexpr int kTiles = Weights<kHead>::kTiles, kSquares = kOutputs<kHead>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, stream = warp % kStreams, group = lane / 4, half = warp / kStreams;
  if (half == kFusedSlices) return;
  const int slice = slices * kFusedSlices + half, column = slice * kSliceColumns + lane % 4 * kLaneColumns;
  Weights<kHead> weights;
  weights.load(p.fn + stream * kFlashHidden + slice * kSliceColumns, kStreams * kFlashHidden, lane);
  pdl_wait();
  pdl_trigger();
  const int64_t first_row = static_cast<int64_t>(tile) * kTileRows;
  StreamInputs<kPost> inputs[2];
  inputs[0].load(p, first_row + group, stream, column);
  inputs[1].load(p, first_row + group + 8, stream, column);
  weights.split();
  __syncwarp();  // the weights first: the streams come later
  const uint4 low = inputs[0].mix(p, first_row + group, stream, column), high = inputs[1].mix(p, first_row + group + 8, stream, column);
  float squares[2] = {sum_of_squares(low), sum_of_squares(high)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    squares[i] += __shfl_xor_sync(0xffffffffu, squares[i], 1);
    squares[i] += __shfl_xor_sync(0xffffffffu, squares[i], 2);
  }
  float d[kTiles][4];
  multiply(d, low, high, [&](int n, int step, int part) { return make_uint2(weights.part[n][step][part][0], weights.part[n][step][part][1]); });
  auto& mine = s.sums[half][stream];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int mix = n * 8 + lane % 4 * 2;
    if (mix >= kOutputs<kHead>) continue;
    *reinterpret_cast<float2*>(&mine[group][mix]) = make_float2(d[n][0], d[n][1]);
    *reinterpret_cast<float2*>(&mine[group + 8][mix]) = make_float2(d[n][2], d[n][3]);
  }
  if (lane % 4 < 2) mine[group + lane % 4 * 8][kSquares] = lane % 4 ? squares[1] : squares[0];
  static_assert(kFusedSlices == 2, "a barrier for each");
  if (half == 0) {
    sync_threads<1, 32 * kStreams>();
  } else {
    sync_threads<2, 32 * kStreams>();
  }
  const int r = threadIdx.x / 8 % kTileRows, vector = threadIdx.x % 8;
  const int64_t row = first_row + r;
  if (row >= p.rows || vector >= kVectors<kHead>) return;
  float4 v[kStreams];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) v[j] = *reinterpret_cast<const float4*>(&s.sums[half][j][r][vector * 4]);
  const float4 sum = add(add(v[0], v[1]), add(v[2], v[3]));
  const bool all = vector * 4 < kSquares;
  store_relaxed(exchanged<kHead>(p, row, slice, vector),
                make_float4(sent(sum.x), all ? sent(sum.y) : -0.f, all ? sent(sum.z) : -0.f, all ? sent(sum.w) : -0.f));
}

// Sums of a row's octets, as soon as they have come; leaves zeros behind. Eight lanes have half an octet.
template <bool kHead>
__device__ __forceinline__ void collect(const Params& p, FusedShared& s, int64_t row) {
  static_assert(kFusedWarps * 4 * (kOctet / 2) * kSliceColumns == kFlashHidden);
  const int half = threadIdx.x / 8, vector = threadIdx.x % 8;
  float4 v[kOctet / 2] = {};
  if (vector < kVectors<kHead>) {
    float* from[kOctet / 2];
#pragma unroll
    for (int i = 0; i < kOctet / 2; ++i) from[i] = exchanged<kHead>(p, row, half * (kOctet / 2) + i, vector);
    bool missing = true;
    while (missing) {
      missing = false;
#pragma unroll
      for (int i = 0; i < kOctet / 2; ++i) {
        if (!has_come(v[i])) v[i] = load_relaxed(from[i]);
      }
#pragma unroll
      for (int i = 0; i < kOctet / 2; ++i) missing = missing || !has_come(v[i]);
    }
#pragma unroll
    for (int i = 0; i < kOctet / 2; ++i) store_relaxed(from[i], make_float4(0.f, 0.f, 0.f, 0.f));
  }
  __syncwarp();
  const float4 sum = add(add(v[0], v[1]), add(v[2], v[3]));
  const float4 other = make_float4(__shfl_xor_sync(0xffffffffu, sum.x, 8), __shfl_xor_sync(0xffffffffu, sum.y, 8),
                                   __shfl_xor_sync(0xffffffffu, sum.z, 8), __shfl_xor_sync(0xffffffffu, sum.w, 8));
  if (half % 2 == 0) *reinterpret_cast<float4*>(&s.row.octets[half / 2][vector * 4]) = add(sum, other);
}

// One row: what finish_kernel does.
template <bool kPost, bool kHead>
__device__ __forceinline__ void collapse_row(const Params& p, FusedShared& s, int64_t row) {
  constexpr int kOctets = kFlashHidden / kOctetColumns, kTurns = kOctets / kFusedWarps;
  static_assert(kOctets % kFusedWarps == 0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool iterates = warp == kFusedWarps, normed = p.norm_weight != nullptr;
  const auto octet = [&](int turn) { return turn * kFusedWarps + warp; };
  const auto column = [&](int turn) { return (octet(turn) * 32 + lane) * kLaneColumns; };
  Gates<kHead> gates;
  gates.load(p, lane);
  uint4 weight[kTurns], x[kTurns][kStreams];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) weight[turn] = !iterates && normed ? load_16(p.norm_weight + column(turn)) : make_uint4(0, 0, 0, 0);
  pdl_wait();
  pdl_trigger();
  if (!iterates) {
    uint4 f[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
      for (int j = 0; j < kStreams; ++j) x[turn][j] = load_16(p.x + row * p.x_stride + j * kFlashHidden + column(turn));
      if constexpr (kPost) f[turn] = load_16(p.f + row * p.f_stride + column(turn));
    }
    if constexpr (kPost) {
      alignas(16) float c[kStreams * kStreams + kStreams];
#pragma unroll
      for (int i = 0; i < kStreams; ++i) {
#pragma unroll
        for (int j = 0; j < kStreams; ++j) c[i * kStreams + j] = p.comb[row * (kStreams * kStreams) + j * kStreams + i];
        c[kStreams * kStreams + i] = p.post[row * kStreams + i];
      }
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        mix_in_place(x[turn], f[turn], c);
        __syncwarp();  // one turn after the other: registers
      }
    }
    collect<kHead>(p, s, row);
  }
  __syncthreads();
  const float z = fmaf(normed_mix<kHead>(s.row.octets, kOctets, p, lane), gates.scale, gates.base);
  if (iterates) {
    if constexpr (!kHead) write_coefficients(p, row, z, lane);
    return;
  }
  const float gate = sigmoid(z) + p.hc_eps;
  float pre[kStreams];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) pre[j] = __shfl_sync(0xffffffffu, gate, j);
  uint4 y[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const float squares = warp_sum(collapse(pre, x[turn], y[turn]));
    if (lane == 0) s.row.squares[octet(turn)] = squares;
  }
  float inverse = 1.f;
  if (normed) {
    sync_threads<1, 32 * kFusedWarps>();
    float sum = 0.f;
    for (int w = 0; w < kOctets; ++w) sum += s.row.squares[w];
    inverse = rsqrtf(fmaf(sum, p.inverse_hidden, p.norm_eps));
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn)
    *reinterpret_cast<uint4*>(p.y + row * kFlashHidden + column(turn)) = normed ? times_weight(y[turn], inverse, weight[turn]) : y[turn];
}

template <bool kPost, bool kHead>
__global__ void __launch_bounds__(kFusedThreads, 2) fused_kernel(const Params p) {
  __shared__ FusedShared s;
  const int block = blockIdx.x, mixing = mixing_blocks(p.rows);
  if (block < mixing) {
    mix_slices<kPost, kHead>(p, s, block % kFusedMixing, block / kFusedMixing);
  } else {
    collapse_row<kPost, kHead>(p, s, block - mixing);
  }
}

}  // namespace dsv4::mhc

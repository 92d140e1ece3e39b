// In two launches, the second: a row's mixes from their partial sums, its coefficients, the next sublayer's normed input.
//
//   m = sum * rsqrt(mean(x'^2) + rms_eps)
//   pre = sigmoid(m[0:4] scale0 + base[0:4]) + eps       post = post_scale sigmoid(m[4:8] scale1 + base[4:8])
//   C = softmax_rows(m[8:24] scale2 + base[8:24]) + eps, divided by its column sums + eps, then sinkhorn_iters - 1 times
//       by its row sums + eps and its column sums + eps
//   y = sum_j pre_j X'_j in fp32;  out = bf16(bf16(y) * rsqrt(mean(y^2) + norm_eps) * norm_weight)
//
// A block per row: hidden / 256 warps with eight columns a lane, and one more that iterates C meanwhile.
#pragma once

#include "../device/times_weight.cuh"
#include "mix.cuh"

namespace dsv4::mhc {

__device__ __forceinline__ float sigmoid(float z) { return 1.f / (1.f + expf(-z)); }

// Lane o's mix before its scale: its sum times the reciprocal root of the mean square (lane kOutputs' sum).
template <bool kHead>
__device__ __forceinline__ float root_normed(float sum, const Params& p) {
  const float squares = __shfl_sync(0xffffffffu, sum, kOutputs<kHead>);
  return sum * rsqrtf(fmaf(squares, 0.25f * p.inverse_hidden, p.rms_eps));
}

// The same from the sums of the octets, in order.
template <bool kHead>
__device__ __forceinline__ float normed_mix(const float (*octets)[32], int num_octets, const Params& p, int lane) {
  float sum = 0.f;
  for (int w = 0; w < num_octets; ++w) sum += octets[w][lane];
  return root_normed<kHead>(sum, p);
}

// Sinkhorn on the reciprocals of the scalings. With C = diag(1/a) C0 diag(1/b), dividing the rows by their sums + eps is
// a_i <- sum_j C0_ij / b_j + eps a_i, and columns likewise. No quotient is on the way: numerators over the common
// denominator b_0 b_1 b_2 b_3, times a power of two, are a_i times a number that is the same for all i. `gauge` is by how
// much a_i b_j are greater than they should be, 1 to 2; only the small summand needs its reciprocal.
//   x: the scalings that are divided by, y: those that are renewed. kRows: x = b, y = a.
template <bool kRows>
__device__ __forceinline__ void rescale(const float (&c)[kStreams][kStreams], const float (&x)[kStreams], float (&y)[kStreams], float& gauge,
                                        float eps) {
  const float x01 = x[0] * x[1], x23 = x[2] * x[3];
  const float power = __uint_as_float(0x7ef311c7u - __float_as_uint(x01 * x23));  // about the reciprocal
  const float p01 = x01 * power, p23 = x23 * power, off = gauge - 1.f, small = eps * (fmaf(off, off, 1.f) - off);
  gauge = p01 * x23;
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    const float c0 = kRows ? c[i][0] : c[0][i], c1 = kRows ? c[i][1] : c[1][i], c2 = kRows ? c[i][2] : c[2][i], c3 = kRows ? c[i][3] : c[3][i];
    const float first = fmaf(c1, x[0], c0 * x[1]), second = fmaf(c3, x[2], c2 * x[3]);
    y[i] = fmaf(small * gauge, y[i], fmaf(second, p01, first * p23));
  }
}

// What a lane needs of scale and base: read before the wait.
template <bool kHead>
struct Gates {
  float scale, base;

  __device__ __forceinline__ void load(const Params& p, int lane) {
    scale = p.scale[kHead || lane < 4 ? 0 : lane < 8 ? 1 : 2];
    base = lane < kOutputs<kHead> ? p.base[lane] : 0.f;
  }
};

// C after its iterations is c_ij * gauge / (a_i b_j).
__device__ __forceinline__ void sinkhorn(const Params& p, const float (&c)[kStreams][kStreams], float (&a)[kStreams], float (&b)[kStreams],
                                         float& gauge) {
#pragma unroll
  for (int j = 0; j < kStreams; ++j) a[j] = 1.f, b[j] = ((c[0][j] + c[1][j]) + (c[2][j] + c[3][j])) + p.hc_eps;
  gauge = 1.f;
  for (int turn = 1; turn < p.sinkhorn_iters; ++turn) {
    rescale<true>(c, b, a, gauge, p.hc_eps);
    rescale<false>(c, a, b, gauge, p.hc_eps);
  }
}

// comb of one row: C brought to sums of one; by a thread, of those rows of C for which mine(i)
template <typename Mine>
__device__ __forceinline__ void write_comb(const Params& p, int64_t row, const float (&c)[kStreams][kStreams], Mine mine) {
  float a[kStreams], b[kStreams], gauge;
  sinkhorn(p, c, a, b, gauge);
  float4* const out = reinterpret_cast<float4*>(p.comb_out + row * (kStreams * kStreams));
#pragma unroll
  for (int j = 0; j < kStreams; ++j) b[j] = reciprocal(b[j]);
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    const float r = gauge * reciprocal(a[i]);
    if (mine(i)) out[i] = make_float4(c[i][0] * r * b[0], c[i][1] * r * b[1], c[i][2] * r * b[2], c[i][3] * r * b[3]);
  }
}

// post and comb of one row from z = mix * scale + base (lane o has the o-th); a full warp
__device__ __forceinline__ void write_coefficients(const Params& p, int64_t row, float z, int lane) {
  // lanes 8 to 23 have a row of C in four lanes each
  float most = fmaxf(z, __shfl_xor_sync(0xffffffffu, z, 1));
  most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
  const float power = expf(z - most);
  float sum = power + __shfl_xor_sync(0xffffffffu, power, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  const float start = fmaf(power, reciprocal(sum), p.hc_eps);
  float c[kStreams][kStreams];
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
#pragma unroll
    for (int j = 0; j < kStreams; ++j) c[i][j] = __shfl_sync(0xffffffffu, start, 8 + i * kStreams + j);
  }
  write_comb(p, row, c, [lane](int i) { return lane == i; });
  if (lane >= 4 && lane < 8) p.post_out[row * kStreams + lane - 4] = p.post_scale * sigmoid(z);
}

// y at a lane's eight columns; returns their sum of squares, unrounded
__device__ __forceinline__ float collapse(const float (&pre)[kStreams], const uint4 (&x)[kStreams], uint4& rounded) {
  uint32_t out[4];
  float squares = 0.f;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    float low = 0.f, high = 0.f;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      low = fmaf(pre[j], bf16_low(word_of(x[j], w)), low);
      high = fmaf(pre[j], bf16_high(word_of(x[j], w)), high);
    }
    squares = fmaf(low, low, squares);
    squares = fmaf(high, high, squares);
    out[w] = pack_bf16x2(low, high);
  }
  rounded = make_uint4(out[0], out[1], out[2], out[3]);
  return squares;
}

template <bool kHead, int kHidden>
__global__ void __launch_bounds__(kHidden / kLaneColumns + 32) finish_kernel(const Params p) {
  constexpr int kWarps = kHidden / kOctetColumns;
  __shared__ float octets[kWarps][32];
  __shared__ float squares[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t row = blockIdx.x;
  const int column = threadIdx.x * kLaneColumns;
  const bool has_columns = warp < kWarps, normed = p.norm_weight != nullptr;
  uint4 weight = make_uint4(0, 0, 0, 0);
  if (has_columns && normed) weight = load_16(p.norm_weight + column);
  Gates<kHead> gates;
  gates.load(p, lane);
  pdl_wait();
  pdl_trigger();
  uint4 x[kStreams];
  if (has_columns) {
    const uint16_t* const streams = p.f != nullptr ? p.streams + row * kStreams * kHidden : p.x + row * p.x_stride;
    const float* const partial = p.partials + (row * kWarps + warp) * kOctet * kWidth<kHead>;
    float v[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) v[i] = lane <= kOutputs<kHead> ? partial[i * kWidth<kHead> + lane] : 0.f;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) x[j] = load_16(streams + static_cast<int64_t>(j) * kHidden + column);
    octets[warp][lane] = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
  }
  __syncthreads();
  const float z = fmaf(normed_mix<kHead>(octets, kWarps, p, lane), gates.scale, gates.base);
  if (!has_columns) {
    if constexpr (!kHead) write_coefficients(p, row, z, lane);
    return;
  }
  const float gate = sigmoid(z) + p.hc_eps;
  float pre[kStreams];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) pre[j] = __shfl_sync(0xffffffffu, gate, j);
  uint4 y;
  const float mine = sum_of_lanes(collapse(pre, x, y));
  if (normed) {
    if (lane == 0) squares[warp] = mine;
    sync_threads<1, kWarps * 32>();
    float sum = 0.f;
    for (int w = 0; w < kWarps; ++w) sum += squares[w];
    y = times_weight(y, rsqrtf(fmaf(sum, p.inverse_hidden, p.norm_eps)), weight);
  }
  *reinterpret_cast<uint4*>(p.y + row * kHidden + column) = y;
}

}  // namespace dsv4::mhc

// What a warp does: 16 weight rows times a slice of the inputs, for two rows of x at a time.
//
// A lane loads 16 bytes of one weight row: 32 inputs, one scale. The k of an mma is a free choice, made for both operands
// alike: a register of A is (code j, code j + 4) of one word, and x is stored so. The four lanes of a quad hold different
// scales; so that these can go onto fp32 sums, once for 128 inputs, the sums stay apart: column 2 t + r of B is row r's x
// for lane t's inputs and zero for the other lanes'. Eight columns are two rows of x.
//
// Codes become f16 exactly: sign, exponent and mantissa in their places are the value * 2^-14, subnormals included. x has
// a power of two for each row and slice that brings its greatest to 2^14 .. 2^15: exact down to 2^-29 of the greatest. Where many rows
// must have the bits of few (`exact`) it is rounded besides to multiples of 2^-14 of the greatest power of two among its 32 inputs with
// a common scale, or of 2^-29 of the slice's: then sums of such 32 products are exact (below 2^24 halves of that), in whatever order
// and by whatever instruction. A bf16 has 8 bits, so what is within 2^-7 of the greatest is exact.
#pragma once

#include "../device/copies.cuh"
#include "../device/mma.cuh"
#include "../device/numbers.cuh"
#include "config.h"

namespace dsv4::mxfp4_moe {

// 8 codes -> f16 pairs (0,4) (1,5) (2,6) (3,7), times 2^-14
__device__ __forceinline__ void decode(uint32_t codes, uint32_t (&pair)[4]) {
  constexpr uint32_t kSigns = 0x80808080u, kFields = 0x8e008e00u;
  const uint32_t even = choose_bits<kSigns>(codes << 4, codes << 1), odd = choose_bits<kSigns>(codes, codes >> 3);
  pair[0] = (even << 8) & kFields;
  pair[1] = (odd << 8) & kFields;
  pair[2] = even & kFields;
  pair[3] = odd & kFields;
}

// A lane's codes of 16 rows: rows g and g + 8.
template <int kSteps>
struct Stage {
  uint4 codes[2][kSteps];
};

// Where a warp's lanes read their weights.
template <int kSteps_, int kRowBytes_>
struct From {
  static constexpr int kSteps = kSteps_, kRowBytes = kRowBytes_;
  const uint8_t* codes;   // this lane's 16 bytes of row g, step 0
  const uint8_t* scales;  // the slice's, of row 0
  int second;             // rows from row g to row g + 8

  __device__ __forceinline__ void load(Stage<kSteps>& stage, int step) const {
    stage.codes[0][step] = load_stream(codes + step * 64);
    stage.codes[1][step] = load_stream(codes + second * kRowBytes + step * 64);
  }
  // into shared memory, by this warp for this warp
  __device__ __forceinline__ void copy_scales(Scales<kSteps>& to) const {
    constexpr int kBytes = kSteps == 3 ? 4 : kSteps * 4, kParts = kSteps * 4 / kBytes;
#pragma unroll
    for (int i = threadIdx.x % 32; i < 16 * kParts; i += 32) {
      const int row = i / kParts, at = i % kParts * kBytes;
      cp_async<kBytes>(&to.bytes[row][at], scales + (row % 8 + (row < 8 ? 0 : second)) * (kRowBytes / 16) + at);
    }
  }
  __device__ __forceinline__ void load_all(Stage<kSteps>& stage, Scales<kSteps>& to) const {
    copy_scales(to);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) load(stage, step);
  }
};

// A slice of a row, bf16, to what is multiplied; this lane has the 8 inputs of the chunks 32 i + lane, zeros behind the last.
// Returns the power of two that x lacks here, and the codes.
template <bool kExact, int kEach>
__device__ __forceinline__ float prepare_slice(uint4 (&v)[kEach]) {
  uint32_t group[kEach], most = 0;  // greatest, as bits: of the chunk's 32 inputs, of all
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    uint32_t pair = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) pair = __vmaxu2(pair, word_of(v[i], j) & 0x7fff7fffu);
    group[i] = max(pair & 0xffffu, pair >> 16);
    most = max(most, group[i]);  // before its quad's, which takes longer
#pragma unroll
    for (int lanes = 1; lanes < 4 && kExact; lanes *= 2) group[i] = max(group[i], __shfl_xor_sync(0xffffffffu, group[i], lanes));
  }
  const int exponent = max(__reduce_max_sync(0xffffffffu, most) >> 7, 15u);
  const float up = __uint_as_float((268u - exponent) << 23);  // 2^(141 - exponent): the greatest becomes 2^14 .. 2^15
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    // added to a number, it rounds that to a multiple of 2^-14 of the group's greatest power of two, or of 2^-24
    const float grid = kExact ? __uint_as_float((150 + max(static_cast<int>(group[i] >> 7) - exponent, -24)) << 23 | 0x400000) : 0.f;
    const auto scaled = [&](float x) { return kExact ? __fsub_rn(fmaf(x, up, grid), grid) : x * up; };
    const auto low = [&](uint32_t pair) { return scaled(bf16_low(pair)); };
    const auto high = [&](uint32_t pair) { return scaled(bf16_high(pair)); };
    v[i] = make_uint4(pack_f16x2(low(v[i].x), low(v[i].z)), pack_f16x2(high(v[i].x), high(v[i].z)), pack_f16x2(low(v[i].y), low(v[i].w)),
                      pack_f16x2(high(v[i].y), high(v[i].w)));
  }
  return __uint_as_float(exponent << 23);  // 2^(exponent - 141 + 14), exactly
}

// One row into a warp's slice, by all its lanes. kMayBeExact: code that a kernel of one row does not have to fetch, where not asked.
template <bool kMayBeExact, int kSteps, int kRows>
__device__ __forceinline__ void stage_row(WarpShared<kSteps, kRows>& s, int row, const uint16_t* from, bool exact) {
  constexpr int kChunks = kSteps * 16, kEach = ceil_div(kChunks, 32);  // of 8 inputs
  const int lane = threadIdx.x % 32;
  uint4 v[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int chunk = i * 32 + lane;
    v[i] = chunk < kChunks ? *reinterpret_cast<const uint4*>(from + chunk * 8) : make_uint4(0, 0, 0, 0);
  }
  const float power = kMayBeExact && exact ? prepare_slice<true>(v) : prepare_slice<false>(v);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int chunk = i * 32 + lane;  // 16 * step + 4 * (lane of the quad) + word
    if (chunk < kChunks) s.x[chunk / 16 * 4 + chunk % 4][row * 4 + chunk / 4 % 4] = v[i];
  }
  if (lane == 0) s.power[row] = power;
}

// The product of what is in `stage` with rows 0 to 2 kPasses - 1 of x. As soon as a step's codes are used, those of `next`
// are asked for, with its scales into the other buffer. sums[pass]: of weight row g + 8 (lane % 2) and row
// 2 pass + lane / 2 % 2 of x.
template <int kRows, int kPasses, typename From>
__device__ __forceinline__ void multiply(WarpShared<From::kSteps, kRows>& s, int buffer, Stage<From::kSteps>& stage, bool more, const From& next,
                                         float (&sums)[kPasses]) {
  constexpr int kSteps = From::kSteps, kBuffers = kPasses == 1 ? 1 : 2;
  const int lane = threadIdx.x % 32, g = lane / 4;
  const bool mine = lane % 4 == g / 2;  // else this lane's part of B is zero
  const uint4* const x = &s.x[0][g % 2 * 4 + g / 2];
  const uint8_t* const scales = &s.scales[buffer].bytes[g][lane % 4];
  cp_async_wait_all();
  __syncwarp();
  if (more) next.copy_scales(s.scales[buffer ^ 1]);
  float acc[kPasses][4] = {};
  uint4 b[kBuffers];
#pragma unroll
  for (int i = 0; i < kBuffers; ++i) b[i] = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const uint32_t scale[2] = {scales[step * 4], scales[8 * (kSteps * 4) + step * 4]};
    float part[kPasses][4] = {};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const uint4* const from = x + (step * 4 + word) * (kRows * 4);
      load_shared_if(mine, b[0], from);
      uint32_t row0[4], row1[4];
      decode(word_of(stage.codes[0][step], word), row0);
      decode(word_of(stage.codes[1][step], word), row1);
#pragma unroll
      for (int pair = 0; pair < kPasses; pair += kBuffers) {  // as many chains of products as there are registers for
#pragma unroll
        for (int i = 0; i < kBuffers; ++i) {
          if (pair + i > 0) load_shared_if(mine, b[i], from + (pair + i) * 8);
        }
#pragma unroll
        for (int i = 0; i < kBuffers; ++i) mma_f16(part[pair + i], {row0[0], row1[0], row0[1], row1[1]}, b[i].x, b[i].y);
#pragma unroll
        for (int i = 0; i < kBuffers; ++i) mma_f16(part[pair + i], {row0[2], row1[2], row0[3], row1[3]}, b[i].z, b[i].w);
      }
    }
    if (more) next.load(stage, step);
    const float factor[2] = {__uint_as_float(scale[0] << 23), __uint_as_float(scale[1] << 23)};  // 2^(byte - 127); 255 infinite
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[pass][i] = fmaf(part[pass][i], factor[i / 2], acc[pass][i]);
    }
  }
  // over the quad; a lane keeps one weight row and one row of x
  const bool high = lane % 2, second = lane / 2 % 2;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    float kept[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      kept[r] = (high ? acc[pass][2 + r] : acc[pass][r]) + __shfl_xor_sync(0xffffffffu, high ? acc[pass][r] : acc[pass][2 + r], 1);
    }
    sums[pass] = (second ? kept[1] : kept[0]) + __shfl_xor_sync(0xffffffffu, second ? kept[0] : kept[1], 2);
    sums[pass] *= s.power[2 * pass + second];
  }
}

}  // namespace dsv4::mxfp4_moe

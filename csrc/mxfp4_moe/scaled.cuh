// Both products of the experts for many rows with MXFP8 activations, by the block-scaled instruction: pairs sorted by expert, 128 of
// one expert a tile.
//
//   quantize  x to MXFP8, each row once
//   product   256 weight rows x 128 pairs a unit, one unit after the other: eight warps multiply 64 weight rows by half of the
//             tile's pairs, four copy stages of 64 inputs ahead of them, across units. Gate/up makes MXFP8 of h
//
// The scales of both operands are the instruction's, so a sum is one chain of mmas over all inputs, and a word of eight codes is two of
// its operands by two shifts. Weight rows lie in shared memory in the order of the mma's rows, which is such that a lane's results
// are beside each other in memory.
#pragma once

#include "../device/copies.cuh"
#include "../device/f16.cuh"
#include "../device/mma.cuh"
#include "../device/numbers.cuh"
#include "scaled.h"
#include "swiglu.cuh"
#include "units.cuh"

namespace dsv4::mxfp4_moe {

constexpr int kScaledRows = 256, kScaledPairs = 128, kScaledInputs = 64, kScaledStages = 5, kSliceStages = 8, kSlices = 3;
constexpr int kScaledMath = 256, kScaledThreads = kScaledMath + 128;
constexpr int scaled_outputs(bool gated) { return gated ? kScaledRows / 2 : kScaledRows; }

struct alignas(128) ScaledStage {
  unsigned char codes[kScaledRows][32];  // two groups; their 16 bytes exchanged in every second four rows
  unsigned char x[kScaledPairs][64];     // 16 bytes at c ^ (row / 2 % 4)
};
// Of kSliceStages stages. What is in a slot has been used before it is written again: the two slices behind it are more stages than there are
// places for, if a unit has 256 inputs.
struct ScaledSlice {
  uint8_t of_codes[kScaledRows][16], of_x[kScaledPairs][16];
};
struct ScaledShared {
  ScaledStage stages[kScaledStages];
  ScaledSlice slices[kSlices];
  Barriers<kScaledStages> full, empty;
  DealtUnits dealt;  // what is in a slot has been read by all before it is written again: four units are eight stages or more, and there are five
};
static_assert(sizeof(ScaledShared) <= kMaxSharedBytes);

// ---- numbers

// The exponent, as a UE8M0 byte, with which the greatest of 32 stays within 448, which is 1.75 * 2^8.
__device__ __forceinline__ uint32_t mxfp8_exponent(float greatest) {
  const uint32_t bits = __float_as_uint(greatest);
  const int exponent = static_cast<int>(bits >> 23) - 8 + ((bits & 0x7fffff) > 0x600000 ? 1 : 0);
  return min(max(exponent, 1), 253);
}
__device__ __forceinline__ uint32_t pack_e4m3x4(float a, float b, float c, float d) {
  uint32_t word;
  asm("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h}; }"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

// 8 codes to E2M1 in bytes, where the code is bits 5 to 2: of the even inputs, of the odd ones.
__device__ __forceinline__ uint32_t even_codes(uint32_t codes) { return codes << 2 & 0x3c3c3c3cu; }
__device__ __forceinline__ uint32_t odd_codes(uint32_t codes) { return codes >> 2 & 0x3c3c3c3cu; }

__device__ __forceinline__ uint32_t scale_f16x2_to_bf16x2(uint32_t pair, float factor) {
  const float2 v = floats_of_f16x2(pair);
  return pack_bf16x2(v.x * factor, v.y * factor);
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr bool kBlockScaled = true;
#else
constexpr bool kBlockScaled = false;
#endif
// d += a b, m16n8k32: a E2M1 in bytes, b E4M3, each row of a and column of b with a scale. Scales: byte kByte of the word; a's row g + 8 h
// has that of lane 2 kOfA + h of its quad, b's column g that of lane kOfB. Not kBlockScaled: of half of the inputs.
template <int kByte, int kOfA, int kOfB>
__device__ __forceinline__ void mma_scaled(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t a_scale, uint32_t b_scale,
                                           int half) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  asm("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e2m1.e4m3.f32.ue8m0 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3}, %10, {%12,%13}, %11, {%12,%14};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(a_scale), "r"(b_scale), "n"(kByte), "n"(kOfA), "n"(kOfB));
#else  // the same numbers times their scales, in bf16, which holds them
  const int first_lane = threadIdx.x % 32 / 4 * 4;
  const auto scaled = [=](uint32_t e4m3, uint32_t scales, int lane, float factor, uint32_t& low, uint32_t& high) {
    factor *= __uint_as_float((__shfl_sync(0xffffffffu, scales, first_lane + lane) >> 8 * kByte & 0xffu) << 23);  // 0 for byte 0, infinite for 255
    uint32_t pairs[2];
    e4m3x4_to_f16(e4m3, pairs[0], pairs[1]);
    low = scale_f16x2_to_bf16x2(pairs[0], factor), high = scale_f16x2_to_bf16x2(pairs[1], factor);
  };
  uint32_t of_a[4], of_b[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {  // as E4M3 a code is 2^-6 of its value
    const uint32_t codes = half == 0 ? a[r] : a[2 + r];
    scaled((codes & 0x1c1c1c1cu) | (codes & 0x20202020u) << 2, a_scale, kOfA * 2 + r, 64.f, of_a[r], of_a[2 + r]);
  }
  scaled(half == 0 ? b0 : b1, b_scale, kOfB, 1.f, of_b[0], of_b[1]);
  mma_bf16(d, of_a, of_b[0], of_b[1]);
#endif
}

// ---- x to MXFP8

constexpr int kQuantizeThreads = 256;

// A thread 8 inputs, a quad the 32 that have one scale.
__global__ void __launch_bounds__(kQuantizeThreads) quantize_kernel(const QuantizeParams p) {
  pdl_wait();
  pdl_trigger();
  const int chunks = p.inputs / 8;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kQuantizeThreads + threadIdx.x, row = item / chunks;
  const int chunk = static_cast<int>(item % chunks), q = chunk % 4;
  const bool mine = row < p.rows;  // of whole quads: all inputs are multiples of 32
  const uint4 v = mine ? *reinterpret_cast<const uint4*>(p.from + row * p.from_stride + chunk * 8) : make_uint4(0, 0, 0, 0);
  float x[8], greatest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = bf16_low(word_of(v, i)), x[2 * i + 1] = bf16_high(word_of(v, i));
    greatest = fmaxf(greatest, fmaxf(fabsf(x[2 * i]), fabsf(x[2 * i + 1])));
  }
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, lanes));
  const uint32_t exponent = mxfp8_exponent(greatest);
  const float inverse = __uint_as_float((254 - exponent) << 23);
  if (!mine) return;
  uint32_t* const to = reinterpret_cast<uint32_t*>(p.to.numbers + row * p.inputs + chunk / 4 * 32 + q * 4);
  to[0] = pack_e4m3x4(x[0] * inverse, x[2] * inverse, x[4] * inverse, x[6] * inverse);
  to[4] = pack_e4m3x4(x[1] * inverse, x[3] * inverse, x[5] * inverse, x[7] * inverse);
  if (q == 0) p.to.scales[row * (p.inputs / 32) + chunk / 4] = exponent;
}

// ---- four warps that copy

// The weight row, of those of a unit, that is the row in shared memory; a warp's 64 rows are 4 mmas of 8 rows and 8 more.
// Gate/up: a lane has gate and up of four outputs, whose numbers in h are beside each other; down: eight outputs beside each other.
template <bool kGated>
__device__ __forceinline__ int weight_row(const ScaledParams& p, int row) {
  const int warp = row / 64, m = row / 16 % 4, half = row / 8 % 2, g = row % 8;
  if constexpr (kGated) return (half == 0 ? p.gate_row : p.up_row) + warp * 32 + g % 4 * 8 + m * 2 + g / 4;
  return warp * 64 + g * 8 + m * 2 + half;
}

template <bool kGated>
__device__ __forceinline__ void copy_scaled(const ScaledParams& p, ScaledShared& s) {
  const int thread = threadIdx.x - kScaledMath;
  const int row = thread / 2, piece = thread % 2, x_row = thread / 4, chunk = thread % 4;
  const uint32_t code_place = shared_address(&s.stages[0].codes[row][(piece ^ (row >> 2 & 1)) * 16]);
  const uint32_t x_place = shared_address(&s.stages[0].x[x_row][(chunk ^ (x_row >> 1 & 3)) * 16]);
  const int code_row = weight_row<kGated>(p, row), scale_row = weight_row<kGated>(p, thread);
  const int code_pitch = p.inputs / 2, scale_pitch = p.inputs / 32, to_next = kGated ? 32 : 64;  // from a warp's rows to the next's
  const unsigned units = p.outputs / scaled_outputs(kGated);
  StagePlace<kScaledStages> at;
  int slice = 0;
  unsigned turn = 0;
  if (thread == 0) s.dealt.tell(p, 0, blockIdx.x, units);
  for (DealtUnit tile = s.dealt.ask(turn); tile.expert >= 0; tile = s.dealt.ask(turn)) {
    ++turn;
    const int first = p.first + tile.number % units * scaled_outputs(kGated);
    unsigned ahead = 0;
    const uint8_t* codes = p.w.codes + tile.expert * p.w.expert_bytes + static_cast<int64_t>(first + code_row) * code_pitch + piece * 16;
    const uint8_t* const scales = p.w.scales + tile.expert * p.w.expert_scale_bytes + static_cast<int64_t>(first + scale_row) * scale_pitch;
    const auto source = [&](int r) {  // row of x that the tile's r-th pair has
      const int position = tile.begin + min(r, tile.count - 1);
      return static_cast<uint32_t>(kGated ? p.pairs[position] / p.topk : position);
    };
    uint32_t x[4];  // in 16 bytes
#pragma unroll
    for (int k = 0; k < 4; ++k) x[k] = source(x_row + 32 * k) * (p.inputs / 16) + chunk;
    const uint8_t* const x_scales = p.x.scales + static_cast<int64_t>(source(thread)) * scale_pitch;
#pragma unroll 1
    for (int i = 0; i < p.inputs / kScaledInputs; ++i) {
      s.empty[at.stage].wait(at.phase ^ 1);
      if (thread == 0 && i == 0) ahead = gridDim.x + atomicAdd(p.taken, 1u);
      if (thread == 0 && i == 1) s.dealt.tell(p, turn, ahead, units);
      if (i % kSliceStages == 0) {
        ScaledSlice& here = s.slices[slice];
#pragma unroll
        for (int k = 0; k < 2; ++k) copy_scales(here.of_codes[thread + k * 128], scales + k * 2 * to_next * scale_pitch, i * 2, scale_pitch);
        if (thread < tile.count) copy_scales(here.of_x[thread], x_scales, i * 2, scale_pitch);
        if (++slice == kSlices) slice = 0;
      }
      const uint32_t stage = at.stage * sizeof(ScaledStage);
#pragma unroll
      for (int k = 0; k < 4; ++k) cp_async_stream(code_place + stage + k * 64 * 32, codes + k * to_next * code_pitch);
      codes += kScaledInputs / 2;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint8_t* const from = p.x.numbers + (x[k] + i * 4) * int64_t{16};
        cp_async_16_if(x_row + 32 * k < tile.count, x_place + stage + k * 32 * 64, reinterpret_cast<uint64_t>(from), true);
      }
      s.full[at.stage].arrive_copies();
      at.advance();
    }
  }
}

// ---- eight warps that multiply

// What a lane has of a group of 32 inputs: codes of 64 weight rows, numbers of kTiles times 8 pairs.
template <int kTiles>
struct ScaledOperands {
  uint32_t codes[2][4], x[(kTiles + 1) / 2][4];

  __device__ __forceinline__ void load(uint32_t of_codes, uint32_t of_x) {
#pragma unroll
    for (int j = 0; j < 2; ++j) ldmatrix_x4(codes[j], of_codes + j * 32 * 32);
#pragma unroll
    for (int n = 0; n < (kTiles + 1) / 2; ++n) ldmatrix_x4(x[n], of_x + n * 16 * 64);
  }
};

struct ScaledPlace : StagePlace<kScaledStages> {
  int slice = kSlices - 1;
};

// Of a stage: a lane's for the mmas of two times 16 weight rows, of four times 8 pairs; a byte for each of its groups.
template <int kTiles>
struct ScaledScales {
  uint32_t of_codes[2], of_x[(kTiles + 3) / 4];

  __device__ __forceinline__ void load(uint32_t codes, uint32_t x) {
#pragma unroll
    for (int j = 0; j < 2; ++j) of_codes[j] = load_shared_u16(codes + j * 32 * 16);
#pragma unroll
    for (int n = 0; n < (kTiles + 3) / 4; ++n) of_x[n] = load_shared_u16(x + n * 32 * 16);
  }
};

using ScaledRows = uint32_t[4][4];  // operands of 64 weight rows

template <int kGroup, int kTiles, int kM = 0, int kN = 0>
__device__ __forceinline__ void multiply_tiles(float (&sums)[4][kTiles][4], const ScaledRows& a, const ScaledOperands<kTiles>& operands,
                                               const ScaledScales<kTiles>& scales, int half) {
  const uint32_t* const b = &operands.x[kN / 2][kN % 2 * 2];
  mma_scaled<kGroup, kM % 2, kN % 4>(sums[kM][kN], a[kM], b[0], b[1], scales.of_codes[kM / 2], scales.of_x[kN / 4], half);
  constexpr bool kLast = kN + 1 == kTiles;
  if constexpr (!kLast || kM < 3) multiply_tiles<kGroup, kTiles, kLast ? kM + 1 : kM, kLast ? 0 : kN + 1>(sums, a, operands, scales, half);
}

template <int kGroup, int kTiles>
__device__ __forceinline__ void multiply_group32(float (&sums)[4][kTiles][4], const ScaledOperands<kTiles>& operands,
                                                 const ScaledScales<kTiles>& scales) {
  ScaledRows a;
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t codes = operands.codes[m / 2][m % 2 * 2 + r];
      a[m][r] = even_codes(codes), a[m][2 + r] = odd_codes(codes);
    }
  }
#pragma unroll 1
  for (int half = 0; half < (kBlockScaled ? 1 : 2); ++half) multiply_tiles<kGroup>(sums, a, operands, scales, half);
}

// 64 weight rows' sums of gate and up to 32 numbers of h of each pair, and their scale.
template <int kTiles>
__device__ __forceinline__ void store_h(const ScaledParams& p, float (&sums)[4][kTiles][4], const DealtUnit& tile, int first_pair, int output) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float h[4], greatest = 0;
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        h[m] = swiglu_f32(sums[m][n][r], sums[m][n][2 + r], p.limit);
        greatest = fmaxf(greatest, fabsf(h[m]));
      }
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, lanes));
      const uint32_t exponent = mxfp8_exponent(greatest);
      const float inverse = __uint_as_float((254 - exponent) << 23);
      const int pair = first_pair + n * 8 + 2 * q + r;
      if (pair >= tile.count) continue;
      const int64_t position = tile.begin + pair;
      const uint32_t word = pack_e4m3x4(h[0] * inverse, h[1] * inverse, h[2] * inverse, h[3] * inverse);
      *reinterpret_cast<uint32_t*>(p.h.numbers + position * p.outputs + output + g * 4) = word;
      if (g == 0) p.h.scales[position * (p.outputs / 32) + output / 32] = exponent;
    }
  }
}

template <int kTiles>
__device__ __forceinline__ void store_y(const ScaledParams& p, const float (&sums)[4][kTiles][4], const DealtUnit& tile, int first_pair, int output,
                                        const int (&pairs)[2]) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int pair = __shfl_sync(0xffffffffu, pairs[n / 4], n % 4 * 8 + 2 * q + r);
      if (first_pair + n * 8 + 2 * q + r >= tile.count) continue;
      uint32_t words[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) words[m] = pack_bf16x2(sums[m][n][r], sums[m][n][2 + r]);
      uint16_t* const to = p.y + static_cast<int64_t>(pair) * p.outputs + output + g * 8;
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

template <bool kGated, int kTiles>
__device__ __forceinline__ void multiply_scaled_unit(const ScaledParams& p, ScaledShared& s, ScaledPlace& at, const DealtUnit& tile, int output) {
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));  // addresses of this number of tiles are made here, not kept for all numbers through all units
  const int warp = uniform(threadIdx.x / 32), across = warp % 4, first_pair = warp / 4 * (kTiles * 8);
  const uint32_t codes = shared_address(&s.stages[0].codes[across * 64 + lane][(lane >> 2 & 1) * 16]);
  const uint32_t x = shared_address(&s.stages[0].x[first_pair + lane / 16 * 8 + lane % 8][((lane >> 3 & 1) ^ (lane >> 1 & 3)) * 16]);
  const uint32_t code_scales = shared_address(s.slices[0].of_codes[across * 64 + lane % 4 * 8 + lane / 4]);
  const uint32_t x_scales = shared_address(s.slices[0].of_x[first_pair + lane % 4 * 8 + lane / 4]);
  int pairs[2] = {};
  const auto load_pairs = [&] {
#pragma unroll
    for (int i = 0; i < 2; ++i) pairs[i] = p.pairs[tile.begin + min(first_pair + i * 32 + lane, tile.count - 1)];
  };
  if (kBlockScaled && !kGated) load_pairs();
  const int stages = p.inputs / kScaledInputs;
  float sums[4][kTiles][4] = {};
  ScaledOperands<kTiles> first, second;
  ScaledScales<kTiles> scales;
  const auto load_first = [&](int i) {
    if (i % kSliceStages == 0 && ++at.slice == kSlices) at.slice = 0;
    s.full[at.stage].wait(at.phase);
    const uint32_t stage = at.stage * sizeof(ScaledStage), slice = at.slice * sizeof(ScaledSlice) + i % kSliceStages * 2;
    scales.load(code_scales + slice, x_scales + slice);
    first.load(codes + stage, x + stage);
  };
  load_first(0);
#pragma unroll 1
  for (int i = 1; i <= stages; ++i) {
    const uint32_t stage = at.stage * sizeof(ScaledStage);
    const ScaledScales<kTiles> here = scales;
    const Barrier empty = s.empty[at.stage];
    if (kBlockScaled) second.load((codes + stage) ^ 16, (x + stage) ^ 32);
    multiply_group32<0>(sums, first, here);
    if (!kBlockScaled) second.load((codes + stage) ^ 16, (x + stage) ^ 32);
    at.advance();
    if (kBlockScaled && i < stages) load_first(i);
    multiply_group32<1>(sums, second, here);
    if (!kBlockScaled && i < stages) load_first(i);
    __syncwarp();
    if (lane == 0) empty.arrive();
  }
  if constexpr (kGated) {
    store_h(p, sums, tile, first_pair, output + across * 32);
  } else {
    if (!kBlockScaled) load_pairs();
    store_y(p, sums, tile, first_pair, output + across * 64, pairs);
  }
}

// With as many times 8 pairs for each of the two halves of the warps as the unit's pairs need.
template <bool kGated, int kTiles = kScaledPairs / 16>
__device__ __forceinline__ void multiply_scaled_any(const ScaledParams& p, ScaledShared& s, ScaledPlace& at, const DealtUnit& unit, int output) {
  if constexpr (kTiles > 1) {
    if (unit.count <= (kTiles - 1) * 16) return multiply_scaled_any<kGated, kTiles - 1>(p, s, at, unit, output);
  }
  multiply_scaled_unit<kGated, kTiles>(p, s, at, unit, output);
}

template <bool kGated>
__device__ __forceinline__ void multiply_scaled_units(const ScaledParams& p, ScaledShared& s) {
  const unsigned units = p.outputs / scaled_outputs(kGated);
  ScaledPlace at;
  unsigned turn = 0;
  for (DealtUnit unit = s.dealt.ask(turn); unit.expert >= 0; unit = s.dealt.ask(++turn)) {
    multiply_scaled_any<kGated>(p, s, at, unit, unit.number % units * scaled_outputs(kGated));
  }
}

template <bool kGated>
__global__ void __launch_bounds__(kScaledThreads, 1) scaled_kernel(const ScaledParams p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  ScaledShared& s = *reinterpret_cast<ScaledShared*>(shared_memory);
  if (threadIdx.x < kScaledStages) {
    s.full[threadIdx.x].init(kScaledThreads - kScaledMath);
    s.empty[threadIdx.x].init(kScaledMath / 32);
  }
  if (threadIdx.x < kUnitSlots) s.dealt.told[threadIdx.x].init(1);
  __syncthreads();
  pdl_wait();
  pdl_trigger();
  if (threadIdx.x >= kScaledMath) {
    set_registers<40, false>();
    copy_scaled<kGated>(p, s);
  } else {
    set_registers<232, true>();  // 40 + 2 x 232 = 3 x 168, of four warps each
    multiply_scaled_units<kGated>(p, s);
  }
}

}  // namespace dsv4::mxfp4_moe

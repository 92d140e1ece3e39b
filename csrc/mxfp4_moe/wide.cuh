// Both products of the experts for many rows in bf16, without the order of few: pairs sorted by expert, 64 of one expert a tile.
//
// 256 weight rows x 64 pairs a unit, one unit after the other: eight warps multiply 32 weight rows by all pairs, so that each
// weight is decoded once; four copy stages of 64 inputs ahead of them, across units. A lane's 16 inputs of a stage share a
// scale, which goes onto the decoded weights: a sum is one chain of mmas over all inputs.
#pragma once

#include "sorted.cuh"

namespace dsv4::mxfp4_moe {

constexpr int kWideRows = 256, kWideStages = 5, kScaleStages = 8;
// A place for scales is filled again when all but the last kWideStages stages before it have been multiplied, and those who multiply
// are a stage ahead: so no place is of two stages alone, and inputs are no 512 n + 128.
constexpr int wide_outputs(bool gated) { return gated ? kWideRows / 2 : kWideRows; }

struct alignas(128) WideStage {
  unsigned char codes[kWideRows][32];
  unsigned char x[kTilePairs][128];  // in every second row the two pieces of 16 bytes that a lane has are exchanged
};
struct WideShared {
  WideStage stages[kWideStages];
  uint8_t scales[2][kWideRows][16];  // of kScaleStages stages
  uint16_t out[kMathThreads / 32][16][36];  // a warp's own
  Barriers<kWideStages> full, empty;
};
static_assert(sizeof(WideShared) <= kMaxSharedBytes);

constexpr int kDown = 32;  // weights are times 2^-kDown, so that the factors of scale bytes up to 160 are bf16

// 2^(byte - 1 - kDown), twice
__device__ __forceinline__ uint32_t factor_of(uint32_t byte) { return (byte + 126 - kDown) * 0x00800080u; }

// 8 codes with a common scale to bf16 pairs, in the order of the inputs
__device__ __forceinline__ void decode_bf16(uint32_t codes, uint32_t factor, uint32_t (&pair)[4]) {
  const uint32_t odd = codes >> 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t two = __byte_perm(codes, odd, 0x4400 + j * 0x1111) & 0x000f000fu;
    pair[j] = mul_bf16x2(two * 0x1040 & 0x81c081c0u, factor);  // the sign to bit 15, the rest to 8 .. 6: times 2^-126
  }
}

template <bool kGated>
__device__ __forceinline__ void copy_wide(const SortedParams& p, WideShared& s) {
  const int thread = threadIdx.x - kMathThreads;
  const int x_row = thread / 8, chunk = thread % 8, row = thread / 2, piece = thread % 2;
  const uint32_t x_place = shared_address(&s.stages[0].x[x_row][(chunk ^ (x_row & 1)) * 16]);
  const uint32_t code_place = shared_address(&s.stages[0].codes[row][piece * 16]);
  const int units = p.outputs / wide_outputs(kGated);
  StagePlace<kWideStages> at;
  int slot = 1;
  for (unsigned unit = blockIdx.x;; unit += gridDim.x) {
    const SortedTile tile = tile_of(p, unit / units);
    if (tile.count == 0) {
      s.empty[at.stage].wait(at.phase ^ 1);  // one more, since those who multiply load a stage ahead
      s.full[at.stage].arrive_copies();
      break;
    }
    const int first = p.first + unit % units * wide_outputs(kGated);
    // of the tile's rows r and r + 128; gate and up
    const int row0 = kGated ? p.gate_row + first : first, to128 = kGated ? p.up_row - p.gate_row : 128;
    // where this thread reads: 16 bytes of codes, of scales, of inputs
    const uint32_t codes = tile.expert * static_cast<uint32_t>(p.w.expert_bytes / 16) + (row0 + row) * (p.inputs / 32) + piece;
    const uint8_t* scales = p.w.scales + tile.expert * p.w.expert_scale_bytes + static_cast<int64_t>(row0 + thread) * (p.inputs / 32);
    uint32_t x[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int position = tile.begin + min(x_row + 16 * k, tile.count - 1);
      x[k] = static_cast<uint32_t>(kGated ? p.pairs[position] / p.topk : position) * p.x_row_chunks + chunk;
    }
#pragma unroll 1
    for (int i = 0; i < p.inputs / kPassInputs; ++i) {
      s.empty[at.stage].wait(at.phase ^ 1);
      if (i % kScaleStages == 0) {
        slot ^= 1;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const uint8_t* const from = scales + static_cast<int64_t>(k * to128) * (p.inputs / 32) + i * 2;
          for (int b = 0; b < min(16, p.inputs / 32 - i * 2); b += 4) cp_async<4>(s.scales[slot][thread + k * 128] + b, from + b);
        }
      }
      const uint32_t stage = at.stage * sizeof(WideStage);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint16_t* const from = p.x + (x[k] + i * 8) * int64_t{8};
        cp_async_16_if(x_row + 16 * k < tile.count, x_place + stage + k * 16 * 128, reinterpret_cast<uint64_t>(from), true);
        const uint32_t of_codes = codes + (k % 2 * 64 + k / 2 * to128) * (p.inputs / 32) + i * 2;
        cp_async_16(code_place + stage + k * 64 * 32, reinterpret_cast<uint64_t>(p.w.codes + of_codes * int64_t{16}), true);
      }
      s.full[at.stage].arrive_copies();
      at.advance();
    }
  }
}

// What a lane has of a stage's weights, as they are stored: of each of its four weight rows 16 codes and their scale.
struct Stored {
  uint2 codes[2][2];
  uint32_t scale[2][2];

  template <int kSecond, int kNext>
  __device__ __forceinline__ void load(uint32_t of_codes, uint32_t of_scales) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        codes[m][r] = load_shared_u32x2(of_codes + (m * kNext + r * kSecond) * 32);
        scale[m][r] = load_shared_u8(of_scales + (m * kNext + r * kSecond) * 16);
      }
    }
  }
};

using Operand = uint32_t[2][2][4];  // of 32 weight rows and half of a lane's inputs: [mma's rows][mma's inputs]

__device__ __forceinline__ void decode_half(const Stored& stored, int half, Operand& a) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t pair[4];
      decode_bf16(half == 0 ? stored.codes[m][r].x : stored.codes[m][r].y, factor_of(stored.scale[m][r]), pair);
      a[m][0][r] = pair[0], a[m][0][2 + r] = pair[1], a[m][1][r] = pair[2], a[m][1][2 + r] = pair[3];
    }
  }
}

// 8 pairs of x, of the half of a lane's inputs that the first of them has at `x`
template <int kTogether>
__device__ __forceinline__ void load_pairs_of_half(uint4 (&b)[kTogether], uint32_t x) {
#pragma unroll
  for (int n = 0; n < kTogether; ++n) b[n] = load_shared(x + n * 8 * 128);
}

// sums += 32 weight rows x kTiles times 8 pairs x that half. `b` has the first of x already.
template <int kTiles, int kTogether>
__device__ __forceinline__ void multiply_half(float (&sums)[2][kTiles][4], const Operand& a, uint32_t x, uint4 (&b)[kTogether]) {
#pragma unroll
  for (int from = 0; from < kTiles; from += kTogether) {
    if (from > 0) load_pairs_of_half(b, x + from * 8 * 128);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
#pragma unroll
        for (int m = 0; m < 2; ++m) mma_bf16(sums[m][from + n], a[m][k], k == 0 ? b[n].x : b[n].z, k == 0 ? b[n].y : b[n].w);
      }
    }
  }
}

// What a warp that multiplies has from unit to unit: the stage that it multiplies, the one behind it, of which the weights are loaded
// already, and those weights, of which the first half is decoded.
struct WideAhead {
  StagePlace<kWideStages> here, next;
  Stored stored;
  Operand first;
  uint32_t scales = 0;  // of the stage behind, from the first on
};

template <bool kGated, int kTiles>
__device__ __forceinline__ void multiply_unit(const SortedParams& p, WideShared& s, WideAhead& ahead, uint32_t codes, uint32_t scales,
                                              const SortedTile& tile, int output) {
  constexpr int kSecond = kGated ? 128 : 8, kNext = kGated ? 8 : 16;  // rows of the tile: of an mma's second half, of the next mma
  constexpr int kTogether = kTiles % 4 == 0 ? 4 : 2;
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, warp = uniform(threadIdx.x / 32), stages = p.inputs / kPassInputs;
  const uint32_t x = shared_address(&s.stages[0].x[g][q * 32 + (g & 1) * 16]);
  int pairs[2] = {};
  if constexpr (!kGated) load_pairs_of(pairs, p, tile);
  float sums[2][kTiles][4] = {};
#pragma unroll 1
  for (int i = 1; i <= stages; ++i) {
    const uint32_t here_x = x + ahead.here.stage * sizeof(WideStage), next = ahead.next.stage * sizeof(WideStage);
    uint4 b[kTogether];
    load_pairs_of_half(b, here_x);
    s.full[ahead.next.stage].wait(ahead.next.phase);
    const Stored stored = ahead.stored;
    const bool new_slot = i % kScaleStages == 0 || i == stages;
    ahead.scales = new_slot ? (ahead.scales & sizeof(s.scales[0])) ^ sizeof(s.scales[0]) : ahead.scales + 2;
    ahead.stored.load<kSecond, kNext>(codes + next, scales + ahead.scales);
    Operand second;
    decode_half(stored, 1, second);
    multiply_half(sums, ahead.first, here_x, b);
    load_pairs_of_half(b, here_x ^ 16);
    decode_half(ahead.stored, 0, ahead.first);
    multiply_half(sums, second, here_x ^ 16, b);
    __syncwarp();
    if (lane == 0) s.empty[ahead.here.stage].arrive();
    ahead.here = ahead.next;
    ahead.next.advance();
  }
  // 16 pairs at a time through shared memory: of each the warp's outputs in bf16
  constexpr int kOutputs = wide_outputs(kGated) / 8, kPitch = kGated ? 24 : 36;
  uint16_t (&area)[16][kPitch] = reinterpret_cast<uint16_t (&)[16][kPitch]>(s.out[warp]);
#pragma unroll
  for (int from = 0; from < kTiles; from += 2) {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float value[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) value[i] = sums[m][from + n][i] * (1ull << kDown);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          uint16_t* const to = &area[n * 8 + 2 * q + r][m * (kOutputs / 2) + g];
          if constexpr (kGated) {
            to[0] = swiglu(value[r], value[2 + r], p.limit);
          } else {
            const uint32_t both = pack_bf16x2(value[r], value[2 + r]);
            to[0] = static_cast<uint16_t>(both), to[8] = static_cast<uint16_t>(both >> 16);
          }
        }
      }
    }
    __syncwarp();
    const int place = from * 8 + lane / 2, row = kGated ? tile.begin + place : __shfl_sync(0xffffffffu, pairs[from / 4], from % 4 * 8 + lane / 2);
    if (place < tile.count) {
      uint16_t* const to = (kGated ? p.h : p.y16) + static_cast<int64_t>(row) * p.outputs;
      const uint2* const read = reinterpret_cast<const uint2*>(&area[lane / 2][lane % 2 * (kOutputs / 2)]);
#pragma unroll
      for (int k = 0; k < kOutputs / 16; ++k) {
        const uint2 low = read[2 * k], high = read[2 * k + 1];
        *reinterpret_cast<uint4*>(to + output + warp * kOutputs + lane % 2 * (kOutputs / 2) + k * 8) = make_uint4(low.x, low.y, high.x, high.y);
      }
    }
  }
}

template <bool kGated>
__device__ __forceinline__ void multiply_wide_units(const SortedParams& p, WideShared& s) {
  const int units = p.outputs / wide_outputs(kGated);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * (kGated ? 16 : 32) + lane / 4;
  const uint32_t codes = shared_address(&s.stages[0].codes[row][lane % 4 * 8]), scales = shared_address(&s.scales[0][row][lane % 4 / 2]);
  WideAhead ahead;
  ahead.next.advance();
  s.full[0].wait(0);
  ahead.stored.load<kGated ? 128 : 8, kGated ? 8 : 16>(codes, scales);
  decode_half(ahead.stored, 0, ahead.first);
  each_unit<wide_outputs(kGated)>(p, units, [&](const SortedTile& tile, int output, auto tiles) {
    multiply_unit<kGated, tiles.value>(p, s, ahead, codes, scales, tile, output);
  });
}

template <bool kGated>
__global__ void __launch_bounds__(kSortedThreads, 1) wide_kernel(const SortedParams p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  WideShared& s = *reinterpret_cast<WideShared*>(shared_memory);
  if (threadIdx.x < kWideStages) {
    s.full[threadIdx.x].init(kCopyThreads);
    s.empty[threadIdx.x].init(kMathThreads / 32);
  }
  __syncthreads();
  pdl_wait();
  pdl_trigger();
  if (threadIdx.x >= kMathThreads) {
    set_registers<104, false>();  // each copy's address in registers of its own: the next one waits until it has been read
    copy_wide<kGated>(p, s);
  } else {
    set_registers<200, true>();  // 104 + 2 x 200 = 3 x 168, of four warps each
    multiply_wide_units<kGated>(p, s);
  }
}

}  // namespace dsv4::mxfp4_moe

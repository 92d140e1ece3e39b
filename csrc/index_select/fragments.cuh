// From the bytes of queries and keys to MMA fragments, for each format.
//
// m16n8k16 (k32 for FP8): 16 entries by 8 heads. A lane holds entries lane/4 and lane/4 + 8 of the tile and head lane/4, and of the
// dimensions those of its quarter t = lane%4. Which dimensions these are is free as long as queries and keys agree: FP8 takes bytes
// 16 t and 64 + 16 t, FP4 bytes 16 t (one scale group), so that a lane loads its part of an entry by whole 16-byte vectors.
#pragma once

#include "../device/memory.cuh"
#include "../device/mma.cuh"
#include "../device/numbers.cuh"
#include "config.h"

namespace dsv4::index_select {

constexpr int kSteps = 8;   // MMA steps over the dimensions, 16 each (FP8 MMA: two at a time)

// Four registers of a tile's, operand A of one MMA.
__device__ __forceinline__ const uint32_t (&operand(const uint32_t* a))[4] { return reinterpret_cast<const uint32_t (&)[4]>(*a); }
// Nibbles i and i + 4 of eight E2M1 as a bf16 pair times 2^-126 (E2M1's own subnormal lands on bf16's).
template <int i>
__device__ __forceinline__ uint32_t widen_fp4(uint32_t nibbles) {
  const uint32_t magnitude = i < 2 ? nibbles << (6 - 4 * i) : nibbles >> (4 * i - 6);
  return (magnitude & 0x01c001c0u) | (nibbles << (12 - 4 * i) & 0x80008000u);
}

// The keys' scales enter as 2^(byte - 127 - 64), so that a pair times 2^-126 is reached by one multiplication; exact for bytes 66 to 192.
constexpr float kFp4Rescale = 18446744073709551616.f;  // 2^64
__device__ __forceinline__ uint32_t fp4_key_scale(uint32_t byte) {
  const uint32_t half = min(byte, 192u) + 62 << 7;
  return half | half << 16;
}

// Registers of kTiles tiles of 16 entries.
template <Format kFormat, int kTiles>
struct Keys {
  static constexpr int kWords = kFormat == Format::kFp8 ? 16 : 32;  // of a tile
  uint32_t a[kTiles][kWords];
};
template <Format kFormat, int kTiles>
struct RawKeys {
  uint4 v[kTiles][2][Traits<kFormat>::kVectors];
  uint32_t group_scales[kFormat == Format::kFp4 ? kTiles : 1][2];  // FP4: of this lane's dimensions
};

// Loads the tiles of one page from entry `first` on; `page` is nullptr for one outside the pool, which reads as zeros.
template <Format kFormat, int kTiles>
__device__ __forceinline__ void load_keys(RawKeys<kFormat, kTiles>& raw, const uint8_t* page, int first) {
  using T = Traits<kFormat>;
  const int lane = threadIdx.x & 31, entry = first + lane / 4, t = lane & 3;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = entry + 16 * tile + 8 * half;
#pragma unroll
      for (int v = 0; v < T::kVectors; ++v)
        raw.v[tile][half][v] = page == nullptr ? make_uint4(0, 0, 0, 0) : load_16_now(page + i * T::kKeyBytes + 64 * v + 16 * t);
      if constexpr (kFormat == Format::kFp4) raw.group_scales[tile][half] = page == nullptr ? 0 : load_now(page + kPage * T::kKeyBytes + 4 * i + t);
    }
  }
}

template <Format kFormat, int kTiles>
__device__ __forceinline__ void widen_keys(Keys<kFormat, kTiles>& keys, const RawKeys<kFormat, kTiles>& raw) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int v = 0; v < Traits<kFormat>::kVectors; ++v) {
        const uint4 x = raw.v[tile][half][v];
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          uint32_t* a = keys.a[tile];
          if constexpr (kFormat == Format::kFp8) {
            const int word = 4 * v + w;
            a[4 * (word / 2) + 2 * (word % 2) + half] = words[w];
          } else if constexpr (kFormat == Format::kFp8Half) {
            const int step = 4 * v + w;
            e4m3x4_to_f16(words[w], a[4 * step + half], a[4 * step + 2 + half]);
          } else {
            const uint32_t scale = fp4_key_scale(raw.group_scales[tile][half]);
            a[8 * w + half] = mul_bf16x2(widen_fp4<0>(words[w]), scale);
            a[8 * w + 2 + half] = mul_bf16x2(widen_fp4<1>(words[w]), scale);
            a[8 * w + 4 + half] = mul_bf16x2(widen_fp4<2>(words[w]), scale);
            a[8 * w + 6 + half] = mul_bf16x2(widen_fp4<3>(words[w]), scale);
          }
        }
      }
    }
  }
}

// Scores of one block of 8 heads: c[tile] += keys . queries, over all dimensions in order.
template <Format kFormat, int kTiles>
__device__ __forceinline__ void multiply(float (&c)[kTiles][4], const Keys<kFormat, kTiles>& keys, const uint8_t* q, int head_block) {
  const int lane = threadIdx.x & 31;
  constexpr int kLoads = kFormat == Format::kFp8 ? 2 : 4;
  const uint4* fragments = reinterpret_cast<const uint4*>(q) + head_block * kLoads * 32 + lane;
#pragma unroll
  for (int load = 0; load < kLoads; ++load) {
    const uint4 b = fragments[32 * load];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if constexpr (kFormat == Format::kFp8) {
        mma_fp8(c[tile], operand(&keys.a[tile][8 * load]), b.x, b.y);
      } else if constexpr (kFormat == Format::kFp8Half) {
        mma_f16(c[tile], operand(&keys.a[tile][8 * load]), b.x, b.y);
      } else {
        mma_bf16(c[tile], operand(&keys.a[tile][8 * load]), b.x, b.y);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if constexpr (kFormat == Format::kFp8) {
        mma_fp8(c[tile], operand(&keys.a[tile][8 * load + 4]), b.z, b.w);
      } else if constexpr (kFormat == Format::kFp8Half) {
        mma_f16(c[tile], operand(&keys.a[tile][8 * load + 4]), b.z, b.w);
      } else {
        mma_bf16(c[tile], operand(&keys.a[tile][8 * load + 4]), b.z, b.w);
      }
    }
  }
}

// ---- queries: one 16-byte piece of a head to its place among the fragments

__device__ __forceinline__ float fp4_value(uint32_t nibble) {
  return __uint_as_float((nibble & 8) << 28 | (nibble & 7) << 22) * 8.507059173023462e37f;  // 2^126
}
__device__ __forceinline__ uint32_t fp4_query_pair(uint32_t nibbles, int i, float scale) {
  return pack_bf16x2(fp4_value(nibbles >> (4 * i)) * scale, fp4_value(nibbles >> (4 * i + 16)) * scale);
}

template <Format kFormat>
__device__ __forceinline__ void stage_query_piece(uint8_t* q, int head, int piece, uint4 x, uint32_t head_scales) {
  const int block = head / 8, lane = (head % 8) * 4 + piece % 4, half = piece / 4;
  uint4* fragments = reinterpret_cast<uint4*>(q);
  if constexpr (kFormat == Format::kFp8) {
    fragments[(block * 2 + half) * 32 + lane] = x;
  } else if constexpr (kFormat == Format::kFp8Half) {
    uint4 low, high;
    e4m3x4_to_f16(x.x, low.x, low.y);
    e4m3x4_to_f16(x.y, low.z, low.w);
    e4m3x4_to_f16(x.z, high.x, high.y);
    e4m3x4_to_f16(x.w, high.z, high.w);
    fragments[(block * 4 + 2 * half) * 32 + lane] = low;
    fragments[(block * 4 + 2 * half + 1) * 32 + lane] = high;
  } else {
    const uint32_t byte = head_scales >> (8 * piece) & 255;
    const float scale = __uint_as_float(byte == 0 ? 0x00400000u : byte << 23);
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int w = 0; w < 4; ++w)
      fragments[(block * 4 + w) * 32 + lane] = make_uint4(fp4_query_pair(words[w], 0, scale), fp4_query_pair(words[w], 1, scale),
                                                          fp4_query_pair(words[w], 2, scale), fp4_query_pair(words[w], 3, scale));
  }
}

}  // namespace dsv4::index_select

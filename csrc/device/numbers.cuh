// Conversions and arithmetic, one wrapper for each instruction.
#pragma once

#include <cstdint>

#include "../numbers.h"

namespace dsv4 {

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
// a warp-uniform non-negative value, in a uniform register
__device__ __forceinline__ int uniform(int v) { return static_cast<int>(__reduce_max_sync(0xffffffffu, static_cast<unsigned>(v))); }

// four E4M3 bytes to two f16 pairs, exact
__device__ __forceinline__ void e4m3x4_to_f16(uint32_t bytes, uint32_t& low, uint32_t& high) {
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }" : "=r"(low), "=r"(high) : "r"(bytes));
}
// `value` where the bits of kMask are set, else `other`: one instruction, where the compiler makes two of the expression
template <uint32_t kMask>
__device__ __forceinline__ uint32_t choose_bits(uint32_t value, uint32_t other) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(d) : "r"(value), "r"(other), "n"(kMask));
  return d;
}
// Four of the eight bytes of `low` and `high`, by the nibbles of kBytes; of 8 and more its sign, eight times.
template <uint32_t kBytes>
__device__ __forceinline__ uint32_t choose_bytes(uint32_t low, uint32_t high) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "n"(kBytes));
  return d;
}
__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint32_t pack_f16x2(float low, float high) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ uint32_t pack_bf16x2(float low, float high) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
// A weight scale as it is stored: the bits of a float32 (4 bytes), or a UE8M0 byte, 2^(byte - 127), 255 NaN.
__device__ __forceinline__ float block_scale(uint32_t stored, int bytes) {
  if (bytes == 4) return __uint_as_float(stored);
  return __uint_as_float(stored == 0 ? 0x00400000u : stored == 255 ? 0x7fc00000u : stored << 23);
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 2^d for an integral d <= 0; 0 below the normal range. Adding 2^23 leaves the integer in the low bits.
__device__ __forceinline__ float pow2_exact(float d) { return __uint_as_float(__float_as_uint(fmaxf(d + 127.f, 0.f) + 8388608.f) << 23); }
__device__ __forceinline__ float4 add(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ uint32_t max_abs_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("{ .reg .b32 t; abs.bf16x2 t, %2; max.bf16x2 %0, %1, t; }" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

}  // namespace dsv4

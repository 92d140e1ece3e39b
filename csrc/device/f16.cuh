// f16 numbers, one wrapper for each instruction.
#pragma once

#include <cstdint>

namespace dsv4 {

__device__ __forceinline__ float2 floats_of_f16x2(uint32_t pair) {
  float2 v;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(v.x), "=f"(v.y) : "r"(pair));
  return v;
}

}  // namespace dsv4

// A vector of this card's term: as it is, or with the addition that was left to the boundary.
#pragma once

#include "../device/memory.cuh"
#include "../device/terms.cuh"
#include "config.h"
#include "term.h"

namespace dsv4::mhc {

// Vector `at` of x [rows, hidden], of so many rows.
__device__ __forceinline__ uint4 load_term(const uint16_t* x, const Term& term, int64_t at, int64_t rows) {
  if (term.partial != nullptr) {
    float4 low[kTermSplits], high[kTermSplits];
#pragma unroll
    for (int s = 0; s < kTermSplits; ++s) {
      const float4* const from = reinterpret_cast<const float4*>(term.partial + s * rows * kFlashHidden + at * kLaneColumns);
      low[s] = load_from_l2(from), high[s] = load_from_l2(from + 1);
    }
    const uint2 four = rounded(merged(low)), more = rounded(merged(high));
    return make_uint4(four.x, four.y, more.x, more.y);
  }
  const uint4 own = load_from_l2(x + at * kLaneColumns);
  return term.routed == nullptr ? own : with_routed(own, load_from_l2(term.routed + at * kLaneColumns), term.scaling);
}

// The same in two steps: what is asked for, and what it comes to. Meanwhile a thread asks for other things.
struct TermParts {
  float4 low[kTermSplits], high[kTermSplits];

  __device__ __forceinline__ void load(const uint16_t* x, const Term& term, int64_t at, int64_t rows) {
    if (term.partial != nullptr) {
#pragma unroll
      for (int s = 0; s < kTermSplits; ++s) {
        const float4* const from = reinterpret_cast<const float4*>(term.partial + s * rows * kFlashHidden + at * kLaneColumns);
        low[s] = load_from_l2(from), high[s] = load_from_l2(from + 1);
      }
    } else {
      low[0] = load_from_l2(reinterpret_cast<const float4*>(x + at * kLaneColumns));
      high[0] = load_from_l2(reinterpret_cast<const float4*>(term.routed + at * kLaneColumns));
    }
  }
  __device__ __forceinline__ uint4 added(const Term& term) {
    if (term.partial == nullptr) return with_routed(bits(low[0]), bits(high[0]), term.scaling);
    const uint2 four = rounded(merged(low)), more = rounded(merged(high));
    return make_uint4(four.x, four.y, more.x, more.y);
  }

 private:
  static __device__ __forceinline__ uint4 bits(const float4& v) {
    return make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
  }
};

}  // namespace dsv4::mhc

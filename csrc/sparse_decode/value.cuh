// The value team: weights V, folded into the accumulator of the row.
#pragma once

#include "fold.cuh"
#include "roles.cuh"
#include "work.cuh"

namespace dsv4::sparse_decode {

// Exponents of this warp's tile relative to the leaf's greatest, for the weights: f16 pairs [k step][candidates 2j, 2j + 1 and + 8].
struct ValueScales {
  uint32_t pair[2][2];
  float greatest;  // the greatest exponent and 2^-kWeightLog2, as a factor
};

__device__ __forceinline__ ValueScales load_value_scales(uint32_t address, bool rotary) {
  ValueScales v = {{{0, 0}, {0, 0}}, 1.f};
  if (rotary) return v;
  const int byte = load_shared_u8(address), j = threadIdx.x & 3;
  const int greatest = __reduce_max_sync(0xffffffffu, byte);
  const int d = byte - greatest;  // <= 0
  const uint32_t half = d >= -14 ? (d + 15) << 10 : (d >= -24 ? 1u << (24 + d) : 0u);  // 2^d in f16, below 2^-24 zero
  const uint32_t both = half | __shfl_down_sync(0xffffffffu, half, 1) << 16;
#pragma unroll
  for (int step = 0; step < 2; ++step)
#pragma unroll
    for (int k = 0; k < 2; ++k) v.pair[step][k] = __shfl_sync(0xffffffffu, both, 16 * step + 8 * k + 2 * j);
  v.greatest = __int_as_float(max(greatest - kWeightLog2, 0) << 23);
  return v;
}

// raw operands of two segments of an E4M3 tile: [k step]
using RawValues = uint32_t[2][4];
// two segments of this warp's tile: [k step][segment][tile of the segment][2]
using Values = uint32_t[2][2][2][2];

__device__ __forceinline__ void load_raw(uint32_t rows, int two, RawValues& r) {
#pragma unroll
  for (int step = 0; step < 2; ++step) ldmatrix_x4_trans(r[step], rows + step * 16 * kRowPitch + two * 32);
}
__device__ __forceinline__ void convert(const RawValues& r, Values& v) {
#pragma unroll
  for (int step = 0; step < 2; ++step)
#pragma unroll
    for (int k = 0; k < 4; ++k)  // (candidate, candidate + 1) of the even and of the odd dimensions
      e4m3x4_to_f16(__byte_perm(r[step][k], 0, 0x3120), v[step][k >> 1][0][k & 1], v[step][k >> 1][1][k & 1]);
}
__device__ __forceinline__ void load_rotary(uint32_t rows, int two, Values& v) {
  uint32_t r[4];
#pragma unroll
  for (int step = 0; step < 2; ++step)
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      ldmatrix_x4_trans(r, rows + step * 16 * kRowPitch + (2 * two + s) * 32);
#pragma unroll
      for (int k = 0; k < 4; ++k) v[step][s][k >> 1][k & 1] = r[k];
    }
}

// acc of two segments += (weights * values) * b
template <bool kRotary>
__device__ __forceinline__ void accumulate(const uint32_t (&a)[2][4], const Values& v, float b0, float b1, int two, Accumulator& acc) {
  float x[2][2][4] = {};  // [segment][tile of the segment]
#pragma unroll
  for (int step = 0; step < 2; ++step)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (kRotary) {
        mma_bf16(x[k >> 1][k & 1], a[step], v[step][k >> 1][k & 1][0], v[step][k >> 1][k & 1][1]);
      } else {
        mma_f16(x[k >> 1][k & 1], a[step], v[step][k >> 1][k & 1][0], v[step][k >> 1][k & 1][1]);
      }
    }
#pragma unroll
  for (int s = 0; s < 2; ++s)
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float(&to)[2][4] = acc[2 * two + s];
        to[0][2 * t + c] = fmaf(x[s][t][c], b0, to[0][2 * t + c]);
        to[1][2 * t + c] = fmaf(x[s][t][2 + c], b1, to[1][2 * t + c]);
      }
}

// the leaf's weights as operands of the second product and its fold factors; the accumulator is rescaled
struct Weights {
  uint32_t a[2][4];
  float b0, b1;

  __device__ __forceinline__ void load(uint32_t weights, const float2* factors, Accumulator& acc) {
    const int g = threadIdx.x >> 2 & 7;
#pragma unroll
    for (int step = 0; step < 2; ++step) ldmatrix_x4(a[step], weights + step * 32);
    const float2 factor0 = factors[g], factor1 = factors[g + 8];
    b0 = factor0.y;
    b1 = factor1.y;
    if (__any_sync(0xffffffffu, factor0.x != 1.f || factor1.x != 1.f)) {
#pragma unroll
      for (int s = 0; s < 4; ++s)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          acc[s][0][k] *= factor0.x;
          acc[s][1][k] *= factor1.x;
        }
    }
  }
  __device__ __forceinline__ void scale(const ValueScales& scales) {
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
      for (int k = 0; k < 4; ++k) a[step][k] = mul_f16x2(a[step][k], scales.pair[step][k >> 1]);
    b0 *= scales.greatest;
    b1 *= scales.greatest;
  }
};

// the whole row is in registers: normalise and write
__device__ __forceinline__ void store_output(const Params& p, const SharedMemoryPlan& sm, int row, int group, int tile, bool rotary,
                                             const Accumulator& acc) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = group * kBlockHeads + g + 8 * half;
    if (head >= p.heads) continue;
    const float f = sm.output_factor[g + 8 * half];
    uint16_t* dst = p.out + row * p.out_stride_row + head * p.out_stride_head;
#pragma unroll
    for (int segment = 0; segment < 4; ++segment) {
      const float4 v = in_dimension_order(acc[segment][half], rotary);
      const uint2 o = make_uint2(pack_bf16x2(v.x * f, v.y * f), pack_bf16x2(v.z * f, v.w * f));
      uint16_t* at = dst + dimension_of(tile, segment, j, 0);
      if (rotary) {
        *reinterpret_cast<uint32_t*>(at) = o.x;
        *reinterpret_cast<uint32_t*>(at + 8) = o.y;
      } else {
        *reinterpret_cast<uint2*>(at) = o;
      }
    }
  }
}

template <bool kSplit, bool kRotary>
__device__ __forceinline__ void run_value_team(const Params& p, SharedMemoryPlan& sm, const Work& w, int group, int tile) {
  const int lane = threadIdx.x & 31;
  const Stage& stage0 = sm.stages[0];
  const uint32_t rows = shared_address(&stage0.rows[lane & 15][tile * kTileDim + (lane >> 4) * 16]);
  const uint32_t scale_bytes = shared_address(&stage0.scales[lane][tile]);
  const uint32_t weights_f16 = shared_address(&sm.weights_f16[0][lane & 15][(lane >> 4) * 16]);
  const uint32_t weights_bf16 = shared_address(&sm.weights_bf16[0][lane & 15][(lane >> 4) * 16]);
  const uint32_t full = shared_address(&sm.full[0]), empty = shared_address(&sm.empty[0]);
  const uint32_t weighed = shared_address(&sm.weighed[0]), folded = shared_address(&sm.folded[0]);
  Accumulator acc = {};
  Ring ring;
  int leaf = w.first_leaf;
  for (;;) {
    for (const int end = min(leaf + w.fold_leaves, w.end_leaf); leaf < end; ++leaf) {
      const int offset = ring.stage * static_cast<int>(sizeof(Stage)), buffer = ring.buffer() * static_cast<int>(sizeof(sm.weights_f16[0]));
      RawValues raw;
      Values v;
      ValueScales scales;
      mbarrier_wait(full + ring.stage * 8, ring.stage_phase);
      if (kRotary) {
        load_rotary(rows + offset, 0, v);
      } else {
        scales = load_value_scales(scale_bytes + offset, false);
        load_raw(rows + offset, 0, raw);
        convert(raw, v);
        load_raw(rows + offset, 1, raw);
      }
      mbarrier_wait(weighed + ring.buffer() * 8, ring.buffer_phase());
      Weights weights;
      weights.load((kRotary ? weights_bf16 : weights_f16) + buffer, sm.factors[ring.buffer()], acc);
      if (!kRotary) weights.scale(scales);
      accumulate<kRotary>(weights.a, v, weights.b0, weights.b1, 0, acc);
      if (kRotary) {
        load_rotary(rows + offset, 1, v);
      } else {
        convert(raw, v);
      }
      if (lane == 0) {
        mbarrier_arrive(folded + ring.buffer() * 8);
        mbarrier_arrive(empty + ring.stage * 8);
      }
      accumulate<kRotary>(weights.a, v, weights.b0, weights.b1, 1, acc);
      ring.advance();
    }
    const bool last = leaf == w.end_leaf;
    if (w.whole_row && (kSplit || w.units == 1)) break;
    if (!w.whole_row) {
      store_vectors(partial_of(p, item_slot(), w.unit_before(leaf)), tile, kRotary, acc);
    } else if constexpr (!kSplit) {
      float* partial = partial_of(p, item_slot(), 0);
      unit_sync();  // the factors of the unit are there
      if (leaf > w.fold_leaves) fold_vectors(partial, sm, tile, kRotary, acc);
      if (!last) store_vectors(partial, tile, kRotary, acc);
    }
    if (last) break;
#pragma unroll
    for (int k = 0; k < 32; ++k) acc[k >> 3][k >> 2 & 1][k & 3] = 0.f;
  }
  if (w.whole_row) {
    math_sync();  // the output factors are there
    store_output(p, sm, w.row, group, tile, kRotary, acc);
  }
}

}  // namespace dsv4::sparse_decode

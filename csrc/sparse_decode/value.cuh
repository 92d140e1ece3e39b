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

__device__ __forceinline__ ValueScales load_value_scales(uint32_t address) {
  ValueScales v;
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

// This warp's tile of a leaf, as it comes from shared memory: E4M3 bytes [two segments][k step], or bf16 [segment][k step].
template <bool kRotary>
struct Values {
  uint32_t r[kRotary ? 4 : 2][2][4];

  __device__ __forceinline__ void load(uint32_t rows, int i) {
#pragma unroll
    for (int step = 0; step < 2; ++step) ldmatrix_x4_trans(r[i][step], rows + step * 16 * kRowPitch + i * 32);
  }
  // a segment's two tiles as operands of a k step: for E4M3 (candidate, candidate + 1) of the even and of the odd dimensions
  __device__ __forceinline__ void operands(int segment, int step, uint32_t (&b)[2][2]) const {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (kRotary) {
        b[0][k] = r[segment][step][k];
        b[1][k] = r[segment][step][2 + k];
      } else {
        e4m3x4_to_f16(__byte_perm(r[segment >> 1][step][2 * (segment & 1) + k], 0, 0x3120), b[0][k], b[1][k]);
      }
    }
  }
  static __device__ __forceinline__ void multiply(float (&x)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[2][2]) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      if (kRotary) {
        mma_bf16(x[t], a, b[t][0], b[t][1]);
      } else {
        mma_f16(x[t], a, b[t][0], b[t][1]);
      }
    }
  }
  // acc of a segment += (weights * values) * b
  __device__ __forceinline__ void accumulate(int segment, const uint32_t (&a)[2][4], float b0, float b1, Accumulator& acc) const {
    float x[2][4] = {};  // [tile of the segment]
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t b[2][2];
      operands(segment, step, b);
      multiply(x, a[step], b);
    }
    add_segment(x, b0, b1, acc[segment]);
  }
  static __device__ __forceinline__ void add_segment(const float (&x)[2][4], float b0, float b1, float (&acc)[2][4]) {
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        acc[0][2 * t + c] = fmaf(x[t][c], b0, acc[0][2 * t + c]);
        acc[1][2 * t + c] = fmaf(x[t][2 + c], b1, acc[1][2 * t + c]);
      }
  }
};

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
__device__ __forceinline__ void store_output(const Params& p, const float (&output_factors)[kBlockHeads], int row, int group, int tile, bool rotary,
                                             const Accumulator& acc) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = group * kBlockHeads + g + 8 * half;
    if (head >= p.heads) continue;
    const float f = output_factors[g + 8 * half];
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
__device__ __forceinline__ void run_value_team(const Params& p, SharedMemoryPlan& sm, int tile) {
  const int lane = threadIdx.x & 31;
  const Stage& stage0 = sm.stages[0];
  const uint32_t rows = shared_address(&stage0.rows[lane & 15][tile * kTileDim + (lane >> 4) * 16]);
  const uint32_t scale_bytes = shared_address(&stage0.scales[lane][tile]);
  const uint32_t weights_at = shared_address(&(kRotary ? sm.weights_bf16 : sm.weights_f16)[0][lane & 15][(lane >> 4) * 16]);
  const TeamBarriers& barriers = sm.barriers;
  Accumulator acc = {};
  math_sync();  // the work is there
  const Work& w = sm.work;
  if (w.is_empty()) return;
  Ring ring;
  for (;;) {
    for (const int end = w.unit_end(w.first_leaf + ring.i) - w.first_leaf; ring.i < end;) {
      const int offset = ring.stage * static_cast<int>(sizeof(Stage)), buffer = ring.buffer() * static_cast<int>(sizeof(sm.weights_f16[0]));
      Values<kRotary> values;
      ValueScales scales;
      barriers.full(ring.stage).wait(ring.stage_phase);
      if (!kRotary) scales = load_value_scales(scale_bytes + offset);
      values.load(rows + offset, 0);
      values.load(rows + offset, 1);
      if (kRotary) {
        values.load(rows + offset, 2);
        values.load(rows + offset, 3);
      }
      __syncwarp();
      if (elect_one()) barriers.free(ring.stage).arrive();  // the leaf is in registers
      barriers.weighed(ring.buffer()).wait(ring.buffer_phase());
      Weights weights;
      weights.load(weights_at + buffer, sm.factors[ring.buffer()], acc);
      __syncwarp();
      if (elect_one()) barriers.folded(ring.buffer()).arrive();
      if (!kRotary) weights.scale(scales);
#pragma unroll
      for (int segment = 0; segment < 4; ++segment) values.accumulate(segment, weights.a, weights.b0, weights.b1, acc);
      ring.advance();
    }
    const int leaf = w.first_leaf + ring.i;
    const bool last = leaf == w.end_leaf;
    if (w.fold_leaves == 0) break;
    if (!w.whole_row<kSplit>()) {
      store_vectors(partial_of(p, item_slot(), w.unit_before(leaf)), tile, kRotary, acc);
    } else if constexpr (!kSplit) {
      float* partial = partial_of(p, item_slot(), 0);
      unit_sync();  // the factors of the unit are there
      if (leaf > w.fold_leaves) fold_vectors(partial, sm.unit_factors[w.unit_buffer(leaf)], tile, kRotary, acc);
      if (!last) store_vectors(partial, tile, kRotary, acc);
    }
    if (last) break;
#pragma unroll
    for (int k = 0; k < 32; ++k) acc[k >> 3][k >> 2 & 1][k & 3] = 0.f;
  }
  if (w.whole_row<kSplit>()) {
    math_sync();  // the output factors are there
    store_output(p, sm.output_factor, block_row(), block_group(), tile, kRotary, acc);
  }
}

}  // namespace dsv4::sparse_decode

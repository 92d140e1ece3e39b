// The score team: q K.
#pragma once

#include "fold.cuh"
#include "roles.cuh"
#include "work.cuh"

namespace dsv4::sparse_decode {

// q of this warp's tile as m16k16 operands: [k step], f16 for an E4M3 tile, bf16 for the rotary tile
using QueryTile = uint32_t[4][4];

__device__ __forceinline__ void load_query(const Params& p, int row, int group, int tile, bool rotary, QueryTile& q) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
  // the dimensions in order, or for E4M3 in the order in which ldmatrix hands out pairs of bytes
  const int first = tile * kTileDim + (rotary ? 2 : 4) * j, second = first + (rotary ? 8 : 2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = group * kBlockHeads + g + 8 * half;
    const uint16_t* src = p.q + row * p.q_stride_row + head * p.q_stride_head;
    const bool live = head < p.heads;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      q[s][half] = q[s][2 + half] = 0;
      load_where(live, q[s][half], src + first + 16 * s);
      load_where(live, q[s][2 + half], src + second + 16 * s);
    }
  }
}

// the greatest magnitude of each head over this warp's tile, to shared memory
__device__ __forceinline__ void publish_query_amax(QueryAmax& q_amax, int tile, const QueryTile& q) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t amax2 = 0;
#pragma unroll
    for (int s = 0; s < 4; ++s) amax2 = max_abs_bf16x2(max_abs_bf16x2(amax2, q[s][half]), q[s][half + 2]);
    float amax = fmaxf(bf16_low(amax2), bf16_high(amax2));
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
    if ((lane & 3) == 0) q_amax[tile][(lane >> 2) + 8 * half] = amax;
  }
}

// power of two that takes the head's greatest magnitude to 2^7..2^8: f16 then holds every bf16 down to 2^-24 of it
__device__ __forceinline__ int query_exponent(const QueryAmax& q_amax, int head) {
  float amax = 0.f;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) amax = fmaxf(amax, q_amax[t][head]);
  const int exponent = __float_as_uint(amax) >> 23;
  return exponent == 0 || exponent == 0xff ? 0 : min(max(7 + 127 - exponent, -100), 100);
}

__device__ __forceinline__ void scale_query(const QueryAmax& q_amax, bool rotary, QueryTile& q) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float scale = __int_as_float((query_exponent(q_amax, (lane >> 2) + 8 * half) + 127) << 23);
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int k = 0; k < 4; k += 2) {
        uint32_t& v = q[s][half + k];
        const float low = bf16_low(v) * scale, high = bf16_high(v) * scale;
        v = rotary ? pack_bf16x2(low, high) : pack_f16x2(low, high);
      }
  }
}

// The first product, of this warp's tile by the leaf's candidates, two columns of eight at a time. `rows`, `scales`, `store` are addresses.
__device__ __forceinline__ void multiply(uint32_t rows, uint32_t scales, uint32_t store, bool rotary, const QueryTile& q) {
#pragma unroll
  for (int first = 0; first < 4; first += 2) {
    float dot[2][4] = {}, scale[2][2] = {{1.f, 1.f}, {1.f, 1.f}};
    uint32_t r[2][4], low, high;
#pragma unroll
    for (int n = 0; n < 2; ++n) ldmatrix_x4(r[n], rows + (first + n) * 8 * kRowPitch);
    if (rotary) {
#pragma unroll
      for (int s = 0; s < 4; ++s) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          mma_bf16(dot[n], q[s], r[n][2 * (s & 1)], r[n][2 * (s & 1) + 1]);
          if (s == 1) ldmatrix_x4(r[n], rows + (first + n) * 8 * kRowPitch + kTileDim);
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) scale[n][c] = __uint_as_float(load_shared_u8(scales + ((first + n) * 8 + c) * kScaleBytes) << 23);
#pragma unroll
      for (int s = 0; s < 4; ++s)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          e4m3x4_to_f16(r[n][s], low, high);
          mma_f16(dot[n], q[s], low, high);
        }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_shared_f32x2((store ^ ((first + n) * 8 * 4)) + half * 8 * kLeaf * 4, dot[n][2 * half] * scale[n][0],
                           dot[n][2 * half + 1] * scale[n][1]);
  }
}

template <bool kSplit>
__device__ __forceinline__ void run_score_team(const Params& p, SharedMemoryPlan& sm, int tile) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
  const bool rotary = tile == kNumNopeTiles;
  QueryTile q;
  load_query(p, block_row(), block_group(), tile, rotary, q);
  block_sync();
  publish_query_amax(sm.q_amax, tile, q);
  math_sync();  // the greatest magnitudes of q and the work are there
  const Work& w = sm.work;
  if (w.is_empty()) return;
  scale_query(sm.q_amax, rotary, q);
  const Stage& stage0 = sm.stages[0];
  const uint32_t rows = shared_address(&stage0.rows[lane & 7][tile * kTileDim + (lane >> 3) * 16]);
  const uint32_t scales = shared_address(&stage0.scales[2 * j][tile]);
  const uint32_t store = shared_address(&sm.scores[0][tile][g][(2 * j) ^ ((g & 3) << 3)]);
  const TeamBarriers& barriers = sm.barriers;
  constexpr int kStageBytes = sizeof(Stage), kScoreBytes = sizeof(sm.scores[0]);
  Ring ring;
  for (int leaf = w.first_leaf; leaf < w.end_leaf; ++leaf) {
    const int buffer = ring.buffer();
    barriers.full(ring.stage).wait(ring.stage_phase);
    barriers.scores_read(buffer).wait(ring.buffer_phase() ^ 1);
    multiply(rows + ring.stage * kStageBytes, scales + ring.stage * kStageBytes, store + buffer * kScoreBytes, rotary, q);
    __syncwarp();
    if (lane == 0) {
      barriers.scored(buffer).arrive();
      barriers.free(ring.stage).arrive();
    }
    ring.advance();
  }
  if (w.whole_row<kSplit>()) math_sync();  // the output factors are there
}

}  // namespace dsv4::sparse_decode

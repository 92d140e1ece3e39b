// Sparse MLA decode, one softmax over two FP8 paged caches and a sink:
//
//   s_i = scale <q_h, k_i>     o_h = sum_i exp(s_i) k_i / (sum_i exp(s_i) + exp(sink_h))     over the valid candidates i
//
// A block has 16 heads of one row and a range of its leaves (config.h). Its eight warps own 64 of the 512 dimensions each: seven
// E4M3 tiles and the rotary tile, so that one exponent per candidate and warp scales a whole tile.
//   gather   rows to shared memory by cp.async, two stages; masked candidates become zeros
//   scores   warp pair p multiplies tiles 2p and 2p+1 for half of the leaf; E4M3 is converted to f16 in registers (exact), its
//            exponent applied to the fp32 dot product; q is scaled per head by a power of two into f16's range
//   softmax  16 threads a head; the reference is an integer, so that every later rescaling is exact
//   values   warp t multiplies tile t; the exponents, relative to the leaf's greatest, go into the f16 weights
//   fold     accumulator = accumulator * 2^a + leaf * 2^b: the same bits whether a block folds in registers or partials in memory
// Not supported: head dimension other than 512, caches other than the 584-byte layout.
#pragma once

#include "config.h"
#include "device.cuh"
#include "sparse_decode.h"

namespace dsv4::sparse_decode {

constexpr float kEmpty = -1.0e9f;           // softmax reference of a set without valid candidates
constexpr long long kPatienceClocks = 200000;  // how long a merging block waits for the others before it leaves its share to the last

__device__ __forceinline__ uint32_t divide(uint32_t n, const FastDivisor& d) {
  return d.multiplier == 0 ? n : __umulhi(n, d.multiplier) >> d.shift;
}

// What part of a row this block has.
struct Work {
  int row, group;
  int main_length, extra_length;
  int main_leaves, leaves, fold_leaves, units;
  int first_leaf, end_leaf;
};

struct Fold {
  float reference = kEmpty;  // log2, integral
  float sum = 0.f;           // of 2^(x - reference)
};

// returns 2^(old - new) and 2^(other - new), and folds
__device__ __forceinline__ float2 fold_stats(Fold& fold, float other_reference, float other_sum) {
  const float reference = fmaxf(fold.reference, other_reference);
  const float2 factor = make_float2(pow2_exact(fold.reference - reference), pow2_exact(other_reference - reference));
  fold.sum = fmaf(other_sum, factor.y, fold.sum * factor.x);
  fold.reference = reference;
  return factor;
}

// The output factor 1 / (sum + 2^(sink - reference)); 0 where nothing is valid or the sink is infinite.
__device__ __forceinline__ float output_factor(const Params& p, int head, const Fold& fold) {
  float total = fold.sum;
  if (p.attn_sink != nullptr) total += exp2f(p.attn_sink[head] * 1.4426950408889634f - fold.reference);
  return fold.sum > 0.f ? 1.f / total : 0.f;
}
__device__ __forceinline__ float lse_of(const Fold& fold) {
  return fold.sum > 0.f ? (fold.reference + log2f(fold.sum)) * 0.6931471805599453f : __int_as_float(0x7f800000);
}

__device__ __forceinline__ int load_length(const Cache& c, int row) {
  return c.topk_length == nullptr ? c.width : min(max(c.topk_length[row], 0), c.width);
}

// slot of candidate `lane_row` of `leaf`, -1 where there is none
__device__ __forceinline__ int load_slot(const Params& p, int row, int main_length, int main_leaves, int extra_length, int leaf,
                                         int lane_row) {
  const bool in_main = leaf < main_leaves;
  const int position = (in_main ? leaf : leaf - main_leaves) * kLeaf + lane_row;
  const int32_t* indices = in_main ? p.main.indices + row * p.main.indices_stride : p.extra.indices + row * p.extra.indices_stride;
  return position < (in_main ? main_length : extra_length) ? indices[position] : -1;
}

__device__ __forceinline__ void gather_leaf(const Params& p, SharedMemoryPlan& sm, int stage, bool in_main, int slot) {
  const int lane_row = threadIdx.x >> 3, piece = threadIdx.x & 7;
  const uint8_t* pages = in_main ? p.main.pages : p.extra.pages;
  const int64_t page_bytes = in_main ? p.main.page_bytes : p.extra.page_bytes;
  const int64_t num_slots = in_main ? p.main.num_slots : p.extra.num_slots;
  const bool valid = slot >= 0 && slot < num_slots;
  const uint32_t index = valid ? slot : 0;
  const uint32_t page_size = in_main ? p.main.page_size.divisor : p.extra.page_size.divisor;
  const uint32_t page = in_main ? divide(index, p.main.page_size) : divide(index, p.extra.page_size);
  const uint32_t entry = index - page * page_size;
  const uint8_t* page_start = pages + page * page_bytes;
  const uint8_t* data = page_start + static_cast<int64_t>(entry) * kDataBytes + piece * 16;
  const uint32_t dst = shared_address(&sm.rows[stage][lane_row][piece * 16]);
#pragma unroll
  for (int i = 0; i < 4; ++i) cp_async_16(dst + i * 128, data + i * 128, valid ? 16 : 0);
  if (piece < 4) {
    cp_async_16(dst + 512, data + 512, valid ? 16 : 0);
  } else if (piece == 4) {
    const uint8_t* scales = page_start + static_cast<int64_t>(page_size) * kDataBytes + entry * kScaleBytes;
    cp_async_8(shared_address(&sm.rows[stage][lane_row][kRowScale]), scales, valid ? 8 : 0);
    sm.valid[stage][lane_row] = valid;
  }
  cp_async_commit();
}

// q of this warp's tile pair as m16k16 operands: [tile of the pair][k step], f16 for E4M3 tiles, bf16 for the rotary tile
struct QueryTiles {
  uint32_t a[2][4][4];
};

__device__ __forceinline__ void load_query(const Params& p, const Work& w, QueryTiles& q) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3, pair = threadIdx.x >> 6;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = w.group * kBlockHeads + g + 8 * half;
    const uint16_t* src = p.q + w.row * p.q_stride_row + head * p.q_stride_head;
    const bool live = head < p.heads;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const uint16_t* base = src + (2 * pair + tile) * kTileDim;
      const bool rotary = 2 * pair + tile == kNumNopeTiles;
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        uint2 v = make_uint2(0, 0);
        if (live) {
          if (rotary) {  // k = the dimensions in order
            v.x = *reinterpret_cast<const uint32_t*>(base + 16 * s + 2 * j);
            v.y = *reinterpret_cast<const uint32_t*>(base + 16 * s + 8 + 2 * j);
          } else {       // k in the order in which ldmatrix hands out pairs of bytes
            v = *reinterpret_cast<const uint2*>(base + 16 * s + 4 * j);
          }
        }
        q.a[tile][s][half] = v.x;
        q.a[tile][s][2 + half] = v.y;
      }
    }
  }
}

// the greatest magnitude of each head over this warp's tiles, to shared memory
__device__ __forceinline__ void publish_query_amax(SharedMemoryPlan& sm, const QueryTiles& q) {
  const int lane = threadIdx.x & 31, pair = threadIdx.x >> 6;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float amax = 0.f;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int s = 0; s < 4; ++s)
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
          const uint32_t v = q.a[tile][s][half + k];
          amax = fmaxf(amax, fmaxf(fabsf(bf16_low(v)), fabsf(bf16_high(v))));
        }
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
    if ((lane & 3) == 0 && (threadIdx.x & 32) == 0) sm.q_amax[pair][(lane >> 2) + 8 * half] = amax;
  }
}

// power of two that takes the head's greatest magnitude to 2^7..2^8: f16 then holds every bf16 down to 2^-24 of it
__device__ __forceinline__ int query_exponent(const SharedMemoryPlan& sm, int head) {
  float amax = 0.f;
#pragma unroll
  for (int pair = 0; pair < kTilePairs; ++pair) amax = fmaxf(amax, sm.q_amax[pair][head]);
  const int exponent = (__float_as_uint(amax) >> 23) & 0xff;
  return exponent == 0 || exponent == 0xff ? 0 : min(max(7 + 127 - exponent, -100), 100);
}

__device__ __forceinline__ void scale_query(const SharedMemoryPlan& sm, QueryTiles& q) {
  const int lane = threadIdx.x & 31, pair = threadIdx.x >> 6;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float scale = __int_as_float((query_exponent(sm, (lane >> 2) + 8 * half) + 127) << 23);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const bool rotary = 2 * pair + tile == kNumNopeTiles;
#pragma unroll
      for (int s = 0; s < 4; ++s)
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
          uint32_t& v = q.a[tile][s][half + k];
          const float low = bf16_low(v) * scale, high = bf16_high(v) * scale;
          v = rotary ? pack_bf16x2(low, high) : pack_f16x2(low, high);
        }
    }
  }
}

// this warp's part of the scores: two tiles, 16 of the leaf's candidates
__device__ __forceinline__ void score_leaf(SharedMemoryPlan& sm, int stage, const QueryTiles& q) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
  const int pair = threadIdx.x >> 6, first = (threadIdx.x >> 5 & 1) * 16;
  const bool rotary = pair == kTilePairs - 1;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int column = first + n * 8;
    const uint32_t address = shared_address(&sm.rows[stage][column + (lane & 7)][2 * pair * kTileDim + (lane >> 3) * 16]);
    float dot[2][4] = {};
    uint32_t r[4], low, high;
    ldmatrix_x4(r, address);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      e4m3x4_to_f16(r[s], low, high);
      mma_f16(dot[0], q.a[0][s], low, high);
    }
    ldmatrix_x4(r, address + kTileDim);
    if (rotary) {
      mma_bf16(dot[1], q.a[1][0], r[0], r[1]);
      mma_bf16(dot[1], q.a[1][1], r[2], r[3]);
      ldmatrix_x4(r, address + 2 * kTileDim);
      mma_bf16(dot[1], q.a[1][2], r[0], r[1]);
      mma_bf16(dot[1], q.a[1][3], r[2], r[3]);
    } else {
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        e4m3x4_to_f16(r[s], low, high);
        mma_f16(dot[1], q.a[1][s], low, high);
      }
    }
    float scale[2][2];  // [column 2j, 2j+1][tile]
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t bytes = *reinterpret_cast<const uint16_t*>(&sm.rows[stage][column + 2 * j + c][kRowScale + 2 * pair]);
      scale[c][0] = __uint_as_float((bytes & 0xffu) << 23);
      scale[c][1] = rotary ? 1.f : __uint_as_float((bytes >> 8) << 23);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 v;
      v.x = fmaf(dot[1][2 * half], scale[0][1], dot[0][2 * half] * scale[0][0]);
      v.y = fmaf(dot[1][2 * half + 1], scale[1][1], dot[0][2 * half + 1] * scale[1][0]);
      *reinterpret_cast<float2*>(&sm.scores[pair][g + 8 * half][(column + 2 * j) ^ ((g & 3) << 3)]) = v;
    }
  }
}

// softmax weights of the leaf, and its fold into the running statistics of this thread's head
__device__ __forceinline__ void weigh_leaf(SharedMemoryPlan& sm, int stage, float logit_scale, Fold& fold) {
  const int head = threadIdx.x >> 4, pair = threadIdx.x & 15;
  float2 x = make_float2(0.f, 0.f);
#pragma unroll
  for (int t = 0; t < kTilePairs; ++t) {
    const float2 part = *reinterpret_cast<const float2*>(&sm.scores[t][head][(2 * pair) ^ ((head & 3) << 3)]);
    x.x += part.x;
    x.y += part.y;
  }
  const uint32_t valid = *reinterpret_cast<const uint16_t*>(&sm.valid[stage][2 * pair]);
  x.x = valid & 0x00ffu ? x.x * logit_scale : kEmpty;
  x.y = valid & 0xff00u ? x.y * logit_scale : kEmpty;
  float reference = fmaxf(x.x, x.y);
#pragma unroll
  for (int d = 8; d > 0; d >>= 1) reference = fmaxf(reference, __shfl_xor_sync(0xffffffffu, reference, d));
  reference = ceilf(reference);
  const float p0 = valid & 0x00ffu ? exp2_approx(x.x - reference) : 0.f;
  const float p1 = valid & 0xff00u ? exp2_approx(x.y - reference) : 0.f;
  float sum = p0 + p1;
#pragma unroll
  for (int d = 8; d > 0; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  constexpr float up = 1 << kWeightLog2;
  *reinterpret_cast<uint32_t*>(&sm.weights_f16[head][4 * pair]) = pack_f16x2(p0 * up, p1 * up);
  *reinterpret_cast<uint32_t*>(&sm.weights_bf16[head][4 * pair]) = pack_bf16x2(p0, p1);
  const float2 factor = fold_stats(fold, reference, sum);
  if (pair == 0) sm.factors[head] = factor;
}

// Exponents of this warp's tile relative to the leaf's greatest, as f16 pairs for the weights: [k step][candidates 2j, 2j+1 and + 8].
struct ValueScales {
  uint32_t pair[2][2];
  float greatest;  // 2^greatest / 2^kWeightLog2, as a factor
};

__device__ __forceinline__ ValueScales load_value_scales(const SharedMemoryPlan& sm, int stage) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int byte = sm.rows[stage][lane][kRowScale + warp];
  const int greatest = __reduce_max_sync(0xffffffffu, byte);
  const int d = byte - greatest;  // <= 0
  const uint32_t half = d >= -14 ? (d + 15) << 10 : (d >= -24 ? 1u << (24 + d) : 0u);  // 2^d in f16, below 2^-24 zero
  const uint32_t both = half | __shfl_down_sync(0xffffffffu, half, 1) << 16;
  ValueScales scales;
#pragma unroll
  for (int step = 0; step < 2; ++step)
#pragma unroll
    for (int k = 0; k < 2; ++k) scales.pair[step][k] = __shfl_sync(0xffffffffu, both, 16 * step + 8 * k + 2 * (lane & 3));
  scales.greatest = __int_as_float(max(greatest - kWeightLog2, 0) << 23);
  return scales;
}

// accumulator [segment of 16 dimensions][head g, g + 8][4]
using Accumulator = float[4][2][4];

__device__ __forceinline__ void fold_segment(Accumulator& acc, int segment, const float (&x)[2][4], bool rotary, float b0, float b1) {
  // E4M3 tiles come as (even, odd) dimensions, the rotary tile as two runs of eight; four registers of a head stay together
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    if (rotary) {
      acc[segment][0][c] = fmaf(x[0][c], b0, acc[segment][0][c]);
      acc[segment][0][2 + c] = fmaf(x[1][c], b0, acc[segment][0][2 + c]);
      acc[segment][1][c] = fmaf(x[0][2 + c], b1, acc[segment][1][c]);
      acc[segment][1][2 + c] = fmaf(x[1][2 + c], b1, acc[segment][1][2 + c]);
    } else {
      acc[segment][0][2 * c] = fmaf(x[0][c], b0, acc[segment][0][2 * c]);
      acc[segment][0][2 * c + 1] = fmaf(x[1][c], b0, acc[segment][0][2 * c + 1]);
      acc[segment][1][2 * c] = fmaf(x[0][2 + c], b1, acc[segment][1][2 * c]);
      acc[segment][1][2 * c + 1] = fmaf(x[1][2 + c], b1, acc[segment][1][2 * c + 1]);
    }
  }
}

// acc = acc * 2^a + weights * values of this warp's tile
__device__ __forceinline__ void accumulate_leaf(const SharedMemoryPlan& sm, int stage, const ValueScales& scales, Accumulator& acc) {
  const int lane = threadIdx.x & 31, g = lane >> 2, warp = threadIdx.x >> 5;
  const bool rotary = warp == kNumNopeTiles;
  const uint8_t* weights = rotary ? &sm.weights_bf16[0][0] : &sm.weights_f16[0][0];
  uint32_t a[2][4];
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    ldmatrix_x4(a[step], shared_address(weights) + (lane & 15) * kWeightPitch + step * 32 + (lane >> 4) * 16);
    if (!rotary) {
      a[step][0] = mul_f16x2(a[step][0], scales.pair[step][0]);
      a[step][1] = mul_f16x2(a[step][1], scales.pair[step][0]);
      a[step][2] = mul_f16x2(a[step][2], scales.pair[step][1]);
      a[step][3] = mul_f16x2(a[step][3], scales.pair[step][1]);
    }
  }
  const float2 factor0 = sm.factors[g], factor1 = sm.factors[g + 8];
  if (__any_sync(0xffffffffu, factor0.x != 1.f || factor1.x != 1.f)) {
#pragma unroll
    for (int segment = 0; segment < 4; ++segment)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        acc[segment][0][k] *= factor0.x;
        acc[segment][1][k] *= factor1.x;
      }
  }
  const float scale = rotary ? 1.f : scales.greatest;
  const float b0 = factor0.y * scale, b1 = factor1.y * scale;
  const uint32_t address = shared_address(&sm.rows[stage][lane & 15][warp * kTileDim + (lane >> 4) * 16]);
#pragma unroll
  for (int two = 0; two < 2; ++two) {  // segments 2 two, 2 two + 1
    float x[2][2][4] = {};
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t r[4];
      if (rotary) {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          ldmatrix_x4_trans(r, address + step * 16 * kRowPitch + (2 * two + s) * 32);
          mma_bf16(x[s][0], a[step], r[0], r[1]);
          mma_bf16(x[s][1], a[step], r[2], r[3]);
        }
      } else {
        ldmatrix_x4_trans(r, address + step * 16 * kRowPitch + two * 32);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          uint32_t even0, odd0, even1, odd1;  // (candidate, candidate + 1) of the even and the odd dimensions
          e4m3x4_to_f16(__byte_perm(r[2 * s], 0, 0x3120), even0, odd0);
          e4m3x4_to_f16(__byte_perm(r[2 * s + 1], 0, 0x3120), even1, odd1);
          mma_f16(x[s][0], a[step], even0, even1);
          mma_f16(x[s][1], a[step], odd0, odd1);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) fold_segment(acc, 2 * two + s, x[s], rotary, b0, b1);
  }
}

// first of the two dimensions of element pair `half` of a thread's four at (warp, segment, j)
__device__ __forceinline__ int dimension_of(int warp, int segment, int j, int half) {
  return warp * kTileDim + 16 * segment + (warp == kNumNopeTiles ? 2 * j + 8 * half : 4 * j + 2 * half);
}

__device__ __forceinline__ float* partial_of(const Params& p, int slot, int unit) {
  return p.partials + (static_cast<int64_t>(slot) * p.unit_slots + unit) * kPartialFloats;
}

__device__ __forceinline__ void store_partial(float* partial, const Accumulator& acc, const Fold& fold) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float4* vectors = reinterpret_cast<float4*>(partial) + warp * 256 + lane;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float(&v)[4] = acc[i >> 1][i & 1];
    __stcg(vectors + i * 32, make_float4(v[0], v[1], v[2], v[3]));
  }
  if ((threadIdx.x & 15) == 0)
    __stcg(reinterpret_cast<float2*>(partial + 4 * kPartialVectors) + (threadIdx.x >> 4), make_float2(fold.reference, fold.sum));
}

// acc = partial * factor.x + acc * factor.y
__device__ __forceinline__ void fold_partial(const float* partial, const SharedMemoryPlan& sm, Accumulator& acc) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const float2 factor[2] = {sm.factors[lane >> 2], sm.factors[(lane >> 2) + 8]};
  const float4* vectors = reinterpret_cast<const float4*>(partial) + warp * 256 + lane;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 old = __ldcg(vectors + i * 32);
    float(&v)[4] = acc[i >> 1][i & 1];
    const float2 f = factor[i & 1];
    v[0] = fmaf(v[0], f.y, old.x * f.x);
    v[1] = fmaf(v[1], f.y, old.y * f.x);
    v[2] = fmaf(v[2], f.y, old.z * f.x);
    v[3] = fmaf(v[3], f.y, old.w * f.x);
  }
}

// the whole row is in registers: normalise and write
__device__ __forceinline__ void store_output(const Params& p, SharedMemoryPlan& sm, const Work& w, const Accumulator& acc,
                                             const Fold& fold) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, j = lane & 3;
  const int stats_head = w.group * kBlockHeads + (threadIdx.x >> 4);
  if ((threadIdx.x & 15) == 0) {
    const bool live = stats_head < p.heads;
    sm.factors[threadIdx.x >> 4].x = live ? output_factor(p, stats_head, fold) : 0.f;
    if (live && p.lse != nullptr) p.lse[static_cast<int64_t>(w.row) * p.heads + stats_head] = lse_of(fold);
  }
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = w.group * kBlockHeads + g + 8 * half;
    if (head >= p.heads) continue;
    const float f = sm.factors[g + 8 * half].x;
    uint16_t* dst = p.out + w.row * p.out_stride_row + head * p.out_stride_head;
#pragma unroll
    for (int segment = 0; segment < 4; ++segment) {
      const float(&v)[4] = acc[segment][half];
      const uint2 o = make_uint2(pack_bf16x2(v[0] * f, v[1] * f), pack_bf16x2(v[2] * f, v[3] * f));
      uint16_t* at = dst + dimension_of(warp, segment, j, 0);
      if (warp == kNumNopeTiles) {
        *reinterpret_cast<uint32_t*>(at) = o.x;
        *reinterpret_cast<uint32_t*>(at + 8) = o.y;
      } else {
        *reinterpret_cast<uint2*>(at) = o;
      }
    }
  }
}

// Counts this block's units in. Returns the shares of the merge (a bit per participating block) that this block has to do once every
// unit is there. Blocks wait for the last one, so that all of them merge; one that waits too long leaves its share to the last (other
// kernels may keep blocks of this one off the device for as long as they like, without a deadlock).
__device__ __forceinline__ uint32_t arrive_and_wait(uint32_t* control, uint32_t generation, int my_units, int units, int participant) {
  const uint32_t bit = 1u << participant;
  __threadfence();
  const bool last = atomicAdd(&control[0], my_units) + my_units == units;
  __threadfence();
  if (last) {
    control[0] = 0;
    store_release(&control[1], generation + 1);
    __threadfence();
    return bit | atomicExch(&control[2], 0);
  }
  const long long start = clock64();
  while (load_acquire(&control[1]) == generation) {
    if (clock64() - start > kPatienceClocks) {
      atomicOr(&control[2], bit);
      __threadfence();
      if (load_acquire(&control[1]) == generation) return 0;  // the last block finds the bit
      return atomicAnd(&control[2], ~bit) & bit;               // it may have looked before the bit was set
    }
  }
  return bit;
}

struct MergeMemory {  // over the gathered rows, which nobody needs any more
  float2 stats[kMaxUnits][kBlockHeads];
  float2 factors[kMaxUnits][kBlockHeads];
  float reference[kBlockHeads];
};
static_assert(sizeof(MergeMemory) <= sizeof(SharedMemoryPlan::rows), "merge memory");

// folds the units of the row in order, for share `share` of `shares` of the block's heads by dimensions
__device__ __forceinline__ void merge_share(const Params& p, const MergeMemory& mm, const Work& w, const float* partials, int share,
                                            int shares) {
  constexpr int pairs = 2 * kPartialVectors;
  const int end = pairs * (share + 1) / shares;
  for (int e = pairs * share / shares + threadIdx.x; e < end; e += kThreads) {
    const int vector = e >> 1, half = e & 1, lane = vector & 31, i = (vector >> 5) & 7, warp = vector >> 8;
    const int local_head = (lane >> 2) + 8 * (i & 1), head = w.group * kBlockHeads + local_head;
    const float2* src = reinterpret_cast<const float2*>(partials) + e;
    float2 acc = make_float2(0.f, 0.f);
    float sum = 0.f;
    constexpr int batch = 10;
    for (int u0 = 0; u0 < w.units; u0 += batch) {
      float2 v[batch];
#pragma unroll
      for (int k = 0; k < batch; ++k)
        v[k] = u0 + k < w.units ? __ldcg(src + static_cast<int64_t>(u0 + k) * (kPartialFloats / 2)) : make_float2(0.f, 0.f);
#pragma unroll
      for (int k = 0; k < batch; ++k) {
        if (u0 + k < w.units) {
          const float2 f = mm.factors[u0 + k][local_head];
          acc.x = fmaf(v[k].x, f.y, acc.x * f.x);
          acc.y = fmaf(v[k].y, f.y, acc.y * f.x);
          sum = fmaf(mm.stats[u0 + k][local_head].y, f.y, sum * f.x);
        }
      }
    }
    if (head < p.heads) {
      const Fold fold{mm.reference[local_head], sum};
      const float f = output_factor(p, head, fold);
      const int dimension = dimension_of(warp, i >> 1, lane & 3, half);
      *reinterpret_cast<uint32_t*>(p.out + w.row * p.out_stride_row + head * p.out_stride_head + dimension) =
          pack_bf16x2(acc.x * f, acc.y * f);
      if (dimension == 0 && p.lse != nullptr) p.lse[static_cast<int64_t>(w.row) * p.heads + head] = lse_of(fold);
    }
  }
}

// the fold factors of every unit and head, from running maxima
__device__ __forceinline__ void prepare_merge(MergeMemory& mm, const float* partials, int units) {
  for (int i = threadIdx.x; i < units * kBlockHeads; i += kThreads)
    mm.stats[i / kBlockHeads][i % kBlockHeads] =
        __ldcg(reinterpret_cast<const float2*>(partials + (i / kBlockHeads) * static_cast<int64_t>(kPartialFloats) + 4 * kPartialVectors) +
               i % kBlockHeads);
  __syncthreads();
  for (int i = threadIdx.x; i < units * kBlockHeads; i += kThreads) {
    const int unit = i / kBlockHeads, head = i % kBlockHeads;
    float before = kEmpty;
    for (int u = 0; u < unit; ++u) before = fmaxf(before, mm.stats[u][head].x);
    const float own = mm.stats[unit][head].x, after = fmaxf(before, own);
    mm.factors[unit][head] = make_float2(pow2_exact(before - after), pow2_exact(own - after));
    if (unit == units - 1) mm.reference[head] = after;
  }
  __syncthreads();
}

template <bool kSplit>
__device__ __forceinline__ bool plan_work(const Params& p, Work& w, int split) {
  w.main_leaves = (w.main_length + kLeaf - 1) / kLeaf;
  w.leaves = max(w.main_leaves + (w.extra_length + kLeaf - 1) / kLeaf, 1);
  w.main_leaves = max(w.main_leaves, w.extra_length > 0 ? 0 : 1);
  const int unit = unit_leaves(w.leaves * kLeaf);
  w.units = (w.leaves + unit - 1) / unit;
  w.fold_leaves = unit;
  w.first_leaf = 0;
  w.end_leaf = w.leaves;
  if constexpr (kSplit) {
    const int per_block = (w.units + p.splits - 1) / p.splits;
    w.first_leaf = split * per_block * unit;
    w.end_leaf = min((split + 1) * per_block * unit, w.leaves);
  } else if (unit == 1) {  // the left fold of the leaves is the row
    w.fold_leaves = w.leaves;
    w.units = 1;
  }
  return w.first_leaf < w.end_leaf;
}

template <bool kSplit>
__device__ __forceinline__ void run_item(const Params& p, SharedMemoryPlan& sm, int item) {
  const int lane_row = threadIdx.x >> 3;
  Work w;
  w.group = item % p.head_groups;
  const int rest = item / p.head_groups;
  const int split = kSplit ? rest % p.splits : 0;
  w.row = kSplit ? rest / p.splits : rest;
  // the first slot is fetched as if the row were as long as the tensors are wide, beside the lengths; fetched again if not
  w.main_length = p.main.width;
  w.extra_length = p.extra.width;
  const bool guessed = plan_work<kSplit>(p, w, split);
  const int guessed_leaf = w.first_leaf, guessed_main_leaves = w.main_leaves;
  int slot = -1;
  if (guessed) slot = load_slot(p, w.row, w.main_length, w.main_leaves, w.extra_length, w.first_leaf, lane_row);
  w.main_length = load_length(p.main, w.row);
  w.extra_length = load_length(p.extra, w.row);
  uint32_t generation = 0;
  if (kSplit && threadIdx.x == 0)
    generation = load_acquire(p.control + (static_cast<int64_t>(w.row) * p.head_groups + w.group) * kControlWords + 1);
  QueryTiles q;
  load_query(p, w, q);
  if (!plan_work<kSplit>(p, w, split)) return;
  if (!guessed || guessed_leaf != w.first_leaf || (w.first_leaf < w.main_leaves) != (guessed_leaf < guessed_main_leaves) ||
      (w.first_leaf >= w.main_leaves && guessed_main_leaves != w.main_leaves)) {
    slot = load_slot(p, w.row, w.main_length, w.main_leaves, w.extra_length, w.first_leaf, lane_row);
  } else {
    const bool in_main = w.first_leaf < w.main_leaves;
    const int position = (in_main ? w.first_leaf : w.first_leaf - w.main_leaves) * kLeaf + lane_row;
    if (position >= (in_main ? w.main_length : w.extra_length)) slot = -1;
  }
  gather_leaf(p, sm, w.first_leaf & 1, w.first_leaf < w.main_leaves, slot);
  if (w.first_leaf + 1 < w.end_leaf)
    slot = load_slot(p, w.row, w.main_length, w.main_leaves, w.extra_length, w.first_leaf + 1, lane_row);
  publish_query_amax(sm, q);
  if (kSplit && threadIdx.x == 0) sm.generation = generation;
  __syncthreads();
  scale_query(sm, q);
  const float logit_scale = p.scale_log2 * __int_as_float((127 - query_exponent(sm, threadIdx.x >> 4)) << 23);

  Accumulator acc = {};
  Fold fold, row_fold;
  const int item_slot = kSplit ? w.row * p.head_groups + w.group : blockIdx.x;
  int unit = kSplit ? w.first_leaf / w.fold_leaves : 0, left = w.fold_leaves;
  for (int leaf = w.first_leaf; leaf < w.end_leaf; ++leaf) {
    const int stage = leaf & 1;
    cp_async_wait<0>();
    __syncthreads();  // the leaf is there; everybody is done with the one before
    if (leaf + 1 < w.end_leaf) {
      gather_leaf(p, sm, stage ^ 1, leaf + 1 < w.main_leaves, slot);
      if (leaf + 2 < w.end_leaf) slot = load_slot(p, w.row, w.main_length, w.main_leaves, w.extra_length, leaf + 2, lane_row);
    }
    score_leaf(sm, stage, q);
    __syncthreads();
    weigh_leaf(sm, stage, logit_scale, fold);
    const ValueScales scales = load_value_scales(sm, stage);
    __syncthreads();
    accumulate_leaf(sm, stage, scales, acc);
    if (--left > 0 && leaf + 1 < w.end_leaf) continue;
    left = w.fold_leaves;
    if (w.units == 1) break;
    if constexpr (kSplit) {
      store_partial(partial_of(p, item_slot, unit++), acc, fold);
    } else {  // a long row: its running fold lives in this block's slot
      float* partial = partial_of(p, item_slot, 0);
      __syncthreads();  // the factors of the leaf have been read
      const float2 factor = fold_stats(row_fold, fold.reference, fold.sum);
      if ((threadIdx.x & 15) == 0) sm.factors[threadIdx.x >> 4] = factor;
      __syncthreads();
      if (unit++ > 0) fold_partial(partial, sm, acc);
      if (leaf + 1 == w.end_leaf) {
        __syncthreads();
        fold = row_fold;
        break;
      }
      store_partial(partial, acc, fold);
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) acc[i >> 3][(i >> 2) & 1][i & 3] = 0.f;
    fold = Fold{};
  }
  if (!kSplit || w.units == 1) {
    __syncthreads();  // the factors of the last leaf have been read
    store_output(p, sm, w, acc, fold);
    return;
  }
  const int per_block = (w.units + p.splits - 1) / p.splits, participants = (w.units + per_block - 1) / per_block;
  const int my_units = min(per_block, w.units - split * per_block);
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t* control = p.control + static_cast<int64_t>(item_slot) * kControlWords;
    sm.shares = arrive_and_wait(control, sm.generation, my_units, w.units, split);
  }
  __syncthreads();
  uint32_t shares = sm.shares;
  if (shares == 0) return;
  auto& mm = *reinterpret_cast<MergeMemory*>(&sm.rows[0][0][0]);
  const float* partials = partial_of(p, item_slot, 0);
  prepare_merge(mm, partials, w.units);
  for (; shares != 0; shares &= shares - 1) merge_share(p, mm, w, partials, __ffs(shares) - 1, participants);
}

template <bool kSplit>
__global__ void __launch_bounds__(kThreads, kMinBlocksPerSm) sparse_decode_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto& sm = *reinterpret_cast<SharedMemoryPlan*>(shared);
  pdl_wait();
  pdl_trigger();
  if constexpr (kSplit) {
    run_item<true>(p, sm, blockIdx.x);
  } else {
    for (int item = blockIdx.x; item < p.num_items; item += gridDim.x) run_item<false>(p, sm, item);
  }
}

}  // namespace dsv4::sparse_decode

// The softmax team: weights and their statistics.
#pragma once

#include "fold.cuh"
#include "roles.cuh"
#include "score.cuh"
#include "work.cuh"

namespace dsv4::sparse_decode {

// Head of thread `thread` of those that weigh: four lanes have a head. Heads two apart are neighbours, which keeps the loads of the swizzled
// scores free of bank conflicts.
__device__ __forceinline__ int softmax_head(int thread) {
  const int t = thread >> 2;
  return (t & ~3) | (t & 1) << 1 | (t >> 1 & 1);
}

// A thread has eight candidates of its head: 4 q .. 4 q + 3 and 16 + 4 q .. 16 + 4 q + 3.
struct Softmax {
  float x[8];
  uint32_t valid;  // a bit for each of x
  float reference;

  // The sum of the tiles, by pairs of tiles, from a part for each tile or for each pair.
  template <int kParts, int kHeads>
  __device__ __forceinline__ void load(const float (&scores)[kParts][kHeads][kLeaf], int head, uint32_t valid_bits) {
    constexpr int kPairs = kTiles / 2;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = (16 * half + 4 * (threadIdx.x & 3)) ^ ((head & 3) << 3);
        float4 sum = *reinterpret_cast<const float4*>(&scores[pair * kParts / kPairs][head][column]);
        if (kParts == kTiles) sum = add(sum, *reinterpret_cast<const float4*>(&scores[pair * 2 + 1][head][column]));
        float* to = x + 4 * half;
        to[0] = pair == 0 ? sum.x : to[0] + sum.x;
        to[1] = pair == 0 ? sum.y : to[1] + sum.y;
        to[2] = pair == 0 ? sum.z : to[2] + sum.z;
        to[3] = pair == 0 ? sum.w : to[3] + sum.w;
      }
    valid = valid_bits;
  }
  // These of x become NaN.
  __device__ __forceinline__ void spoil(uint32_t bits) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = bits >> i & 1 ? __int_as_float(0x7fffffff) : x[i];
  }
  // x becomes logits in log2, `reference` that of the greatest
  __device__ __forceinline__ void refer(float logit_scale) {
    float steps = 0.f;  // rounded to integers, as bits that order like them; below all of them where masked
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] = valid >> i & 1 ? x[i] * logit_scale : -__int_as_float(0x7f800000);
      steps = fmaxf(steps, fmaf(x[i], 1.f / kReferenceStep, kRounder));
    }
    steps = fmaxf(steps, __shfl_xor_sync(0xffffffffu, steps, 1));
    steps = fmaxf(steps, __shfl_xor_sync(0xffffffffu, steps, 2));
    reference = (steps - kRounder) * kReferenceStep;
  }
  // x becomes the weights
  __device__ __forceinline__ void weigh(float relative_to) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = exp2_approx(x[i] - relative_to);
  }
  template <int kHeads>
  __device__ __forceinline__ void store_f16(uint8_t (&weights)[kHeads][kWeightPitch], int head) const {
    constexpr float up = 1 << kWeightLog2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* from = x + 4 * half;
      *reinterpret_cast<uint2*>(&weights[head][32 * half + 8 * (threadIdx.x & 3)]) =
          make_uint2(pack_f16x2(from[0] * up, from[1] * up), pack_f16x2(from[2] * up, from[3] * up));
    }
  }
  template <int kHeads>
  __device__ __forceinline__ void store_bf16(uint8_t (&weights)[kHeads][kWeightPitch], int head) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* from = x + 4 * half;
      *reinterpret_cast<uint2*>(&weights[head][32 * half + 8 * (threadIdx.x & 3)]) =
          make_uint2(pack_bf16x2(from[0], from[1]), pack_bf16x2(from[2], from[3]));
    }
  }
  // of the head's weights
  __device__ __forceinline__ float total() const {
    float s = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
    s += __shfl_xor_sync(0xffffffffu, s, 1);
    return s + __shfl_xor_sync(0xffffffffu, s, 2);
  }
};

// Folds a finished unit of a long row into the row's statistics, which live in its partial; `fold` becomes the row's so far. `factors`, by
// head: for the value team.
__device__ __forceinline__ void fold_unit_stats(float2 (&factors)[kBlockHeads], float* partial, int head, bool first, Fold& fold) {
  float2* stats = stats_of(partial) + head;
  const float2 old = first ? make_float2(kEmpty, 0.f) : __ldcg(stats);
  const float2 factor = fold_factors(old.x, fold.reference);
  fold = {fmaxf(old.x, fold.reference), fmaf(fold.sum, factor.y, old.y * factor.x)};
  __syncwarp();
  if ((threadIdx.x & 3) == 0) {
    __stcg(stats, make_float2(fold.reference, fold.sum));
    factors[head] = factor;
  }
  __syncwarp();
}

// the bits of a thread's candidates, from a bit each of the leaf's
__device__ __forceinline__ uint32_t valid_of(uint32_t leaf_bits) {
  const uint32_t mine = leaf_bits >> (4 * (threadIdx.x & 3));
  return (mine & 0xfu) | (mine >> 12 & 0xf0u);
}

template <bool kSplit>
__device__ __forceinline__ void run_softmax_team(const Params& p, SharedMemoryPlan& sm) {
  const int lane = threadIdx.x & 31, head = softmax_head(threadIdx.x - 32 * (kValueWarps + kScoreWarps));
  math_sync();  // the greatest magnitudes of q and the work are there
  const Work w = sm.work;
  if (w.is_empty()) return;
  const float logit_scale = p.scale_log2 * __int_as_float((127 - query_exponent(sm.q_amax, head)) << 23);
  const TeamBarriers& barriers = sm.barriers;
  Fold fold = {kEmpty, 0.f};
  Ring ring;
  int leaf = w.first_leaf;
  for (;;) {
    for (const int end = w.unit_end(leaf); leaf < end; ++leaf) {
      const int buffer = ring.buffer();
      Softmax softmax;
      barriers.scored(buffer).wait(ring.buffer_phase());
      softmax.load(sm.scores[buffer], head, valid_of(*reinterpret_cast<const uint32_t*>(sm.valid[ring.i % kMasks])));
      __syncwarp();
      if (lane == 0) barriers.scores_read(buffer).arrive();
      softmax.refer(logit_scale);
      softmax.weigh(softmax.reference);
      const float2 factor = fold_factors(fold.reference, softmax.reference);
      barriers.folded(buffer).wait(ring.buffer_phase() ^ 1);
      softmax.store_f16(sm.weights_f16[buffer], head);
      softmax.store_bf16(sm.weights_bf16[buffer], head);
      if ((lane & 3) == 0) sm.factors[buffer][head] = factor;
      __syncwarp();
      if (lane == 0) barriers.weighed(buffer).arrive();
      fold = {fmaxf(fold.reference, softmax.reference), fmaf(softmax.total(), factor.y, fold.sum * factor.x)};
      ring.advance();
    }
    const bool last = leaf == w.end_leaf;
    if (w.fold_leaves == 0) break;
    if (!w.whole_row<kSplit>()) {
      if ((lane & 3) == 0) __stcg(stats_of(partial_of(p, item_slot(), w.unit_before(leaf))) + head, make_float2(fold.reference, fold.sum));
    } else if constexpr (!kSplit) {
      fold_unit_stats(sm.unit_factors[w.unit_buffer(leaf)], partial_of(p, item_slot(), 0), head, leaf <= w.fold_leaves, fold);
      unit_sync();
    }
    if (last) break;
    fold = {kEmpty, 0.f};
  }
  if (!w.whole_row<kSplit>()) return;
  if ((lane & 3) == 0) {
    const int global_head = block_group() * kBlockHeads + head;
    const bool live = global_head < p.heads;
    sm.output_factor[head] = live ? output_factor(p, global_head, fold) : 0.f;
    if (live && p.lse != nullptr) p.lse[static_cast<int64_t>(block_row()) * p.heads + global_head] = lse_of(fold);
  }
  math_sync();  // the output factors are there
}

}  // namespace dsv4::sparse_decode

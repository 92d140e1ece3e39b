// The experts of a row and their weights. A block has a row, a thread an expert; then the first warp chooses.
//
// Ids, ties and bits are SGLang's, whose Triton kernel the functions below follow instruction by instruction.
#pragma once

#include "../device/barriers.cuh"
#include "../device/numbers.cuh"
#include "router_topk.h"

namespace dsv4::router_topk {

__device__ __forceinline__ float exp_approx(float x) {  // as tl.exp
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(__fmul_rn(x, 1.44269502f)));
  return y;
}
__device__ __forceinline__ float divide_approx(float x, float y) {
  float z;
  asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
__device__ __forceinline__ float sqrt_approx(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// logf's polynomial, for finite x from 1 on: no other case, no branch
__device__ __forceinline__ float log_from_1(float x) {
  const int32_t bits = __float_as_int(x), exponent = (bits - 0x3f2aaaab) & ~0x7fffff;
  const float m = __fadd_rn(__int_as_float(bits - exponent), -1.f);
  float p = fmaf(__int_as_float(0xbe055027), m, __int_as_float(0x3e1039f6));
  p = fmaf(p, m, __int_as_float(0xbdf8cdcc));
  p = fmaf(p, m, __int_as_float(0x3e0f2955));
  p = fmaf(p, m, __int_as_float(0xbe2ad8b9));
  p = fmaf(p, m, __int_as_float(0x3e4ced0b));
  p = fmaf(p, m, __int_as_float(0xbe7fff22));
  p = fmaf(p, m, __int_as_float(0x3eaaaa78));
  p = fmaf(p, m, -0.5f);
  p = fmaf(__fmul_rn(m, p), m, m);
  return fmaf(__fmul_rn(__int2float_rn(exponent), 1.1920928955078125e-7f), 0.693147182f, p);
}

// sqrt(softplus(x))
template <bool kLog1p>
__device__ __forceinline__ float score_of(float x) {
  if constexpr (kLog1p) {
    const float z = exp_approx(-fabsf(x)), u = __fadd_rn(1.f, z);
    const bool exact = u == 1.f;
    const float log1p = divide_approx(__fmul_rn(z, log_from_1(u)), exact ? 1.f : __fadd_rn(u, -1.f));
    return sqrt_approx(__fadd_rn(fmaxf(x, 0.f), exact ? z : log1p));
  } else {
    const float softplus = log_from_1(__fadd_rn(1.f, exp_approx(x)));
    return sqrt_approx(x <= 20.f ? softplus : x);
  }
}
// Greater where the number is, and never 0; NaN is -1e30.
__device__ __forceinline__ uint32_t key_of(float biased) {
  const uint32_t bits = __float_as_uint(biased == biased ? biased : -1e30f);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

// plain: kernels in front write the logits
__device__ __forceinline__ float load_number(const void* p, int64_t at, bool bf16) {
  if (bf16) {
    uint16_t v;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(static_cast<const uint16_t*>(p) + at));
    return bf16_low(v);
  }
  return load_now(static_cast<const float*>(p) + at);
}

// What is in shared memory: of all experts, then of those that are chosen.
template <int kEach>
struct Shared {
  alignas(16) uint32_t keys[32 * kEach];
  float scores[32 * kEach];
  int32_t chosen[kMaxTopk];
};

template <int kCount>
__device__ __forceinline__ uint32_t greatest_of(const uint32_t* keys) {
  if constexpr (kCount == 1) {
    return keys[0];
  } else {
    return max(greatest_of<kCount / 2>(keys), greatest_of<kCount - kCount / 2>(keys + kCount / 2));
  }
}

// By one warp, a lane having kEach experts: the greatest key's first, of equal ones the lowest id's. What a lane would have left is found
// while the lanes are asked.
template <int kEach>
__device__ __forceinline__ void choose(Shared<kEach>& s, int topk) {
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = threadIdx.x % 32;
  const unsigned lower = (1u << lane) - 1;
  uint32_t keys[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) keys[i] = s.keys[lane * kEach + i];
  uint32_t most = greatest_of<kEach>(keys);
#pragma unroll 1
  for (int k = 0; k < topk; ++k) {
    const uint32_t greatest = __reduce_max_sync(kAll, most);
    int slot = kEach - 1;
#pragma unroll
    for (int i = kEach - 2; i >= 0; --i) {
      if (keys[i] == most) slot = i;
    }
    uint32_t left[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) left[i] = slot == i ? 0 : keys[i];
    const uint32_t most_left = greatest_of<kEach>(left);
    const bool has = most == greatest;
    const bool wins = (__ballot_sync(kAll, has) & lower) == 0 && has;
    if (wins) s.chosen[k] = lane * kEach + slot;
    most = wins ? most_left : most;
#pragma unroll
    for (int i = 0; i < kEach; ++i) keys[i] = wins ? left[i] : keys[i];
  }
  __syncwarp();
}

// Lane k has the score of the k-th chosen, or 0. The sum is in the order of the Triton kernel's two lanes of four.
__device__ __forceinline__ float renormalized(float score, bool in_pairs) {
  float v[kMaxTopk];
#pragma unroll
  for (int k = 0; k < kMaxTopk; ++k) v[k] = __shfl_sync(0xffffffffu, score, k);
  const float pairs = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
  const float sum = in_pairs ? pairs : (v[0] + v[1] + v[2] + v[3]) + (v[4] + v[5] + v[6] + v[7]);
  return divide_approx(score, sum > 0.f ? sum : 1.f);
}

template <int kEach, bool kLog1p>
__global__ void __launch_bounds__(32 * kEach) router_topk_kernel(const Params p) {
  __shared__ Shared<kEach> s;
  const int expert = threadIdx.x;
  const bool is_there = expert < p.experts;
  const int64_t row = blockIdx.x;
  if (is_there && expert % 32 == 0) prefetch(static_cast<const char*>(p.bias) + expert * (p.bias_bf16 ? 2 : 4));
  float logit = 0.f, bias = 0.f, weight = 0.f;
  int real_rows = p.rows;
  // once with numbers that do not matter, while the kernel in front runs: so the code is there when it has ended
#pragma unroll 1
  for (bool is_real = false;; is_real = true) {
    const float score = score_of<kLog1p>(logit);
    s.scores[expert] = score;
    s.keys[expert] = is_there ? key_of(score + bias) : 0;
    __syncthreads();
    if (expert < 32) {
      choose(s, p.topk);
      weight = expert < p.topk ? s.scores[s.chosen[expert]] : 0.f;
      if (p.renormalize) weight = renormalized(weight, p.in_pairs);
    }
    if (is_real) break;
    __syncthreads();
    pdl_wait();
    pdl_trigger();
    if (p.real_rows != nullptr) real_rows = load_now(p.real_rows);
    if (is_there) logit = load_number(p.logits, row * p.logits_stride + expert, p.logits_bf16), bias = load_number(p.bias, expert, p.bias_bf16);
  }
  pdl_wait();  // has nothing to wait for: behind it is what is written
  if (expert >= p.topk) return;
  const bool is_padding = row >= real_rows;
  const int64_t at = row * p.topk + expert;
  p.weights[at] = is_padding ? 0.f : weight * p.scale;
  p.ids[at] = is_padding ? -1 : s.chosen[expert];
}

}  // namespace dsv4::router_topk

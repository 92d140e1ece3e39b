// Both products of the experts for few rows: a stream of E2M1 codes from memory through registers into mma.sync.
//
//   gate/up   h[pair] = silu(min(W1 x, limit)) * clamp(W3 x, -limit, limit)
//   down      y[pair] = W2 h[pair]
//   sum       out[row] = routed_scaling * sum over the slots, in their order, of weight * y; for one row a part of down
//
// The grid is what fits on the chip; units (group of pairs, rows of weights) are dealt evenly, so that every
// multiprocessor streams from the start. As soon as a lane has used its weights, it asks for those of its next unit.
// Which pairs are together, and in which kernel, changes no bit: a pair's sums have one order everywhere.
#pragma once

#include <algorithm>

#include "product.cuh"
#include "routing.cuh"
#include "swiglu.cuh"

namespace dsv4::mxfp4_moe {

// This warp's part of the weights: where its lanes read of a unit.
template <int kSlices, int kSteps, bool kGated, int kUnitOutputs>
struct Stream {
  static constexpr int kRowBytes = kSlices * kSteps * 64, kRowScales = kRowBytes / 16;
  const Weights& w;
  uint32_t codes, scales;  // bytes from the first of a unit to this lane's of row g, and to this warp's of row 0
  const int second;

  __device__ Stream(const Params& p, int slice, int subtile) : w(kGated ? p.w13 : p.w2), second(kGated ? p.up_row - p.gate_row : 8) {
    const int lane = threadIdx.x % 32;
    const uint32_t row = kGated ? p.gate_row : subtile * 16;
    codes = (row + lane / 4) * kRowBytes + slice * (kSteps * 64) + lane % 4 * 16;
    scales = row * kRowScales + slice * (kSteps * 4);
  }
  __device__ __forceinline__ From<kSteps, kRowBytes> from(int expert, int tile) const {
    return {w.codes + expert * w.expert_bytes + (codes + tile * static_cast<uint32_t>(kUnitOutputs * kRowBytes)),
            w.scales + expert * w.expert_scale_bytes + (scales + tile * static_cast<uint32_t>(kUnitOutputs * kRowScales)), second};
  }
};

// Of a multiprocessor; on SM120 shared memory does not hold a second one of the large ones, so these may have all registers.
template <typename C>
constexpr int min_blocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  return std::min<int>(C::kMinBlocks, std::max<int>(1, kMaxSharedBytes / sizeof(typename C::Shared)));
#else
  return C::kMinBlocks;
#endif
}

// `sum`: of weight row g + 8 (lane % 2) of the 16 and row `row` of the group
template <typename C>
__device__ __forceinline__ void store(const Params& p, const typename C::Shared& s, int group, int tile, int subtile, int row, float sum) {
  const int lane = threadIdx.x % 32, g = lane / 4;
  const bool valid = row < s.routing.rows[group];
  const int64_t pair = valid ? s.routing.pairs[group][row] : 0;
  if constexpr (C::kGated) {
    const float other = __shfl_xor_sync(0xffffffffu, sum, 1);  // the up row's
    if (lane % 2 != 0 || !valid) return;
    p.h[pair * p.inter + tile * 8 + g] = swiglu(sum, other, p.limit);
  } else {
    if (valid) p.y[pair * p.hidden + tile * C::kUnitOutputs + subtile * 16 + lane % 2 * 8 + g] = sum;
  }
}

// A unit, of up to 2 kPasses pairs: products of all warps, their sum over the slices, stored.
template <typename C, int kPasses, typename From>
__device__ __forceinline__ void run_unit(const Params& p, typename C::Shared& s, Stage<C::kSteps>& stage, Unit at, int turn, bool more,
                                         const From& next) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 2 % 2;
  float sums[kPasses];
  multiply<C::kRows, kPasses>(s.warps[warp], turn % 2, stage, more, next, sums);
  if constexpr (C::kSlices == 1) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) store<C>(p, s, at.group, at.tile, warp, 2 * pass + row, sums[pass]);
  } else {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) s.partial[turn % 2][pass][warp][lane] = sums[pass];
    __syncthreads();
    // another warp has its turn with each unit; a buffer is written again after the next barrier but one
    const int subtile = (warp + turn * C::kSubtiles) % C::kWarps;
    if (subtile >= C::kSubtiles) return;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      float total = s.partial[turn % 2][pass][subtile * C::kSlices][lane];
#pragma unroll
      for (int slice = 1; slice < C::kSlices; ++slice) total += s.partial[turn % 2][pass][subtile * C::kSlices + slice][lane];
      store<C>(p, s, at.group, at.tile, subtile, 2 * pass + row, total);
    }
  }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, min_blocks<C>()) experts_kernel(const Params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  typename C::Shared& s = *reinterpret_cast<typename C::Shared*>(shared_memory);
  const int warp = threadIdx.x / 32, slice = warp % C::kSlices;
  // down starts when all of gate/up have come past their wait: the ids are there, only h is not
  if constexpr (C::kGated) pdl_wait();
  pdl_trigger();
  route<C>(p, s);
  const int tiles = (C::kGated ? p.inter : p.hidden) / C::kUnitOutputs;
  Unit next = share_begin(s.routing, tiles, blockIdx.x);
  const Unit end = share_begin(s.routing, tiles, blockIdx.x + 1);
  const int units = (end.group - next.group) * tiles + end.tile - next.tile;
  if (units == 0) {
    if constexpr (!C::kGated) pdl_wait();  // without it the kernel might be done before gate/up is, and who waits for it would go on
    return;
  }

  const Stream<C::kSlices, C::kSteps, C::kGated, C::kUnitOutputs> stream(p, slice, warp / C::kSlices);
  Stage<C::kSteps> stage;
  stream.from(s.routing.expert[next.group], next.tile).load_all(stage, s.warps[warp].scales[0]);
  if constexpr (!C::kGated) pdl_wait();

  for (int turn = 0; turn < units; ++turn) {
    const Unit at = next;
    if (++next.tile == tiles) next = {next.group + 1, 0};
    const bool more = turn + 1 < units;
    const auto from = stream.from(s.routing.expert[more ? next.group : at.group], next.tile);
    const int rows = s.routing.rows[at.group];
    if (turn == 0 || at.tile == 0) {  // a group: its own slice, which no other warp reads
      __syncwarp();
      for (int row = 0; row < rows; ++row) {
        const int pair = s.routing.pairs[at.group][row];
        const uint16_t* x = C::kGated ? p.x + (pair / p.topk) * p.x_stride : p.h + static_cast<int64_t>(pair) * p.inter;
        stage_row<C::kMayBeExact>(s.warps[warp], row, x + slice * (C::kSteps * kStepInputs), p.exact);
      }
      __syncwarp();
    }
    if (C::kRows == 2 || rows <= 2) {
      run_unit<C, 1>(p, s, stage, at, turn, more, from);
    } else if (C::kRows == 4 || rows <= 4) {
      if constexpr (C::kRows >= 4) run_unit<C, 2>(p, s, stage, at, turn, more, from);
    } else {
      if constexpr (C::kRows >= 8) run_unit<C, 4>(p, s, stage, at, turn, more, from);
    }
  }
}

// Down and the sum for one row, so that y does not go through memory.
template <typename C>
__global__ void __launch_bounds__(C::kThreads, min_blocks<C>()) down_sum_kernel(const Params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  typename C::Shared& s = *reinterpret_cast<typename C::Shared*>(shared_memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slice = warp % C::kSlices, subtile = warp / C::kSlices % C::kSubtiles, first = warp / (C::kSlices * C::kSubtiles);
  const int tile = blockIdx.x;
  if (threadIdx.x < p.topk) s.expert[threadIdx.x] = local_expert<true>(p, threadIdx.x);  // ids are older than gate/up
  __syncthreads();
  const Stream<C::kSlices, C::kSteps, false, C::kOutputs> stream(p, slice, subtile);
  const auto following = [&](int slot) {  // of this warp's slots from `slot` on, the first with a local expert
    while (slot < p.topk && s.expert[slot] < 0) slot += C::kSlots;
    return slot;
  };
  Stage<C::kSteps> stage;
  int slot = following(first);
  if (slot < p.topk) stream.from(s.expert[slot], tile).load_all(stage, s.warps[warp].scales[0]);
  pdl_wait();
  pdl_trigger();
  for (int turn = 0; slot < p.topk; ++turn) {
    const int next = following(slot + C::kSlots);
    const bool more = next < p.topk;
    const auto from = stream.from(s.expert[more ? next : slot], tile);
    __syncwarp();
    stage_row<C::kMayBeExact>(s.warps[warp], 0, p.h + static_cast<int64_t>(slot) * p.inter + slice * (C::kSteps * kStepInputs), p.exact);
    __syncwarp();
    float sum[1];
    multiply<2, 1>(s.warps[warp], turn % 2, stage, more, from, sum);
    if (lane / 2 % 2 == 0) s.partial[slot][slice][subtile * 16 + lane % 2 * 8 + lane / 4] = sum[0];
    slot = next;
  }
  __syncthreads();
  for (int output = threadIdx.x; output < C::kOutputs; output += C::kThreads) {
    float sum = 0.f;
    for (int k = 0; k < p.topk; ++k) {
      if (s.expert[k] < 0) continue;
      float y = s.partial[k][0][output];
#pragma unroll
      for (int i = 1; i < C::kSlices; ++i) y += s.partial[k][i][output];
      sum = fmaf(p.topk_weights[k], y, sum);
    }
    p.out[tile * C::kOutputs + output] = static_cast<uint16_t>(pack_bf16x2(sum * p.routed_scaling, 0.f) & 0xffffu);
  }
}

constexpr int kCombineThreads = 256;

// The sum, where y went through memory.
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const Params p) {
  constexpr int kTogether = 8;
  const int row = blockIdx.x, column = (blockIdx.y * kCombineThreads + threadIdx.x) * 4;
  bool local[kTogether];
  float weight[kTogether];
  const auto load_slots = [&](int begin) {
    int id[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const bool there = begin + i < p.topk;
      id[i] = there ? load_older(p.topk_ids + row * p.ids_stride + begin + i) : -1;
      weight[i] = there ? load_older(p.topk_weights + row * p.weights_stride + begin + i) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) local[i] = expert_of_id(p, id[i]) >= 0;
  };
  load_slots(0);  // ids and weights are older than gate/up; y is not
  pdl_wait();
  pdl_trigger();
  if (column >= p.hidden) return;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int begin = 0; begin < p.topk; begin += kTogether) {
    if (begin > 0) load_slots(begin);
    float4 y[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (local[i]) y[i] = *reinterpret_cast<const float4*>(p.y + (static_cast<int64_t>(row) * p.topk + begin + i) * p.hidden + column);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (!local[i]) continue;
      sum.x = fmaf(weight[i], y[i].x, sum.x), sum.y = fmaf(weight[i], y[i].y, sum.y);
      sum.z = fmaf(weight[i], y[i].z, sum.z), sum.w = fmaf(weight[i], y[i].w, sum.w);
    }
  }
  const float f = p.routed_scaling;
  *reinterpret_cast<uint2*>(p.out + row * p.out_stride + column) = make_uint2(pack_bf16x2(sum.x * f, sum.y * f), pack_bf16x2(sum.z * f, sum.w * f));
}

}  // namespace dsv4::mxfp4_moe

// A prologue of the kernel for few rows changes x before it is multiplied.
//
//   rotation  x is the attention's output, whose rotary position embedding is taken back: of each 512 inputs (a head) the last
//             64 are pairs, rotated in fp32 and rounded to bf16 (DeepSeek-V4's wo_a)
//   SwiGLU    x is gates and ups, what is multiplied is made of them (the shared experts' down projection)
//   norm      x is normalised (the queries' second projections)
//
// Rotation is in place. For the other two a whole row comes by one bulk copy, and what is made of it goes to where the slices
// have their x: a bulk copy costs some 50 cycles, however small. make.cuh has the arithmetic.
//
// These two have up to kWarps rows, one group; their units are 16 bytes of a row of what is multiplied.
#pragma once

#include "kernel.cuh"

namespace dsv4::fp8_linear {

// Four pairs of the last 64 inputs of a head, those of this lane of 8, by the conjugate of the row's rotation.
template <typename C>
__device__ __forceinline__ uint4 Kernel<C>::rotated_back(uint4 v, int row) const {
  const float4* const from = rotation_of(p, load_position(p, row), lane % 8);
  return fp8_linear::rotated_back(v, __ldg(from), __ldg(from + 1));
}

// The slice's blocks that end a head, rotated back in place, by all warps of the slice, 4 rows of a block at a time. multiply reads
// it after sync_slice().
template <typename C>
__device__ __forceinline__ void Kernel<C>::rotate() const {
  const int pitch = x_pitch(plan.most_blocks), skipped = kHeadBlocks - 1 - slice.begin % kHeadBlocks;
#pragma unroll 1
  for (int block = skipped; block < slice.count; block += kHeadBlocks) {
#pragma unroll 1
    for (int row = warp_row * 4 + lane / 8; row < p.rows; row += 4 * C::kWarpRows) {
      unsigned char* const at = x() + row * pitch + block * 2 * kBlock + kBlock + lane % 8 * 16;
      *reinterpret_cast<uint4*>(at) = rotated_back(load_shared(at), row);
    }
  }
}

// bytes from the first row's place of the first slice to the first row's place of a unit
template <typename C>
__device__ __forceinline__ int Kernel<C>::place_of(int unit) const {
  const unsigned block = unit / (kBlock / kUnit), each = plan.slice_blocks.each, more = plan.slice_blocks.more;
  const unsigned there = block < more * (each + 1) ? block / (each + 1) : (block - more) / each;
  const int first = part_of(plan.slice_blocks, there).begin;
  return there * x_bytes(p.rows, 1, plan.most_blocks) + (block - first) * 2 * kBlock + unit % (kBlock / kUnit) * 16;
}

// Barriers of the rows, and the norm's weights: nothing that runs before the wait writes those.
template <typename C>
__device__ __forceinline__ void Kernel<C>::begin_making() const {
  if (lane != 0) return;
  barriers().x[warp].init(1);
  if (C::kNorms && warp == 0) barriers().norm_weights->init(1);
  fence_barrier_init();
  if (C::kNorms && warp == 0) {
    barriers().norm_weights->arrive_expect(p.inputs * 2);
    copy_bulk(shared_address(norm_weights()), p.norm_weight, p.inputs * 2, barriers().norm_weights[0]);
  }
}

// A warp's row; then what is made of the rows, for all slices. The caller ends it with a barrier of the block.
template <typename C>
__device__ __forceinline__ void Kernel<C>::fetch_row() const {
  if (warp >= p.rows || lane != 0) return;
  barriers().x[warp].arrive_expect(raw_bytes());
  copy_bulk(shared_address(raw(warp)), p.x + static_cast<uint64_t>(warp) * p.x_stride, raw_bytes(), barriers().x[warp]);
}

template <typename C>
__device__ __forceinline__ void Kernel<C>::gate_rows() const {
  const uint32_t limits = pack_bf16x2(p.swiglu_limit, p.swiglu_limit);
  const int pitch = x_pitch(plan.most_blocks);
  int unit = threadIdx.x, place = place_of(unit);
  pdl_wait();
  fetch_row();
#pragma unroll 1
  for (; unit < units(); unit += kThreads, place = place_of(unit)) {
#pragma unroll 1
    for (int row = 0; row < p.rows; ++row) {
      barriers().x[row].wait(0);
      const unsigned char* const from = raw(row) + unit * 16;
      *reinterpret_cast<uint4*>(x_at_slice(0) + place + row * pitch) = gated(load_shared(from), load_shared(from + p.inputs * 2), limits);
    }
  }
}

template <typename C>
__device__ __forceinline__ void Kernel<C>::normalize_row() const {
  int places[kNormSums];
#pragma unroll
  for (int s = 0; s < kNormSums; ++s) places[s] = place_of(s * 32 + lane);
  if (warp < p.rows) barriers().norm_weights->wait(0);
  pdl_wait();
  if (warp >= p.rows) return;
  fetch_row();
  __syncwarp();
  barriers().x[warp].wait(0);
  float sums[kNormSums] = {};
  const unsigned char* const from = raw(warp);
#pragma unroll 1
  for (int first = 0; first < units(); first += kNormSums * 32) {
    uint4 v[kNormSums] = {};
#pragma unroll
    for (int s = 0; s < kNormSums; ++s) {
      if (const int unit = first + s * 32 + lane; unit < units()) v[s] = load_shared(from + unit * 16);
    }
#pragma unroll
    for (int s = 0; s < kNormSums; ++s) add_squares(sums[s], v[s]);
  }
  const float root = root_of(sums, p.norm_inverse, p.norm_eps);
#pragma unroll 1
  for (int first = 0; first < units(); first += kNormSums * 32) {
#pragma unroll
    for (int s = 0; s < kNormSums; ++s) {
      const int unit = first + s * 32 + lane;
      if (unit >= units()) continue;
      const int place = first == 0 ? places[s] : place_of(unit);
      const uint4 weights = load_shared(norm_weights() + unit * 16);
      *reinterpret_cast<uint4*>(x_at_slice(0) + place + warp * x_pitch(plan.most_blocks)) = normalized(load_shared(from + unit * 16), root, weights);
    }
  }
}

}  // namespace dsv4::fp8_linear

// y = x W^T for up to 8 rows of bf16 x and E4M3 weights with a scale per 128 x 128 block: a stream of weights from memory
// through registers into mma.sync.
//
// The k of an mma is a free choice, made for both operands alike: a lane loads 16 bytes of one weight row, four E4M3 bytes
// become two bf16 pairs (exact, NaN stays NaN), and those pairs are operands as they lie. x is an operand as it lies in memory.
// It reaches shared memory by bulk copies: a multiprocessor's loads come back in the order of their issue, and a load of x
// would wait for all weights asked for before it, this kernel's and those of the next kernel's blocks beside it.
//
// Sum of 64 products, in mma order, from zero; times scale, added to the slice's sum, in order; slices by a binary tree.
// Rows, tiles, splits and blocks do not enter: a row has the same bits alone and among others, here and in tile.cuh, which has more
// rows.
#pragma once

#include "../device/copies.cuh"
#include "../device/mma.cuh"
#include "../device/numbers.cuh"
#include "../device/terms.cuh"
#include "config.h"

namespace dsv4::fp8_linear {

// kRotates_: the rotary position embedding of each head's last inputs is taken back (wo_a)
template <int kWarpRows_, bool kRotates_>
struct Config {
  static constexpr int kWarpRows = kWarpRows_;
  static constexpr bool kRotates = kRotates_;
  static constexpr int kSlices = kWarps / kWarpRows;  // of this block
  static constexpr int kBlockRows = kTileRows * kWarpRows;
};

// Four E4M3 bytes to two bf16 pairs, exact: by f16, which has a conversion, and fp32, whose upper half is the bf16.
// volatile: in the order written. Hoisted, the operands of many products would not fit the registers.
__device__ __forceinline__ void decode(uint32_t bytes, uint32_t& low, uint32_t& high) {
  asm volatile(
      "{ .reg .b16 l, h, a, b; .reg .b32 p, q; .reg .f32 x, y; .reg .b32 u, v;\n"
      "  mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 p, l; cvt.rn.f16x2.e4m3x2 q, h;\n"
      "  mov.b32 {a, b}, p; cvt.f32.f16 x, a; cvt.f32.f16 y, b; mov.b32 u, x; mov.b32 v, y; prmt.b32 %0, u, v, 0x7632;\n"
      "  mov.b32 {a, b}, q; cvt.f32.f16 x, a; cvt.f32.f16 y, b; mov.b32 u, x; mov.b32 v, y; prmt.b32 %1, u, v, 0x7632; }"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
}
// A scale as it is stored
__device__ __forceinline__ uint32_t load_stored(const uint8_t* at, int scale_bytes) {
  return scale_bytes == 4 ? __ldg(reinterpret_cast<const uint32_t*>(at)) : __ldg(at);
}
// Of a row: the low half of its position. After pdl_wait, for positions are written anew for each step.
__device__ __forceinline__ int32_t load_position(const Params& p, int row) {
  return load_now(reinterpret_cast<const int32_t*>(static_cast<const uint8_t*>(p.positions) + static_cast<int64_t>(row) * p.position_bytes));
}
// Where the rotations of a position's four pairs `i` of 8 lie
__device__ __forceinline__ const float4* rotation_of(const Params& p, int32_t position, int i) {
  return reinterpret_cast<const float4*>(p.rotation + static_cast<int64_t>(position) * kRotated) + i * 2;
}
// Four pairs by the conjugate of their rotations: cosine, sine of two pairs each
__device__ __forceinline__ uint4 rotated_back(const uint4& v, const float4& first, const float4& second) {
  const auto back = [](uint32_t pair, float c, float s) {
    const float a = bf16_low(pair), b = bf16_high(pair);
    return pack_bf16x2(fmaf(a, c, b * s), fmaf(b, c, -(a * s)));
  };
  return make_uint4(back(v.x, first.x, first.y), back(v.y, first.z, first.w), back(v.z, second.x, second.y), back(v.w, second.z, second.w));
}

// 16 weight rows x 128 inputs: rows g and g + 8, 16 bytes of each half
struct Step {
  uint4 rows[2][2];  // [row][half]
};

using FewBarriers = Barriers<kMaxSlices>;  // of a slice's x
static_assert(sizeof(FewBarriers) <= kBarrierBytes);

struct Part {
  int begin, count;
};
__device__ __forceinline__ Part part_of(const Shares& shares, int i) {
  return {i * shares.each + min(i, shares.more), shares.each + (i < shares.more)};
}

template <typename C>
struct Kernel {
  const Params& p;
  const Plan& plan;
  unsigned char* const shared;
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32);
  const int slice_here = warp % C::kSlices, warp_row = warp / C::kSlices;
  const Part slice;  // blocks of 128 inputs

  __device__ Kernel(const Params& params, const Plan& plan_, unsigned char* shared_)
      : p(params), plan(plan_), shared(shared_), slice(part_of(plan_.slice_blocks, blockIdx.y * C::kSlices + slice_here)) {}

  __device__ __forceinline__ uint32_t weight_row(int tile) const { return (tile * C::kWarpRows + warp_row) * kTileRows; }
  __device__ __forceinline__ int group_of(int tile) const {
    return p.groups == 1 ? 0 : static_cast<unsigned>(tile) / static_cast<unsigned>(plan.group_tiles);
  }
  // this lane's first bytes of a tile: of row g
  __device__ __forceinline__ const uint8_t* weights_of(int tile) const {
    return p.weight + static_cast<uint64_t>(weight_row(tile) + lane / 4) * p.weight_stride + slice.begin * kBlock + lane % 4 * 16;
  }
  __device__ __forceinline__ void load(Step& step, const uint8_t* weights, int block) const {
    const uint8_t* const first = weights + block * kBlock;
    const uint8_t* const second = first + static_cast<uint64_t>(8) * p.weight_stride;
    step.rows[0][0] = load_stream(first);
    step.rows[0][1] = load_stream(first + 64);
    step.rows[1][0] = load_stream(second);
    step.rows[1][1] = load_stream(second + 64);
  }

  // As it is stored: it must not be waited for here.
  __device__ __forceinline__ uint32_t load_scale(int tile, int block) const {
    const uint8_t* const at = static_cast<const uint8_t*>(p.scale) + static_cast<uint64_t>(weight_row(tile) / kBlock) * p.scale_stride_output +
                              static_cast<uint64_t>(slice.begin + block) * p.scale_stride_input;
    return load_stored(at, p.scale_bytes);
  }
  __device__ __forceinline__ float scale_of(uint32_t stored) const { return block_scale(stored, p.scale_bytes); }

  __device__ __forceinline__ unsigned char* x_at_slice(int i) const { return shared + kBarrierBytes + i * x_bytes(p.rows, 1, plan.most_blocks); }
  __device__ __forceinline__ unsigned char* x() const { return x_at_slice(slice_here); }
  __device__ __forceinline__ Barrier arrived() const { return (*reinterpret_cast<const FewBarriers*>(shared))[slice_here]; }
  __device__ __forceinline__ void sync_slice() const {
    if constexpr (C::kWarpRows == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // the slice's x; by one warp of the slice
  __device__ __forceinline__ void fetch(int group) const {
    const uint32_t bytes = slice.count * kBlock * 2;
    const Barrier barrier = arrived();
    if (lane == 0) barrier.arrive_expect(p.rows * bytes);
    __syncwarp();
    const uint16_t* from = p.x + static_cast<uint64_t>(group) * p.x_stride_group + slice.begin * kBlock;
    const uint32_t to = shared_address(x()), pitch = x_pitch(plan.most_blocks);
#pragma unroll 1
    for (int row = lane; row < p.rows; row += 32) copy_bulk(to + row * pitch, from + static_cast<uint64_t>(row) * p.x_stride, bytes, barrier);
  }

  // Four pairs of the last 64 inputs of a head, those of this lane of 8, by the conjugate of the row's rotation.
  __device__ __forceinline__ uint4 rotated_back(uint4 v, int row) const {
    const float4* const from = rotation_of(p, load_position(p, row), lane % 8);
    return fp8_linear::rotated_back(v, __ldg(from), __ldg(from + 1));
  }
  // The slice's blocks that end a head, rotated back in place, by all warps of the slice, 4 rows of a block at a time. multiply reads
  // it after sync_slice().
  __device__ __forceinline__ void rotate() const {
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

  // 8 of this lane's 16 inputs of a row of x in a half of a block; rows beyond the last are the last again
  __device__ __forceinline__ uint4 load_x(const unsigned char* x, int half, int part) const {
    const int row = min(lane / 4, p.rows - 1);
    return load_shared(x + row * x_pitch(plan.most_blocks) + half * kBlock + lane % 4 * 32 + part * 16);
  }
  // four bytes of rows g and g + 8 to an operand
  static __device__ __forceinline__ void decode(uint32_t bytes, uint32_t bytes8, uint32_t (&a)[4]) {
    fp8_linear::decode(bytes, a[0], a[2]);
    fp8_linear::decode(bytes8, a[1], a[3]);
  }
  static __device__ __forceinline__ void add_scaled(float (&sum)[4], const float (&d)[4], float scale) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = fmaf(d[i], scale, sum[i]);
  }
  // sum += a step, times the block of inputs whose x begins at `x`
  __device__ __forceinline__ void multiply(float (&sum)[4], const Step& step, float scale, const unsigned char* x) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 b;
      float d[4] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j % 2 == 0) b = load_x(x, half, j / 2);
        uint32_t a[4];
        decode(word_of(step.rows[0][half], j), word_of(step.rows[1][half], j), a);
        mma_bf16(d, a, word_of(b, j % 2 * 2), word_of(b, j % 2 * 2 + 1));
      }
      add_scaled(sum, d, scale);
    }
  }

  __device__ __forceinline__ float* partial_at(int group, int output, int row) const {
    const int64_t all = static_cast<int64_t>(p.groups) * p.outputs;
    return p.partial + (static_cast<int64_t>(blockIdx.y) * p.rows + row) * all + group * p.outputs + output;
  }
  __device__ __forceinline__ uint16_t* out_at(int group, int output, int row) const {
    return p.out + row * p.out_stride + group * p.out_stride_group + output;
  }
  // two neighbours of the output; `output` is of the group
  __device__ __forceinline__ void put(int group, int output, int row, float2 y) const {
    if (gridDim.y > 1) {
      *reinterpret_cast<float2*>(partial_at(group, output, row)) = y;
    } else {
      *reinterpret_cast<uint32_t*>(out_at(group, output, row)) = pack_bf16x2(y.x, y.y);
    }
  }
  __device__ __forceinline__ void put(int group, int output, int row, float y) const {
    if (row >= p.rows) return;
    if (gridDim.y > 1) {
      *partial_at(group, output, row) = y;
    } else {
      *out_at(group, output, row) = static_cast<uint16_t>(pack_bf16x2(y, 0.f));
    }
  }

  // Slices of the block together, and out. Sums pass through shared memory so that a warp stores neighbours.
  __device__ __forceinline__ void finish(const float (&sum)[4], int tile, int group) const {
    constexpr int kPairs = C::kBlockRows / 2, kSliceFloats = kColumns * kSumPitch;
    const int first = (tile - group * plan.group_tiles) * C::kBlockRows;
    float* const exchange = reinterpret_cast<float*>(shared + plan.exchange);
    float* const to = exchange + warp * kSliceFloats + lane % 4 * 2 * kSumPitch + lane / 4;
    if (lane % 4 * 2 < p.rows) to[0] = sum[0], to[8] = sum[2];
    if (lane % 4 * 2 + 1 < p.rows) to[kSumPitch] = sum[1], to[kSumPitch + 8] = sum[3];
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < kPairs * p.rows; i += kThreads) {
      const int row = i / kPairs, output = i % kPairs * 2;
      const float* from = exchange + output / kTileRows * C::kSlices * kSliceFloats + row * kSumPitch + output % kTileRows;
      float2 sums[C::kSlices];
#pragma unroll
      for (int s = 0; s < C::kSlices; ++s) sums[s] = *reinterpret_cast<const float2*>(from + s * kSliceFloats);
#pragma unroll
      for (int width = 1; width < C::kSlices; width *= 2) {
#pragma unroll
        for (int s = 0; s < C::kSlices; s += 2 * width) sums[s].x += sums[s + width].x, sums[s].y += sums[s + width].y;
      }
      put(group, first + output, row, sums[0]);
    }
  }

  // The same where every warp has a slice's whole sum: from the registers.
  __device__ __forceinline__ void store(const float (&sum)[4], int tile, int group) const {
    const int output = (tile - group * plan.group_tiles) * C::kBlockRows + warp_row * kTileRows + lane / 4, row = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) put(group, output + i / 2 * 8, row + i % 2, sum[i]);
  }

  __device__ __forceinline__ void run() const {
    const Part tiles = part_of(plan.block_tiles, blockIdx.x);
    if (warp_row == 0 && lane == 0) {
      arrived().init(1);
      fence_barrier_init();
    }
    Step steps[kAhead];
    uint32_t scales[kAhead];
    const uint8_t* weights = weights_of(tiles.begin);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i < slice.count) load(steps[i], weights, i);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i < slice.count) scales[i] = load_scale(tiles.begin, i);
    }
    const uint64_t tile_bytes = static_cast<uint64_t>(C::kBlockRows) * p.weight_stride;
    sync_slice();
    pdl_wait();
    int staged = -1, used = 0;
    for (int tile = tiles.begin, left = tiles.count - 1; left >= 0; ++tile, --left) {
      const int group = group_of(tile);
      float sum[4] = {};
      if (group != staged) {
        if (staged >= 0) {
          if constexpr (C::kRotates) fence_async();
          sync_slice();
        }
        if (warp_row == 0) fetch(group);
        arrived().wait(used++ & 1);
        if constexpr (C::kRotates) {
          rotate();
          sync_slice();
        }
        staged = group;
      }
      for (int block0 = 0; block0 < slice.count; block0 += kAhead) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int block = block0 + i;
          if (block >= slice.count) break;
          // what has been used is asked for anew: the block of inputs after those on their way, or of the next tile
          const bool same = block + kAhead < slice.count;
          const int next = same ? block + kAhead : i;
          const float scale = scale_of(scales[i]);
          if (same || left > 0) scales[i] = load_scale(same ? tile : tile + 1, next);
          multiply(sum, steps[i], scale, x() + block * 2 * kBlock);
          if (same || left > 0) load(steps[i], weights + (same ? 0 : tile_bytes), next);
        }
      }
      if constexpr (C::kSlices == 1) {
        store(sum, tile, group);
      } else {
        finish(sum, tile, group);
        if (left > 0) __syncthreads();
      }
      weights += tile_bytes;
    }
  }
};

template <typename C>
__global__ void __launch_bounds__(kThreads, 2) linear_kernel(const __grid_constant__ Params p, const __grid_constant__ Plan plan) {
  extern __shared__ __align__(128) unsigned char shared[];
  pdl_trigger();
  Kernel<C>(p, plan, shared).run();
}

constexpr int kMergeThreads = 128;

// The splits' sums by the rest of the tree.
template <int kSplits>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ Params p) {
  pdl_trigger();
  pdl_wait();
  const int64_t all_rows = static_cast<int64_t>(p.groups) * p.outputs;
  const int64_t weight = (static_cast<int64_t>(blockIdx.x) * kMergeThreads + threadIdx.x) * 4;
  const int row = blockIdx.y;
  if (weight >= all_rows) return;
  float4 sum[kSplits];
#pragma unroll
  for (int s = 0; s < kSplits; ++s) {
    sum[s] = __ldcg(reinterpret_cast<const float4*>(p.partial + (static_cast<int64_t>(s) * p.rows + row) * all_rows + weight));
  }
  const int64_t group = weight / p.outputs, output = weight - group * p.outputs;
  *reinterpret_cast<uint2*>(p.out + row * p.out_stride + group * p.out_stride_group + output) = rounded(merged(sum));
}

}  // namespace dsv4::fp8_linear

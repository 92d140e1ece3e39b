// y = x W^T for up to 64 rows of bf16 x and E4M3 weights with a scale per 128 x 128 block: a stream of weights from memory
// through registers into mma.sync.
//
// The k of an mma is a free choice, made for both operands alike: a lane loads 16 bytes of one weight row, four E4M3 bytes
// are two f16 pairs (exact, NaN stays NaN), and those pairs are operands as they lie. x is bf16, which f16 cannot hold; so
// each row's 128 inputs get a power of two that brings their greatest to 2^14 .. 2^15. That is exact for everything down to
// 2^-29 of the greatest; what is smaller is rounded to 2^-39 of it. The power goes onto the fp32 sum with the weights' scale.
//
// Sum of 64 products, in mma order, from zero; times scale, added to the slice's sum, in order; slices by a binary tree.
// Rows, tiles, splits and blocks do not enter: a row has the same bits alone and among others.
#pragma once

#include "../sparse_decode/device.cuh"
#include "config.h"

namespace dsv4::fp8_linear {

template <int kColumnTiles_, int kRowTiles_, int kWarpRows_>
struct Config {
  static constexpr int kColumnTiles = kColumnTiles_, kRowTiles = kRowTiles_, kWarpRows = kWarpRows_;
  static constexpr int kSlices = kWarps / kWarpRows;      // of this block
  static constexpr int kSteps = steps_of(kColumnTiles, kRowTiles), kAhead = ahead_of(kColumnTiles, kRowTiles);
  static constexpr int kBlockRows = kTileRows * kRowTiles * kWarpRows;
  static constexpr int kTogether = kColumnTiles >= 4 && kRowTiles >= 2 ? 2 : 1;  // row tiles that share a load of x
  static constexpr int kMinBlocks = kColumnTiles * kRowTiles >= 4 && kColumnTiles > 1 ? 1 : 2;
  static_assert(kSteps % kRowTiles == 0 && kRowTiles % kTogether == 0);
};

__device__ __forceinline__ uint4 load_stream(const uint8_t* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
// `bytes`, a multiple of 16, to the L2
__device__ __forceinline__ void prefetch_l2(const uint8_t* p, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}
__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// 16 weight rows x 128 inputs: rows g and g + 8, 16 bytes of each half
struct Step {
  uint4 rows[2][2];  // [row][half]
  float scale;
};

struct Slice {
  int begin, count;  // blocks of 128 inputs
};
__device__ __forceinline__ Slice slice_of(int slice, int slices, int blocks) {
  const int begin = slice * blocks / slices;
  return {begin, (slice + 1) * blocks / slices - begin};
}

template <typename C>
struct Kernel {
  const Params& p;
  const Plan& plan;
  unsigned char* const shared;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slice_here = warp % C::kSlices, warp_row = warp / C::kSlices;
  const Slice slice;
  const int all_rows;
  const uint8_t* const lane_weight;  // this lane's first bytes of its slice in weight row 0 or, of the tile, g

  __device__ Kernel(const Params& params, const Plan& plan_, unsigned char* shared_)
      : p(params),
        plan(plan_),
        shared(shared_),
        slice(slice_of(blockIdx.y * C::kSlices + slice_here, plan_.slices, params.inputs / kBlock)),
        all_rows(params.groups * params.outputs),
        lane_weight(params.weight + lane / 4 * params.weight_stride + slice.begin * kBlock + lane % 4 * 16) {}

  // first weight row of this warp's row tile
  __device__ __forceinline__ int weight_row(int tile, int row_tile) const {
    const int row = (tile * C::kWarpRows + warp_row) * (C::kRowTiles * kTileRows) + row_tile * kTileRows;
    return min(row, all_rows - kTileRows);  // behind the end: loaded, never stored
  }

  __device__ __forceinline__ void load(Step& step, int tile, int block, int row_tile) const {
    const int row = weight_row(tile, row_tile);
    const uint8_t* from = lane_weight + row * p.weight_stride + block * kBlock;
    step.rows[0][0] = load_stream(from);
    step.rows[0][1] = load_stream(from + 64);
    step.rows[1][0] = load_stream(from + 8 * p.weight_stride);
    step.rows[1][1] = load_stream(from + 8 * p.weight_stride + 64);
    const int64_t at = row / kBlock * p.scale_stride_output + (slice.begin + block) * p.scale_stride_input;
    if (p.scale_bytes == 4) {
      step.scale = __ldg(static_cast<const float*>(p.scale) + at);
    } else {
      const uint32_t exponent = __ldg(static_cast<const uint8_t*>(p.scale) + at);
      step.scale = __uint_as_float(exponent == 0 ? 0x00400000u : exponent == 255 ? 0x7fc00000u : exponent << 23);
    }
  }

  // What the registers do not hold yet, to the L2: rows of the block, `limit` bytes at most.
  __device__ __forceinline__ void prefetch(int tile_begin, int tile_end, int64_t limit) const {
    const Slice first = slice_of(blockIdx.y * C::kSlices, plan.slices, p.inputs / kBlock);
    const Slice last = slice_of(blockIdx.y * C::kSlices + C::kSlices - 1, plan.slices, p.inputs / kBlock);
    const int bytes = (last.begin + last.count - first.begin) * kBlock;
    const bool held = (p.inputs / kBlock + plan.slices - 1) / plan.slices <= C::kAhead;
    const int64_t begin = static_cast<int64_t>(tile_begin + held) * C::kBlockRows;
    const int64_t end = min(min(static_cast<int64_t>(tile_end) * C::kBlockRows, static_cast<int64_t>(all_rows)), begin + limit / bytes);
    for (int64_t row = begin + threadIdx.x; row < end; row += kThreads) {
      prefetch_l2(p.weight + row * p.weight_stride + first.begin * kBlock, bytes);
    }
  }

  __device__ __forceinline__ unsigned char* x_at(int slot) const {
    return shared + (slice_here * plan.slots + slot) * p.rows * kRowBytes;
  }
  __device__ __forceinline__ float* factors_at(int slot) const {
    return reinterpret_cast<float*>(shared + x_bytes(p.rows, C::kSlices, plan.slots)) + (slice_here * plan.slots + slot) * p.rows;
  }
  __device__ __forceinline__ void sync_slice() const {
    if constexpr (C::kWarpRows == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // 8 lanes hold 128 bf16 inputs of a row in shared memory, each its own 32 bytes: to f16, with a power of two, in place
  __device__ __forceinline__ void convert(bool valid, unsigned char* at, float* factor) const {
    const uint4 v[2] = {*reinterpret_cast<const uint4*>(at), *reinterpret_cast<const uint4*>(at + kBlock)};
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = __vmaxu2(most, word_of(v[i / 4], i % 4) & 0x7fff7fffu);
    most = max(most & 0xffffu, most >> 16);
#pragma unroll
    for (int d = 1; d < 8; d *= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, d));
    const uint32_t exponent = max(most >> 7, 15u);
    const float up = __uint_as_float((268u - exponent) << 23);  // 2^(141 - exponent): the greatest becomes 2^14 .. 2^15
    uint32_t halves[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t pair = word_of(v[i / 4], i % 4);
      halves[i] = pack_f16x2(bf16_low(pair) * up, bf16_high(pair) * up);
    }
    if (!valid) return;
    *reinterpret_cast<uint4*>(at) = make_uint4(halves[0], halves[1], halves[2], halves[3]);
    *reinterpret_cast<uint4*>(at + kBlock) = make_uint4(halves[4], halves[5], halves[6], halves[7]);
    if (lane % 8 == 0) *factor = __uint_as_float((exponent - 14u) << 23);  // 2^(exponent - 141)
  }

  // x of `count` blocks from `first` on, into the slots 0 ..; the warps of a slice share the work, 4 units (row, block) at
  // a time. A lane converts what it copied itself.
  __device__ __forceinline__ void stage(int group, int first, int count) const {
    constexpr int kUnits = 4, kStride = C::kWarpRows * kUnits;
    count = min(count, slice.count - first);
    const int units = p.rows * max(count, 0);
    const uint16_t* const from = p.x + group * p.x_stride_group + (slice.begin + first) * kBlock + lane % 8 * 8;
#pragma unroll 2
    for (int base = warp_row * kUnits; base < units; base += kStride) {
      const int unit = base + lane / 8, row = unit / count, slot = unit - row * count;
      if (unit >= units) break;
      const uint16_t* at = from + row * p.x_stride + slot * kBlock;
      const uint32_t to = shared_address(x_at(slot) + row * kRowBytes + lane % 8 * 16);
      cp_async_16(to, reinterpret_cast<uint64_t>(at), true);
      cp_async_16(to + kBlock, reinterpret_cast<uint64_t>(at + kBlock / 2), true);
    }
    cp_async_wait_all();
#pragma unroll 2
    for (int base = warp_row * kUnits; base < units; base += kStride) {
      const int unit = base + lane / 8, known = min(unit, units - 1), row = known / count, slot = known - row * count;
      convert(unit == known, x_at(slot) + row * kRowBytes + lane % 8 * 16, factors_at(slot) + row);
    }
  }

  // sums += row tiles `tile0` .. of the block of inputs in `slot`
  __device__ __forceinline__ void multiply(float (&sums)[C::kRowTiles][C::kColumnTiles][4], const Step* steps, int tile0, int slot) const {
    const unsigned char* const x = x_at(slot);
    const float* const factors = factors_at(slot);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a[C::kTogether][4][4];
#pragma unroll
      for (int m = 0; m < C::kTogether; ++m) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          e4m3x4_to_f16(word_of(steps[m].rows[0][half], j), a[m][j][0], a[m][j][2]);
          e4m3x4_to_f16(word_of(steps[m].rows[1][half], j), a[m][j][1], a[m][j][3]);
        }
      }
#pragma unroll
      for (int n = 0; n < C::kColumnTiles; ++n) {
        if constexpr (C::kColumnTiles == 8) asm volatile("" ::: "memory");  // no loads of all tiles at once: registers
        const int row = min(n * kColumns + lane / 4, p.rows - 1);
        const uint4* const from = reinterpret_cast<const uint4*>(x + row * kRowBytes + half * kBlock + lane % 4 * 32);
        const uint4 b0 = from[0], b1 = from[1];
        const int column = n * kColumns + lane % 4 * 2;
        const float f0 = factors[min(column, p.rows - 1)], f1 = factors[min(column + 1, p.rows - 1)];
#pragma unroll
        for (int m = 0; m < C::kTogether; ++m) {
          float d[4] = {};
          mma_f16(d, a[m][0], b0.x, b0.y);
          mma_f16(d, a[m][1], b0.z, b0.w);
          mma_f16(d, a[m][2], b1.x, b1.y);
          mma_f16(d, a[m][3], b1.z, b1.w);
          const float s0 = steps[m].scale * f0, s1 = steps[m].scale * f1;
          float(&sum)[4] = sums[tile0 + m][n];
          sum[0] = fmaf(d[0], s0, sum[0]);
          sum[1] = fmaf(d[1], s1, sum[1]);
          sum[2] = fmaf(d[2], s0, sum[2]);
          sum[3] = fmaf(d[3], s1, sum[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void put(int64_t weight_row, int row, float even, float odd) const {
    if (gridDim.y > 1) {
      float* to = p.partial + (static_cast<int64_t>(blockIdx.y) * p.rows + row) * all_rows + weight_row;
      *reinterpret_cast<float2*>(to) = make_float2(even, odd);
    } else {
      const int64_t group = weight_row / p.outputs, output = weight_row - group * p.outputs;
      *reinterpret_cast<uint32_t*>(p.out + row * p.out_stride + group * p.out_stride_group + output) = pack_bf16x2(even, odd);
    }
  }

  // Slices of the block together, and out. Sums pass through shared memory so that a warp stores neighbours.
  __device__ __forceinline__ void finish(const float (&sums)[C::kRowTiles][C::kColumnTiles][4], int tile) const {
    constexpr int kPairs = C::kBlockRows / 2, kFragments = C::kRowTiles * C::kColumnTiles;
    float4* const exchange = reinterpret_cast<float4*>(shared + plan.exchange);
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < C::kColumnTiles; ++n) {
        const float(&s)[4] = sums[m][n];
        exchange[(warp * kFragments + m * C::kColumnTiles + n) * 32 + lane] = make_float4(s[0], s[1], s[2], s[3]);
      }
    }
    __syncthreads();
    const int64_t first = static_cast<int64_t>(tile) * C::kBlockRows;
    for (int i = threadIdx.x; i < kPairs * p.rows; i += kThreads) {
      const int row = i / kPairs, weight = i % kPairs * 2;
      const int group = weight / (C::kRowTiles * kTileRows), m = weight / kTileRows % C::kRowTiles, r = weight % kTileRows;
      const float* from = reinterpret_cast<const float*>(exchange) +
                          (group * C::kSlices * kFragments + m * C::kColumnTiles + row / kColumns) * 128 + (r % 8 * 4 + row % kColumns / 2) * 4 +
                          r / 8 * 2 + row % 2;
      float even[C::kSlices], odd[C::kSlices];
#pragma unroll
      for (int s = 0; s < C::kSlices; ++s) {
        even[s] = from[s * kFragments * 128];
        odd[s] = from[s * kFragments * 128 + 16];
      }
#pragma unroll
      for (int width = 1; width < C::kSlices; width *= 2) {
#pragma unroll
        for (int s = 0; s < C::kSlices; s += 2 * width) even[s] += even[s + width], odd[s] += odd[s + width];
      }
      if (first + weight < all_rows) put(first + weight, row, even[0], odd[0]);
    }
  }

  __device__ __forceinline__ void run(int64_t prefetch_bytes) const {
    const int begin = static_cast<int>(static_cast<int64_t>(plan.tiles) * blockIdx.x / gridDim.x);
    const int end = static_cast<int>(static_cast<int64_t>(plan.tiles) * (blockIdx.x + 1) / gridDim.x);
    const int most = (p.inputs / kBlock + plan.slices - 1) / plan.slices;  // blocks of the longest slice
    Step steps[C::kSteps];
#pragma unroll
    for (int i = 0; i < C::kSteps; ++i) {
      if (i / C::kRowTiles < slice.count) load(steps[i], begin, i / C::kRowTiles, i % C::kRowTiles);
    }
    prefetch(begin, end, prefetch_bytes);
    pdl_wait();
    const bool resident = plan.slots >= most;
    int staged = -1;
    for (int tile = begin; tile < end; ++tile) {
      const int group = static_cast<int>(static_cast<int64_t>(tile) * C::kBlockRows / p.outputs);
      float sums[C::kRowTiles][C::kColumnTiles][4] = {};
      for (int chunk = 0; chunk < most; chunk += plan.slots) {
        if (!resident || group != staged) {
          if (staged >= 0) sync_slice();
          stage(group, chunk, plan.slots);
          sync_slice();
          staged = group;
        }
        for (int block0 = chunk; block0 < min(chunk + plan.slots, slice.count); block0 += C::kAhead) {
#pragma unroll
          for (int i = 0; i < C::kAhead; ++i) {
            if (block0 + i < slice.count) multiply_and_load(sums, &steps[i * C::kRowTiles], tile, end, block0 + i, i, block0 + i - chunk);
          }
        }
      }
      if (!resident) __syncthreads();
      finish(sums, tile);
      if (tile + 1 < end) __syncthreads();
    }
  }

  // All row tiles of a block of inputs. What has been used is asked for anew: the same place of the block after next, or of the next tile.
  __device__ __forceinline__ void multiply_and_load(float (&sums)[C::kRowTiles][C::kColumnTiles][4], Step* steps, int tile, int end, int block,
                                                    int place, int slot) const {
    const bool same = block + C::kAhead < slice.count;
#pragma unroll
    for (int m = 0; m < C::kRowTiles; m += C::kTogether) {
      multiply(sums, steps + m, m, slot);
      if (same || tile + 1 < end) {
#pragma unroll
        for (int k = 0; k < C::kTogether; ++k) load(steps[m + k], same ? tile : tile + 1, same ? block + C::kAhead : place, m + k);
      }
    }
  }
};

template <typename C>
__global__ void __launch_bounds__(kThreads, C::kMinBlocks) linear_kernel(const __grid_constant__ Params p, const __grid_constant__ Plan plan, int64_t prefetch) {
  extern __shared__ __align__(128) unsigned char shared[];
  pdl_trigger();
  Kernel<C>(p, plan, shared).run(prefetch);
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
#pragma unroll
  for (int width = 1; width < kSplits; width *= 2) {
#pragma unroll
    for (int s = 0; s < kSplits; s += 2 * width) sum[s] = add(sum[s], sum[s + width]);
  }
  const int64_t group = weight / p.outputs, output = weight - group * p.outputs;
  *reinterpret_cast<uint2*>(p.out + row * p.out_stride + group * p.out_stride_group + output) =
      make_uint2(pack_bf16x2(sum[0].x, sum[0].y), pack_bf16x2(sum[0].z, sum[0].w));
}

}  // namespace dsv4::fp8_linear

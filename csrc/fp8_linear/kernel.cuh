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
//
// Optionally x is the attention's output, whose rotary position embedding is taken back on the way in: of each 512 inputs
// (a head) the last 64 are pairs, rotated in fp32 and rounded to bf16 (DeepSeek-V4's wo_a).
#pragma once

#include "../device.cuh"
#include "config.h"

namespace dsv4::fp8_linear {

template <int kColumnTiles_, int kRowTiles_, int kWarpRows_>
struct Config {
  static constexpr int kColumnTiles = kColumnTiles_, kRowTiles = kRowTiles_, kWarpRows = kWarpRows_;
  static constexpr int kSlices = kWarps / kWarpRows;      // of this block
  static constexpr int kSteps = steps_of(kColumnTiles), kAhead = ahead_of(kColumnTiles, kRowTiles);
  static constexpr int kBlockRows = kTileRows * kRowTiles * kWarpRows;
  static constexpr int kTogether = kColumnTiles >= 4 ? kRowTiles : 1;  // row tiles that share a load of x
  static constexpr int kConvertTogether = kColumnTiles == 8 ? 1 : 2;
  static constexpr int kMinBlocks = kColumnTiles >= 4 ? 1 : 2;
  static_assert(kSteps % kRowTiles == 0 && kRowTiles % kTogether == 0 && kBlock % (kRowTiles * kTileRows) == 0);
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

// volatile: in the order written. Hoisted, the operands of many products would not fit the registers.
__device__ __forceinline__ void decode(uint32_t bytes, uint32_t& low, uint32_t& high) {
  asm volatile("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
               : "=r"(low), "=r"(high)
               : "r"(bytes));
}
__device__ __forceinline__ uint4 load_shared(const unsigned char* p) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared_address(p)) : "memory");
  return v;
}

// 16 weight rows x 128 inputs: rows g and g + 8, 16 bytes of each half
struct Step {
  uint4 rows[2][2];  // [row][half]
};

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
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slice_here = warp % C::kSlices, warp_row = warp / C::kSlices;
  const Part slice;  // blocks of 128 inputs

  __device__ Kernel(const Params& params, const Plan& plan_, unsigned char* shared_)
      : p(params), plan(plan_), shared(shared_), slice(part_of(plan_.slice_blocks, blockIdx.y * C::kSlices + slice_here)) {}

  __device__ __forceinline__ uint32_t weight_row(int tile) const { return (tile * C::kWarpRows + warp_row) * (C::kRowTiles * kTileRows); }
  // this lane's first bytes of a tile: of row g of its first row tile
  __device__ __forceinline__ const uint8_t* weights_of(int tile) const {
    return p.weight + static_cast<uint64_t>(weight_row(tile) + lane / 4) * p.weight_stride + slice.begin * kBlock + lane % 4 * 16;
  }
  __device__ __forceinline__ void load(Step& step, const uint8_t* weights, int block, int row_tile) const {
    const uint8_t* const first = weights + block * kBlock + static_cast<uint64_t>(row_tile * kTileRows) * p.weight_stride;
    const uint8_t* const second = first + static_cast<uint64_t>(8) * p.weight_stride;
    step.rows[0][0] = load_stream(first);
    step.rows[0][1] = load_stream(first + 64);
    step.rows[1][0] = load_stream(second);
    step.rows[1][1] = load_stream(second + 64);
  }

  // As it is stored: it must not be waited for here. Of all row tiles, which lie in one block of outputs.
  __device__ __forceinline__ uint32_t load_scale(int tile, int block) const {
    const uint8_t* const at = static_cast<const uint8_t*>(p.scale) + static_cast<uint64_t>(weight_row(tile) / kBlock) * p.scale_stride_output +
                              static_cast<uint64_t>(slice.begin + block) * p.scale_stride_input;
    return p.scale_bytes == 4 ? __ldg(reinterpret_cast<const uint32_t*>(at)) : __ldg(at);
  }
  __device__ __forceinline__ float scale_of(uint32_t stored) const {
    return block_scale(stored, p.scale_bytes);
  }

  // Rows of weights that the registers do not hold yet, to the L2.
  __device__ __forceinline__ void prefetch(const Part& tiles) const {
    if (threadIdx.x >= plan.prefetch_rows) return;
    const int begin = part_of(plan.slice_blocks, blockIdx.y * C::kSlices).begin;
    const Part last = part_of(plan.slice_blocks, (blockIdx.y + 1) * C::kSlices - 1);
    const int held = plan.slice_blocks.each + (plan.slice_blocks.more > 0) <= C::kAhead;
    const int end = tiles.count * C::kBlockRows, first = held * C::kBlockRows;
#pragma unroll 1
    for (int row = first + threadIdx.x; row < min(end, first + plan.prefetch_rows); row += kThreads) {
      const uint8_t* from = p.weight + static_cast<uint64_t>(tiles.begin * C::kBlockRows + row) * p.weight_stride + begin * kBlock;
      prefetch_l2(from, (last.begin + last.count - begin) * kBlock);
    }
  }

  // rows of x that shared memory has room for; those beyond p.rows hold anything, and so do their sums, which nobody stores
  __device__ __forceinline__ int x_rows() const { return rows_in_shared(C::kColumnTiles, p.rows); }
  __device__ __forceinline__ unsigned char* x_at(int slot) const {
    return shared + (slice_here * plan.slots + slot) * x_rows() * kRowBytes;
  }
  __device__ __forceinline__ float* factors_at(int slot) const {
    return reinterpret_cast<float*>(shared + x_bytes(x_rows(), C::kSlices, plan.slots)) + (slice_here * plan.slots + slot) * x_rows();
  }
  __device__ __forceinline__ void sync_slice() const {
    if constexpr (C::kWarpRows == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // Four pairs of the last 64 inputs of a head, those of this lane of 8, by the conjugate of the row's rotation.
  __device__ __forceinline__ uint4 rotated_back(uint4 v, int row) const {
    const int64_t position = p.position_bytes == 8 ? __ldg(static_cast<const int64_t*>(p.positions) + row)
                                                   : __ldg(static_cast<const int32_t*>(p.positions) + row);
    const float4* const from = reinterpret_cast<const float4*>(p.rotation + position * kRotated) + lane % 8 * 2;
    const float4 first = __ldg(from), second = __ldg(from + 1);  // cosine, sine of two pairs each
    const auto back = [](uint32_t pair, float c, float s) {
      const float a = bf16_low(pair), b = bf16_high(pair);
      return pack_bf16x2(fmaf(a, c, b * s), fmaf(b, c, -(a * s)));
    };
    return make_uint4(back(v.x, first.x, first.y), back(v.y, first.z, first.w), back(v.z, second.x, second.y), back(v.w, second.z, second.w));
  }

  // 8 lanes hold 128 bf16 inputs of a row in shared memory, each its own 32 bytes: to f16, with a power of two, in place
  __device__ __forceinline__ void convert(bool valid, int row, int block, unsigned char* at, float* factor) const {
    uint4 v[2] = {*reinterpret_cast<const uint4*>(at), *reinterpret_cast<const uint4*>(at + kBlock)};
    if (p.rotation != nullptr && block % kHeadBlocks == kHeadBlocks - 1) v[1] = rotated_back(v[1], row);
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

  // x of `count` blocks from `first` on, into the slots 0 ..; the warps of a slice share the work, 4 units (block, row) at
  // a time, the rows of a block one after the other: they are rotated together. A lane converts what it copied itself.
  __device__ __forceinline__ void stage(int group, int first, int count) const {
    constexpr int kUnits = 4, kStride = C::kWarpRows * kUnits;
    count = min(count, slice.count - first);
    if (count <= 0) return;
    const int units = p.rows * count;
    const float inverse = __fdividef(1.f, static_cast<float>(p.rows));  // near enough: units are few
    const uint16_t* const from = p.x + static_cast<uint64_t>(group) * p.x_stride_group + (slice.begin + first) * kBlock + lane % 8 * 8;
    unsigned char* const to = x_at(0) + lane % 8 * 16;
#pragma unroll 1
    for (int unit = warp_row * kUnits + lane / 8; unit < units; unit += kStride) {
      const int slot = static_cast<int>((unit + 0.5f) * inverse), row = unit - slot * p.rows;
      const uint16_t* at = from + static_cast<uint64_t>(row) * p.x_stride + slot * kBlock;
      const uint32_t address = shared_address(to + (slot * x_rows() + row) * kRowBytes);
      cp_async_16(address, reinterpret_cast<uint64_t>(at), true);
      cp_async_16(address + kBlock, reinterpret_cast<uint64_t>(at + kBlock / 2), true);
    }
    cp_async_wait_all();
#pragma unroll(C::kConvertTogether)
    for (int base = warp_row * kUnits; base < units; base += kStride) {
      const int unit = base + lane / 8, known = min(unit, units - 1);
      const int slot = static_cast<int>((known + 0.5f) * inverse), row = known - slot * p.rows;
      convert(unit == known, row, slice.begin + first + slot, to + (slot * x_rows() + row) * kRowBytes, factors_at(slot) + row);
    }
  }

  // sums += row tiles `tile0` .. of the block of inputs in `slot`
  __device__ __forceinline__ void multiply(float (&sums)[C::kRowTiles][C::kColumnTiles][4], const Step* steps, float scale, int tile0, int slot) const {
    const unsigned char* const x = x_at(slot);
    const float* const factors = factors_at(slot);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a[C::kTogether][4][4];
#pragma unroll
      for (int m = 0; m < C::kTogether; ++m) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          decode(word_of(steps[m].rows[0][half], j), a[m][j][0], a[m][j][2]);
          decode(word_of(steps[m].rows[1][half], j), a[m][j][1], a[m][j][3]);
        }
      }
#pragma unroll
      for (int n = 0; n < C::kColumnTiles; ++n) {
        const int row = C::kColumnTiles == 1 ? min(lane / 4, p.rows - 1) : n * kColumns + lane / 4;
        const unsigned char* const from = x + row * kRowBytes + half * kBlock + lane % 4 * 32;
        const uint4 b0 = load_shared(from), b1 = load_shared(from + 16);
        const int column = n * kColumns + lane % 4 * 2, last = x_rows() - 1;
        const float s0 = scale * factors[C::kColumnTiles == 1 ? min(column, last) : column];
        const float s1 = scale * factors[C::kColumnTiles == 1 ? min(column + 1, last) : column + 1];
#pragma unroll
        for (int m = 0; m < C::kTogether; ++m) {
          float d[4] = {};
          mma_f16(d, a[m][0], b0.x, b0.y);
          mma_f16(d, a[m][1], b0.z, b0.w);
          mma_f16(d, a[m][2], b1.x, b1.y);
          mma_f16(d, a[m][3], b1.z, b1.w);
          float(&sum)[4] = sums[tile0 + m][n];
          sum[0] = fmaf(d[0], s0, sum[0]);
          sum[1] = fmaf(d[1], s1, sum[1]);
          sum[2] = fmaf(d[2], s0, sum[2]);
          sum[3] = fmaf(d[3], s1, sum[3]);
        }
      }
    }
  }

  // two neighbours of the output; `output` is of the group
  __device__ __forceinline__ void put(int group, int output, int row, float2 y) const {
    if (gridDim.y > 1) {
      const int64_t all = static_cast<int64_t>(p.groups) * p.outputs;
      *reinterpret_cast<float2*>(p.partial + (static_cast<int64_t>(blockIdx.y) * p.rows + row) * all + group * p.outputs + output) = y;
    } else {
      *reinterpret_cast<uint32_t*>(p.out + row * p.out_stride + group * p.out_stride_group + output) = pack_bf16x2(y.x, y.y);
    }
  }

  // Slices of the block together, and out. Sums pass through shared memory so that a warp stores neighbours.
  __device__ __forceinline__ void finish(const float (&sums)[C::kRowTiles][C::kColumnTiles][4], int tile, int group) const {
    constexpr int kWarpOutputs = C::kRowTiles * kTileRows, kPairs = C::kBlockRows / 2, kPitch = sum_pitch(C::kRowTiles);
    float* const exchange = reinterpret_cast<float*>(shared + plan.exchange);
    float* const mine = exchange + warp * p.rows * kPitch + lane % 4 * 2 * kPitch + lane / 4;
#pragma unroll
    for (int n = 0; n < C::kColumnTiles; ++n) {
      const int row = n * kColumns + lane % 4 * 2;
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        float* const to = mine + n * kColumns * kPitch + m * kTileRows;
        const float(&s)[4] = sums[m][n];
        if (row < p.rows) to[0] = s[0], to[8] = s[2];
        if (row + 1 < p.rows) to[kPitch] = s[1], to[kPitch + 8] = s[3];
      }
    }
    __syncthreads();
    const int slice_floats = p.rows * kPitch;
#pragma unroll 1
    for (int i = threadIdx.x; i < kPairs * p.rows; i += kThreads) {
      const int row = i / kPairs, output = i % kPairs * 2;
      const float* from = exchange + output / kWarpOutputs * C::kSlices * slice_floats + row * kPitch + output % kWarpOutputs;
      float2 sum[C::kSlices];
#pragma unroll
      for (int s = 0; s < C::kSlices; ++s) sum[s] = *reinterpret_cast<const float2*>(from + s * slice_floats);
#pragma unroll
      for (int width = 1; width < C::kSlices; width *= 2) {
#pragma unroll
        for (int s = 0; s < C::kSlices; s += 2 * width) sum[s].x += sum[s + width].x, sum[s].y += sum[s + width].y;
      }
      put(group, (tile - group * plan.group_tiles) * C::kBlockRows + output, row, sum[0]);
    }
  }

  __device__ __forceinline__ void run() const {
    const Part tiles = part_of(plan.block_tiles, blockIdx.x);
    Step steps[C::kSteps];
    uint32_t scales[C::kAhead];
    const uint8_t* weights = weights_of(tiles.begin);
#pragma unroll
    for (int i = 0; i < C::kSteps; ++i) {
      if (i / C::kRowTiles < slice.count) load(steps[i], weights, i / C::kRowTiles, i % C::kRowTiles);
    }
#pragma unroll
    for (int i = 0; i < C::kAhead; ++i) {
      if (i < slice.count) scales[i] = load_scale(tiles.begin, i);
    }
    prefetch(tiles);
    const int most = plan.slice_blocks.each + (plan.slice_blocks.more > 0);
    const bool resident = plan.exchange > 0;
    const uint64_t tile_bytes = static_cast<uint64_t>(C::kBlockRows) * p.weight_stride;
    pdl_wait();
    int staged = -1;
    for (int tile = tiles.begin, left = tiles.count - 1; left >= 0; ++tile, --left) {
      const int group = p.groups == 1 ? 0 : static_cast<unsigned>(tile) / static_cast<unsigned>(plan.group_tiles);
      float sums[C::kRowTiles][C::kColumnTiles][4] = {};
      for (int chunk = 0; chunk < most; chunk += plan.slots) {
        if (!resident || group != staged) {
          if (staged >= 0) sync_slice();
          stage(group, chunk, plan.slots);
          sync_slice();
          staged = group;
        }
        const int chunk_end = min(chunk + plan.slots, slice.count);
        for (int block0 = chunk; block0 < chunk_end; block0 += C::kAhead) {
#pragma unroll
          for (int i = 0; i < C::kAhead; ++i) {
            const int block = block0 + i;
            if (block >= chunk_end) break;
            // what has been used is asked for anew: the block of inputs after those on their way, or of the next tile
            const bool same = block + C::kAhead < slice.count;
            const int next = same ? block + C::kAhead : i;
            const float scale = scale_of(scales[i]);
            if (same || left > 0) scales[i] = load_scale(same ? tile : tile + 1, next);
#pragma unroll
            for (int m = 0; m < C::kRowTiles; m += C::kTogether) {
              multiply(sums, &steps[i * C::kRowTiles + m], scale, m, block - chunk);
              if (same || left > 0) {
#pragma unroll
                for (int k = 0; k < C::kTogether; ++k) load(steps[i * C::kRowTiles + m + k], weights + (same ? 0 : tile_bytes), next, m + k);
              }
            }
          }
        }
      }
      if (!resident) __syncthreads();
      finish(sums, tile, group);
      if (left > 0) __syncthreads();
      weights += tile_bytes;
    }
  }
};

template <typename C>
__global__ void __launch_bounds__(kThreads, C::kMinBlocks) linear_kernel(const __grid_constant__ Params p, const __grid_constant__ Plan plan) {
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

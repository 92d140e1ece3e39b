// y = x W^T for 9 to 64 rows: a block has 64 to 256 outputs, so that x is read few times, and every weight is decoded once.
//
// Weights and x come by asynchronous copies through a ring of stages of 64 inputs, kStages of them. A thread copies those weights
// that it multiplies, so it needs nobody's leave to overwrite them; x is every warp's.
//
// Operands and the order of sums are kernel.cuh's, so are the bits: mmas of 64 inputs from zero, times scale, added to the slice's
// sum in order; slices by a binary tree. Slices of a block are its groups of warps, and in each group one after the other.
#pragma once

#include <iterator>
#include <utility>

#include "kernel.cuh"

namespace dsv4::fp8_linear {

template <int kColumnTiles_, int kRowTiles_, int kWarpRows_, bool kRotates_>
struct TileConfig {
  static constexpr int kColumnTiles = kColumnTiles_, kRowTiles = kRowTiles_, kWarpRows = kWarpRows_;
  static constexpr bool kRotates = kRotates_;
  static constexpr int kRows = kColumnTiles * kColumns, kWarpOutputs = kRowTiles * kTileRows, kOutputs = kWarpOutputs * kWarpRows;
  static constexpr int kGroups = kWarps / kWarpRows, kGroupThreads = 32 * kWarpRows;
  static constexpr int kWeightBytes = kWarpOutputs * kStageInputs, kXBytes = kRows * kStageInputs * 2;  // of a stage: a warp's, a group's
  static constexpr bool kPairs = kGroups == 1;  // of slices, one after the other; else each group has one
  static constexpr bool kStashes = kPairs && stashes(kColumnTiles, kRowTiles);
  static constexpr int kStages = tile_stages(kColumnTiles, kRowTiles, kWarpRows);
  static constexpr int kRowsTogether = kGroupThreads / 8;  // 8 threads copy a row of x
  static constexpr int kCopies = kRows > kRowsTogether ? kRows / kRowsTogether : 1;
  // column tiles whose products are interleaved
  static constexpr int kTogether = kRowTiles == 2 ? (kColumnTiles == 8 ? 1 : 2) : 4 < kColumnTiles ? 4 : 2;
  static constexpr int kOutRows = kRows < 32 ? kRows : 32, kOutPitch = kWarpOutputs + 4;
  static_assert(kOutRows * kOutPitch * 4 <= kStages * kWeightBytes);
  static_assert(kGroups == 1 || kGroupThreads * kRowTiles * kColumnTiles * 16 <= kStages * kGroups * kXBytes);
};

template <typename C>
struct TileBarriers {
  Barriers<C::kGroups * C::kStages> full, empty;  // of a group's slots
};

template <typename C>
struct Tile {
  const Params& p;
  const Plan& plan;
  unsigned char* const shared;
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32);
  const int group = warp / C::kWarpRows, thread = threadIdx.x % C::kGroupThreads;

  __device__ __forceinline__ const TileBarriers<C>& barriers() const { return *reinterpret_cast<const TileBarriers<C>*>(shared); }
  __device__ __forceinline__ Barrier full(int slot) const { return barriers().full[group * C::kStages + slot]; }
  __device__ __forceinline__ Barrier empty(int slot) const { return barriers().empty[group * C::kStages + slot]; }
  __device__ __forceinline__ unsigned char* warp_weights() const { return shared + kTileBarrierBytes + warp * C::kStages * C::kWeightBytes; }
  __device__ __forceinline__ unsigned char* all_x() const { return shared + kTileBarrierBytes + kWarps * C::kStages * C::kWeightBytes; }
  __device__ __forceinline__ void sync_group() const { sync_threads<C::kGroupThreads>(1 + group); }

  using Sums = float[C::kRowTiles][C::kColumnTiles][4];

  // sums += 16 kRowTiles outputs x all rows x 64 inputs; `x`, `x8`: this lane's first and second 8 inputs of the first column tile
  __device__ __forceinline__ void multiply(Sums& sums, const uint32_t (&a)[C::kRowTiles][4][4], uint32_t x, uint32_t x8, float scale) const {
#pragma unroll
    for (int n0 = 0; n0 < C::kColumnTiles; n0 += C::kTogether) {
      uint4 b[C::kTogether][2];
      float d[C::kTogether][C::kRowTiles][4] = {};
#pragma unroll
      for (int n = 0; n < C::kTogether; ++n) {
        b[n][0] = load_shared(x + (n0 + n) * kColumns * 2 * kStageInputs);
        b[n][1] = load_shared(x8 + (n0 + n) * kColumns * 2 * kStageInputs);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int n = 0; n < C::kTogether; ++n) {
#pragma unroll
          for (int m = 0; m < C::kRowTiles; ++m) {
            mma_bf16(d[n][m], a[m][j], word_of(b[n][j / 2], j % 2 * 2), word_of(b[n][j / 2], j % 2 * 2 + 1));
          }
        }
      }
#pragma unroll
      for (int n = 0; n < C::kTogether; ++n) {
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[m][n0 + n][i] = fmaf(d[n][m][i], scale, sums[m][n0 + n][i]);
        }
      }
    }
  }

  // Sums of a thread in fours, `stride` apart: to `to`, or with those there added.
  static __device__ __forceinline__ void put(const Sums& sums, float4* to, int stride) {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < C::kColumnTiles; ++n) {
        const float (&s)[4] = sums[m][n];
        to[(m * C::kColumnTiles + n) * stride] = make_float4(s[0], s[1], s[2], s[3]);
      }
    }
  }
  static __device__ __forceinline__ void add_those(Sums& sums, const float4* from, int stride) {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < C::kColumnTiles; ++n) {
        const float4 other = from[(m * C::kColumnTiles + n) * stride];
        float (&s)[4] = sums[m][n];
        s[0] += other.x, s[1] += other.y, s[2] += other.z, s[3] += other.w;
      }
    }
  }

  // A warp's sums to where its weights were, and from there four neighbours of the output a lane.
  __device__ __forceinline__ void store(const Sums& sums, int which, int output0) const {
    float* const here = reinterpret_cast<float*>(warp_weights());
    constexpr int kLanes = C::kWarpOutputs / 4, kStep = 32 / kLanes;
    const int64_t all = static_cast<int64_t>(p.groups) * p.outputs;
#pragma unroll
    for (int n0 = 0; n0 < C::kColumnTiles; n0 += C::kOutRows / kColumns) {
      if (n0 * kColumns >= p.rows) break;
      __syncwarp();
#pragma unroll
      for (int n = 0; n < C::kOutRows / kColumns; ++n) {
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
          float* const to = here + (n * kColumns + lane % 4 * 2) * C::kOutPitch + m * kTileRows + lane / 4;
          const float (&s)[4] = sums[m][n0 + n];
          to[0] = s[0], to[C::kOutPitch] = s[1], to[8] = s[2], to[C::kOutPitch + 8] = s[3];
        }
      }
      __syncwarp();
#pragma unroll
      for (int r = 0; r < C::kOutRows; r += kStep) {
        const int row = n0 * kColumns + r + lane / kLanes, output = output0 + lane % kLanes * 4;
        const float4 y = *reinterpret_cast<const float4*>(here + (r + lane / kLanes) * C::kOutPitch + lane % kLanes * 4);
        if (row >= p.rows) break;
        if (gridDim.y > 1) {
          *reinterpret_cast<float4*>(p.partial + (static_cast<int64_t>(blockIdx.y) * p.rows + row) * all + which * p.outputs + output) = y;
        } else {
          *reinterpret_cast<uint2*>(p.out + row * p.out_stride + which * p.out_stride_group + output) =
              make_uint2(pack_bf16x2(y.x, y.y), pack_bf16x2(y.z, y.w));
        }
      }
    }
  }

  __device__ __forceinline__ void run() const {
    if (threadIdx.x < C::kGroups * C::kStages) {
      barriers().full[threadIdx.x].init(C::kGroupThreads);
      barriers().empty[threadIdx.x].init(C::kWarpRows);
    }
    // this group's slices lie beside each other
    const int slice = (blockIdx.y * C::kGroups + group) * (C::kPairs ? plan.in_turn : 1);
    const Part part = part_of(plan.slice_blocks, slice);
    const int count = slice < plan.slices ? part.count : 0;  // none for the second group where there is one slice
    const int begin = part.begin, boundary = C::kPairs && plan.in_turn > 1 ? 2 * part.count : -1;
    const int blocks = count + (boundary > 0 ? part_of(plan.slice_blocks, slice + 1).count : 0), halves = 2 * blocks;
    const int which = p.groups == 1 ? 0 : blockIdx.x / plan.group_tiles;
    const uint32_t weight_row = (blockIdx.x * C::kWarpRows + warp % C::kWarpRows) * C::kWarpOutputs;

    const uint64_t rows8 = static_cast<uint64_t>(p.weight_stride) * 8;
    const uint8_t* weights = p.weight + static_cast<uint64_t>(weight_row + lane / 4) * p.weight_stride + begin * kBlock + lane % 4 * 16;
    const uint32_t weights_here = shared_address(warp_weights()) + lane * 16;
    const auto load_weights = [&](int slot) {  // of the next stage
      const uint32_t to = weights_here + slot * C::kWeightBytes;
#pragma unroll
      for (int r = 0; r < 2 * C::kRowTiles; ++r) cp_async_stream(to + r * 512, weights + r * rows8);
      weights += kStageInputs;
    };
#pragma unroll
    for (int i = 0; i < C::kStages; ++i) {
      if (i < halves) load_weights(i);
    }
    const uint8_t* const scale_at = static_cast<const uint8_t*>(p.scale) + static_cast<uint64_t>(weight_row / kBlock) * p.scale_stride_output;
    const auto load_scale = [&](int block) -> uint32_t {
      const uint8_t* const at = scale_at + static_cast<uint64_t>(begin + min(block, blocks - 1)) * p.scale_stride_input;
      return load_stored(at, p.scale_bytes);
    };
    uint32_t scales = load_scale(lane);

    __syncthreads();
    pdl_wait();
    const int x_row = thread / 8;
    const bool copies = C::kRows >= C::kRowsTogether || x_row < C::kRows;
    const uint16_t* x_from[C::kCopies];
    int32_t positions[C::kRotates ? C::kCopies : 1];
#pragma unroll
    for (int c = 0; c < C::kCopies; ++c) {
      const int row = min(x_row + c * C::kRowsTogether, p.rows - 1);
      x_from[c] = p.x + static_cast<uint64_t>(which) * p.x_stride_group + static_cast<uint64_t>(row) * p.x_stride + begin * kBlock + thread % 8 * 8;
    }
    unsigned char* const group_x = all_x() + group * C::kStages * C::kXBytes;
    const uint32_t x_place = x_row * (2 * kStageInputs) + (thread % 8 ^ x_row % 2) * 16, x_here = shared_address(group_x);
    const uint32_t lane_x = x_here + lane / 4 * (2 * kStageInputs) + lane % 4 * 32 + lane / 4 % 2 * 16;
    const auto load_x = [&](int slot) {  // of the next stage
      const uint32_t to = x_here + x_place + slot * C::kXBytes;
#pragma unroll
      for (int c = 0; c < C::kCopies; ++c) {
        if (copies) cp_async_16(to + c * C::kRowsTogether * 2 * kStageInputs, reinterpret_cast<uint64_t>(x_from[c]), true);
        x_from[c] += kStageInputs;
      }
      full(slot).arrive_copies();
    };
#pragma unroll
    for (int i = 0; i < C::kStages - 1; ++i) {
      if (i < halves) load_x(i);
    }
    if constexpr (C::kRotates) {
#pragma unroll
      for (int c = 0; c < C::kCopies; ++c) positions[c] = load_position(p, min(x_row + c * C::kRowsTogether, p.rows - 1));
    }

    Sums sums = {}, before;  // `before` is unused where the stash is
    float4* const stash = reinterpret_cast<float4*>(p.partial + plan.stash) +
                          (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * (C::kRowTiles * C::kColumnTiles * kThreads) + threadIdx.x;
    float scale = 0;
    int slot = 0, last = C::kStages - 1;
    unsigned i = 0;
    uint32_t phase = 0, last_phase = 1;  // of `last` as it is used before
    for (unsigned end = boundary > 0 ? boundary : halves;; end = halves) {
#pragma unroll 1
      for (; i < end; ++i) {
        if (i % 2 == 0) {
          if (i >= 64 && i % 64 == 0) scales = load_scale(i / 2 + lane);
          scale = block_scale(__shfl_sync(0xffffffff, scales, i / 2 % 32), p.scale_bytes);
        }
        if constexpr (C::kRotates) {
          // the last 64 inputs of a head are one stage
          if ((2 * begin + i) % (2 * kHeadBlocks) == 2 * kHeadBlocks - 1) {
            float4 turn[C::kCopies][2];
#pragma unroll
            for (int c = 0; c < C::kCopies; ++c) {
              const float4* const from = rotation_of(p, positions[c], thread % 8);
              turn[c][0] = __ldg(from), turn[c][1] = __ldg(from + 1);
            }
            full(slot).wait(phase);
            if (copies) {
#pragma unroll
              for (int c = 0; c < C::kCopies; ++c) {
                unsigned char* const at = group_x + slot * C::kXBytes + x_place + c * C::kRowsTogether * 2 * kStageInputs;
                *reinterpret_cast<uint4*>(at) = rotated_back(load_shared(at), turn[c][0], turn[c][1]);
              }
            }
            sync_group();
          }
        }
        full(slot).wait(phase);
        uint4 now[C::kRowTiles][2];
#pragma unroll
        for (int r = 0; r < 2 * C::kRowTiles; ++r) now[r / 2][r % 2] = load_shared(weights_here + slot * C::kWeightBytes + r * 512);
        uint32_t a[C::kRowTiles][4][4];
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            decode(word_of(now[m][0], j), a[m][j][0], a[m][j][2]);
            decode(word_of(now[m][1], j), a[m][j][1], a[m][j][3]);
          }
        }
        // x before weights: a stage has all its bytes when those of x have come
        if (i + C::kStages - 1 < halves) {
          if (i > 0) empty(last).wait(last_phase);
          load_x(last);
        }
        if (i + C::kStages < halves) load_weights(slot);
        multiply(sums, a, lane_x + slot * C::kXBytes, (lane_x ^ 16) + slot * C::kXBytes, scale);
        __syncwarp();
        if (lane == 0) empty(slot).arrive();
        last = slot, last_phase = phase;
        if (++slot == C::kStages) slot = 0, phase ^= 1;
      }
      if (i == halves) break;
      if constexpr (C::kStashes) put(sums, stash, kThreads);
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < C::kColumnTiles; ++n) {
#pragma unroll
          for (int k = 0; k < 4; ++k) before[m][n][k] = sums[m][n][k], sums[m][n][k] = 0;
        }
      }
    }
    if constexpr (C::kStashes) {
      if (boundary > 0) add_those(sums, stash, kThreads);
    } else if (boundary > 0) {
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < C::kColumnTiles; ++n) {
#pragma unroll
          for (int k = 0; k < 4; ++k) sums[m][n][k] = before[m][n][k] + sums[m][n][k];
        }
      }
    }
    if constexpr (C::kGroups > 1) {
      float4* const exchange = reinterpret_cast<float4*>(all_x()) + thread;
      __syncthreads();
      if (group == 1) put(sums, exchange, C::kGroupThreads);
      __syncthreads();
      if (group == 1) return;
      if (plan.slices > 1) add_those(sums, exchange, C::kGroupThreads);
    }
    store(sums, which, weight_row - which * p.outputs);
  }
};

template <typename C>
__global__ void __launch_bounds__(kThreads, 1) tile_kernel(const __grid_constant__ Params p, const __grid_constant__ Plan plan) {
  extern __shared__ __align__(128) unsigned char shared[];
  pdl_trigger();
  Tile<C>{p, plan, shared}.run();
}

template <bool kRotates, size_t... kIndices>
const LinearKernel* tile_instances(std::index_sequence<kIndices...>) {
  static constexpr LinearKernel kKernels[] = {&tile_kernel<
      TileConfig<kTileVariants[kIndices].column_tiles, kTileVariants[kIndices].row_tiles, kTileVariants[kIndices].warp_rows, kRotates>>...};
  return kKernels;
}

template <bool kRotates>
const LinearKernel* tile_kernels() {
  return tile_instances<kRotates>(std::make_index_sequence<std::size(kTileVariants)>());
}

}  // namespace dsv4::fp8_linear

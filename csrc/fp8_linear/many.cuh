// y = x W^T for more than 64 rows, of a head's outputs more than 32: 128 outputs x 128 rows a unit, or 64, one after the other.
//
// Eight warps multiply 32 outputs x half of the unit's rows each; four copy stages of 64 inputs ahead of them, across units.
//
// Operands and the order of sums are kernel.cuh's, so are the bits: mmas of 64 inputs from zero, times scale, added to the slice's
// sum in order; slices by a binary tree. A unit has up to all eight slices in turn: one slice's sums wait in registers for their
// neighbour's, those of two and four slices in memory.
//
// Units follow each other by bands of rows, whose x an L2 holds, and in a band by outputs, whose weights are then read by all of
// its rows.
#pragma once

#include "../device/stages.cuh"
#include "kernel.cuh"
#include "many.h"

namespace dsv4::fp8_linear {

constexpr int kUnitOutputs = 128, kUnitRows = 128, kQuarterRows = 32;
constexpr int kMathThreads = 256, kCopyThreads = 128, kUnitThreads = kMathThreads + kCopyThreads;
constexpr int kWarpsAcross = 4, kWarpOutputs = kUnitOutputs / kWarpsAcross;
constexpr int kUnitStages = 4;
constexpr int kOutRows = 16, kOutPitch = kWarpOutputs + 4;  // floats, of a warp's area

struct alignas(128) UnitStage {
  unsigned char weights[kUnitOutputs][kStageInputs];
  unsigned char x[kUnitRows][2 * kStageInputs];  // of every second row the 16 bytes of each 32 are exchanged
};
struct UnitShared {
  UnitStage stages[kUnitStages];
  Barriers<kUnitStages> full, empty;
};
constexpr int kUnitShared = sizeof(UnitShared), kAreaBytes = sizeof(UnitStage) / (kMathThreads / 32);
static_assert(kUnitShared <= kMaxSharedBytes && kOutRows * kOutPitch * 4 <= kAreaBytes);

struct Unit {
  int tile, group;    // of the outputs; whose
  int row0, rows;
  int split, slice;   // its first slice
  int begin, blocks;  // of 128 inputs
};
__device__ __forceinline__ Unit unit_of(const Params& p, const Plan& plan, unsigned i) {
  const unsigned tiles = plan.group_tiles * p.groups, of_split = tiles * plan.row_blocks, of_band = tiles * plan.band;
  const unsigned split = i / of_split, in_split = i % of_split, band0 = in_split / of_band * plan.band, in_band = in_split % of_band;
  const unsigned here = min(plan.band, plan.row_blocks - band0);
  Unit u;
  u.tile = in_band / here, u.group = p.groups == 1 ? 0 : u.tile / plan.group_tiles;
  u.row0 = (band0 + in_band % here) * plan.unit_rows, u.rows = min(plan.unit_rows, p.rows - u.row0);
  u.split = split, u.slice = split * plan.in_turn;
  u.begin = part_of(plan.slice_blocks, u.slice).begin;
  u.blocks = part_of(plan.slice_blocks, u.slice + plan.in_turn).begin - u.begin;
  return u;
}

// ---- four warps that copy

template <bool kRotates>
__device__ __forceinline__ void copy_units(const Params& p, const Plan& plan, UnitShared& s) {
  constexpr int kWeightRows = kCopyThreads / 4, kXRows = kCopyThreads / 8;  // copied side by side
  constexpr int kWeightCopies = kUnitOutputs / kWeightRows, kXCopies = kUnitRows / kXRows;
  const unsigned thread = threadIdx.x - kMathThreads;
  const unsigned weight_row = thread / 4, x_row = thread / 8, chunk = thread % 8;
  const uint32_t weight_place = shared_address(&s.stages[0].weights[weight_row][thread % 4 * 16]);
  const uint32_t x_place = shared_address(&s.stages[0].x[x_row][(chunk ^ x_row % 2) * 16]);
  const uint64_t next_weights = static_cast<uint64_t>(p.weight_stride) * kWeightRows, next_x = static_cast<uint64_t>(p.x_stride) * kXRows;
  const auto weights_of = [&](const Unit& u) {
    return p.weight + static_cast<uint64_t>(u.tile * kUnitOutputs + weight_row) * p.weight_stride + u.begin * kBlock + thread % 4 * 16;
  };
  const auto copy_weights = [&](int stage, const uint8_t* from) {
#pragma unroll
    for (int k = 0; k < kWeightCopies; ++k) {
      cp_async_stream(weight_place + stage * sizeof(UnitStage) + k * kWeightRows * kStageInputs, from + k * next_weights);
    }
  };
  const Unit first = unit_of(p, plan, blockIdx.x);
  int ahead = min(kUnitStages, 2 * first.blocks);  // stages whose weights are on their way
  const uint8_t* weights = weights_of(first);
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) copy_weights(i, weights + i * kStageInputs);
  pdl_wait();
  StagePlace<kUnitStages> at;
  for (unsigned i = blockIdx.x; i < static_cast<unsigned>(plan.units); i += gridDim.x) {
    const Unit u = unit_of(p, plan, i);
    const int halves = 2 * u.blocks;
    weights = weights_of(u);
    const uint16_t* x =
        p.x + static_cast<uint64_t>(u.group) * p.x_stride_group + static_cast<uint64_t>(u.row0 + x_row) * p.x_stride + u.begin * kBlock + chunk * 8;
#pragma unroll 1
    for (int half = 0; half < halves; ++half) {
      s.empty[at.stage].wait(at.phase ^ 1);
      if (half >= ahead) copy_weights(at.stage, weights);
      weights += kStageInputs;
      const uint32_t to = x_place + at.stage * sizeof(UnitStage);
#pragma unroll
      for (int k = 0; k < kXCopies; ++k) {
        cp_async_16_if(static_cast<int>(x_row + k * kXRows) < u.rows, to + k * sizeof(UnitStage::x[0]) * kXRows,
                       reinterpret_cast<uint64_t>(x + k * next_x), true);
      }
      x += kStageInputs;
      // the last 64 inputs of a head are one stage
      if (kRotates && (2 * u.begin + half) % (2 * kHeadBlocks) == 2 * kHeadBlocks - 1) {
        cp_async_wait_all();
#pragma unroll 2
        for (int k = 0; k < kXCopies; ++k) {
          const int32_t position = load_position(p, u.row0 + min(static_cast<int>(x_row + k * kXRows), u.rows - 1));
          const float4* const from = rotation_of(p, position, chunk);
          const float4 turn0 = __ldg(from), turn1 = __ldg(from + 1);
          const uint32_t here = to + k * sizeof(UnitStage::x[0]) * kXRows;
          store_shared(here, rotated_back(load_shared(here), turn0, turn1));
        }
        s.full[at.stage].arrive();
      } else {
        s.full[at.stage].arrive_copies();
      }
      at.advance();
    }
    ahead = 0;
  }
}

// ---- eight warps that multiply

using UnitSums = float[2][8][4];  // of a warp: 16 outputs, 8 rows, of an mma
constexpr int kUnitFours = 16;    // of a thread's sums

template <typename Use>
__device__ __forceinline__ void each_four(UnitSums& sums, Use use) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 8; ++n) use(sums[m][n], m * 8 + n);
  }
}

// sums += 32 outputs x 16 kSteps rows x 64 inputs. `weights`: this lane's 16 inputs of the warp's first output; `x`, `x8`: its first and
// second 8 inputs of the warp's first row. Between the products of 16 rows: operands of the next, sums of those before.
__device__ __forceinline__ void multiply_stage(UnitSums& sums, uint32_t weights, uint32_t x, uint32_t x8, float scale, int quarters) {
  constexpr int kSteps = 4;
  constexpr int kNext = kColumns * sizeof(UnitStage::x[0]);
  uint4 b[2][2];  // of 8 rows each: [rows][half of the lane's inputs]
  const auto load = [&](int step, int half) {
#pragma unroll
    for (int n = 0; n < 2; ++n) b[n][half] = load_shared((half == 0 ? x : x8) + (step * 2 + n) * kNext);
  };
  uint32_t a[2][4][4];
  uint4 stored[2][2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) stored[m][r] = load_shared(weights + (m * kTileRows + r * 8) * kStageInputs);
  }
  load(0, 0), load(0, 1);
  float d[2][2][4];
  const auto add = [&](int step, int n) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][step * 2 + n][i] = fmaf(d[m][n][i], scale, sums[m][step * 2 + n][i]);
    }
  };
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step == 2 && quarters == 1) break;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (step == 0) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          decode(word_of(stored[m][0], j), a[m][j][0], a[m][j][2]);
          decode(word_of(stored[m][1], j), a[m][j][1], a[m][j][3]);
        }
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if (j == 0 && step % 2 == 1) add(step - 1, n);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          if (j == 0) d[m][n][0] = d[m][n][1] = d[m][n][2] = d[m][n][3] = 0;
          mma_bf16(d[m][n], a[m][j], word_of(b[n][j / 2], j % 2 * 2), word_of(b[n][j / 2], j % 2 * 2 + 1));
        }
      }
      if (j % 2 == 1 && step + 1 < kSteps) load(step + 1, j / 2);
    }
    if (step % 2 == 1) add(step, 0), add(step, 1);
  }
}

// A warp's sums to its area, and from there four neighbours of the output a lane. `row0`: the warp's first, `count` of its rows are there;
// `output`: its first, of the group.
__device__ __forceinline__ void store_unit(const Params& p, bool splits, uint32_t area, const UnitSums& sums, const Unit& u, int row0, int count,
                                           int output) {
  const int lane = threadIdx.x % 32, here = lane % 8 * 4;
  const int64_t all = static_cast<int64_t>(p.groups) * p.outputs;
#pragma unroll
  for (int n0 = 0; n0 < 8; n0 += 2) {
    if (n0 * kColumns >= count) break;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const uint32_t to = area + ((n * kColumns + lane % 4 * 2) * kOutPitch + m * kTileRows + lane / 4) * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) store_shared_f32(to + (i % 2 * kOutPitch + i / 2 * 8) * 4, sums[m][n0 + n][i]);
      }
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kOutRows; r += 4) {
      const int row = n0 * kColumns + r + lane / 8;
      const float4 y = load_shared_f32x4(area + ((r + lane / 8) * kOutPitch + here) * 4);
      if (row >= count) break;
      if (splits) {
        *reinterpret_cast<float4*>(p.partial + (static_cast<int64_t>(u.split) * p.rows + row0 + row) * all + u.group * p.outputs + output + here) = y;
      } else {
        *reinterpret_cast<uint2*>(p.out + (row0 + row) * p.out_stride + u.group * p.out_stride_group + output + here) =
            make_uint2(pack_bf16x2(y.x, y.y), pack_bf16x2(y.z, y.w));
      }
    }
  }
}

__device__ __forceinline__ void multiply_units(const Params& p, const Plan& plan, UnitShared& s) {
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32), across = warp % kWarpsAcross;
  const uint32_t weights = shared_address(&s.stages[0].weights[across * kWarpOutputs + lane / 4][lane % 4 * 16]);
  const uint32_t x = shared_address(&s.stages[0].x[lane / 4][lane % 4 * 32 + lane / 4 % 2 * 16]);
  // of two slices, then of four
  float4* const stash = reinterpret_cast<float4*>(p.partial + plan.stash) + blockIdx.x * (2 * kUnitFours * kMathThreads) + warp * 32 + lane;
  const auto put = [&](UnitSums& sums, int level) {
    each_four(sums, [&](float (&sum)[4], int i) { stash[(level * kUnitFours + i) * kMathThreads] = make_float4(sum[0], sum[1], sum[2], sum[3]); });
  };
  const auto add_to = [&](UnitSums& sums, int level) {
    each_four(sums, [&](float (&sum)[4], int i) {
      const float4 v = stash[(level * kUnitFours + i) * kMathThreads];
      sum[0] = v.x + sum[0], sum[1] = v.y + sum[1], sum[2] = v.z + sum[2], sum[3] = v.w + sum[3];
    });
  };
  const auto load_scale = [&](const Unit& u, int block) {
    return load_stored(static_cast<const uint8_t*>(p.scale) + static_cast<uint64_t>(u.tile) * p.scale_stride_output +
                           static_cast<uint64_t>(u.begin + min(block, u.blocks - 1)) * p.scale_stride_input,
                       p.scale_bytes);
  };
  StagePlace<kUnitStages> at;
  Unit u = unit_of(p, plan, blockIdx.x);
  uint32_t scales = load_scale(u, lane);  // of 32 blocks of inputs
  for (unsigned index = blockIdx.x; index < static_cast<unsigned>(plan.units); index += gridDim.x) {
    const int quarters = ceil_div(u.rows, kUnitRows / 2), first_row = warp / kWarpsAcross * quarters * kQuarterRows, halves = 2 * u.blocks;
    const uint32_t warp_x = x + first_row * sizeof(UnitStage::x[0]);
    UnitSums sums = {}, before;
    float scale = 0;
    int half = 0;
    for (int done = 0;;) {  // slices
      const int end = 2 * (part_of(plan.slice_blocks, u.slice + done + 1).begin - u.begin);
#pragma unroll 1
      for (;;) {
        if (half % 2 == 0) {
          if (half >= 64 && half % 64 == 0) scales = load_scale(u, half / 2 + lane);
          scale = block_scale(__shfl_sync(0xffffffff, scales, half / 2 % 32), p.scale_bytes);
        }
        s.full[at.stage].wait(at.phase);
        const uint32_t stage = at.stage * sizeof(UnitStage);
        const uint32_t here = warp_x + stage, weights_here = weights + stage;
        multiply_stage(sums, weights_here, here, here ^ 16, scale, quarters);
        if (++half == halves) break;  // the last stage's place is where the sums go by
        __syncwarp();
        if (lane == 0) s.empty[at.stage].arrive();
        at.advance();
        if (half == end) break;
      }
      if (done % 2 == 1)
        each_four(sums, [&](float (&sum)[4], int i) {
          for (int k = 0; k < 4; ++k) sum[k] = before[i / 8][i % 8][k] + sum[k];
        });
      if (done % 4 == 3) add_to(sums, 0);
      if (done % 8 == 7) add_to(sums, 1);
      ++done;
      if (half == halves) break;
      if (done % 4 == 2) put(sums, 0);
      if (done % 8 == 4) put(sums, 1);
      each_four(sums, [&](float (&sum)[4], int i) {
        for (int k = 0; k < 4; ++k) before[i / 8][i % 8][k] = sum[k], sum[k] = 0;
      });
    }
    const Unit next = unit_of(p, plan, min(index + gridDim.x, static_cast<unsigned>(plan.units) - 1));
    scales = load_scale(next, lane);
    sync_threads<1, kMathThreads>();  // all have multiplied it
    const uint32_t area = shared_address(&s.stages[0]) + at.stage * sizeof(UnitStage) + warp * kAreaBytes;
    const int output = (u.tile - u.group * plan.group_tiles) * kUnitOutputs + across * kWarpOutputs;
    store_unit(p, plan.splits > 1, area, sums, u, u.row0 + first_row, min(u.rows - first_row, quarters * kQuarterRows), output);
    __syncwarp();
    if (lane == 0) s.empty[at.stage].arrive();
    at.advance();
    u = next;
  }
}

template <bool kRotates>
__global__ void __launch_bounds__(kUnitThreads, 1) units_kernel(const __grid_constant__ Params p, const __grid_constant__ Plan plan) {
  extern __shared__ __align__(128) unsigned char shared[];
  UnitShared& s = *reinterpret_cast<UnitShared*>(shared);
  pdl_trigger();
  if (threadIdx.x < kUnitStages) {
    s.full[threadIdx.x].init(kCopyThreads);
    s.empty[threadIdx.x].init(kMathThreads / 32);
  }
  __syncthreads();
  if (threadIdx.x >= kMathThreads) {
    set_registers<56, false>();
    copy_units<kRotates>(p, plan, s);
  } else {
    set_registers<224, true>();  // 56 + 2 x 224 = 3 x 168, of four warps each
    pdl_wait();
    multiply_units(p, plan, s);
  }
}

}  // namespace dsv4::fp8_linear

// out = x W^T for many rows: a block has a tile of outputs and rows, so that weights and x are read few times.
//
// Weights and x come by asynchronous copies through a ring of stages of 64 inputs. Operands and the order of sums are kernel.cuh's,
// so are the bits: what there a warp adds up of its sixteenth of the inputs, is added up here of each sixteenth in turn, and those
// sums in the same order.
//
// Shared memory: barriers | [stages][outputs, then rows][64 inputs]; the 16 bytes of odd rows are 64 bytes apart from where they
// were, so that two rows of four lanes each meet no bank twice.
#pragma once

#include "../device/copies.cuh"
#include "kernel.cuh"

namespace dsv4::bf16_linear {

constexpr int kStageInputs = 64, kRowBytes = 2 * kStageInputs, kMaxStages = 6;
constexpr int kTileWarps = 8, kTileThreads = 32 * kTileWarps;

template <int kOutputs_, int kRows_>
struct TileConfig {
  static constexpr int kOutputs = kOutputs_, kRows = kRows_;
  static constexpr int kStageBytes = (kOutputs + kRows) * kRowBytes;
  static constexpr int kStages = kStageBytes * kMaxStages < kMaxSharedBytes ? kMaxStages : kMaxSharedBytes / kStageBytes;
  static constexpr int kWarpsBeside = 4;  // along the outputs; the others along the rows
  static constexpr int kOutputTiles = kOutputs / (16 * kWarpsBeside), kRowTiles = kRows / (8 * kTileWarps / kWarpsBeside);  // of a warp
  static constexpr int kCopied = kTileThreads / 8;  // rows of a stage at a time: 8 threads copy one
  struct Shared {
    Barriers<kMaxStages> full, empty;
    alignas(128) unsigned char stages[kStages][kStageBytes];
  };
  static_assert(kOutputTiles > 0 && kOutputs % kCopied == 0 && kRows % kCopied == 0 && kStages > 2);
  static_assert(sizeof(Shared) <= kMaxSharedBytes);
};

template <typename C>
__global__ void __launch_bounds__(kTileThreads, 1) bf16_linear_tile_kernel(const Params p) {
  extern __shared__ __align__(128) unsigned char dynamic_shared_bytes[];
  auto& shared = *reinterpret_cast<typename C::Shared*>(dynamic_shared_bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  const unsigned row_blocks = ceil_div(p.rows, C::kRows);  // those of the same weights beside each other: the memory is asked once
  const int first_row = blockIdx.x % row_blocks * C::kRows, first_output = blockIdx.x / row_blocks * C::kOutputs;
  const int stages = p.inputs / kStageInputs, steps = p.inputs / kInputsMultiple;  // of 32 inputs, in a sixteenth
  pdl_trigger();
  if (threadIdx.x < C::kStages) {
    shared.full[threadIdx.x].init(kTileThreads);
    shared.empty[threadIdx.x].init(kTileWarps);
  }

  // rows beyond the last are the last again
  const int copied_row = threadIdx.x / 8, part = threadIdx.x % 8;
  const uint16_t* weights[C::kOutputs / C::kCopied];
  const uint16_t* rows[C::kRows / C::kCopied];
#pragma unroll
  for (int i = 0; i < C::kOutputs / C::kCopied; ++i) {
    const int output = min(first_output + copied_row + i * C::kCopied, p.outputs - 1);
    weights[i] = p.weight + output * p.weight_stride + part * 8;
  }
#pragma unroll
  for (int i = 0; i < C::kRows / C::kCopied; ++i) {
    const int row = min(first_row + copied_row + i * C::kCopied, p.rows - 1);
    rows[i] = p.x + row * p.x_stride + part * 8;
  }
  const uint32_t all = shared_address(shared.stages), to = all + copied_row * kRowBytes + (part ^ copied_row % 2 * 4) * 16;
  const auto load_weights = [&](int stage, int slot) {
#pragma unroll
    for (int i = 0; i < C::kOutputs / C::kCopied; ++i) {
      cp_async_stream(to + slot * C::kStageBytes + i * C::kCopied * kRowBytes, weights[i] + stage * kStageInputs);
    }
  };
  const auto load_rows = [&](int stage, int slot) {  // behind the stage's weights
#pragma unroll
    for (int i = 0; i < C::kRows / C::kCopied; ++i) {
      const uint32_t place = to + slot * C::kStageBytes + (C::kOutputs + i * C::kCopied) * kRowBytes;
      cp_async_16(place, reinterpret_cast<uint64_t>(rows[i] + stage * kStageInputs), true);
    }
    shared.full[slot].arrive_copies();
  };
#pragma unroll
  for (int i = 0; i < C::kStages - 1; ++i) {
    if (i < stages) load_weights(i, i);
  }
  __syncthreads();
  pdl_wait();
#pragma unroll
  for (int i = 0; i < C::kStages - 1; ++i) {
    if (i < stages) load_rows(i, i);
  }

  const int warp_output = warp % C::kWarpsBeside * C::kOutputTiles * 16, warp_row = warp / C::kWarpsBeside * C::kRowTiles * 8;
  const uint32_t lane_at = group * kRowBytes + (quarter ^ group % 2 * 4) * 16;
  const uint32_t my_weights = all + warp_output * kRowBytes + lane_at, my_rows = all + (C::kOutputs + warp_row) * kRowBytes + lane_at;
  float sums[C::kOutputTiles][C::kRowTiles][4] = {}, totals[C::kOutputTiles][C::kRowTiles][4] = {};
  int slot = 0, freed = C::kStages - 1, done = 0;  // steps of this sixteenth
  uint32_t phase = 0, freed_phase = 1;
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    shared.full[slot].wait(phase);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t here = slot * C::kStageBytes, other = half * 64;  // with its bit: the other 64 bytes of the row
      uint32_t even[C::kOutputTiles][4], odd[C::kOutputTiles][4];
#pragma unroll
      for (int m = 0; m < C::kOutputTiles; ++m) {
        const uint4 low = load_shared((my_weights ^ other) + here + m * 16 * kRowBytes);
        const uint4 high = load_shared((my_weights ^ other) + here + (m * 16 + 8) * kRowBytes);
        even[m][0] = low.x, even[m][1] = high.x, even[m][2] = low.y, even[m][3] = high.y;
        odd[m][0] = low.z, odd[m][1] = high.z, odd[m][2] = low.w, odd[m][3] = high.w;
      }
#pragma unroll
      for (int n = 0; n < C::kRowTiles; ++n) {
        const uint4 in = load_shared((my_rows ^ other) + here + n * 8 * kRowBytes);
#pragma unroll
        for (int m = 0; m < C::kOutputTiles; ++m) mma_bf16(sums[m][n], even[m], in.x, in.y);
#pragma unroll
        for (int m = 0; m < C::kOutputTiles; ++m) mma_bf16(sums[m][n], odd[m], in.z, in.w);
      }
      if (half == 0 && stage + C::kStages - 1 < stages) {
        if (stage > 0) shared.empty[freed].wait(freed_phase);
        load_weights(stage + C::kStages - 1, freed);
        load_rows(stage + C::kStages - 1, freed);
      }
      if (++done == steps) {
        done = 0;
#pragma unroll
        for (int m = 0; m < C::kOutputTiles; ++m) {
#pragma unroll
          for (int n = 0; n < C::kRowTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) totals[m][n][i] += sums[m][n][i], sums[m][n][i] = 0;
          }
        }
      }
    }
    __syncwarp();
    if (lane == 0) shared.empty[slot].arrive();
    freed = slot, freed_phase = phase;
    if (++slot == C::kStages) slot = 0, phase ^= 1;
  }

#pragma unroll
  for (int m = 0; m < C::kOutputTiles; ++m) {
#pragma unroll
    for (int n = 0; n < C::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int output = first_output + warp_output + m * 16 + group + i / 2 * 8, row = first_row + warp_row + n * 8 + quarter * 2 + i % 2;
        if (output < p.outputs && row < p.rows) store(p, row * p.out_stride + output, totals[m][n][i]);
      }
    }
  }
}

}  // namespace dsv4::bf16_linear

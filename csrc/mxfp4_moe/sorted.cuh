// Both products of the experts for many rows, to the bit as for few: pairs sorted by expert, 64 of one expert a tile.
//
//   prepare   x or h to the f16 that few rows multiply (product.cuh), in memory, with a power of two for each row and slice
//   product   128 weight rows x 64 pairs a unit, one unit after the other: eight warps multiply 16 weight rows by all pairs,
//             four copy stages of 64 inputs ahead of them, across units
//
// Sums of the 32 products with a common scale are exact, so mmas here are full where those of few rows keep four scales
// apart. The rest has their order: a slice has four sums, of the 32-input groups 0, 4, 8 .. to 3, 7, 11 .., each a chain of
// fused multiply-adds with the scale; (0 + 1) + (2 + 3), times the power; slices one after the other. A slice is passed twice,
// for groups 0 and 1 of each 128 inputs and then for 2 and 3, so that two sums are in registers beside the slice's and the total.
#pragma once

#include <type_traits>

#include "product.cuh"
#include "sorted.h"
#include "swiglu.cuh"
#include "units.cuh"

namespace dsv4::mxfp4_moe {

constexpr int kTileRows = 128, kTilePairs = 64;  // of a unit
constexpr int kMathThreads = 256, kCopyThreads = 128, kSortedThreads = kMathThreads + kCopyThreads;
constexpr int kPassInputs = 64;                                   // of a stage: two groups of 32
constexpr int kSortedStages = 6, kSliceSlots = 3;
constexpr int kOutPitch = 20;                                     // floats of a pair's 16 outputs

constexpr int unit_outputs(bool gated) { return gated ? kTileRows / 2 : kTileRows; }

struct alignas(128) SortedStage {
  unsigned char codes[kTileRows][32];         // two groups; their 16 bytes exchanged in every second four rows
  unsigned char x[2][kTilePairs * 64 + 64];   // of each group; the 64 bytes keep a row's two halves in other banks
};
struct SortedSlice {
  uint8_t scales[kTileRows][16];
  float powers[kTilePairs];
};
struct SortedShared {
  SortedStage stages[kSortedStages];
  SortedSlice slices[kSliceSlots];
  float out[kMathThreads / 32][8 * kOutPitch];  // a warp's own
  Barriers<kSortedStages> full, empty;
};
static_assert(sizeof(SortedShared) <= kMaxSharedBytes && sizeof(SortedStage) % 128 == 0);

// ---- four warps that copy

template <bool kGated>
__device__ __forceinline__ void copy_units(const SortedParams& p, SortedShared& s) {
  const int thread = threadIdx.x - kMathThreads;
  const int x_row = thread / 8, chunk = thread % 8, row = thread / 2, piece = thread % 2;
  const uint32_t x_place = shared_address(&s.stages[0].x[chunk / 4][x_row * 64 + chunk % 4 * 16]);
  const uint32_t code_place = shared_address(&s.stages[0].codes[row][(piece ^ (row >> 2 & 1)) * 16]);
  const int units = p.outputs / unit_outputs(kGated);
  StagePlace<kSortedStages> at;
  int slot = 0;
  for (unsigned unit = blockIdx.x;; unit += gridDim.x) {
    const SortedTile tile = tile_of(p, unit / units);
    if (tile.count == 0) {
      s.empty[at.stage].wait(at.phase ^ 1);  // one more, since those who multiply load a stage ahead
      s.full[at.stage].arrive_copies();
      break;
    }
    const int first = p.first + unit % units * unit_outputs(kGated);
    // of the tile's rows r and r + 64; gate and up
    const int row0 = kGated ? p.gate_row + first : first, row64 = kGated ? p.up_row + first : first + 64;
    // where this thread reads: 16 bytes of codes, 4 of scales, 8 inputs, a power before that
    const uint32_t codes = tile.expert * static_cast<uint32_t>(p.w.expert_bytes / 16) + (row0 + row) * (p.inputs / 32) + piece;
    const uint32_t to64 = (row64 - row0) * (p.inputs / 32);
    const uint32_t scales =
        tile.expert * static_cast<uint32_t>(p.w.expert_scale_bytes / 4) + (thread < 64 ? row0 + thread : row64 + thread - 64) * (p.inputs / 128);
    const auto source = [&](int r) {  // row of x that the tile's r-th pair has
      const int position = tile.begin + min(r, tile.count - 1);
      return kGated ? p.pairs[position] / p.topk : position;
    };
    uint32_t x[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) x[k] = static_cast<uint32_t>(source(x_row + 16 * k)) * (p.inputs / 8) + chunk;
    const uint32_t powers = source(thread % kTilePairs) * p.slices;
    int done = 0;  // inputs
    for (int slice = 0; slice < p.slices; ++slice) {
#pragma unroll 1
      for (int i = 0; i < 2 * p.steps; ++i) {
        s.empty[at.stage].wait(at.phase ^ 1);
        if (i == 0) {  // what the slice has once comes with its first stage
          SortedSlice& here = s.slices[slot];
          for (int b = 0; b < p.steps; ++b) cp_async<4>(&here.scales[thread][b * 4], p.w.scales + (scales + slice * p.steps + b) * int64_t{4});
          if (thread < kTilePairs) cp_async<4>(&here.powers[thread], p.powers + (powers + slice));
        }
        const int input = done + (i < p.steps ? i * 128 : (i - p.steps) * 128 + kPassInputs);
        const uint32_t stage = at.stage * sizeof(SortedStage);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint16_t* const from = p.x + (x[k] + input / 8) * int64_t{8};
          cp_async_16_if(x_row + 16 * k < tile.count, x_place + stage + k * 1024, reinterpret_cast<uint64_t>(from), true);
        }
        const uint32_t from = codes + input / 32;
        cp_async_16(code_place + stage, reinterpret_cast<uint64_t>(p.w.codes + from * int64_t{16}), true);
        cp_async_16(code_place + stage + 64 * 32, reinterpret_cast<uint64_t>(p.w.codes + (from + to64) * int64_t{16}), true);
        s.full[at.stage].arrive_copies();
        at.advance();
      }
      done += p.steps * 128;
      if (++slot == kSliceSlots) slot = 0;
    }
  }
}

// ---- eight warps that multiply

// Which pairs the tile has at the positions of this lane, and 32 behind.
__device__ __forceinline__ void load_pairs_of(int (&pairs)[2], const SortedParams& p, const SortedTile& tile) {
#pragma unroll
  for (int k = 0; k < 2; ++k) pairs[k] = p.pairs[tile.begin + min(k * 32 + static_cast<int>(threadIdx.x % 32), tile.count - 1)];
}

// A warp's total of 16 weight rows and the tile's pairs; `output`: the warp's first.
template <bool kGated, int kTiles>
__device__ __forceinline__ void store_unit(const SortedParams& p, float* area, const float (&total)[kTiles][4], const SortedTile& tile, int output,
                                           const int (&pairs)[2]) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  if constexpr (kGated) {
    uint16_t* const h = reinterpret_cast<uint16_t*>(area);  // [pair][8], of 16 pairs
#pragma unroll
    for (int from = 0; from < kTiles; from += 2) {
      __syncwarp();
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) h[(n * 8 + 2 * q + r) * 8 + g] = swiglu(total[from + n][r], total[from + n][2 + r], p.limit);
      }
      __syncwarp();
      const int pair = from * 8 + lane;
      if (lane < 16 && pair < tile.count) {
        *reinterpret_cast<uint4*>(p.h + static_cast<int64_t>(tile.begin + pair) * p.outputs + output) = *reinterpret_cast<const uint4*>(h + lane * 8);
      }
    }
  } else {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i) area[(2 * q + i % 2) * kOutPitch + i / 2 * 8 + g] = total[n][i];
      __syncwarp();
      const int pair = __shfl_sync(0xffffffffu, pairs[n / 4], n % 4 * 8 + g);
      if (n * 8 + g < tile.count) {
        float* const to = p.y + static_cast<int64_t>(pair) * p.outputs + output + q * 4;
        *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(&area[g * kOutPitch + q * 4]);
      }
    }
  }
}

// What a lane has of a stage's weights, as they are stored: of its two weight rows a word of each group, and two scales.
struct StoredGroups {
  uint32_t codes[2][2], scales[2];

  template <int kSecond>
  __device__ __forceinline__ void load(uint32_t of_codes, uint32_t of_scales) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int t = 0; t < 2; ++t) codes[r][t] = load_shared_u32((of_codes ^ t * 16) + r * kSecond * 32);
      scales[r] = load_shared_u16(of_scales + r * kSecond * 16);
    }
  }
};

using GroupOperand = uint32_t[2][4];  // of 16 weight rows and a group: [mma's inputs]

__device__ __forceinline__ void decode_group(const StoredGroups& stored, int t, GroupOperand& a) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint32_t pair[4];
    decode(stored.codes[r][t], pair);
    a[0][r] = pair[0], a[0][2 + r] = pair[1], a[1][r] = pair[2], a[1][2 + r] = pair[3];
  }
}

// kTogether times 8 pairs of x, of the group that the first of them has at `x`
template <int kTogether>
__device__ __forceinline__ void load_pairs(uint4 (&b)[kTogether], uint32_t x) {
#pragma unroll
  for (int n = 0; n < kTogether; ++n) b[n] = load_shared(x + n * 512);
}

// sums += 16 weight rows x kTiles times 8 pairs x a group, of the scales' byte t. `b` has the first of x already.
template <int kTiles, int kTogether>
__device__ __forceinline__ void multiply_group(float (&sums)[kTiles][4], const GroupOperand& a, const uint32_t (&scales)[2], int t, uint32_t x,
                                               uint4 (&b)[kTogether]) {
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) factor[r] = __uint_as_float((t == 0 ? scales[r] & 0xffu : scales[r] >> 8) << 23);
#pragma unroll
  for (int from = 0; from < kTiles; from += kTogether) {
    float part[kTogether][4] = {};
    if (from > 0) load_pairs(b, x + from * 512);
#pragma unroll
    for (int n = 0; n < kTogether; ++n) mma_f16(part[n], a[0], b[n].x, b[n].y);
#pragma unroll
    for (int n = 0; n < kTogether; ++n) mma_f16(part[n], a[1], b[n].z, b[n].w);
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[from + n][i] = fmaf(part[n][i], factor[i / 2], sums[from + n][i]);
    }
  }
}

// What a warp that multiplies has from unit to unit: the stage that it multiplies, the one behind it, of which the weights are loaded
// already, and those weights, of which the first group is decoded.
struct Ahead {
  StagePlace<kSortedStages> here, next;
  StoredGroups stored;
  GroupOperand first;
  int slot = 0;
};

template <bool kGated, int kTiles>
__device__ __forceinline__ void multiply_unit(const SortedParams& p, SortedShared& s, Ahead& ahead, uint32_t codes, uint32_t scales,
                                              const SortedTile& tile, int output) {
  constexpr int kSecond = kGated ? 64 : 8, kTogether = 2;
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, warp = uniform(threadIdx.x / 32);
  const uint32_t x = shared_address(&s.stages[0].x[0][g * 64 + q * 16]), powers = shared_address(&s.slices[0].powers[2 * q]);
  int pairs[2] = {};
  if constexpr (!kGated) load_pairs_of(pairs, p, tile);
  float total[kTiles][4], before[kTiles][4];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total[n][i] = -0.f;  // the first slice is added as it is
  }
  for (int slice = 0; slice < p.slices; ++slice) {
    const uint32_t slot = ahead.slot * sizeof(SortedSlice);
    if (++ahead.slot == kSliceSlots) ahead.slot = 0;
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
      const uint32_t of_scales = scales + slot + pass * 2, behind = pass == 0 ? of_scales + 2 : scales + ahead.slot * sizeof(SortedSlice);
      float sums[2][kTiles][4] = {};
#pragma unroll 1
      for (int step = 1; step <= p.steps; ++step) {
        const uint32_t here_x = x + ahead.here.stage * sizeof(SortedStage);
        uint4 b[kTogether];
        load_pairs(b, here_x);
        s.full[ahead.next.stage].wait(ahead.next.phase);
        const StoredGroups stored = ahead.stored;
        ahead.stored.load<kSecond>(codes + ahead.next.stage * sizeof(SortedStage), step < p.steps ? of_scales + step * 4 : behind);
        GroupOperand second;
        decode_group(stored, 1, second);
        multiply_group(sums[0], ahead.first, stored.scales, 0, here_x, b);
        load_pairs(b, here_x + sizeof(SortedStage::x[0]));
        decode_group(ahead.stored, 0, ahead.first);
        multiply_group(sums[1], second, stored.scales, 1, here_x + sizeof(SortedStage::x[0]), b);
        __syncwarp();
        if (lane == 0) s.empty[ahead.here.stage].arrive();
        ahead.here = ahead.next;
        ahead.next.advance();
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if (pass == 0) {
#pragma unroll
          for (int i = 0; i < 4; ++i) before[n][i] = __fadd_rn(sums[0][n][i], sums[1][n][i]);
        } else {
          const float2 power = load_shared_f32x2(powers + slot + n * 32);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float sum = __fadd_rn(before[n][i], __fadd_rn(sums[0][n][i], sums[1][n][i]));
            total[n][i] = __fadd_rn(total[n][i], __fmul_rn(sum, i % 2 == 0 ? power.x : power.y));
          }
        }
      }
    }
  }
  store_unit<kGated>(p, s.out[warp], total, tile, output + warp * (unit_outputs(kGated) / 8), pairs);
}

// A block's units one after the other: multiply(tile, the unit's first output, as many times 8 pairs as the tile needs, a constant).
template <int kOutputs, typename Multiply>
__device__ __forceinline__ void each_unit(const SortedParams& p, int units, Multiply multiply) {
  SortedTile next = tile_of(p, blockIdx.x / units);
  for (unsigned unit = blockIdx.x; next.count > 0; unit += gridDim.x) {
    const SortedTile tile = next;
    next = tile_of(p, (unit + gridDim.x) / units);
    const int output = static_cast<int>(unit % units) * kOutputs;
    if (tile.count > 48) {
      multiply(tile, output, std::integral_constant<int, 8>());
    } else if (tile.count > 32) {
      multiply(tile, output, std::integral_constant<int, 6>());
    } else if (tile.count > 16) {
      multiply(tile, output, std::integral_constant<int, 4>());
    } else {
      multiply(tile, output, std::integral_constant<int, 2>());
    }
  }
}

template <bool kGated>
__device__ __forceinline__ void multiply_units(const SortedParams& p, SortedShared& s) {
  const int units = p.outputs / unit_outputs(kGated);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * (kGated ? 8 : 16) + lane / 4;
  const uint32_t codes = shared_address(&s.stages[0].codes[row][(row >> 2 & 1) * 16 + lane % 4 * 4]);
  const uint32_t scales = shared_address(&s.slices[0].scales[row][0]);
  Ahead ahead;
  ahead.next.advance();
  s.full[0].wait(0);
  ahead.stored.load<kGated ? 64 : 8>(codes, scales);
  decode_group(ahead.stored, 0, ahead.first);
  each_unit<unit_outputs(kGated)>(p, units, [&](const SortedTile& tile, int output, auto tiles) {
    multiply_unit<kGated, tiles.value>(p, s, ahead, codes, scales, tile, output);
  });
}

template <bool kGated>
__global__ void __launch_bounds__(kSortedThreads, 1) sorted_kernel(const SortedParams p) {
  extern __shared__ __align__(256) unsigned char shared_memory[];  // of one name, so of one alignment with wide.cuh's
  SortedShared& s = *reinterpret_cast<SortedShared*>(shared_memory);
  if (threadIdx.x < kSortedStages) {
    s.full[threadIdx.x].init(kCopyThreads);
    s.empty[threadIdx.x].init(kMathThreads / 32);
  }
  __syncthreads();
  pdl_wait();
  pdl_trigger();
  if (threadIdx.x >= kMathThreads) {
    set_registers<40, false>();
    copy_units<kGated>(p, s);
  } else {
    set_registers<232, true>();  // 40 + 2 x 232 = 3 x 168, of four warps each
    multiply_units<kGated>(p, s);
  }
}

constexpr int kPrepareThreads = 256, kPrepareItems = 4;  // of a warp

// An item is a row's slice; in place where `to` is `from`.
__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(const PrepareParams p) {
  pdl_wait();
  pdl_trigger();
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * (kPrepareThreads / 32) + threadIdx.x / 32) * kPrepareItems;
  const int lane = threadIdx.x % 32, chunks = p.steps * 16;
  const int64_t items = p.rows * p.slices;
  uint4 v[kPrepareItems][2];
#pragma unroll
  for (int k = 0; k < kPrepareItems; ++k) {
    const int64_t item = min(first + k, items - 1);
    const uint16_t* const from = p.from + item / p.slices * p.from_stride + item % p.slices * (chunks * 8);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int chunk = i * 32 + lane;
      v[k][i] = chunk < chunks ? *reinterpret_cast<const uint4*>(from + chunk * 8) : make_uint4(0, 0, 0, 0);
    }
  }
#pragma unroll
  for (int k = 0; k < kPrepareItems; ++k) {
    const int64_t item = first + k;
    if (item >= items) break;
    const float power = prepare_slice<true>(v[k]);
    uint16_t* const to = p.to + item * (chunks * 8);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int chunk = i * 32 + lane;
      if (chunk < chunks) *reinterpret_cast<uint4*>(to + chunk * 8) = v[k][i];
    }
    if (lane == 0) p.powers[item] = power;
  }
}

constexpr int kSumThreads = 128, kSumTogether = 6;  // slots that are loaded at once

// A row: from zero, fma(weight, y, sum) over its slots in their order, those without a local expert left out; then the factor of all.
// 8 columns a thread.
template <typename Y>
__global__ void __launch_bounds__(kSumThreads) sorted_sum_kernel(const SumParams p) {
  pdl_wait();
  pdl_trigger();
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x, row = item / (p.columns / 8);
  const int column = static_cast<int>(item % (p.columns / 8)) * 8;
  if (row >= p.rows) return;
  float sum[8] = {};
  for (int begin = 0; begin < p.topk; begin += kSumTogether) {
    bool local[kSumTogether];
    float weight[kSumTogether];
    uint4 y[kSumTogether][sizeof(Y) / 2];
#pragma unroll
    for (int k = 0; k < kSumTogether; ++k) {
      const int slot = min(begin + k, p.topk - 1);
      local[k] = begin + k < p.topk && p.pair_expert[row * p.topk + slot] >= 0;
      weight[k] = p.topk_weights[row * p.weights_stride + slot];
    }
#pragma unroll
    for (int k = 0; k < kSumTogether; ++k) {
      if (!local[k]) continue;
      const uint4* const from = reinterpret_cast<const uint4*>(static_cast<const Y*>(p.y) + (row * p.topk + begin + k) * p.columns + column);
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(Y)) / 2; ++i) y[k][i] = from[i];
    }
#pragma unroll
    for (int k = 0; k < kSumTogether; ++k) {
      if (!local[k]) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t word = sizeof(Y) == 4 ? word_of(y[k][i / 4], i % 4) : word_of(y[k][0], i / 2);
        const float value = sizeof(Y) == 4 ? __uint_as_float(word) : i % 2 == 0 ? bf16_low(word) : bf16_high(word);
        sum[i] = fmaf(weight[k], value, sum[i]);
      }
    }
  }
  uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = pack_bf16x2(sum[2 * i] * p.routed_scaling, sum[2 * i + 1] * p.routed_scaling);
  *reinterpret_cast<uint4*>(p.out + row * p.out_stride + column) = make_uint4(out[0], out[1], out[2], out[3]);
}

}  // namespace dsv4::mxfp4_moe

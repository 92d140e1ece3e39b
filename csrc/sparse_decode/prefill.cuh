// The same attention for many rows, where a block has 64 heads of a row to itself, and one row after the other: throughput, not latency.
//
// Four warps gather a leaf's candidates as they are, one leaf ahead, across rows; the others dequantise them once for all heads: E4M3 times a
// power of two is exact in bf16. A team of four warps has 32 heads; each warp keeps q and the accumulator of 128 of the 512 dimensions in
// registers, and of a leaf touches these dimensions alone, for both products. A team multiplies, adds the warps' scores, weighs, multiplies.
//
// Weights are rounded to bf16 relative to the row's running reference, and the second product accumulates over the whole row: a row's bits
// do not depend on other rows, on padding or on the caches' widths, and differ from kernel.cuh's by rounding.
#pragma once

#include "fold.cuh"
#include "kernels.h"
#include "score.cuh"
#include "softmax.cuh"
#include "work.cuh"

namespace dsv4::sparse_decode::prefill {

constexpr int kTeamWarps = 4;
constexpr int kTeamThreads = 32 * kTeamWarps;
constexpr int kTeams = 2;                                    // of a block
constexpr int kGroups = 2;                                   // of 16 heads, of a team
constexpr int kTeamHeads = kGroups * kBlockHeads;
constexpr int kMathThreads = kTeams * kTeamThreads;
constexpr int kGatherThreads = 128;
constexpr int kThreads = kMathThreads + kGatherThreads;
constexpr int kWarpTiles = kTiles / kTeamWarps;              // of 64 dimensions
constexpr int kPieces = kHeadDim / 16;                       // of 16 dimensions
constexpr int kRotaryPieces = kRopeDim / 16;
constexpr int kHalfRow = kPieces * 16;                       // bytes: of each piece the dimensions 4 i and 4 i + 1, then all 4 i + 2 and 4 i + 3
constexpr int kTilePitch = 2 * kHalfRow + 16;                // bytes of a dequantised candidate: 65 x 16, conflict-free for ldmatrix
constexpr int kNextTile = kTileDim / 16 * 16;                // bytes between tiles in a half row
constexpr int kMathRows = 3;                                 // of a leaf that a warp dequantises, and a gathering warp
constexpr int kGatherRows = (kLeaf - kMathRows * kMathThreads / 32) / (kGatherThreads / 32);
static_assert(kHeads == kTeams * kTeamHeads, "a block's");
static_assert(kPieces == 32, "a lane dequantises a piece");
static_assert(kLeaf == kMathRows * kMathThreads / 32 + kGatherRows * kGatherThreads / 32, "all rows");
static_assert(4 * kLeaf == kGatherThreads, "four lanes copy a candidate");

struct TeamMemory {
  alignas(128) float scores[kTeamWarps][kTeamHeads][kLeaf];    // columns xor-swizzled by head
  alignas(16) uint8_t weights[kTeamHeads][kWeightPitch];       // bf16
  Fold folds[kTeamHeads];                                      // so far
  float factors[kTeamHeads];                                   // of the accumulator before a leaf; output factors
};

struct PrefillMemory {
  static constexpr bool kIsolates = false;        // rows are by themselves: what is not finite reaches those that ask for it

  alignas(128) uint8_t tile[kLeaf][kTilePitch];   // 33,280  dequantised
  TeamMemory teams[kTeams];                       // 38,912
  alignas(16) uint8_t rows[kLeaf][kDataBytes];    // 18,432  as gathered
  alignas(8) uint8_t scales[kLeaf][kScaleBytes];  //    256
  alignas(4) uint8_t valid[2][kLeaf];             //     64  of this leaf and of the next
  Barriers<> full;                                //      8  a leaf is gathered
  int leaves[2];                                  //      8  of this row and of the next
};
static_assert(sizeof(PrefillMemory) <= kMaxSharedBytes);

__device__ __forceinline__ int warp_team() { return threadIdx.x / kTeamThreads; }
__device__ __forceinline__ void team_sync() { sync_threads<kTeamThreads>(1 + warp_team()); }
__device__ __forceinline__ int quarter() { return threadIdx.x >> 5 & (kTeamWarps - 1); }

__device__ __forceinline__ void tile_sync() { sync_threads<15, kThreads>(); }

// The rows of a block, one after the other: item i is block of heads i % head_blocks of row i / head_blocks.
__device__ __forceinline__ int num_items(const Params& p) { return p.rows * p.head_blocks; }

// Four E4M3 values to bf16, times 2^-120: their bits, moved to their place.
__device__ __forceinline__ void e4m3x4_to_small_bf16(uint32_t bytes, uint32_t& low, uint32_t& high) {
  const uint32_t upper = (bytes & 0x80808080u) | (bytes >> 4 & 0x07070707u), lower = bytes << 4 & 0xf0f0f0f0u;
  low = __byte_perm(upper, lower, 0x1504);
  high = __byte_perm(upper, lower, 0x3726);
}

// E4M3 pieces to bf16: the lower pairs of each four values, then the upper pairs. In one factor up to a scale of 2^7, above it in two.
template <bool kTwoFactors>
__device__ __forceinline__ void dequantise_piece(uint4 v, int exponent, uint4& low, uint4& high) {
  const uint32_t factor = (kTwoFactors ? min(exponent + 120, 254) : exponent + 120) * 0x00800080u;
  const uint32_t rest = max(exponent - 134 + 127, 127) * 0x00800080u;
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  uint32_t l[4], h[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    e4m3x4_to_small_bf16(words[k], l[k], h[k]);
    l[k] = mul_bf16x2(l[k], factor);
    h[k] = mul_bf16x2(h[k], factor);
    if (kTwoFactors) {
      l[k] = mul_bf16x2(l[k], rest);
      h[k] = mul_bf16x2(h[k], rest);
    }
  }
  low = make_uint4(l[0], l[1], l[2], l[3]);
  high = make_uint4(h[0], h[1], h[2], h[3]);
}

// whether one of these bf16 is an infinity or NaN
__device__ __forceinline__ bool any_infinite(uint4 a, uint4 b) {
  const uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  uint32_t carries = 0;
#pragma unroll
  for (uint32_t w : words) carries |= (w & 0x7f807f80u) + 0x00800080u;
  return (carries & 0x80008000u) != 0;
}

// kRows gathered rows from first_row on to bf16: a lane takes a piece of each; some lanes take the rotary pieces.
template <int kRows, typename Memory>
__device__ __forceinline__ void dequantise(Memory& sm, int first_row) {
  constexpr int kNopePieces = kPieces - kRotaryPieces;
  const int lane = threadIdx.x & 31, tile = min(lane / (kTileDim / 16), kNumNopeTiles - 1);
  int exponents[kRows], greatest = 0;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    exponents[i] = sm.scales[first_row + i][tile];
    greatest = max(greatest, exponents[i]);
  }
  const bool two_factors = __any_sync(0xffffffffu, greatest > 134);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first_row + i;
    const uint4 v = *reinterpret_cast<const uint4*>(&sm.rows[row][lane * 16]);
    uint4 low, high;
    if (two_factors) {
      dequantise_piece<true>(v, exponents[i], low, high);
      if constexpr (Memory::kIsolates) {
        if (any_infinite(low, high)) {
          low = high = make_uint4(0, 0, 0, 0);
          if (lane < kNopePieces) sm.isolate(row);
        }
      }
    } else {
      dequantise_piece<false>(v, exponents[i], low, high);
    }
    if (lane < kNopePieces) {
      *reinterpret_cast<uint4*>(&sm.tile[row][lane * 16]) = low;
      *reinterpret_cast<uint4*>(&sm.tile[row][kHalfRow + lane * 16]) = high;
    }
  }
  if (lane < kRows * kRotaryPieces) {
    const int row = first_row + lane / kRotaryPieces, piece = lane % kRotaryPieces;
    const uint4* src = reinterpret_cast<const uint4*>(&sm.rows[row][kNopeDim + piece * 32]);
    uint4 a = src[0], b = src[1];
    if constexpr (Memory::kIsolates) {
      if (any_infinite(a, b)) {
        a = b = make_uint4(0, 0, 0, 0);
        sm.isolate(row);
      }
    }
    *reinterpret_cast<uint4*>(&sm.tile[row][(kNopePieces + piece) * 16]) = make_uint4(a.x, a.z, b.x, b.z);
    *reinterpret_cast<uint4*>(&sm.tile[row][kHalfRow + (kNopePieces + piece) * 16]) = make_uint4(a.y, a.w, b.y, b.w);
  }
}

// The gathering warps: four lanes copy a candidate. The slots or pages are loaded a leaf ahead, the lengths a row ahead.
template <bool kTable>
__device__ __forceinline__ void run_gathering(const Params& p, PrefillMemory& sm) {
  const int thread = threadIdx.x - kMathThreads, candidate = thread >> 2, piece = thread & 3;
  const uint32_t dst = shared_address(&sm.rows[candidate][piece * 16]);
  Work w;
  int item = blockIdx.x, next_main = 0, next_extra = 0, loaded = -1;
  const int32_t* table = nullptr;
  const auto load_lengths = [&](int of) {
    if (of >= num_items(p)) return;
    next_main = load_length(p.main, of / p.head_blocks);
    next_extra = load_length(p.extra, of / p.head_blocks);
  };
  const auto start_row = [&] {
    w.row = item / p.head_blocks;
    w.main_length = next_main;
    w.extra_length = next_extra;
    count_leaves(w);
    table = table_of<kTable>(p.extra_table, w.row);
    loaded = load_candidate<kTable>(p, w, table, 0, candidate);
    load_lengths(item + gridDim.x);
  };
  load_lengths(item);
  start_row();
  for (uint32_t leaf = 0, phase = 1, parity = 0;;) {  // phase: of the leaves so far; parity: of the rows so far
    const bool in_main = static_cast<int>(leaf) < w.main_leaves;
    const Cache& c = in_main ? p.main : p.extra;
    const auto [valid, page, entry] = locate<kTable>(p, w, loaded, leaf, candidate);
    const uint64_t start = reinterpret_cast<uint64_t>(c.pages) + static_cast<uint64_t>(page) * c.page_bytes;
    const uint64_t src = start + entry * kDataBytes + piece * 16;
    const uint64_t scales = start + static_cast<uint64_t>(c.page_size.divisor) * kDataBytes + entry * kScaleBytes;
    const int leaves = w.leaves;
    const bool row_ends = static_cast<int>(leaf) + 1 == leaves;
    if (!row_ends) loaded = load_candidate<kTable>(p, w, table, leaf + 1, candidate);
#pragma unroll
    for (int i = 0; i < kDataBytes / 64; ++i) cp_async_16(dst + i * 64, src + i * 64, valid);
    cp_async_8_if(piece == 0, shared_address(&sm.scales[candidate][0]), scales, valid);
    if (piece == 0) sm.valid[phase ^ 1][candidate] = valid;
    if (thread == 0) sm.leaves[parity] = leaves;
    sm.full->arrive_copies();
    __syncwarp();
    if (elect_one()) sm.full->arrive();
    phase ^= 1;
    ++leaf;
    if (row_ends) {
      item += gridDim.x;
      if (item < num_items(p)) start_row();
      leaf = 0;
      parity ^= 1;
    }
    sm.full->wait(phase);
    tile_sync();  // the tile is free
    dequantise<kGatherRows>(sm, kLeaf - kGatherRows * (kGatherThreads - thread / 32 * 32) / 32);
    tile_sync();  // the tile is there; the rows may be overwritten
    if (item >= num_items(p)) return;
  }
}

// The first product of this warp's dimensions by the leaf's candidates.
__device__ __forceinline__ void multiply_leaf(const PrefillMemory& sm, TeamMemory& team, const QueryTile (&q)[kGroups][kWarpTiles]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
  const uint32_t rows = shared_address(&sm.tile[lane & 7][quarter() * kWarpTiles * kNextTile + (lane >> 4) * 16 + (lane >> 3 & 1) * kHalfRow]);
  const uint32_t store = shared_address(&team.scores[quarter()][g][(2 * j) ^ ((g & 3) << 3)]);
  constexpr int kSteps = 4 * kWarpTiles / 2, kBatches = kLeaf / 16 * kSteps;  // batches of sixteen candidates and two k steps
  uint32_t r[2][2][4];                                                         // [batch][eight candidates]
  const auto load = [&](int batch) {
#pragma unroll
    for (int n = 0; n < 2; ++n) ldmatrix_x4(r[batch & 1][n], rows + (batch / kSteps * 2 + n) * 8 * kTilePitch + batch % kSteps * 32);
  };
  float dot[2][kGroups][4];
  load(0);
#pragma unroll
  for (int batch = 0; batch < kBatches; ++batch) {
    if (batch + 1 < kBatches) load(batch + 1);
    const int first = batch / kSteps * 2, s = batch % kSteps * 2;
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int m = 0; m < kGroups; ++m) {
          if (s + k == 0) dot[n][m][0] = dot[n][m][1] = dot[n][m][2] = dot[n][m][3] = 0.f;
          mma_bf16(dot[n][m], q[m][(s + k) / 4][(s + k) % 4], r[batch & 1][n][2 * k], r[batch & 1][n][2 * k + 1]);
        }
    if (batch % kSteps != kSteps - 1) continue;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int m = 0; m < kGroups; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          store_shared_f32x2((store ^ ((first + n) * 8 * 4)) + (m * kBlockHeads + half * 8) * kLeaf * 4, dot[n][m][2 * half],
                             dot[n][m][2 * half + 1]);
  }
}

// The valid candidates of a thread's eight, a bit each, from a byte for each of the leaf's.
__device__ __forceinline__ uint32_t valid_of_bytes(const uint8_t (&valid)[kLeaf]) {
  const uint32_t* bytes = reinterpret_cast<const uint32_t*>(valid) + (threadIdx.x & 3);
  return (bytes[0] * 0x10204080u >> 28) | (bytes[4] * 0x10204080u >> 28 << 4);
}

// Softmax of a leaf's scores for the team's heads; `head`: of this thread, `valid` and `isolated`: of its eight candidates.
__device__ __forceinline__ void weigh_leaf(TeamMemory& team, int head, uint32_t valid, uint32_t isolated, float logit_scale) {
  const int thread = threadIdx.x % kTeamThreads;
  Softmax softmax;
  softmax.load(team.scores, head, valid);
  if (isolated != 0) softmax.spoil(isolated);
  softmax.refer(logit_scale);
  const Fold fold = team.folds[head];
  const float reference = fmaxf(fold.reference, softmax.reference), factor = pow2_exact(fold.reference - reference);
  softmax.weigh(reference);
  const float total = softmax.total();
  softmax.store_bf16(team.weights, head);
  __syncwarp();  // all four have read the fold
  if ((thread & 3) == 0) {
    team.factors[head] = factor;
    team.folds[head] = {reference, fmaf(fold.sum, factor, total)};
  }
}

// The second product: accumulator * factors + weights * values of this warp's dimensions.
__device__ __forceinline__ void accumulate_leaf(const PrefillMemory& sm, const TeamMemory& team, Accumulator (&acc)[kGroups][kWarpTiles]) {
  const int lane = threadIdx.x & 31, g = lane >> 2;
  uint32_t a[kGroups][2][4];
#pragma unroll
  for (int m = 0; m < kGroups; ++m) {
#pragma unroll
    for (int step = 0; step < 2; ++step)
      ldmatrix_x4(a[m][step], shared_address(&team.weights[m * kBlockHeads + (lane & 15)][(lane >> 4) * 16 + step * 32]));
    const float f0 = team.factors[m * kBlockHeads + g], f1 = team.factors[m * kBlockHeads + g + 8];
    if (__any_sync(0xffffffffu, f0 != 1.f || f1 != 1.f)) {
#pragma unroll
      for (int tile = 0; tile < kWarpTiles; ++tile)
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
          for (int t = 0; t < 2; ++t)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              acc[m][tile][s][t][c] *= f0;
              acc[m][tile][s][t][2 + c] *= f1;
            }
    }
  }
  const uint32_t rows = shared_address(&sm.tile[lane & 15][quarter() * kWarpTiles * kNextTile + (lane >> 4) * kHalfRow]);
  uint32_t v[2][2][4];  // [piece][k step]
  const auto load = [&](int piece) {
#pragma unroll
    for (int step = 0; step < 2; ++step) ldmatrix_x4_trans(v[piece & 1][step], rows + step * 16 * kTilePitch + piece * 16);
  };
  load(0);
#pragma unroll
  for (int piece = 0; piece < 4 * kWarpTiles; ++piece) {
    if (piece + 1 < 4 * kWarpTiles) load(piece + 1);
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
      for (int m = 0; m < kGroups; ++m)
#pragma unroll
        for (int t = 0; t < 2; ++t) mma_bf16(acc[m][piece / 4][piece % 4][t], a[m][step], v[piece & 1][step][2 * t], v[piece & 1][step][2 * t + 1]);
  }
}

// Normalises and writes a head's dimensions of this warp, heads g + 8 half of a group, from `dst` on.
__device__ __forceinline__ void store_line(uint16_t* dst, float f, int half, const Accumulator (&acc)[kWarpTiles]) {
#pragma unroll
  for (int tile = 0; tile < kWarpTiles; ++tile)
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const float (&x)[4] = acc[tile][s][0];
      const float (&y)[4] = acc[tile][s][1];
      *reinterpret_cast<uint2*>(dst + tile * kTileDim + s * 16) =
          make_uint2(pack_bf16x2(x[2 * half] * f, x[2 * half + 1] * f), pack_bf16x2(y[2 * half] * f, y[2 * half + 1] * f));
    }
}

// Normalises and writes this warp's dimensions of a group of 16 heads.
__device__ __forceinline__ void store_prefill_output(const Params& p, const float* output_factors, int row, int group,
                                                     const Accumulator (&acc)[kWarpTiles]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = group * kBlockHeads + g + 8 * half;
    if (head >= p.heads) continue;
    store_line(p.out + row * p.out_stride_row + head * p.out_stride_head + quarter() * kWarpTiles * kTileDim + 4 * j, output_factors[g + 8 * half],
               half, acc);
  }
}

// q of a group of 16 heads and 64 dimensions from `src` on as m16k16 operands. One load a register: pairs would be moved again at every use.
__device__ __forceinline__ void load_query_tile(const uint16_t* src, int64_t stride, int heads, QueryTile& q) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = g + 8 * half;
    const uint32_t* at = reinterpret_cast<const uint32_t*>(src + head * stride) + 2 * j;
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int k = 0; k < 2; ++k) q[s][half + 2 * k] = head < heads ? at[8 * s + k] : 0;
  }
}

// q of this warp's heads and dimensions, of an item; nothing after the last
__device__ __forceinline__ void load_item_query(const Params& p, int item, QueryTile (&q)[kGroups][kWarpTiles]) {
  if (item >= num_items(p)) return;
  const int row = item / p.head_blocks, first_group = ((item - row * p.head_blocks) * kTeams + warp_team()) * kGroups;
#pragma unroll
  for (int m = 0; m < kGroups; ++m)
#pragma unroll
    for (int tile = 0; tile < kWarpTiles; ++tile) {
      const int first_head = (first_group + m) * kBlockHeads;
      load_query_tile(p.q + row * p.q_stride_row + first_head * p.q_stride_head + (quarter() * kWarpTiles + tile) * kTileDim, p.q_stride_head,
                      p.heads - first_head, q[m][tile]);
    }
}

__device__ __forceinline__ void run_mathematics(const Params& p, PrefillMemory& sm) {
  TeamMemory& team = sm.teams[warp_team()];
  const int head = threadIdx.x % kTeamThreads;
  QueryTile q[kGroups][kWarpTiles];
  load_item_query(p, blockIdx.x, q);
  uint32_t phase = 0, parity = 0;
  for (int item = blockIdx.x; item < num_items(p); item += gridDim.x, parity ^= 1) {
    Accumulator acc[kGroups][kWarpTiles] = {};
    if (head < kTeamHeads) team.folds[head] = {kEmpty, 0.f};
    sm.full->wait(phase);
    const int leaves = sm.leaves[parity];
#pragma unroll 1
    for (int leaf = 0; leaf < leaves; ++leaf) {
      sm.full->wait(phase);
      tile_sync();  // the tile is free
      dequantise<kMathRows>(sm, threadIdx.x / 32 * kMathRows);
      tile_sync();  // the tile is there
      multiply_leaf(sm, team, q);
      team_sync();  // the scores are there
      weigh_leaf(team, softmax_head(threadIdx.x % kTeamThreads), valid_of_bytes(sm.valid[phase]), 0, p.scale_log2);
      team_sync();  // the weights are there
      accumulate_leaf(sm, team, acc);
      phase ^= 1;
    }
    load_item_query(p, item + gridDim.x, q);
    team_sync();  // the last factors are used
    const int row = item / p.head_blocks, first_group = ((item - row * p.head_blocks) * kTeams + warp_team()) * kGroups;
    if (head < kTeamHeads) {
      const int global_head = first_group * kBlockHeads + head;
      const bool live = global_head < p.heads;
      const Fold fold = team.folds[head];
      team.factors[head] = live ? output_factor(p, global_head, fold) : 0.f;
      if (live && p.lse != nullptr) p.lse[static_cast<int64_t>(row) * p.heads + global_head] = lse_of(fold);
    }
    team_sync();  // the output factors are there
#pragma unroll
    for (int m = 0; m < kGroups; ++m) store_prefill_output(p, &team.factors[m * kBlockHeads], row, first_group + m, acc[m]);
  }
}

template <bool kTable>
__global__ void __launch_bounds__(kThreads, 1) sparse_prefill_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto& sm = *reinterpret_cast<PrefillMemory*>(shared);
  if (threadIdx.x == 0) sm.full->init(kGatherThreads + kGatherThreads / 32);  // the copies, and the masks
  __syncthreads();  // the barrier is there
  pdl_wait();
  pdl_trigger();
  if (threadIdx.x >= kMathThreads) {
    set_registers<40, false>();
    run_gathering<kTable>(p, sm);
  } else {
    set_registers<232, true>();  // 40 + 2 x 232 = 3 x 168, of four warps each
    run_mathematics(p, sm);
  }
}

}  // namespace dsv4::sparse_decode::prefill

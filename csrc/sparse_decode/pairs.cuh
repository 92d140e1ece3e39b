// The kernel for few rows once more, for throughput: the same arithmetic in the same order, so the same bits, where a row's leaves are folded
// straight into the row (at most kShortLeaves of them). For prompts of rows that have picks of their own.
//
// A block is two groups of four warps. A group has 16 heads of a row and everything that belongs to them, so that one group multiplies while
// the other waits. Above 16 heads wide.cuh has both tiles of heads in each warp.
//
// A warp has 128 of the 512 dimensions, for both products, q and the accumulator in registers. Of a leaf it multiplies all candidates by its
// dimensions (eight independent sums), takes the values into registers, frees the stage, weighs four heads, and multiplies again. Two warps
// gather for each group, up to two leaves ahead, across rows.
#pragma once

#include "kernels.h"
#include "score.cuh"
#include "softmax.cuh"
#include "value.cuh"

namespace dsv4::sparse_decode::pairs {

constexpr int kGroupWarps = 4;
constexpr int kGroupThreads = 32 * kGroupWarps;
constexpr int kMathThreads = kGroups * kGroupThreads;
constexpr int kThreads = kMathThreads + kGroups * 32 * kGatherWarps;
constexpr int kWarpTiles = kTiles / kGroupWarps;            // of 64 dimensions
constexpr int kStages = 2, kWideStages = 3;                 // of gathered rows, of a group; of a block (wide.cuh)
constexpr int kHeadLanes = kGroupThreads / kBlockHeads;     // that weigh a head, four candidates each
static_assert(kGroups == 2 && kWarpTiles == 2, "two pairs of gathering warps; the rotary tile is a warp's second");
static_assert(4 * kHeadLanes == kLeaf, "a lane's candidates");
static_assert(32 * kGatherWarps * kGroups == 128, "registers are set for four warps at a time");

struct GroupMemory {
  Stage stages[kStages];                                      // 38,400
  alignas(128) float scores[kGroupWarps][kBlockHeads][kLeaf];   //  8,192  columns xor-swizzled by head
  alignas(16) uint8_t weights_f16[kBlockHeads][kWeightPitch];   //  1,280
  alignas(16) uint8_t weights_bf16[kBlockHeads][kWeightPitch];  //  1,280
  QueryAmax q_amax;                                           //    512
  float2 factors[kBlockHeads];                                //    128  (old, new) fold factors of a leaf
  float output_factors[kBlockHeads];                          //     64
  Barriers<kStages> full, free;                               //     32  a stage is filled; it may be
  Barriers<> scored;                                          //      8  the scores of a leaf are there
  uint32_t last[kStages];                                     //      8  whether it is the row's last leaf
  alignas(4) uint16_t valid[kStages][kGatherWarps];           //      8  a bit a candidate
};
struct Memory {
  GroupMemory groups[kGroups];
};
static_assert(sizeof(Memory) <= kMaxSharedBytes);

// A value that is kept: the compiler would work it out anew in every round of a loop.
__device__ __forceinline__ uint32_t kept(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}

__device__ __forceinline__ void group_sync() { sync_threads<kGroupThreads>(1 + threadIdx.x / kGroupThreads); }

// What a group has to do, one after the other: item i is heads (i % head_blocks) of row i / head_blocks. kWide: what a block has (wide.cuh).
__device__ __forceinline__ int num_items(const Params& p) { return p.rows * p.head_blocks; }
template <bool kWide>
__device__ __forceinline__ int first_item(int group) {
  return kWide ? blockIdx.x : blockIdx.x * kGroups + group;
}
template <bool kWide>
__device__ __forceinline__ int item_stride() {
  return kWide ? gridDim.x : gridDim.x * kGroups;
}

// Where leaf n of a group is, or of a block.
template <bool kWide>
struct LeafPlace {
  static constexpr int kCount = kWide ? kWideStages : kStages;
  int stage, offset;
  uint32_t phase;

  __device__ __forceinline__ explicit LeafPlace(uint32_t n)
      : stage(n % kCount), offset(stage * static_cast<int>(sizeof(Stage))), phase(n / kCount & 1) {}
};
__device__ __forceinline__ GroupMemory& ring_of(Memory& sm, int group) { return sm.groups[group]; }

// The gathering warps, two for a group, or for every second leaf of a block: 16 candidates each. A lane finds the address of a candidate, eight
// copy it. Slots are loaded a leaf ahead, lengths a row ahead.
template <bool kWide, bool kTable, typename SharedMemory>
__device__ __forceinline__ void run_gathering(const Params& p, SharedMemory& sm) {
  const int warp = (threadIdx.x - kMathThreads) / 32, lane = threadIdx.x & 31, piece = lane & 7;
  const int set = warp / kGatherWarps, half = warp % kGatherWarps, first_row = half * kGatherRows, lane_row = first_row + lane % kGatherRows;
  auto& ring = ring_of(sm, set);
  const uint32_t rows = shared_address(&ring.stages[0].rows[first_row + (lane >> 3)][piece * 16]);
  const uint32_t scales = shared_address(&ring.stages[0].scales[lane_row][0]);
  int item = first_item<kWide>(set), leaf = kWide ? set : 0, next_main = 0, next_extra = 0;
  Work w;
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
    load_lengths(item + item_stride<kWide>());
  };
  // on to the row that has the leaf; false: there is none
  const auto settle = [&] {
    while (leaf >= w.leaves) {
      leaf -= w.leaves;
      item += item_stride<kWide>();
      if (item >= num_items(p)) return false;
      start_row();
    }
    return true;
  };
  if (item >= num_items(p)) return;
  load_lengths(item);
  start_row();
  if (!settle()) return;
  int loaded = load_candidate<kTable>(p, w, table, leaf, lane_row);
  for (uint32_t n = kWide ? set : 0;; n += kWide ? kGroups : 1) {
    const Cache& c = leaf < w.main_leaves ? p.main : p.extra;
    const auto [valid, page, entry] = locate<kTable>(p, w, loaded, leaf, lane_row);
    const uint64_t start = reinterpret_cast<uint64_t>(c.pages) + static_cast<uint64_t>(page) * c.page_bytes;
    const uint64_t row = start + static_cast<uint64_t>(entry) * kDataBytes + (valid ? 0 : 1);  // bit 0: masked
    const uint64_t row_scales = start + static_cast<uint64_t>(c.page_size.divisor) * kDataBytes + entry * kScaleBytes;
    const uint32_t mask = __ballot_sync(0xffffffffu, valid);
    const bool last = leaf + 1 == w.leaves;
    leaf += kWide ? kGroups : 1;
    const bool more = settle();
    if (more) loaded = load_candidate<kTable>(p, w, table, leaf, lane_row);
    const LeafPlace<kWide> at(n);
    ring.free[at.stage].wait(at.phase ^ 1);
    if (lane == 0) {
      ring.valid[at.stage][half] = static_cast<uint16_t>(mask);
      if (half == 0) ring.last[at.stage] = last;
    }
    cp_async_8_if(lane < kGatherRows, scales + at.offset, row_scales, valid);
#pragma unroll
    for (int k = 0; k < kGatherRows / 4; ++k) {  // rows 4k .. 4k + 3
      const uint64_t from = __shfl_sync(0xffffffffu, row, 4 * k + (lane >> 3));
      const bool live = (from & 1) == 0;
      const uint64_t src = (from & ~uint64_t{1}) + piece * 16;
      const uint32_t dst = rows + at.offset + k * 4 * kRowPitch;
#pragma unroll
      for (int i = 0; i < 4; ++i) cp_async_16(dst + i * 128, src + i * 128, live);
      cp_async_16_if(piece < 4, dst + 512, src + 512, live);
    }
    ring.full[at.stage].arrive_copies();
    if (lane == 0) ring.full[at.stage].arrive();
    if (!more) return;
  }
}

// The first product: this warp's dimensions by all candidates of the leaf, with their exponents, to shared memory. kRotary: the warp's second
// tile is the rotary one. `rows`, `scales`, `store` are addresses.
template <bool kRotary>
__device__ __forceinline__ void multiply_tiles(uint32_t rows, uint32_t scales, uint32_t store, const QueryTile (&q)[kWarpTiles]) {
  constexpr int kEights = kLeaf / 8;
  uint32_t r[kWarpTiles][kEights][4], upper[kEights][4];  // upper: the rotary tile's other half
#pragma unroll
  for (int t = 0; t < kWarpTiles; ++t)
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      ldmatrix_x4(r[t][n], rows + n * 8 * kRowPitch + t * kTileDim);
      if (kRotary && t == 1) ldmatrix_x4(upper[n], rows + n * 8 * kRowPitch + 2 * kTileDim);
    }
  float dot[kWarpTiles][kEights][4] = {};
#pragma unroll
  for (int s = 0; s < 4; ++s)
#pragma unroll
    for (int t = 0; t < kWarpTiles; ++t)
#pragma unroll
      for (int n = 0; n < kEights; ++n) {
        if (kRotary && t == 1) {
          const uint32_t (&v)[4] = s < 2 ? r[t][n] : upper[n];
          mma_bf16(dot[t][n], q[t][s], v[2 * (s & 1)], v[2 * (s & 1) + 1]);
        } else {
          uint32_t low, high;
          e4m3x4_to_f16(r[t][n][s], low, high);
          mma_f16(dot[t][n], q[t][s], low, high);
        }
      }
#pragma unroll
  for (int n = 0; n < kEights; ++n) {
    float scale[kWarpTiles][2];
#pragma unroll
    for (int t = 0; t < kWarpTiles; ++t)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        scale[t][c] = kRotary && t == 1 ? 1.f : __uint_as_float(load_shared_u8(scales + (n * 8 + c) * kScaleBytes + t) << 23);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) sum[c] = fmaf(dot[1][n][2 * half + c], scale[1][c], dot[0][n][2 * half + c] * scale[0][c]);  // powers of two
      store_shared_f32x2((store ^ (n * 8 * 4)) + half * 8 * kLeaf * 4, sum[0], sum[1]);
    }
  }
}

// What a leaf adds to the sum of a head's weights, from the sum of this thread's four. Nobody waits for it: it comes behind the second product.
struct LeafSum {
  float total, factor;

  __device__ __forceinline__ void into(float& sum) const {
    float all = total;
#pragma unroll
    for (int i = 0; i < 3; ++i) all += __shfl_xor_sync(0xffffffffu, all, i == 0 ? 4 : i);  // in the order of Softmax::total
    sum = fmaf(all, factor, sum);
  }
};

// Softmax of a leaf's scores, as Softmax has it, but a thread has four candidates of a head. `fold`: the head's so far; its sum is only rescaled.
__device__ __forceinline__ LeafSum weigh_leaf(GroupMemory& m, uint32_t mask, float logit_scale, Fold& fold) {
  const int thread = threadIdx.x % kGroupThreads, head = thread / kHeadLanes, first = thread % kHeadLanes * 4, column = first ^ ((head & 3) << 3);
  float4 parts[kGroupWarps];
#pragma unroll
  for (int w = 0; w < kGroupWarps; ++w) parts[w] = *reinterpret_cast<const float4*>(&m.scores[w][head][column]);
  const float4 sums = add(add(add(parts[0], parts[1]), parts[2]), parts[3]);
  float x[4] = {sums.x, sums.y, sums.z, sums.w}, steps = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = mask >> (first + i) & 1 ? x[i] * logit_scale : -__int_as_float(0x7f800000);
    steps = fmaxf(steps, fmaf(x[i], 1.f / kReferenceStep, kRounder));
  }
#pragma unroll
  for (int lanes = 1; lanes < kHeadLanes; lanes *= 2) steps = fmaxf(steps, __shfl_xor_sync(0xffffffffu, steps, lanes));
  const float reference = (steps - kRounder) * kReferenceStep;
  const float2 factor = fold_factors(fold.reference, reference);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = exp2_approx(x[i] - reference);
  constexpr float up = 1 << kWeightLog2;
  *reinterpret_cast<uint2*>(&m.weights_f16[head][2 * first]) = make_uint2(pack_f16x2(x[0] * up, x[1] * up), pack_f16x2(x[2] * up, x[3] * up));
  *reinterpret_cast<uint2*>(&m.weights_bf16[head][2 * first]) = make_uint2(pack_bf16x2(x[0], x[1]), pack_bf16x2(x[2], x[3]));
  if (first == 0) m.factors[head] = factor;
  fold = {fmaxf(fold.reference, reference), fold.sum * factor.x};
  return {(x[0] + x[1]) + (x[2] + x[3]), factor.y};
}

// A leaf's values of this warp, and what the exponents make of the weights.
template <bool kRotary>
struct LeafValues {
  Values<false> first;
  Values<kRotary> second;
  ValueScales scales[kRotary ? 1 : 2];

  __device__ __forceinline__ void load(uint32_t rows, uint32_t scale_bytes) {
#pragma unroll
    for (int i = 0; i < 2; ++i) first.load(rows, i);
#pragma unroll
    for (int i = 0; i < (kRotary ? 4 : 2); ++i) second.load(rows + kTileDim, i);
#pragma unroll
    for (int t = 0; t < (kRotary ? 1 : 2); ++t) scales[t] = load_value_scales(scale_bytes + t);
  }
  // accumulator * factors + weights * values
  __device__ __forceinline__ void accumulate(const GroupMemory& m, Accumulator (&acc)[kWarpTiles]) const {
    const int lane = threadIdx.x & 31, g = lane >> 2;
    uint32_t a[2][4], b[2][4];
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      ldmatrix_x4(a[step], shared_address(&m.weights_f16[lane & 15][(lane >> 4) * 16 + step * 32]));
      if (kRotary) ldmatrix_x4(b[step], shared_address(&m.weights_bf16[lane & 15][(lane >> 4) * 16 + step * 32]));
    }
    const float2 f0 = m.factors[g], f1 = m.factors[g + 8];
    if (__any_sync(0xffffffffu, f0.x != 1.f || f1.x != 1.f)) {
#pragma unroll
      for (int t = 0; t < kWarpTiles; ++t)
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            acc[t][s][0][k] *= f0.x;
            acc[t][s][1][k] *= f1.x;
          }
    }
    accumulate_tile(first, scales[0], a, f0.y, f1.y, acc[0]);
    if constexpr (kRotary) {
#pragma unroll
      for (int s = 0; s < 4; ++s) second.accumulate(s, b, f0.y, f1.y, acc[1]);
    } else {
      accumulate_tile(second, scales[1], a, f0.y, f1.y, acc[1]);
    }
  }
  static __device__ __forceinline__ void accumulate_tile(const Values<false>& values, const ValueScales& of, const uint32_t (&weights)[2][4],
                                                         float f0, float f1, Accumulator& acc) {
    uint32_t a[2][4];
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
      for (int k = 0; k < 4; ++k) a[step][k] = mul_f16x2(weights[step][k], of.pair[step][k >> 1]);
#pragma unroll
    for (int s = 0; s < 4; ++s) values.accumulate(s, a, f0 * of.greatest, f1 * of.greatest, acc);
  }
};

// As load_query, but one load a register: pairs that are loaded behind a leaf's product would be moved again at every use.
template <bool kRotary>
__device__ __forceinline__ void load_query_words(const Params& p, int row, int group, int tile, QueryTile& q) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = group * kBlockHeads + g + 8 * half;
    const bool live = head < p.heads;
    const uint16_t* src = p.q + (live ? row * p.q_stride_row + head * p.q_stride_head : 0) + tile * kTileDim;
    const uint32_t* at = reinterpret_cast<const uint32_t*>(src) + (kRotary ? j : 2 * j);
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int k = 0; k < 2; ++k) q[s][half + 2 * k] = live ? at[8 * s + (kRotary ? 4 * k : k)] : 0;
  }
}

// This warp's share of an item: its row, its 16 heads, its dimensions.
template <bool kRotary>
struct Share {
  const Params& p;
  GroupMemory& m;
  const int tile;

  __device__ __forceinline__ int row(int item) const { return item / p.head_blocks; }
  __device__ __forceinline__ int heads(int item) const { return item % p.head_blocks; }
  __device__ __forceinline__ void load(int item, QueryTile (&q)[kWarpTiles]) const {
    load_query_words<false>(p, row(item), heads(item), tile, q[0]);
    load_query_words<kRotary>(p, row(item), heads(item), tile + 1, q[1]);
  }
  __device__ __forceinline__ void publish(const QueryTile (&q)[kWarpTiles]) const {
#pragma unroll
    for (int t = 0; t < kWarpTiles; ++t) publish_query_amax(m.q_amax, tile + t, q[t]);
  }
  // the scale of this thread's head's logits; q to f16's range
  __device__ __forceinline__ float scale(QueryTile (&q)[kWarpTiles]) const {
#pragma unroll
    for (int t = 0; t < kWarpTiles; ++t) scale_query(m.q_amax, kRotary && t == 1, q[t]);
    return p.scale_log2 * __int_as_float((127 - query_exponent(m.q_amax, threadIdx.x % kGroupThreads / kHeadLanes)) << 23);
  }
  __device__ __forceinline__ void finish(int item, const Fold& fold) const {
    const int thread = thread_now() % kGroupThreads, head = thread / kHeadLanes;
    if (thread % kHeadLanes != 0) return;
    const int global_head = heads(item) * kBlockHeads + head;
    const bool live = global_head < p.heads;
    m.output_factors[head] = live ? output_factor(p, global_head, fold) : 0.f;
    if (live && p.lse != nullptr) p.lse[static_cast<int64_t>(row(item)) * p.heads + global_head] = lse_of(fold);
  }
  __device__ __forceinline__ void store(int item, const Accumulator (&acc)[kWarpTiles]) const {
#pragma unroll
    for (int t = 0; t < kWarpTiles; ++t) store_output(p, m.output_factors, row(item), heads(item), tile + t, kRotary && t == 1, acc[t]);
  }
};

template <bool kRotary>
__device__ __forceinline__ void run_mathematics(const Params& p, Memory& sm) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3, warp = threadIdx.x >> 5 & (kGroupWarps - 1);
  const int group = threadIdx.x / kGroupThreads, tile = warp * kWarpTiles;
  GroupMemory& m = sm.groups[group];
  const Share<kRotary> share = {p, m, tile};
  const Stage& stage0 = sm.groups[0].stages[0];
  const uint32_t keys = kept(shared_address(&stage0.rows[lane & 7][tile * kTileDim + (lane >> 3) * 16]));
  const uint32_t key_scales = kept(shared_address(&stage0.scales[2 * j][tile]));
  const uint32_t values = kept(shared_address(&stage0.rows[lane & 15][tile * kTileDim + (lane >> 4) * 16]));
  const uint32_t value_scales = kept(shared_address(&stage0.scales[lane][tile]));
  const uint32_t scores = kept(shared_address(&m.scores[warp][g][(2 * j) ^ ((g & 3) << 3)]));
  int item = first_item<false>(group);
  if (item >= num_items(p)) return;
  QueryTile q[kWarpTiles];
  share.load(item, q);
  share.publish(q);
  group_sync();  // the greatest magnitudes of q are there
  for (uint32_t n = 0;;) {
    const float logit_scale = share.scale(q);
    const int next = item + item_stride<false>();
    Accumulator acc[kWarpTiles] = {};
    Fold fold = {kEmpty, 0.f};
    bool last;
#pragma unroll 1
    do {
      const LeafPlace<false> at(n);
      const int offset = group * static_cast<int>(sizeof(GroupMemory)) + at.offset;
      m.full[at.stage].wait(at.phase);
      multiply_tiles<kRotary>(keys + offset, key_scales + offset, scores, q);
      __syncwarp();
      if (elect_one()) m.scored->arrive();
      LeafValues<kRotary> leaf;
      leaf.load(values + offset, value_scales + offset);
      const uint32_t mask = *reinterpret_cast<const uint32_t*>(m.valid[at.stage]);
      last = m.last[at.stage] != 0;
      __syncwarp();
      if (elect_one()) m.free[at.stage].arrive();  // the leaf is in registers
      if (last && next < num_items(p)) share.load(next, q);
      m.scored->wait(n & 1);
      const LeafSum sum = weigh_leaf(m, mask, logit_scale, fold);
      group_sync();  // the weights are there
      leaf.accumulate(m, acc);
      sum.into(fold.sum);
      ++n;
    } while (!last);
    if (next < num_items(p)) share.publish(q);
    share.finish(item, fold);
    group_sync();  // the output factors are there, and the next q's greatest magnitudes
    share.store(item, acc);
    if (next >= num_items(p)) return;
    item = next;
  }
}

// kTable: the extra cache's candidates come from a page table, not a list.
template <bool kTable>
__global__ void __launch_bounds__(kThreads, 1) sparse_decode_pairs_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto& sm = *reinterpret_cast<Memory*>(shared);
  if (threadIdx.x < kGroups) {
    GroupMemory& m = sm.groups[threadIdx.x];
    for (int stage = 0; stage < kStages; ++stage) {
      m.full[stage].init((32 + 1) * kGatherWarps);  // the copies of each gathering lane, and the mask
      m.free[stage].init(kGroupWarps);
    }
    m.scored->init(kGroupWarps);
  }
  __syncthreads();  // the barriers are there
  pdl_wait();
  pdl_trigger();
  if (threadIdx.x >= kMathThreads) {
    set_registers<40, false>();
    run_gathering<false, kTable>(p, sm);
  } else {
    set_registers<232, true>();  // 40 + 2 x 232 = 3 x 168, of four warps each
    if ((threadIdx.x >> 5 & (kGroupWarps - 1)) == kGroupWarps - 1) {
      run_mathematics<true>(p, sm);
    } else {
      run_mathematics<false>(p, sm);
    }
  }
}

}  // namespace dsv4::sparse_decode::pairs

// The same bits once more for 17 to 32 heads a row: what is gathered and converted is multiplied by both 16 heads.
//
// A block has one row after the other. Each of its eight warps has 64 of the 512 dimensions for both products, q and the accumulator of 32
// heads in registers. The scores of a leaf are weighed between the products of the next one; then the values, which wait in registers, are
// multiplied by the weights. Of two barriers a leaf one is passed without waiting. Four warps gather, two a leaf, across rows.
#pragma once

#include "pairs.cuh"

namespace dsv4::sparse_decode::pairs {

constexpr int kHeadTiles = 2;                               // of 16 heads
constexpr int kWideHeads = kHeadTiles * kBlockHeads;
static_assert(kMathThreads == 32 * kTiles && kMathThreads * 4 == kWideHeads * kLeaf, "a warp a tile, four scores a thread");

struct WideMemory {
  Stage stages[kWideStages];                                  // 57,600
  alignas(128) float scores[kTiles][kWideHeads][kLeaf];         // 32,768  columns xor-swizzled by head
  alignas(16) uint8_t weights_f16[kWideHeads][kWeightPitch];    //  2,560
  alignas(16) uint8_t weights_bf16[kWideHeads][kWeightPitch];   //  2,560
  QueryAmax q_amax[kHeadTiles];                               //  1,024
  float2 factors[kWideHeads];                                 //    256  (old, new) fold factors of a leaf
  float output_factors[kHeadTiles][kBlockHeads];              //    128
  Barriers<kWideStages> full, free;                           //     48  a stage is filled; it may be
  Barriers<> read;                                            //      8  the scores of a leaf are read, and the weights of the one before
  uint32_t last[kWideStages];                                 //     12  whether it is the row's last leaf
  alignas(4) uint16_t valid[kWideStages][kGatherWarps];       //     12  a bit a candidate
};
static_assert(sizeof(WideMemory) <= kMaxSharedBytes);
__device__ __forceinline__ WideMemory& ring_of(WideMemory& m, int) { return m; }

__device__ __forceinline__ void wide_sync() { sync_threads<1, kMathThreads>(); }

using WidePlace = LeafPlace<true>;

// The first product of half of the leaf's candidates, with their exponents, to shared memory. `keys`: 64 bytes of each of sixteen candidates; of
// a rotary tile, whose other half is at `rows`. `between(s)`: what is done behind the products of each k step.
using KeyTile = uint32_t[2][4];
__device__ __forceinline__ void load_keys(uint32_t rows, int half_leaf, KeyTile& to) {
#pragma unroll
  for (int n = 0; n < 2; ++n) ldmatrix_x4(to[n], rows + (2 * half_leaf + n) * 8 * kRowPitch);
}
using WideScores = float[kHeadTiles][2][4];
template <bool kRotary, typename Between>
__device__ __forceinline__ void multiply_half(const KeyTile& keys, uint32_t rows, uint32_t scales, int half_leaf, const QueryTile (&q)[kHeadTiles],
                                              WideScores& dot, const Between& between) {
  KeyTile upper;
  float scale[2][2];
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c)
      if (!kRotary) scale[n][c] = __uint_as_float(load_shared_u8(scales + ((2 * half_leaf + n) * 8 + c) * kScaleBytes) << 23);
#pragma unroll
  for (int i = 0; i < kHeadTiles * 2 * 4; ++i) dot[i / 8][i / 4 % 2][i % 4] = 0.f;
#pragma unroll
  for (int s = 0; s < 4; ++s) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      uint32_t b[2];
      if (kRotary) {
#pragma unroll
        for (int k = 0; k < 2; ++k) b[k] = s < 2 ? keys[n][2 * s + k] : upper[n][2 * s - 4 + k];
      } else {
        e4m3x4_to_f16(keys[n][s], b[0], b[1]);
      }
#pragma unroll
      for (int m = 0; m < kHeadTiles; ++m) {
        if (kRotary) {
          mma_bf16(dot[m][n], q[m][s], b[0], b[1]);
        } else {
          mma_f16(dot[m][n], q[m][s], b[0], b[1]);
        }
      }
    }
    if (kRotary && s == 0) load_keys(rows + kTileDim, half_leaf, upper);
    between(s);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int m = 0; m < kHeadTiles; ++m)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (!kRotary) dot[m][n][c] *= scale[n][c & 1];
}
__device__ __forceinline__ void store_scores(uint32_t store, int half_leaf, const WideScores& scores) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int m = 0; m < kHeadTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_shared_f32x2((store ^ ((2 * half_leaf + n) * 8 * 4)) + (m * kBlockHeads + half * 8) * kLeaf * 4, scores[m][n][2 * half],
                           scores[m][n][2 * half + 1]);
}

// Softmax of a leaf's scores, as Softmax has it, but a thread has four candidates of a head. In steps, for between the products.
struct WideWeights {
  float x[4], steps, reference;
  float2 factor;

  static __device__ __forceinline__ int head() { return threadIdx.x / kHeadLanes; }
  static __device__ __forceinline__ int first() { return threadIdx.x % kHeadLanes * 4; }
  // where the thread's scores of the first tile are
  static __device__ __forceinline__ uint32_t at(const WideMemory& m) { return shared_address(&m.scores[0][head()][first() ^ ((head() & 3) << 3)]); }
  static __device__ __forceinline__ void load(uint32_t at, float4 (&parts)[kTiles]) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) parts[t] = load_shared_f32x4(at + t * static_cast<int>(sizeof(WideMemory::scores[0])));
  }
  __device__ __forceinline__ void add_parts(const float4 (&parts)[kTiles], uint32_t mask, float logit_scale) {
    float4 sums = add(parts[0], parts[1]);
#pragma unroll
    for (int t = 2; t < kTiles; t += 2) sums = add(sums, add(parts[t], parts[t + 1]));
    const float from[4] = {sums.x, sums.y, sums.z, sums.w};
    steps = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = mask >> (first() + i) & 1 ? from[i] * logit_scale : -__int_as_float(0x7f800000);
      steps = fmaxf(steps, fmaf(x[i], 1.f / kReferenceStep, kRounder));
    }
  }
  __device__ __forceinline__ void compare(int lanes) { steps = fmaxf(steps, __shfl_xor_sync(0xffffffffu, steps, lanes)); }
  // `fold`: the head's so far; its sum is only rescaled
  __device__ __forceinline__ void refer(Fold& fold) {
    reference = (steps - kRounder) * kReferenceStep;
    factor = fold_factors(fold.reference, reference);
    fold = {fmaxf(fold.reference, reference), fold.sum * factor.x};
  }
  __device__ __forceinline__ LeafSum weigh() {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = exp2_approx(x[i] - reference);
    return {(x[0] + x[1]) + (x[2] + x[3]), factor.y};
  }
  __device__ __forceinline__ void store(WideMemory& m) const {
    constexpr float up = 1 << kWeightLog2;
    *reinterpret_cast<uint2*>(&m.weights_f16[head()][2 * first()]) = make_uint2(pack_f16x2(x[0] * up, x[1] * up), pack_f16x2(x[2] * up, x[3] * up));
    *reinterpret_cast<uint2*>(&m.weights_bf16[head()][2 * first()]) = make_uint2(pack_bf16x2(x[0], x[1]), pack_bf16x2(x[2], x[3]));
    if (first() == 0) m.factors[head()] = factor;
  }
};
static_assert(kHeadLanes == 8, "compared in three steps");

// A leaf's values of this warp, and what the exponents make of the weights.
template <bool kRotary>
struct WideValues {
  Values<kRotary> values;
  ValueScales scales;

  __device__ __forceinline__ void load_scales(uint32_t bytes) {
    if (!kRotary) scales = load_value_scales(bytes);
  }
  __device__ __forceinline__ void load(uint32_t rows) {
#pragma unroll
    for (int i = 0; i < (kRotary ? 4 : 2); ++i) values.load(rows, i);
  }
  // accumulator * factors + weights * values; the values become those of the next leaf, behind a row's last one anything
  __device__ __forceinline__ void accumulate(const WideMemory& memory, Accumulator (&acc)[kHeadTiles], uint32_t rows, uint32_t scale_bytes) {
    const int lane = threadIdx.x & 31, g = lane >> 2;
    const auto& weights = kRotary ? memory.weights_bf16 : memory.weights_f16;
    uint32_t a[kHeadTiles][2][4];
    float2 f[kHeadTiles][2];
#pragma unroll
    for (int m = 0; m < kHeadTiles; ++m) {
#pragma unroll
      for (int step = 0; step < 2; ++step)
        ldmatrix_x4(a[m][step], shared_address(&weights[m * kBlockHeads + (lane & 15)][(lane >> 4) * 16 + step * 32]));
#pragma unroll
      for (int half = 0; half < 2; ++half) f[m][half] = memory.factors[m * kBlockHeads + g + 8 * half];
    }
    if (__any_sync(0xffffffffu, f[0][0].x != 1.f || f[0][1].x != 1.f || f[1][0].x != 1.f || f[1][1].x != 1.f)) {
#pragma unroll
      for (int m = 0; m < kHeadTiles; ++m)
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
          for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int k = 0; k < 4; ++k) acc[m][s][half][k] *= f[m][half].x;
    }
    if (!kRotary) {
#pragma unroll
      for (int m = 0; m < kHeadTiles; ++m) {
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
          for (int k = 0; k < 4; ++k) a[m][step][k] = mul_f16x2(a[m][step][k], scales.pair[step][k >> 1]);
#pragma unroll
        for (int half = 0; half < 2; ++half) f[m][half].y *= scales.greatest;
      }
      load_scales(scale_bytes);
    }
#pragma unroll
    for (int segment = 0; segment < 4; ++segment) {
      float x[kHeadTiles][2][4] = {};  // [tile of the segment]
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t b[2][2];
        values.operands(segment, step, b);
#pragma unroll
        for (int m = 0; m < kHeadTiles; ++m) values.multiply(x[m], a[m][step], b);
      }
#pragma unroll
      for (int m = 0; m < kHeadTiles; ++m) values.add_segment(x[m], f[m][0].y, f[m][1].y, acc[m][segment]);
    }
    load(rows);
  }
};

// This warp's share of an item: its row, its 32 heads, its dimensions.
template <bool kRotary>
struct WideShare {
  const Params& p;
  WideMemory& m;
  const int tile;

  __device__ __forceinline__ int row(int item) const { return item / p.head_blocks; }
  __device__ __forceinline__ int heads(int item) const { return item % p.head_blocks * kHeadTiles; }
  __device__ __forceinline__ void load(int item, QueryTile (&q)[kHeadTiles]) const {
#pragma unroll
    for (int i = 0; i < kHeadTiles; ++i) load_query_words<kRotary>(p, row(item), heads(item) + i, tile, q[i]);
  }
  __device__ __forceinline__ void publish(const QueryTile (&q)[kHeadTiles]) const {
#pragma unroll
    for (int i = 0; i < kHeadTiles; ++i) publish_query_amax(m.q_amax[i], tile, q[i]);
  }
  // the scale of this thread's head's logits; q to f16's range
  __device__ __forceinline__ float scale(QueryTile (&q)[kHeadTiles]) const {
#pragma unroll
    for (int i = 0; i < kHeadTiles; ++i) scale_query(m.q_amax[i], kRotary, q[i]);
    const int head = WideWeights::head();
    return p.scale_log2 * __int_as_float((127 - query_exponent(m.q_amax[head / kBlockHeads], head % kBlockHeads)) << 23);
  }
  __device__ __forceinline__ void finish(int item, const Fold& fold) const {
    const int thread = thread_now(), head = thread / kHeadLanes;
    if (thread % kHeadLanes != 0) return;
    const int global_head = heads(item) * kBlockHeads + head;
    const bool live = global_head < p.heads;
    m.output_factors[head / kBlockHeads][head % kBlockHeads] = live ? output_factor(p, global_head, fold) : 0.f;
    if (live && p.lse != nullptr) p.lse[static_cast<int64_t>(row(item)) * p.heads + global_head] = lse_of(fold);
  }
  __device__ __forceinline__ void store(int item, const Accumulator (&acc)[kHeadTiles]) const {
#pragma unroll
    for (int i = 0; i < kHeadTiles; ++i) store_output(p, m.output_factors[i], row(item), heads(item) + i, tile, kRotary, acc[i]);
  }
};

template <bool kRotary>
__device__ __forceinline__ void run_wide_mathematics(const Params& p, WideMemory& m) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3, tile = threadIdx.x >> 5;
  const WideShare<kRotary> share = {p, m, tile};
  const Stage& stage0 = m.stages[0];
  const uint32_t keys = kept(shared_address(&stage0.rows[lane & 7][tile * kTileDim + (lane >> 3) * 16]));
  const uint32_t key_scales = kept(shared_address(&stage0.scales[2 * j][tile]));
  const uint32_t values = kept(shared_address(&stage0.rows[lane & 15][tile * kTileDim + (lane >> 4) * 16]));
  const uint32_t value_scales = kept(shared_address(&stage0.scales[lane][tile]));
  const uint32_t scores = kept(shared_address(&m.scores[tile][g][(2 * j) ^ ((g & 3) << 3)]));
  const uint32_t parts_at = kept(WideWeights::at(m));
  int item = first_item<true>(0);
  if (item >= num_items(p)) return;
  QueryTile q[kHeadTiles];
  share.load(item, q);
  share.publish(q);
  wide_sync();  // the greatest magnitudes of q are there
  for (uint32_t n = 0;; ++n) {
    const float logit_scale = share.scale(q);
    const int next = item + item_stride<true>();
    Accumulator acc[kHeadTiles] = {};
    Fold fold = {kEmpty, 0.f};
    WideValues<kRotary> leaf;
    uint32_t mask;
    bool last;
    const auto wait_for = [&](const WidePlace& at) {
      m.full[at.stage].wait(at.phase);
      __syncwarp();
      mask = *reinterpret_cast<const uint32_t*>(m.valid[at.stage]);
      last = m.last[at.stage] != 0;
    };
    // the leaf is in registers
    const auto free = [&](const WidePlace& at) {
      __syncwarp();
      if (elect_one()) m.free[at.stage].arrive();
    };
    {
      const WidePlace at(n);
      KeyTile loaded[2];
      WideScores part;
      wait_for(at);
#pragma unroll
      for (int half = 0; half < 2; ++half) load_keys(keys + at.offset, half, loaded[half]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        multiply_half<kRotary>(loaded[half], keys + at.offset, key_scales + at.offset, half, q, part, [](int) {});
        store_scores(scores, half, part);
      }
      leaf.load(values + at.offset);
      leaf.load_scales(value_scales + at.offset);
      free(at);
    }
    wide_sync();  // the first scores are there
#pragma unroll 1
    for (;; ++n) {
      float4 parts[kTiles];
      WideWeights weights;
      LeafSum sum;
      const WidePlace at(n + 1);
      const bool ends = last;
      if (!ends) {
        KeyTile loaded[2];
        WideScores part;
        const uint32_t weighed = mask;
        wait_for(at);
#pragma unroll
        for (int half = 0; half < 2; ++half) load_keys(keys + at.offset, half, loaded[half]);
        WideWeights::load(parts_at, parts);
        __syncwarp();
        if (elect_one()) m.read->arrive();
        multiply_half<kRotary>(loaded[0], keys + at.offset, key_scales + at.offset, 0, q, part, [&](int s) {
          if (s == 1) weights.add_parts(parts, weighed, logit_scale);
          if (s > 1) weights.compare(1 << (s - 2));
        });
        m.read->wait(n & 1);
        store_scores(scores, 0, part);
        multiply_half<kRotary>(loaded[1], keys + at.offset, key_scales + at.offset, 1, q, part, [&](int s) {
          if (s == 0) weights.compare(4);
          if (s == 1) weights.refer(fold);
          if (s == 2) sum = weights.weigh();
          if (s == 3) weights.store(m);
        });
        store_scores(scores, 1, part);
      } else {
        WideWeights::load(parts_at, parts);
        __syncwarp();
        if (elect_one()) m.read->arrive();
        if (next < num_items(p)) share.load(next, q);
        weights.add_parts(parts, mask, logit_scale);
#pragma unroll
        for (int lanes = 1; lanes < kHeadLanes; lanes *= 2) weights.compare(lanes);
        weights.refer(fold);
        sum = weights.weigh();
        m.read->wait(n & 1);
        weights.store(m);
      }
      wide_sync();  // the weights are there, and the scores of the next leaf
      leaf.accumulate(m, acc, values + at.offset, value_scales + at.offset);
      sum.into(fold.sum);
      if (ends) break;
      free(at);
    }
    if (next < num_items(p)) share.publish(q);
    share.finish(item, fold);
    wide_sync();  // the output factors are there, and the next q's greatest magnitudes
    share.store(item, acc);
    if (next >= num_items(p)) return;
    item = next;
  }
}

// For more than 16 heads and lists; with page tables nothing is known to need it.
__global__ void __launch_bounds__(kThreads, 1) sparse_decode_wide_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto& m = *reinterpret_cast<WideMemory*>(shared);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kWideStages; ++stage) {
      m.full[stage].init((32 + 1) * kGatherWarps);  // the copies of each gathering lane, and the mask
      m.free[stage].init(kTiles);
    }
    m.read->init(kTiles);
  }
  __syncthreads();  // the barriers are there
  pdl_wait();
  pdl_trigger();
  if (threadIdx.x >= kMathThreads) {
    set_registers<40, false>();
    run_gathering<true, false>(p, m);
  } else {
    set_registers<232, true>();  // 40 + 2 x 232 = 3 x 168, of four warps each
    if (threadIdx.x >> 5 == kNumNopeTiles) {
      run_wide_mathematics<true>(p, m);
    } else {
      run_wide_mathematics<false>(p, m);
    }
  }
}

}  // namespace dsv4::sparse_decode::pairs

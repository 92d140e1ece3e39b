// Logits for guesses: of all outputs by a copy of the head in INT4, of the best again by the head itself.
//
// The copy is a stream through registers into mma.sync. It lies as it is read: of 16 outputs and 256 inputs 2,048 bytes of codes, then the
// scales, 64 inputs each, as bf16; a lane's word is its operand of an mma, and so are x's: the k of an mma is a free choice. A code q
// stands for q - 8. In the upper mantissa bits of 16 it is 16 + q, in the lower ones 16 + q / 16, by one instruction for two; x of the
// latter is 16 times as large, and sums begin with what is too much, which x alone decides. x is made f16, by a power of two for each row
// that brings its greatest to 2^10 .. 2^11: exact down to 2^-17 of it.
//
// A row's sums do not depend on the rows beside it, nor on tiles and blocks: 64 products in mma order, times scale, in order; the two
// halves of the inputs apart, by a warp each. Of more than 8 rows a block has 16, and one of the halves.
#pragma once

#include "../device/copies.cuh"
#include "../device/f16.cuh"
#include "../device/greatest.cuh"
#include "../device/mma.cuh"
#include "../device/numbers.cuh"
#include "draft_head.h"

namespace dsv4::bf16_linear {

__host__ __device__ constexpr int head_threads(int tiles) { return tiles == 1 ? 512 : 384; }  // as many as have registers enough
constexpr int kUnitSteps = kUnitInputs / kScaleInputs;    // of a unit: a lane's 16 bytes of codes each
constexpr int kAhead = 2;                                 // units of a warp on their way from memory
constexpr int kHalves = 2;                                // of the inputs
constexpr int kHeadInputs = kHalves * kAhead * kUnitInputs;  // a multiple of which inputs must be
constexpr int kMostRows = 2 * kHeadRows;                  // of a block
constexpr int kZero = 8;                                  // the code of 0
constexpr float kUpper = 16 + kZero, kLower = 16 + kZero / 16.f;  // what a product has too much of x, by where its code lies
constexpr int kGreatestExponent = 10;

struct HeadShared {
  Barriers<> x_here;
  uint32_t greatest[kMostRows];  // of a row of x, the bits of its absolute value
  // then x, [rows][head_pitch(inputs)], and where sums begin, [inputs / 64][rows of the tiles]
};
constexpr int kHeadFixedBytes = 80;
static_assert(sizeof(HeadShared) <= kHeadFixedBytes && kHeadFixedBytes % 16 == 0);
// bytes between two rows of x: the padding keeps them on different banks
__host__ __device__ constexpr int head_pitch(int inputs) { return inputs * 2 + 16; }
// tiles: of 8 rows; of two a block has half of the inputs
__host__ __device__ constexpr int head_shared_bytes(int tiles, int rows, int inputs) {
  return kHeadFixedBytes + rows * head_pitch(inputs / tiles) + inputs / tiles / kScaleInputs * tiles * kHeadRows * 4;
}

// A lane's part of 16 outputs and 256 inputs
struct Unit {
  uint4 codes[kUnitSteps], scales;  // scales: of steps, rows g and g + 8 each
};

// Eight codes of rows g and g + 8 and four inputs
__device__ __forceinline__ void decode(uint32_t codes, uint32_t (&pair)[4]) {
  constexpr uint32_t kSixteen = 0x4c004c00u;
  const uint32_t turned = __funnelshift_r(codes, codes, 8);
  pair[0] = (codes & 0x03c003c0u) | kSixteen;
  pair[1] = (turned & 0x03c003c0u) | kSixteen;
  pair[2] = (codes & 0x003c003cu) | kSixteen;
  pair[3] = (turned & 0x003c003cu) | kSixteen;
}

template <int kTiles>
struct Head {
  static constexpr int kRows = kTiles * kHeadRows;  // at most
  static constexpr int kThreads = head_threads(kTiles), kWarps = kThreads / 32;
  static constexpr int kBeside = kWarps * kTiles / kHalves;  // tiles of outputs at a time
  const DraftHeadParams& p;
  HeadShared& s;
  unsigned char* const x;
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32);
  const int first_row, rows;
  const int inputs;  // of this block
  const int half;    // of this warp
  float* const begins;

  __device__ Head(const DraftHeadParams& params, unsigned char* shared, int rows_each)
      : p(params), s(*reinterpret_cast<HeadShared*>(shared)), x(shared + kHeadFixedBytes), first_row(blockIdx.x * rows_each),
        rows(min(rows_each, params.rows - first_row)), inputs(params.inputs / kTiles), half(kTiles == 1 ? warp / kBeside : blockIdx.z),
        begins(reinterpret_cast<float*>(shared + kHeadFixedBytes + rows_each * head_pitch(inputs))) {}

  __device__ __forceinline__ const uint8_t* codes_at(const uint8_t* unit, int step) const { return unit + step * 512 + lane * 16; }
  __device__ __forceinline__ uint4 load_scales(const uint8_t* unit) const { return load_stream_16(unit + kUnitSteps * 512 + lane / 4 * 16); }
  __device__ __forceinline__ void load(Unit& to, const uint8_t* unit) const {
#pragma unroll
    for (int step = 0; step < kUnitSteps; ++step) to.codes[step] = load_stream(codes_at(unit, step));
    to.scales = load_scales(unit);
  }

  __device__ __forceinline__ uint32_t exponent_of(int row) const { return max(s.greatest[row] >> 7, 15u); }
  // what a row's sums lack: 2^(exponent - 127 - 10)
  __device__ __forceinline__ float power_of(int row) const { return __uint_as_float(exponent_of(row) << 23) * (1.f / (1 << kGreatestExponent)); }

  // x of this block's rows into shared memory, and there to f16, with where sums begin. The barrier is there.
  __device__ __forceinline__ void stage() const {
    const int pitch = head_pitch(inputs), chunks = inputs / kUnitInputs;  // of a row, 8 numbers a lane
    if (threadIdx.x == 0) {
      s.x_here[0].arrive_expect(rows * inputs * 2);
#pragma unroll 1
      for (int row = 0; row < rows; ++row) {
        const uint16_t* const from = p.x + static_cast<int64_t>(first_row + row) * p.x_stride + first_input();
        copy_bulk(shared_address(x + row * pitch), from, inputs * 2, s.x_here[0]);
      }
    }
    // by the whole row, of which a block may have half
#pragma unroll 1
    for (int i = warp; kTiles > 1 && i < rows * chunks; i += kWarps) {
      const int row = i / chunks, other = inputs - first_input() + i % chunks * kUnitInputs + lane * 8;
      note(row, load_16_now(p.x + static_cast<int64_t>(first_row + row) * p.x_stride + other));
    }
    s.x_here[0].wait(0);
#pragma unroll 1
    for (int i = warp; i < rows * chunks; i += kWarps) note(i / chunks, load_shared(x_of(i, chunks)));
    __syncthreads();
#pragma unroll 1
    for (int i = warp; i < rows * chunks; i += kWarps) {
      const int row = i / chunks;
      unsigned char* const at = x_of(i, chunks);
      uint4 v = load_shared(at);
      const float up = __uint_as_float((254u + kGreatestExponent - exponent_of(row)) << 23);  // 2^(137 - exponent)
      float sum = 0;
      const auto scaled = [&](uint32_t two, float factor, float too_much) {
        const uint32_t pair = pack_f16x2(bf16_low(two) * factor, bf16_high(two) * factor);
        const float2 rounded = floats_of_f16x2(pair);
        sum = fmaf(rounded.x, too_much, fmaf(rounded.y, too_much, sum));
        return pair;
      };
      v.x = scaled(v.x, up, kUpper);
      v.y = scaled(v.y, up * 16, kLower);
      v.z = scaled(v.z, up, kUpper);
      v.w = scaled(v.w, up * 16, kLower);
      store_shared(shared_address(at), v);
#pragma unroll
      for (int lanes = 1; lanes < 8; lanes *= 2) sum += __shfl_xor_sync(kAll, sum, lanes);
      if (lane % 8 == 0) begins[(i % chunks * kUnitSteps + lane / 8) * kRows + row] = -sum;
    }
    __syncthreads();
  }
  __device__ __forceinline__ int first_input() const { return kTiles == 1 ? 0 : half * inputs; }
  __device__ __forceinline__ unsigned char* x_of(int i, int chunks) const {
    return x + i / chunks * head_pitch(inputs) + i % chunks * kUnitInputs * 2 + lane * 16;
  }
  __device__ __forceinline__ void note(int row, const uint4& v) const {
    uint32_t pair = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) pair = __vmaxu2(pair, word_of(v, j) & 0x7fff7fffu);
    const uint32_t greatest = __reduce_max_sync(kAll, max(pair & 0xffffu, pair >> 16));
    if (lane == 0) atomicMax(&s.greatest[row], greatest);
  }

  // sums += a unit times its inputs: x of this lane's rows, where sums of this lane begin. What is used is asked for anew, of unit `next`
  __device__ __forceinline__ void multiply(float (&sums)[kTiles][4], Unit& unit, const uint32_t (&x_lane)[kTiles], int offset, uint32_t begin,
                                           bool more, const uint8_t* next) const {
#pragma unroll
    for (int step = 0; step < kUnitSteps; ++step) {
      float part[kTiles][4];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const float2 two = load_shared_f32x2(begin + (step * kRows + t * kHeadRows) * 4);
        part[t][0] = part[t][2] = two.x, part[t][1] = part[t][3] = two.y;
      }
#pragma unroll
      for (int words = 0; words < 2; ++words) {
        uint4 b[kTiles];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) b[t] = load_shared(x_lane[t] + offset + step * kScaleInputs * 2 + words * 16);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          uint32_t pair[4];
          decode(word_of(unit.codes[step], words * 2 + j), pair);
#pragma unroll
          for (int t = 0; t < kTiles; ++t) mma_f16(part[t], pair, word_of(b[t], j * 2), word_of(b[t], j * 2 + 1));
        }
      }
      if (more) unit.codes[step] = load_stream(codes_at(next, step));
      const uint32_t scales = word_of(unit.scales, step);
      const float scale[2] = {bf16_low(scales), bf16_high(scales)};
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[t][i] = fmaf(part[t][i], scale[i / 2], sums[t][i]);
      }
    }
    if (more) unit.scales = load_scales(next);
  }

  // lane: outputs g and g + 8, rows 2 t and 2 t + 1 of a tile's
  __device__ __forceinline__ void store(const float (&sums)[kTiles][4], int tile) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = t * kHeadRows + lane % 4 * 2 + i % 2;
        if (row >= rows) continue;
        float* const at = p.scores + (static_cast<int64_t>(half) * p.rows + first_row + row) * p.outputs + tile * kTileOutputs + lane / 4 + i / 2 * 8;
        *at = sums[t][i] * power_of(row);
      }
    }
  }

  __device__ __forceinline__ void run() const {
    const int tiles = p.outputs / kTileOutputs, units = p.inputs / kUnitInputs, units_here = units / kHalves;
    const int begin = static_cast<int>(static_cast<int64_t>(tiles) * blockIdx.y / gridDim.y);
    const int end = static_cast<int>(static_cast<int64_t>(tiles) * (blockIdx.y + 1) / gridDim.y);
    const int64_t tile_bytes = static_cast<int64_t>(units) * kUnitBytes;
    int tile = begin + warp % kBeside;
    const uint8_t* at = p.copy + tile * tile_bytes + half * units_here * kUnitBytes;
    Unit ahead[kAhead];
    if (tile < end) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) load(ahead[i], at + i * kUnitBytes);
    }
    if (threadIdx.x == 0) {
      s.x_here[0].init(1);
      fence_barrier_init();
    }
    if (threadIdx.x < kMostRows) s.greatest[threadIdx.x] = 0;
    for (int i = threadIdx.x; i < inputs / kScaleInputs * kRows; i += kThreads) begins[i] = 0;
    __syncthreads();
    pdl_wait();
    stage();
    const int of_half = kTiles == 1 ? half * (inputs / kHalves) : 0;  // where in x it begins
    uint32_t x_lane[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      x_lane[t] = shared_address(x) + min(t * kHeadRows + lane / 4, rows - 1) * head_pitch(inputs) + lane % 4 * 32 + of_half * 2;
    const uint32_t begin_lane = shared_address(begins) + lane % 4 * 8 + of_half / kScaleInputs * kRows * 4;
#pragma unroll 1
    for (; tile < end; tile += kBeside) {
      const bool follows = tile + kBeside < end;
      const uint8_t* const following = at + kBeside * tile_bytes;
      float sums[kTiles][4] = {};
#pragma unroll 1
      for (int unit = 0; unit < units_here; unit += kAhead) {
        const bool same = unit + kAhead < units_here;
        const uint8_t* const next = same ? at + (unit + kAhead) * kUnitBytes : following;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int offset = (unit + i) * kUnitInputs * 2;
          multiply(sums, ahead[i], x_lane, offset, begin_lane + (unit + i) * kUnitSteps * kRows * 4, same || follows, next + i * kUnitBytes);
        }
      }
      store(sums, tile);
      at = following;
    }
  }
};

// two tiles: blockIdx.z is the half of the inputs
template <int kTiles>
__global__ void __launch_bounds__(head_threads(kTiles), 1) draft_head_kernel(const __grid_constant__ DraftHeadParams p, int rows_each) {
  extern __shared__ __align__(128) unsigned char shared[];
  pdl_trigger();
  Head<kTiles>(p, shared, rows_each).run();
}

// ---- the best of each part once more, by the head

constexpr int kBestWarps = 16, kBestThreads = 32 * kBestWarps;
constexpr int kFound = kBestWarps * kBest;          // the best of each warp's outputs
constexpr int kSharing = kBestWarps / kBest;        // warps that have one of the best, each its inputs
static_assert(kBestWarps * 128 == kPartOutputs && kFound == 64);

// The sum of a share of the inputs, by a warp: of a lane in order, then over the lanes.
__device__ __forceinline__ float share_of(const uint16_t* x, const uint16_t* weight, int inputs) {
  float sum = 0;
#pragma unroll 4
  for (int i = threadIdx.x % 32 * 8; i < inputs; i += 256) {
    const uint4 a = load_16_now(x + i), w = load_16_now(weight + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum = fmaf(bf16_low(word_of(a, j)), bf16_low(word_of(w, j)), sum);
      sum = fmaf(bf16_high(word_of(a, j)), bf16_high(word_of(w, j)), sum);
    }
  }
  return sum_of_lanes(sum);
}

// The next of a warp's best: key and place; what is taken is no key any more.
template <int kKeys>
__device__ __forceinline__ uint2 take_best(uint2 (&own)[kKeys]) {
  uint2 best = own[0];
#pragma unroll
  for (int i = 1; i < kKeys; ++i) {
    if (own[i].x > best.x || (own[i].x == best.x && own[i].y < best.y)) best = own[i];
  }
  best = first_greatest(best);
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    if (own[i].y == best.y) own[i] = make_uint2(0, kNowhere);
  }
  return best;
}

// a block a part of a row's outputs
template <bool kBf16Out>
__global__ void __launch_bounds__(kBestThreads) draft_head_best_kernel(const __grid_constant__ DraftHeadParams p) {
  __shared__ uint2 found[kFound];
  __shared__ float shares[kBestWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * p.outputs;
  const int first = blockIdx.x * kPartOutputs + threadIdx.x * 4;
  pdl_wait();
  pdl_trigger();
  uint2 own[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) own[j] = make_uint2(0, kNowhere);
  if (first < p.outputs) {
    const float* const upper = p.scores + static_cast<int64_t>(p.rows) * p.outputs + row + first;
    const float4 v = add(load_now(reinterpret_cast<const float4*>(p.scores + row + first)), load_now(reinterpret_cast<const float4*>(upper)));
    const float each[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) own[j] = make_uint2(key_of_number(each[j]), first + j);
    if constexpr (kBf16Out) {
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + row + first) = make_uint2(pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w));
    } else {
      *reinterpret_cast<float4*>(static_cast<float*>(p.out) + row + first) = v;
    }
  }
#pragma unroll
  for (int n = 0; n < kBest; ++n) {
    const uint2 best = take_best(own);
    if (lane == 0) found[warp * kBest + n] = best;
  }
  __syncthreads();
  // of all warps' the best, by each warp; it has one of these, and its share of the inputs
  uint2 all[2] = {found[lane], found[lane + 32]};
  uint32_t output = kNowhere;
#pragma unroll
  for (int n = 0; n < kBest; ++n) {
    const uint2 best = take_best(all);
    if (n == warp / kSharing) output = best.y;
  }
  if (output != kNowhere) {
    const int inputs = p.inputs / kSharing, at = warp % kSharing * inputs;
    const float sum = share_of(p.x + blockIdx.y * p.x_stride + at, p.weight + static_cast<int64_t>(output) * p.inputs + at, inputs);
    if (lane == 0) shares[warp] = sum;
  }
  __syncthreads();
  if (lane != 0 || warp % kSharing != 0 || output == kNowhere) return;
  const float logit = (shares[warp] + shares[warp + 1]) + (shares[warp + 2] + shares[warp + 3]);
  if constexpr (kBf16Out) {
    static_cast<uint16_t*>(p.out)[row + output] = static_cast<uint16_t>(pack_bf16x2(logit, 0.f));
  } else {
    static_cast<float*>(p.out)[row + output] = logit;
  }
}

}  // namespace dsv4::bf16_linear

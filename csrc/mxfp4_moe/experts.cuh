// Both products of the experts for few rows: a stream of E2M1 codes from memory through registers into mma.sync.
//
//   gate/up   h[pair] = silu(min(W1 x, limit)) * clamp(W3 x, -limit, limit)
//   down      y[pair] = W2 h[pair]
//
// The grid is what fits on the chip; units (group of pairs, rows of weights) are dealt evenly, so that every
// multiprocessor streams from the start. A lane loads 16 bytes of one weight row, 32 inputs with one scale; as soon as
// it has used them, it asks for the same of its next unit. The k of an mma is a free choice, made for both operands alike: a register of
// A is (code j, code j + 4) of one word, so that two shifts and two masks make a bf16 pair of it, and x is stored so.
//
// Codes become bf16 exactly: sign, exponent and mantissa in their places are the value * 2^-126; one multiplication by
// 2^(126 - 32) * scale makes it right but for 2^32, which the fp32 sum gets. Exact for scale bytes 34 to 160.
#pragma once

#include "../device.cuh"
#include "routing.cuh"

namespace dsv4::mxfp4_moe {

constexpr int kShift = 32;  // weights are 2^-32 of themselves until the sum

__device__ __forceinline__ uint4 load_stream(const uint8_t* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// 8 codes -> bf16 pairs (0,4) (1,5) (2,6) (3,7), times `power`
__device__ __forceinline__ void decode(uint32_t codes, uint32_t power, uint32_t (&pair)[4]) {
  constexpr uint32_t kSign = 0x80008000u, kRest = 0x01c001c0u;
  pair[0] = mul_bf16x2(((codes << 12) & kSign) | ((codes << 6) & kRest), power);
  pair[1] = mul_bf16x2(((codes << 8) & kSign) | ((codes << 2) & kRest), power);
  pair[2] = mul_bf16x2(((codes << 4) & kSign) | ((codes >> 2) & kRest), power);
  pair[3] = mul_bf16x2((codes & kSign) | ((codes >> 6) & kRest), power);
}

// bf16 pair of 2^(126 - kShift) * 2^(byte - 127), `lane`'s byte of the word; infinite from byte 161 on
__device__ __forceinline__ uint32_t scale_power(uint32_t word, int lane) {
  const uint32_t twice = __byte_perm(word, 0, 0x4040 | lane * 0x0101);  // the byte in both halves
  return __vminu2(twice, (255 - (126 - kShift)) * 0x00010001u) * 0x80u + (126 - kShift) * 0x00800080u;
}

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// A lane's weights of one unit: rows g and g + 8 of its warp's 16.
template <int kSteps>
struct Stage {
  uint4 codes[2][kSteps];
  uint32_t scales[2][kSteps];  // a word is the four lanes' scales of one step
};

template <typename C>
struct Stream {
  const uint8_t* codes;   // this lane's part of row g of unit 0 of expert 0
  const uint8_t* scales;
  static constexpr int kRowBytes = C::kInputs / 2, kRowScales = C::kInputs / 32;
  static constexpr int kUnitBytes = C::kUnitOutputs * (C::kInputs / 2), kUnitScaleBytes = C::kUnitOutputs * (C::kInputs / 32);

  __device__ Stream(const Params& p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slice = warp % C::kSlices, subtile = warp / C::kSlices;
    const Weights& w = C::kGated ? p.w13 : p.w2;
    const int64_t row = C::kGated ? p.gate_row + lane / 4 : subtile * 16 + lane / 4;
    codes = w.codes + row * kRowBytes + slice * (C::kSteps * 64) + lane % 4 * 16;
    scales = w.scales + row * kRowScales + slice * (C::kSteps * 4);
  }

  // where this lane reads of a unit
  struct From {
    const uint8_t* codes;
    const uint8_t* scales;
  };
  __device__ __forceinline__ From from(const Params& p, int expert, int tile) const {
    const Weights& w = C::kGated ? p.w13 : p.w2;
    return {codes + expert * w.expert_bytes + static_cast<int64_t>(tile) * kUnitBytes,
            scales + expert * w.expert_scale_bytes + static_cast<int64_t>(tile) * kUnitScaleBytes};
  }
  // from row g of the 16 to row g + 8
  __device__ __forceinline__ static int second(const Params& p) { return C::kGated ? p.up_row - p.gate_row : 8; }

  __device__ __forceinline__ static void load_step(const Params& p, Stage<C::kSteps>& stage, const From& from, int step) {
    stage.codes[0][step] = load_stream(from.codes + step * 64);
    stage.codes[1][step] = load_stream(from.codes + second(p) * kRowBytes + step * 64);
  }
  __device__ __forceinline__ static void load_both_scales(const Params& p, Stage<C::kSteps>& stage, const From& from) {
    load_scales(stage.scales[0], from.scales);
    load_scales(stage.scales[1], from.scales + second(p) * kRowScales);
  }

  __device__ __forceinline__ static void load_scales(uint32_t (&out)[C::kSteps], const uint8_t* p) {
    if constexpr (C::kSteps == 4) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(p));
      out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
    } else if constexpr (C::kSteps == 2) {
      const uint2 v = __ldg(reinterpret_cast<const uint2*>(p));
      out[0] = v.x, out[1] = v.y;
    } else {
#pragma unroll
      for (int step = 0; step < C::kSteps; ++step) out[step] = __ldg(reinterpret_cast<const uint32_t*>(p) + step);
    }
  }
};

// The group's rows of x (or h) into shared memory, re-paired for decode()'s order.
template <typename C>
__device__ void stage_rows(const Params& p, typename C::Shared& s, int group) {
  constexpr int kChunks = C::kInputs / 8;
  const int rows = s.routing.rows[group];
  for (int i = threadIdx.x; i < rows * kChunks; i += C::kThreads) {
    const int row = i / kChunks, chunk = i % kChunks, pair = s.routing.pairs[group][row];
    const uint16_t* from = C::kGated ? p.x + (pair / p.topk) * p.x_stride : p.h + static_cast<int64_t>(pair) * p.inter;
    const uint4 v = *reinterpret_cast<const uint4*>(from + chunk * 8);
    // chunk = 16 * step + 4 * (lane of the quad) + word
    s.x[chunk / 16 * 4 + chunk % 4][row * 4 + chunk / 4 % 4] =
        make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                   __byte_perm(v.y, v.w, 0x7632));
  }
}

// The product of what is in `stage`; as soon as a step's codes are used, those of the next unit are asked for.
template <typename C>
__device__ __forceinline__ float4 multiply(const Params& p, const typename C::Shared& s, Stage<C::kSteps>& stage, bool more,
                                           const typename Stream<C>::From& next) {
  const int lane = threadIdx.x % 32, slice = threadIdx.x / 32 % C::kSlices;
  const uint4* x = &s.x[slice * C::kSteps * 4][lane % (C::kRows * 4)];
  uint32_t power[2][C::kSteps];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) power[row][step] = scale_power(stage.scales[row][step], lane % 4);
  }
  if (more) Stream<C>::load_both_scales(p, stage, next);
  float even[4] = {}, odd[4] = {};
#pragma unroll
  for (int step = 0; step < C::kSteps; ++step) {
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const uint4 b = x[(step * 4 + word) * C::kRows * 4];
      uint32_t row0[4], row1[4];
      decode(word_of(stage.codes[0][step], word), power[0][step], row0);
      decode(word_of(stage.codes[1][step], word), power[1][step], row1);
      mma_bf16(even, {row0[0], row1[0], row0[1], row1[1]}, b.x, b.y);
      mma_bf16(odd, {row0[2], row1[2], row0[3], row1[3]}, b.z, b.w);
    }
    if (more) Stream<C>::load_step(p, stage, next, step);
  }
  return make_float4(even[0] + odd[0], even[1] + odd[1], even[2] + odd[2], even[3] + odd[3]);
}

// The sum of a subtile, as an accumulator: rows g and g + 8, columns 2t and 2t + 1.
template <typename C>
__device__ __forceinline__ void store(const Params& p, const typename C::Shared& s, int group, int tile, int subtile, float4 sum) {
  const int lane = threadIdx.x % 32, g = lane / 4, column = lane % 4 * 2, rows = s.routing.rows[group];
  const float up_scale = __uint_as_float((127u + kShift) << 23);
  const float first[2] = {sum.x * up_scale, sum.y * up_scale}, second[2] = {sum.z * up_scale, sum.w * up_scale};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (column + i >= rows) break;
    const int64_t pair = s.routing.pairs[group][column + i];
    if constexpr (C::kGated) {
      // min and max that let a NaN through
      const float gate = first[i] > p.limit ? p.limit : first[i];
      const float up = second[i] > p.limit ? p.limit : second[i] < -p.limit ? -p.limit : second[i];
      const float h = __fdividef(gate, 1.f + exp2_approx(-1.4426950408889634f * gate)) * up;
      p.h[pair * p.inter + tile * 8 + g] = static_cast<uint16_t>(pack_bf16x2(h, 0.f) & 0xffffu);
    } else {
      float* y = p.y + pair * p.hidden + tile * C::kUnitOutputs + subtile * 16 + g;
      y[0] = first[i];
      y[8] = second[i];
    }
  }
}

// Position in the list of units: a group and a tile of its expert's rows.
struct Unit {
  int group, tile;
};

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks) experts_kernel(const Params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  typename C::Shared& s = *reinterpret_cast<typename C::Shared*>(shared_memory);
  const int warp = threadIdx.x / 32;
  if constexpr (C::kGated) pdl_wait();  // down starts after gate/up did: the ids are there, only h is not
  pdl_trigger();
  route<C>(p, s);
  const int tiles = (C::kGated ? p.inter : p.hidden) / C::kUnitOutputs;
  const int64_t units = static_cast<int64_t>(s.routing.num_groups) * tiles;
  const int begin = static_cast<int>(units * blockIdx.x / gridDim.x), end = static_cast<int>(units * (blockIdx.x + 1) / gridDim.x);
  if (begin == end) return;

  const Stream<C> stream(p);
  Stage<C::kSteps> stage;
  Unit next = {begin / tiles, begin % tiles};
  const auto first = stream.from(p, s.routing.expert[next.group], next.tile);
  Stream<C>::load_both_scales(p, stage, first);
#pragma unroll
  for (int step = 0; step < C::kSteps; ++step) Stream<C>::load_step(p, stage, first, step);
  if constexpr (!C::kGated) pdl_wait();
  int staged = -1;

  for (int unit = begin; unit < end; ++unit) {
    const Unit at = next;
    if (++next.tile == tiles) next = {next.group + 1, 0};
    const bool more = unit + 1 < end;
    const auto from = stream.from(p, s.routing.expert[more ? next.group : at.group], next.tile);
    if (at.group != staged) {
      if (staged >= 0) __syncthreads();
      stage_rows<C>(p, s, at.group);
      staged = at.group;
      __syncthreads();
    }
    const float4 sum = multiply<C>(p, s, stage, more, from);
    if constexpr (C::kSlices == 1) {
      store<C>(p, s, at.group, at.tile, warp, sum);
    } else {
      const int turn = unit - begin;
      s.partial[turn % 2][warp][threadIdx.x % 32] = sum;
      __syncthreads();
      // another warp has its turn with each unit; a buffer is written again after the next barrier but one
      const int subtile = (warp + turn * C::kSubtiles) % C::kWarps;
      if (subtile < C::kSubtiles) {
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int slice = 0; slice < C::kSlices; ++slice) {
          const float4 part = s.partial[turn % 2][subtile * C::kSlices + slice][threadIdx.x % 32];
          total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
        }
        store<C>(p, s, at.group, at.tile, subtile, total);
      }
    }
  }
}

constexpr int kCombineThreads = 256;

// out[row] = routed_scaling * sum over the slots, in their order, of weight * y
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const Params p) {
  pdl_wait();
  pdl_trigger();
  const int row = blockIdx.y, column = (blockIdx.x * kCombineThreads + threadIdx.x) * 4;
  if (column >= p.hidden) return;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int slot = 0; slot < p.topk; ++slot) {
    const int pair = row * p.topk + slot;
    if (local_expert(p, pair) < 0) continue;
    const float weight = p.topk_weights[row * p.weights_stride + slot];
    const float4 y = *reinterpret_cast<const float4*>(p.y + static_cast<int64_t>(pair) * p.hidden + column);
    sum.x += weight * y.x, sum.y += weight * y.y, sum.z += weight * y.z, sum.w += weight * y.w;
  }
  const float f = p.routed_scaling;
  *reinterpret_cast<uint2*>(p.out + row * p.out_stride + column) =
      make_uint2(pack_bf16x2(sum.x * f, sum.y * f), pack_bf16x2(sum.z * f, sum.w * f));
}

}  // namespace dsv4::mxfp4_moe

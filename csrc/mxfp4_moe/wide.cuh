// Both products of the experts for many rows in bf16, without the order of few: pairs sorted by expert, up to 112 of one expert a tile.
//
// 256 weight rows x 112 pairs a unit, one unit after the other: eight warps multiply 32 weight rows by all pairs, so that each
// weight is decoded once; so a warp loads its codes into registers, a stage of 128 inputs ahead. Four warps copy stages of x, and
// scales, and ask the L2 for the codes of the stages behind. All of that goes on across units. A lane's 32 inputs of a stage share a
// scale, which goes onto the decoded weights: a sum is one chain of mmas over all inputs.
#pragma once

#include "sorted.cuh"

namespace dsv4::mxfp4_moe {

constexpr int kWideRows = 256, kWidePairs = 112, kWideInputs = 128, kWideStages = 3;
constexpr int kScaleStages = 4, kScaleSlots = 3;  // three, as the two behind one may have one stage each
constexpr int wide_outputs(bool gated) { return gated ? kWideRows / 2 : kWideRows; }

// A lane q of a quad has 32 inputs, four pieces of 16 bytes. Quads read piece j of each, of two rows at a time, and copies write eight
// pieces of two lanes: both meet all banks.
struct alignas(256) WideStage {
  unsigned char x[kWidePairs][kWideInputs * 2];
};
__device__ __forceinline__ int wide_place(int row, int q, int j) { return (j >> 1) * 8 + ((j ^ row) & 1) * 4 + (q ^ (j & 2)); }
__device__ __forceinline__ uint32_t to_piece(uint32_t x, int j) { return x ^ ((j >> 1) * 128 + (j & 1) * 64 + (j & 2) * 16); }

// What is in a slot of pairs or units has been used by all before it is written again: four units are eight stages or more, and there are
// three.
struct WideShared {
  WideStage stages[kWideStages];
  uint8_t scales[kScaleSlots][kWideRows][16];  // of kScaleStages stages
  int pairs[kUnitSlots][kWidePairs];           // down
  DealtUnits dealt;
  Barriers<kWideStages> full, empty;
};
static_assert(sizeof(WideShared) <= kMaxSharedBytes);

constexpr int kDown = 32;  // weights are times 2^-kDown, so that the factors of scale bytes up to 160 are bf16

// 2^(byte - 1 - kDown), twice
__device__ __forceinline__ uint32_t factor_of(uint32_t byte) { return (byte + 126 - kDown) * 0x00800080u; }

// 8 codes with a common scale to bf16 pairs, in the order of the inputs
__device__ __forceinline__ void decode_bf16(uint32_t codes, uint32_t factor, uint32_t (&pair)[4]) {
  const uint32_t even = codes & 0x0f0f0f0fu, odd = codes >> 4 & 0x0f0f0f0fu;
  // each in its half of a word, the bytes between them of a sign that is none
  const uint32_t two[4] = {choose_bytes<0xc480>(even, odd), choose_bytes<0xd591>(even, odd), choose_bytes<0xe6a2>(even, odd),
                           choose_bytes<0xf7b3>(even, odd)};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    pair[j] = mul_bf16x2(two[j] * 0x1040 & 0x81c081c0u, factor);  // the sign to bit 15, the rest to 8 .. 6: times 2^-126
  }
}

// The weight row, of those of a unit, whose scales are the row in shared memory: of a warp's lanes 0, 4, 8 .. those of the mma m and its
// half r. A lane has gate and up of two outputs beside each other, or four outputs.
template <bool kGated>
__device__ __forceinline__ int wide_row(const SortedParams& p, int warp, int g, int m, int r) {
  if constexpr (kGated) return (r == 0 ? p.gate_row : p.up_row) + warp * 16 + g * 2 + m;
  return warp * 32 + g * 4 + m * 2 + r;
}

template <bool kGated>
__device__ __forceinline__ void copy_wide(const SortedParams& p, WideShared& s) {
  const int thread = threadIdx.x - kMathThreads, x_row = thread / 8, chunk = thread % 8;
  const uint32_t place = shared_address(&s.stages[0].x[x_row][wide_place(x_row, chunk / 4, chunk % 4) * 16]);
  const unsigned units = p.outputs / wide_outputs(kGated);
  const int scale_pitch = p.inputs / 32, code_pitch = p.inputs / 2, to_fifth = wide_outputs(kGated) / 2;  // rows, from warp 0's to warp 4's
  const int scale_row = wide_row<kGated>(p, thread / 32, thread % 8, thread / 16 % 2, thread / 8 % 2);
  StagePlace<kWideStages> at;
  int slot = 0;
  unsigned turn = 0;
  if (thread == 0) s.dealt.tell(p, 0, blockIdx.x, units);
  for (DealtUnit unit = s.dealt.ask(turn); unit.expert >= 0; unit = s.dealt.ask(++turn)) {
    unsigned ahead = 0;
    const int64_t row = p.first + unit.number % units * wide_outputs(kGated) + scale_row;
    const uint8_t* const scales = p.w.scales + unit.expert * p.w.expert_scale_bytes + row * scale_pitch;
    const uint8_t* const codes = p.w.codes + unit.expert * p.w.expert_bytes + row * code_pitch;
    uint32_t x[kWidePairs / 16];  // in 16 bytes
#pragma unroll
    for (int k = 0; k < kWidePairs / 16; ++k) {
      const int position = unit.begin + min(x_row + 16 * k, unit.count - 1);
      x[k] = static_cast<uint32_t>(kGated ? p.pairs[position] / p.topk : position) * p.x_row_chunks + chunk;
    }
#pragma unroll 1
    for (int i = 0; i < p.inputs / kWideInputs; ++i) {
      s.empty[at.stage].wait(at.phase ^ 1);
      if (thread == 0 && i == 0) ahead = gridDim.x + atomicAdd(p.taken, 1u);
      if (thread == 0 && i == 1) s.dealt.tell(p, turn + 1, ahead, units);
      if (i % kScaleStages == 0) {
#pragma unroll
        for (int k = 0; k < 2; ++k) copy_scales(s.scales[slot][thread + k * 128], scales + k * to_fifth * scale_pitch, i * 4, scale_pitch);
        if (++slot == kScaleSlots) slot = 0;
      }
      if (i % 2 == 0) {  // a line of codes is two stages
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const uint8_t* const here = codes + k * to_fifth * code_pitch + i * (kWideInputs / 2);
          if (i == 0) prefetch(here);
          if (i + 2 < p.inputs / kWideInputs) prefetch(here + kWideInputs);
        }
      }
      if (!kGated && i == 0 && thread < kWidePairs)
        cp_async<4>(&s.pairs[turn % kUnitSlots][thread], p.pairs + unit.begin + min(thread, unit.count - 1));
      const uint32_t to = place + at.stage * sizeof(WideStage);
#pragma unroll
      for (int k = 0; k < kWidePairs / 16; ++k) {
        const uint16_t* const from = p.x + (x[k] + i * 16) * int64_t{8};
        const bool valid = x_row + 16 * k < unit.count;
        cp_async_16_if(valid, to + k * 16 * 256, reinterpret_cast<uint64_t>(from), true);
        cp_async_16_if(valid, (to ^ 32) + k * 16 * 256, reinterpret_cast<uint64_t>(from + 64), true);
      }
      s.full[at.stage].arrive_copies();
      at.advance();
    }
  }
  s.empty[at.stage].wait(at.phase ^ 1);  // one more, since those who multiply load scales a stage ahead
  s.full[at.stage].arrive_copies();
}

// What a lane has of a stage's weights: of each of its four weight rows 32 codes and their scale.
struct WideCodes {
  uint4 codes[2][2];
  uint32_t scale[2][2];
};

using Operand = uint32_t[2][2][4];  // of 32 weight rows and a quarter of a lane's inputs: [mma's rows][mma's inputs]

__device__ __forceinline__ void decode_quarter(const WideCodes& w, int j, Operand& a) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t pair[4];
      decode_bf16(word_of(w.codes[m][r], j), factor_of(w.scale[m][r]), pair);
      a[m][0][r] = pair[0], a[m][0][2 + r] = pair[1], a[m][1][r] = pair[2], a[m][1][2 + r] = pair[3];
    }
  }
}

// sums += 32 weight rows x kTiles times 8 pairs x a quarter, that of the first pair at `x`.
template <int kTiles>
__device__ __forceinline__ void multiply_quarter(float (&sums)[2][kTiles][4], const Operand& a, uint32_t x) {
  constexpr int kTogether = kTiles % 4 == 0 ? 4 : 2;
#pragma unroll
  for (int from = 0; from < kTiles; from += kTogether) {
    uint4 b[kTogether];
#pragma unroll
    for (int n = 0; n < kTogether; ++n) b[n] = load_shared(x + (from + n) * 8 * (kWideInputs * 2));
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
#pragma unroll
        for (int m = 0; m < 2; ++m) mma_bf16(sums[m][from + n], a[m][k], k == 0 ? b[n].x : b[n].z, k == 0 ? b[n].y : b[n].w);
      }
    }
  }
}

// What a warp that multiplies has from unit to unit: its stage of x, and the weights behind the ones that it multiplies, of which the
// first quarter is decoded.
struct WideAhead {
  StagePlace<kWideStages> at;
  const uint8_t* codes;  // of this lane's first row
  WideCodes next;
  int slot = kScaleSlots - 1;
  Operand first;
};

template <bool kGated>
__device__ __forceinline__ void go_to_unit(const SortedParams& p, WideAhead& ahead, const DealtUnit& unit, unsigned units) {
  const int lane = threadIdx.x % 32;
  const int row = p.first + unit.number % units * wide_outputs(kGated) + wide_row<kGated>(p, threadIdx.x / 32, lane / 4, 0, 0);
  ahead.codes = p.w.codes + unit.expert * p.w.expert_bytes + static_cast<int64_t>(row) * (p.inputs / 2) + lane % 4 * 16;
}
template <bool kGated>
__device__ __forceinline__ void load_codes(const SortedParams& p, WideAhead& ahead) {
  const int64_t to_half = static_cast<int64_t>(kGated ? p.up_row - p.gate_row : 1) * (p.inputs / 2), to_next = (kGated ? 1 : 2) * (p.inputs / 2);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) ahead.next.codes[m][r] = load_stream_16(ahead.codes + m * to_next + r * to_half);
  }
}
// of the unit's stage
__device__ __forceinline__ void load_scales(WideAhead& ahead, uint32_t scales, int stage) {
  if (stage % kScaleStages == 0 && ++ahead.slot == kScaleSlots) ahead.slot = 0;
  const uint32_t from = scales + ahead.slot * (kWideRows * 16) + stage % kScaleStages * 4;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) ahead.next.scale[m][r] = load_shared_u8(from + (m * 2 + r) * 8 * 16);
  }
}

template <bool kGated, int kTiles>
__device__ __forceinline__ void multiply_unit(const SortedParams& p, WideShared& s, WideAhead& ahead, uint32_t scales, unsigned turn,
                                              unsigned units) {
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));  // addresses of this number of tiles are made here, not kept for all numbers through all units
  const int g = lane / 4, q = lane % 4, stages = p.inputs / kWideInputs;
  const uint32_t x = shared_address(&s.stages[0].x[g][wide_place(g, q, 0) * 16]);
  float sums[2][kTiles][4] = {};
#pragma unroll 1
  for (int i = 1; i <= stages; ++i) {
    const bool last = i == stages;
    const int behind = last ? 0 : i;
    const WideCodes here = ahead.next;
    if (last) {
      const DealtUnit next = s.dealt.ask(turn + 1);
      if (next.expert >= 0) go_to_unit<kGated>(p, ahead, next, units);
    } else {
      ahead.codes += kWideInputs / 2;
    }
    load_codes<kGated>(p, ahead);
    const uint32_t here_x = x + ahead.at.stage * sizeof(WideStage);
    const Barrier empty = s.empty[ahead.at.stage];
    Operand second;
    decode_quarter(here, 1, second);
    multiply_quarter(sums, ahead.first, here_x);
    decode_quarter(here, 2, ahead.first);
    multiply_quarter(sums, second, to_piece(here_x, 1));
    decode_quarter(here, 3, second);
    multiply_quarter(sums, ahead.first, to_piece(here_x, 2));
    ahead.at.advance();
    s.full[ahead.at.stage].wait(ahead.at.phase);
    load_scales(ahead, scales, behind);
    decode_quarter(ahead.next, 0, ahead.first);
    multiply_quarter(sums, second, to_piece(here_x, 3));
    __syncwarp();
    if (lane == 0) empty.arrive();
  }
  const DealtUnit unit = s.dealt.look(turn);
  const int warp = uniform(threadIdx.x / 32);
  const int output = unit.number % units * wide_outputs(kGated) + warp * (wide_outputs(kGated) / 8) + g * (kGated ? 2 : 4);
  const auto value = [&](int n, int r, int m, int half) { return sums[m][n][half * 2 + r] * (1ull << kDown); };
  if constexpr (kGated) {
    const uint64_t to = reinterpret_cast<uint64_t>(p.h + (unit.begin + 2 * q) * static_cast<int64_t>(p.outputs) + output);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t low = swiglu(value(n, r, 0, 0), value(n, r, 0, 1), p.limit), high = swiglu(value(n, r, 1, 0), value(n, r, 1, 1), p.limit);
        store_where(n * 8 + 2 * q + r < unit.count, to + static_cast<uint64_t>(n * 8 + r) * (p.outputs * 2), low | high << 16);
      }
    }
  } else {
    const uint64_t to = reinterpret_cast<uint64_t>(p.y16 + output);
    const uint32_t pairs = shared_address(&s.pairs[turn % kUnitSlots][2 * q]);
    uint2 rows[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) rows[n] = load_shared_u32x2(pairs + n * 8 * 4);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint2 words;
        words.x = pack_bf16x2(value(n, r, 0, 0), value(n, r, 0, 1)), words.y = pack_bf16x2(value(n, r, 1, 0), value(n, r, 1, 1));
        store_where(n * 8 + 2 * q + r < unit.count, to + static_cast<uint64_t>(r == 0 ? rows[n].x : rows[n].y) * (p.outputs * 2), words);
      }
    }
  }
}

// With as many times 16 pairs as the unit's `count` needs.
template <bool kGated, int kTiles = kWidePairs / 8>
__device__ __forceinline__ void multiply_any(const SortedParams& p, WideShared& s, WideAhead& ahead, uint32_t scales, int count, unsigned turn,
                                             unsigned units) {
  if constexpr (kTiles > 2) {
    if (count <= (kTiles - 2) * 8) return multiply_any<kGated, kTiles - 2>(p, s, ahead, scales, count, turn, units);
  }
  multiply_unit<kGated, kTiles>(p, s, ahead, scales, turn, units);
}

template <bool kGated>
__device__ __forceinline__ void multiply_wide_units(const SortedParams& p, WideShared& s) {
  const unsigned units = p.outputs / wide_outputs(kGated);
  const uint32_t scales = shared_address(&s.scales[0][threadIdx.x / 32 * 32 + threadIdx.x % 32 / 4][threadIdx.x % 4]);
  DealtUnit unit = s.dealt.ask(0);
  if (unit.expert < 0) return;
  WideAhead ahead;
  go_to_unit<kGated>(p, ahead, unit, units);
  load_codes<kGated>(p, ahead);
  s.full[0].wait(0);
  load_scales(ahead, scales, 0);
  decode_quarter(ahead.next, 0, ahead.first);
  for (unsigned turn = 0; unit.expert >= 0; unit = s.dealt.ask(++turn)) multiply_any<kGated>(p, s, ahead, scales, unit.count, turn, units);
}

template <bool kGated>
__global__ void __launch_bounds__(kSortedThreads, 1) wide_kernel(const SortedParams p) {
  extern __shared__ __align__(256) unsigned char shared_memory[];
  WideShared& s = *reinterpret_cast<WideShared*>(shared_memory);
  if (threadIdx.x < kWideStages) {
    s.full[threadIdx.x].init(kCopyThreads);
    s.empty[threadIdx.x].init(kMathThreads / 32);
  }
  if (threadIdx.x < kUnitSlots) s.dealt.told[threadIdx.x].init(1);
  __syncthreads();
  pdl_wait();
  pdl_trigger();
  if (threadIdx.x >= kMathThreads) {
    set_registers<40, false>();
    copy_wide<kGated>(p, s);
  } else {
    set_registers<232, true>();  // 40 + 2 x 232 = 3 x 168, of four warps each
    multiply_wide_units<kGated>(p, s);
  }
}

}  // namespace dsv4::mxfp4_moe

// csrc/mxfp4_moe/sorted.cuh and wide.cuh on the CPU, and a warp's product of few rows (product.cuh): their own text, the threads of a
// block in turn (turns_on_cpu.h), warps in step where the text says so. Who waits for ever is told.
//
// Copies are held back until the thread says by which barrier they come, and barriers have phases as mbarriers have. An mma is
// the sum of its products in float64, rounded: what is multiplied makes all such sums exact. SiLU's exponential is zero, so that
// h is gate times up.
// The test that compiles this puts the texts of the headers, without their includes, in place of the marked line.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "turns_on_cpu.h"

#define __device__
#define __host__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

using cudaStream_t = void*;
using std::max, std::min;
struct float2 { float x, y; };
struct uint2 { uint32_t x, y; };
struct float4 { float x, y, z, w; };
struct uint4 { uint32_t x, y, z, w; };
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

constexpr int kWarpLanes = 32, kMostWarps = 12;
struct Warp {
  turns::Meeting meeting{kWarpLanes};
  uint32_t words[kWarpLanes][8];
};
Warp* warps;
turns::Meeting* of_block;
inline Warp& my_warp() { return warps[threadIdx.x / 32]; }
inline void __syncthreads() { of_block->arrive_and_wait(); }
inline void __syncwarp() { my_warp().meeting.arrive_and_wait(); }
// every lane's words are there when `use` reads them, and no lane's are overwritten before all have read
template <typename Use>
auto among_lanes(std::initializer_list<uint32_t> mine, Use use) {
  Warp& w = my_warp();
  std::copy(mine.begin(), mine.end(), w.words[threadIdx.x % 32]);
  __syncwarp();
  auto found = use(w.words);
  __syncwarp();
  return found;
}
inline float as_float(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline uint32_t as_bits(float f) { uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }
inline float __uint_as_float(uint32_t bits) { return as_float(bits); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdividef(float a, float b) { return a / b; }
inline uint32_t atomicAdd(uint32_t* p, uint32_t v) { return *p += v, *p - v; }
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) { return max(a & 0xffffu, b & 0xffffu) | max(a >> 16, b >> 16) << 16; }
template <typename T>
T __shfl_sync(unsigned, T v, int lane) {
  return among_lanes({static_cast<uint32_t>(v)}, [&](auto& words) { return static_cast<T>(words[lane][0]); });
}
inline uint32_t __shfl_xor_sync(unsigned mask, uint32_t v, int lanes) { return __shfl_sync(mask, v, threadIdx.x % 32 ^ lanes); }
inline float __shfl_xor_sync(unsigned mask, float v, int lanes) { return as_float(__shfl_xor_sync(mask, as_bits(v), lanes)); }
inline uint32_t __reduce_max_sync(unsigned, uint32_t v) {
  return among_lanes({v}, [](auto& words) {
    uint32_t most = 0;
    for (auto& word : words) most = max(most, word[0]);
    return most;
  });
}

namespace dsv4::mxfp4_moe {
alignas(256) unsigned char shared_memory[101376];
}
namespace dsv4 {
struct KernelAttributes {};
struct Launcher {};
using mxfp4_moe::shared_memory;
inline void pdl_wait() {}
inline void pdl_trigger() {}
template <int, bool>
void set_registers() {}
inline int uniform(int v) { return v; }
inline uint32_t shared_address(const void* p) { return static_cast<const unsigned char*>(p) - shared_memory; }
template <typename T>
T at_address(uint32_t address) {
  T v;
  std::memcpy(&v, shared_memory + address, sizeof(T));
  return v;
}
inline uint32_t load_shared_u8(uint32_t address) { return at_address<uint8_t>(address); }
inline uint32_t load_shared_u16(uint32_t address) { return at_address<uint16_t>(address); }
inline uint32_t load_shared_u32(uint32_t address) { return at_address<uint32_t>(address); }
inline uint2 load_shared_u32x2(uint32_t address) { return at_address<uint2>(address); }
inline float2 load_shared_f32x2(uint32_t address) { return at_address<float2>(address); }
inline uint4 load_shared(uint32_t address) { return at_address<uint4>(address); }
inline uint4 load_stream(const void* p) { return *static_cast<const uint4*>(p); }
inline uint4 load_stream_16(const void* p) { return *static_cast<const uint4*>(p); }
inline void prefetch(const void*) {}
template <typename T>
void store_where(bool writes, uint64_t to, const T& v) { if (writes) std::memcpy(reinterpret_cast<void*>(to), &v, sizeof(T)); }
inline void load_shared_if(bool when, uint4& v, const uint4* p) { if (when) v = *p; }

struct Copy { uint32_t to; const void* from; int bytes; };
std::vector<Copy> copies_of[kMostWarps * kWarpLanes];
inline void cp_async_16(uint32_t to, uint64_t from, bool) { copies_of[threadIdx.x].push_back({to, reinterpret_cast<const void*>(from), 16}); }
inline void cp_async_16_if(bool when, uint32_t to, uint64_t from, bool valid) { if (when) cp_async_16(to, from, valid); }
template <int kBytes>
void cp_async(void* to, const void* from) { copies_of[threadIdx.x].push_back({shared_address(to), from, kBytes}); }

inline void cp_async_wait_all() {
  auto& copies = copies_of[threadIdx.x];
  std::reverse(copies.begin(), copies.end());
  for (const Copy& copy : copies) std::memcpy(shared_memory + copy.to, copy.from, copy.bytes);
  copies.clear();
}

struct Phases { int expected, missing; uint32_t done; };
Phases phases[sizeof(shared_memory) / 8];
struct Barrier {
  uint32_t address;
  void init(int arrivals) const { phases[address / 8] = {arrivals, arrivals, 0}; }
  void arrive() const {
    Phases& p = phases[address / 8];
    if (--p.missing > 0) return;
    p.missing = p.expected;
    ++p.done;
  }
  void arrive_copies() const {
    cp_async_wait_all();
    arrive();
  }
  void wait(uint32_t phase) const {
    turns::wait_until([&] { return phases[address / 8].done % 2 != phase; });
  }
};
template <int kCount>
struct Barriers {
  uint64_t words[kCount];
  Barrier operator[](int i) const { return {shared_address(words) + 8 * i}; }
};

inline uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
template <uint32_t kBytes>
uint32_t choose_bytes(uint32_t low, uint32_t high) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t which = kBytes >> 4 * i & 15, byte = bytes >> 8 * (which & 7) & 0xff;
    found |= (which < 8 ? byte : byte & 0x80 ? 0xff : 0) << 8 * i;
  }
  return found;
}
template <uint32_t kMask>
uint32_t choose_bits(uint32_t value, uint32_t other) { return (value & kMask) | (other & ~kMask); }
inline float bf16_low(uint32_t pair) { return as_float(pair << 16); }
inline float bf16_high(uint32_t pair) { return as_float(pair & 0xffff0000u); }
inline uint32_t bf16(float f) {
  const uint32_t bits = as_bits(f);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t pack_bf16x2(float low, float high) { return bf16(low) | bf16(high) << 16; }
inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) { return pack_bf16x2(bf16_low(a) * bf16_low(b), bf16_high(a) * bf16_high(b)); }
inline float of_bf16(uint32_t bits) { return bf16_low(bits); }
inline uint32_t f16(float f) { _Float16 h = static_cast<_Float16>(f); uint16_t bits; std::memcpy(&bits, &h, 2); return bits; }
inline float of_f16(uint32_t bits) { const uint16_t low = bits; _Float16 h; std::memcpy(&h, &low, 2); return static_cast<float>(h); }
inline uint32_t pack_f16x2(float low, float high) { return f16(low) | f16(high) << 16; }
inline float exp2_approx(float) { return 0; }

template <float (*kNumber)(uint32_t)>
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  among_lanes({a[0], a[1], a[2], a[3], b0, b1}, [&](auto& words) {
    for (int i = 0; i < 4; ++i) {  // row g + 8 (i / 2), column 2 q + i % 2
      double sum = d[i];
      for (int k = 0; k < 4; ++k) {
        for (int half = 0; half < 2; ++half) {
          const uint32_t *const of_a = words[g * 4 + k], *const of_b = words[(2 * q + i % 2) * 4 + k];
          sum += static_cast<double>(kNumber(of_a[i / 2] >> 16 * half)) * kNumber(of_b[4] >> 16 * half);
          sum += static_cast<double>(kNumber(of_a[2 + i / 2] >> 16 * half)) * kNumber(of_b[5] >> 16 * half);
        }
      }
      d[i] = static_cast<float>(sum);
    }
    return 0;
  });
}
inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma<of_f16>(d, a, b0, b1); }
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma<of_bf16>(d, a, b0, b1); }
}  // namespace dsv4

//@@ the kernels

using namespace dsv4::mxfp4_moe;

// false: some wait for ever
template <typename Run>
bool run_grid(unsigned blocks, int threads, Run run) {
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    std::memset(shared_memory, 0xff, sizeof(shared_memory));
    for (auto& copies : dsv4::copies_of) copies.clear();
    Warp all_warps[kMostWarps];
    turns::Meeting meeting{threads};
    warps = all_warps, of_block = &meeting;
    if (!turns::run(threads, run)) return false;
  }
  return true;
}

extern "C" bool prepare(const PrepareParams* p) {
  const int64_t warps_of_all = p->rows * p->slices, together = kPrepareThreads / 32 * kPrepareItems;
  return run_grid((warps_of_all + together - 1) / together, kPrepareThreads, [&] { prepare_kernel(*p); });
}
#ifdef DOWN  // less to compile
extern "C" bool multiply(const SortedParams* p, int blocks, bool) { return run_grid(blocks, kSortedThreads, [&] { sorted_kernel<false>(*p); }); }
extern "C" bool multiply_wide(const SortedParams* p, int blocks, bool) { return run_grid(blocks, kSortedThreads, [&] { wide_kernel<false>(*p); }); }
#else
extern "C" bool multiply(const SortedParams* p, int blocks, bool gated) {
  return run_grid(blocks, kSortedThreads, [&] { gated ? sorted_kernel<true>(*p) : sorted_kernel<false>(*p); });
}
extern "C" bool multiply_wide(const SortedParams* p, int blocks, bool gated) {
  return run_grid(blocks, kSortedThreads, [&] { gated ? wide_kernel<true>(*p) : wide_kernel<false>(*p); });
}

// What a warp for few rows makes of 16 weight rows: partial[slice][row][weight row], each slice by itself.
template <int kSlices, int kSteps, int kRows, int kPasses>
void few_rows(const uint16_t* x, const uint8_t* codes, const uint8_t* scales, float* partial) {
  using Reads = From<kSteps, kSlices * kSteps * 64>;
  auto& s = *reinterpret_cast<WarpShared<kSteps, kRows>*>(shared_memory);
  const int lane = threadIdx.x, g = lane / 4;
  for (int slice = 0; slice < kSlices; ++slice) {
    for (int row = 0; row < 2 * kPasses; ++row) stage_row<true>(s, row, x + (row * kSlices + slice) * (kSteps * kStepInputs), true);
    const Reads from = {codes + g * Reads::kRowBytes + slice * (kSteps * 64) + lane % 4 * 16, scales + slice * (kSteps * 4), 8};
    Stage<kSteps> stage;
    from.load_all(stage, s.scales[slice % 2]);
    __syncwarp();
    float sums[kPasses];
    multiply<kRows, kPasses>(s, slice % 2, stage, false, from, sums);
    for (int pass = 0; pass < kPasses; ++pass) partial[(slice * 8 + 2 * pass + lane / 2 % 2) * 16 + g + 8 * (lane % 2)] = sums[pass];
    __syncwarp();
  }
}
template <int kSlices, int kSteps>
bool few_of(int passes, const uint16_t* x, const uint8_t* codes, const uint8_t* scales, float* partial) {
  return run_grid(1, 32, [&] {
    if (passes == 1) few_rows<kSlices, kSteps, 2, 1>(x, codes, scales, partial);
    if (passes == 2) few_rows<kSlices, kSteps, 4, 2>(x, codes, scales, partial);
    if (passes == 4) few_rows<kSlices, kSteps, 8, 4>(x, codes, scales, partial);
  });
}
extern "C" bool few(int inputs, int passes, const uint16_t* x, const uint8_t* codes, const uint8_t* scales, float* partial) {
  if (inputs == 256) return few_of<1, 2>(passes, x, codes, scales, partial);
  if (inputs == 768) return few_of<2, 3>(passes, x, codes, scales, partial);
  return inputs == 4096 && few_of<8, 4>(passes, x, codes, scales, partial);
}
#endif

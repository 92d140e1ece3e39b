// csrc/sparse_decode's kernel for few rows, and those that take them in pairs and 32 heads at once, on the CPU: their own text, the threads of a
// block in turn (turns_on_cpu.h). Who waits for ever is told.
//
// Copies are carried out when the thread says by which barrier they come, or at once, whichever is asked for: too late and too early for who
// did not wait. Barriers have phases as mbarriers have. An mma is the sum of its products in float64, rounded.
// The test that compiles this puts the texts of the headers, without their includes, in place of the marked line.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "turns_on_cpu.h"

#define __device__
#define __host__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

using cudaStream_t = void*;
using std::max, std::min;
struct uint2 { uint32_t x, y; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
bool copies_at_once;

struct Copy { uint32_t to; uint64_t from; int bytes; bool valid; };
std::vector<Copy> copies[1024];  // of each thread
using turns::Meeting;
struct Warp {
  Meeting meeting{32};
  uint32_t words[32][6];
};
struct Block {
  Meeting all, one, two;  // of a block, and bar.sync's by their numbers
  std::vector<Warp> warps;
};
Block* block;
inline Warp& my_warp() { return block->warps[threadIdx.x / 32]; }
inline void __syncthreads() { block->all.arrive_and_wait(); }
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
inline float __uint_as_float(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __int_as_float(int bits) { return __uint_as_float(bits); }
inline uint32_t __float_as_uint(float f) { uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(v); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint64_t>(a) * b >> 32; }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t v = 0;
  for (int i = 0; i < 4; ++i) v |= (both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return v;
}
inline float4 __ldcg(const float4* p) { return *p; }
inline float2 __ldcg(const float2* p) { return *p; }
inline void __stcg(float4* p, float4 v) { *p = v; }
inline void __stcg(float2* p, float2 v) { *p = v; }
inline uint32_t shuffled(uint32_t v, int lane) {
  return among_lanes({v}, [&](auto& words) { return words[lane][0]; });
}
inline uint64_t __shfl_sync(unsigned, uint64_t v, int lane) {
  return among_lanes({static_cast<uint32_t>(v), static_cast<uint32_t>(v >> 32)},
                     [&](auto& words) { return static_cast<uint64_t>(words[lane][1]) << 32 | words[lane][0]; });
}
inline uint32_t __shfl_sync(unsigned, uint32_t v, int lane) { return shuffled(v, lane); }
inline int __shfl_sync(unsigned, int v, int lane) { return static_cast<int>(shuffled(static_cast<uint32_t>(v), lane)); }
inline float __shfl_sync(unsigned, float v, int lane) { return __uint_as_float(shuffled(__float_as_uint(v), lane)); }
inline float __shfl_up_sync(unsigned, float v, int by) { return __uint_as_float(shuffled(__float_as_uint(v), max<int>(static_cast<int>(threadIdx.x % 32) - by, 0))); }
inline uint32_t __shfl_down_sync(unsigned, uint32_t v, int by) { return shuffled(v, min<int>(threadIdx.x % 32 + by, 31)); }
inline float __shfl_xor_sync(unsigned, float v, int lanes) { return __uint_as_float(shuffled(__float_as_uint(v), threadIdx.x % 32 ^ lanes)); }
inline uint32_t __ballot_sync(unsigned, bool v) {
  return among_lanes({v}, [](auto& words) {
    uint32_t all = 0;
    for (int lane = 0; lane < 32; ++lane) all |= words[lane][0] << lane;
    return all;
  });
}
inline bool __any_sync(unsigned mask, bool v) { return __ballot_sync(mask, v) != 0; }
inline int __reduce_max_sync(unsigned, int v) {
  return among_lanes({static_cast<uint32_t>(v)}, [](auto& words) {
    int most = static_cast<int>(words[0][0]);
    for (auto& word : words) most = max(most, static_cast<int>(word[0]));
    return most;
  });
}

inline int __ffs(int v) { return __builtin_ffs(v); }
// of rows over several blocks, which nobody asks for here
inline long long clock64() { return 0; }
inline void __threadfence() {}
inline uint32_t atomicOr(uint32_t*, uint32_t) { return 0; }
inline uint32_t atomicAnd(uint32_t*, uint32_t) { return 0; }
inline uint32_t atomicExch(uint32_t*, uint32_t) { return 0; }

namespace dsv4 {
inline uint32_t add_acq_rel(uint32_t*, uint32_t) { return 0; }
inline uint32_t load_acquire(const uint32_t*) { return 0; }
alignas(128) uint8_t shared[101376];
struct KernelAttributes {};
struct Launcher {};
inline void pdl_wait() {}
inline void prefetch(const void*) {}
inline void load_where(bool reads, uint32_t& v, const void* p) { if (reads) std::memcpy(&v, p, 4); }
inline void store_where(bool writes, uint64_t to, uint32_t v) { if (writes) std::memcpy(reinterpret_cast<void*>(to), &v, 4); }
inline void pdl_trigger() {}
template <int, bool>
void set_registers() {}
template <int threads>
void sync_threads(int id) { (id == 0 ? block->all : id == 1 ? block->one : block->two).arrive_and_wait(); }
template <int id, int threads>
void sync_threads() { sync_threads<threads>(id); }
inline int uniform(int v) { return v; }
inline bool elect_one() { return threadIdx.x % 32 == 0; }
inline uint32_t shared_address(const void* p) { return static_cast<const uint8_t*>(p) - shared; }
inline uint32_t load_shared_u8(uint32_t address) { return shared[address]; }
inline uint32_t word_at(uint32_t address) { uint32_t v; std::memcpy(&v, shared + address, 4); return v; }
inline float4 load_shared_f32x4(uint32_t address) { float4 v; std::memcpy(&v, shared + address, 16); return v; }
inline void store_shared_f32x2(uint32_t address, float x, float y) {
  std::memcpy(shared + address, &x, 4);
  std::memcpy(shared + address + 4, &y, 4);
}

inline void carry_out() {
  for (const Copy& c : copies[threadIdx.x]) {
    c.valid ? std::memcpy(shared + c.to, reinterpret_cast<const void*>(c.from), c.bytes) : std::memset(shared + c.to, 0, c.bytes);
  }
  copies[threadIdx.x].clear();
}
inline void copy(uint32_t to, uint64_t from, int bytes, bool valid) {
  copies[threadIdx.x].push_back({to, from, bytes, valid});
  if (copies_at_once) carry_out();
}
inline void cp_async_16(uint32_t to, uint64_t from, bool valid) { copy(to, from, 16, valid); }
inline void cp_async_wait_all() { carry_out(); }
inline void cp_async_16_if(bool when, uint32_t to, uint64_t from, bool valid) { if (when) copy(to, from, 16, valid); }
inline void cp_async_8_if(bool when, uint32_t to, uint64_t from, bool valid) { if (when) copy(to, from, 8, valid); }

struct Phases { int expected, missing; uint32_t done; };
Phases phases[sizeof(shared) / 8];
struct Barrier {
  uint32_t address;
  Phases& state() const { return phases[address / 8]; }
  void init(int arrivals) const { state() = {arrivals, arrivals, 0}; }
  void arrive() const {
    Phases& p = state();
    if (--p.missing > 0) return;
    p.missing = p.expected;
    ++p.done;
  }
  void arrive_copies() const { carry_out(), arrive(); }
  void wait(uint32_t phase) const {
    turns::wait_until([&] { return state().done % 2 != phase; });
  }
  const Barrier* operator->() const { return this; }
};
template <int kCount = 1>
struct Barriers {
  uint64_t words[kCount];
  Barrier operator[](int i) const { return {shared_address(words) + 8 * i}; }
  template <int kFirst>
  Barrier behind(int i) const { return {shared_address(words) + 8 * kFirst + 8 * i}; }
  Barrier operator->() const { return {shared_address(words)}; }
};

inline uint32_t bf16(float f) {
  if (std::isnan(f)) return 0x7fff;
  const uint32_t bits = __float_as_uint(f);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t f16(float f) { _Float16 h = static_cast<_Float16>(f); uint16_t bits; std::memcpy(&bits, &h, 2); return bits; }
inline float of_f16(uint32_t bits) { const uint16_t low = bits; _Float16 h; std::memcpy(&h, &low, 2); return static_cast<float>(h); }
inline float of_bf16(uint32_t bits) { return __uint_as_float(bits << 16); }
inline float bf16_low(uint32_t pair) { return of_bf16(pair & 0xffff); }
inline float bf16_high(uint32_t pair) { return of_bf16(pair >> 16); }
inline uint32_t pack_bf16x2(float low, float high) { return bf16(low) | bf16(high) << 16; }
inline uint32_t pack_f16x2(float low, float high) { return f16(low) | f16(high) << 16; }
inline uint32_t mul_f16x2(uint32_t a, uint32_t b) { return pack_f16x2(of_f16(a) * of_f16(b), of_f16(a >> 16) * of_f16(b >> 16)); }
inline uint32_t max_abs_bf16x2(uint32_t a, uint32_t b) {
  return pack_bf16x2(std::fmax(bf16_low(a), std::fabs(bf16_low(b))), std::fmax(bf16_high(a), std::fabs(bf16_high(b))));
}
inline float of_e4m3(uint32_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  const float magnitude = exponent == 15 && mantissa == 7 ? NAN : exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return byte >> 7 & 1 ? -magnitude : magnitude;
}
inline void e4m3x4_to_f16(uint32_t bytes, uint32_t& low, uint32_t& high) {
  low = pack_f16x2(of_e4m3(bytes & 0xff), of_e4m3(bytes >> 8 & 0xff));
  high = pack_f16x2(of_e4m3(bytes >> 16 & 0xff), of_e4m3(bytes >> 24));
}
inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1 / x; }
inline float pow2_exact(float d) { return d + 127 <= 0 ? 0.f : std::exp2(d); }
inline float4 add(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// lane l has of each of four 8 x 8 matrices, whose rows' addresses eight lanes give, two neighbours of row l / 4, or of column l / 4
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  const int lane = threadIdx.x % 32;
  among_lanes({address}, [&](auto& words) {
    for (int i = 0; i < 4; ++i) r[i] = word_at(words[8 * i + lane / 4][0] + lane % 4 * 4);
    return 0;
  });
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  const int lane = threadIdx.x % 32;
  among_lanes({address}, [&](auto& words) {
    for (int i = 0; i < 4; ++i) {
      uint16_t pair[2];
      for (int k = 0; k < 2; ++k) std::memcpy(&pair[k], shared + words[8 * i + lane % 4 * 2 + k][0] + lane / 4 * 2, 2);
      r[i] = pair[0] | pair[1] << 16;
    }
    return 0;
  });
}
template <typename Value>
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Value value) {
  const int lane = threadIdx.x % 32, g = lane / 4, j = lane % 4;
  among_lanes({a[0], a[1], a[2], a[3], b0, b1}, [&](auto& words) {
    for (int i = 0; i < 4; ++i) {  // row g + 8 (i / 2), column 2 j + i % 2
      double sum = d[i];
      for (int k = 0; k < 4; ++k)
        for (int half = 0; half < 2; ++half) {
          const uint32_t *const of_a = words[g * 4 + k], *const of_b = words[(2 * j + i % 2) * 4 + k];
          sum += static_cast<double>(value(of_a[i / 2] >> 16 * half & 0xffff)) * value(of_b[4] >> 16 * half & 0xffff);
          sum += static_cast<double>(value(of_a[2 + i / 2] >> 16 * half & 0xffff)) * value(of_b[5] >> 16 * half & 0xffff);
        }
      d[i] = static_cast<float>(sum);
    }
    return 0;
  });
}
inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma(d, a, b0, b1, of_f16); }
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma(d, a, b0, b1, of_bf16); }
}  // namespace dsv4

//@@ the kernels

using namespace dsv4::sparse_decode;

struct GivenCache {
  const uint8_t* pages;
  int64_t page_bytes, page_size, num_pages;
  const int32_t* indices;
  int64_t indices_stride, width;
  const int32_t* lengths;

  Cache cache() const {
    if (pages == nullptr) return {};
    const FastDivisor divisor = make_divisor(static_cast<int>(page_size));
    return {pages, static_cast<uint32_t>(page_bytes), num_pages * page_size, divisor, indices, indices_stride, static_cast<int>(width), lengths};
  }
};
struct Given {
  const uint16_t* q;
  uint16_t* out;
  float* lse;
  const float* sink;
  int64_t rows, heads, blocks, wide, at_once;
  float scale_log2;
  GivenCache main, extra;
  const int32_t* table;
  int64_t table_stride, num_tables;
  const int32_t* table_of_row;
};

// All [rows, heads, 512] contiguous.
Params params_of(const Given& given) {
  Params p = {};
  p.q = given.q, p.out = given.out, p.lse = given.lse, p.attn_sink = given.sink;
  p.rows = given.rows, p.heads = given.heads, p.scale_log2 = given.scale_log2;
  p.q_stride_head = p.out_stride_head = dsv4::kHeadDim;
  p.q_stride_row = p.out_stride_row = given.heads * dsv4::kHeadDim;
  p.main = given.main.cache(), p.extra = given.extra.cache();
  p.extra_table = {given.table, given.table_stride, given.table_of_row, static_cast<int>(given.num_tables), static_cast<int>(given.extra.num_pages)};
  copies_at_once = given.at_once;
  return p;
}
// false: some wait for ever
bool run_block(int count, int of_one, int of_two, std::function<void()> run) {
  std::memset(dsv4::shared, 0xff, sizeof(dsv4::shared));
  Block here = {{count}, {of_one}, {of_two}, std::vector<Warp>(count / 32)};
  block = &here;
  for (auto& one : copies) one.clear();
  return turns::run(count, run);
}

extern "C" bool in_pairs(const Given* given) {
  Params p = params_of(*given);
  p.head_blocks = dsv4::ceil_div(p.heads, given->wide ? pairs::kWideHeads : kBlockHeads);
  gridDim = {static_cast<unsigned>(given->blocks), 1, 1};
  bool ends = true;
  for (blockIdx = {}; ends && blockIdx.x < gridDim.x; ++blockIdx.x) {
    ends = run_block(pairs::kThreads, given->wide ? pairs::kMathThreads : pairs::kGroupThreads, pairs::kGroupThreads, [&] {
#ifndef LISTS  // with it there is less to compile
      if (given->table != nullptr) return pairs::sparse_decode_pairs_kernel<true>(p);
#endif
      if (given->wide) {
        pairs::sparse_decode_wide_kernel(p);
      } else {
        pairs::sparse_decode_pairs_kernel<false>(p);
      }
    });
  }
  return ends;
}
#ifndef LISTS
extern "C" bool few(const Given* given) {
  Params p = params_of(*given);
  p.guess_main_leaves = dsv4::ceil_div(p.main.width, kLeaf);
  gridDim = {static_cast<unsigned>(dsv4::ceil_div(p.heads, kBlockHeads)), 1, static_cast<unsigned>(p.rows)};
  bool ends = true;
  for (blockIdx = {}; blockIdx.z < gridDim.z; ++blockIdx.z)
    for (blockIdx.x = 0; ends && blockIdx.x < gridDim.x; ++blockIdx.x)
      ends = run_block(kThreads, kMathThreads, 32 * (kSoftmaxWarps + kValueWarps), [&] { sparse_decode_kernel<false, false>(p); });
  return ends;
}
#endif

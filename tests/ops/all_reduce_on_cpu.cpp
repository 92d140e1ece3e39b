// csrc/all_reduce's kernels and csrc/mhc/sum.cuh on the CPU: their own text, the threads of all ranks in turns that a seed draws
// (timed_turns_on_cpu.h), on memory that is worse than a bus.
//
// A store to memory of others, or to words of other blocks, is held back, torn into words, and carried out in any order with the thread's
// other ones, at the latest when the thread ends (a kernel's end) or looks for what has come. Each word that is stored or looked at may be
// where another thread's turn begins. Ranks run their calls one behind the other, each at its own speed: sums alone, in one hop and in two,
// boundaries with a sum in them, and gathers, in any order on the same places.
// The test that compiles this puts the texts of headers, without their includes, in place of the marked lines. What stands between the
// second one and the third is there once for each text of the kernels that is tried, the rest once.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "timed_turns_on_cpu.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

using cudaStream_t = void*;
struct uint4 { uint32_t x, y, z, w; };
struct uint2 { uint32_t x, y; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
#ifdef LIBRARY
constexpr bool kHasClock = true;  // other processes are waited for
constexpr int kBusyLooks = 4, kLookUs = 50;
#else
constexpr bool kHasClock = false;
constexpr int kBusyLooks = 64, kLookUs = 500;
#endif
turns::World world(kHasClock);
struct Pending { uint32_t* word; uint32_t value; };
struct Mine {  // of a thread of a kernel
  turns::Barrier& barrier;
  std::vector<Pending> pending = {};  // words on their way
  int in_vain = 0;                    // looks, in a row
};
inline Mine& mine() { return *static_cast<Mine*>(world.now().own); }
bool holds_back = true;

inline bool rolls(int of) { return world.dice() % of == 0; }
inline void carry_out(bool all) {
  auto& pending = mine().pending;
  std::shuffle(pending.begin(), pending.end(), world.dice);
  while (!pending.empty() && (all || rolls(2))) {
    *static_cast<volatile uint32_t*>(pending.back().word) = pending.back().value;  // other processes look too
    pending.pop_back();
    world.give_way();
  }
}
inline void __syncthreads() { mine().barrier.arrive_and_wait(); }
inline int __syncthreads_or(int value) {
  carry_out(true);  // who waits here does not look
  auto& barrier = mine().barrier;
  barrier.any |= value;
  __syncthreads();
  const int any = barrier.any;
  __syncthreads();
  return any;
}
inline void __nanosleep(unsigned ns) { world.sleep(ns); }
inline void __threadfence_system() { carry_out(true); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline uint32_t atomicAdd(uint32_t* p, uint32_t v) {
  world.give_way();
  return *p += v, *p - v;
}
inline uint32_t atomicCAS(uint32_t* p, uint32_t expected, uint32_t v) {
  world.give_way();
  const uint32_t found = *p;
  if (found == expected) *p = v;
  return found;
}

namespace dsv4 {
struct KernelAttributes {};
inline void pdl_wait() {}
inline void pdl_trigger() {}
struct GaveUp {};
inline void give_up() {
#ifdef LIBRARY
  std::fprintf(stderr, "gave up\n"), std::_Exit(3);
#else
  throw GaveUp();  // a row of a boundary; the text of all others returns
#endif
}
inline uint32_t load_relaxed(const uint32_t* p) {
  world.give_way();
  return *static_cast<const volatile uint32_t*>(p);
}
inline uint4 load_relaxed(const uint4* p) {
  carry_out(rolls(8));
  const uint32_t* const w = &p->x;
  const uint4 found = {load_relaxed(w), load_relaxed(w + 1), load_relaxed(w + 2), load_relaxed(w + 3)};
  const auto is_nothing = [](uint32_t word) { return word == 0 || word == ~0u; };
  const bool waits = is_nothing(found.x) || is_nothing(found.y) || is_nothing(found.z) || is_nothing(found.w);
  int& in_vain = mine().in_vain;
  in_vain = waits ? in_vain + 1 : 0;
  if (in_vain > kBusyLooks) world.sleep(1000 * kLookUs);  // it waits for long
  return found;
}
inline uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
inline float as_float(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline uint32_t as_bits(float f) { uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }
inline uint32_t __float_as_uint(float f) { return as_bits(f); }
inline float bf16_low(uint32_t pair) { return as_float(pair << 16); }
inline float bf16_high(uint32_t pair) { return as_float(pair & 0xffff0000u); }
inline uint32_t bf16(float f) {  // to nearest, ties to even, one NaN
  if (std::isnan(f)) return 0x7fff;
  const uint32_t bits = as_bits(f);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t pack_bf16x2(float low, float high) { return bf16(low) | bf16(high) << 16; }
inline float4 add(const float4& a, const float4& b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
inline uint4 load_from_l2(const uint16_t* p) { return *reinterpret_cast<const uint4*>(p); }
inline float4 load_from_l2(const float4* p) { return *p; }
inline void store_held_back(uint32_t* p, uint32_t v) {
  mine().pending.push_back({p, v});
  if (!holds_back || rolls(4)) carry_out(!holds_back);
}
inline void store_relaxed(uint4* p, const uint4& v) {
  uint32_t* const w = &p->x;
  store_held_back(w, v.x), store_held_back(w + 1, v.y), store_held_back(w + 2, v.z), store_held_back(w + 3, v.w);
}
namespace all_reduce {
inline uint64_t now_ns() { return world.now_ns(); }
inline void store_system(uint32_t* p, uint32_t v) { store_held_back(p, v); }
inline void store_system(uint4* p, const uint4& v) { store_relaxed(p, v); }
inline uint32_t load_system(const uint32_t* p) { return load_relaxed(p); }
inline uint4 load_system(const uint4* p) { return load_relaxed(p); }
}  // namespace all_reduce
}  // namespace dsv4

//@@ what is shared

namespace dsv4 {
struct Kernels {  // a text's, for so many ranks
  int ranks;
  bool host;
  void (*one_shot)(all_reduce::Params), (*two_shot)(all_reduce::Params), (*gather)(all_reduce::Params);
  void (*boundary)(const all_reduce::Params&, int block, uint32_t patience, uint4* sums, uint4* of_slices, uint4* of_rows, uint4* shared);
};
}  // namespace dsv4

//@@ the kernels

namespace dsv4 {
// A block of mhc's summing kernel, as far as it has to do with the sum: slices of tiles, as blocks of their own, and behind them rows.
// `of_slices`, `of_rows`: [rows, kRowSums], the sums as each has them.
template <int kRanks, bool kHost>
void boundary_block(const all_reduce::Params& p, int block, uint32_t patience, uint4* sums, uint4* of_slices, uint4* of_rows, uint4* shared) {
  using namespace dsv4::mhc;
  const int slices = SliceSum<kRanks, kHost>::parts_of(p.rows);
  if (block < slices) {
    const SliceSum<kRanks, kHost> slice(p, Term{}, block % kSlices, block / kSlices);
    slice.send();
    slice.add(shared, sums);
    carry_out(true);  // the barrier waits for other cards: no store takes as long
    __syncthreads();
    if (slice.mine.is_one) of_slices[slice.mine.row * kRowSums + slice.mine.vector] = shared[threadIdx.x];
    slice.end();
  } else {
    uint4 f[kThreadSums];
    take_sums(f, sums, block - slices, patience);
    for (int i = 0; i < kThreadSums; ++i) of_rows[(block - slices) * kRowSums + i * kFusedThreads + threadIdx.x] = f[i];
  }
}
template <int kRanks, bool kHost>
constexpr Kernels kKernels = {
    kRanks, kHost, &all_reduce::one_shot_kernel<kRanks, kHost>, &all_reduce::two_shot_kernel<kRanks, kHost>, &all_reduce::gather_kernel<kRanks, kHost>,
    &boundary_block<kRanks, kHost>};
}  // namespace dsv4

//@@ other texts

using namespace as_they_are::dsv4;
using namespace as_they_are::dsv4::all_reduce;
namespace boundary = as_they_are::dsv4::mhc;

// kernel() by each thread of a call, until all have ended; num_threads(block).
template <typename Threads>
void in_threads(int blocks, Threads num_threads, const std::function<void()>& kernel) {
  std::vector<std::unique_ptr<turns::Barrier>> barriers;
  std::vector<turns::Task*> waits;
  int running = 0;
  for (int b = 0; b < blocks; ++b) {
    barriers.emplace_back(new turns::Barrier{world, num_threads(b)});
    for (int t = 0; t < num_threads(b); ++t, ++running)
      world.begin(
          [&, b] {
            Mine mine{*barriers[b]};
            world.now().own = &mine;
            kernel();
            carry_out(true);
            if (--running == 0) world.wake(waits);
          },
          {unsigned(t)}, {unsigned(b)}, {unsigned(blocks)});
  }
  while (running > 0) world.wait(waits);
}

// Any bf16, and often what is hard: NaNs with all bits, zeros of both signs, infinities, and 2^24, of which the order of a sum can be told.
uint32_t a_word(turns::Dice& g) {
  static const uint32_t hard[] = {0xffffffffu, 0x80008000u, 0x0000ffffu, 0x7f80ff80u, 0xffff0000u, 0u, 0x7fff7fffu, 0x4b80cb80u, 0xcb804b80u};
  if (g() % 4 == 0) return hard[g() % 9];
  return bf16(static_cast<float>(static_cast<int>(g() % 2001) - 1000) / 64) | bf16(static_cast<float>(g() % 777) / 16) << 16;
}

enum Kind { kOneHop, kTwoHops, kGathering, kBoundary };
constexpr const char* kNames[] = {"one shot", "two shot", "gather", "boundary"};

// The word of a gather's result that rank `from` sent as word w of rows of row_vectors vectors.
int64_t gathered_word(int64_t w, int ranks, int from, int64_t row_vectors) {
  const int64_t row = w / (4 * row_vectors), column = w % (4 * row_vectors);
  return (row * ranks + from) * 4 * row_vectors + column;
}

// Calls of all ranks, and the verdict on them, by its first word: `wrong` bits; who `waits` for what never comes; who was `late` only, so
// that others were out of patience and nothing is known; `arrivals` and words of sums that are `left` behind. Or: so many calls, all right.
struct Run {
  struct Call { int64_t vectors; Kind kind; int blocks, row_vectors = 0; };
  using Words = std::vector<std::vector<std::vector<uint32_t>>>;  // of each call and rank
  const Kernels& kernels;
  const int calls, ranks = kernels.ranks;
  const bool host = kernels.host;
  uint64_t patience_ns;
  const Places sizes = {12 * ranks, 24 * ranks, ranks};
  std::vector<std::unique_ptr<uint4[]>> memory;
  std::vector<Call> order;
  Words x, out, rows_out;
  std::vector<std::vector<uint4>> sums;  // by which a rank's blocks find each other
  std::vector<State> states, before;     // before: a rank's last call
  std::vector<Fault> faults;
  std::vector<int> done;                    // calls of each rank
  std::vector<char> in_vain;  // a row of its waited for a sum

  Run(const Kernels& kernels, int calls, unsigned seed, uint64_t patience_ns)
      : kernels(kernels), calls(calls), patience_ns(patience_ns), x(calls), out(calls), rows_out(calls), sums(ranks), states(ranks), before(ranks),
        faults(ranks), done(ranks), in_vain(ranks) {
    const int64_t words = kGenerations * sizes.generation(host) * 4;
    for (int i = 0; i < (host ? 1 : ranks); ++i) {
      memory.emplace_back(new uint4[words / 4]);
      std::memset(memory.back().get(), 0xff, words * 4);
    }
    for (auto& s : sums) s.resize(sizes.one_shot_vectors);
    turns::Dice plan{seed};
    for (int i = 0; i < calls; ++i) order.push_back(a_call(plan));
    for (int i = 0; i < calls; ++i)
      for (int r = 0; r < ranks; ++r) {
        const int times = order[i].kind == kGathering ? ranks : 1;
        x[i].emplace_back(order[i].vectors * 4), out[i].emplace_back(times * order[i].vectors * 4), rows_out[i].emplace_back(order[i].vectors * 4);
        for (auto& w : x[i][r]) w = a_word(plan);
        if (order[i].kind == kBoundary) x[i][r][i % x[i][r].size()] = 0;  // a sum that is zero
      }
  }

  Call a_call(turns::Dice& plan) const {
    const Kind kind = static_cast<Kind>(plan() % 4);
    if (kind == kBoundary) {
      const int rows = 1 + plan() % (sizes.one_shot_vectors / boundary::kRowSums);
      return {rows * boundary::kRowSums, kind, boundary::SliceSum<2, true>::parts_of(rows) + rows};
    }
    if (kind == kGathering) {
      const int rows = 1 + plan() % 5, row_vectors = 1 + plan() % (sizes.slot(host) / rows);
      return {rows * row_vectors, kind, static_cast<int>(1 + plan() % 3), row_vectors};
    }
    const bool one_shot = kind == kOneHop;
    const int64_t vectors = one_shot ? 1 + plan() % sizes.one_shot_vectors : ranks * (1 + plan() % (sizes.two_shot_vectors / ranks));
    return {vectors, kind, static_cast<int>(1 + plan() % 3)};
  }

  Params params(int r, int i) {
    Params p = {};
    p.x = reinterpret_cast<const uint16_t*>(x[i][r].data()), p.out = reinterpret_cast<uint16_t*>(out[i][r].data());
    p.vectors = order[i].vectors, p.row_vectors = order[i].row_vectors;
    for (int to = 0; to < ranks; ++to) p.places[to] = memory[host ? 0 : to].get();
    p.state = &states[r], p.fault = &faults[r], p.sizes = sizes, p.rank = r, p.tag = i;
    p.rows = order[i].kind == kBoundary ? order[i].vectors / boundary::kRowSums : 1;
    p.patience_ns = patience_ns;
    return p;
  }

  // A thread of a call.
  void in_thread(const Params& p, int b, uint4* shared) {
    const int i = p.tag, r = p.rank;
    const auto vectors = [](std::vector<uint32_t>& words) { return reinterpret_cast<uint4*>(words.data()); };
    if (order[i].kind == kBoundary) {
      const uint32_t looks = kBusyLooks + patience_ns / (1000 * kLookUs);
      try {
        kernels.boundary(p, b, looks, sums[r].data(), vectors(out[i][r]), vectors(rows_out[i][r]), shared);
      } catch (const GaveUp&) {
        in_vain[r] = true;
      }
    } else if (order[i].kind == kGathering) {
      kernels.gather(p);
    } else {
      order[i].kind == kOneHop ? kernels.one_shot(p) : kernels.two_shot(p);
    }
    carry_out(true);
  }

  bool has_given_up(int r) const { return faults[r].told || in_vain[r]; }

  // Call i of rank r, until it is made or given up.
  void make(int r, int i) {
    before[r] = states[r];
    Params p = params(r, i);
    const bool in_place = order[i].kind <= kTwoHops && i % 3 == 0;
    std::vector<uint32_t> copy = x[i][r];
    if (in_place) p.x = p.out = reinterpret_cast<uint16_t*>(copy.data());
    const auto num_threads = [&](int b) {
      if (order[i].kind != kBoundary) return kThreads;
      return b < order[i].blocks - static_cast<int>(p.rows) ? boundary::kMixThreads : boundary::kFusedThreads;
    };
    std::vector<std::vector<uint4>> shared(order[i].blocks, std::vector<uint4>(boundary::kSliceVectors));
    in_threads(order[i].blocks, num_threads, [&] {
      if (rolls(16)) world.sleep(world.dice() % 300'000);
      in_thread(p, blockIdx.x, shared[blockIdx.x].data());
    });
    if (in_place) out[i][r] = copy;
  }

  // faulty_rank dies in the middle; slow_rank comes there when the others are long out of patience. -1: none.
  void make_all(int faulty_rank, int slow_rank) {
    for (int r = 0; r < ranks; ++r)
      world.begin([=, this] {
        for (int i = 0; i < calls; ++i) {
          if (i == calls / 2 && r == faulty_rank) return;
          if (i == calls / 2 && r == slow_rank) world.sleep(3 * patience_ns);
          if (rolls(4)) world.sleep(world.dice() % 3'000'000);  // the others are far ahead
          world.runs_on = 1u << 2 * (world.dice() % 3);
          make(r, i);
          if (has_given_up(r)) return;
          done[r] = i + 1;
        }
      });
    world.run();
  }

  // Who gave up call i makes it again, now that all that was sent has come: does anybody still wait?
  bool waits_again(int i) {
    patience_ns /= 4;
    for (int r = 0; r < ranks; ++r) {
      if (done[r] != i) continue;
      states[r] = before[r], faults[r] = {}, in_vain[r] = false;
      world.begin([=, this] { make(r, i); });
    }
    world.run();
    return std::any_of(done.begin(), done.end(), [&, r = 0](int made) mutable { return has_given_up(r++) && made == i; });
  }

  int told(int faulty_rank) const {
    int told = 0;
    for (int r = 0; r < ranks; ++r) told += r != faulty_rank && faults[r].told == 1 && faults[r].waited_for != static_cast<uint32_t>(r) &&
        faults[r].call == faults[r].tag && faults[r].call + 1 >= static_cast<uint32_t>(calls / 2);
    std::printf("told %d of %d\n", told, ranks - 1);
    return told == ranks - 1 ? 0 : 1;
  }

  bool differ(int i, int r, int64_t word, uint32_t found, uint32_t wanted) const {
    if (i >= done[r] || found == wanted) return false;
    std::printf("wrong: call %d (%s, %lld vectors) rank %d word %lld: %08x, wanted %08x\n", i, kNames[order[i].kind],
                static_cast<long long>(order[i].vectors), r, static_cast<long long>(word), found, wanted);
    return true;
  }

  bool is_wrong(int i, int64_t w) const {
    if (order[i].kind == kGathering) {
      for (int r = 0; r < ranks; ++r)
        for (int from = 0; from < ranks; ++from) {
          const int64_t at = gathered_word(w, ranks, from, order[i].row_vectors);
          const uint32_t sent = x[i][from][w];
          if (differ(i, r, at, out[i][r][at], sent == 0xffffffffu ? 0x7fff7fffu : sent)) return true;
        }
      return false;
    }
    uint32_t wanted = 0;
    for (int half = 0; half < 2; ++half) {
      float sum = as_float((x[i][0][w] >> 16 * half) << 16);
      for (int r = 1; r < ranks; ++r) sum += as_float((x[i][r][w] >> 16 * half) << 16);
      wanted |= bf16(sum) << 16 * half;
    }
    for (int r = 0; r < ranks; ++r)
      if (differ(i, r, w, out[i][r][w], wanted) || (order[i].kind == kBoundary && differ(i, r, w, rows_out[i][r][w], wanted))) return true;
    return false;
  }

  int verdict() {
    for (int i = 0; i < calls; ++i)
      for (int64_t w = 0; w < order[i].vectors * 4; ++w)
        if (is_wrong(i, w)) return 1;
    const int r = std::min_element(done.begin(), done.end()) - done.begin(), first = done[r];
    if (first < calls) {
      const char* const what = faults[r].told ? "a term" : "a row's sums";
      std::printf("%s: call %d (%s) rank %d for %s\n", waits_again(first) ? "waits" : "late", first, kNames[order[first].kind], r, what);
      return 1;
    }
    for (auto& s : states)
      if (s.arrivals != static_cast<uint32_t>(calls) * kArrivals) return std::printf("arrivals: %u\n", s.arrivals), 1;
    for (const auto& words : sums)
      for (const uint4& v : words)
        if (v.x || v.y || v.z || v.w) return std::printf("left: words that are not zero\n"), 1;
    std::printf("%d calls\n", calls);
    return 0;
  }
};

int run(const Kernels& kernels, int calls, unsigned seed, int faulty_rank, uint64_t patience_ns, int slow_rank) {
  Run all(kernels, calls, seed, patience_ns);
  all.make_all(faulty_rank, slow_rank);
  return faulty_rank >= 0 ? all.told(faulty_rank) : all.verdict();
}

const Kernels& kernels_for(int ranks, bool host) {
  static constexpr Kernels all[] = {kKernels<2, false>, kKernels<4, false>, kKernels<8, false>, kKernels<2, true>, kKernels<4, true>, kKernels<8, true>};
  for (const Kernels& one : all)
    if (one.ranks == ranks && one.host == host) return one;
  std::fprintf(stderr, "no kernels for %d ranks\n", ranks), std::_Exit(2);
}

// A pair: the first sends, the second answers, unless it is the faulty one.
int run_ping(int rounds, bool is_host, int faulty_rank) {
  constexpr int64_t kVectors = 2 * kPingThreads + 1;
  std::vector<uint4> memory(2 * (kVectors + 1), uint4{~0u, ~0u, ~0u, ~0u});
  uint4* const answers = &memory[is_host ? kVectors : kVectors + 1];  // where the first looks
  uint64_t took[2] = {0, 0};
  for (int r = 0; r < 2; ++r) {
    if (r == faulty_rank) continue;
    Ping p = {r == 0 ? memory.data() : answers, r == 0 ? answers : memory.data(), kVectors, static_cast<uint32_t>(rounds), 2, r == 0};
    p.patience_ns = faulty_rank >= 0 ? 300'000'000ull : 3'000'000'000ull, p.took_ns = &took[r];
    world.begin([=] { in_threads(1, [](int) { return kPingThreads; }, [&] { ping_kernel(p); }); });
  }
  world.run();
  const bool all_have_come = std::all_of(memory.begin(), memory.begin() + kVectors, [&](const uint4& v) { return v.x == static_cast<uint32_t>(rounds); });
  if (faulty_rank < 0) return std::printf("%d rounds\n", rounds), took[0] > 0 && took[1] > 0 && all_have_come ? 0 : 1;
  return std::printf("%d came\n", (took[0] > 0) + (took[1] > 0)), took[0] + took[1] == 0 ? 0 : 1;
}

#ifdef LIBRARY
// all_reduce_emulated.py: a call of this process's rank, in memory that processes share.
constexpr int kBlocks = 2;

void emulate_all(int blocks, int threads_each, const std::function<void()>& kernel) {
  world.begin([&] { in_threads(blocks, [&](int) { return threads_each; }, kernel); });
  world.run();
}

extern "C" int64_t emulated_bytes(int64_t one_shot_vectors, int64_t two_shot_vectors, int ranks, bool host) {
  return kGenerations * Places{one_shot_vectors, two_shot_vectors, ranks}.generation(host) * kVectorBytes;
}
extern "C" int64_t emulated_slot(int64_t one_shot_vectors, int64_t two_shot_vectors, int ranks, bool host) {
  return Places{one_shot_vectors, two_shot_vectors, ranks}.slot(host);
}
extern "C" int emulated_state_words() { return sizeof(State) / 4; }
extern "C" int emulated_fault_words() { return sizeof(Fault) / 4; }
extern "C" void emulated_all_reduce(const uint16_t* x, uint16_t* out, int64_t vectors, uint4* const* places, int ranks, State* state, Fault* fault, int rank,
                                    int64_t one_shot_vectors, int64_t two_shot_vectors, bool host, int algorithm, uint32_t tag, int rows, int row_vectors,
                                    double patience_s, bool traps) {
  holds_back = false;
  Params p = {x, out, vectors, static_cast<uint32_t>(row_vectors), {}, state, fault, {one_shot_vectors, two_shot_vectors, ranks}, rank, tag};
  p.rows = rows;
  std::copy(places, places + ranks, p.places);
  p.patience_ns = static_cast<uint64_t>(patience_s * 1e9), p.traps = traps;
  const Kernels& kernels = kernels_for(ranks, host);
  const auto kernel = std::array{kernels.one_shot, kernels.two_shot, kernels.gather}.at(algorithm);
  emulate_all(kBlocks, kThreads, [&] { kernel(p); });
}
extern "C" void emulated_ping(uint4* there, const uint4* here, int64_t vectors, int rounds, int warm_ups, bool sends, double patience_s, uint64_t* took_ns) {
  holds_back = false;
  const Ping p = {there, here, vectors, static_cast<uint32_t>(rounds), static_cast<uint32_t>(warm_ups), sends, static_cast<uint64_t>(patience_s * 1e9), took_ns};
  emulate_all(1, kPingThreads, [&] { ping_kernel(p); });
}

#else
int main(int argc, char** argv) {
  if (argc != 9) return 2;
  const int ranks = std::atoi(argv[1]), calls = std::atoi(argv[3]), faulty = std::atoi(argv[5]), slow = std::atoi(argv[7]), text = std::atoi(argv[8]);
  const bool host = std::string(argv[2]) == "host";
  const unsigned seed = std::atoi(argv[4]);
  const uint64_t patience = std::atoll(argv[6]) * 1'000'000;
  world.dice.state = seed;
  if (ranks == 1) return run_ping(calls, host, faulty);
  return run(text < 0 ? kernels_for(ranks, host) : kOthers[text], calls, seed, faulty, patience, slow);
}
#endif

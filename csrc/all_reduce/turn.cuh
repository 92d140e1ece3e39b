// What a kernel that sums or gathers between cards does: send, wipe what is old, and take what has come.
//
// A word that comes is its own flag. Places hold kNothing until a term is there; a term that happens to be kNothing (two NaNs with all
// bits set) is sent as two other NaNs, and the sum of a NaN is the one NaN that bf16 conversion makes. A gather's float32 with all bits set
// is a NaN, too, and so is the other word; every other word arrives as it is. So no fence and no flag crosses the bus, a store of 16 bytes
// may be torn into words of 4, and stores may come in any order.
//
// Why four generations. A place is wiped by who owns it: its reader (peer), or its writer (host memory, which several read). Call n wipes
// what call n - 2 left. A card is in call n only when it has all terms of call n - 1, so every card has finished call n - 2: nobody reads
// those places any more. They are written again in call n + 2, by a card that has the terms of call n + 1 of all cards, sent behind
// the wiping of call n. With three, host memory would be written in the call after it was wiped, and a reader might still find what was there.
//
// Which generation a call takes is read from memory, so a graph may be replayed: State::arrivals grows by kArrivals in every call, one of
// it from each part of the call (a block; of a boundary, a slice) and the rest from the first, and each part reads it before it adds. All
// cards make the same calls, by the same kernels, of the same sizes, in the same order; one call of a card runs at a time (they are in one
// stream, or ordered by events). Calls of different kernels may follow each other: what a call leaves is its turn, and in State::used how
// many vectors it sent and by which algorithm, so where they lie. Which value a vector has is between the threads of one kernel on all
// cards.
#pragma once

#include "../device/barriers.cuh"
#include "../device/memory.cuh"
#include "../device/numbers.cuh"
#include "all_reduce.h"
#include "system.cuh"

namespace dsv4::all_reduce {

constexpr int kArrivalsLog2 = 10;
constexpr uint32_t kArrivals = 1u << kArrivalsLog2;  // parts of a call, at most
constexpr uint32_t kNothing = 0xffffffffu, kOtherNaNs = 0x7fff7fffu;
constexpr int kLooksBetween = 1024;                  // looks at a place between two at the clock
constexpr uint64_t kTellingNs = 20'000'000;          // for the telling thread, before the others end the kernel

__device__ __forceinline__ uint4 nothing() { return make_uint4(kNothing, kNothing, kNothing, kNothing); }
__device__ __forceinline__ bool has_come(const uint4& v) { return v.x != kNothing && v.y != kNothing && v.z != kNothing && v.w != kNothing; }
__device__ __forceinline__ uint4 sendable(uint4 v) {
  v.x = v.x == kNothing ? kOtherNaNs : v.x;
  v.y = v.y == kNothing ? kOtherNaNs : v.y;
  v.z = v.z == kNothing ? kOtherNaNs : v.z;
  v.w = v.w == kNothing ? kOtherNaNs : v.w;
  return v;
}

// fp32 sums of 8 values
struct Sums {
  float v[8];

  __device__ __forceinline__ void start(const uint4& term) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[2 * i] = bf16_low(word_of(term, i)), v[2 * i + 1] = bf16_high(word_of(term, i));
  }
  __device__ __forceinline__ void add(const uint4& term) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[2 * i] += bf16_low(word_of(term, i)), v[2 * i + 1] += bf16_high(word_of(term, i));
  }
  __device__ __forceinline__ uint4 rounded() const {
    return make_uint4(pack_bf16x2(v[0], v[1]), pack_bf16x2(v[2], v[3]), pack_bf16x2(v[4], v[5]), pack_bf16x2(v[6], v[7]));
  }
};

// Where a call's words are, for this card.
template <int kRanks, bool kHost>
struct Turn {
  const Params& p;
  uint32_t call;
  int64_t base;  // first vector of this call's generation

  __device__ __forceinline__ explicit Turn(const Params& params) : p(params) {
    call = load_relaxed(&p.state->arrivals) >> kArrivalsLog2;
    base = call % kGenerations * p.sizes.generation(kHost);
  }

  // What `from` sends to all, in the memory of `reader`, which has `each` vectors for each rank.
  __device__ __forceinline__ uint4* from_rank(int reader, int from, int64_t vector, int64_t first, int64_t each) const {
    return p.places[reader] + first + from * each + vector;
  }
  // One hop: the term of `from`.
  __device__ __forceinline__ uint4* term(int reader, int from, int64_t vector, int64_t first) const {
    return from_rank(reader, from, vector, first, p.sizes.one_shot_vectors);
  }
  // Two hops: the term of `from` for its owner `reader`, and the sum. In host memory each writer has all owners' shares.
  __device__ __forceinline__ uint4* share(int reader, int from, int64_t vector, int64_t first) const {
    const int64_t of_writer = from * p.sizes.of_writer(kHost) + (kHost ? reader * p.sizes.share() : 0);
    return p.places[reader] + first + kRanks * p.sizes.one_shot_vectors + of_writer + vector;
  }
  __device__ __forceinline__ uint4* sum(int reader, int64_t vector, int64_t first) const {
    return p.places[reader] + first + p.sizes.first_sum(kHost) + vector;
  }

  // This card's vector to all others.
  __device__ __forceinline__ void send_to_all(int64_t vector, const uint4& v, int64_t each) const {
    if constexpr (kHost) {
      store_system(from_rank(p.rank, p.rank, vector, base, each), v);
    } else {
#pragma unroll
      for (int d = 1; d < kRanks; ++d) {
        const int to = (p.rank + d) % kRanks;
        store_system(from_rank(to, p.rank, vector, base, each), v);
      }
    }
  }
  // One hop: this card's term.
  __device__ __forceinline__ void send(int64_t vector, const uint4& v) const { send_to_all(vector, v, p.sizes.one_shot_vectors); }

  // By one thread of each of the call's parts, once all threads of the part have read the state.
  __device__ __forceinline__ void arrive(Algorithm algorithm, bool first, uint32_t parts) const {
    if (first) p.state->used[call % kGenerations] = static_cast<uint32_t>(p.vectors) * kAlgorithms + static_cast<uint32_t>(algorithm);
    atomicAdd(&p.state->arrivals, first ? kArrivals - (parts - 1) : 1u);
  }

  // What the call two before this one left in the places that this card wipes; this thread's share of it.
  __device__ __forceinline__ void wipe(uint32_t thread, uint32_t threads) const {
    const uint32_t old = (call + 2) % kGenerations, used = load_relaxed(&p.state->used[old]);
    const auto algorithm = static_cast<Algorithm>(used % kAlgorithms);
    const bool is_two_shot = algorithm == Algorithm::kTwoShot;
    const int64_t wiped = old * p.sizes.generation(kHost);
    const uint32_t sent = is_two_shot ? 0 : used / kAlgorithms;
    const int64_t each = algorithm == Algorithm::kOneShot ? p.sizes.one_shot_vectors : p.sizes.slot(kHost);
#pragma unroll 1
    for (uint32_t v = thread; v < sent; v += threads) {
      if constexpr (kHost) {
        store_system(from_rank(p.rank, p.rank, v, wiped, each), nothing());
      } else {
#pragma unroll 1
        for (int from = 0; from < kRanks; ++from)
          if (from != p.rank) store_system(from_rank(p.rank, from, v, wiped, each), nothing());
      }
    }
    const uint32_t owned = is_two_shot ? used / kAlgorithms / kRanks : 0;
#pragma unroll 1
    for (uint32_t v = thread; v < owned; v += threads) {
#pragma unroll 1
      for (int other = 0; other < kRanks; ++other) {
        if (other == p.rank) continue;
        if constexpr (kHost) {
          store_system(share(other, p.rank, v, wiped), nothing());
        } else {
          store_system(share(p.rank, other, v, wiped), nothing());
          store_system(sum(p.rank, other * owned + v, wiped), nothing());
        }
      }
      if constexpr (kHost) store_system(sum(p.rank, p.rank * owned + v, wiped), nothing());
    }
  }
};

// Out of patience, or told to stop. Returns only where the kernel shall leave.
__device__ __forceinline__ void give_up_on(const Params& p, int rank, uint32_t call) {
  if (atomicCAS(&p.state->claimed, 0u, 1u) == 0) {
    store_system(&p.fault->waited_for, rank);
    store_system(&p.fault->call, call);
    store_system(&p.fault->tag, p.tag);
    store_system(&p.fault->rows, p.rows);
    __threadfence_system();
    store_system(&p.fault->told, 1);
    __threadfence_system();
  } else if (p.traps) {
    for (const uint64_t start = now_ns(); now_ns() - start < kTellingNs;) __nanosleep(1000);
  }
  if (p.traps) give_up();
}

// Waits for a vector from each rank; false: given up. `place(rank)`: where it comes to; `own`: this card's.
template <int kRanks, bool kHost, typename Place>
__device__ __forceinline__ bool collect(const Turn<kRanks, kHost>& turn, uint4 (&terms)[kRanks], const uint4& own, const Place& place) {
  const Params& p = turn.p;
#pragma unroll
  for (int r = 0; r < kRanks; ++r) terms[r] = r == p.rank ? own : load_system(place(r));
  uint64_t start = 0;
#pragma unroll 1
  for (uint32_t looks = 1;; ++looks) {
    uint32_t missing = 0;  // a bit for each rank
#pragma unroll
    for (int r = 0; r < kRanks; ++r) missing |= has_come(terms[r]) ? 0 : 1u << r;
    if (missing == 0) return true;
    if (looks % kLooksBetween == 0) {
      const uint64_t now = now_ns();
      start = start == 0 ? now : start;
      if (now - start > p.patience_ns || load_system(&p.fault->stop) != 0) {
        give_up_on(p, __ffs(static_cast<int>(missing)) - 1, turn.call);
        return false;
      }
    }
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (missing >> r & 1) terms[r] = load_system(place(r));
  }
}

template <int kRanks>
__device__ __forceinline__ uint4 summed(const uint4 (&terms)[kRanks]) {
  Sums sums;
  sums.start(terms[0]);
#pragma unroll
  for (int r = 1; r < kRanks; ++r) sums.add(terms[r]);
  return sums.rounded();
}

}  // namespace dsv4::all_reduce

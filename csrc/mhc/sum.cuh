// Few rows, where f is a sum between cards (../all_reduce): a boundary that sends this card's term and adds what the others send.
//
// The threads that mix a slice of 16 rows send its 64 vectors of 8 values, one hop, wait for those of the others, and add: each vector
// crosses the bus once to each card, and is summed once on it. The blocks of the rows have the sums from them, by words that are their own
// flags as the partial sums' are: zero until a sum has come, and whoever has read it makes it zero again. What comes is the complement of
// the bits, and no sum is all bits set (turn.cuh). So a row's block waits for no other card, and a slice's threads wait for no block of
// this one. The sums are those of all_reduce's kernels, value by value, and so is what follows.
//
// In the places a tile's slices lie one behind the other, each with its rows' four vectors: 64 vectors, 1 KB, are sent together.
#pragma once

#include "../all_reduce/turn.cuh"
#include "config.h"
#include "term.cuh"

namespace dsv4::mhc {

constexpr int kRowVectors = kSliceColumns / kLaneColumns;    // of a slice
constexpr int kSliceVectors = kTileRows * kRowVectors;       // at most
constexpr int kRowSums = kFlashHidden / kLaneColumns;        // vectors of a row
constexpr int kThreadSums = kRowSums / kFusedThreads;        // of a thread of a row's block
constexpr int kSumVectorWords = kLaneColumns / 2;

__device__ __forceinline__ uint4 complement(const uint4& v) { return make_uint4(~v.x, ~v.y, ~v.z, ~v.w); }
__device__ __forceinline__ bool is_there(const uint4& v) { return v.x != 0 && v.y != 0 && v.z != 0 && v.w != 0; }

// Vector `vector` of a row's sums; `sums`: [rows, kRowSums], zero before and after a call.
__device__ __forceinline__ uint4* sum_of(uint4* sums, int64_t row, int vector) { return sums + row * kRowSums + vector; }

// A slice of a tile, by the kMixThreads threads that mix it: this thread's vector.
struct SliceVector {
  int64_t row, place;  // place: among the call's
  int32_t vector;      // of the row
  int32_t part;        // of the call's: a slice of a tile
  bool is_one;         // else this thread has none
  uint4 term;          // this card's

  // Behind the wait for the kernels in front.
  __device__ __forceinline__ SliceVector(const all_reduce::Params& p, const Term& of, int slice, int tile) {
    const int thread = threadIdx.x % kMixThreads, first_row = tile * kTileRows;
    const int left = static_cast<int>(p.rows) - first_row, rows = left < kTileRows ? left : kTileRows;
    row = first_row + thread / kRowVectors;
    place = static_cast<int64_t>(first_row) * kRowSums + slice * rows * kRowVectors + thread;
    vector = slice * kRowVectors + thread % kRowVectors;
    part = tile * kSlices + slice;
    is_one = thread < rows * kRowVectors;
    term = make_uint4(0, 0, 0, 0);
    if (is_one) term = load_term(p.x, of, row * kRowSums + vector, p.rows);
  }
};

template <int kRanks, bool kHost>
struct SliceSum {
  SliceVector mine;  // first: its load does not wait for the turn's
  all_reduce::Turn<kRanks, kHost> turn;

  __device__ __forceinline__ SliceSum(const all_reduce::Params& p, const Term& of, int slice, int tile) : mine(p, of, slice, tile), turn(p) {}

  __device__ __forceinline__ void send() const {
    if (mine.is_one) turn.send(mine.place, all_reduce::sendable(mine.term));
  }

  // Waits for the others' terms; the sum is for the row's block, too. Out of patience it is a wrong one, where the process goes on.
  __device__ __forceinline__ void add(uint4* here, uint4* sums) const {
    if (!mine.is_one) return;
    const all_reduce::Params& p = turn.p;
    uint4 terms[kRanks];
    const uint4 own = all_reduce::sendable(mine.term);
    all_reduce::collect(turn, terms, own, [&](int from) { return turn.term(p.rank, from, mine.place, turn.base); });
    const uint4 sum = all_reduce::summed(terms);
    store_relaxed(sum_of(sums, mine.row, mine.vector), complement(sum));
    here[threadIdx.x % kMixThreads] = sum;
  }

  // Once all threads of the slice have their sums; what follows in the block need not wait for it.
  __device__ __forceinline__ void end() const {
    const int thread = threadIdx.x % kMixThreads, parts = parts_of(static_cast<int>(turn.p.rows));
    if (thread == 0) turn.arrive(all_reduce::Algorithm::kOneShot, mine.part == 0, parts);
    turn.wipe(mine.part * kMixThreads + thread, parts * kMixThreads);
  }

  __host__ __device__ static constexpr int parts_of(int rows) { return (rows + kTileRows - 1) / kTileRows * kSlices; }
};

// A row's sums, by its block: each thread those at threadIdx.x, threadIdx.x + kFusedThreads ...; leaves zeros behind.
__device__ __forceinline__ void take_sums(uint4 (&f)[kThreadSums], uint4* sums, int64_t row, uint32_t patience) {
  uint4* from[kThreadSums];
#pragma unroll
  for (int i = 0; i < kThreadSums; ++i) {
    from[i] = sum_of(sums, row, threadIdx.x + i * kFusedThreads);
    f[i] = make_uint4(0, 0, 0, 0);
  }
  bool missing = true;
#pragma unroll 1
  for (uint32_t looks = 0; missing; ++looks) {
    if (looks == patience) give_up();
    missing = false;
#pragma unroll
    for (int i = 0; i < kThreadSums; ++i)
      if (!is_there(f[i])) f[i] = load_relaxed(from[i]);
#pragma unroll
    for (int i = 0; i < kThreadSums; ++i) missing = missing || !is_there(f[i]);
  }
#pragma unroll
  for (int i = 0; i < kThreadSums; ++i) {
    store_relaxed(from[i], make_uint4(0, 0, 0, 0));
    f[i] = complement(f[i]);
  }
}

}  // namespace dsv4::mhc

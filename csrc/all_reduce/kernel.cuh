// The sums alone, as kernels of their own.
#pragma once

#include "turn.cuh"

namespace dsv4::all_reduce {

constexpr int kThreads = 128;

template <int kRanks, bool kHost>
__device__ __forceinline__ void block_arrives(const Turn<kRanks, kHost>& turn, Algorithm algorithm) {
  __syncthreads();
  if (threadIdx.x == 0) turn.arrive(algorithm, blockIdx.x == 0, gridDim.x);
}

template <int kRanks, bool kHost>
__global__ void __launch_bounds__(kThreads) one_shot_kernel(const __grid_constant__ Params p) {
  const uint32_t thread = blockIdx.x * kThreads + threadIdx.x, threads = gridDim.x * kThreads, vectors = static_cast<uint32_t>(p.vectors);
  const uint4* const x = reinterpret_cast<const uint4*>(p.x);
  pdl_wait();
  pdl_trigger();
  const Turn<kRanks, kHost> turn(p);
#pragma unroll 1
  for (uint32_t v = thread; v < vectors; v += threads) turn.send(v, sendable(x[v]));
  block_arrives(turn, Algorithm::kOneShot);
  turn.wipe(thread, threads);
#pragma unroll 1
  for (uint32_t v = thread; v < vectors; v += threads) {
    uint4 terms[kRanks];
    if (!collect(turn, terms, sendable(x[v]), [&](int from) { return turn.term(p.rank, from, v, turn.base); })) return;
    reinterpret_cast<uint4*>(p.out)[v] = summed(terms);
  }
}

template <int kRanks, bool kHost>
__global__ void __launch_bounds__(kThreads) two_shot_kernel(const __grid_constant__ Params p) {
  const uint32_t thread = blockIdx.x * kThreads + threadIdx.x, threads = gridDim.x * kThreads, vectors = static_cast<uint32_t>(p.vectors);
  const uint32_t owned = vectors / kRanks;
  const uint4* const x = reinterpret_cast<const uint4*>(p.x);
  uint4* const out = reinterpret_cast<uint4*>(p.out);
  pdl_wait();
  pdl_trigger();
  const Turn<kRanks, kHost> turn(p);
#pragma unroll 1
  for (int d = 1; d < kRanks; ++d) {
    const int owner = (p.rank + d) % kRanks;
#pragma unroll 1
    for (uint32_t v = thread; v < owned; v += threads) store_system(turn.share(owner, p.rank, v, turn.base), sendable(x[owner * owned + v]));
  }
  block_arrives(turn, Algorithm::kTwoShot);
#pragma unroll 1
  for (uint32_t v = thread; v < owned; v += threads) {
    const uint32_t place = p.rank * owned + v;
    uint4 terms[kRanks];
    if (!collect(turn, terms, sendable(x[place]), [&](int from) { return turn.share(p.rank, from, v, turn.base); })) return;
    const uint4 sum = summed(terms);
    if constexpr (kHost) {
      store_system(turn.sum(p.rank, place, turn.base), sum);
    } else {
#pragma unroll
      for (int d = 1; d < kRanks; ++d) store_system(turn.sum((p.rank + d) % kRanks, place, turn.base), sum);
    }
    out[place] = sum;
  }
  turn.wipe(thread, threads);
#pragma unroll 1
  for (uint32_t v = thread; v < owned; v += threads) {
    uint4 sums[kRanks];
    if (!collect(turn, sums, make_uint4(0, 0, 0, 0), [&](int owner) { return turn.sum(p.rank, owner * owned + v, turn.base); })) return;
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (r != p.rank) out[r * owned + v] = sums[r];
  }
}

}  // namespace dsv4::all_reduce

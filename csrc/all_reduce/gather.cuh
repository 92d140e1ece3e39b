// The gather alone: what every card sends, side by side in each row.
#pragma once

#include "kernel.cuh"

namespace dsv4::all_reduce {

template <int kRanks, bool kHost>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ Params p) {
  const uint32_t thread = blockIdx.x * kThreads + threadIdx.x, threads = gridDim.x * kThreads, vectors = static_cast<uint32_t>(p.vectors);
  const uint4* const x = reinterpret_cast<const uint4*>(p.x);
  uint4* const out = reinterpret_cast<uint4*>(p.out);
  const int64_t slot = p.sizes.slot(kHost);
  // of vector v of rank `of`
  const auto place = [&](uint32_t v, int of) { return v + (static_cast<int64_t>(v / p.row_vectors) * (kRanks - 1) + of) * p.row_vectors; };
  pdl_wait();
  pdl_trigger();
  const Turn<kRanks, kHost> turn(p);
#pragma unroll 1
  for (uint32_t v = thread; v < vectors; v += threads) {
    const uint4 own = sendable(x[v]);  // the same NaNs on all cards
    turn.send_to_all(v, own, slot);
    out[place(v, p.rank)] = own;
  }
  block_arrives(turn, Algorithm::kGather);
  turn.wipe(thread, threads);
#pragma unroll 1
  for (uint32_t v = thread; v < vectors; v += threads) {
    uint4 sent[kRanks];
    if (!collect(turn, sent, make_uint4(0, 0, 0, 0), [&](int from) { return turn.from_rank(p.rank, from, v, turn.base, slot); })) return;
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (r != p.rank) out[place(v, r)] = sent[r];
  }
}

}  // namespace dsv4::all_reduce

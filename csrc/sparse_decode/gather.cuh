// The gathering warps.
#pragma once

#include "roles.cuh"
#include "work.cuh"

namespace dsv4::sparse_decode {

// A gathering warp: fills its rows of the stages with the leaves of this block. A lane finds the address of a candidate, eight copy it.
template <bool kTable>
struct Gatherer {
  const Params& p;
  const Work& w;
  SharedMemoryPlan& sm;
  const int first_row;
  const int32_t* table;  // of the row, with kTable

  __device__ __forceinline__ void fill(int leaf, int loaded, int stage) const {
    const int lane = threadIdx.x & 31, piece = lane & 7, i = leaf - w.first_leaf;
    const Cache& main = p.main;
    const Cache& extra = p.extra;
    const bool in_main = leaf < w.main_leaves;
    const auto [valid, page, entry] = locate<kTable>(p, w, loaded, leaf, first_row + lane % kGatherRows);
    const uint32_t page_size = in_main ? main.page_size.divisor : extra.page_size.divisor;
    const uint64_t start =
        reinterpret_cast<uint64_t>(in_main ? main.pages : extra.pages) + static_cast<uint64_t>(page) * (in_main ? main.page_bytes : extra.page_bytes);
    const uint64_t row = start + static_cast<uint64_t>(entry) * kDataBytes + (valid ? 0 : 1);  // bit 0: masked
    const uint32_t mask = __ballot_sync(0xffffffffu, valid);
    const Barrier full = sm.barriers.full(stage);
    if (lane == 0) sm.valid[i % kMasks][first_row / kGatherRows] = static_cast<uint16_t>(mask);
    cp_async_8_if(lane < kGatherRows, shared_address(&sm.stages[stage].scales[first_row + lane % kGatherRows][0]),
                  start + static_cast<uint64_t>(page_size) * kDataBytes + entry * kScaleBytes, valid);
    const uint32_t dst = shared_address(&sm.stages[stage].rows[first_row + (lane >> 3)][piece * 16]);
#pragma unroll
    for (int k = 0; k < kGatherRows / 4; ++k) {  // rows 4k .. 4k + 3
      const uint64_t from = __shfl_sync(0xffffffffu, row, 4 * k + (lane >> 3));
      const bool live = (from & 1) == 0;
      const uint64_t src = (from & ~uint64_t{1}) + piece * 16;
#pragma unroll
      for (int i = 0; i < 4; ++i) cp_async_16(dst + k * 4 * kRowPitch + i * 128, src + i * 128, live);
      cp_async_16_if(piece < 4, dst + k * 4 * kRowPitch + 512, src + 512, live);
    }
    full.arrive_copies();
    if (lane == 0) full.arrive();
  }

  // `loaded`: about the first leaf
  __device__ __forceinline__ void run(int loaded) const {
    const int lane_row = first_row + threadIdx.x % kGatherRows;
    int stage = 0;
    uint32_t phase = 1;
    for (int leaf = w.first_leaf; leaf < w.end_leaf; ++leaf) {
      const int current = loaded;
      if (leaf + 1 < w.end_leaf) loaded = load_candidate<kTable>(p, w, table, leaf + 1, lane_row);
      sm.barriers.free(stage).wait(phase);
      fill(leaf, current, stage);
      phase ^= stage == kStages - 1;
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
  }
};

}  // namespace dsv4::sparse_decode

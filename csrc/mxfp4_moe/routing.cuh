// Which pairs (row, slot) go to which expert, found by every block for itself: no sort, no kernel of its own.
#pragma once

#include "../device/memory.cuh"
#include "config.h"

namespace dsv4::mxfp4_moe {

// local expert of an id, -1: none
template <typename Ids>
__device__ __forceinline__ int expert_of_id(const Ids& p, int id) {
  if (id < 0) return -1;
  int local;
  if (p.expert_map != nullptr) {
    if (id >= p.map_size) return -1;
    local = p.expert_map[id];
  } else {
    local = id - p.first_expert;
  }
  return local >= 0 && local < p.experts ? local : -1;
}
// of a pair; kOlder: by load_older
template <bool kOlder, typename Ids>
__device__ __forceinline__ int local_expert(const Ids& p, int pair) {
  const int32_t* const id = p.topk_ids + (pair / p.topk) * p.ids_stride + pair % p.topk;
  return expert_of_id(p, kOlder ? load_older(id) : *id);
}

// Up to 32 pairs: one warp, one pair a lane.
template <bool kOlder, typename Routing>
__device__ void route_warp(const Params& p, int pairs, Routing& routing, int32_t* group_of) {
  constexpr int kRows = Routing::kRows;
  const int lane = threadIdx.x % 32;
  const int expert = lane < pairs ? local_expert<kOlder>(p, lane) : -1;
  const unsigned peers = __match_any_sync(0xffffffffu, expert), before = (1u << lane) - 1;
  const int rank = __popc(peers & before), count = __popc(peers);
  const bool first = expert >= 0 && rank % kRows == 0;
  const unsigned firsts = __ballot_sync(0xffffffffu, first);
  const int mine = __popc(firsts & before);
  if (first) {
    routing.expert[mine] = expert;
    routing.rows[mine] = min(kRows, count - rank);
    group_of[lane] = mine;
  }
  __syncwarp();
  if (expert >= 0) {
    const unsigned earlier = peers & firsts & (before | 1u << lane);  // the last of them leads this lane's group
    routing.pairs[group_of[31 - __clz(earlier)]][rank % kRows] = lane;
  }
  if (lane == 0) routing.num_groups = __popc(firsts);
}

// Any number of pairs: rank, scan, place. A pair's rank among its expert's is by its number, so that all blocks agree.
template <bool kOlder, int kThreads, typename Routing>
__device__ void route_block(const Params& p, int pairs, Routing& routing, int16_t* expert_of, uint16_t* rank_of, int32_t* counts, int32_t* scan) {
  constexpr int kRows = Routing::kRows, kExpertsPerThread = ceil_div(kMaxExperts, kThreads);
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  for (int e = tid; e < kMaxExperts; e += kThreads) counts[e] = 0;
  for (int pair = tid; pair < pairs; pair += kThreads) expert_of[pair] = local_expert<kOlder>(p, pair);
  __syncthreads();
  if (warp == 0) {
    for (int begin = 0; begin < pairs; begin += 32) {
      const int pair = begin + lane, expert = pair < pairs ? expert_of[pair] : -1;
      const unsigned peers = __match_any_sync(0xffffffffu, expert);
      const int before = __popc(peers & ((1u << lane) - 1));
      const int earlier = expert >= 0 ? counts[expert] : 0;
      __syncwarp();
      if (expert >= 0) {
        rank_of[pair] = earlier + before;
        if (before == 0) counts[expert] = earlier + __popc(peers);
      }
      __syncwarp();
    }
  }
  __syncthreads();
  int sum = 0;  // groups of this thread's experts, and 4096 times their cost
#pragma unroll
  for (int i = 0; i < kExpertsPerThread; ++i) {
    const int e = tid * kExpertsPerThread + i;
    if (e < kMaxExperts) {
      const int count = counts[e], whole = count / kRows, rest = count % kRows;
      sum += whole * (1 + 4096 * group_cost(kRows)) + (rest > 0 ? 1 + 4096 * group_cost(rest) : 0);
    }
  }
  int inclusive = sum;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, inclusive, d);
    if (lane >= d) inclusive += other;
  }
  if (lane == 31) scan[warp] = inclusive;
  __syncthreads();
  int before = inclusive - sum;
  for (int w = 0; w < warp; ++w) before += scan[w];
  int base = before % 4096, cost = before / 4096;
#pragma unroll
  for (int i = 0; i < kExpertsPerThread; ++i) {
    const int e = tid * kExpertsPerThread + i;
    if (e >= kMaxExperts) break;
    const int count = counts[e];
    counts[e] = base;
    for (int left = count; left > 0; left -= kRows, ++base) {
      const int rows = min(left, kRows);
      routing.expert[base] = e;
      routing.rows[base] = rows;
      routing.cost[base] = cost;
      cost += group_cost(rows);
    }
  }
  if (tid == kThreads - 1) {
    routing.num_groups = base;
    routing.cost[base] = cost;
  }
  __syncthreads();
  for (int pair = tid; pair < pairs; pair += kThreads) {
    if (expert_of[pair] >= 0) routing.pairs[counts[expert_of[pair]] + rank_of[pair] / kRows][rank_of[pair] % kRows] = pair;
  }
}

// down's runs before its wait
template <typename C>
__device__ __forceinline__ void route(const Params& p, typename C::Shared& s) {
  constexpr bool kOlder = !C::kGated;
  const int pairs = p.rows * p.topk;
  if constexpr (C::kPairs == kOneRowPairs) {
    if (threadIdx.x < 32) route_warp<kOlder>(p, pairs, s.routing, s.counts);
  } else {
    int16_t* const scratch = reinterpret_cast<int16_t*>(s.warps);  // before x is there
    static_assert(sizeof(s.warps) >= 4 * C::kPairs);
    route_block<kOlder, C::kThreads>(p, pairs, s.routing, scratch, reinterpret_cast<uint16_t*>(scratch + C::kPairs), s.counts, s.scan);
  }
  __syncthreads();
}

// Position in the list of units: a group and a tile of its expert's rows.
struct Unit {
  int group, tile;
};

// Where the share of a block begins, which is where that of the block before it ends: all cost the same.
template <typename Routing>
__device__ __forceinline__ Unit share_begin(const Routing& routing, int tiles, int block) {
  if constexpr (Routing::kPairs == kOneRowPairs) {
    const unsigned unit = static_cast<unsigned>(routing.num_groups * tiles) * block / gridDim.x;
    return {static_cast<int>(unit / tiles), static_cast<int>(unit % tiles)};
  } else {
    const int groups = routing.num_groups;
    const int share = static_cast<int>(static_cast<uint64_t>(routing.cost[groups]) * tiles * block / gridDim.x);
    int group = 0;  // the last that begins at `share` or before
    for (int width = 1 << (31 - __clz(groups | 1)); width > 0; width /= 2) {
      if (group + width < groups && routing.cost[group + width] * tiles <= share) group += width;
    }
    if (groups == 0) return {0, 0};
    const int cost = routing.cost[group + 1] - routing.cost[group], tile = (share - routing.cost[group] * tiles) / cost;
    return tile < tiles ? Unit{group, tile} : Unit{group + 1, 0};
  }
}

}  // namespace dsv4::mxfp4_moe

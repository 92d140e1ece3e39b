// A stable counting sort of the pairs by expert, in three kernels: count each chunk of pairs, add up over the chunks and cut
// tiles, place.
#include "../device/barriers.cuh"
#include "../launch_kernel.h"
#include "routing.cuh"
#include "tiles.h"

namespace dsv4::mxfp4_moe {

namespace {

constexpr char kName[] = "mxfp4_moe tiles";
constexpr int kWarps = 8, kWarpPairs = 128, kChunk = kWarps * kWarpPairs, kCutThreads = 512;
constexpr int kExpertsPerThread = kMaxTiledExperts / kCutThreads, kTogether = 16;  // chunks whose counts are loaded together

int chunks_of(int64_t pairs) { return static_cast<int>(ceil_div(pairs, kChunk)); }

// scratch: [chunks][experts] pairs of the chunk, then of all chunks before it; [experts] where an expert's pairs begin
__global__ void __launch_bounds__(32 * kWarps) count_kernel(const TilesParams p) {
  __shared__ int32_t counts[kMaxTiledExperts];
  for (int e = threadIdx.x; e < p.experts; e += 32 * kWarps) counts[e] = 0;
  __syncthreads();
  pdl_trigger();
  pdl_wait();
  const int pairs = p.rows * p.topk, first = blockIdx.x * kChunk;
  for (int pair = first + threadIdx.x; pair < min(pairs, first + kChunk); pair += 32 * kWarps) {
    const int expert = local_expert<false>(p, pair);
    p.pair_expert[pair] = expert;
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.experts; e += 32 * kWarps) p.scratch[static_cast<int64_t>(blockIdx.x) * p.experts + e] = counts[e];
}

// The sum of `value` over the threads before this one; `all`: over all of them.
__device__ __forceinline__ int2 sum_before(int2 value, int2* warps, int2& all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int2 inclusive = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int x = __shfl_up_sync(0xffffffffu, inclusive.x, d), y = __shfl_up_sync(0xffffffffu, inclusive.y, d);
    if (lane >= d) inclusive.x += x, inclusive.y += y;
  }
  if (lane == 31) warps[warp] = inclusive;
  __syncthreads();
  int2 before = {inclusive.x - value.x, inclusive.y - value.y};
  all = {0, 0};
  for (int w = 0; w < kCutThreads / 32; ++w) {
    if (w < warp) before.x += warps[w].x, before.y += warps[w].y;
    all.x += warps[w].x, all.y += warps[w].y;
  }
  return before;
}

__global__ void __launch_bounds__(kCutThreads) cut_kernel(const TilesParams p, int chunks) {
  __shared__ int2 warps[kCutThreads / 32];
  pdl_trigger();
  pdl_wait();
  if (threadIdx.x < p.num_taken) p.taken[threadIdx.x] = 0;
  const int first = threadIdx.x * kExpertsPerThread;
  int count[kExpertsPerThread] = {}, tiles[kExpertsPerThread];
#pragma unroll
  for (int i = 0; i < kExpertsPerThread; ++i) {
    const int e = first + i;
    if (e < p.experts) {
      int32_t* const column = p.scratch + e;
      for (int first_chunk = 0; first_chunk < chunks; first_chunk += kTogether) {
        int here[kTogether];
#pragma unroll
        for (int c = 0; c < kTogether; ++c) here[c] = first_chunk + c < chunks ? column[static_cast<int64_t>(first_chunk + c) * p.experts] : 0;
#pragma unroll
        for (int c = 0; c < kTogether; ++c) {
          if (first_chunk + c < chunks) column[static_cast<int64_t>(first_chunk + c) * p.experts] = count[i];
          count[i] += here[c];
        }
      }
    }
  }
  int2 mine = {0, 0}, all;
#pragma unroll
  for (int i = 0; i < kExpertsPerThread; ++i) {
    tiles[i] = ceil_div(count[i], p.tile_pairs);
    mine.x += count[i], mine.y += tiles[i];
  }
  const int2 before = sum_before(mine, warps, all);
  int begin = before.x, tile = before.y;
#pragma unroll
  for (int i = 0; i < kExpertsPerThread; ++i) {
    const int e = first + i;
    if (e >= p.experts) break;
    p.scratch[static_cast<int64_t>(chunks) * p.experts + e] = begin;
    const int end = begin + count[i], height = tiles[i] == 0 ? 0 : ceil_div(ceil_div(count[i], tiles[i]), 16) * 16;
    for (int t = 0; t < tiles[i]; ++t, ++tile) {
      p.expert[tile] = e;
      p.begin[tile] = begin + t * height;
      p.end[tile] = min(begin + (t + 1) * height, end);
    }
    begin = end;
  }
  for (int t = all.y + threadIdx.x; t < p.num_tiles; t += kCutThreads) p.expert[t] = -1, p.begin[t] = 0;  // tile_of reads both at once
}

__global__ void __launch_bounds__(32 * kWarps) place_kernel(const TilesParams p, int chunks) {
  extern __shared__ int32_t next[];  // [kWarps][experts] position of the warp's next pair of an expert
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t* const mine = next + warp * p.experts;
  for (int i = threadIdx.x; i < kWarps * p.experts; i += 32 * kWarps) next[i] = 0;
  __syncthreads();
  pdl_trigger();
  pdl_wait();
  const int pairs = p.rows * p.topk, first = blockIdx.x * kChunk + warp * kWarpPairs;
  int expert[kWarpPairs / 32];
#pragma unroll
  for (int i = 0; i < kWarpPairs / 32; ++i) {
    const int pair = first + i * 32 + lane;
    expert[i] = pair < pairs ? p.pair_expert[pair] : -1;
    if (expert[i] >= 0) atomicAdd(&mine[expert[i]], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.experts; e += 32 * kWarps) {
    int position = p.scratch[static_cast<int64_t>(chunks) * p.experts + e] + p.scratch[static_cast<int64_t>(blockIdx.x) * p.experts + e];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int here = next[w * p.experts + e];
      next[w * p.experts + e] = position;
      position += here;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarpPairs / 32; ++i) {
    const unsigned peers = __match_any_sync(0xffffffffu, expert[i]);
    const int before = __popc(peers & ((1u << lane) - 1));
    const int position = expert[i] >= 0 ? mine[expert[i]] : 0;
    __syncwarp();
    if (expert[i] >= 0) {
      p.pairs[position + before] = first + i * 32 + lane;
      if (before == 0) mine[expert[i]] = position + __popc(peers);
    }
    __syncwarp();
  }
}

}  // namespace

int64_t tiles_scratch_words(int64_t pairs, int experts) { return (chunks_of(pairs) + int64_t{1}) * experts; }

void launch_tiles(const TilesParams& params, bool pdl, cudaStream_t stream) {
  const Launcher launcher = {kName, pdl, stream};
  const int chunks = chunks_of(static_cast<int64_t>(params.rows) * params.topk);
  launcher(count_kernel, dim3(chunks), 32 * kWarps, 0, params);
  launcher(cut_kernel, dim3(1), kCutThreads, 0, params, chunks);
  launcher(place_kernel, dim3(chunks), 32 * kWarps, sizeof(int32_t) * kWarps * params.experts, params, chunks);
}

}  // namespace dsv4::mxfp4_moe

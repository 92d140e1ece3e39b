// The kernel for many rows where a rank has at most 32 heads: a block stacks neighbouring rows, 8 of 8 heads to 2 of 32, on the 64 lines of its
// products, and gathers and dequantises once what several of them want.
//
// A row's tiles are a matter of its own lists. The extra cache's are 32 candidates each, in order. In the main cache a run of falling slots that
// ends where its aligned 32 slots end, or with the list, is a tile of those 32 slots: windows of neighbouring tokens are shifted by one against
// each other, and so have the same tiles, with other candidates masked. All else is 32 candidates in order, too.
//
// One step after the other takes the last row that is not done with its cache, and with its tile all rows whose next tile agrees. The others'
// scores are masked, which adds nothing to their sums: a row's bits do not depend on the rows beside it. Rows that agree in nothing are done one
// after the other.
//
// A candidate that is not finite would reach, times a weight of zero, all rows of the block. It is zero in the tile, and NaN as the score of
// those that ask for it.
#pragma once

#include "prefill.cuh"

namespace dsv4::sparse_decode::prefill {

constexpr int kMaxStack = kHeads >> kMinStackedLog2;         // rows of a block
constexpr int kPlans = 2;                                    // of tiles: the one that is gathered and the next
constexpr int kGatherWarps = kGatherThreads / 32;
constexpr int kPlannedRows = kMaxStack / kGatherWarps;       // of a gathering warp
static_assert(kLeaf == 32 && kMaxStack == 8 && kPlannedRows == 2, "a lane plans a candidate, a warp two rows, two vectors hold all masks");

struct TilePlan {
  alignas(16) int32_t slots[kLeaf];       // of which those are valid that are in a mask
  alignas(16) uint32_t masks[kMaxStack];  // of each row, a bit a candidate
  int32_t advances[kMaxStack];            // candidates of its list that are done with this tile
  int32_t in_main;
};

struct StackedMemory : PrefillMemory {
  static constexpr bool kIsolates = true;

  TilePlan plans[kPlans];
  uint32_t masks[kMaxStack];  // of the tile that is multiplied
  int32_t ended;              // the stack that ends with it; negative: none
  alignas(4) uint8_t isolated[kTeams][kLeaf];  // whether a candidate of it is not finite; a team clears its own

  __device__ __forceinline__ void isolate(int candidate) {
#pragma unroll
    for (auto& of_team : isolated) of_team[candidate] = 1;
  }
  __device__ __forceinline__ void forgive(int team) {
    uint32_t* bytes = reinterpret_cast<uint32_t*>(isolated[team]) + (threadIdx.x & 3);
    bytes[0] = bytes[4] = 0;
  }
};
static_assert(sizeof(StackedMemory) <= kMaxSharedBytes);

// A value that is worked out at its use: what the compiler would move out of the loops is not worth registers in them.
__device__ __forceinline__ int here(int v) {
  asm volatile("" : "+r"(v));
  return v;
}

__device__ __forceinline__ int stacked_rows(const Params& p) { return kHeads >> p.stacked_log2; }
__device__ __forceinline__ bool has_rows(const Params& p, int stack) { return stack << (kHeadsLog2 - here(p.stacked_log2)) < p.rows; }

// The next tile of a row.
struct RowTile {
  bool aligned;   // 32 slots from a multiple of 32 on
  int slot;       // of the first candidate
  int count;      // of candidates
  uint32_t mask;  // of this tile
};

// `slot`: the list's next 32, one a lane, -1 where masked; `done` candidates of `length` come before them
__device__ __forceinline__ RowTile tile_of(int slot, int done, int length, bool in_main) {
  const int lane = threadIdx.x & 31, first = __shfl_sync(0xffffffffu, slot, 0), offset = first & 31;
  const uint32_t valid = __ballot_sync(0xffffffffu, slot >= 0);
  const uint32_t falling = __ballot_sync(0xffffffffu, slot >= 0 && lane <= offset && slot == first - lane);
  const int run = __clz(__brev(~falling));
  const bool fills = run == offset + 1 && (done == 0 || run == kLeaf);
  if (in_main && run > 0 && (fills || done + run == length)) return {true, first, run, (0xffffffffu >> (kLeaf - run)) << (offset + 1 - run)};
  return {false, first, kLeaf, valid};
}

// The gathering warps' view of the stack: lane i knows row i % kMaxStack.
template <bool kTable>
struct Stack {
  const Params& p;
  int stack;
  bool in_main;
  int done, length;  // of the row's candidates in the cache
  int extra_length;
  int lead_loaded, own_loaded[kPlannedRows];

  __device__ __forceinline__ uint32_t active() const { return __ballot_sync(0xffffffffu, done < length) & ((1u << stacked_rows(p)) - 1); }
  __device__ __forceinline__ int row_of(int index) const { return (stack << (kHeadsLog2 - p.stacked_log2)) + index; }
  __device__ __forceinline__ void start() {
    const int index = threadIdx.x % kMaxStack, row = row_of(index);
    const bool live = index < stacked_rows(p) && row < p.rows;
    in_main = true;
    done = 0;
    length = live ? load_length(p.main, row) : 0;
    extra_length = live ? load_length(p.extra, row) : 0;
    leave_main();
  }
  // to the extra cache when all rows are done with the main one
  __device__ __forceinline__ void leave_main() {
    if (!in_main || active() != 0) return;
    in_main = false;
    done = 0;
    length = extra_length;
  }
  // What the list says about a row's next candidates, one a lane; -1 after the last. The part of the list after the next is fetched ahead. A page
  // table is read again and again: there it is the slots.
  __device__ __forceinline__ int load_next(int index) const {
    const int position = __shfl_sync(0xffffffffu, done, index) + (threadIdx.x & 31), end = __shfl_sync(0xffffffffu, length, index);
    const int row = row_of(index);
    if (kTable && !in_main) {
      if (position >= end) return -1;
      const int32_t* table = table_of<true>(p.extra_table, row);
      if (table == nullptr) return -1;
      const uint32_t column = divide(position, p.extra.page_size);
      const int page = table[column];
      const bool valid = static_cast<uint32_t>(page) < static_cast<uint32_t>(p.extra_table.num_pages);
      return valid ? static_cast<int>((page - column) * p.extra.page_size.divisor + position) : -1;
    }
    const int32_t* at = (in_main ? p.main.indices + row * p.main.indices_stride : p.extra.indices + row * p.extra.indices_stride) + position;
    if (position + 2 * kLeaf < end) prefetch(at + 2 * kLeaf);
    return position < end ? *at : -1;
  }
  // the slots, -1 where masked
  __device__ __forceinline__ int slot_of(int loaded) const {
    return loaded < (in_main ? p.main.num_slots : p.extra.num_slots) ? max(loaded, -1) : -1;
  }
  __device__ __forceinline__ int lead() const {
    const uint32_t rows = active();
    return rows == 0 ? 0 : 31 - __clz(rows);
  }
  // Begins to plan the next tile: loads the candidates of the row that leads and of this warp's.
  __device__ __forceinline__ void load_tile() {
    lead_loaded = load_next(lead());
#pragma unroll
    for (int i = 0; i < kPlannedRows; ++i) own_loaded[i] = load_next(threadIdx.x / 32 % kGatherWarps + i * kGatherWarps);
  }
  // Plans it: the first warp its slots, each warp the masks of its rows.
  __device__ __forceinline__ void plan(TilePlan& to) const {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % kGatherWarps;
    const uint32_t rows = active();
    const int leader = lead(), lead_slot = slot_of(lead_loaded);
    const RowTile tile = tile_of(lead_slot, __shfl_sync(0xffffffffu, done, leader), __shfl_sync(0xffffffffu, length, leader), in_main);
    if (warp == 0) {
      to.slots[lane] = tile.aligned ? (tile.slot & ~31) + lane : lead_slot;
      if (lane == 0) to.in_main = in_main;
    }
#pragma unroll
    for (int i = 0; i < kPlannedRows; ++i) {
      const int index = warp + i * kGatherWarps, slot = slot_of(own_loaded[i]);
      const RowTile own = tile_of(slot, __shfl_sync(0xffffffffu, done, index), __shfl_sync(0xffffffffu, length, index), in_main);
      const bool same = __all_sync(0xffffffffu, slot < 0 || slot == lead_slot);
      const bool agrees = own.aligned == tile.aligned && (tile.aligned ? own.slot >> 5 == tile.slot >> 5 : same);
      const bool takes = (rows >> index & 1) && agrees;
      if (lane == 0) {
        to.masks[index] = takes ? own.mask : 0;
        to.advances[index] = takes ? own.count : 0;
      }
    }
  }
  __device__ __forceinline__ void advance(const TilePlan& plan) {
    done += plan.advances[threadIdx.x % kMaxStack];
    leave_main();
  }
};

__device__ __forceinline__ uint32_t any_row(const TilePlan& plan) {
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < kMaxStack; i += 4) {
    const uint4 v = *reinterpret_cast<const uint4*>(&plan.masks[i]);
    any |= v.x | v.y | v.z | v.w;
  }
  return any;
}

// The gathering warps: four lanes copy a candidate. A tile is planned while the one before it is multiplied.
template <bool kTable>
__device__ __forceinline__ void run_stacked_gathering(const Params& p, StackedMemory& sm) {
  Stack<kTable> stack = {p, static_cast<int>(blockIdx.x)};
  stack.start();
  stack.load_tile();
  stack.plan(sm.plans[0]);
  sync_threads<3, kGatherThreads>();  // the plan is there
  for (uint32_t tile = 0;; ++tile) {
    const TilePlan& plan = sm.plans[tile % kPlans];
    const int thread = thread_now() - kMathThreads, candidate = thread >> 2, piece = thread & 3;
    stack.advance(plan);
    const bool last = stack.active() == 0;
    if (last) stack.stack += gridDim.x;
    const bool more = has_rows(p, stack.stack);
    if (last && more) stack.start();
    if (!kTable && more) stack.load_tile();
    const uint32_t dst = shared_address(&sm.rows[candidate][piece * 16]);
    const Cache& c = plan.in_main ? p.main : p.extra;
    const bool valid = any_row(plan) >> candidate & 1;
    const uint32_t slot = valid ? plan.slots[candidate] : 0, page = divide(slot, c.page_size), entry = slot - page * c.page_size.divisor;
    const uint64_t start = reinterpret_cast<uint64_t>(c.pages) + static_cast<uint64_t>(page) * c.page_bytes;
    const uint64_t src = start + entry * kDataBytes + piece * 16;
    const uint64_t scales = start + static_cast<uint64_t>(c.page_size.divisor) * kDataBytes + entry * kScaleBytes;
#pragma unroll
    for (int i = 0; i < kDataBytes / 64; ++i) cp_async_16(dst + i * 64, src + i * 64, valid);
    cp_async_8_if(piece == 0, shared_address(&sm.scales[candidate][0]), scales, valid);
    sm.full->arrive_copies();
    if (kTable && more) stack.load_tile();  // quick: a table is read again and again
    if (more) stack.plan(sm.plans[(tile + 1) % kPlans]);
    __syncwarp();
    if (elect_one()) sm.full->arrive();
    sm.full->wait(tile & 1);
    tile_sync();  // the tile is free; the plan of the next one is there
    if (thread < kMaxStack) sm.masks[thread] = plan.masks[thread];
    if (thread == 0) sm.ended = last ? stack.stack - static_cast<int>(gridDim.x) : -1;
    dequantise<kGatherRows>(sm, kLeaf - kGatherRows * (kGatherThreads - thread / 32 * 32) / 32);
    tile_sync();  // the tile is there; the rows may be overwritten
    if (!more) return;
  }
}

// Row and head of a line of a stack's; the row is p.rows or the head p.heads, or more, where the line is empty.
struct Line {
  int row, head;

  __device__ __forceinline__ Line(int log2, int stack, int line)
      : row((stack << (kHeadsLog2 - log2)) + (line >> log2)), head(line & ((1 << log2) - 1)) {}
  __device__ __forceinline__ bool live(const Params& p) const { return row < p.rows && head < p.heads; }
};

// q of this warp's lines and dimensions
__device__ __forceinline__ void load_stacked_query(const Params& p, int stack, QueryTile (&q)[kGroups][kWarpTiles]) {
  const int now = thread_now(), team = now / kTeamThreads, dimension = (now >> 5 & (kTeamWarps - 1)) * kWarpTiles * kTileDim, g = now >> 2 & 7,
            j = now & 3;
  const int log2 = here(p.stacked_log2);
#pragma unroll
  for (int m = 0; m < kGroups; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Line line(log2, stack, (team * kGroups + m) * kBlockHeads + g + 8 * half);
      const bool live = line.live(p);
      const uint16_t* src = p.q + (live ? line.row * p.q_stride_row + line.head * p.q_stride_head : 0) + dimension;
      const uint32_t* at = reinterpret_cast<const uint32_t*>(src) + 2 * j;
#pragma unroll
      for (int tile = 0; tile < kWarpTiles; ++tile)
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
          for (int k = 0; k < 2; ++k) q[m][tile][s][half + 2 * k] = live ? at[tile * (kTileDim / 2) + 8 * s + k] : 0;
    }
}

// The statistics of a team's lines before the first tile, and what follows from them after the last; a thread a line.
__device__ __forceinline__ void clear_folds(StackedMemory& sm) {
  const int now = thread_now(), line = now % kTeamThreads;
  if (line < kTeamHeads) sm.teams[now / kTeamThreads].folds[line] = {kEmpty, 0.f};
}
__device__ __forceinline__ void finish_folds(const Params& p, StackedMemory& sm, int stack) {
  const int now = thread_now(), index = now % kTeamThreads;
  if (index >= kTeamHeads) return;
  TeamMemory& team = sm.teams[now / kTeamThreads];
  const Line line(here(p.stacked_log2), stack, now / kTeamThreads * kTeamHeads + index);
  const bool live = line.live(p);
  const Fold fold = team.folds[index];
  team.factors[index] = live ? output_factor(p, line.head, fold) : 0.f;
  if (live && p.lse != nullptr) p.lse[static_cast<int64_t>(line.row) * p.heads + line.head] = lse_of(fold);
}

// Normalises and writes this warp's dimensions of its lines.
__device__ __forceinline__ void store_stacked_output(const Params& p, const StackedMemory& sm, int stack,
                                                     const Accumulator (&acc)[kGroups][kWarpTiles]) {
  const int now = thread_now(), team = now / kTeamThreads, dimension = (now >> 5 & (kTeamWarps - 1)) * kWarpTiles * kTileDim, g = now >> 2 & 7,
            j = now & 3;
  const int log2 = here(p.stacked_log2);
#pragma unroll
  for (int m = 0; m < kGroups; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Line line(log2, stack, (team * kGroups + m) * kBlockHeads + g + 8 * half);
      if (!line.live(p)) continue;
      const float f = sm.teams[team].factors[m * kBlockHeads + g + 8 * half];
      store_line(p.out + line.row * p.out_stride_row + line.head * p.out_stride_head + dimension + 4 * j, f, half, acc[m]);
    }
}

__device__ __forceinline__ void run_stacked_mathematics(const Params& p, StackedMemory& sm) {
  TeamMemory& team = sm.teams[warp_team()];
  QueryTile q[kGroups][kWarpTiles];
  load_stacked_query(p, blockIdx.x, q);
  for (;;) {
    Accumulator acc[kGroups][kWarpTiles] = {};
    clear_folds(sm);
#pragma unroll 1
    do {
      tile_sync();  // the tile is free, and the next one gathered
      dequantise<kMathRows>(sm, here(threadIdx.x / 32) * kMathRows);
      tile_sync();  // the tile is there
      multiply_leaf(sm, team, q);
      team_sync();  // the scores are there
      const int thread = thread_now(), head = softmax_head(thread % kTeamThreads);
      const uint32_t valid = valid_of(sm.masks[(thread / kTeamThreads * kTeamHeads + head) >> p.stacked_log2]);
      const uint32_t isolated = valid_of_bytes(sm.isolated[thread / kTeamThreads]);
      weigh_leaf(team, head, valid, isolated, p.scale_log2);
      team_sync();  // the weights are there
      if (isolated != 0) sm.forgive(thread / kTeamThreads);
      accumulate_leaf(sm, team, acc);
    } while (sm.ended < 0);
    const int stack = sm.ended, next = stack + gridDim.x;
    team_sync();  // the last factors are used
    finish_folds(p, sm, stack);
    team_sync();  // the output factors are there
    store_stacked_output(p, sm, stack, acc);
    if (!has_rows(p, next)) return;
    load_stacked_query(p, next, q);
  }
}

template <bool kTable>
__global__ void __launch_bounds__(kThreads, 1) sparse_prefill_stacked_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto& sm = *reinterpret_cast<StackedMemory*>(shared);
  if (threadIdx.x == 0) {
    sm.full->init(kGatherThreads + kGatherThreads / 32);  // the copies, and the plans
    for (auto& of_team : sm.isolated)
      for (uint8_t& of_candidate : of_team) of_candidate = 0;
  }
  __syncthreads();  // the barrier is there
  pdl_wait();
  pdl_trigger();
  if (threadIdx.x >= kMathThreads) {
    set_registers<40, false>();
    run_stacked_gathering<kTable>(p, sm);
  } else {
    set_registers<232, true>();  // 40 + 2 x 232 = 3 x 168, of four warps each
    run_stacked_mathematics(p, sm);
  }
}

}  // namespace dsv4::sparse_decode::prefill

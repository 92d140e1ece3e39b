// The kernels for many tokens of a request in one step: verification, and short prompts. SGLang's plans are two: an entry for each
// group that ends, which says how many of its window's tokens the state holds, the others being rows of kv_score before its own;
// and a write for each token that the state is to hold. An entry reads the state as it was before the step, whatever is written.
//
// A launch for both, in which nobody waits for another block: a block, or a warp of the indexer's, has the i-th entry and the i-th
// write. A write to what an entry reads is not made by its own threads but by those of that entry, each where it has read before:
// both find out by the plans. No half of a token's slot is read by two requests of a step and written, so no other order is needed.
//
//   groups of 4      the first half of a token's slot is read by the entry of the group after, its second half by that of its own
//   groups of 128    an entry's eight blocks have their columns each, and of them a warp its 8 tokens
//
// Arithmetic, hints and the order of waits are kernel.cuh's, so are the bits: a token of the window is the same number from the
// state and from kv_score.
#pragma once

#include "kernel.cuh"

namespace dsv4::compressor {

constexpr int kWindow = 8;             // tokens that an entry of a group of 4 pools
constexpr int kLongEntryBlocks = 32;   // along the entries of groups of 128, at most: few of them end one
constexpr int kMostOfAStep = kLongThreads;  // entries, and writes

__device__ __forceinline__ uint4 no_plan() { return make_uint4(0xffffffffu, 0, 0, 0); }
__device__ __forceinline__ uint4 plan_of(const Params& p, int i) { return i < p.entries ? load_16_now(p.plan + i) : no_plan(); }
__device__ __forceinline__ uint2 write_of(const Params& p, int i) { return i < p.num_writes ? load_now(p.writes + i) : make_uint2(0xffffffffu, 0); }
// What is written here is not moved ahead of what was loaded before.
__device__ __forceinline__ void loads_before_stores() { asm volatile("" ::: "memory"); }

struct Write {
  int32_t row, slot;  // slot -1: nothing is to be written

  __device__ __forceinline__ static Write of(const Params& p, const uint2& plan) {
    const bool is_one = (plan.x < static_cast<uint32_t>(p.rows)) & within(static_cast<int32_t>(plan.y), p.state_slots);
    return {is_one ? static_cast<int32_t>(plan.x) : 0, is_one ? static_cast<int32_t>(plan.y) : -1};
  }
};

// What an entry reads, of its plan.
struct Window {
  int32_t row;                // of kv_score: the group's last token
  int32_t held;               // tokens of the window, its first ones, that are the state's
  int32_t page_before, page;  // of the state
  int32_t position;           // of the group's first token
  bool ends;                  // there is an entry, and all that it reads
  bool overlaps;              // there is a group before

  template <int kRatio>
  __device__ __forceinline__ static Window of(const Params& p, const uint4& plan) {
    constexpr int kTokens = kRatio == 4 ? kWindow : kRatio;
    const int64_t pages = p.state_slots / kRatio;
    const int32_t length = static_cast<int32_t>(min(plan.x, 0x7fffffffu));
    Window w;
    w.row = static_cast<int32_t>(plan.y & 0xffff);
    w.held = min(static_cast<int32_t>(plan.y >> 16), kTokens);
    w.page_before = static_cast<int32_t>(plan.z);
    w.page = static_cast<int32_t>(plan.w);
    w.position = length - kRatio;
    w.overlaps = (kRatio == 4) & (length > kRatio);
    const int first = (kRatio == 4) & !w.overlaps ? max(w.held, 4) : w.held;  // of the window, that is a row of kv_score
    w.ends = (plan.x != 0xffffffffu) & within(w.position, p.positions) & (w.row < p.rows) & (w.row - (kTokens - 1) + first >= 0) &
             ((w.held <= kTokens - kRatio) | within(w.page, pages)) & (!w.overlaps | (w.held == 0) | within(w.page_before, pages));
    return w;
  }

  // Whether it reads the slot's first half, as a token of the group before; its second half, or of a group of 128 all of it.
  template <int kRatio>
  __device__ __forceinline__ bool reads_as_before(int32_t slot) const {
    return ends & overlaps & (slot >= 0) & (slot / kRatio == page_before) & (slot % kRatio < held);
  }
  template <int kRatio>
  __device__ __forceinline__ bool reads_as_own(int32_t slot) const {
    return ends & (slot >= 0) & (slot / kRatio == page) & (slot % kRatio < held - (kRatio == 4 ? 4 : 0));
  }
};

// Of the threads that have an entry and a write of groups of 4: a block, or a warp.
template <bool kBlock>
__device__ __forceinline__ bool any(bool of_this) {
  if constexpr (kBlock) {
    return __syncthreads_or(of_this);
  } else {
    return __any_sync(0xffffffffu, of_this);
  }
}

// A window of 8 tokens at this thread's columns: visit(whether it is there, i, address) of each value, the score being kScore behind.
template <int kDim, typename Visit>
__device__ __forceinline__ void for_window(const Params& p, const Window& w, int column, const Visit& visit) {
  constexpr int kWidth = 4 * kDim;
  const float* const before = p.state + static_cast<int64_t>(w.page_before) * (4 * kWidth) + column;
  const float* const own = p.state + static_cast<int64_t>(w.page) * (4 * kWidth) + kDim + column;
  const float* const rows = p.kv_score + (w.row - (kWindow - 1)) * p.kv_score_stride + column;
#pragma unroll
  for (int i = 0; i < 4; ++i) visit(w.overlaps, i, i < w.held ? before + i * kWidth : rows + i * p.kv_score_stride);
#pragma unroll
  for (int i = 0; i < 4; ++i) visit(true, 4 + i, 4 + i < w.held ? own + i * kWidth : rows + (4 + i) * p.kv_score_stride + kDim);
}

template <int kDim, typename Vector>
__device__ __forceinline__ void load_window(const Params& p, const Window& w, int column, Group<kDim, Vector>& group) {
  for_window<kDim>(p, w, column, [&](bool reads, int i, const float* from) {
    group.value[i] = filled<Vector>(0.f);
    group.score[i] = filled<Vector>(-FLT_MAX);
    load_where(reads, group.value[i], from);
    load_where(reads, group.score[i], from + 2 * kDim);
  });
}

// Puts the halves of a row's token that are wanted into a slot, at this thread's columns.
template <int kDim, typename Vector>
__device__ __forceinline__ void put_halves(const Params& p, const Write& w, const Token<kDim, Vector>& token, int column, bool first, bool second) {
  float* const to = p.state + static_cast<int64_t>(w.slot) * (4 * kDim) + column;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i % 2 == 0 ? first : second) *reinterpret_cast<Vector*>(to + i * kDim) = token.given[i];
  }
}

// The i-th entry and the i-th write, with those writes that fall to this entry; finish(slot of the cache, window) stores an entry.
// `thread`: of the kThreads that have the two. What the others' are is asked for with the window; the write's own token, which
// can only be asked for behind its plan, is not waited for in front of the entry.
template <int kDim, typename Vector, bool kBlock, int kThreads, typename Finish>
__device__ __forceinline__ void take_step(const Params& p, int i, int thread, int column, const Finish& finish) {
  Group<kDim, Vector> group;
  const uint4 hint = i < p.entries ? load_relaxed(p.plan + i) : no_plan();
  Window w = Window::of<4>(p, hint);
  if (w.ends) {
    const bool asks = column % 32 == 0;
    for_window<kDim>(p, w, column, [&](bool reads, int at, const float* from) {
      const bool here = reads & asks & (at < w.held);  // the rows of kv_score are being written
      prefetch_where(here, from);
      prefetch_where(here, from + 2 * kDim);
    });
    group.load_constants(p, w.position, column);
  }
  pdl_wait();
  int64_t slot = -1;
  if (w.ends) {
    slot = load_now(p.out_loc + w.row);
    load_window<kDim, Vector>(p, w, column, group);
  }
  const uint4 plan = plan_of(p, i);
  uint4 others_plan = plan_of(p, thread);
  const uint2 own_write = write_of(p, i);
  uint2 others_write = write_of(p, thread);
  pdl_trigger();
  if (is_other(plan, hint)) {
    w = Window::of<4>(p, plan);
    if (w.ends) {
      slot = load_now(p.out_loc + w.row);
      load_window<kDim, Vector>(p, w, column, group);
      group.load_constants(p, w.position, column);
    }
  }
  const Write write = Write::of(p, own_write);
  Token<kDim, Vector> token;
  if (write.slot >= 0) token = Token<kDim, Vector>(p, write.row, column);
  bool first_read = false, second_read = false, is_hit = false;
  for (int k = thread;;) {
    const Window other = Window::of<4>(p, others_plan);
    first_read |= other.reads_as_before<4>(write.slot);
    second_read |= other.reads_as_own<4>(write.slot);
    const int32_t written = Write::of(p, others_write).slot;
    is_hit |= w.reads_as_before<4>(written) | w.reads_as_own<4>(written);
    if ((k += kThreads) >= max(p.entries, p.num_writes)) break;
    others_plan = plan_of(p, k);
    others_write = write_of(p, k);
  }
  if (any<kBlock>(first_read | second_read | is_hit)) {
    first_read = any<kBlock>(first_read);
    second_read = any<kBlock>(second_read);
    if (any<kBlock>(is_hit)) {
      loads_before_stores();
      for (int k = 0; k < p.num_writes; ++k) {
        const Write other = Write::of(p, write_of(p, k));
        const bool as_before = w.reads_as_before<4>(other.slot), as_own = w.reads_as_own<4>(other.slot);
        if (as_before | as_own) put_halves<kDim, Vector>(p, other, Token<kDim, Vector>(p, other.row, column), column, as_before, as_own);
      }
    }
  }
  if (w.ends & within(slot, p.cache_slots)) finish(slot, group);
  if (write.slot >= 0) put_halves<kDim, Vector>(p, write, token, column, !first_read, !second_read);
}

__global__ void __launch_bounds__(kEntryThreads) short_many_kernel(const __grid_constant__ Params p) {
  __shared__ float sums[8];
  take_step<kHeadDim, float2, true, kEntryThreads>(p, blockIdx.x, threadIdx.x, 2 * threadIdx.x,
                                                   [&](int64_t slot, const auto& group) { finish_short(p, slot, group, sums); });
}

template <bool kFp4>
__global__ void __launch_bounds__(kIndexThreads) index_many_kernel(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % 32, column = 4 * lane;
  take_step<kIndexDim, float4, false, 32>(p, blockIdx.x * kIndexRows + threadIdx.x / 32, lane, column,
                                          [&](int64_t slot, const auto& group) { finish_index<kFp4>(p, slot, group, lane, column); });
}

// A warp's write, at the columns of its block: 64 values and their scores.
__device__ __forceinline__ void write_long(const Params& p, int i) {
  constexpr int kWidth = 2 * kHeadDim;
  const int lane = threadIdx.x % 32;
  uint4 plan = plan_of(p, lane);
  const Write write = Write::of(p, write_of(p, i));
  if (write.slot < 0) return;
  const int column = lane / 16 * kHeadDim + blockIdx.x * kLongDim + lane % 16 * 4;
  const float4 given = load_floats<float4>(p.kv_score + write.row * p.kv_score_stride + column);
  bool is_read = false;
  for (int k = lane;;) {
    is_read |= Window::of<kLongGroup>(p, plan).reads_as_own<kLongGroup>(write.slot);
    if ((k += 32) >= p.entries) break;
    plan = plan_of(p, k);
  }
  if (__any_sync(0xffffffffu, is_read)) return;
  *reinterpret_cast<float4*>(p.state + static_cast<int64_t>(write.slot) * kWidth + column) = given;
}

// blocks (columns, of groups of entries, then of 16 writes each)
__global__ void __launch_bounds__(kLongThreads, 2) long_many_kernel(const __grid_constant__ Params p) {
  constexpr int kWidth = 2 * kHeadDim;
  __shared__ LongShared s;
  __shared__ int64_t slot;  // of the entry: no thread has registers for it
  const int entry_blocks = min(p.entries, kLongEntryBlocks), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = blockIdx.x * kLongDim + 2 * lane, first = 8 * warp;
  const bool has_entries = static_cast<int>(blockIdx.y) < entry_blocks;
  float2 value[8], score[8], ape[8];
  const auto state_of = [&](const Window& w) { return p.state + (static_cast<int64_t>(w.page) * kLongGroup + first) * kWidth + column; };
  if (has_entries & (p.entries <= kHintedRows)) {
    const Window hinted = Window::of<kLongGroup>(p, load_relaxed(p.plan + blockIdx.y));
    const float* const tokens = state_of(hinted);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool asks = hinted.ends & (lane % 16 == 0) & (first + i < hinted.held);
      prefetch_where(asks, tokens + i * kWidth);
      prefetch_where(asks, tokens + i * kWidth + kHeadDim);
    }
  }
  pdl_wait();
  pdl_trigger();
  if (!has_entries) {
    write_long(p, (blockIdx.y - entry_blocks) * kLongWarps + warp);
    return;
  }
  // of this block's entries, a lane looks at one
  const bool is_one = Window::of<kLongGroup>(p, plan_of(p, blockIdx.y + lane * kLongEntryBlocks)).ends;
  for (uint32_t left = __ballot_sync(0xffffffffu, is_one); left != 0; left &= left - 1) {
    const int entry = blockIdx.y + (__ffs(left) - 1) * kLongEntryBlocks;
    const Window w = Window::of<kLongGroup>(p, plan_of(p, entry));
#pragma unroll
    for (int i = 0; i < 8; ++i) ape[i] = load_floats<float2>(p.ape + (first + i) * kHeadDim + column);
    const float* const tokens = state_of(w);
    const float* const rows = p.kv_score + (w.row - (kLongGroup - 1) + first) * p.kv_score_stride + column;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float* const from = first + i < w.held ? tokens + i * kWidth : rows + i * p.kv_score_stride;
      value[i] = load_floats<float2>(from);
      score[i] = load_floats<float2>(from + kHeadDim);
    }
    const bool is_hit = w.reads_as_own<kLongGroup>(Write::of(p, write_of(p, threadIdx.x)).slot);
    if (threadIdx.x == 0) slot = load_now(p.out_loc + w.row);
    pool_long(s, value, score, ape);
    if (__syncthreads_or(is_hit)) {
      loads_before_stores();
      for (int k = 0; k < p.num_writes; ++k) {
        const Write write = Write::of(p, write_of(p, k));
        if (!w.reads_as_own<kLongGroup>(write.slot) || write.slot % kLongGroup / 8 != warp) continue;
        const float* const token = p.kv_score + write.row * p.kv_score_stride + column;
        float* const to = p.state + static_cast<int64_t>(write.slot) * kWidth + column;
        *reinterpret_cast<float2*>(to) = load_floats<float2>(token);
        *reinterpret_cast<float2*>(to + kHeadDim) = load_floats<float2>(token + kHeadDim);
      }
    }
    if (within(slot, p.cache_slots)) finish_long(p, s, entry, slot, w.position);
    __syncthreads();
  }
}

}  // namespace dsv4::compressor

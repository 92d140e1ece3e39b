// The kernels of decode. What a row is to do is in its plan and its cache slot: both are read after the end of the kernel before, for SGLang's
// HiSparse writes the slots there, and so are state and projection.
//
// The plan is read ahead of that end too, as a hint: it is seldom another then. By the hint, what a row that ends a group needs of
// weights and tables is loaded ahead of the end and its state asked into the L2, and the state is loaded right behind it, without
// a trip for the plan in front. What came so counts where the plan read behind the end is the hint to the bit; elsewhere it is
// loaded anew. Whatever a hint is, the addresses made of it lie within the tables and the state.
//
//   group of 4, 512 values      a block of 256 threads per row, two values a thread, all the way
//   group of 4, 128 values      a warp per row, four values a lane
//   group of 128, 512 values    8 blocks per row, 64 values each: 16 warps with 8 tokens each, merged in the order of the
//                               tokens; the last of the 8 to arrive norms and stores
//
// A token of a group of 4 has 2 x head_dim values and as many scores: the first half is for the group after its own, the
// second for its own. An entry pools 8 tokens: the first halves of the group before, the second halves of its own.
//
// A row whose plan points outside state, table or cache writes nothing there: padded rows, and -1.
#pragma once

#include "../device/barriers.cuh"
#include "arithmetic.cuh"

namespace dsv4::compressor {

constexpr int kIndexDim = 128;
constexpr int kEntryThreads = 256;              // two of the 512 values each
constexpr int kIndexRows = 4, kIndexThreads = 32 * kIndexRows;
constexpr int kLongGroup = 128, kLongWarps = 16, kLongThreads = 32 * kLongWarps;
constexpr int kLongDim = kHeadDim / kSplits;    // values of a block
constexpr int kHintedRows = 16;                 // groups of 128, at most: the loads of more rows are many at once anyway
constexpr int kRopeWarp = kNopeDim / 64;        // of the threads with two values each
static_assert(kLongDim == 64 && kLongGroup == 8 * kLongWarps && kEntryThreads * 2 == kHeadDim, "two values a lane");

// two or four neighbours
template <typename Vector>
__device__ __forceinline__ Vector load_floats(const float* p) {
  return load_now(reinterpret_cast<const Vector*>(p));
}

// A row's plan as it is ahead of pdl_wait, where it may be another step's: a hint. At the scope of the device, so that no L1 keeps it.
__device__ __forceinline__ uint4 hinted_plan(const Params& p, int row) { return load_relaxed(p.plan + row); }
__device__ __forceinline__ bool is_other(const uint4& a, const uint4& b) { return ((a.x ^ b.x) | (a.y ^ b.y) | (a.z ^ b.z) | (a.w ^ b.w)) != 0; }

__device__ __forceinline__ bool within(int64_t i, int64_t count) { return (i >= 0) & (i < count); }

// What a row is to do, of its plan.
struct Row {
  int32_t write;              // state slot of the token, or -1
  int32_t page_before, page;  // state pages of the group before and of its own
  int32_t position;           // of the group's first token
  bool ends;                  // a group, whose state pages and position there are
  bool overlaps;              // there is a group before

  template <int kRatio>
  __device__ __forceinline__ static Row of(const Params& p, const uint4& plan) {
    const int64_t pages = p.state_slots / kRatio;
    const int32_t length = static_cast<int32_t>(min(plan.x, 0x7fffffffu));
    Row r;
    r.write = within(static_cast<int32_t>(plan.y), p.state_slots) ? static_cast<int32_t>(plan.y) : -1;
    r.page_before = static_cast<int32_t>(plan.z);
    r.page = static_cast<int32_t>(plan.w);
    r.overlaps = (kRatio == 4) & (length > kRatio);
    r.position = length - kRatio;
    // without branches: in front of one, ptxas would let other loads wait for the plan
    r.ends = (plan.x % kRatio == 0) & within(r.position, p.positions) & within(r.page, pages) & (!r.overlaps | within(r.page_before, pages));
    return r;
  }

  // Whether the row's token is the state's token `i` of `of_page`.
  template <int kRatio>
  __device__ __forceinline__ bool is_token(int32_t of_page, int i) const {
    return (of_page == write / kRatio) & (i == write % kRatio);
  }
};

// Two values of the 512 a thread, 256 threads: norm, rotation of the last 64, quantisation, store.
__device__ __forceinline__ void store_entry(const Params& p, int64_t slot, float2 x, float2 weight, float2 by, float (&sums)[8]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float squares = sum_of_lanes(fmaf(x.y, x.y, x.x * x.x));
  if (lane == 0) sums[warp] = squares;
  sync_threads<1, kEntryThreads>();
  float sum = sums[lane % 8];
#pragma unroll
  for (int mask = 4; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
  const float factor = rsqrtf(fmaf(sum, 1.f / kHeadDim, p.eps));
  float a = x.x * factor * weight.x, b = x.y * factor * weight.y;

  const int64_t entry = slot & ((int64_t{1} << p.page_shift) - 1);
  uint8_t* const page = p.cache + (slot >> p.page_shift) * p.page_bytes;
  uint8_t* const data = page + entry * kDataBytes;
  if (warp == kRopeWarp) {
    rotate(a, b, by);
    reinterpret_cast<uint32_t*>(data + kNopeDim)[lane] = pack_bf16x2(a, b);
  } else {
    const uint32_t rounded = pack_bf16x2(a, b);
    a = bf16_low(rounded);
    b = bf16_high(rounded);
    const int exponent = exponent_up(fmaxf(kScaleFloor, max_of_lanes<32>(fmaxf(fabsf(a), fabsf(b)))) / kE4m3Max);
    const float scale = reciprocal_power(exponent);
    reinterpret_cast<uint16_t*>(data)[threadIdx.x] = pack_e4m3(a * scale, b * scale);
    if (lane == 0) (page + (static_cast<int64_t>(kDataBytes) << p.page_shift) + entry * kScaleBytes)[warp] = static_cast<uint8_t>(exponent);
  }
}

template <typename Vector>
__device__ __forceinline__ Vector filled(float v) {
  if constexpr (sizeof(Vector) == sizeof(float2)) {
    return make_float2(v, v);
  } else {
    return make_float4(v, v, v, v);
  }
}

// The projection of a token of a group of 4 at this thread's columns: values for the next group, for its own; scores likewise.
template <int kDim, typename Vector>
struct Token {
  Vector given[4];

  Token() = default;
  __device__ __forceinline__ Token(const Params& p, int row, int column) {
    const float* const from = p.kv_score + row * p.kv_score_stride + column;
#pragma unroll
    for (int i = 0; i < 4; ++i) given[i] = load_floats<Vector>(from + i * kDim);
  }
};

// What a row that ends a group of 4 needs besides its token, at this thread's columns.
template <int kDim, typename Vector>
struct Group {
  static constexpr int kRatio = 4, kWidth = 4 * kDim, kScore = 2 * kDim;
  static constexpr int kFirstTurned = kDim - kRopeDim;
  Vector ape[8], weight, by;
  Vector value[8], score[8];  // of the group before, and of its own; not of the token, which is not read back

  __device__ __forceinline__ void load_constants(const Params& p, int position, int column) {
#pragma unroll
    for (int i = 0; i < 8; ++i) ape[i] = load_floats<Vector>(p.ape + i * kDim + column);
    weight = load_floats<Vector>(p.norm_weight + column);
    if (column >= kFirstTurned) by = load_floats<Vector>(p.freqs + static_cast<int64_t>(position) * kRopeDim + column - kFirstTurned);
  }

  // visit(whether it is read, i, address) of each value, the score being kScore behind
  template <typename Visit>
  __device__ __forceinline__ static void for_state(const Params& p, const Row& r, int column, const Visit& visit) {
    const float* const before = p.state + static_cast<int64_t>(r.page_before) * (kRatio * kWidth) + column;
    const float* const own = p.state + static_cast<int64_t>(r.page) * (kRatio * kWidth) + kDim + column;
#pragma unroll
    for (int i = 0; i < kRatio; ++i) visit(r.overlaps & !r.is_token<kRatio>(r.page_before, i), i, before + i * kWidth);
#pragma unroll
    for (int i = 0; i < kRatio; ++i) visit(!r.is_token<kRatio>(r.page, i), kRatio + i, own + i * kWidth);
  }

  // into the L2: a thread of those whose columns share 128 bytes
  __device__ __forceinline__ static void fetch_state(const Params& p, const Row& r, int column) {
    const bool asks = column % 32 == 0;
    for_state(p, r, column, [&](bool reads, int, const float* from) {
      prefetch_where(reads & asks, from);
      prefetch_where(reads & asks, from + kScore);
    });
  }

  __device__ __forceinline__ void load_state(const Params& p, const Row& r, int column) {
    for_state(p, r, column, [&](bool reads, int i, const float* from) {
      value[i] = filled<Vector>(0.f);
      score[i] = filled<Vector>(-FLT_MAX);
      load_where(reads, value[i], from);
      load_where(reads, score[i], from + kScore);
    });
  }

  __device__ __forceinline__ void add_token(const Row& r, const Token<kDim, Vector>& token) {
#pragma unroll
    for (int i = 0; i < kRatio; ++i) {
      const bool is_before = r.overlaps & r.is_token<kRatio>(r.page_before, i), is_own = r.is_token<kRatio>(r.page, i);
      value[i] = is_before ? token.given[0] : value[i];
      score[i] = is_before ? token.given[2] : score[i];
      value[kRatio + i] = is_own ? token.given[1] : value[kRatio + i];
      score[kRatio + i] = is_own ? token.given[3] : score[kRatio + i];
    }
  }
};

template <int kDim, typename Vector>
__device__ __forceinline__ void store_token(const Params& p, const Row& r, const Token<kDim, Vector>& token, int column) {
  if (r.write < 0) return;
  float* const to = p.state + static_cast<int64_t>(r.write) * (4 * kDim) + column;
#pragma unroll
  for (int i = 0; i < 4; ++i) *reinterpret_cast<Vector*>(to + i * kDim) = token.given[i];
}

// Two of the 512 values a thread, of a group of 4 whose tokens are all here.
__device__ __forceinline__ void finish_short(const Params& p, int64_t slot, Group<kHeadDim, float2> group, float (&sums)[8]) {
  float values[2][8], scores[2][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[0][i] = group.value[i].x;
    values[1][i] = group.value[i].y;
    scores[0][i] = add_ftz(group.score[i].x, group.ape[i].x);
    scores[1][i] = add_ftz(group.score[i].y, group.ape[i].y);
  }
  const float2 x = make_float2(Partial::of(values[0], scores[0]).value(), Partial::of(values[1], scores[1]).value());
  store_entry(p, slot, x, group.weight, group.by, sums);
}

__global__ void __launch_bounds__(kEntryThreads) short_kernel(const __grid_constant__ Params p) {
  __shared__ float sums[8];
  const int row = blockIdx.x, column = 2 * threadIdx.x;
  Group<kHeadDim, float2> group;
  const uint4 hint = hinted_plan(p, row);
  Row r = Row::of<4>(p, hint);
  if (r.ends) {
    group.fetch_state(p, r, column);
    group.load_constants(p, r.position, column);
  }
  pdl_wait();
  const uint4 plan = load_16_now(p.plan + row);
  const int64_t slot = load_now(p.out_loc + row);
  const Token<kHeadDim, float2> token(p, row, column);
  pdl_trigger();  // behind the loads, which ptxas keeps together in front of it
  if (r.ends) group.load_state(p, r, column);
  if (is_other(plan, hint)) {
    r = Row::of<4>(p, plan);
    if (r.ends) {
      group.load_state(p, r, column);
      group.load_constants(p, r.position, column);
    }
  }
  store_token(p, r, token, column);
  if (!(r.ends & within(slot, p.cache_slots))) return;
  group.add_token(r, token);
  finish_short(p, slot, group, sums);
}

// Walsh-Hadamard of 128 values, four a lane, times 128^-0.5
__device__ __forceinline__ void hadamard(float (&x)[4], int lane) {
  const float s0 = x[0] + x[1], d0 = x[0] - x[1], s1 = x[2] + x[3], d1 = x[2] - x[3];
  x[0] = s0 + s1;
  x[1] = d0 + d1;
  x[2] = s0 - s1;
  x[3] = d0 - d1;
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, x[i], mask);
      x[i] = lane & mask ? other - x[i] : x[i] + other;
    }
  }
  const float scale = rsqrtf(static_cast<float>(kIndexDim));
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] *= scale;
}

template <bool kFp4>
__device__ __forceinline__ void store_index_entry(const Params& p, int64_t slot, float (&x)[4], int lane) {
  constexpr int kBytes = kFp4 ? kIndexDim / 2 : kIndexDim;
  const int64_t entry = slot & ((int64_t{1} << p.page_shift) - 1);
  uint8_t* const page = p.cache + (slot >> p.page_shift) * p.page_bytes;
  uint8_t* const scales = page + (static_cast<int64_t>(kBytes) << p.page_shift) + entry * 4;
  float most = fmaxf(fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fabsf(x[2])), fabsf(x[3]));
  if constexpr (kFp4) {
    const int exponent = exponent_up(fmaxf(kScaleFloor, max_of_lanes<8>(most)) / kE2m1Max);
    const float scale = reciprocal_power(exponent);
    const uint32_t packed = e2m1(x[0] * scale) | e2m1(x[1] * scale) << 4 | e2m1(x[2] * scale) << 8 | e2m1(x[3] * scale) << 12;
    reinterpret_cast<uint16_t*>(page + entry * kBytes)[lane] = static_cast<uint16_t>(packed);
    if (lane % 8 == 0) scales[lane / 8] = static_cast<uint8_t>(exponent);
  } else {
    const float scale = fmaxf(kScaleFloor, max_of_lanes<32>(most)) / kE4m3Max, inverse = 1.f / scale;
    const uint32_t low = pack_e4m3(x[0] * inverse, x[1] * inverse), high = pack_e4m3(x[2] * inverse, x[3] * inverse);
    reinterpret_cast<uint32_t*>(page + entry * kBytes)[lane] = low | high << 16;
    if (lane == 0) *reinterpret_cast<float*>(scales) = scale;
  }
}

// The same of four of 128 values a lane.
template <bool kFp4>
__device__ __forceinline__ void finish_index(const Params& p, int64_t slot, Group<kIndexDim, float4> group, int lane, int column) {
  const auto part = [](float4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; };
  float x[4];
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    float values[8], scores[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = part(group.value[i], d);
      scores[i] = add_ftz(part(group.score[i], d), part(group.ape[i], d));
    }
    x[d] = Partial::of(values, scores).value();
  }
  float squares = x[0] * x[0];
#pragma unroll
  for (int d = 1; d < 4; ++d) squares = fmaf(x[d], x[d], squares);
  const float factor = rsqrtf(fmaf(sum_of_lanes(squares), 1.f / kIndexDim, p.eps));
#pragma unroll
  for (int d = 0; d < 4; ++d) x[d] = x[d] * factor * part(group.weight, d);
  if (column >= kIndexDim - kRopeDim) {
    rotate(x[0], x[1], make_float2(group.by.x, group.by.y));
    rotate(x[2], x[3], make_float2(group.by.z, group.by.w));
  }
  hadamard(x, lane);
  store_index_entry<kFp4>(p, slot, x, lane);
}

template <bool kFp4>
__global__ void __launch_bounds__(kIndexThreads) index_kernel(const __grid_constant__ Params p) {
  const int row = blockIdx.x * kIndexRows + threadIdx.x / 32, lane = threadIdx.x % 32, column = 4 * lane;
  Group<kIndexDim, float4> group;
  const uint4 hint = hinted_plan(p, min(row, p.rows - 1));
  Row r = Row::of<4>(p, hint);
  if (r.ends) {
    group.fetch_state(p, r, column);
    group.load_constants(p, r.position, column);
  }
  pdl_wait();
  if (row >= p.rows) return;
  const uint4 plan = load_16_now(p.plan + row);
  const int64_t slot = load_now(p.out_loc + row);
  const Token<kIndexDim, float4> token(p, row, column);
  pdl_trigger();  // behind the loads, which ptxas keeps together in front of it
  if (r.ends) group.load_state(p, r, column);
  if (is_other(plan, hint)) {
    r = Row::of<4>(p, plan);
    if (r.ends) {
      group.load_state(p, r, column);
      group.load_constants(p, r.position, column);
    }
  }
  store_token(p, r, token, column);
  if (!(r.ends & within(slot, p.cache_slots))) return;
  group.add_token(r, token);
  finish_index<kFp4>(p, slot, group, lane, column);
}

struct LongShared {
  float2 most[kLongWarps][32], sum[kLongWarps][32], product[kLongWarps][32];
  float sums[8];
  bool is_last;
};

// The warps' parts of this thread's value, in the order of their tokens.
__device__ __forceinline__ Partial merged(const LongShared& s) {
  const auto of = [](const float2(*a)[32], int w) { return reinterpret_cast<const float*>(a[w])[threadIdx.x]; };
  float most = of(s.most, 0);
#pragma unroll
  for (int w = 1; w < kLongWarps; ++w) most = fmaxf(most, of(s.most, w));
  Partial all = {most, 0.f, 0.f};
#pragma unroll
  for (int w = 0; w < kLongWarps; ++w) {
    const float power = exp_of_difference(of(s.most, w), most);
    all.sum = fma_ftz(of(s.sum, w), power, all.sum);
    all.product = fma_ftz(of(s.product, w), power, all.product);
  }
  return all;
}

// A warp's 8 tokens of a group of 128 at this block's columns.
__device__ __forceinline__ void pool_long(LongShared& s, const float2 (&value)[8], const float2 (&score)[8], const float2 (&ape)[8]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float values[2][8], scores[2][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[0][i] = value[i].x;
    values[1][i] = value[i].y;
    scores[0][i] = add_ftz(score[i].x, ape[i].x);
    scores[1][i] = add_ftz(score[i].y, ape[i].y);
  }
  const Partial one = Partial::of(values[0], scores[0]), other = Partial::of(values[1], scores[1]);
  s.most[warp][lane] = make_float2(one.most, other.most);
  s.sum[warp][lane] = make_float2(one.sum, other.sum);
  s.product[warp][lane] = make_float2(one.product, other.product);
}

// The warps' parts together, and by the last of the row's blocks norm and store.
__device__ __forceinline__ void finish_long(const Params& p, LongShared& s, int row, int64_t slot, int position) {
  __syncthreads();
  float* const pooled = p.pooled + static_cast<int64_t>(row) * kHeadDim;
  if (threadIdx.x < kLongDim) pooled[blockIdx.x * kLongDim + threadIdx.x] = merged(s).value();
  __syncthreads();
  if (threadIdx.x == 0) s.is_last = add_acq_rel(p.arrived + row, 1) == kSplits - 1;
  __syncthreads();
  if (!s.is_last || threadIdx.x >= kEntryThreads) return;
  if (threadIdx.x == 0) p.arrived[row] = 0;
  const int pair = 2 * threadIdx.x;
  const float2 by =
      pair >= kNopeDim ? load_floats<float2>(p.freqs + static_cast<int64_t>(position) * kRopeDim + pair - kNopeDim) : make_float2(1.f, 0.f);
  store_entry(p, slot, __ldcg(reinterpret_cast<const float2*>(pooled + pair)), load_floats<float2>(p.norm_weight + pair), by, s.sums);
}

__global__ void __launch_bounds__(kLongThreads, 2) long_kernel(const __grid_constant__ Params p) {
  constexpr int kWidth = 2 * kHeadDim;
  __shared__ LongShared s;
  const int row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = blockIdx.x * kLongDim + 2 * lane, first = 8 * warp;
  float2 value[8], score[8], ape[8];
  const auto state_of = [&](const Row& r) { return p.state + (static_cast<int64_t>(r.page) * kLongGroup + first) * kWidth + column; };
  const auto load_ape = [&] {
#pragma unroll
    for (int i = 0; i < 8; ++i) ape[i] = load_floats<float2>(p.ape + (first + i) * kHeadDim + column);
  };
  bool has_ape = false;
  if (gridDim.y <= kHintedRows) {
    const Row hinted = Row::of<kLongGroup>(p, hinted_plan(p, row));
    has_ape = hinted.ends;
    if (has_ape) {
      const float* const tokens = state_of(hinted);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        prefetch_where(lane % 16 == 0, tokens + i * kWidth);
        prefetch_where(lane % 16 == 0, tokens + i * kWidth + kHeadDim);
      }
      load_ape();
    }
  }
  pdl_wait();
  pdl_trigger();  // behind the loads it takes 0.2 us longer where no row ends a group
  const uint4 plan = load_16_now(p.plan + row);
  const int64_t slot = load_now(p.out_loc + row);
  const float* const token = p.kv_score + row * p.kv_score_stride + column;
  const float2 given_value = load_floats<float2>(token), given_score = load_floats<float2>(token + kHeadDim);
  const Row r = Row::of<kLongGroup>(p, plan);
  const bool ends = r.ends & within(slot, p.cache_slots);
  if (ends) {
    if (!has_ape) load_ape();
    const float* const tokens = state_of(r);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool is_token = r.is_token<kLongGroup>(r.page, first + i);
      value[i] = is_token ? given_value : *reinterpret_cast<const float2*>(tokens + i * kWidth);
      score[i] = is_token ? given_score : *reinterpret_cast<const float2*>(tokens + i * kWidth + kHeadDim);
    }
  }
  if (warp == kLongWarps - 1 && r.write >= 0) {
    float* const to = p.state + static_cast<int64_t>(r.write) * kWidth + column;
    *reinterpret_cast<float2*>(to) = given_value;
    *reinterpret_cast<float2*>(to + kHeadDim) = given_score;
  }
  if (!ends) return;
  pool_long(s, value, score, ape);
  finish_long(p, s, row, slot, r.position);
}

}  // namespace dsv4::compressor

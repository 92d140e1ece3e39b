// The kernels. What a row is to do is in its plan and its cache slot: both are read after the end of the kernel before, for SGLang's
// HiSparse writes the slots there, and so are state and projection. Of what never changes, that is asked for ahead of it which is the
// same for all rows.
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

#include "arithmetic.cuh"

namespace dsv4::compressor {

constexpr int kIndexDim = 128;
constexpr int kEntryThreads = 256;              // two of the 512 values each
constexpr int kIndexRows = 4, kIndexThreads = 32 * kIndexRows;
constexpr int kLongGroup = 128, kLongWarps = 16, kLongThreads = 32 * kLongWarps;
constexpr int kLongDim = kHeadDim / kSplits;    // values of a block
constexpr int kRopeWarp = kNopeDim / 64;        // of the threads with two values each
static_assert(kLongDim == 64 && kLongGroup == 8 * kLongWarps && kEntryThreads * 2 == kHeadDim, "two values a lane");

// Loads where they stand in the code, in this order. Plain: what is known not to change (.nc), ptxas moves behind the wait, and what
// kernels in front write is not such.
__device__ __forceinline__ float2 load_now(const float2* p) {
  float2 v;
  asm volatile("ld.global.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ float4 load_now(const float4* p) {
  float4 v;
  asm volatile("ld.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ uint4 load_now(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ int64_t load_now(const int64_t* p) {
  int64_t v;
  asm volatile("ld.global.s64 %0, [%1];" : "=l"(v) : "l"(p));
  return v;
}
// two or four neighbours
template <typename Vector>
__device__ __forceinline__ Vector load_floats(const float* p) {
  return load_now(reinterpret_cast<const Vector*>(p));
}

// A row's plan and cache slot as they are in memory, after pdl_wait.
struct StoredRow {
  uint4 plan;
  int64_t slot;

  __device__ __forceinline__ StoredRow(const Params& p, int row) : plan(load_now(p.plan + row)), slot(load_now(p.out_loc + row)) {}
};

// What a row is to do.
struct Row {
  int64_t slot;               // cache slot of the entry, or -1: the row ends no group
  int32_t write;              // state slot of the token, or -1
  int32_t page_before, page;  // state pages of the group before and of its own
  int32_t position;           // of the group's first token
  bool overlaps;              // there is a group before

  template <int kRatio>
  __device__ __forceinline__ static Row of(const Params& p, const StoredRow& stored) {
    const uint4 plan = stored.plan;
    const int64_t slot = stored.slot;
    const auto within = [](int64_t i, int64_t count) { return (i >= 0) & (i < count); };
    const int64_t pages = p.state_slots / kRatio;
    const int32_t length = static_cast<int32_t>(min(plan.x, 0x7fffffffu));
    Row r;
    r.write = within(static_cast<int32_t>(plan.y), p.state_slots) ? static_cast<int32_t>(plan.y) : -1;
    r.page_before = static_cast<int32_t>(plan.z);
    r.page = static_cast<int32_t>(plan.w);
    r.overlaps = (kRatio == 4) & (length > kRatio);
    r.position = length - kRatio;
    // without branches: in front of one, ptxas would let the slot and the token wait for the plan
    const bool ends = (plan.x % kRatio == 0) & within(r.position, p.positions) & within(r.page, pages) &
                      (!r.overlaps | within(r.page_before, pages)) & within(slot, p.cache_slots);
    r.slot = ends ? slot : -1;
    return r;
  }
};

// Two values of the 512 a thread, 256 threads: norm, rotation of the last 64, quantisation, store.
__device__ __forceinline__ void store_entry(const Params& p, const Row& r, float2 x, float2 weight, float2 by, float (&sums)[8]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float squares = sum_of_lanes(fmaf(x.y, x.y, x.x * x.x));
  if (lane == 0) sums[warp] = squares;
  sync_threads<1, kEntryThreads>();
  float sum = sums[lane % 8];
#pragma unroll
  for (int mask = 4; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
  const float factor = rsqrtf(fmaf(sum, 1.f / kHeadDim, p.eps));
  float a = x.x * factor * weight.x, b = x.y * factor * weight.y;

  const int64_t entry = r.slot & ((int64_t{1} << p.page_shift) - 1);
  uint8_t* const page = p.cache + (r.slot >> p.page_shift) * p.page_bytes;
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

  __device__ __forceinline__ Token(const Params& p, int row, int column) {
    const float* const from = p.kv_score + row * p.kv_score_stride + column;
#pragma unroll
    for (int i = 0; i < 4; ++i) given[i] = load_floats<Vector>(from + i * kDim);
  }
};

// The row's token to the state, and where it ends a group, the group's eight values and scores at this thread's columns:
// of the group before, whose state begins at `before`, and its own; the token's are not read back.
template <int kDim, typename Vector>
__device__ __forceinline__ void take_token(const Params& p, const Row& r, const Token<kDim, Vector>& token, int column, const float* before,
                                           const float* own, Vector (&value)[8], Vector (&score)[8]) {
  constexpr int kRatio = 4, kWidth = 4 * kDim, kScore = 2 * kDim;
  const Vector(&given)[4] = token.given;
  if (r.slot >= 0) {
#pragma unroll
    for (int i = 0; i < kRatio; ++i) {
      value[i] = filled<Vector>(0.f);
      score[i] = filled<Vector>(-FLT_MAX);
      if (r.overlaps) {
        const bool is_token = r.page_before == r.write / kRatio && i == r.write % kRatio;
        value[i] = is_token ? given[0] : *reinterpret_cast<const Vector*>(before + i * kWidth);
        score[i] = is_token ? given[2] : *reinterpret_cast<const Vector*>(before + i * kWidth + kScore);
      }
      const bool is_token = r.page == r.write / kRatio && i == r.write % kRatio;
      value[kRatio + i] = is_token ? given[1] : *reinterpret_cast<const Vector*>(own + i * kWidth);
      score[kRatio + i] = is_token ? given[3] : *reinterpret_cast<const Vector*>(own + i * kWidth + kScore);
    }
  }
  if (r.write >= 0) {
    float* const to = p.state + static_cast<int64_t>(r.write) * kWidth + column;
#pragma unroll
    for (int i = 0; i < 4; ++i) *reinterpret_cast<Vector*>(to + i * kDim) = given[i];
  }
}

__global__ void __launch_bounds__(kEntryThreads) short_kernel(const __grid_constant__ Params p) {
  constexpr int kRatio = 4, kWidth = 4 * kHeadDim;
  __shared__ float sums[8];
  const int row = blockIdx.x, column = 2 * threadIdx.x;
  float2 ape[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) ape[i] = load_floats<float2>(p.ape + i * kHeadDim + column);
  const float2 weight = load_floats<float2>(p.norm_weight + column);
  pdl_wait();
  const StoredRow stored(p, row);
  const Token<kHeadDim, float2> token(p, row, column);
  pdl_trigger();  // behind the loads, which ptxas keeps together in front of it
  const Row r = Row::of<kRatio>(p, stored);
  const float* const before = p.state + static_cast<int64_t>(r.page_before) * (kRatio * kWidth) + column;
  const float* const own = p.state + static_cast<int64_t>(r.page) * (kRatio * kWidth) + kHeadDim + column;
  float2 by = make_float2(1.f, 0.f);
  if (r.slot >= 0 && column >= kNopeDim) by = load_floats<float2>(p.freqs + static_cast<int64_t>(r.position) * kRopeDim + column - kNopeDim);
  float2 value[8], score[8];
  take_token(p, r, token, column, before, own, value, score);
  if (r.slot < 0) return;
  float values[2][8], scores[2][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[0][i] = value[i].x;
    values[1][i] = value[i].y;
    scores[0][i] = add_ftz(score[i].x, ape[i].x);
    scores[1][i] = add_ftz(score[i].y, ape[i].y);
  }
  const float2 x = make_float2(Partial::of(values[0], scores[0]).value(), Partial::of(values[1], scores[1]).value());
  store_entry(p, r, x, weight, by, sums);
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
__device__ __forceinline__ void store_index_entry(const Params& p, const Row& r, float (&x)[4], int lane) {
  constexpr int kBytes = kFp4 ? kIndexDim / 2 : kIndexDim;
  const int64_t entry = r.slot & ((int64_t{1} << p.page_shift) - 1);
  uint8_t* const page = p.cache + (r.slot >> p.page_shift) * p.page_bytes;
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

template <bool kFp4>
__global__ void __launch_bounds__(kIndexThreads) index_kernel(const __grid_constant__ Params p) {
  constexpr int kRatio = 4, kWidth = 4 * kIndexDim;
  const int row = blockIdx.x * kIndexRows + threadIdx.x / 32, lane = threadIdx.x % 32, column = 4 * lane;
  float4 ape[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) ape[i] = load_floats<float4>(p.ape + i * kIndexDim + column);
  const float4 weight = load_floats<float4>(p.norm_weight + column);
  pdl_wait();
  if (row >= p.rows) return;
  const StoredRow stored(p, row);
  const Token<kIndexDim, float4> token(p, row, column);
  pdl_trigger();  // behind the loads, which ptxas keeps together in front of it
  const Row r = Row::of<kRatio>(p, stored);
  const float* const before = p.state + static_cast<int64_t>(r.page_before) * (kRatio * kWidth) + column;
  const float* const own = p.state + static_cast<int64_t>(r.page) * (kRatio * kWidth) + kIndexDim + column;
  float4 by = make_float4(1.f, 0.f, 1.f, 0.f);
  if (r.slot >= 0 && column >= kIndexDim - kRopeDim) by = load_floats<float4>(p.freqs + static_cast<int64_t>(r.position) * kRopeDim + column - (kIndexDim - kRopeDim));
  float4 value[8], score[8];
  take_token(p, r, token, column, before, own, value, score);
  if (r.slot < 0) return;
  const auto part = [](const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; };
  float x[4];
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    float values[8], scores[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = part(value[i], d);
      scores[i] = add_ftz(part(score[i], d), part(ape[i], d));
    }
    x[d] = Partial::of(values, scores).value();
  }
  float squares = x[0] * x[0];
#pragma unroll
  for (int d = 1; d < 4; ++d) squares = fmaf(x[d], x[d], squares);
  const float factor = rsqrtf(fmaf(sum_of_lanes(squares), 1.f / kIndexDim, p.eps));
#pragma unroll
  for (int d = 0; d < 4; ++d) x[d] = x[d] * factor * part(weight, d);
  if (column >= kIndexDim - kRopeDim) {
    rotate(x[0], x[1], make_float2(by.x, by.y));
    rotate(x[2], x[3], make_float2(by.z, by.w));
  }
  hadamard(x, lane);
  store_index_entry<kFp4>(p, r, x, lane);
}

struct LongShared {
  float2 most[kLongWarps][32], sum[kLongWarps][32], product[kLongWarps][32];
  float sums[8];
  bool is_last;
};

__global__ void __launch_bounds__(kLongThreads, 2) long_kernel(const __grid_constant__ Params p) {
  constexpr int kWidth = 2 * kHeadDim;
  __shared__ LongShared s;
  const int row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = blockIdx.x * kLongDim + 2 * lane, first = 8 * warp;
  pdl_wait();
  const StoredRow stored(p, row);
  const float* const token = p.kv_score + row * p.kv_score_stride + column;
  const float2 given_value = load_floats<float2>(token), given_score = load_floats<float2>(token + kHeadDim);
  pdl_trigger();  // behind the loads, which ptxas keeps together in front of it
  const Row r = Row::of<kLongGroup>(p, stored);
  const bool writes = warp == kLongWarps - 1;
  if (!writes && r.slot < 0) return;
  const float* const tokens = p.state + (static_cast<int64_t>(r.page) * kLongGroup + first) * kWidth + column;
  float2 value[8], score[8], ape[8];
  if (r.slot >= 0) {
#pragma unroll
    for (int i = 0; i < 8; ++i) ape[i] = load_floats<float2>(p.ape + (first + i) * kHeadDim + column);  // of one row in 128: not ahead of the wait
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool is_token = r.page == r.write / kLongGroup && first + i == r.write % kLongGroup;
      value[i] = is_token ? given_value : *reinterpret_cast<const float2*>(tokens + i * kWidth);
      score[i] = is_token ? given_score : *reinterpret_cast<const float2*>(tokens + i * kWidth + kHeadDim);
    }
  }
  if (writes && r.write >= 0) {
    float* const to = p.state + static_cast<int64_t>(r.write) * kWidth + column;
    *reinterpret_cast<float2*>(to) = given_value;
    *reinterpret_cast<float2*>(to + kHeadDim) = given_score;
  }
  if (r.slot < 0) return;
  {
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
  __syncthreads();
  float* const pooled = p.pooled + static_cast<int64_t>(row) * kHeadDim;
  if (threadIdx.x < kLongDim) {
    const auto of = [](const float2 (*a)[32], int w) { return reinterpret_cast<const float*>(a[w])[threadIdx.x]; };
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
    pooled[blockIdx.x * kLongDim + threadIdx.x] = all.value();
  }
  __syncthreads();
  if (threadIdx.x == 0) s.is_last = add_acq_rel(p.arrived + row, 1) == kSplits - 1;
  __syncthreads();
  if (!s.is_last || threadIdx.x >= kEntryThreads) return;
  if (threadIdx.x == 0) p.arrived[row] = 0;
  const int pair = 2 * threadIdx.x;
  const float2 by = pair >= kNopeDim ? load_floats<float2>(p.freqs + static_cast<int64_t>(r.position) * kRopeDim + pair - kNopeDim) : make_float2(1.f, 0.f);
  store_entry(p, r, __ldcg(reinterpret_cast<const float2*>(pooled + pair)), load_floats<float2>(p.norm_weight + pair), by, s.sums);
}

}  // namespace dsv4::compressor

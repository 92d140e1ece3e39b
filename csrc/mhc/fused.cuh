// Few rows: one launch, in which every row has a block of its own beside the blocks that make its mixes.
//
// The first blocks take one or two slices of 16 rows each and do what mix_kernel does; the last, one for each row, do what
// finish_kernel does. A row's block makes the row's new streams itself, for itself, so all that it waits for are the
// partial sums. These are their own flags: a word of the exchange is zero until its sum has come (a sum of zero comes as
// -0), and whoever has read it makes it zero again. So there is no fence, no counter, and nothing to clear between calls.
//
// Nobody waits for ever: blocks start in the order of their index, so what a waiting block waits for has begun; and
// however they are started, waiting ones leave room for one that does not wait (fits() in launch.cu asks the device).
//
// The sums are those of mix.cuh and finish.cuh, value by value. Where the boundary makes f itself, a sum between cards (sum.cuh) or the last
// addition of this card's (term.cuh), a slice's warps share what they read: meanwhile their streams are on the way to shared memory, not to
// registers.
#pragma once

#include "finish.cuh"
#include "sum.cuh"

namespace dsv4::mhc {

// Of a row's warps one iterates C. It alone could keep its quarter of the multiprocessor busy, so the other warp there
// has nothing to do meanwhile, and six make y.
constexpr int kIterating = 0, kIdle = 4, kCollapsing = kFusedWarps - 2;

template <bool kHead>
constexpr int kVectors = kOutputs<kHead> / 4 + 1;  // the last has the sum of squares alone

// Slices of a block: for few rows there are multiprocessors enough for one each.
__host__ __device__ constexpr int slices_of(int rows) { return rows <= 4 ? 1 : kFusedSlices; }
__host__ __device__ constexpr int mixing_blocks(int rows) { return kSlices / slices_of(rows) * ceil_div(rows, kTileRows); }

union FusedShared {
  struct {
    float sums[kFusedSlices][kStreams][kTileRows][kSumWords];
    uint4 x[kFusedSlices][kStreams][kSliceVectors], f[kFusedSlices][kSliceVectors];  // where f is made here
  } mix;
  struct {
    uint4 x[kOctets][kStreams][32];  // the old streams, then the new ones
    uint4 f[kOctets][32];
    alignas(16) float coefficients[kFusedWarps][kCoefficients];
    float octets[kOctets][32];
    float squares[kOctets];
  } row;
};

// What a boundary does about f: nothing, it is there.
struct NoSum {
  static constexpr bool kMakes = false;
  struct Slice {
    __device__ __forceinline__ Slice(const NoSum&, int, int) {}
  };
};
// It comes from all cards.
template <int kRanks, bool kHost>
struct SumOfRanks {
  static constexpr bool kMakes = true;
  const all_reduce::Params& p;
  const Term& term;
  uint4* sums;  // [rows, kRowSums], behind the exchange

  struct Slice : SliceSum<kRanks, kHost> {
    __device__ __forceinline__ Slice(const SumOfRanks& sum, int slice, int tile) : SliceSum<kRanks, kHost>(sum.p, sum.term, slice, tile) {}
    __device__ __forceinline__ void put(uint4* here, const SumOfRanks& sum) const { this->add(here, sum.sums); }
    __device__ __forceinline__ ~Slice() { this->end(); }  // behind all that others wait for
  };
  __device__ __forceinline__ void ask_for(int64_t row) const { prefetch_where(threadIdx.x < kRowSums / 8, sum_of(sums, row, threadIdx.x * 8)); }
  __device__ __forceinline__ void take(uint4 (&f)[kThreadSums], int64_t row, uint32_t patience) const { take_sums(f, sums, row, patience); }
};
// It is this card's alone, and its last addition was left: whoever needs a vector makes it, slices and rows each for themselves.
struct OwnTerm {
  static constexpr bool kMakes = true;
  const uint16_t* x;
  const Term& term;
  int64_t rows;

  struct Slice {
    bool is_one;
    TermParts parts;
    __device__ __forceinline__ Slice(const OwnTerm& own, int slice, int tile) {
      const int thread = threadIdx.x % kMixThreads;
      const int64_t row = static_cast<int64_t>(tile) * kTileRows + thread / kRowVectors;
      is_one = thread < kSliceVectors && row < own.rows;
      if (is_one) parts.load(own.x, own.term, row * kRowSums + slice * kRowVectors + thread % kRowVectors, own.rows);
    }
    __device__ __forceinline__ void send() const { __syncwarp(); }  // what was asked for first: weights are split behind it
    __device__ __forceinline__ void put(uint4* here, const OwnTerm& own) {
      if (is_one) here[threadIdx.x % kMixThreads] = parts.added(own.term);
    }
  };
  __device__ __forceinline__ void ask_for(int64_t) const {}
  __device__ __forceinline__ void take(uint4 (&f)[kThreadSums], int64_t row, uint32_t) const {
    TermParts parts[kThreadSums];
#pragma unroll
    for (int i = 0; i < kThreadSums; ++i) parts[i].load(x, term, row * kRowSums + threadIdx.x + i * kFusedThreads, rows);
#pragma unroll
    for (int i = 0; i < kThreadSums; ++i) f[i] = parts[i].added(term);
  }
};

__device__ __forceinline__ float sent(float v) { return v == 0.f ? -0.f : v; }

// The vector `vector` of one row and slice in the exchange.
template <bool kHead>
__device__ __forceinline__ float* exchanged(const Params& p, int64_t row, int slice, int vector) {
  return p.exchange + (row * (kFlashHidden / kSliceColumns) + slice) * kWidth<kHead> + vector * 4;
}

// of the warps of a slice
__device__ __forceinline__ void sync_slice(int half) {
  static_assert(kFusedSlices == 2, "a barrier for each");
  if (half == 0) {
    sync_threads<1, 32 * kStreams>();
  } else {
    sync_threads<2, 32 * kStreams>();
  }
}

// One or two slices of 16 rows: the new streams, and the partial sums for the rows' blocks.
template <bool kPost, bool kHead, typename Sum>
__device__ __forceinline__ void mix_slices(const Params& p, const Sum& sum_of_f, FusedShared& s, int first_slice, int tile) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, stream = warp % kStreams, group = lane / 4, half = warp / kStreams;
  if (half >= slices_of(p.rows)) {
    pdl_wait();
    return;
  }
  const int slice = first_slice + half, column = slice * kSliceColumns + lane % 4 * kLaneColumns;
  const int64_t first_row = static_cast<int64_t>(tile) * kTileRows;
  const bool has_high = first_row + 8 < p.rows;
  Weights<kHead> weights;
  weights.load(p.fn + stream * kFlashHidden + slice * kSliceColumns, kStreams * kFlashHidden, lane);
  const int r = threadIdx.x / 8 % kTileRows, vector = threadIdx.x % 8;
  float* const out = exchanged<kHead>(p, first_row + r, slice, vector);
  const bool sends = first_row + r < p.rows && vector < kVectors<kHead>;
  const uint16_t* const mine = p.x + stream * kFlashHidden + column;
  if (lane % 4 == 0 && first_row + group < p.rows) prefetch(mine + (first_row + group) * p.x_stride);
  if (lane % 4 == 0 && first_row + group + 8 < p.rows) prefetch(mine + (first_row + group + 8) * p.x_stride);
  if (sends && vector == 0) prefetch(out);
  pdl_wait();
  pdl_trigger();
  typename Sum::Slice slice_sum(sum_of_f, slice, tile);
  StreamInputs<kPost> inputs[2];
  if constexpr (Sum::kMakes) {
    uint4(&x)[kStreams][kSliceVectors] = s.mix.x[half], (&f)[kSliceVectors] = s.mix.f[half];
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const int64_t row = first_row + group + high * 8;
      if (row < p.rows) cp_async_16(shared_address(&x[stream][high * 32 + lane]), reinterpret_cast<uint64_t>(mine + row * p.x_stride), true);
      inputs[high].load_coefficients(p, row, stream);
    }
    slice_sum.send();
    weights.split();
    slice_sum.put(f, sum_of_f);
    cp_async_wait_all();
    __syncwarp();
    sync_slice(half);
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      inputs[high].f = f[high * 32 + lane];
#pragma unroll
      for (int j = 0; j < kStreams; ++j) inputs[high].x[j] = x[j][high * 32 + lane];
    }
  } else {
    inputs[0].load(p, first_row + group, stream, column);
    if (has_high) inputs[1].load(p, first_row + group + 8, stream, column);
    weights.split();
    __syncwarp();  // the weights first: the streams come later
  }
  const uint4 low = inputs[0].mix(p, first_row + group, stream, column);
  uint4 high = make_uint4(0, 0, 0, 0);
  if (has_high) high = inputs[1].mix(p, first_row + group + 8, stream, column);
  write_sums<kHead>(weights, low, high, s.mix.sums[half][stream], lane);
  sync_slice(half);
  if (!sends) return;
  float4 v[kStreams];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) v[j] = *reinterpret_cast<const float4*>(&s.mix.sums[half][j][r][vector * 4]);
  const float4 sum = add(add(v[0], v[1]), add(v[2], v[3]));
  const bool all = vector * 4 < kOutputs<kHead>;
  store_relaxed(out, make_float4(sent(sum.x), all ? sent(sum.y) : -0.f, all ? sent(sum.z) : -0.f, all ? sent(sum.w) : -0.f));
}

// Sums of a row's octets, as soon as they have come; leaves zeros behind. Eight lanes have half an octet.
template <bool kHead>
__device__ __forceinline__ void collect(const Params& p, FusedShared& s, int64_t row) {
  static_assert(kFusedWarps * 4 * (kOctet / 2) * kSliceColumns == kFlashHidden);
  const int half = threadIdx.x / 8, vector = threadIdx.x % 8;
  float4 v[kOctet / 2] = {};
  if (vector < kVectors<kHead>) {
    float* from[kOctet / 2];
#pragma unroll
    for (int i = 0; i < kOctet / 2; ++i) from[i] = exchanged<kHead>(p, row, half * (kOctet / 2) + i, vector);
    bool missing = true;
    for (uint32_t looks = 0; missing; ++looks) {
      if (looks == p.patience) give_up();
      missing = false;
#pragma unroll
      for (int i = 0; i < kOctet / 2; ++i) {
        if (!has_come(v[i])) v[i] = load_relaxed(from[i]);
      }
#pragma unroll
      for (int i = 0; i < kOctet / 2; ++i) missing = missing || !has_come(v[i]);
    }
#pragma unroll
    for (int i = 0; i < kOctet / 2; ++i) store_relaxed(from[i], make_float4(0.f, 0.f, 0.f, 0.f));
  }
  __syncwarp();
  const float4 sum = add(add(v[0], v[1]), add(v[2], v[3]));
  const float4 other = make_float4(__shfl_xor_sync(0xffffffffu, sum.x, 8), __shfl_xor_sync(0xffffffffu, sum.y, 8),
                                   __shfl_xor_sync(0xffffffffu, sum.z, 8), __shfl_xor_sync(0xffffffffu, sum.w, 8));
  if (half % 2 == 0) *reinterpret_cast<float4*>(&s.row.octets[half / 2][vector * 4]) = add(sum, other);
}

// A row's new streams, or those there are, in shared memory.
template <bool kPost, typename Sum>
__device__ __forceinline__ void make_streams(const Params& p, const Sum& sum_of_f, FusedShared& s, int64_t row) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // through shared memory all are on their way at once: loads of so many registers the compiler puts off, one behind
  // what another came to
#pragma unroll
  for (int w = warp; w < kOctets; w += kFusedWarps) {
    const int column = w * kOctetColumns + lane * kLaneColumns;
#pragma unroll
    for (int j = 0; j < kStreams; ++j)
      cp_async_16(shared_address(&s.row.x[w][j][lane]), reinterpret_cast<uint64_t>(p.x + row * p.x_stride + j * kFlashHidden + column), true);
    if constexpr (kPost && !Sum::kMakes)
      cp_async_16(shared_address(&s.row.f[w][lane]), reinterpret_cast<uint64_t>(p.f + row * p.f_stride + column), true);
  }
  if constexpr (kPost) {
    float* const c = s.row.coefficients[warp];  // comb by new stream, post
    if (lane < kStreams * kStreams) {
      cp_async<4>(c + lane % kStreams * kStreams + lane / kStreams, p.comb + row * (kStreams * kStreams) + lane);
    } else if (lane < kCoefficients) {
      cp_async<4>(c + lane, p.post + row * kStreams + lane - kStreams * kStreams);
    }
    if constexpr (Sum::kMakes) {
      uint4 f[kThreadSums];
      sum_of_f.take(f, row, p.patience);
#pragma unroll
      for (int i = 0; i < kThreadSums; ++i) s.row.f[warp + i * kFusedWarps][lane] = f[i];
    }
    cp_async_wait_all();
    __syncwarp();
#pragma unroll 1
    for (int w = warp; w < kOctets; w += kFusedWarps) {
      uint4 v[kStreams];
#pragma unroll
      for (int j = 0; j < kStreams; ++j) v[j] = s.row.x[w][j][lane];
      mix_in_place(v, s.row.f[w][lane], c);
#pragma unroll
      for (int j = 0; j < kStreams; ++j) s.row.x[w][j][lane] = v[j];
    }
  } else {
    cp_async_wait_all();
  }
}

// One row: what finish_kernel does.
template <bool kPost, bool kHead, typename Sum>
__device__ __forceinline__ void collapse_row(const Params& p, const Sum& sum_of_f, FusedShared& s, int64_t row) {
  constexpr int kTurns = ceil_div(kOctets, kCollapsing);
  static_assert(kFusedWarps == 8 && kIterating % 4 == kIdle % 4 && kOctets % kFusedWarps == 0 && kStreams * kFlashHidden * 2 == kFusedThreads * 128);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, collapsing = warp - 1 - (warp > kIdle ? 1 : 0);
  const bool collapses = warp != kIterating && warp != kIdle, normed = p.norm_weight != nullptr;
  const auto octet = [&](int turn) { return turn * kCollapsing + collapsing; };
  const auto real = [&](int turn) { return turn < kOctets / kCollapsing || octet(turn) < kOctets; };
  prefetch(reinterpret_cast<const char*>(p.x + row * p.x_stride) + threadIdx.x * 128);
  if (threadIdx.x < kSlices) prefetch(exchanged<kHead>(p, row, threadIdx.x, 0));
  if constexpr (Sum::kMakes) sum_of_f.ask_for(row);
  Gates<kHead> gates;
  gates.load(p, lane);
  uint4 weight[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    weight[turn] = make_uint4(0, 0, 0, 0);
    if (collapses && normed && real(turn)) weight[turn] = load_16(p.norm_weight + octet(turn) * kOctetColumns + lane * kLaneColumns);
  }
  pdl_wait();
  pdl_trigger();
  make_streams<kPost>(p, sum_of_f, s, row);
  collect<kHead>(p, s, row);
  __syncthreads();
  if (warp == kIdle) return;
  const float z = fmaf(normed_mix<kHead>(s.row.octets, kOctets, p, lane), gates.scale, gates.base);
  if (warp == kIterating) {
    if constexpr (!kHead) write_coefficients(p, row, z, lane);
    return;
  }
  const float gate = sigmoid(z) + p.hc_eps;
  float pre[kStreams];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) pre[j] = __shfl_sync(0xffffffffu, gate, j);
  uint4 y[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    if (!real(turn)) continue;
    const uint4 x[kStreams] = {s.row.x[octet(turn)][0][lane], s.row.x[octet(turn)][1][lane], s.row.x[octet(turn)][2][lane],
                               s.row.x[octet(turn)][3][lane]};
    const float squares = sum_of_lanes(collapse(pre, x, y[turn]));
    if (lane == 0) s.row.squares[octet(turn)] = squares;
  }
  float inverse = 1.f;
  if (normed) {
    sync_threads<1, 32 * kCollapsing>();
    float sum = 0.f;
    for (int w = 0; w < kOctets; ++w) sum += s.row.squares[w];
    inverse = rsqrtf(fmaf(sum, p.inverse_hidden, p.norm_eps));
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    if (!real(turn)) continue;
    uint16_t* const out = p.y + row * kFlashHidden + octet(turn) * kOctetColumns + lane * kLaneColumns;
    *reinterpret_cast<uint4*>(out) = normed ? times_weight(y[turn], inverse, weight[turn]) : y[turn];
  }
}

template <bool kPost, bool kHead, typename Sum>
__device__ __forceinline__ void take_part(const Params& p, const Sum& sum_of_f) {
  __shared__ FusedShared s;
  const int block = blockIdx.x, mixing = mixing_blocks(p.rows);
  if (block < mixing) {
    const int first_slice = block * slices_of(p.rows);
    mix_slices<kPost, kHead>(p, sum_of_f, s, first_slice % kSlices, first_slice / kSlices);
  } else {
    collapse_row<kPost, kHead>(p, sum_of_f, s, block - mixing);
  }
}

template <bool kPost, bool kHead>
__global__ void __launch_bounds__(kFusedThreads, 2) fused_kernel(const Params p) {
  take_part<kPost, kHead>(p, NoSum{});
}

// f is the sum of p.sum.x, or of what p.term makes of it, over the ranks.
template <bool kHead, int kRanks, bool kHost>
__global__ void __launch_bounds__(kFusedThreads, 2) summing_kernel(const __grid_constant__ SummingParams p) {
  uint4* const sums = reinterpret_cast<uint4*>(p.boundary.exchange + static_cast<int64_t>(p.boundary.rows) * kSlices * kWidth<kHead>);
  take_part<true, kHead>(p.boundary, SumOfRanks<kRanks, kHost>{p.sum, p.term, sums});
}

}  // namespace dsv4::mhc

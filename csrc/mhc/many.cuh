// Many rows: one kernel, in which the old streams are read once.
//
// A block keeps 128 columns and their part of fn, and its warps have one job each, so that nobody's wait is another's:
//
//   mixers      a slice each, tiles of 16 rows in turn: the new streams, written, and their sums. The next tile's old
//               streams come meanwhile: each lane copies what it reads itself
//   the summer  adds the four slices of a tile, writes the block's partial mixes, and counts the tile: 32 blocks and it
//               is done. It also fetches the next tile's coefficients
//   finishers   together a row: as soon as its tile is done they read its streams, from the L2 as far as it has them still
//
// Mixers and summers wait for their own block alone, finishers for all blocks, which therefore are all resident
// (cooperative launch).
//
// The sums are those of mix.cuh and finish.cuh, value by value: a row has the same bits as among few.
//
// Shared memory: the bf16 parts of fn 72 KB, the next tile's streams 16 KB, sums of the slices 7 KB, coefficients 2.5 KB.
#pragma once

#include "finish.cuh"

namespace dsv4::mhc {

constexpr int kMixTilesN = kMixes / 8;
constexpr int kHidden = kFlashHidden, kColumnBlocks = kHidden / kManyColumns;
static_assert(kOctetColumns == 2 * kManyColumns, "an octet is the sums of two blocks");

struct ManyShared {
  uint2 weights[kManySlices][kStreams][2][kParts][kMixTilesN][32];  // [slice][stream][step][part][mixes][lane]
  uint4 next[kManySlices][2][kStreams][32];                         // old streams by slice, row g or g + 8, stream, lane
  float sums[kManySlices][kTileRows][kSumWords];
  float coefficients[2][kTileRows][kCoefficients];                  // comb by new stream, post; tiles in turn
  float squares[2][kOctets];                                        // of the rows that are finished, in turn
  Barriers<2> coefficients_here;
  Barriers<> sums_here, sums_taken;
};
static_assert(sizeof(ManyShared) <= kMaxSharedBytes);

// Sums of a lane: mixes of rows g and g + 8, and their sums of squares.
struct Sums {
  float d[kMixTilesN][4];
  float squares[2];

  __device__ __forceinline__ void add(const Sums& other) {
#pragma unroll
    for (int n = 0; n < kMixTilesN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) d[n][i] += other.d[n][i];
    }
    squares[0] += other.squares[0];
    squares[1] += other.squares[1];
  }
};

// The bf16 parts of fn: four slices of all four streams, through registers into shared memory.
__device__ __forceinline__ void load_weights(const Params& p, ManyShared& s, int first_slice) {
  constexpr int kQuads = kManySlices * kStreams * kMixTilesN * 64;  // float4s
#pragma unroll 4
  for (int quad = threadIdx.x; quad < kQuads; quad += kManyThreads) {
    // step fastest, then the lane of the quad: eight threads read 128 consecutive bytes
    const int within = quad % 64, at = quad / 64;
    const int n = at % kMixTilesN, stream = at / kMixTilesN % kStreams, slice = at / (kMixTilesN * kStreams);
    const int64_t mix = n * 8 + within / 8;
    const int column = (first_slice + slice) * kSliceColumns + within % 8 / 2 * kLaneColumns + within % 2 * 4;
    const float4 value = __ldg(reinterpret_cast<const float4*>(p.fn + (mix * kStreams + stream) * kHidden + column));
    uint32_t first[kParts], second[kParts];
    split_pair(value.x, value.y, first);
    split_pair(value.z, value.w, second);
#pragma unroll
    for (int part = 0; part < kParts; ++part) s.weights[slice][stream][within % 2][part][n][within / 2] = make_uint2(first[part], second[part]);
  }
}

// volatile: what is made of these is made again where it is asked, for not all of it fits the registers
__device__ __forceinline__ int lane_now() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
__device__ __forceinline__ int blocks_now() {
  int blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
}

// The tiles of a block: every so many-th, for so many blocks have the same columns.
__device__ __forceinline__ int first_tile() { return blockIdx.x / kColumnBlocks; }
__device__ __forceinline__ int next_tile(int tile) { return tile + blocks_now() / kColumnBlocks; }
__device__ __forceinline__ int num_tiles(const Params& p) { return ceil_div(p.rows, kTileRows); }

// A lane's place in a mixer: its slice, its row of a tile (and eight further), its columns.
struct Place {
  int lane, slice, group, column;

  __device__ __forceinline__ explicit Place(int slice)
      : lane(lane_now()), slice(slice), group(lane / 4),
        column((blockIdx.x % kColumnBlocks * kManySlices + slice) * kSliceColumns + lane % 4 * kLaneColumns) {}
};

// Asks for a lane's old streams of a tile, and for its f. Past the last row: the last row's.
__device__ __forceinline__ int64_t row_of(const Params& p, const Place& at, int tile, int r) {
  return min(tile * kTileRows + at.group + 8 * r, p.rows - 1);
}
__device__ __forceinline__ void fetch_streams(const Params& p, ManyShared& s, const Place& at, int tile) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint16_t* const from = p.x + row_of(p, at, tile, r) * p.x_stride + at.column;
#pragma unroll
    for (int j = 0; j < kStreams; ++j)
      cp_async_16(shared_address(&s.next[at.slice][r][j][at.lane]), reinterpret_cast<uint64_t>(from + j * kHidden), true);
  }
}
__device__ __forceinline__ void fetch_output(const Params& p, const Place& at, int tile, uint4 (&f)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) f[r] = load_once(p.f + row_of(p, at, tile, r) * p.f_stride + at.column);
}

// Sums of one stream. `nothing`: 0, which the compiler does not know. As operands of the tensor cores the words lie
// otherwise than as stored ones: it would move them there again and again; to results of an operation it gives the place.
__device__ __forceinline__ Sums sums_of(const ManyShared& s, int slice, int stream, const uint4& stored_low, const uint4& stored_high,
                                        uint32_t nothing) {
  const auto operand = [&](const uint4& v) { return make_uint4(v.x ^ nothing, v.y ^ nothing, v.z ^ nothing, v.w ^ nothing); };
  const uint4 low = operand(stored_low), high = operand(stored_high);
  const int lane = threadIdx.x % 32;
  Sums sums;
  sum_squares(low, high, sums.squares);
  multiply(sums.d, low, high, [&](int n, int step, int part) { return s.weights[slice][stream][step][part][n][lane]; });
  return sums;
}

// The new streams of the tile that was fetched, written, and their sums. Fetches `next` unless it is behind the last.
__device__ __forceinline__ Sums run_slice(const Params& p, ManyShared& s, const Place& at, int tile, const float (*coefficients)[kCoefficients],
                                          uint4 (&f)[2]) {
  uint4 x[2][kStreams];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int j = 0; j < kStreams; ++j) x[r][j] = s.next[at.slice][r][j][at.lane];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = tile * kTileRows + at.group + 8 * r;
    mix_in_place(x[r], f[r], coefficients[at.group + 8 * r]);
    if (row < p.rows) {
#pragma unroll
      for (int i = 0; i < kStreams; ++i)
        *reinterpret_cast<uint4*>(p.streams + (static_cast<int64_t>(row) * kStreams + i) * kHidden + at.column) = x[r][i];
    }
    __syncwarp();  // one row after the other: registers
  }
  const int next = next_tile(tile);
  if (next < num_tiles(p)) fetch_streams(p, s, at, next);
  const uint32_t nothing = p.hidden - kHidden;
  Sums sums = sums_of(s, at.slice, 0, x[0][0], x[1][0], nothing);
  sums.add(sums_of(s, at.slice, 1, x[0][1], x[1][1], nothing));
  __syncwarp();
  if (next < num_tiles(p)) fetch_output(p, at, next, f);
  Sums rest = sums_of(s, at.slice, 2, x[0][2], x[1][2], nothing);
  rest.add(sums_of(s, at.slice, 3, x[0][3], x[1][3], nothing));
  sums.add(rest);
  return sums;
}

// f: of the first tile, which has been fetched
__device__ __forceinline__ void mix_all(const Params& p, ManyShared& s, int slice, uint4 (&f)[2]) {
  for (int tile = first_tile(), turn = 0; tile < num_tiles(p); tile = next_tile(tile), ++turn) {
    s.coefficients_here[turn % 2].wait(turn / 2 % 2);
    cp_async_wait_all();
    const Place at(slice);
    const Sums sums = run_slice(p, s, at, tile, s.coefficients[turn % 2], f);
    if (turn > 0) s.sums_taken->wait((turn - 1) % 2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float* const out = s.sums[at.slice][at.group + 8 * r];
#pragma unroll
      for (int n = 0; n < kMixTilesN; ++n)
        *reinterpret_cast<float2*>(out + n * 8 + at.lane % 4 * 2) = make_float2(sums.d[n][2 * r], sums.d[n][2 * r + 1]);
      if (at.lane % 4 == r) out[kMixes] = sums.squares[r];
    }
    __syncwarp();
    if (at.lane == 0) s.sums_here->arrive();
  }
}

__device__ __forceinline__ void fetch_coefficients(const Params& p, ManyShared& s, int tile, int turn) {
  static_assert(kTileRows * kCoefficients % 32 == 0);
  for (int at = threadIdx.x % 32; at < kTileRows * kCoefficients; at += 32) {
    const int r = at / kCoefficients, c = at % kCoefficients;
    const int64_t row = min(tile * kTileRows + r, p.rows - 1);
    const float* const from = c < 16 ? p.comb + row * 16 + c : p.post + row * 4 + (c - 16);
    cp_async<4>(&s.coefficients[turn % 2][r][c < 16 ? c % 4 * 4 + c / 4 : c], from);
  }
  s.coefficients_here[turn % 2].arrive_copies();
}

__device__ __forceinline__ uint32_t* counter_of(const Params& p, int64_t tile) { return p.counters + tile * kCounterWords; }

__device__ __forceinline__ void sum_all(const Params& p, ManyShared& s) {
  constexpr int kVectors = kSumWords / 4;
  const int lane = threadIdx.x % 32;
  fetch_coefficients(p, s, first_tile(), 0);
  if (next_tile(first_tile()) < num_tiles(p)) fetch_coefficients(p, s, next_tile(first_tile()), 1);
  for (int tile = first_tile(), turn = 0; tile < num_tiles(p); tile = next_tile(tile), ++turn) {
    s.sums_here->wait(turn % 2);
    if (next_tile(next_tile(tile)) < num_tiles(p)) fetch_coefficients(p, s, next_tile(next_tile(tile)), turn + 2);  // into this tile's place
#pragma unroll
    for (int i = 0; i < ceil_div(kTileRows * kVectors, 32); ++i) {
      const int at = i * 32 + lane, r = at / kVectors, vector = at % kVectors;
      const int64_t row = static_cast<int64_t>(tile) * kTileRows + r;
      if (r >= kTileRows || row >= p.rows) continue;
      float4 v[kManySlices];
#pragma unroll
      for (int slice = 0; slice < kManySlices; ++slice) v[slice] = *reinterpret_cast<const float4*>(&s.sums[slice][r][vector * 4]);
      float* const out = p.partials + (row * kColumnBlocks + blockIdx.x % kColumnBlocks) * kWidth<false> + vector * 4;
      __stcg(reinterpret_cast<float4*>(out), add(add(v[0], v[1]), add(v[2], v[3])));
    }
    __syncwarp();
    if (lane == 0) {
      s.sums_taken->arrive();
      add_release(counter_of(p, tile), 1);  // the mixers' streams as well: they arrived here after them
    }
    __syncwarp();
  }
}

// One row by the finishers of a block, an octet each in turn: what finish_kernel does, but for the coefficients, whose
// logits are left at the row's partial mixes.
__device__ __forceinline__ void finish_row(const Params& p, ManyShared& s, int row, int finisher, int turn) {
  constexpr int kTurns = ceil_div(kOctets, kFinishers), kAhead = 3;
  const int lane = lane_now();
  const auto octet = [&](int i) { return i * kFinishers + finisher; };
  const auto real = [&](int i) { return i < kOctets / kFinishers || octet(i) < kOctets; };
  // words behind a row's sums nobody has written: lanes there have the last sum's
  float* const partial = p.partials + static_cast<int64_t>(row) * (kColumnBlocks * kWidth<false>)+min(lane, kSumWords - 1);
  const uint16_t* const streams = p.streams + static_cast<int64_t>(row) * (kStreams * kHidden) + finisher * kOctetColumns + lane * kLaneColumns;
  Gates<false> gates;
  gates.load(p, lane);
  float v[kColumnBlocks];  // of the lanes behind the sum of squares nobody asks
#pragma unroll
  for (int i = 0; i < kColumnBlocks; ++i) v[i] = load_from_l2(partial + i * kWidth<false>);
  uint4 x[kAhead][kStreams], y[kTurns];
  const auto fetch = [&](int i) {
    if (i >= kTurns || !real(i)) return;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) x[i % kAhead][j] = load_from_l2(streams + j * kHidden + i * (kFinishers * kOctetColumns));
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) fetch(i);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kOctets; ++i) sum += v[2 * i] + v[2 * i + 1];
  const float z = fmaf(root_normed<false>(sum, p), gates.scale, gates.base);
  const float gate = sigmoid(z) + p.hc_eps;
  float pre[kStreams];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) pre[j] = __shfl_sync(0xffffffffu, gate, j);
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    if (!real(i)) continue;
    const float squares = sum_of_lanes(collapse(pre, x[i % kAhead], y[i]));
    if (lane == 0) s.squares[turn % 2][octet(i)] = squares;
    fetch(i + kAhead);
  }
  sync_threads<1, 32 * kFinishers>();
  if (finisher == 0 && lane < kMixes) partial[0] = z;  // all have read it
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kOctets; ++i) squares += s.squares[turn % 2][i];
  const float inverse = rsqrtf(fmaf(squares, p.inverse_hidden, p.norm_eps));
  const uint4* const weights = reinterpret_cast<const uint4*>(p.norm_weight) + lane;
  uint4* const out = reinterpret_cast<uint4*>(p.y + static_cast<int64_t>(row) * kHidden) + lane;
  if (p.norm_weight != nullptr) {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      if (real(i)) y[i] = times_weight(y[i], inverse, __ldg(weights + octet(i) * 32));
    }
  }
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    if (real(i)) __stcs(out + octet(i) * 32, y[i]);
  }
}

// What write_coefficients does, of one row by one lane.
__device__ __forceinline__ void write_coefficients_alone(const Params& p, int64_t row) {
  const float4* const z = reinterpret_cast<const float4*>(p.partials + row * (kColumnBlocks * kWidth<false>));
  const float4 gates = __ldcg(z + 1);
  float c[kStreams][kStreams];
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    const float4 v = __ldcg(z + 2 + i);
    const float most = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));
    c[i][0] = expf(v.x - most), c[i][1] = expf(v.y - most), c[i][2] = expf(v.z - most), c[i][3] = expf(v.w - most);
    const float inverse = reciprocal((c[i][0] + c[i][1]) + (c[i][2] + c[i][3]));
#pragma unroll
    for (int j = 0; j < kStreams; ++j) c[i][j] = fmaf(c[i][j], inverse, p.hc_eps);
  }
  write_comb(p, row, c, [](int) { return true; });
  const auto gate = [&](float value) { return p.post_scale * sigmoid(value); };
  reinterpret_cast<float4*>(p.post_out)[row] = make_float4(gate(gates.x), gate(gates.y), gate(gates.z), gate(gates.w));
}

__device__ __forceinline__ void finish_all(const Params& p, ManyShared& s, int finisher) {
#pragma unroll 1
  for (int row = blockIdx.x, turn = 0; row < p.rows; row += blocks_now(), ++turn) {
    const uint32_t* const counter = counter_of(p, row / kTileRows);
    for (uint32_t looks = 0; __any_sync(0xffffffffu, load_relaxed(counter) != kColumnBlocks); ++looks) {
      if (looks == p.patience) give_up();
      __nanosleep(100);
    }
    load_acquire(counter);
    finish_row(p, s, row, finisher, turn);
  }
  if (finisher != 0) return;
  __syncwarp();
  const int step = blocks_now();
#pragma unroll 1
  for (int row = blockIdx.x + lane_now() * step; row < p.rows; row += 32 * step) write_coefficients_alone(p, row);
}

// blocks on a multiprocessor: shared memory holds one on SM120, two on SM90
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kManyMinBlocks = 1;
#else
constexpr int kManyMinBlocks = 2;
#endif

__global__ void __launch_bounds__(kManyThreads, kManyMinBlocks) many_kernel(const Params p) {
  extern __shared__ __align__(16) unsigned char memory[];
  ManyShared& s = *reinterpret_cast<ManyShared*>(memory);
  const int warp = uniform(threadIdx.x / 32);
  uint4 f[2];
  if (warp < kManySlices) {
    fetch_streams(p, s, Place(warp), first_tile());
    fetch_output(p, Place(warp), first_tile(), f);
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) s.coefficients_here[i].init(32);
    s.sums_here->init(kManySlices);
    s.sums_taken->init(1);
  }
  load_weights(p, s, blockIdx.x % kColumnBlocks * kManySlices);
  __syncthreads();
  if (warp < kManySlices) {
    mix_all(p, s, warp, f);
  } else if (warp == kManySlices) {
    sum_all(p, s);
  } else {
    finish_all(p, s, warp - kManySlices - 1);
  }
}

}  // namespace dsv4::mhc

// Probes of order: programmatic chains, flags between blocks, spins that sleep.
#include "../device/barriers.cuh"
#include "../launch_kernel.h"
#include "card.h"

namespace dsv4::card {

namespace {

constexpr char kName[] = "card";
constexpr uint32_t kLooks = 1u << 20;   // of a wait: a second or less
constexpr int kThirdBlocks = 64;        // on many multiprocessors, each with an L1 of its own

__device__ __forceinline__ int64_t now() {
  int64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
// by a thread; ends even where the timer stands still
__device__ __forceinline__ void hold(int64_t ns) {
  const int64_t begin = now();
  for (uint32_t looks = 0; now() - begin < ns && looks < kLooks; ++looks) __nanosleep(200);
}

__global__ void first_kernel(const Chain p) {
  pdl_wait();
  pdl_trigger();
  if (threadIdx.x != 0) return;
  hold(p.hold_ns);
  *p.value = kWritten;
  p.times[0] = now();
}

template <bool kWaits>
__global__ void middle_kernel() {
  if (kWaits && blockIdx.x == 0 && threadIdx.x == 0) pdl_wait();
}

// By plain loads, as kernels read what those in front wrote: the first brings the line into this multiprocessor's L1, and the one behind the
// wait must not find it there.
template <bool kWaits>
__global__ void third_kernel(const Chain p) {
  const uint32_t early = load_now(p.value);
  if (kWaits) pdl_wait();
  const uint32_t plain = load_now(p.value);
  __syncthreads();  // before ptxas asks the L2
  if (threadIdx.x != 0) return;
  const uint32_t there = load_relaxed(p.value);
  if (early != there) atomicAdd(&p.seen[1], 1u);
  if (plain != there) atomicAdd(&p.seen[2], 1u);
  if (blockIdx.x != 0) return;
  p.seen[0] = there;
  p.times[1] = now();
}

// what a thread sends in a round: four words, none zero
__device__ __forceinline__ float4 message(int pair, int round, int direction) {
  const uint32_t base = ((pair * 1021u + round) * 2u + direction) * kExchangeThreads + threadIdx.x;
  const auto word = [base](uint32_t i) { return __uint_as_float((base * 4u + i) % 0x7f000000u + 1u); };
  return make_float4(word(0), word(1), word(2), word(3));
}
__device__ __forceinline__ bool same(const float4& a, const float4& b) {
  return __float_as_uint(a.x) == __float_as_uint(b.x) && __float_as_uint(a.y) == __float_as_uint(b.y) &&
         __float_as_uint(a.z) == __float_as_uint(b.z) && __float_as_uint(a.w) == __float_as_uint(b.w);
}

// As mhc's fused_kernel: sixteen bytes at a time, no fence, and zeros left behind.
__global__ void __launch_bounds__(kExchangeThreads) own_flags_kernel(const Exchange p) {
  const int pair = blockIdx.x / 2, side = blockIdx.x % 2;
  uint32_t right = 0, wrong = 0;
  for (int round = 0; round < p.rounds; ++round) {
    const auto at = [&](int direction) {
      return p.words + (((static_cast<int64_t>(pair) * p.rounds + round) * 2 + direction) * kExchangeThreads + threadIdx.x) * 4;
    };
    if (side == 0) store_relaxed(at(0), message(pair, round, 0));
    float4 v = {};
    uint32_t looks = 0;
    for (; looks < kLooks && !has_come(v); ++looks) v = load_relaxed(at(1 - side));
    if (!has_come(v)) {
      atomicAdd(&p.answer[2], 1u);
      break;
    }
    const bool as_sent = same(v, message(pair, round, 1 - side));
    right += as_sent;
    wrong += !as_sent;
    store_relaxed(at(1 - side), make_float4(0.f, 0.f, 0.f, 0.f));
    if (side == 1) store_relaxed(at(1), message(pair, round, 1));
  }
  atomicAdd(&p.answer[0], right);
  atomicAdd(&p.answer[1], wrong);
}

// As sparse_decode, compressor and mhc's many_kernel: all threads of a block write, a barrier, one thread counts; over there one thread
// sees the count, a barrier, all threads read.
__global__ void __launch_bounds__(kExchangeThreads) counters_kernel(const Exchange p) {
  __shared__ bool given_up;
  const int pair = blockIdx.x / 2, side = blockIdx.x % 2;
  uint32_t* const mine = p.counters + (pair * 2 + side) * 32;
  const uint32_t* const theirs = p.counters + (pair * 2 + 1 - side) * 32;
  uint32_t right = 0, wrong = 0;
  const auto payload = [&](int of_side, int round) { return p.payload + ((pair * 2 + of_side) * 2 + round % 2) * kExchangeThreads; };
  const auto send = [&](int round) {
    payload(side, round)[(threadIdx.x + 32) % kExchangeThreads] = __float_as_uint(message(pair, round, side).x);
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (round % 2 == 0) {
      add_release(mine, 1);
    } else {
      add_acq_rel(mine, 1);
    }
  };
  for (int round = 0; round < p.rounds; ++round) {
    if (side == 0) send(round);
    if (threadIdx.x == 0) {
      uint32_t looks = 0;
      if (round % 2 == 0) {
        while (load_relaxed(theirs) != round + 1 && looks < kLooks) ++looks;
        load_acquire(theirs);
      } else {
        while (load_acquire(theirs) != round + 1 && looks < kLooks) ++looks;
      }
      given_up = looks == kLooks;
    }
    __syncthreads();
    if (given_up) {
      if (threadIdx.x == 0) atomicAdd(&p.answer[2], 1u);
      break;
    }
    const uint32_t v = __ldcg(payload(1 - side, round) + (threadIdx.x + 32) % kExchangeThreads);
    const bool as_sent = v == __float_as_uint(message(pair, round, 1 - side).x);
    right += as_sent;
    wrong += !as_sent;
    __syncthreads();
    if (side == 1) send(round);
  }
  atomicAdd(&p.answer[0], right);
  atomicAdd(&p.answer[1], wrong);
}

__global__ void __launch_bounds__(256) busy_kernel(int64_t* times, float* sink, int64_t hold_ns) {
  const int64_t begin = now();
  if (blockIdx.x == 0 && threadIdx.x == 0) times[0] = begin;
  float x = threadIdx.x;
  for (uint32_t turn = 0; now() - begin < hold_ns && turn < kLooks; ++turn) {
#pragma unroll 16
    for (int i = 0; i < 256; ++i) x = fmaf(x, 1.0001f, 0.5f);
  }
  if (x == -1.f) *sink = x;  // never; so that x is made
  if (blockIdx.x == 0 && threadIdx.x == 0) times[1] = now();
}

__global__ void __launch_bounds__(32) sleep_kernel(const Sleep p) {
  const int pair = blockIdx.x / 2;
  const bool raises = blockIdx.x % 2 == 0;
  for (int round = 0; round < p.rounds; ++round) {
    uint32_t* const flags = p.flags + (pair * p.rounds + round) * 2;
    int64_t* const times = p.times + (pair * p.rounds + round) * 2;
    if (raises) {
      if (threadIdx.x == 0) {
        hold(5000);
        times[0] = now();
        add_release(flags, 1);
      }
      __syncwarp();
    }
    uint32_t looks = 0;
    while (__any_sync(0xffffffffu, load_relaxed(flags + (raises ? 1 : 0)) == 0) && looks < kLooks) {
      __nanosleep(100);
      ++looks;
    }
    if (looks == kLooks) return;  // the times stay 0
    if (!raises && threadIdx.x == 0) {
      times[1] = now();
      add_release(flags + 1, 1);
    }
    __syncwarp();
  }
}

}  // namespace

Middle middle_of(const std::string& name) {
  if (name == "none") return Middle::kNone;
  if (name == "returns") return Middle::kReturns;
  if (name == "one thread waits") return Middle::kOneThreadWaits;
  throw std::runtime_error("card: middle must be none, returns or one thread waits, got " + name);
}

void launch_chain(const Chain& chain, Middle middle, bool third_waits, cudaStream_t stream) {
  const Launcher launcher = {kName, true, stream};
  launcher(&first_kernel, dim3(1), 32, 0, chain);
  if (middle == Middle::kReturns) {
    launcher(&middle_kernel<false>, dim3(4), 32, 0);
  } else if (middle == Middle::kOneThreadWaits) {
    launcher(&middle_kernel<true>, dim3(4), 32, 0);
  }
  if (third_waits) {
    launcher(&third_kernel<true>, dim3(kThirdBlocks), 32, 0, chain);
  } else {
    launcher(&third_kernel<false>, dim3(kThirdBlocks), 32, 0, chain);
  }
}

void launch_exchange(const Exchange& exchange, bool own_flags, cudaStream_t stream) {
  const Launcher launcher = {kName, false, stream};
  if (own_flags) {
    launcher(&own_flags_kernel, dim3(2 * exchange.pairs), kExchangeThreads, 0, exchange);
  } else {
    launcher(&counters_kernel, dim3(2 * exchange.pairs), kExchangeThreads, 0, exchange);
  }
}

void launch_busy(int64_t* times, float* sink, int64_t hold_ns, int num_sms, cudaStream_t stream) {
  Launcher{kName, false, stream}(&busy_kernel, dim3(2 * num_sms), 256, 0, times, sink, hold_ns);
}

void launch_sleep(const Sleep& sleep, cudaStream_t stream) { Launcher{kName, false, stream}(&sleep_kernel, dim3(2 * sleep.pairs), 32, 0, sleep); }

}  // namespace dsv4::card

// Small kernels by which the check knows what a tool sees: with a planted fault, which it must report, and without, which it must not.
// They wait and copy by the wrappers that our kernels have (csrc/device), in a namespace of theirs, so that the same filter takes them.
//
//   controls NAME            right
//   controls NAME fault      with its fault; what a tool then ends the kernel with is no error of this program
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

#include "csrc/device/copies.cuh"
#include "csrc/device/stages.cuh"

namespace dsv4::control {

constexpr int kThreads = 256, kHalf = kThreads / 2;

// memcheck: the word behind the last one
template <bool kFault>
__global__ void past_global(const uint32_t* in, uint32_t* out) {
  out[threadIdx.x] = in[threadIdx.x + (kFault ? 1 : 0)];
}
template <bool kFault>
__global__ void past_cp_async(const uint32_t* in, uint32_t* out) {
  __shared__ alignas(16) uint32_t words[kThreads];
  const int from = threadIdx.x + (kFault ? 1 : 0);
  cp_async<4>(&words[threadIdx.x], in + from);
  cp_async_wait_all();
  out[threadIdx.x] = words[threadIdx.x];
}
template <bool kFault>
__global__ void past_shared(const uint32_t* in, uint32_t* out) {
  extern __shared__ uint32_t dynamic[];
  dynamic[threadIdx.x + (kFault ? 1 : 0)] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = dynamic[threadIdx.x];
}

// a value from another warp: behind a barrier of all threads, or of half of them
template <bool kFault>
__global__ void all_threads(const uint32_t* in, uint32_t* out) {
  __shared__ uint32_t words[kThreads];
  words[threadIdx.x] = in[threadIdx.x];
  if (!kFault) __syncthreads();
  out[threadIdx.x] = words[kThreads - 1 - threadIdx.x];
}
template <bool kFault>
__global__ void named_barrier(const uint32_t* in, uint32_t* out) {
  __shared__ uint32_t words[kThreads];
  const int half = threadIdx.x / kHalf, other = half * kHalf + (threadIdx.x + 32) % kHalf;
  words[threadIdx.x] = in[threadIdx.x];
  sync_threads<kHalf>(1 + half);
  out[threadIdx.x] = words[kFault ? kThreads - 1 - threadIdx.x : other];
}

// copies that another thread reads: who waits is left out
template <bool kFault>
__global__ void cp_async_waited(const uint32_t* in, uint32_t* out) {
  __shared__ alignas(16) uint32_t words[kThreads];
  cp_async<4>(&words[threadIdx.x], in + threadIdx.x);
  if (!kFault) cp_async_wait_all();
  __syncthreads();
  out[threadIdx.x] = words[kThreads - 1 - threadIdx.x];
}
template <bool kFault>
__global__ void cp_async_barrier(const uint32_t* in, uint32_t* out) {
  __shared__ alignas(16) uint32_t words[kThreads];
  __shared__ Barriers<> ready;
  if (threadIdx.x == 0) ready->init(kThreads);
  __syncthreads();
  cp_async<4>(&words[threadIdx.x], in + threadIdx.x);
  ready->arrive_copies();
  if (!kFault) ready->wait(0);
  out[threadIdx.x] = words[kThreads - 1 - threadIdx.x];
}
// `past`: the copy has 16 bytes that are not `in`'s
template <bool kFault, bool kPast>
__device__ __forceinline__ void copy_and_read(const uint32_t* in, uint32_t* out) {
  __shared__ alignas(128) uint32_t words[kThreads + 4];
  __shared__ Barriers<> ready;
  if (threadIdx.x == 0) {
    ready->init(1);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    constexpr uint32_t kBytes = 4 * kThreads + (kPast ? 16 : 0);
    ready->arrive_expect(kBytes);
    copy_bulk(shared_address(words), in, kBytes, ready[0]);
  }
  if (!kFault) ready->wait(0);
  out[threadIdx.x] = words[threadIdx.x];
}
template <bool kFault>
__global__ void bulk_copy(const uint32_t* in, uint32_t* out) {
  copy_and_read<kFault, false>(in, out);
}
template <bool kFault>
__global__ void past_bulk(const uint32_t* in, uint32_t* out) {
  copy_and_read<false, kFault>(in, out);
}

// A ring of two stages: four warps fill, four read. The fault: who fills does not wait for who reads.
template <bool kFault, bool kRegisters>
__device__ __forceinline__ void ring_of_stages(const uint32_t* in, uint32_t* out) {
  constexpr int kStages = 2, kTurns = 8;
  __shared__ uint32_t words[kStages][kHalf];
  __shared__ Barriers<kStages> full, empty;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) full[i].init(kHalf), empty[i].init(kHalf);
  }
  __syncthreads();
  const int lane = threadIdx.x % kHalf;
  if (threadIdx.x < kHalf) {
    if constexpr (kRegisters) set_registers<40, false>();
    for (int turn = 0; turn < kTurns; ++turn) {
      const int stage = turn % kStages;
      if (!kFault && turn >= kStages) empty[stage].wait((turn / kStages - 1) & 1);
      words[stage][lane] = in[lane] + turn;
      full[stage].arrive();
    }
  } else {
    if constexpr (kRegisters) set_registers<88, true>();
    uint32_t sum = 0;
    for (int turn = 0; turn < kTurns; ++turn) {
      const int stage = turn % kStages;
      full[stage].wait(turn / kStages & 1);
      sum += words[stage][kHalf - 1 - lane];
      empty[stage].arrive();
    }
    out[lane] = sum;
  }
}
template <bool kFault>
__global__ void ring(const uint32_t* in, uint32_t* out) {
  ring_of_stages<kFault, false>(in, out);
}
// the registers of 256 threads, 64 each, dealt anew
template <bool kFault>
__global__ void __launch_bounds__(kThreads, 4) ring_of_registers(const uint32_t* in, uint32_t* out) {
  ring_of_stages<kFault, true>(in, out);
}

// The same, but a warp's first lane tells for all of it that they have read: bar.warp.sync has told it. Of copies, who fills asks for them
// alone, and the copies tell when they are done. Most kernels of ours that take turns do it so.
template <bool kFault, bool kCopies>
__device__ __forceinline__ void ring_told_by_leaders(const uint32_t* in, uint32_t* out) {
  constexpr int kStages = 3;
  __shared__ alignas(16) uint32_t words[kStages][kHalf];
  __shared__ Barriers<kStages> full, empty;
  const int turns = 8 * gridDim.x, lane = threadIdx.x % kHalf;
  if (threadIdx.x < kStages) {
    full[threadIdx.x].init(kCopies ? kHalf : kHalf / 32);
    empty[threadIdx.x].init(kHalf / 32);
  }
  __syncthreads();
  const auto told_by_leader = [](const Barrier& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier.arrive();
  };
  StagePlace<kStages> at;
  uint32_t sum = 0;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn, at.advance()) {
    if (threadIdx.x < kHalf) {
      if (!kFault) empty[at.stage].wait(at.phase ^ 1);
      if constexpr (kCopies) {
        cp_async<4>(&words[at.stage][lane], in + (lane + turn) % kHalf);
        full[at.stage].arrive_copies();
      } else {
        words[at.stage][lane] = in[(lane + turn) % kHalf];
        told_by_leader(full[at.stage]);
      }
    } else {
      full[at.stage].wait(at.phase);
      sum += words[at.stage][kHalf - 1 - lane];
      told_by_leader(empty[at.stage]);
    }
  }
  if (threadIdx.x >= kHalf) out[lane] = sum;
}
template <bool kFault>
__global__ void ring_of_leaders(const uint32_t* in, uint32_t* out) {
  ring_told_by_leaders<kFault, false>(in, out);
}
template <bool kFault>
__global__ void ring_of_copies(const uint32_t* in, uint32_t* out) {
  ring_told_by_leaders<kFault, true>(in, out);
}

// One barrier, to which warps of two jobs come at two places of the code: PTX asks for one place of a warp's threads alone.
template <bool kFault>
__global__ void barrier_of_roles(const uint32_t* in, uint32_t* out) {
  __shared__ uint32_t words[kThreads];
  if (threadIdx.x < kHalf) {
    uint32_t sum = 0;
#pragma unroll 1
    for (int i = 0; i < static_cast<int>(gridDim.x); ++i) sum += in[(threadIdx.x + i) % kThreads];
    words[threadIdx.x] = sum;
    sync_threads<1, kThreads>();
    out[threadIdx.x] = words[kThreads - 1 - threadIdx.x];
  } else {
    words[threadIdx.x] = in[threadIdx.x] + 1;
    if (!kFault) sync_threads<1, kThreads>();
    out[threadIdx.x] = words[kThreads - 1 - threadIdx.x] * 3;
    if (kFault) sync_threads<1, kThreads>();
  }
}

// synccheck: a barrier to which a part of a warp does not come; an mbarrier that nobody has initialised
template <bool kFault>
__global__ void divergent(const uint32_t* in, uint32_t* out) {
  if (!kFault || threadIdx.x % 32 < 16) __syncthreads();
  out[threadIdx.x] = in[threadIdx.x];
}
template <bool kFault>
__global__ void barrier_init(const uint32_t* in, uint32_t* out) {
  __shared__ Barriers<> ready;
  if (!kFault && threadIdx.x == 0) ready->init(kThreads);
  __syncthreads();
  ready->arrive();
  out[threadIdx.x] = in[threadIdx.x];
}

// Whether anything may be read of `in` that nobody has written is up to the host.
template <bool>
__global__ void unwritten(const uint32_t* in, uint32_t* out) {
  out[threadIdx.x] = in[threadIdx.x];
}
template <bool>
__global__ void unwritten_cp_async(const uint32_t* in, uint32_t* out) {
  __shared__ alignas(16) uint32_t words[kThreads];
  cp_async<4>(&words[threadIdx.x], in + threadIdx.x);
  cp_async_wait_all();
  out[threadIdx.x] = words[threadIdx.x];
}
template <bool>
__global__ void unwritten_bulk(const uint32_t* in, uint32_t* out) {
  copy_and_read<false, false>(in, out);
}

using Kernel = void (*)(const uint32_t*, uint32_t*);
struct Control {
  const char* name;
  Kernel right, faulty;
};
#define CONTROL(name) {#name, name<false>, name<true>}
constexpr Control kControls[] = {CONTROL(past_global),       CONTROL(past_cp_async),   CONTROL(past_shared),
                                 CONTROL(past_bulk),         CONTROL(all_threads),     CONTROL(named_barrier),
                                 CONTROL(bulk_copy),         CONTROL(cp_async_waited), CONTROL(ring),
                                 CONTROL(cp_async_barrier),  CONTROL(divergent),       CONTROL(barrier_init),
                                 CONTROL(ring_of_registers), CONTROL(unwritten),       CONTROL(unwritten_cp_async),
                                 CONTROL(unwritten_bulk),    CONTROL(ring_of_leaders), CONTROL(ring_of_copies),
                                 CONTROL(barrier_of_roles)};

int run(const char* name, bool fault) {
  for (const Control& control : kControls) {
    if (std::strcmp(control.name, name) != 0) continue;
    uint32_t *in = nullptr, *out = nullptr;
    const bool unwritten = fault && std::strncmp(name, "unwritten", 9) == 0;
    cudaError_t error = cudaMalloc(&in, 4 * kThreads);
    if (error == cudaSuccess) error = cudaMalloc(&out, 4 * kThreads);
    if (error == cudaSuccess && !unwritten) error = cudaMemset(in, 1, 4 * kThreads);
    if (error != cudaSuccess) {
      std::printf("controls: %s\n", cudaGetErrorString(error));
      return 3;
    }
    (fault ? control.faulty : control.right)<<<1, kThreads, 4 * kThreads>>>(in, out);
    error = cudaGetLastError();
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    std::printf("controls: %s%s: %s\n", name, fault ? ", fault" : "", cudaGetErrorString(error));
    return error == cudaSuccess || fault ? 0 : 4;
  }
  std::printf("controls: no control %s\n", name);
  return 2;
}

}  // namespace dsv4::control

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  return dsv4::control::run(argv[1], argc > 2 && std::strcmp(argv[2], "fault") == 0);
}

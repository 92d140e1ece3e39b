// What threads and kernels wait by, one wrapper for each instruction.
#pragma once

#include "memory.cuh"

namespace dsv4 {

// barrier `id` of `threads` threads
template <int id, int threads>
__device__ __forceinline__ void sync_threads() {
  asm volatile("bar.sync %0, %1;" ::"n"(id), "n"(threads) : "memory");
}
template <int threads>
__device__ __forceinline__ void sync_threads(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(threads) : "memory");
}

// A barrier, by its address in shared memory. Its phases have numbers 0, 1, 0, 1 ...; one ends with the last of the arrivals that it expects.
struct Barrier {
  uint32_t address;

  __device__ __forceinline__ void init(int arrivals) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
  }
  __device__ __forceinline__ void arrive() const { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory"); }
  // and the phase ends only when so many bytes have come as well
  __device__ __forceinline__ void arrive_expect(uint32_t bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
  }
  // once this thread's copies so far are done
  __device__ __forceinline__ void arrive_copies() const {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address) : "memory");
  }
  // for the end of the phase of this number
  __device__ __forceinline__ void wait(uint32_t phase) const {
    asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }" ::"r"(address), "r"(phase)
                 : "memory");
  }
  __device__ __forceinline__ const Barrier* operator->() const { return this; }
};
// Barriers as members of what lies in shared memory: many[i].wait(phase), one->wait(phase).
template <int kCount = 1>
struct Barriers {
  uint64_t words[kCount];

  __device__ __forceinline__ Barrier operator[](int i) const { return {shared_address(words) + 8 * i}; }
  template <int kFirst>
  __device__ __forceinline__ Barrier behind(int i) const {  // of several kinds: the i-th of those from kFirst on
    return {shared_address(words) + 8 * kFirst + 8 * i};
  }
  __device__ __forceinline__ Barrier operator->() const {
    static_assert(kCount == 1);
    return {shared_address(words)};
  }
};
// Makes the thread's initialisations known to the unit that copies in bulk.
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Registers of each thread of these four warps, which all come here, from now on: more or fewer than before.
template <int kCount, bool kMore>
__device__ __forceinline__ void set_registers() {
  if constexpr (kMore) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
  }
}
// one lane of a full warp
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}\n" : "=r"(elected));
  return elected;
}

// For a wait that would never end: the process's next CUDA call, and every one after it, returns cudaErrorLaunchFailure. No assert,
// which would name kernel and block: a kernel that has one, reached or not, takes 0.5 us longer (mhc at 1 row, 4.85 for 4.39).
__device__ __forceinline__ void give_up() { __trap(); }

// Programmatic dependent launch: nothing that the predecessor wrote may be read before the wait.
__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void pdl_trigger() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace dsv4

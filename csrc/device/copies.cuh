// Asynchronous copies to shared memory, one wrapper for each instruction.
#pragma once

#include "barriers.cuh"

namespace dsv4 {

// copies 16 or 8 bytes, or zeros where not `valid`
__device__ __forceinline__ void cp_async_16(uint32_t dst, uint64_t src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_16_if(bool when, uint32_t dst, uint64_t src, bool valid) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %3, 0; @p cp.async.cg.shared.global [%0], [%1], 16, %2; }" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0),
               "r"(static_cast<int>(when))
               : "memory");
}
__device__ __forceinline__ void cp_async_8_if(bool when, uint32_t dst, uint64_t src, bool valid) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %3, 0; @p cp.async.ca.shared.global [%0], [%1], 8, %2; }" ::"r"(dst), "l"(src), "r"(valid ? 8 : 0),
               "r"(static_cast<int>(when))
               : "memory");
}
// kBytes, 4, 8 or 16, through the L1
template <int kBytes>
__device__ __forceinline__ void cp_async(void* dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(dst)), "l"(src), "n"(kBytes) : "memory");
}
// 16 bytes of weights, which are read once
__device__ __forceinline__ void cp_async_stream(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// `bytes`, a multiple of 16, from 16-byte boundaries to such; past the queue in which a multiprocessor's loads wait for each other
__device__ __forceinline__ void copy_bulk(uint32_t dst, const void* src, uint32_t bytes, const Barrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src), "r"(bytes),
               "r"(barrier.address)
               : "memory");
}
// What this thread did to shared memory comes before bulk copies that are asked for after a barrier.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace dsv4

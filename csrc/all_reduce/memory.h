// Memory in which cards find each other's terms: a card's own, which other processes open, and host memory, which all have mapped.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "../check.h"

namespace dsv4::all_reduce {

constexpr char kMemory[] = "all_reduce memory";

// Of the current device, by cudaMalloc and not torch's, whose segments cannot always be opened by others. Every byte is 0xff: kNothing.
inline void* allocate(int64_t bytes) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, bytes), kMemory, "cudaMalloc");
  check_cuda(cudaMemset(memory, 0xff, bytes), kMemory, "cudaMemset");
  check_cuda(cudaDeviceSynchronize(), kMemory, "cudaDeviceSynchronize");
  return memory;
}
inline void release(void* memory) { check_cuda(cudaFree(memory), kMemory, "cudaFree"); }

inline std::string handle_of(void* memory) {
  cudaIpcMemHandle_t handle;
  check_cuda(cudaIpcGetMemHandle(&handle, memory), kMemory, "cudaIpcGetMemHandle");
  return std::string(reinterpret_cast<const char*>(&handle), sizeof(handle));
}
// Another process's, as the current device sees it.
inline void* open_handle(const std::string& bytes) {
  cudaIpcMemHandle_t handle;
  if (bytes.size() != sizeof(handle)) throw std::runtime_error("all_reduce memory: no handle");
  std::memcpy(&handle, bytes.data(), sizeof(handle));
  void* memory = nullptr;
  check_cuda(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess), kMemory, "cudaIpcOpenMemHandle");
  return memory;
}
inline void close_handle(void* memory) { check_cuda(cudaIpcCloseMemHandle(memory), kMemory, "cudaIpcCloseMemHandle"); }

// Host memory that this process has mapped, as the current device sees it.
inline void* register_host(void* memory, int64_t bytes) {
  check_cuda(cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped), kMemory, "cudaHostRegister");
  void* seen = nullptr;
  check_cuda(cudaHostGetDevicePointer(&seen, memory, 0), kMemory, "cudaHostGetDevicePointer");
  return seen;
}
inline void unregister_host(void* memory) { check_cuda(cudaHostUnregister(memory), kMemory, "cudaHostUnregister"); }

}  // namespace dsv4::all_reduce

// Memory of the sums between cards: the calls of CUDA's runtime.
#include "memory.h"

#include <cstring>
#include <stdexcept>

#include "../check.h"

namespace dsv4::all_reduce {

static constexpr char kMemory[] = "all_reduce memory";

void* allocate(int64_t bytes) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, bytes), kMemory, "cudaMalloc");
  check_cuda(cudaMemset(memory, 0xff, bytes), kMemory, "cudaMemset");
  check_cuda(cudaDeviceSynchronize(), kMemory, "cudaDeviceSynchronize");
  return memory;
}
void release(void* memory) { check_cuda(cudaFree(memory), kMemory, "cudaFree"); }

std::string handle_of(void* memory) {
  cudaIpcMemHandle_t handle;
  check_cuda(cudaIpcGetMemHandle(&handle, memory), kMemory, "cudaIpcGetMemHandle");
  return std::string(reinterpret_cast<const char*>(&handle), sizeof(handle));
}
void* open_handle(const std::string& bytes) {
  cudaIpcMemHandle_t handle;
  if (bytes.size() != sizeof(handle)) throw std::runtime_error("all_reduce memory: no handle");
  std::memcpy(&handle, bytes.data(), sizeof(handle));
  void* memory = nullptr;
  check_cuda(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess), kMemory, "cudaIpcOpenMemHandle");
  return memory;
}
void close_handle(void* memory) { check_cuda(cudaIpcCloseMemHandle(memory), kMemory, "cudaIpcCloseMemHandle"); }

void* register_host(void* memory, int64_t bytes) {
  check_cuda(cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped), kMemory, "cudaHostRegister");
  void* seen = nullptr;
  check_cuda(cudaHostGetDevicePointer(&seen, memory, 0), kMemory, "cudaHostGetDevicePointer");
  return seen;
}
void unregister_host(void* memory) { check_cuda(cudaHostUnregister(memory), kMemory, "cudaHostUnregister"); }

}  // namespace dsv4::all_reduce

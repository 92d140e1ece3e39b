// Turns a CUDA error into an exception that names the kernel and the call.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace dsv4 {

inline void check_cuda(cudaError_t error, const char* kernel, const char* call) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(kernel) + ": " + call + " failed: " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")");
  }
}

}  // namespace dsv4

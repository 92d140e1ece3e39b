// Launching with dynamic shared memory and programmatic dependence, for all kernels of the index selection.
#pragma once

#include "../check.h"
#include "config.h"

namespace dsv4::index_select {

// Once per device and kernel: `configured` is the caller's own.
inline void allow_shared(void* function, int bytes, uint64_t& configured) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "index_select", "cudaGetDevice");
  if (device < 64 && (configured >> device & 1)) return;
  check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "index_select", "cudaFuncSetAttribute");
  if (device < 64) configured |= uint64_t{1} << device;
}

template <typename Params>
void launch_kernel(void* function, const Params& params, dim3 grid, int threads, int shared_bytes, bool pdl, cudaStream_t stream,
                   const char* name) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = pdl ? 1 : 0;
  void* arguments[] = {const_cast<Params*>(&params)};
  check_cuda(cudaLaunchKernelExC(&config, function, arguments), name, "launch");
}

inline KernelAttributes attributes_of(void* function, const std::string& name, int threads, int shared_bytes) {
  cudaFuncAttributes a = {};
  check_cuda(cudaFuncGetAttributes(&a, function), "index_select", "cudaFuncGetAttributes");
  int blocks = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, threads, shared_bytes), "index_select", "occupancy query");
  return {name, a.numRegs, static_cast<int>(a.sharedSizeBytes) + shared_bytes, static_cast<int>(a.localSizeBytes), blocks};
}

}  // namespace dsv4::index_select

#include "stream.h"

#include <cuda.h>

#include "check.h"

namespace dsv4 {

namespace {

// A function of the driver, or nullptr where it has none of that name: a driver older than CUDA 12.4 has no green contexts.
template <typename Function>
Function* driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult answer = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12040, cudaEnableDefault, &answer);
  return error == cudaSuccess && answer == cudaDriverEntryPointSuccess ? reinterpret_cast<Function*>(found) : nullptr;
}

}  // namespace

unsigned long long capture_id(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
#if CUDART_VERSION >= 13000
  check_cuda(cudaStreamGetCaptureInfo(stream, &status, &id), "stream", "cudaStreamGetCaptureInfo");
#else
  check_cuda(cudaStreamGetCaptureInfo_v2(stream, &status, &id), "stream", "cudaStreamGetCaptureInfo");
#endif
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

int stream_sms(cudaStream_t stream, int of_device) {
  static const auto green_of = driver_function<CUresult(CUstream, CUgreenCtx*)>("cuStreamGetGreenCtx");
  static const auto resource_of = driver_function<CUresult(CUgreenCtx, CUdevResource*, CUdevResourceType)>("cuGreenCtxGetDevResource");
  CUgreenCtx green = nullptr;
  if (green_of == nullptr || resource_of == nullptr || green_of(stream, &green) != CUDA_SUCCESS || green == nullptr) return of_device;
  CUdevResource resource = {};
  if (resource_of(green, &resource, CU_DEV_RESOURCE_TYPE_SM) != CUDA_SUCCESS || resource.sm.smCount == 0) return of_device;
  return static_cast<int>(resource.sm.smCount);
}

}  // namespace dsv4

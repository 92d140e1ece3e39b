// Choice and launch of the bf16 linear kernels.
#include <algorithm>
#include <stdexcept>

#include "../check.h"
#include "kernel.cuh"

namespace dsv4::bf16_linear {

namespace {

constexpr char kName[] = "bf16_linear";

template <int kOutputs, typename Use>
void with_tiles(int rows, Use use) {
  if (rows <= 8) return use(Config<kOutputs, 1>{});
  if (rows <= 16) return use(Config<kOutputs, 2>{});
  return use(Config<kOutputs, 4>{});
}

// The most weights a block that still leave most multiprocessors one; sums do not depend on it.
int outputs_of_a_block(int outputs, int num_sms) {
  for (const int wanted : {16, 8}) {
    if (outputs % wanted == 0 && outputs / wanted * 4 >= num_sms * 3) return wanted;
  }
  return 4;
}

template <typename Use>
void with_config(int rows, int outputs_a_block, Use use) {
  if (outputs_a_block == 16) return with_tiles<16>(rows, use);
  if (outputs_a_block == 8) return with_tiles<8>(rows, use);
  return with_tiles<4>(rows, use);
}

template <typename C>
void allow_shared() {
  static bool done[64] = {};
  int device = 0;
  check_cuda(cudaGetDevice(&device), kName, "cudaGetDevice");
  if (device < 64 && done[device]) return;
  const int shared = sizeof(typename C::Shared);
  check_cuda(cudaFuncSetAttribute(&bf16_linear_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), kName, "cudaFuncSetAttribute");
  if (device < 64) done[device] = true;
}

template <typename C>
KernelAttributes attributes_of(const char* name) {
  allow_shared<C>();
  void (*const kernel)(Params) = &bf16_linear_kernel<C>;
  const int shared = sizeof(typename C::Shared);
  cudaFuncAttributes a = {};
  check_cuda(cudaFuncGetAttributes(&a, kernel), kName, "cudaFuncGetAttributes");
  int blocks = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, shared), kName, "occupancy query");
  return {name, a.numRegs, static_cast<int>(a.sharedSizeBytes) + shared, static_cast<int>(a.localSizeBytes), blocks};
}

}  // namespace

void launch(const Params& params, int num_sms, bool pdl, cudaStream_t stream) {
  if (params.rows < 1 || params.rows > kMaxRows || params.inputs % kInputsMultiple || params.outputs % kOutputsMultiple)
    throw std::runtime_error("bf16_linear: takes 1 to 32 rows, inputs in multiples of 512, outputs of 4");
  with_config(params.rows, outputs_of_a_block(params.outputs, num_sms), [&](auto c) {
    using C = decltype(c);
    allow_shared<C>();
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(params.outputs / C::kOutputs);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = sizeof(typename C::Shared);
    config.stream = stream;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = pdl ? 1 : 0;
    check_cuda(cudaLaunchKernelEx(&config, &bf16_linear_kernel<C>, params), kName, "launch");
  });
}

std::vector<KernelAttributes> kernel_attributes() {
  return {attributes_of<Config<16, 1>>("bf16_linear_16x8"), attributes_of<Config<8, 1>>("bf16_linear_8x8"),
          attributes_of<Config<4, 1>>("bf16_linear_4x8"), attributes_of<Config<16, 4>>("bf16_linear_16x32")};
}

int shared_bytes() { return sizeof(Config<16, 4>::Shared); }

}  // namespace dsv4::bf16_linear

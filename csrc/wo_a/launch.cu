// Launch of the expansion.
#include <stdexcept>

#include "kernel.cuh"

namespace dsv4::wo_a {

namespace {

constexpr char kName[] = "wo_a";

}  // namespace

void launch(const Params& params, bool pdl, cudaStream_t stream) {
  if (params.weight_rows < kBlock || params.weight_rows % kBlock || params.inputs < kBlock || params.inputs % kBlock)
    throw std::runtime_error("wo_a: takes weight rows and inputs in multiples of 128");
  const Launcher launcher = {kName, pdl, stream};
  launcher(&expand_kernel, dim3(params.weight_rows / kRows), kThreads, 0, params);
}

std::vector<KernelAttributes> kernel_attributes() {
  return {attributes_of(kName, reinterpret_cast<const void*>(&expand_kernel), "wo_a_expand", kThreads, 0)};
}

}  // namespace dsv4::wo_a

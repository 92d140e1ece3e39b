// Choice and launch of the bf16 linear kernels.
#include <algorithm>
#include <stdexcept>

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
const void* allowed_kernel() {
  static uint64_t configured = 0;
  const void* kernel = reinterpret_cast<const void*>(&bf16_linear_kernel<C>);
  allow_shared(kName, kernel, sizeof(typename C::Shared), configured);
  return kernel;
}

template <typename C>
KernelAttributes describe(const char* name) {
  return attributes_of(kName, allowed_kernel<C>(), name, kThreads, sizeof(typename C::Shared));
}

}  // namespace

void launch(const Params& params, int num_sms, bool pdl, cudaStream_t stream) {
  if (params.rows < 1 || params.rows > kMaxRows || params.inputs % kInputsMultiple || params.outputs % kOutputsMultiple)
    throw std::runtime_error("bf16_linear: takes 1 to 32 rows, inputs in multiples of 512, outputs of 4");
  with_config(params.rows, outputs_of_a_block(params.outputs, num_sms), [&](auto c) {
    using C = decltype(c);
    allowed_kernel<C>();
    const Launcher launcher = {kName, pdl, stream};
    launcher(&bf16_linear_kernel<C>, dim3(params.outputs / C::kOutputs), kThreads, sizeof(typename C::Shared), params);
  });
}

std::vector<KernelAttributes> kernel_attributes() {
  return {describe<Config<16, 1>>("bf16_linear_16x8"), describe<Config<8, 1>>("bf16_linear_8x8"), describe<Config<4, 1>>("bf16_linear_4x8"),
          describe<Config<16, 4>>("bf16_linear_16x32")};
}

int shared_bytes() { return sizeof(Config<16, 4>::Shared); }

}  // namespace dsv4::bf16_linear

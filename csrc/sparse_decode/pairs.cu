// Launch of the kernel for few rows in pairs. By itself: nvcc makes other code of it for SM120 than for its family (build_artifact.py).
#include "wide.cuh"

#include "kernels.h"

namespace dsv4::sparse_decode::pairs {

namespace {

template <bool kTable>
using PairsKernel = Kernel<&sparse_decode_pairs_kernel<kTable>, kThreads, sizeof(Memory)>;
using WideKernel = Kernel<&sparse_decode_wide_kernel, kThreads, sizeof(WideMemory)>;

}  // namespace

void launch(Params params, const Plan& plan, const Launcher& launcher) {
  const bool wide = params.heads > kBlockHeads && params.extra_table.pages == nullptr;
  params.head_blocks = ceil_div(params.heads, wide ? kWideHeads : kBlockHeads);
  const dim3 grid(plan.pair_blocks);
  if (wide) {
    WideKernel::launch(params, grid, launcher);
  } else if (params.extra_table.pages == nullptr) {
    PairsKernel<false>::launch(params, grid, launcher);
  } else {
    PairsKernel<true>::launch(params, grid, launcher);
  }
}

std::vector<KernelAttributes> kernel_attributes() {
  return {PairsKernel<false>::attributes("sparse_decode_pairs"), PairsKernel<true>::attributes("sparse_decode_pairs, page table"),
          WideKernel::attributes("sparse_decode_wide")};
}

std::vector<std::pair<std::string, int>> shared_bytes() {
  return {{"sparse_decode_pairs_kernel", PairsKernel<false>::kShared}, {"sparse_decode_wide_kernel", WideKernel::kShared}};
}

}  // namespace dsv4::sparse_decode::pairs

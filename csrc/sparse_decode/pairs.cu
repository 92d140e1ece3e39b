// Launch of the kernel for few rows in pairs. By itself: nvcc makes other code of it for SM120 than for its family (build_artifact.py).
#include "pairs.cuh"

#include "kernels.h"

namespace dsv4::sparse_decode::pairs {

namespace {

template <bool kOneRow, bool kTable>
using PairsKernel = Kernel<&sparse_decode_pairs_kernel<kOneRow, kTable>, kThreads, sizeof(Memory)>;

}  // namespace

void launch(Params params, const Plan& plan, const Launcher& launcher) {
  const bool pair = params.heads > kBlockHeads && params.extra_table.pages == nullptr;
  params.head_blocks = ceil_div(params.heads, (pair ? kGroups : 1) * kBlockHeads);
  const dim3 grid(plan.pair_blocks);
  if (pair) {
    PairsKernel<true, false>::launch(params, grid, launcher);
  } else if (params.extra_table.pages == nullptr) {
    PairsKernel<false, false>::launch(params, grid, launcher);
  } else {
    PairsKernel<false, true>::launch(params, grid, launcher);
  }
}

std::vector<KernelAttributes> kernel_attributes() {
  return {PairsKernel<false, false>::attributes("sparse_decode_pairs"), PairsKernel<true, false>::attributes("sparse_decode_pairs, 32 heads"),
          PairsKernel<false, true>::attributes("sparse_decode_pairs, page table")};
}

std::vector<std::pair<std::string, int>> shared_bytes() { return {{"sparse_decode_pairs_kernel", PairsKernel<false, false>::kShared}}; }

}  // namespace dsv4::sparse_decode::pairs

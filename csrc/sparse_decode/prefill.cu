// Launch of the kernels for many rows. By themselves: nvcc makes other code of them for SM120 than for its family (build_artifact.py).
#include "prefill.cuh"

#include "kernels.h"
#include "stacked.cuh"

namespace dsv4::sparse_decode::prefill {

namespace {

template <bool kTable>
using PrefillKernel = Kernel<&sparse_prefill_kernel<kTable>, kThreads, sizeof(PrefillMemory)>;
template <bool kTable>
using StackedKernel = Kernel<&sparse_prefill_stacked_kernel<kTable>, kThreads, sizeof(StackedMemory)>;

template <bool kTable>
void launch_kernel(const Params& p, const Plan& plan, const Launcher& launcher) {
  if (plan.stacked_log2 > 0) {
    StackedKernel<kTable>::launch(p, dim3(plan.prefill_blocks), launcher);
  } else {
    PrefillKernel<kTable>::launch(p, dim3(plan.prefill_blocks), launcher);
  }
}

}  // namespace

void launch(Params params, const Plan& plan, const Launcher& launcher) {
  params.head_blocks = plan.head_groups;
  params.stacked_log2 = plan.stacked_log2;
  if (params.extra_table.pages != nullptr) {
    launch_kernel<true>(params, plan, launcher);
  } else {
    launch_kernel<false>(params, plan, launcher);
  }
}

std::vector<KernelAttributes> kernel_attributes() {
  return {PrefillKernel<false>::attributes("sparse_prefill"), PrefillKernel<true>::attributes("sparse_prefill, page table"),
          StackedKernel<false>::attributes("sparse_prefill_stacked"), StackedKernel<true>::attributes("sparse_prefill_stacked, page table")};
}

std::vector<std::pair<std::string, int>> shared_bytes() {
  return {{"sparse_prefill_kernel", PrefillKernel<false>::kShared}, {"sparse_prefill_stacked_kernel", StackedKernel<false>::kShared}};
}

}  // namespace dsv4::sparse_decode::prefill

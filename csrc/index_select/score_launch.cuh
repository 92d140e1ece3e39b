// The launcher of the score kernels of one format.
#pragma once

#include "score.cuh"

namespace dsv4::index_select {

template <Format kFormat, int kRows>
struct ScoreKernel {
  static constexpr int kSharedBytes = sizeof(ScoreShared<kFormat, kRows>);
  static constexpr auto kKernel = &score_kernel<static_cast<int>(kFormat), kRows>;
  static const void* allowed() {
    static uint64_t configured = 0;
    const void* kernel = reinterpret_cast<const void*>(kKernel);
    allow_shared(kName, kernel, kSharedBytes, configured);
    return kernel;
  }
  static void launch(const ScoreParams& p, bool pdl, cudaStream_t stream) {
    allowed();
    const dim3 grid(p.split.splits, ceil_div(p.split.rows, kRows));
    Launcher{kName, pdl, stream}(kKernel, grid, threads_of(kRows), kSharedBytes, p);
  }
  static KernelAttributes attributes() {
    const char* format = kFormat == Format::kFp8Half ? "fp8_by_f16" : kFormat == Format::kFp8 ? "fp8" : "fp4";
    const std::string name = std::string("index_score_") + format + (kRows == 1 ? "_row" : "_shared");
    return attributes_of(kName, allowed(), name, threads_of(kRows), kSharedBytes);
  }
};

template <Format kFormat>
void launch_score_format(const ScoreParams& p, bool pdl, cudaStream_t stream) {
  p.split.group_rows == 1 ? ScoreKernel<kFormat, 1>::launch(p, pdl, stream) : ScoreKernel<kFormat, kSharedRows>::launch(p, pdl, stream);
}
template <Format kFormat>
KernelAttributes score_attributes(int group_rows) {
  return group_rows == 1 ? ScoreKernel<kFormat, 1>::attributes() : ScoreKernel<kFormat, kSharedRows>::attributes();
}

}  // namespace dsv4::index_select

// Which kernel a compressor's rows get.
#include <stdexcept>

#include "kernel.cuh"

namespace dsv4::compressor {

namespace {

constexpr char kName[] = "compressor";

}  // namespace

void launch(const Params& params, int ratio, Entry entry, bool pdl, cudaStream_t stream) {
  const Launcher launcher = {kName, pdl, stream};
  const dim3 index_grid(ceil_div(params.rows, kIndexRows));
  if (ratio == 4 && entry == Entry::kKv) {
    launcher(&short_kernel, dim3(params.rows), kEntryThreads, 0, params);
  } else if (ratio == 4 && entry == Entry::kIndexFp8) {
    launcher(&index_kernel<false>, index_grid, kIndexThreads, 0, params);
  } else if (ratio == 4 && entry == Entry::kIndexFp4) {
    launcher(&index_kernel<true>, index_grid, kIndexThreads, 0, params);
  } else if (ratio == kLongGroup && entry == Entry::kKv) {
    launcher(&long_kernel, dim3(kSplits, params.rows), kLongThreads, 0, params);
  } else {
    throw std::runtime_error("compressor: no kernel for groups of " + std::to_string(ratio));
  }
}

std::vector<KernelAttributes> kernel_attributes() {
  const auto one = [](const void* kernel, const char* name, int threads) { return attributes_of(kName, kernel, name, threads, 0); };
  return {one(reinterpret_cast<const void*>(&short_kernel), "compressor_short", kEntryThreads),
          one(reinterpret_cast<const void*>(&index_kernel<false>), "compressor_index_fp8", kIndexThreads),
          one(reinterpret_cast<const void*>(&index_kernel<true>), "compressor_index_fp4", kIndexThreads),
          one(reinterpret_cast<const void*>(&long_kernel), "compressor_long", kLongThreads)};
}

}  // namespace dsv4::compressor

// Which kernel a compressor's rows get.
#include <algorithm>
#include <stdexcept>

#include "many.cuh"

namespace dsv4::compressor {

namespace {

constexpr char kName[] = "compressor";

}  // namespace

void launch(const Params& params, int ratio, Entry entry, bool many, bool pdl, cudaStream_t stream) {
  const Launcher launcher = {kName, pdl, stream};
  if (many && std::max(params.entries, params.num_writes) > kMostOfAStep)
    throw std::runtime_error("compressor: takes at most 512 entries and writes");
  const int count = many ? std::max(params.entries, params.num_writes) : params.rows;
  const dim3 index_grid(ceil_div(count, kIndexRows));
  if (many && ratio == 4 && entry == Entry::kKv) {
    launcher(&short_many_kernel, dim3(count), kEntryThreads, 0, params);
  } else if (many && ratio == 4) {
    launcher(entry == Entry::kIndexFp4 ? &index_many_kernel<true> : &index_many_kernel<false>, index_grid, kIndexThreads, 0, params);
  } else if (many && ratio == kLongGroup && entry == Entry::kKv) {
    const dim3 grid(kSplits, std::min(params.entries, kLongEntryBlocks) + ceil_div(params.num_writes, kLongWarps));
    launcher(&long_many_kernel, grid, kLongThreads, 0, params);
  } else if (ratio == 4 && entry == Entry::kKv) {
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
          one(reinterpret_cast<const void*>(&long_kernel), "compressor_long", kLongThreads),
          one(reinterpret_cast<const void*>(&short_many_kernel), "compressor_many_short", kEntryThreads),
          one(reinterpret_cast<const void*>(&index_many_kernel<false>), "compressor_many_index_fp8", kIndexThreads),
          one(reinterpret_cast<const void*>(&index_many_kernel<true>), "compressor_many_index_fp4", kIndexThreads),
          one(reinterpret_cast<const void*>(&long_many_kernel), "compressor_many_long", kLongThreads)};
}

}  // namespace dsv4::compressor

// The kernels of one prologue, for every variant.
#pragma once

#include <iterator>
#include <utility>

#include "kernel.cuh"

namespace dsv4::fp8_linear {

template <Prologue kPrologue, size_t... kIndices>
const LinearKernel* instances(std::index_sequence<kIndices...>) {
  static constexpr LinearKernel kKernels[] = {
      &linear_kernel<Config<kVariants[kIndices].column_tiles, kVariants[kIndices].row_tiles, kVariants[kIndices].warp_rows,
                            static_cast<int>(kPrologue)>>...};
  return kKernels;
}

template <Prologue kPrologue>
const LinearKernel* kernels() {
  constexpr bool kMakes = kPrologue == Prologue::kSwiglu || kPrologue == Prologue::kNorm;
  return instances<kPrologue>(std::make_index_sequence<kMakes ? kMakingVariants : std::size(kVariants)>());
}

}  // namespace dsv4::fp8_linear

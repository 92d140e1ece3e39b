// The kernels for few rows, for each number of warps beside each other.
#pragma once

#include <iterator>
#include <utility>

#include "kernel.cuh"

namespace dsv4::fp8_linear {

template <bool kRotates, size_t... kIndices>
const LinearKernel* instances(std::index_sequence<kIndices...>) {
  static constexpr LinearKernel kKernels[] = {&linear_kernel<Config<kWarpRows[kIndices], kRotates>>...};
  return kKernels;
}

template <bool kRotates>
const LinearKernel* kernels() {
  return instances<kRotates>(std::make_index_sequence<std::size(kWarpRows)>());
}

}  // namespace dsv4::fp8_linear

// The kernels of one prologue for few rows, for each number of warps beside each other.
#pragma once

#include <iterator>
#include <utility>

#include "prologues.cuh"

namespace dsv4::fp8_linear {

template <Prologue kPrologue, size_t... kIndices>
const LinearKernel* instances(std::index_sequence<kIndices...>) {
  static constexpr LinearKernel kKernels[] = {&linear_kernel<Config<kWarpRows[kIndices], static_cast<int>(kPrologue)>>...};
  return kKernels;
}

template <Prologue kPrologue>
const LinearKernel* kernels() {
  return instances<kPrologue>(std::make_index_sequence<std::size(kWarpRows)>());
}

}  // namespace dsv4::fp8_linear

// What the launchers of the kernels for few rows and for many have in common.
#pragma once

#include "../launch_kernel.h"
#include "sparse_decode.h"

namespace dsv4::sparse_decode {

constexpr char kName[] = "sparse_decode";

// A kernel, by what a launch needs to know of it.
template <void (*kKernel)(Params), int kThreadCount, int kSharedBytes>
struct Kernel {
  static constexpr int kThreads = kThreadCount, kShared = kSharedBytes;

  static const void* allowed() {
    static uint64_t configured = 0;
    const void* kernel = reinterpret_cast<const void*>(kKernel);
    allow_shared(kName, kernel, kShared, configured);
    return kernel;
  }
  static void launch(const Params& params, dim3 grid, const Launcher& launcher) {
    allowed();
    launcher(kKernel, grid, kThreads, kShared, params);
  }
  static KernelAttributes attributes(const char* name) { return attributes_of(kName, allowed(), name, kThreads, kShared); }
};

// prefill.cu
namespace prefill {

constexpr int kMinStackedLog2 = 3, kMaxStackedLog2 = 5;  // of the lines of a row
constexpr int kHeadsLog2 = 6;
constexpr int kHeads = 1 << kHeadsLog2;                  // of a block

void launch(Params params, const Plan& plan, const Launcher& launcher);
std::vector<KernelAttributes> kernel_attributes();
std::vector<std::pair<std::string, int>> shared_bytes();

}  // namespace prefill

// pairs.cu
namespace pairs {

constexpr int kGroups = 2;  // of 16 heads, of a block

void launch(Params params, const Plan& plan, const Launcher& launcher);
std::vector<KernelAttributes> kernel_attributes();
std::vector<std::pair<std::string, int>> shared_bytes();

}  // namespace pairs
}  // namespace dsv4::sparse_decode

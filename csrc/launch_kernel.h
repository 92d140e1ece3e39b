// What the launchers of all operators share: programmatic dependent launch, shared memory above 48 KB, kernel attributes.
//
// Kernels whose blocks wait for other blocks of their grid, and why none of them waits for ever. No other kernel's do.
//
//   mhc fused_kernel, adding_kernel
//                              a row's block waits for the sums of the mixing blocks, which wait for nobody. It is taken only where the
//                              waiting blocks leave one place free on the multiprocessors that the stream has (mhc::fits,
//                              fits_adding): then a mixing block always finds one, in whatever order blocks start, on a GB10, a MIG
//                              slice, a green context. Elsewhere two launches, which have the same bits
//   mhc summing_kernel         the mixing blocks wait for other cards, whose blocks for the same slices wait for these: all blocks of the
//                              grid must be resident (mhc::fits_summing, by the smallest card's multiprocessors), so what is waited for
//                              has begun or finds a place. Elsewhere a sum of its own and fused_kernel
//   mhc many_kernel            32 blocks have a row's columns and wait for each other: a cooperative launch of as many times 32 as
//                              are resident; where 32 are not, or other processes' kernels run on the card (card_is_shared), two launches
//   sparse_decode_kernel       where blocks share a row: a block waits for the row's others 0.1 ms at most, then leaves its part of
//                              the merge to the one that comes last
//   compressor long_kernel     nobody waits: the last of a row's eight blocks to arrive stores; so of long_many_kernel
//   all_reduce one_shot_kernel, two_shot_kernel, gather_kernel
//                              a block waits for blocks of other cards, which send before they wait; of its own card it waits for none.
//                              The grid is at most two blocks a multiprocessor. Its waits are of seconds (Params::patience_ns) and end
//                              the process's CUDA work, or at once where a rank's process has ended
//
// The words by which they find each other are of one call at a time (zeroed_words.py). Should they not come all the same, the blocks of
// mhc's end the process's CUDA work (give_up in device/barriers.cuh) after kPatienceLooks looks; for other cards they wait as long as the
// group has patience (csrc/all_reduce/turn.cuh).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <utility>

#include "check.h"
#include "numbers.h"

namespace dsv4 {

// How often a block looks for what another block owes it before it gives up. A look is a trip to the L2, 0.3 us and more: 20 s at least,
// thousands of steps of a model. Looks and not time: a process that a debugger or another process has stopped does not look.
constexpr uint32_t kPatienceLooks = 1u << 26;

struct KernelAttributes {
  std::string name;
  int registers, shared_bytes, local_bytes, blocks_per_sm;
};

// Launches on `stream`; with `pdl` before the kernel in front has ended, so the kernel must wait for it. `name`: for errors.
struct Launcher {
  const char* name;
  bool pdl;
  cudaStream_t stream;

  template <typename... Parameters, typename... Arguments>
  void operator()(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared, const Arguments&... arguments) const {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    launch(attribute, pdl ? 1 : 0, kernel, grid, threads, shared, arguments...);
  }

  // All blocks are resident at once, or the launch fails: for kernels whose blocks wait for each other. Never with `pdl`.
  template <typename... Parameters, typename... Arguments>
  void cooperative(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared, const Arguments&... arguments) const {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    launch(attribute, 1, kernel, grid, threads, shared, arguments...);
  }

 private:
  template <typename... Parameters, typename... Arguments>
  void launch(cudaLaunchAttribute attribute, unsigned attributes, void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared,
              const Arguments&... arguments) const {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = attributes;
    check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...), name, "launch");
  }
};

// Lets `kernel` have that much dynamic shared memory, once per device; `configured` is the caller's own, one for each kernel.
inline void allow_shared(const char* name, const void* kernel, int bytes, uint64_t& configured) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), name, "cudaGetDevice");
  if (device < 64 && (configured >> device & 1)) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), name, "cudaFuncSetAttribute");
  if (device < 64) configured |= uint64_t{1} << device;
}

// `shared`: dynamic bytes, already allowed
inline KernelAttributes attributes_of(const char* name, const void* kernel, std::string kernel_name, int threads, int shared) {
  cudaFuncAttributes a = {};
  check_cuda(cudaFuncGetAttributes(&a, kernel), name, "cudaFuncGetAttributes");
  int blocks = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared), name, "occupancy query");
  return {std::move(kernel_name), a.numRegs, static_cast<int>(a.sharedSizeBytes) + shared, static_cast<int>(a.localSizeBytes), blocks};
}

}  // namespace dsv4

// The boundary of few rows that makes the last addition of this card's f, where no sum between cards does: kernel and launch.
#include <stdexcept>

#include "fused.cuh"

namespace dsv4::mhc {

namespace {

constexpr char kName[] = "mhc";

}  // namespace

// f is what p.term makes of p.boundary.f.
__global__ void __launch_bounds__(kFusedThreads, 2) adding_kernel(const __grid_constant__ AddingParams p) {
  take_part<true, false>(p.boundary, OwnTerm{p.boundary.f, p.term, p.boundary.rows});
}

namespace {

int blocks_per_sm() {  // asked once per device
  static int known[64] = {};
  int device = 0;
  check_cuda(cudaGetDevice(&device), kName, "cudaGetDevice");
  if (device < 64 && known[device] > 0) return known[device];
  const int blocks = adding_attributes().blocks_per_sm;
  if (device < 64) known[device] = blocks;
  return blocks;
}

}  // namespace

bool fits_adding(int rows, int num_sms) { return rows < blocks_per_sm() * num_sms; }

void launch(const AddingParams& params, int num_sms, bool pdl, cudaStream_t stream) {
  const Params& p = params.boundary;
  const bool is_one = params.term.partial != nullptr ? params.term.routed == nullptr : params.term.routed != nullptr && p.f != nullptr;
  if (!is_one || p.hidden != kFlashHidden || p.fn == nullptr || p.head || p.rows < 1 || p.rows > kFusedRows)
    throw std::runtime_error("mhc: this kernel does not take this form, width or number of rows");
  if (!fits_adding(p.rows, num_sms))
    throw std::runtime_error("mhc: blocks of this kernel wait for each other and cannot all be resident: " + std::to_string(p.rows) + " rows on " +
                             std::to_string(num_sms) + " multiprocessors; the addition alone and the boundary behind it take any number");
  Launcher{kName, pdl, stream}(adding_kernel, dim3(mixing_blocks(p.rows) + p.rows), kFusedThreads, 0, params);
}

KernelAttributes adding_attributes() { return attributes_of(kName, reinterpret_cast<const void*>(&adding_kernel), "mhc_adding", kFusedThreads, 0); }

}  // namespace dsv4::mhc

// Choice and launch of the kernels of the hyper-connections.
#include <algorithm>
#include <stdexcept>

#include "fused.cuh"
#include "many.cuh"
#include "post.cuh"

namespace dsv4::mhc {

namespace {

constexpr char kName[] = "mhc";

using Kernel = void (*)(const Params);

Kernel mix_of(const Params& p) {
  if (p.head) return p.f != nullptr ? mix_kernel<true, true> : mix_kernel<false, true>;
  return p.f != nullptr ? mix_kernel<true, false> : mix_kernel<false, false>;
}

void launch_post(const Params& p, const Launcher& launcher) {
  constexpr int kMostY = 32768;
  const int columns = kMixThreads * kLaneColumns, y = std::min(p.rows, kMostY);
  const dim3 grid(ceil_div(p.hidden, columns), y, ceil_div(p.rows, y));
  launcher(post_kernel, grid, kMixThreads, 0, p);
}

Kernel fused_of(const Params& p) {
  if (p.head) return p.f != nullptr ? fused_kernel<true, true> : fused_kernel<false, true>;
  return p.f != nullptr ? fused_kernel<true, false> : fused_kernel<false, false>;
}

void launch_fused(const Params& p, const Launcher& launcher) { launcher(fused_of(p), dim3(mixing_blocks(p.rows) + p.rows), kFusedThreads, 0, p); }

Kernel finish_of(const Params& p) {
  if (p.hidden == kProHidden) return p.head ? finish_kernel<true, kProHidden> : finish_kernel<false, kProHidden>;
  return p.head ? finish_kernel<true, kFlashHidden> : finish_kernel<false, kFlashHidden>;
}

void launch_split(const Params& p, const Launcher& launcher) {
  const int tiles = ceil_div(p.rows, kTileRows);
  launcher(mix_of(p), dim3(p.hidden / kSliceColumns, std::min(tiles, kMixTiles)), kMixThreads, 0, p);
  launcher(finish_of(p), dim3(p.rows), p.hidden / kLaneColumns + 32, 0, p);
}

// Blocks that a multiprocessor holds; `known` is the caller's own, one for each kernel: asked once per device.
int blocks_per_sm(Kernel kernel, int threads, int shared, int (&known)[64]) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), kName, "cudaGetDevice");
  if (device < 64 && known[device] > 0) return known[device];
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), kName, "cudaFuncSetAttribute");
  int blocks = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared), kName, "occupancy query");
  if (blocks < 1) throw std::runtime_error("mhc: a block does not fit a multiprocessor");
  if (device < 64) known[device] = blocks;
  return blocks;
}

int many_blocks_per_sm() {
  static int known[64] = {};
  return blocks_per_sm(many_kernel, kManyThreads, sizeof(ManyShared), known);
}

int fused_blocks_per_sm() {  // of the form that takes the most registers
  static int known[64] = {};
  return blocks_per_sm(fused_kernel<true, false>, kFusedThreads, 0, known);
}

void launch_many(const Params& p, int num_sms, const Launcher& launcher) {
  const int tiles = ceil_div(p.rows, kTileRows), resident = many_blocks_per_sm() * num_sms / kColumnBlocks;
  launcher.cooperative(many_kernel, dim3(std::min(tiles, resident) * kColumnBlocks), kManyThreads, sizeof(ManyShared), p);
}

bool can_take(Kernels kernels, const Params& p) {
  if (kernels == Kernels::kFused) return p.hidden == kFlashHidden && p.rows <= kFusedRows;
  if (kernels == Kernels::kMany) return p.hidden == kFlashHidden && p.f != nullptr && !p.head;
  return true;
}

template <typename... Parameters>
KernelAttributes describe(const char* name, void (*kernel)(Parameters...), int threads, int shared) {
  return attributes_of(kName, reinterpret_cast<const void*>(kernel), name, threads, shared);
}

}  // namespace

std::string problem(int hidden) {
  if (hidden == kFlashHidden || hidden == kProHidden) return "";
  return "hidden " + std::to_string(kFlashHidden) + " or " + std::to_string(kProHidden) + ", got " + std::to_string(hidden);
}

Kernels kernels_of(const std::string& name) {
  if (name == "fused") return Kernels::kFused;
  if (name == "split") return Kernels::kSplit;
  if (name == "many") return Kernels::kMany;
  throw std::runtime_error("mhc: kernels must be fused, split or many, got " + name);
}

int fused_rows() { return kFusedRows; }

bool fits(Kernels kernels, int rows, int num_sms) {
  if (kernels == Kernels::kFused) return rows < fused_blocks_per_sm() * num_sms;
  return kernels != Kernels::kMany || kColumnBlocks <= many_blocks_per_sm() * num_sms;
}

bool card_is_shared() {
  int device = 0, shared = 0;
  check_cuda(cudaGetDevice(&device), kName, "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&shared, cudaDevAttrMpsEnabled, device), kName, "cudaDeviceGetAttribute");
  return shared != 0;
}

Workspace workspace(int rows, int hidden, bool head, Kernels kernels, bool sums) {
  const bool many = kernels == Kernels::kMany;
  const int64_t slices = hidden / (many ? kManyColumns : kSliceColumns), words = rows * slices * (head ? kWidth<true> : kWidth<false>);
  if (kernels == Kernels::kFused) return {words + (sums ? static_cast<int64_t>(rows) * kRowSums * kSumVectorWords : 0), 0, 0};
  return {0, words * 4, many ? ceil_div(rows, kTileRows) * kCounterWords : 0};
}

void launch(const Params& params, Kernels kernels, int num_sms, bool pdl, cudaStream_t stream) {
  const std::string why_not = problem(params.hidden);
  if (!why_not.empty()) throw std::runtime_error("mhc: takes " + why_not);
  const Launcher launcher = {kName, pdl, stream};
  if (params.fn == nullptr) {
    launch_post(params, launcher);
  } else if (!can_take(kernels, params)) {
    throw std::runtime_error("mhc: these kernels do not take this form, width or number of rows");
  } else if (!fits(kernels, params.rows, num_sms)) {
    throw std::runtime_error("mhc: blocks of these kernels wait for each other and cannot all be resident: " + std::to_string(params.rows) +
                             " rows on " + std::to_string(num_sms) + " multiprocessors; the split kernels take any number");
  } else if (kernels == Kernels::kFused) {
    launch_fused(params, launcher);
  } else if (kernels == Kernels::kMany) {
    launch_many(params, num_sms, launcher);
  } else {
    launch_split(params, launcher);
  }
}

std::vector<KernelAttributes> kernel_attributes() {
  many_blocks_per_sm();  // allows the shared memory
  const int finish_threads = kFlashHidden / kLaneColumns + 32, many = sizeof(ManyShared);
  std::vector<KernelAttributes> all = summing_attributes();
  all.insert(all.end(), {adding_attributes(), describe("mhc_fused", &fused_kernel<true, false>, kFusedThreads, 0),
                         describe("mhc_mix", &mix_kernel<true, false>, kMixThreads, 0),
                         describe("mhc_finish", &finish_kernel<false, kFlashHidden>, finish_threads, 0),
                         describe("mhc_post", &post_kernel, kMixThreads, 0), describe("mhc_many", &many_kernel, kManyThreads, many)});
  return all;
}

int shared_bytes() { return sizeof(ManyShared); }

}  // namespace dsv4::mhc

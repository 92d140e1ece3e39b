// Choice and launch of the kernels for few rows.
#include <algorithm>
#include <stdexcept>

#include "experts.cuh"
#include "scaled.h"
#include "sorted.h"

namespace dsv4::mxfp4_moe {

namespace {

constexpr char kName[] = "mxfp4_moe";

// Pairs of a call at most, rows of a group, blocks of a multiprocessor.
template <int kWarps, int kSlices, int kSteps, bool kGated>
using OneRow = Config<kWarps, kSlices, kSteps, kGated, 2, kOneRowPairs, kWarps <= 8 ? 3 : 1, false>;
template <int kWarps, int kSlices, int kSteps, bool kGated>
using OneRowExact = Config<kWarps, kSlices, kSteps, kGated, 2, kOneRowPairs, kWarps <= 8 ? 3 : 1, true>;
template <int kWarps, int kSlices, int kSteps, bool kGated>
using Mid = Config<kWarps, kSlices, kSteps, kGated, 4, kMidPairs, kWarps <= 8 ? 2 : 1>;
template <int kWarps, int kSlices, int kSteps, bool kGated>
using Many = Config<kWarps, kSlices, kSteps, kGated, kWarps <= 8 ? 8 : 4, kMaxPairs, kWarps <= 8 ? 2 : 1>;

//                 warps slices steps
template <template <int, int, int, bool> typename Size>
using GateUp4096 = Size<8, 8, 4, true>;
template <template <int, int, int, bool> typename Size>
using GateUp7168 = Size<14, 14, 4, true>;
template <template <int, int, int, bool> typename Size>
using Down3072 = Size<8, 8, 3, false>;
template <template <int, int, int, bool> typename Size>
using Down2048 = Size<8, 4, 4, false>;
template <template <int, int, int, bool> typename Size>
using Down1536 = Size<8, 4, 3, false>;
template <template <int, int, int, bool> typename Size>
using Down1024 = Size<8, 2, 4, false>;
template <template <int, int, int, bool> typename Size>
using Down768 = Size<8, 2, 3, false>;
template <template <int, int, int, bool> typename Size>
using Down512 = Size<8, 1, 4, false>;
template <template <int, int, int, bool> typename Size>
using Down384 = Size<8, 1, 3, false>;
template <template <int, int, int, bool> typename Size>
using Down256 = Size<8, 1, 2, false>;
//                         slices steps slots subtiles
template <bool kExact>
using RowDown3072 = SumConfig<8, 3, 1, 1, kExact>;
template <bool kExact>
using RowDown2048 = SumConfig<4, 4, 3, 1, kExact>;
template <bool kExact>
using RowDown1536 = SumConfig<4, 3, 3, 1, kExact>;
template <bool kExact>
using RowDown1024 = SumConfig<2, 4, 6, 1, kExact>;
template <bool kExact>
using RowDown768 = SumConfig<2, 3, 6, 1, kExact>;
template <bool kExact>
using RowDown512 = SumConfig<1, 4, 6, 2, kExact>;
template <bool kExact>
using RowDown384 = SumConfig<1, 3, 6, 2, kExact>;
template <bool kExact>
using RowDown256 = SumConfig<1, 2, 6, 2, kExact>;

// Calls use(Config{}) with the first that has so many inputs; false: there is none.
template <typename Use, typename First, typename... Rest>
bool with_any(int inputs, Use use, First first, Rest... rest) {
  if (inputs == First::kInputs) return use(first), true;
  if constexpr (sizeof...(Rest) > 0) {
    return with_any(inputs, use, rest...);
  } else {
    return false;
  }
}

template <template <int, int, int, bool> typename Size, typename Use>
bool with_gate_up(int hidden, Use use) {
  return with_any(hidden, use, GateUp4096<Size>{}, GateUp7168<Size>{});
}
template <template <int, int, int, bool> typename Size, typename Use>
bool with_down(int inter, Use use) {
  return with_any(inter, use, Down3072<Size>{}, Down2048<Size>{}, Down1536<Size>{}, Down1024<Size>{}, Down768<Size>{}, Down512<Size>{},
                  Down384<Size>{}, Down256<Size>{});
}
template <typename Use>
bool with_row_down(int inter, Use use) {
  return with_any(inter, use, RowDown3072<false>{}, RowDown2048<false>{}, RowDown1536<false>{}, RowDown1024<false>{}, RowDown768<false>{},
                  RowDown512<false>{}, RowDown384<false>{}, RowDown256<false>{});
}
// of Flash alone: less to compile
template <typename Use>
bool with_exact_row_down(int inter, Use use) {
  return with_any(inter, use, RowDown2048<true>{}, RowDown1024<true>{}, RowDown512<true>{}, RowDown256<true>{});
}

// Blocks of a kernel that a multiprocessor holds; asked once per device.
template <typename C>
int blocks_per_sm() {
  static int known[64] = {};
  int device = 0;
  check_cuda(cudaGetDevice(&device), kName, "cudaGetDevice");
  if (device < 64 && known[device] > 0) return known[device];
  const int shared = sizeof(typename C::Shared);
  check_cuda(cudaFuncSetAttribute(&experts_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), kName, "cudaFuncSetAttribute");
  int blocks = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, experts_kernel<C>, C::kThreads, shared), kName, "occupancy query");
  if (blocks < 1) throw std::runtime_error("mxfp4_moe: a block does not fit a multiprocessor");
  if (device < 64) known[device] = blocks;
  return blocks;
}

// One block for each that fits at once, but no more than there are units.
template <typename C>
void launch_experts(const Params& p, int num_sms, const Launcher& launcher) {
  const int64_t pairs = static_cast<int64_t>(p.rows) * p.topk;
  const int64_t units = pairs * ((C::kGated ? p.inter : p.hidden) / C::kUnitOutputs);
  const int64_t resident = static_cast<int64_t>(num_sms) * blocks_per_sm<C>();
  launcher(experts_kernel<C>, dim3(static_cast<unsigned>(std::min(units, resident))), C::kThreads, sizeof(typename C::Shared), p);
}

template <typename C>
void launch_down_sum(const Params& p, const Launcher& launcher) {
  static_assert(sizeof(typename C::Shared) <= 49152, "no more than a launch may have unasked");
  launcher(down_sum_kernel<C>, dim3(p.hidden / C::kOutputs), C::kThreads, sizeof(typename C::Shared), p);
}

template <typename C>
KernelAttributes describe(const char* name) {
  blocks_per_sm<C>();  // allows the shared memory
  return attributes_of(kName, reinterpret_cast<const void*>(&experts_kernel<C>), name, C::kThreads, sizeof(typename C::Shared));
}

}  // namespace

std::string problem(int hidden, int inter, int experts, int pairs) {
  if (pairs > kMaxPairs) return "at most " + std::to_string(kMaxPairs) + " pairs (rows * topk), got " + std::to_string(pairs);
  if (experts > kMaxExperts) return "at most " + std::to_string(kMaxExperts) + " experts, got " + std::to_string(experts);
  if (!with_gate_up<Many>(hidden, [](auto) {})) return "hidden 4096 or 7168, got " + std::to_string(hidden);
  if (!with_down<Many>(inter, [](auto) {})) return "inter 256, 384, 512, 768, 1024, 1536, 2048 or 3072, got " + std::to_string(inter);
  return "";
}

void launch(const Params& params, int num_sms, bool pdl, cudaStream_t stream) {
  const std::string why_not = problem(params.hidden, params.inter, params.experts, params.rows * params.topk);
  if (!why_not.empty()) throw std::runtime_error("mxfp4_moe: takes " + why_not);
  const Launcher launcher = {kName, pdl, stream};
  const auto launch_one = [&](auto c) { launch_experts<decltype(c)>(params, num_sms, launcher); };
  const auto launch_sum = [&](auto c) { launch_down_sum<decltype(c)>(params, launcher); };
  const int pairs = params.rows * params.topk;
  const bool is_one_row = params.rows == 1 && pairs <= kOneRowPairs, is_flash = params.hidden == GateUp4096<Mid>::kInputs;
  if (is_one_row && !params.exact) {
    with_gate_up<OneRow>(params.hidden, launch_one);
    with_row_down(params.inter, launch_sum);
    return;
  }
  if (is_one_row && is_flash && with_exact_row_down(params.inter, [](auto) {})) {
    launch_one(GateUp4096<OneRowExact>{});
    with_exact_row_down(params.inter, launch_sum);
    return;
  }
  const bool is_mid = pairs <= kMidPairs && is_flash;  // of Flash alone: less to compile
  if (is_mid) {
    launch_one(GateUp4096<Mid>{});
  } else {
    with_gate_up<Many>(params.hidden, launch_one);
  }
  if (!is_mid || !with_any(params.inter, launch_one, Down2048<Mid>{}, Down1024<Mid>{}, Down512<Mid>{}, Down256<Mid>{})) {
    with_down<Many>(params.inter, launch_one);
  }
  launch_combine(params, launcher);
}

void launch_combine(const Params& params, const Launcher& launcher) {
  const unsigned columns = ceil_div(params.hidden / 4, kCombineThreads);
  launcher(combine_kernel, dim3(params.rows, columns), kCombineThreads, 0, params);
}

Slices slices_of_hidden(int hidden) {
  Slices found = {};
  with_gate_up<Many>(hidden, [&](auto c) { found = {c.kSlices, c.kSteps}; });
  return found;
}
Slices slices_of_inter(int inter) {
  Slices found = {};
  with_down<Many>(inter, [&](auto c) { found = {c.kSlices, c.kSteps}; });
  return found;
}

std::vector<KernelAttributes> kernel_attributes() {
  std::vector<KernelAttributes> all = sorted_attributes(), scaled = scaled_attributes();
  all.insert(all.end(), scaled.begin(), scaled.end());
  all.insert(all.begin(), {describe<GateUp4096<Many>>("mxfp4_moe_gate_up"), describe<Down2048<Many>>("mxfp4_moe_down")});
  return all;
}

int shared_bytes() {
  size_t most = std::max(sorted_shared_bytes(), scaled_shared_bytes());
  const auto note = [&](auto c) { most = std::max(most, sizeof(typename decltype(c)::Shared)); };
  for (const int hidden : {4096, 7168}) with_gate_up<Many>(hidden, note);
  for (const int inter : {256, 384, 512, 768, 1024, 1536, 2048, 3072}) with_down<Many>(inter, note);
  return static_cast<int>(most);
}

}  // namespace dsv4::mxfp4_moe

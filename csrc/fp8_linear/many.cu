// Plan and launch of the kernels for more than kTileMostRows rows: x as it is, or rotated back on the way in.
#include "many.cuh"

#include <algorithm>

namespace dsv4::fp8_linear {

namespace {

constexpr char kName[] = "fp8_linear, units";
constexpr int64_t kBandBytes = 16 << 20;  // of x: what an L2 holds beside the weights of a wave

const void* allowed(bool rotates) {
  static uint64_t configured[2] = {};
  const void* const kernel = reinterpret_cast<const void*>(rotates ? &units_kernel<true> : &units_kernel<false>);
  allow_shared(kName, kernel, kUnitShared, configured[rotates]);
  return kernel;
}

}  // namespace

// As many slices in turn as cost least, reckoned in stages of 64 inputs: to begin and to end takes a few, to write or read a unit's sums
// some more, and to add splits another launch.
Plan make_units_plan(Plan plan, int rows, int groups, int outputs, int inputs, int num_sms, int in_turn, int band) {
  constexpr int kAround = 2, kSums = 2, kMerge = 4;
  plan.row_blocks = ceil_div(rows, kUnitRows);
  plan.band = band ? band : static_cast<int32_t>(std::max<int64_t>(1, kBandBytes / (int64_t{kUnitRows} * inputs * 2)));
  plan.group_tiles = outputs / kUnitOutputs;
  const int tiles = plan.group_tiles * groups * plan.row_blocks;
  int64_t least = 0;
  for (int turns = plan.slices; turns > 0; turns /= 2) {
    const int splits = plan.slices / turns, units = tiles * splits;
    const int waves = ceil_div(units, num_sms), passes = turns == 8 ? 6 : turns == 4 ? 2 : 0;
    int64_t cost = int64_t{waves} * (inputs / kStageInputs / splits + kAround + passes * kSums);
    if (splits > 1) cost += kMerge + ceil_div(units, num_sms) * 2 * kSums;
    if (in_turn ? turns == in_turn : least == 0 || cost < least) plan.in_turn = turns, plan.splits = splits, least = cost;
  }
  plan.units = tiles * plan.splits;
  plan.blocks = std::min(plan.units, num_sms);
  plan.shared_bytes = kUnitShared;
  if (plan.splits > 1) plan.partial_bytes = int64_t{plan.splits} * rows * groups * outputs * 4;
  plan.stash = plan.partial_bytes / 4;
  if (plan.in_turn > 2) plan.partial_bytes += int64_t{plan.blocks} * 2 * kUnitFours * kMathThreads * 16;
  return plan;
}

void launch_units(const Params& params, const Plan& plan, const Launcher& launcher) {
  const bool rotates = params.rotation != nullptr;
  allowed(rotates);
  launcher(rotates ? &units_kernel<true> : &units_kernel<false>, dim3(plan.blocks), kUnitThreads, kUnitShared, params, plan);
}

std::vector<KernelAttributes> units_attributes() {
  return {attributes_of(kName, allowed(false), "fp8_linear_units", kUnitThreads, kUnitShared),
          attributes_of(kName, allowed(true), "fp8_linear_units_rotating", kUnitThreads, kUnitShared)};
}

}  // namespace dsv4::fp8_linear

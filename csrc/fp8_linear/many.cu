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

// As many slices in turn and rows a unit as cost least, reckoned in hundredths of a stage of 128 rows, as measured: docs/notes/fp8_linear.md.
// To begin and to end a unit takes some, to write or read its sums some more, and to add splits another launch.
Plan make_units_plan(Plan plan, int rows, int groups, int outputs, int inputs, int num_sms, const Tuning& tuning) {
  constexpr int kAround = 150, kStash = 20, kMerge = 200, kSplitSums = 350;
  plan.group_tiles = outputs / kUnitOutputs;
  int64_t least = 0;
  for (int tall = 2; tall > 0; --tall) {
    for (int turns = plan.slices; turns > 0; turns /= 2) {
      const int unit_rows = tall * kUnitRows / 2, splits = plan.slices / turns, stages = inputs / kStageInputs / splits;
      const int units = plan.group_tiles * groups * ceil_div(rows, unit_rows) * splits, passes = turns == 8 ? 6 : turns == 4 ? 2 : 0;
      int64_t cost = int64_t{ceil_div(units, num_sms)} * ((tall == 2 ? 100 : 67) * stages + kAround + tall * passes * kStash / 2);
      if (splits > 1) cost += kMerge + int64_t{units} * tall * kSplitSums / 2 / num_sms;
      if ((tuning.in_turn && turns != tuning.in_turn) || (tuning.row_tiles && tall != tuning.row_tiles) || (least && cost >= least)) continue;
      plan.unit_rows = unit_rows, plan.in_turn = turns, plan.splits = splits, plan.units = units, least = cost;
    }
  }
  if (least == 0) return plan;
  plan.row_blocks = ceil_div(rows, plan.unit_rows);
  plan.band = static_cast<int32_t>(std::max<int64_t>(1, kBandBytes / (int64_t{plan.unit_rows} * inputs * 2)));
  plan.blocks = std::min(plan.units, tuning.blocks ? tuning.blocks : num_sms);
  plan.shared_bytes = kUnitShared;
  set_partial_bytes(plan, rows, int64_t{groups} * outputs);
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

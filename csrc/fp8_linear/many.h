// FP8 linear of more than kTileMostRows rows: plan and launch. Device code in many.cuh.
#pragma once

#include "fp8_linear.h"

namespace dsv4::fp8_linear {

// `plan` has the slices.
Plan make_units_plan(Plan plan, int rows, int groups, int outputs, int inputs, int num_sms, const Tuning& tuning);

void launch_units(const Params& params, const Plan& plan, const Launcher& launcher);

std::vector<KernelAttributes> units_attributes();

}  // namespace dsv4::fp8_linear

// Numbers that several operators have in common, on the host as on the device.
#pragma once

namespace dsv4 {

constexpr int kMaxSharedBytes = 101376;  // of a block on SM120: 99 KiB; build_artifact.py refuses a kernel that has more

template <typename T>
constexpr T kLog2e = static_cast<T>(1.4426950408889634);

template <typename A, typename B>
constexpr auto ceil_div(A a, B b) {
  return (a + b - 1) / b;
}

}  // namespace dsv4

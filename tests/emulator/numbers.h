// Numbers of 16, 8 and 4 bits as float, and rounded to nearest even from it.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulator {

struct BF16 {
  static float value(uint16_t bits) {
    const uint32_t wide = uint32_t{bits} << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
  }
  static uint16_t bits(float x) {
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    if (std::isnan(x)) return 0x7fff;
    return static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
};

struct F16 {
  static float value(uint16_t bits) {  // compilers call a function for _Float16
    uint32_t wide = (bits & 0x7fffu) << 13;
    float x;
    std::memcpy(&x, &wide, 4);
    x *= 0x1p112f;
    std::memcpy(&wide, &x, 4);
    wide = (bits & 0x7c00) == 0x7c00 ? bits & 0x3ff ? 0x7fc00000u : 0x7f800000u : wide;
    wide |= (bits & 0x8000u) << 16;
    std::memcpy(&x, &wide, 4);
    return x;
  }
  static uint16_t bits(float x) {
    if (std::isnan(x)) return 0x7fff;
    const _Float16 h = static_cast<_Float16>(x);
    uint16_t out;
    std::memcpy(&out, &h, 2);
    return out;
  }
};

struct E4M3 {  // satfinite
  static float value(uint32_t bits);
  static float computed(uint32_t bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    const float sign = bits & 0x80 ? -1.f : 1.f;
    if (exponent == 15 && mantissa == 7) return NAN;
    return sign * (exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp(static_cast<float>(mantissa), -9));
  }
  static uint8_t bits(float x) {
    const uint8_t sign = std::signbit(x) ? 0x80 : 0;
    if (std::isnan(x)) return 0x7f;
    const float a = std::fabs(x);
    if (a >= 448.f) return sign | 0x7e;
    int exponent = a == 0 ? -6 : std::max(std::ilogb(a), -6);
    float steps = std::nearbyint(std::ldexp(a, 3 - exponent));  // to even: 8 to 16 of a binade
    if (steps == 16.f) steps = 8.f, ++exponent;
    if (steps < 8.f) return sign | static_cast<uint8_t>(steps);
    if (exponent > 8) return sign | 0x7e;
    return sign | static_cast<uint8_t>((exponent + 7) << 3 | (static_cast<int>(steps) - 8));
  }
};

inline const std::array<float, 256> kE4M3 = [] {
  std::array<float, 256> made;
  for (uint32_t one = 0; one < 256; ++one) made[one] = E4M3::computed(one);
  return made;
}();
inline float E4M3::value(uint32_t bits) { return kE4M3[bits & 0xff]; }

struct E2M1 {
  static float value(uint32_t bits) {
    constexpr float known[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    return bits & 8 ? -known[bits & 7] : known[bits & 7];
  }
};

}  // namespace emulator

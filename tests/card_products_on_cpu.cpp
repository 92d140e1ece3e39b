// csrc/card/products.cu on the CPU: its own text, the lanes of a warp in turn (turns_on_cpu.h). What an mma makes of the lanes' registers is written
// down here from the PTX ISA's text alone ("Matrix Fragments for mma.m16n8k32" of 8 bits and "m16n8k16" of 16, "Block Scaling for mma.sync"
// with .scale_vec::1X and selectors of zero), in float64.
// The test that compiles this puts the texts of card.h and products.cu in place of the marked line.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "turns_on_cpu.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

using cudaStream_t = void*;
turns::Meeting warp{32};

inline double e4m3(uint32_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const double size = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return byte & 0x80 ? -size : size;
}
inline double f16(uint32_t bits) {
  const uint16_t low = bits;
  _Float16 h;
  std::memcpy(&h, &low, 2);
  return h;
}

struct Matrices {
  double a[16][32], b[32][8], scale_a[16], scale_b[8];
} m;

// d = (a scale_a) (b scale_b) + d, by all lanes; kBytes of an element
template <int kBytes>
void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t scale_a, uint32_t scale_b) {
  constexpr int kEach = 4 / kBytes, kDepth = 32 / kBytes;  // elements of a register, of a row
  const int lane = threadIdx.x, group = lane >> 2, in_group = lane % 4;
  const auto element = [](const uint32_t* registers, int i) {
    const uint32_t bits = registers[i / kEach] >> i % kEach * 8 * kBytes;
    return kBytes == 1 ? e4m3(bits & 0xff) : f16(bits & 0xffff);
  };
  for (int i = 0; i < 4 * kEach; ++i) {  // a_i: rows by turns of a register, the upper half of the depth behind
    const int row = i / kEach % 2 == 0 ? group : group + 8, column = in_group * kEach + i % kEach + (i < 2 * kEach ? 0 : kDepth / 2);
    m.a[row][column] = element(a, i);
  }
  for (int i = 0; i < 2 * kEach; ++i) m.b[in_group * kEach + i % kEach + (i < kEach ? 0 : kDepth / 2)][group] = element(b, i);
  const auto power = [](uint32_t stored) { return std::ldexp(1, static_cast<int>(stored & 0xff) - 127); };  // byte-id 0
  if (in_group < 2) m.scale_a[group + 8 * in_group] = power(scale_a);  // thread-id-a 0: of a quad the first two
  if (in_group == 0) m.scale_b[group] = power(scale_b);  // thread-id-b 0: the first
  warp.arrive_and_wait();
  for (int i = 0; i < 4; ++i) {
    const int row = i < 2 ? group : group + 8, column = in_group * 2 + (i & 1);
    double sum = 0;
    for (int k = 0; k < kDepth; ++k) sum += m.a[row][k] * m.b[k][column];
    d[i] = static_cast<float>(sum * m.scale_a[row] * m.scale_b[column] + d[i]);
  }
  warp.arrive_and_wait();
}

namespace dsv4 {
void mma_fp8(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { multiply<1>(d, a, {b0, b1}, 127, 127); }
void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { multiply<2>(d, a, {b0, b1}, 127, 127); }
namespace card {
void mma_block_scaled(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t a_scale, uint32_t b_scale) {
  multiply<1>(d, a, {b0, b1}, a_scale, b_scale);
}
}  // namespace card
}  // namespace dsv4

//@@ the kernel

// false: some lanes wait for ever
extern "C" bool products(const void* a, const void* b, const void* a_scale, const void* b_scale, const float* c, float* d, int count, bool half) {
  const auto bytes = [](const void* p) { return static_cast<const uint8_t*>(p); };
  const dsv4::card::Products given = {bytes(a), bytes(b), bytes(a_scale), bytes(b_scale), c, d, count, half};
  for (blockIdx.x = 0; blockIdx.x < static_cast<unsigned>(count); ++blockIdx.x)
    if (!turns::run(32, [&] { dsv4::card::kernel_of(given)(given); })) return false;
  return true;
}

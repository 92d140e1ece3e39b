// mma.sync, by the lanes of PTX's fragments: sums in double, rounded to f32 once. Hardware rounds otherwise.
#include <algorithm>
#ifdef __FMA__
#include <immintrin.h>
#endif

#include "machine.h"
#include "numbers.h"

namespace emulator {

namespace {

bool has(const Words& words, const char* word) { return std::find(words.begin(), words.end(), word) != words.end(); }

constexpr int kRows = 16, kColumns = 8, kWordsOfA = 4;

constexpr int kMostDepth = 32;

struct Fragments {
  double a[kRows][kMostDepth];
  alignas(64) double b[kMostDepth][kColumns];
};

// Of an operand's word the lanes have, side by side, eight rows (of b: columns) of numbers of neighbouring depth.
template <int kBits>
auto numbers_of(Warp& w, const Operand& o) {
  std::array<std::conditional_t<kBits == 16, uint16_t, uint8_t>, kLanes * 32 / kBits> numbers;
  std::memcpy(numbers.data(), w.lanes<uint32_t>(o), sizeof(numbers));
  return numbers;
}

template <class N, int kBits, class OfB = N>
void read(Warp& w, const Instruction& i, Fragments& f) {
  constexpr int kRun = 4 * 32 / kBits;
  for (int r = 0; r < kWordsOfA; ++r) {
    const auto numbers = numbers_of<kBits>(w, i.o[4 + r]);
    for (int row = 0; row < 8; ++row)
      for (int k = 0; k < kRun; ++k) f.a[row + r % 2 * 8][r / 2 * kRun + k] = N::value(numbers[row * kRun + k]);
  }
  for (int r = 0; r < kWordsOfA / 2; ++r) {
    const auto numbers = numbers_of<kBits>(w, i.o[4 + kWordsOfA + r]);
    for (int k = 0; k < kRun; ++k)
      for (int column = 0; column < kColumns; ++column) f.b[r * kRun + k][column] = OfB::value(numbers[column * kRun + k]);
  }
}

using Half = double __attribute__((vector_size(sizeof(double) * kColumns / 2), may_alias));  // of a row

// sum + b * a: the product of two numbers of 16 bits is exact in double, fused or not.
Half added(Half sum, Half b, double a) {
#ifdef __FMA__
  return _mm256_fmadd_pd(b, _mm256_set1_pd(a), sum);
#else
  return sum + b * a;
#endif
}

void multiply(Warp& w, const Instruction& i, int depth, const Fragments& f, const float* a_scale, const float* b_scale) {
  double sums[kRows][kColumns];
  constexpr int kTogether = 4;  // rows, whose additions do not wait for each other
  for (int first = 0; first < kRows; first += kTogether) {
    Half own[kTogether][2] = {};
    for (int k = 0; k < depth; ++k) {
      const Half* b = reinterpret_cast<const Half*>(f.b[k]);  // not copied: what is stored by halves waits to be loaded whole
      for (int row = 0; row < kTogether; ++row)
        for (int half = 0; half < 2; ++half) own[row][half] = added(own[row][half], b[half], f.a[first + row][k]);
    }
    std::memcpy(sums[first], own, sizeof(own));
  }
  if (a_scale) {
    for (int row = 0; row < kRows; ++row)
      for (int column = 0; column < kColumns; ++column) sums[row][column] *= static_cast<double>(a_scale[row]) * b_scale[column];
  }
  float out[4][kLanes];
  for (int j = 0; j < 4; ++j) {
    const float* c = w.lanes<float>(i.o[4 + kWordsOfA + kWordsOfA / 2 + j]);
    for (int l = 0; l < kLanes; ++l) out[j][l] = static_cast<float>(sums[l / 4 + j / 2 * 8][l % 4 * 2 + j % 2] + c[l]);
  }
  for (int j = 0; j < 4; ++j) std::memcpy(w.lanes<float>(i.o[j]), out[j], sizeof(out[j]));
}

template <class N, int kBits>
Step mma(Warp& w, const Instruction& i, uint32_t mask) {
  if (!converge(w, mask, kAll)) return Step::kJumped;
  if (mask != kAll) fail("a product of a part of the warp");
  Fragments f;
  read<N, kBits>(w, i, f);
  multiply(w, i, kWordsOfA / 2 * 4 * (32 / kBits), f, nullptr, nullptr);
  return Step::kNext;
}

float power(uint32_t e8m0) { return e8m0 == 255 ? NAN : std::ldexp(1.f, static_cast<int>(e8m0) - 127); }

struct E2M1InAByte {  // bits 5 to 2; the others are padding
  static double value(uint32_t byte) {
    constexpr double kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    if (byte & 0xc3) fail("padding of an E2M1 that is not zero");
    return byte & 0x20 ? -kValues[byte >> 2 & 7] : kValues[byte >> 2 & 7];
  }
};

// One scale a row and column of a depth of 32. o: d, a, b, c, a's scale, {byte, lanes}, b's scale, {byte, lane}. PTX ISA, "Block Scaling for
// mma.sync": of .scale_vec::1X a byte of the word; a's from the lanes of a quad that thread-id-a chooses (0: the first two, of rows g and
// g + 8; 1: the last two), b's from the lane thread-id-b of a quad, of column g.
template <class OfA>
Step mma_scaled(Warp& w, const Instruction& i, uint32_t mask) {
  if (!converge(w, mask, kAll)) return Step::kJumped;
  if (mask != kAll) fail("a product of a part of the warp");
  Fragments f;
  read<OfA, 8, E4M3>(w, i, f);
  const auto number = [&](int o) { return w.lanes<uint32_t>(i.o[o])[0] & 0xffff; };
  const uint32_t byte_a = number(15), lanes_a = number(16), byte_b = number(18), lane_b = number(19);
  if (byte_a > 3 || lanes_a > 1 || byte_b > 3 || lane_b > 3) fail("a scale's byte or lanes, which there are not: " + i.text);
  float a[kRows], b[kColumns];
  for (int g = 0; g < 8; ++g) {
    for (int h = 0; h < 2; ++h) a[g + 8 * h] = power(w.lanes<uint32_t>(i.o[14])[g * 4 + lanes_a * 2 + h] >> (8 * byte_a) & 0xff);
    b[g] = power(w.lanes<uint32_t>(i.o[17])[g * 4 + lane_b] >> (8 * byte_b) & 0xff);
  }
  multiply(w, i, 32, f, a, b);
  return Step::kNext;
}

}  // namespace

Handler products(const Words& words) {
  if (words[0] != "mma") return nullptr;
  if (has(words, "block_scale")) return has(words, "e2m1") ? mma_scaled<E2M1InAByte> : mma_scaled<E4M3>;
  return has(words, "bf16") ? mma<BF16, 16> : has(words, "f16") ? mma<F16, 16> : mma<E4M3, 8>;
}

}  // namespace emulator

// Instructions whose lanes have nothing to do with each other, and no memory.
#include <algorithm>
#include <cfenv>
#include <cmath>
#include <set>
#include <type_traits>

#include "machine.h"
#include "numbers.h"

namespace emulator {

namespace {

template <class T>
using Slot = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
T get(Slot<T> slot) {
  T value;
  std::memcpy(&value, &slot, sizeof(T));
  return value;
}
template <class T>
Slot<T> put(T value) {
  Slot<T> slot = 0;
  std::memcpy(&slot, &value, sizeof(T));
  return slot;
}

template <class D, class A, auto kDo>
Step one(Warp& w, const Instruction& i, uint32_t mask) {
  auto* d = w.lanes<Slot<D>>(i.o[0]);
  const auto* a = w.lanes<Slot<A>>(i.o[1]);
  set_each(d, mask, [=](int l) { return put<D>(kDo(get<A>(a[l]))); });
  return Step::kNext;
}
template <class D, class A, class B, auto kDo>
Step two(Warp& w, const Instruction& i, uint32_t mask) {
  auto* d = w.lanes<Slot<D>>(i.o[0]);
  const auto* a = w.lanes<Slot<A>>(i.o[1]);
  const auto* b = w.lanes<Slot<B>>(i.o[2]);
  set_each(d, mask, [=](int l) { return put<D>(kDo(get<A>(a[l]), get<B>(b[l]))); });
  return Step::kNext;
}
template <class D, class A, class B, class C, auto kDo>
Step three(Warp& w, const Instruction& i, uint32_t mask) {
  auto* d = w.lanes<Slot<D>>(i.o[0]);
  const auto* a = w.lanes<Slot<A>>(i.o[1]);
  const auto* b = w.lanes<Slot<B>>(i.o[2]);
  const auto* c = w.lanes<Slot<C>>(i.o[3]);
  set_each(d, mask, [=](int l) { return put<D>(kDo(get<A>(a[l]), get<B>(b[l]), get<C>(c[l]))); });
  return Step::kNext;
}

// The handler for the type's name; F: a template over the type
#define BY_INTEGER(type, F)      \
  (type == "u16"   ? F<uint16_t> \
   : type == "s16" ? F<int16_t>  \
   : type == "b16" ? F<uint16_t> \
   : type == "u32" ? F<uint32_t> \
   : type == "s32" ? F<int32_t>  \
   : type == "b32" ? F<uint32_t> \
   : type == "u64" ? F<uint64_t> \
   : type == "s64" ? F<int64_t>  \
   : type == "b64" ? F<uint64_t> \
                   : nullptr)

template <class T>
using Unsigned = std::make_unsigned_t<T>;
template <class T>
T plus(T a, T b) {
  return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
}
template <class T>
T minus(T a, T b) {
  return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b));
}
template <class T>
T times(T a, T b) {
  return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}
template <class T>
T high(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b) >> (sizeof(T) * 8));
}
template <class T>
T quotient(T a, T b) {
  if (b == 0) return static_cast<T>(-1);
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return minus<T>(0, a);
  return a / b;
}
template <class T>
T remainder_of(T a, T b) {
  if (b == 0) return a;
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
  return a % b;
}
template <class T>
T lesser(T a, T b) {
  return std::min(a, b);
}
template <class T>
T greater_of(T a, T b) {
  return std::max(a, b);
}
template <class T>
T both(T a, T b) {
  return a & b;
}
template <class T>
T either(T a, T b) {
  return a | b;
}
template <class T>
T differing(T a, T b) {
  return a ^ b;
}
template <class T>
T shifted_left(T a, uint32_t n) {
  return n >= sizeof(T) * 8 ? 0 : static_cast<T>(static_cast<Slot<T>>(a) << n);
}
template <class T>
T shifted_right(T a, uint32_t n) {
  if (n >= sizeof(T) * 8) return a < 0 ? static_cast<T>(-1) : 0;
  return a >> n;
}
template <class T>
T inverted(T a) {
  return static_cast<T>(~a);
}
template <class T>
T negated(T a) {
  return minus<T>(0, a);
}
template <class T>
T magnitude(T a) {
  return a < 0 ? minus<T>(0, a) : a;
}

// Of the same bits whether signed or not: compiled once.
#define TWO(name, type, function)                           \
  template <class T>                                        \
  Step name(Warp& w, const Instruction& i, uint32_t mask) { \
    using Of = type;                                        \
    return two<Of, Of, Of, function<Of>>(w, i, mask);       \
  }
TWO(add, Unsigned<T>, plus)
TWO(sub, Unsigned<T>, minus)
TWO(mul_lo, Unsigned<T>, times)
TWO(mul_hi, T, high)
TWO(div, T, quotient)
TWO(rem, T, remainder_of)
TWO(min, T, lesser)
TWO(max, T, greater_of)
TWO(and_, Unsigned<T>, both)
TWO(or_, Unsigned<T>, either)
TWO(xor_, Unsigned<T>, differing)
#undef TWO
template <class T>
Step shl(Warp& w, const Instruction& i, uint32_t mask) {
  using Of = Unsigned<T>;
  return two<Of, Of, uint32_t, shifted_left<Of>>(w, i, mask);
}
template <class T>
Step shr(Warp& w, const Instruction& i, uint32_t mask) {
  return two<T, T, uint32_t, shifted_right<T>>(w, i, mask);
}
template <class T>
Step not_(Warp& w, const Instruction& i, uint32_t mask) {
  return one<T, T, inverted<T>>(w, i, mask);
}
template <class T>
Step neg(Warp& w, const Instruction& i, uint32_t mask) {
  return one<T, T, negated<T>>(w, i, mask);
}
template <class T>
Step abs_(Warp& w, const Instruction& i, uint32_t mask) {
  return one<T, T, magnitude<T>>(w, i, mask);
}
template <class T>
Step mad_lo(Warp& w, const Instruction& i, uint32_t mask) {
  return three<T, T, T, T, [](T a, T b, T c) { return plus<T>(times<T>(a, b), c); }>(w, i, mask);
}
template <class T>
Step mad_hi(Warp& w, const Instruction& i, uint32_t mask) {
  return three<T, T, T, T, [](T a, T b, T c) { return plus<T>(high<T>(a, b), c); }>(w, i, mask);
}
template <class W, class T>
Step mul_wide(Warp& w, const Instruction& i, uint32_t mask) {
  return two<W, T, T, [](T a, T b) { return static_cast<W>(static_cast<W>(a) * static_cast<W>(b)); }>(w, i, mask);
}
template <class W, class T>
Step mad_wide(Warp& w, const Instruction& i, uint32_t mask) {
  return three<W, T, T, W, [](T a, T b, W c) { return plus<W>(static_cast<W>(a) * static_cast<W>(b), c); }>(w, i, mask);
}

// ---- float

float flushed(float x) {
  const uint32_t bits = put(x);
  return get<float>(bits & 0x7f800000 ? bits : bits & 0x80000000);
}
float saturated(float x) { return std::min(std::max(0.f, x), 1.f); }  // of NaN and of -0 it is 0

enum Rounding { kNearest, kDown, kUp, kZero };
struct Mode {
  bool flush, saturate;
  Rounding rounding;
};
constexpr int kModes = 16, kFlushes = 1, kSaturates = 2;
constexpr Mode mode_of(int m) { return {(m & kFlushes) != 0, (m & kSaturates) != 0, static_cast<Rounding>(m >> 2)}; }

// Compilers must not move what rounds otherwise in front of the change of the mode; without -frounding-math, with which they make no
// vectors of floats.
float hidden(float x) {
  volatile float v = x;
  return v;
}

template <bool kFlush, bool kSaturate, auto kDo, bool kHides = false>
Step floats(Warp& w, const Instruction& i, uint32_t mask) {
  const size_t count = i.o.size();
  float* d = w.lanes<float>(i.o[0]);
  const float* a = w.lanes<float>(i.o[1]);
  const float* b = w.lanes<float>(i.o[count > 2 ? 2 : 1]);
  const float* c = w.lanes<float>(i.o[count > 3 ? 3 : 1]);
  set_each(d, mask, [=](int l) {
    float x = a[l], y = b[l], z = c[l];
    if (kHides) x = hidden(x), y = hidden(y), z = hidden(z);
    if (kFlush) x = flushed(x), y = flushed(y), z = flushed(z);
    float r = kDo(x, y, z);
    if (kFlush) r = flushed(r);
    return kSaturate ? saturated(r) : r;
  });
  return Step::kNext;
}
template <int kMode, auto kDo>
Step rounded(Warp& w, const Instruction& i, uint32_t mask) {
  constexpr Mode mode = mode_of(kMode);
  std::fesetround(mode.rounding == kDown ? FE_DOWNWARD : mode.rounding == kUp ? FE_UPWARD : FE_TOWARDZERO);
  const Step step = floats<mode.flush, mode.saturate, kDo, true>(w, i, mask);
  std::fesetround(FE_TONEAREST);
  return step;
}
template <int kMode, auto kDo>
constexpr Handler handler_in_mode() {
  constexpr Mode mode = mode_of(kMode);
  if constexpr (mode.rounding == kNearest) return floats<mode.flush, mode.saturate, kDo>;
  return rounded<kMode, kDo>;
}

template <auto kDo, int... kMode>
Handler in_mode(int mode, std::integer_sequence<int, kMode...>) {
  static constexpr std::pair<int, Handler> all[] = {{kMode, handler_in_mode<kMode, kDo>()}...};
  for (const auto& [one, handler] : all)
    if (one == mode) return handler;
  return nullptr;
}

float f_add(float a, float b, float) { return a + b; }
float f_sub(float a, float b, float) { return a - b; }
float f_mul(float a, float b, float) { return a * b; }
float f_div(float a, float b, float) { return a / b; }
float f_div_approx(float a, float b, float) {  // by the reciprocal, which is 0 there
  const float size = std::fabs(b);
  return size > 0x1p126f && size < INFINITY ? a * std::copysign(0.f, b) : a / b;
}
float f_fma(float a, float b, float c) { return std::fma(a, b, c); }
// The other one of a NaN, and -0 below 0; libm's would be called for each lane.
float f_min(float a, float b, float) { return a == b ? (std::signbit(a) ? a : b) : a < b || b != b ? a : b; }
float f_max(float a, float b, float) { return a == b ? (std::signbit(a) ? b : a) : a > b || b != b ? a : b; }
float f_max_nan(float a, float b, float) { return std::isnan(a) || std::isnan(b) ? NAN : f_max(a, b, 0); }
float f_min_nan(float a, float b, float) { return std::isnan(a) || std::isnan(b) ? NAN : f_min(a, b, 0); }
float f_max3(float a, float b, float c) { return f_max(f_max(a, b, 0), c, 0); }
float f_min3(float a, float b, float c) { return f_min(f_min(a, b, 0), c, 0); }
float f_max3_nan(float a, float b, float c) { return f_max_nan(f_max_nan(a, b, 0), c, 0); }
float f_min3_nan(float a, float b, float c) { return f_min_nan(f_min_nan(a, b, 0), c, 0); }
float f_neg(float a, float, float) { return -a; }
float f_abs(float a, float, float) { return std::fabs(a); }
float f_rcp(float a, float, float) { return 1.f / a; }
float f_sqrt(float a, float, float) { return std::sqrt(a); }
float f_rsqrt(float a, float, float) { return static_cast<float>(1. / std::sqrt(static_cast<double>(a))); }
float f_ex2(float a, float, float) { return std::exp2(a); }
float f_same(float a, float, float) { return a; }

}  // namespace

Handler floats_by_mode(const Words& words) {
  int mode = 0;
  bool nan = false;
  for (const std::string& word : words) {
    if (word == "ftz") mode |= kFlushes;
    if (word == "sat") mode |= kSaturates;
    if (word == "rm") mode |= kDown << 2;
    if (word == "rp") mode |= kUp << 2;
    if (word == "rz") mode |= kZero << 2;
    nan = nan || word == "NaN";
  }
  constexpr std::make_integer_sequence<int, kModes> modes;
  constexpr std::make_integer_sequence<int, kModes / 4> nearest;             // those of what has no other rounding
  constexpr std::integer_sequence<int, 0, 1, 4, 5, 8, 9, 12, 13> roundings;  // of what does not saturate
  constexpr std::integer_sequence<int, 0, kFlushes> plain;                   // neither
  const std::string& op = words[0];
  const bool is_approximate = words.size() > 2 && words[1] == "approx";
  if (op == "add") return in_mode<f_add>(mode, modes);
  if (op == "sub") return in_mode<f_sub>(mode, modes);
  if (op == "mul") return in_mode<f_mul>(mode, modes);
  if (op == "div") return is_approximate ? in_mode<f_div_approx>(mode, plain) : in_mode<f_div>(mode, roundings);
  if (op == "fma") return in_mode<f_fma>(mode, modes);
  if (op == "min") return nan ? in_mode<f_min_nan>(mode, plain) : in_mode<f_min>(mode, plain);
  if (op == "max") return nan ? in_mode<f_max_nan>(mode, plain) : in_mode<f_max>(mode, plain);
  if (op == "min3") return nan ? in_mode<f_min3_nan>(mode, plain) : in_mode<f_min3>(mode, plain);
  if (op == "max3") return nan ? in_mode<f_max3_nan>(mode, plain) : in_mode<f_max3>(mode, plain);
  if (op == "neg") return in_mode<f_neg>(mode, plain);
  if (op == "abs") return in_mode<f_abs>(mode, plain);
  if (op == "rcp") return in_mode<f_rcp>(mode, roundings);
  if (op == "sqrt") return in_mode<f_sqrt>(mode, roundings);
  if (op == "rsqrt") return in_mode<f_rsqrt>(mode, plain);
  if (op == "ex2") return in_mode<f_ex2>(mode, plain);
  if (op == "cvt") return in_mode<f_same>(mode, nearest);
  return nullptr;
}

namespace {

// Two floats in 64 bits
template <auto kDo>
Step pairs(Warp& w, const Instruction& i, uint32_t mask) {
  const size_t count = i.o.size();
  float* d = w.lanes<float>(i.o[0]);
  const float *a = w.lanes<float>(i.o[1]), *b = w.lanes<float>(i.o[2]), *c = w.lanes<float>(i.o[count > 3 ? 3 : 1]);
  each(mask, [&](int l) {
    for (int h = 2 * l; h < 2 * l + 2; ++h) d[h] = kDo(a[h], b[h], c[h]);
  });
  return Step::kNext;
}
Handler pairs_handler(const std::string& op) {
  return op == "add" ? pairs<f_add> : op == "mul" ? pairs<f_mul> : op == "fma" ? pairs<f_fma> : nullptr;
}

// ---- 16 bits: one in a register, or two halves of a word

template <class H, int kHalves, auto kDo>
Step halves(Warp& w, const Instruction& i, uint32_t mask) {
  const size_t count = i.o.size();
  uint32_t* d = w.lanes<uint32_t>(i.o[0]);
  const uint32_t *a = w.lanes<uint32_t>(i.o[1]), *b = w.lanes<uint32_t>(i.o[count > 2 ? 2 : 1]), *c = w.lanes<uint32_t>(i.o[count > 3 ? 3 : 1]);
  set_each(d, mask, [=](int l) {
    uint32_t out = 0;
    for (int h = 0; h < kHalves; ++h) {
      const auto half = [=](const uint32_t* from) { return H::value(static_cast<uint16_t>(from[l] >> (16 * h))); };
      out |= uint32_t{H::bits(kDo(half(a), half(b), half(c)))} << (16 * h);
    }
    return out;
  });
  return Step::kNext;
}
template <class H, int kHalves>
Handler halves_handler(const Words& words) {
  const std::string& op = words[0];
  if (op == "add") return halves<H, kHalves, f_add>;
  if (op == "sub") return halves<H, kHalves, f_sub>;
  if (op == "mul") return halves<H, kHalves, f_mul>;
  const bool nan = std::find(words.begin(), words.end(), "NaN") != words.end();
  if (op == "max") return nan ? halves<H, kHalves, f_max_nan> : halves<H, kHalves, f_max>;
  if (op == "min") return nan ? halves<H, kHalves, f_min_nan> : halves<H, kHalves, f_min>;
  if (op == "abs") return halves<H, kHalves, f_abs>;
  if (op == "neg") return halves<H, kHalves, f_neg>;
  return nullptr;
}
uint32_t max_u16x2(uint32_t a, uint32_t b) { return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16; }

// ---- predicates

template <class T, auto kCompare>
Step compare(Warp& w, const Instruction& i, uint32_t mask) {
  const auto* a = w.lanes<Slot<T>>(i.o[1]);
  const auto* b = w.lanes<Slot<T>>(i.o[2]);
  uint32_t so = 0;
  for (int l = 0; l < kLanes; ++l) so |= uint32_t(kCompare(get<T>(a[l]), get<T>(b[l]))) << l;
  uint32_t& p = *w.lanes<uint32_t>(i.o[0]);
  p = (p & ~mask) | (so & mask);
  return Step::kNext;
}
template <class T>
Handler unordered_comparison(const std::string& how) {
  if (how == "equ") return compare<T, [](T a, T b) { return bool(a == b || a != a || b != b); }>;
  if (how == "neu") return compare<T, [](T a, T b) { return bool(!(a == b)); }>;
  if (how == "ltu") return compare<T, [](T a, T b) { return bool(!(a >= b)); }>;
  if (how == "leu") return compare<T, [](T a, T b) { return bool(!(a > b)); }>;
  if (how == "gtu") return compare<T, [](T a, T b) { return bool(!(a <= b)); }>;
  if (how == "geu") return compare<T, [](T a, T b) { return bool(!(a < b)); }>;
  if (how == "nan") return compare<T, [](T a, T b) { return bool(a != a || b != b); }>;
  if (how == "num") return compare<T, [](T a, T b) { return bool(a == a && b == b); }>;
  return nullptr;
}
template <class T>
Handler comparison(const std::string& how) {
  if (how == "eq") return compare<T, [](T a, T b) { return bool(a == b); }>;
  if (how == "ne") return compare<T, [](T a, T b) { return bool(!(a == b) && !(a != a) && !(b != b)); }>;
  if (how == "lt") return compare<T, [](T a, T b) { return bool(a < b); }>;
  if (how == "le") return compare<T, [](T a, T b) { return bool(a <= b); }>;
  if (how == "gt") return compare<T, [](T a, T b) { return bool(a > b); }>;
  if (how == "ge") return compare<T, [](T a, T b) { return bool(a >= b); }>;
  if constexpr (std::is_floating_point_v<T>) return unordered_comparison<T>(how);
  return nullptr;
}

template <class T>
Step select(Warp& w, const Instruction& i, uint32_t mask) {
  auto* d = w.lanes<T>(i.o[0]);
  const auto *a = w.lanes<T>(i.o[1]), *b = w.lanes<T>(i.o[2]);
  const uint32_t p = w.predicate(i.o[3]);
  set_each(d, mask, [=](int l) { return p >> l & 1 ? a[l] : b[l]; });
  return Step::kNext;
}

template <auto kDo>
Step predicates(Warp& w, const Instruction& i, uint32_t mask) {
  const uint32_t r = kDo(w.predicate(i.o[1]), w.predicate(i.o[i.o.size() > 2 ? 2 : 1]));
  uint32_t& p = *w.lanes<uint32_t>(i.o[0]);
  p = (p & ~mask) | (r & mask);
  return Step::kNext;
}

// ---- bits

uint32_t permuted(uint32_t a, uint32_t b, uint32_t how) {
  const uint64_t both = uint64_t{b} << 32 | a;
  uint32_t out = 0;
  for (int n = 0; n < 4; ++n) {
    const uint32_t which = how >> (4 * n) & 15;
    uint32_t byte = both >> (8 * (which & 7)) & 0xff;
    if (which & 8) byte = byte & 0x80 ? 0xff : 0;
    out |= byte << (8 * n);
  }
  return out;
}
uint32_t reversed(uint32_t a) {
  uint32_t out = 0;
  for (int n = 0; n < 32; ++n) out |= (a >> n & 1) << (31 - n);
  return out;
}
Step lop3(Warp& w, const Instruction& i, uint32_t mask) {
  const uint32_t *a = w.lanes<uint32_t>(i.o[1]), *b = w.lanes<uint32_t>(i.o[2]), *c = w.lanes<uint32_t>(i.o[3]), table = w.lanes<uint32_t>(i.o[4])[0];
  uint32_t* d = w.lanes<uint32_t>(i.o[0]);
  uint32_t of[8];
  for (int n = 0; n < 8; ++n) of[n] = table >> n & 1 ? kAll : 0;
  set_each(d, mask, [=, &of](int l) {
    const auto by = [](uint32_t bits, uint32_t one, uint32_t zero) { return zero ^ (bits & (one ^ zero)); };
    const auto by_c = [=, &of](int n) { return by(c[l], of[n + 1], of[n]); };
    return by(a[l], by(b[l], by_c(6), by_c(4)), by(b[l], by_c(2), by_c(0)));
  });
  return Step::kNext;
}
template <bool kLeft, bool kWrap>
uint32_t funnel(uint32_t low, uint32_t high, uint32_t n) {
  n = kWrap ? n & 31 : std::min(n, 32u);
  const uint64_t both = uint64_t{high} << 32 | low;
  return static_cast<uint32_t>(kLeft ? both << n >> 32 : both >> n);
}
template <bool kLeft, bool kWrap>
Step shf(Warp& w, const Instruction& i, uint32_t mask) {
  return three<uint32_t, uint32_t, uint32_t, uint32_t, funnel<kLeft, kWrap>>(w, i, mask);
}
uint32_t leading(uint32_t a) { return a ? __builtin_clz(a) : 32; }
template <class T>
T field(T a, uint32_t from, uint32_t count) {
  from &= 0xff, count &= 0xff;
  if (count == 0) return 0;
  using U = Unsigned<T>;
  constexpr uint32_t kBits = sizeof(T) * 8;
  const uint32_t top = std::min(from + count - 1, kBits - 1);
  const bool fill = std::is_signed_v<T> && (static_cast<U>(a) >> top & 1);
  U out = from >= kBits ? 0 : static_cast<U>(a) >> from;
  const uint32_t held = from > top ? 0 : top - from + 1;
  if (held < kBits) out = fill ? out | ~U{0} << held : out & ((U{1} << held) - 1);
  return static_cast<T>(out);
}
Handler bits_handler(const Words& words) {
  const std::string &op = words[0], &type = words.back();
  if (op == "prmt") return three<uint32_t, uint32_t, uint32_t, uint32_t, permuted>;
  if (op == "lop3") return lop3;
  if (op == "brev" && type == "b32") return one<uint32_t, uint32_t, reversed>;
  if (op == "popc" && type == "b32") return one<uint32_t, uint32_t, [](uint32_t a) { return uint32_t(__builtin_popcount(a)); }>;
  if (op == "popc" && type == "b64") return one<uint32_t, uint64_t, [](uint64_t a) { return uint32_t(__builtin_popcountll(a)); }>;
  if (op == "clz" && type == "b32") return one<uint32_t, uint32_t, leading>;
  if (op == "bfind" && words[1] == "shiftamt" && type == "u32") return one<uint32_t, uint32_t, [](uint32_t a) { return a ? leading(a) : kAll; }>;
  if (op == "bfind" && type == "u32") return one<uint32_t, uint32_t, [](uint32_t a) { return a ? 31 - leading(a) : kAll; }>;
  if (op == "shf") {
    const bool left = words[1] == "l";
    if (words[2] == "wrap") return left ? shf<true, true> : shf<false, true>;
    return left ? shf<true, false> : shf<false, false>;
  }
  if (op == "bfe" && type == "u32") return three<uint32_t, uint32_t, uint32_t, uint32_t, field<uint32_t>>;
  if (op == "bfe" && type == "s32") return three<int32_t, int32_t, uint32_t, uint32_t, field<int32_t>>;
  return nullptr;
}

Handler integers(const Words& words) {
  const std::string &op = words[0], second = words.size() > 1 ? words[1] : "", &type = words.back();
  if (op == "add") return BY_INTEGER(type, add);
  if (op == "sub") return BY_INTEGER(type, sub);
  if (op == "div") return BY_INTEGER(type, div);
  if (op == "rem") return BY_INTEGER(type, rem);
  if (op == "min") return BY_INTEGER(type, min);
  if (op == "max") return BY_INTEGER(type, max);
  if (op == "and") return BY_INTEGER(type, and_);
  if (op == "or") return BY_INTEGER(type, or_);
  if (op == "xor") return BY_INTEGER(type, xor_);
  if (op == "shl") return BY_INTEGER(type, shl);
  if (op == "shr") return BY_INTEGER(type, shr);
  if (op == "not") return BY_INTEGER(type, not_);
  if (op == "neg") return BY_INTEGER(type, neg);
  if (op == "abs") return BY_INTEGER(type, abs_);
  if (op == "mul" && second == "lo") return BY_INTEGER(type, mul_lo);
  if (op == "mul" && second == "hi") return BY_INTEGER(type, mul_hi);
  if (op == "mad" && second == "lo") return BY_INTEGER(type, mad_lo);
  if (op == "mad" && second == "hi") return BY_INTEGER(type, mad_hi);
  if (second == "wide" && (op == "mul" || op == "mad")) {
    const bool adds = op == "mad";
    if (type == "u16") return adds ? mad_wide<uint32_t, uint16_t> : mul_wide<uint32_t, uint16_t>;
    if (type == "s16") return adds ? mad_wide<int32_t, int16_t> : mul_wide<int32_t, int16_t>;
    if (type == "u32") return adds ? mad_wide<uint64_t, uint32_t> : mul_wide<uint64_t, uint32_t>;
    if (type == "s32") return adds ? mad_wide<int64_t, int32_t> : mul_wide<int64_t, int32_t>;
  }
  return nullptr;
}

Handler comparison_of(const std::string& type, const std::string& how) {
  if (type == "u16" || type == "b16") return comparison<uint16_t>(how);
  if (type == "s16") return comparison<int16_t>(how);
  if (type == "u32" || type == "b32") return comparison<uint32_t>(how);
  if (type == "s32") return comparison<int32_t>(how);
  if (type == "u64" || type == "b64") return comparison<uint64_t>(how);
  if (type == "s64") return comparison<int64_t>(how);
  return type == "f32" ? comparison<float>(how) : nullptr;
}

}  // namespace

Handler arithmetic(const Words& words, Instruction& i) {
  const std::string &op = words[0], &type = words.back();
  if (Handler found = moves(words, i)) return found;
  if (op == "setp") return comparison_of(type, words[1]);
  if (op == "selp") return bytes_of(type) == 8 ? select<uint64_t> : select<uint32_t>;
  if (type == "pred") {
    if (op == "and") return predicates<[](uint32_t a, uint32_t b) { return a & b; }>;
    if (op == "or") return predicates<[](uint32_t a, uint32_t b) { return a | b; }>;
    if (op == "xor") return predicates<[](uint32_t a, uint32_t b) { return a ^ b; }>;
    return op == "not" ? Handler(predicates<[](uint32_t a, uint32_t) { return ~a; }>) : nullptr;
  }
  if (type == "f32" && (op == "min" || op == "max") && i.o.size() == 4) {  // of three
    Words of_three = words;
    of_three[0] += "3";
    return floats_by_mode(of_three);
  }
  if (type == "f32") return floats_by_mode(words);
  if (type == "f32x2") return pairs_handler(op);
  if (type == "bf16x2") return halves_handler<BF16, 2>(words);
  if (type == "f16x2") return halves_handler<F16, 2>(words);
  if (type == "bf16") return halves_handler<BF16, 1>(words);
  if (type == "f16") return halves_handler<F16, 1>(words);
  if (type == "u16x2" && op == "max") return two<uint32_t, uint32_t, uint32_t, max_u16x2>;
  if (Handler found = bits_handler(words)) return found;
  return integers(words);
}

}  // namespace emulator

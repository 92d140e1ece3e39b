// Moves between registers, and from one kind of number to another.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "machine.h"
#include "numbers.h"

namespace emulator {

namespace {

template <class T>
Step copy(Warp& w, const Instruction& i, uint32_t mask) {
  T* d = w.lanes<T>(i.o[0]);
  const T* a = w.lanes<T>(i.o[1]);
  set_each(d, mask, [=](int l) { return a[l]; });
  return Step::kNext;
}

template <int kBytes>  // of the whole
Step pack(Warp& w, const Instruction& i, uint32_t mask) {
  const size_t pieces = i.o.size() - 1;
  const int bits = kBytes * 8 / static_cast<int>(pieces);
  each(mask, [&](int l) {
    uint64_t all = 0;
    for (size_t p = 0; p < pieces; ++p) all |= (lane_of(w, i.o[1 + p], l) & ((uint64_t{1} << bits) - 1)) << (bits * p);
    set_lane(w, i.o[0], l, all);
  });
  return Step::kNext;
}
template <int kBytes>
Step unpack(Warp& w, const Instruction& i, uint32_t mask) {
  using Whole = std::conditional_t<kBytes == 8, uint64_t, uint32_t>;
  const int bits = kBytes * 8 / i.count;
  Whole all[kLanes];
  std::memcpy(all, w.lanes<Whole>(i.o.back()), sizeof(all));
  for (int p = 0; p < i.count; ++p) {
    const auto piece = [=, &all](int l) { return all[l] >> (bits * p) & static_cast<Whole>((uint64_t{1} << bits) - 1); };
    if (i.o[p].kind == Operand::k64) set_each(w.lanes<uint64_t>(i.o[p]), mask, piece);
    if (i.o[p].kind == Operand::k32) set_each(w.lanes<uint32_t>(i.o[p]), mask, piece);
  }
  return Step::kNext;
}

Step copy_predicate(Warp& w, const Instruction& i, uint32_t mask) {
  const uint32_t from = w.predicate(i.o[1]);
  uint32_t& p = *w.lanes<uint32_t>(i.o[0]);
  p = (p & ~mask) | (from & mask);
  return Step::kNext;
}

Handler move(const Words& words, const Instruction& i) {
  const std::string& type = words.back();
  if (type == "pred") return copy_predicate;
  const bool is_wide = bytes_of(type) == 8;
  if (i.count > 1 && (i.o.back().kind == Operand::k64) != is_wide) fail("a move between widths: " + i.text);
  if (i.count > 1) return is_wide ? unpack<8> : unpack<4>;
  if (i.o.size() > 2) return is_wide ? pack<8> : pack<4>;
  if ((i.o[0].kind == Operand::k64) != is_wide || (i.o[1].kind == Operand::k64) != is_wide) fail("a move between widths: " + i.text);
  return is_wide ? copy<uint64_t> : copy<uint32_t>;
}

// ---- conversions

template <class D, class S>
Step convert(Warp& w, const Instruction& i, uint32_t mask) {  // of integers: extended by the source's sign, or the destination's when narrowed
  each(mask, [&](int l) {
    const S from = static_cast<S>(lane_of(w, i.o[1], l));
    const D to = static_cast<D>(from);
    set_lane(w, i.o[0], l, std::is_signed_v<D> ? static_cast<uint64_t>(static_cast<int64_t>(to)) : static_cast<uint64_t>(to));
  });
  return Step::kNext;
}
template <class D>
Handler convert_from(const std::string& s) {
  if (s == "u8") return convert<D, uint8_t>;
  if (s == "s8") return convert<D, int8_t>;
  if (s == "u16") return convert<D, uint16_t>;
  if (s == "s16") return convert<D, int16_t>;
  if (s == "u32") return convert<D, uint32_t>;
  if (s == "s32") return convert<D, int32_t>;
  if (s == "u64") return convert<D, uint64_t>;
  if (s == "s64") return convert<D, int64_t>;
  return nullptr;
}
Handler convert_integers(const std::string& d, const std::string& s) {
  if (d == "u8") return convert_from<uint8_t>(s);
  if (d == "s8") return convert_from<int8_t>(s);
  if (d == "u16") return convert_from<uint16_t>(s);
  if (d == "s16") return convert_from<int16_t>(s);
  if (d == "u32") return convert_from<uint32_t>(s);
  if (d == "s32") return convert_from<int32_t>(s);
  if (d == "u64") return convert_from<uint64_t>(s);
  if (d == "s64") return convert_from<int64_t>(s);
  return nullptr;
}

template <class I>
Step float_of_integer(Warp& w, const Instruction& i, uint32_t mask) {
  each(mask, [&](int l) { w.lanes<float>(i.o[0])[l] = static_cast<float>(static_cast<I>(lane_of(w, i.o[1], l))); });
  return Step::kNext;
}
enum ToInteger { kToNearest, kToZero, kToLess, kToMore };
template <class I, int kHow>
Step integer_of_float(Warp& w, const Instruction& i, uint32_t mask) {
  each(mask, [&](int l) {
    const double x = w.lanes<float>(i.o[1])[l];
    const double r = kHow == kToNearest ? std::nearbyint(x) : kHow == kToZero ? std::trunc(x) : kHow == kToLess ? std::floor(x) : std::ceil(x);
    const double least = static_cast<double>(std::numeric_limits<I>::min()), most = static_cast<double>(std::numeric_limits<I>::max());
    const I value = std::isnan(x) ? 0 : r <= least ? std::numeric_limits<I>::min() : r >= most ? std::numeric_limits<I>::max() : static_cast<I>(r);
    set_lane(w, i.o[0], l, static_cast<uint64_t>(static_cast<int64_t>(value)));
  });
  return Step::kNext;
}
template <class I>
Handler integer_of(const Words& words) {
  for (const std::string& word : words) {
    if (word == "rni") return integer_of_float<I, kToNearest>;
    if (word == "rzi") return integer_of_float<I, kToZero>;
    if (word == "rmi") return integer_of_float<I, kToLess>;
    if (word == "rpi") return integer_of_float<I, kToMore>;
  }
  return nullptr;
}

template <class H>
Step narrow(Warp& w, const Instruction& i, uint32_t mask) {
  const float* a = w.lanes<float>(i.o[1]);
  set_each(w.lanes<uint32_t>(i.o[0]), mask, [=](int l) { return uint32_t{H::bits(a[l])}; });
  return Step::kNext;
}
template <class H>
Step widen(Warp& w, const Instruction& i, uint32_t mask) {
  const uint32_t* a = w.lanes<uint32_t>(i.o[1]);
  set_each(w.lanes<float>(i.o[0]), mask, [=](int l) { return H::value(static_cast<uint16_t>(a[l])); });
  return Step::kNext;
}
template <class H, int kBits>  // d = a above b
Step narrow_two(Warp& w, const Instruction& i, uint32_t mask) {
  const float *a = w.lanes<float>(i.o[1]), *b = w.lanes<float>(i.o[2]);
  set_each(w.lanes<uint32_t>(i.o[0]), mask, [=](int l) { return uint32_t{H::bits(a[l])} << kBits | H::bits(b[l]); });
  return Step::kNext;
}
template <class D, class S, int kBits>
Step between_two(Warp& w, const Instruction& i, uint32_t mask) {
  constexpr uint32_t kMost = (1u << kBits) - 1;
  static const auto known = [] {
    std::array<uint16_t, kMost + 1> made;
    for (uint32_t from = 0; from <= kMost; ++from) made[from] = D::bits(S::value(from));
    return made;
  }();
  const uint32_t* a = w.lanes<uint32_t>(i.o[1]);
  const uint16_t* of = known.data();
  set_each(w.lanes<uint32_t>(i.o[0]), mask, [=](int l) { return uint32_t{of[a[l] >> kBits & kMost]} << 16 | of[a[l] & kMost]; });
  return Step::kNext;
}

Handler conversion(const Words& words) {
  const std::string &d = words[words.size() - 2], &s = words.back();
  if (Handler found = convert_integers(d, s)) return found;
  if (d == "f32" && s == "f32") return floats_by_mode(words);
  if (d == "f16" && s == "f32") return narrow<F16>;
  if (d == "bf16" && s == "f32") return narrow<BF16>;
  if (d == "f32" && s == "f16") return widen<F16>;
  if (d == "f32" && s == "bf16") return widen<BF16>;
  if (d == "bf16x2" && s == "f32") return narrow_two<BF16, 16>;
  if (d == "f16x2" && s == "f32") return narrow_two<F16, 16>;
  if (d == "e4m3x2" && s == "f32") return narrow_two<E4M3, 8>;
  if (d == "f16x2" && s == "e4m3x2") return between_two<F16, E4M3, 8>;
  if (d == "f16x2" && s == "e2m1x2") return between_two<F16, E2M1, 4>;
  if (d == "bf16x2" && s == "e2m1x2") return between_two<BF16, E2M1, 4>;  // Triton 3.9
  if (d == "f32" && s == "s32") return float_of_integer<int32_t>;
  if (d == "f32" && s == "u32") return float_of_integer<uint32_t>;
  if (d == "f32" && s == "s64") return float_of_integer<int64_t>;
  if (d == "f32" && s == "u64") return float_of_integer<uint64_t>;
  if (d == "f32" && s == "u16") return float_of_integer<uint16_t>;
  if (d == "f32" && s == "s16") return float_of_integer<int16_t>;
  if (d == "f32" && s == "u8") return float_of_integer<uint8_t>;
  if (d == "s32" && s == "f32") return integer_of<int32_t>(words);
  if (d == "u32" && s == "f32") return integer_of<uint32_t>(words);
  if (d == "s16" && s == "f32") return integer_of<int16_t>(words);
  if (d == "u16" && s == "f32") return integer_of<uint16_t>(words);
  return nullptr;
}

}  // namespace

Handler moves(const Words& words, const Instruction& i) {
  const std::string& op = words[0];
  if (op == "mov") return move(words, i);
  if (op == "cvt") return conversion(words);
  return op == "cvta" ? copy<uint64_t> : nullptr;
}

}  // namespace emulator

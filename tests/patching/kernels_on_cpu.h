// What SGLang's kernels between our operators need of CUDA, of its own headers and of tvm-ffi, for a CPU and this
// interpreter's tensors: kernels_on_cpu.py puts their text behind wheels_on_cpu.h and it. A block's threads have turns
// (turns_on_cpu.h); numbers are rounded here by their definition, not by the text that is tested.

#include "turns_on_cpu.h"

#define __forceinline__ inline
#define __builtin_assume(...)

static dim3 blockDim;

// Of 16 and 8 bits: the nearest, ties to even.
struct bf16_t {
  uint16_t bits;
  bf16_t() = default;
  bf16_t(float x) {
    const uint32_t word = std::bit_cast<uint32_t>(x);
    bits = x != x ? 0x7fff : static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};
struct fp32x2_t {
  float x, y;
};
struct bf16x2_t {
  bf16_t x, y;
};
inline uint8_t e4m3(float x) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  if (x != x) return sign | 0x7f;
  const float size = std::fabs(x);
  if (size >= 464) return sign | 0x7e;  // saturates: cvt.rn.satfinite
  if (size < 0x1p-6f) return sign | static_cast<uint8_t>(std::nearbyint(size * 0x1p9f));  // and the smallest normal one
  const int exponent = std::ilogb(size), steps = std::nearbyint(std::ldexp(size, 3 - exponent));  // 8 to 16
  return sign | static_cast<uint8_t>(std::min((exponent + 7) * 8 + steps - 8, 0x7e));
}
struct fp8_e4m3_t {
  uint8_t __x;
  fp8_e4m3_t() = default;
  explicit fp8_e4m3_t(float x) : __x(e4m3(x)) {}
  explicit operator float() const { throw std::logic_error("V4.1's"); }
};
struct fp8x2_e4m3_t {
  uint8_t x, y;
  fp8x2_e4m3_t() = default;
  explicit fp8x2_e4m3_t(fp32x2_t of) : x(e4m3(of.x)), y(e4m3(of.y)) {}
};
using __nv_fp8_e4m3 = fp8_e4m3_t;
constexpr int __NV_E2M1 = 0, cudaRoundNearest = 0;
inline int __nv_cvt_float2_to_fp4x2(fp32x2_t, int, int) { throw std::logic_error("V4.1's"); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline bf16x2_t __hmin2(bf16x2_t a, bf16x2_t b) {
  return {std::fmin(float(a.x), float(b.x)), std::fmin(float(a.y), float(b.y))};
}
inline bf16x2_t __hmax2(bf16x2_t a, bf16x2_t b) {
  return {std::fmax(float(a.x), float(b.x)), std::fmax(float(a.y), float(b.y))};
}

struct Warp {
  turns::Meeting lanes{32};
  uint64_t held[32];
};
static Warp warps[32];
static turns::Meeting block_of_all{0};
inline void __syncthreads() { block_of_all.arrive_and_wait(); }
inline void __syncwarp() { warps[threadIdx.x / 32].lanes.arrive_and_wait(); }
template <class T>
T __shfl_xor_sync(uint32_t, T x, uint32_t mask, uint32_t = 32) {
  Warp& warp = warps[threadIdx.x / 32];
  std::memcpy(&warp.held[threadIdx.x % 32], &x, sizeof x);
  warp.lanes.arrive_and_wait();
  std::memcpy(&x, &warp.held[threadIdx.x % 32 ^ mask], sizeof x);
  warp.lanes.arrive_and_wait();
  return x;
}

namespace tvm::ffi {
struct TensorView {
  void* data = nullptr;
  std::vector<int64_t> shape, strides;
  int kind = kDLGPU;
  std::shared_ptr<std::vector<char>> owned = {};

  void* data_ptr() const { return data; }
  int64_t size(int i) const { return shape[i]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int64_t length : shape) count *= length;
    return count;
  }
  int64_t dim() const { return shape.size(); }
  int64_t stride(int i) const { return strides[i]; }
  DLDevice device() const { return {kind, 0}; }
  TensorView on_host() && {
    kind = kDLCPU;
    return std::move(*this);
  }
  TensorView heads(int64_t count, int64_t step = -1) && {  // of [rows, heads, values] the first ones
    shape[1] = count;
    strides[1] = step < 0 ? strides[1] : step;
    return std::move(*this);
  }
};
template <class T>
struct Optional : std::optional<T> {
  using std::optional<T>::optional;
};
using Tensor = TensorView;
template <class A, class B>
struct Tuple {
  A first;
  B second;
};
}  // namespace tvm::ffi

inline tvm::ffi::TensorView view(void* data, std::vector<int64_t> shape, int64_t row = -1) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size() - 1; i-- > 0;) strides[i] = strides[i + 1] * shape[i + 1];
  if (row >= 0) strides[0] = row;
  return {data, shape, strides};
}

namespace ffi {
inline tvm::ffi::TensorView empty(std::initializer_list<int64_t> shape, DLDataType, DLDevice) {
  auto made = view(nullptr, shape);
  made.owned = std::make_shared<std::vector<char>>(16 * made.numel() + 16);
  made.data = made.owned->data();
  return made;
}
}  // namespace ffi

constexpr float kFP8E4M3Max = 448.0f;
template <class T>
struct Packed;
template <>
struct Packed<bf16_t> {
  using type = bf16x2_t;
};
template <class T>
using packed_t = typename Packed<T>::type;

namespace host {
struct SymbolicSize {
  SymbolicSize(const char*) {}
  int64_t value = -1;
  int64_t unwrap() const { return value; }
  void set_value(int64_t set) { value = set; }
};
struct SymbolicDType {
  template <class T>
  bool is_type() const {
    return std::is_same_v<T, int64_t>;  // positions of these tests
  }
};
struct SymbolicDevice {
  int kind = -1;
  template <int...>
  void set_options() {}
  DLDevice unwrap() const { return {kind < 0 ? kDLGPU : kind, 0}; }
};
struct Length {
  SymbolicSize* symbol = nullptr;
  int64_t value = -1;
  Length(SymbolicSize& named) : symbol(&named) {}
  template <class Number, class = std::enable_if_t<std::is_integral_v<Number>>>
  Length(Number number) : value(static_cast<int64_t>(number)) {}
};
template <class... Told>
inline void RuntimeCheck(bool holds, Told&&...) {
  if (!holds) throw std::runtime_error("RuntimeCheck");
}
inline void RuntimeDeviceCheck(int = 0) {}

struct TensorMatcher {
  std::vector<Length> lengths;
  std::vector<Length> steps;
  SymbolicDevice* device = nullptr;
  TensorMatcher(std::initializer_list<Length> given) : lengths(given) {}
  template <class... Types, class... Told>
  TensorMatcher&& with_dtype(Told&&...) && {
    return std::move(*this);
  }
  template <int...>
  TensorMatcher&& with_device() && {
    return std::move(*this);
  }
  template <int...>
  TensorMatcher&& with_device(SymbolicDevice& named) && {
    device = &named;
    return std::move(*this);
  }
  TensorMatcher&& with_strides(std::initializer_list<Length> given) && {
    steps = given;
    return std::move(*this);
  }
  static void compare(const std::vector<Length>& wanted, const std::vector<int64_t>& found) {
    RuntimeCheck(wanted.size() == found.size());
    for (size_t i = 0; i < wanted.size(); ++i) {
      int64_t value = wanted[i].value;
      if (wanted[i].symbol) value = wanted[i].symbol->value < 0 ? wanted[i].symbol->value = found[i] : wanted[i].symbol->value;
      RuntimeCheck(value < 0 || value == found[i]);
    }
  }
  TensorMatcher&& verify(const tvm::ffi::TensorView& tensor) && {
    compare(lengths, tensor.shape);
    if (!steps.empty()) compare(steps, tensor.strides);
    if (device && device->kind < 0) device->kind = tensor.kind;
    return std::move(*this);
  }
};

template <class A, class B>
constexpr auto div_ceil(A a, B b) {
  return (a + b - 1) / b;
}
template <class Number>
inline auto irange(Number count) {
  return std::views::iota(Number(0), count);
}
template <class...>
inline constexpr bool dependent_false_v = false;

struct LaunchKernel {
  uint32_t blocks, threads;
  template <class... Others>
  LaunchKernel(uint32_t blocks, uint32_t threads, Others&&...) : blocks(blocks), threads(threads) {}
  static void* resolve_device(DLDevice) { return nullptr; }
  LaunchKernel& enable_pdl(bool) { return *this; }
  template <class Kernel, class Params>
  void operator()(Kernel kernel, const Params& params) {
    blockDim = {threads, 1, 1};
    gridDim = {blocks, 1, 1};
    for (unsigned block = 0; block < blocks; ++block) {
      blockIdx = {block, 0, 0};
      for (Warp& warp : warps) warp.lanes = {32};
      block_of_all = {static_cast<int>(threads)};
      RuntimeCheck(turns::run(threads, [&] { kernel(params); }));
    }
  }
};

}  // namespace host

namespace device {
constexpr uint32_t kWarpThreads = 32, kFullMask = ~0u;
template <bool>
inline void PDLWaitPrimary() {}
template <bool>
inline void PDLTriggerSecondary() {}

template <class To>
struct Cast {
  template <class From>
  static To of(const From& x) {
    return static_cast<To>(x);
  }
};
template <>
struct Cast<fp32x2_t> {
  static fp32x2_t of(const bf16x2_t& x) { return {float(x.x), float(x.y)}; }
};
template <>
struct Cast<bf16x2_t> {
  static bf16x2_t of(const fp32x2_t& x) { return {x.x, x.y}; }
  static bf16x2_t of(const bf16x2_t& x) { return x; }
};
template <class To, class From>
inline To cast(const From& x) {
  return Cast<To>::of(x);
}
namespace math {
constexpr float FP8_E4M3_MAX = 448.0f;
inline float rsqrt(float x) { return static_cast<float>(1 / std::sqrt(static_cast<double>(x))); }
inline float sqrt(float x) { return std::sqrt(x); }
inline float abs(float x) { return std::fabs(x); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline float min(float a, float b) { return std::fmin(a, b); }
}  // namespace math
namespace warp {
constexpr uint32_t kFullMask = ~0u;
template <uint32_t kThreads = 32, class T>
T reduce_sum(T x, uint32_t = ~0u) {
  for (uint32_t mask = kThreads / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}
template <uint32_t kThreads = 32, class T>
T reduce_max(T x, uint32_t = ~0u) {
  for (uint32_t mask = kThreads / 2; mask > 0; mask /= 2) x = std::max(x, __shfl_xor_sync(~0u, x, mask));
  return x;
}
template <uint32_t kThreads = 32, class T>
T reduce_min(T x, uint32_t = ~0u) {
  for (uint32_t mask = kThreads / 2; mask > 0; mask /= 2) x = std::min(x, __shfl_xor_sync(~0u, x, mask));
  return x;
}
}  // namespace warp
template <class T, size_t N>
struct AlignedVector {
  T values[N];
  void load(const void* from, int64_t at = 0) { std::memcpy(values, static_cast<const T*>(from) + at * N, sizeof values); }
  void store(void* to, int64_t at = 0) const { std::memcpy(static_cast<T*>(to) + at * N, values, sizeof values); }
  T* data() { return values; }
  const T* data() const { return values; }
  T& operator[](size_t i) { return values[i]; }
  const T& operator[](size_t i) const { return values[i]; }
};
namespace tile {
template <class T>
struct Memory {
  uint32_t lane, threads;
  static Memory warp() { return {threadIdx.x % kWarpThreads, kWarpThreads}; }
  static Memory cta() { return {threadIdx.x, blockDim.x}; }
  T load(const void* from, int64_t tile = 0) const { return static_cast<const T*>(from)[lane + tile * threads]; }
  void store(void* to, T x, int64_t tile = 0) const { static_cast<T*>(to)[lane + tile * threads] = x; }
};
}  // namespace tile
namespace pointer {
template <class T = char, class... Number>
void* offset(void* from, Number... by) {
  return static_cast<T*>(from) + (... + by);
}
template <class T = char, class... Number>
const void* offset(const void* from, Number... by) {
  return static_cast<const T*>(from) + (... + by);
}
}  // namespace pointer
}  // namespace device

#define CALL(name, ...)                                                           \
  extern "C" bool name(const int64_t* n, void** t) {                              \
    try {                                                                         \
      __VA_ARGS__;                                                                \
      return true;                                                                \
    } catch (std::exception & error) {                                            \
      return std::fprintf(stderr, "%s", error.what()), false;                     \
    }                                                                             \
  }

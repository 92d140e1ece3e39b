// What SGLang's planner of groups and its kernels for groups of 4 need of CUDA, of its own headers and of tvm-ffi, for a
// CPU and this interpreter's tensors: test_wheel_groups.py puts their text behind wheels_on_cpu.h and it. A launch is a
// loop over its threads; none of them waits for another.

struct Index {
  uint32_t x = 0;
};
static Index threadIdx, blockIdx, blockDim;

// of kernels that are only compiled here
inline void __syncthreads() {}
inline uint32_t __shfl_xor_sync(uint32_t, uint32_t, uint32_t, int) { throw std::logic_error("shuffle"); }

namespace tvm::ffi {
struct TensorView {
  void* data = nullptr;
  std::vector<int64_t> shape;
  int kind = kDLGPU;
  std::shared_ptr<std::vector<char>> owned;

  void* data_ptr() const { return data; }
  int64_t size(int i) const { return shape[i]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int64_t length : shape) count *= length;
    return count;
  }
  int64_t stride(int i) const {
    int64_t step = 1;
    for (size_t k = i + 1; k < shape.size(); ++k) step *= shape[k];
    return step;
  }
  DLDevice device() const { return {kind, 0}; }
};
using Tensor = TensorView;
template <class A, class B>
struct Tuple {
  A first;
  B second;
};
}  // namespace tvm::ffi

using tvm::ffi::TensorView;
inline TensorView view(void* data, std::vector<int64_t> shape, int kind = kDLGPU) { return {data, shape, kind, nullptr}; }

namespace ffi {
inline TensorView empty(std::initializer_list<int64_t> shape, DLDataType, DLDevice) {
  TensorView made{nullptr, shape, kDLGPU, nullptr};
  made.owned = std::make_shared<std::vector<char>>(16 * made.numel() + 16);
  made.data = made.owned->data();
  return made;
}
}  // namespace ffi

struct SymbolicSize {
  SymbolicSize(const char*) {}
  int64_t value = -1;
  int64_t unwrap() const { return value; }
};
struct SymbolicDevice {
  DLDevice value{-1, 0};
  template <int...>
  void set_options() {}
  DLDevice unwrap() const { return value; }
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
inline void RuntimeDeviceCheck(int) {}

struct TensorMatcher {
  std::vector<Length> lengths;
  SymbolicDevice* device = nullptr;

  TensorMatcher(std::initializer_list<Length> given) : lengths(given) {}
  template <class...>
  TensorMatcher&& with_dtype() && {
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
  TensorMatcher&& verify(const TensorView& tensor) && {
    RuntimeCheck(tensor.shape.size() == lengths.size());
    for (size_t i = 0; i < lengths.size(); ++i) {
      int64_t& wanted = lengths[i].symbol ? lengths[i].symbol->value : lengths[i].value;
      if (lengths[i].symbol && wanted < 0) wanted = tensor.shape[i];
      RuntimeCheck(wanted < 0 || wanted == tensor.shape[i]);
    }
    if (device && device->value.device_type < 0) device->value = tensor.device();
    return std::move(*this);
  }
};

template <class A, class B>
inline auto div_ceil(A a, B b) {
  return (a + b - 1) / b;
}
template <class Number>
inline auto irange(Number count) {
  return std::views::iota(Number(0), count);
}

struct LaunchKernel {
  uint32_t blocks, threads;
  template <class... Others>
  LaunchKernel(uint32_t blocks, uint32_t threads, Others&&...) : blocks(blocks), threads(threads) {}
  static void* resolve_device(DLDevice) { return nullptr; }
  LaunchKernel& enable_pdl(bool) { return *this; }
  template <class Kernel, class Params>
  void operator()(Kernel kernel, const Params& params) {
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(params);
  }
};

//@@ SGLang's namespace
namespace host::compress {}
namespace device {
constexpr uint32_t kWarpThreads = 32, kFullMask = ~0u;
namespace warp {
inline uint32_t reduce_max(uint32_t) { throw std::logic_error("shuffle"); }
inline uint32_t reduce_min(uint32_t) { throw std::logic_error("shuffle"); }
}  // namespace warp
template <class To, class From>
inline To cast(const From& x) {
  return static_cast<To>(x);
}
template <bool>
inline void PDLWaitPrimary() {}
template <bool>
inline void PDLTriggerSecondary() {}
template <class T, size_t N>
struct AlignedVector {
  T values[N];
  void fill(T x) {
    for (T& value : values) value = x;
  }
  T& operator[](size_t i) { return values[i]; }
  T operator[](size_t i) const { return values[i]; }
};
namespace tile {
template <class T>
struct Memory {
  uint32_t lane;
  static Memory warp() { return {threadIdx.x % kWarpThreads}; }
  T load(const void* from, int64_t tile = 0) const { return static_cast<const T*>(from)[lane + tile * kWarpThreads]; }
  void store(void* to, T x, int64_t tile = 0) const { static_cast<T*>(to)[lane + tile * kWarpThreads] = x; }
};
}  // namespace tile
}  // namespace device
//@@ end of it

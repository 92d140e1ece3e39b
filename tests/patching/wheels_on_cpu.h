// What SGLang's text needs of C++, of CUDA's words and of DLPack, for a CPU: in front of groups_on_cpu.h and of
// kernels_on_cpu.h, which have the rest of it, each in its own way.
#include <array>
#include <bit>
#include <cfloat>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <ranges>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
#define __shared__ static
#define SGL_DEVICE inline
#define SGL_DEVICE_HOST inline
using std::max;
using std::min;

struct uint2 {
  uint32_t x, y;
};
inline float __expf(float x) { return std::exp(x); }

// of kernels that are only compiled here
inline uint32_t atomicAdd(uint32_t*, uint32_t) { throw std::logic_error("atomicAdd"); }
inline uint32_t __shfl_up_sync(uint32_t, uint32_t, int) { throw std::logic_error("shuffle"); }

enum { cudaMemcpyHostToDevice };
inline int cudaMemcpyAsync(void* to, const void* from, size_t size, int, void*) {
  std::memcpy(to, from, size);
  return 0;
}
constexpr uint8_t kDLUInt = 1;
constexpr int kDLCPU = 1, kDLGPU = 2, kDLCUDA = 2;
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLDevice {
  int device_type, device_id;
};

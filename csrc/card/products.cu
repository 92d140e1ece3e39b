// Probes of arithmetic: one mma a warp, of E4M3 operands, plain and block-scaled, or of f16.
#include "../device/mma.cuh"
#include "../launch_kernel.h"
#include "card.h"

namespace dsv4::card {

namespace {

constexpr int kRows = 16, kColumns = 8, kDepth = 32;  // bytes of the depth: 32 E4M3, or 16 f16, which lie alike
enum Kind { kE4m3, kScaled, kF16 };

__device__ __forceinline__ uint32_t word_at(const uint8_t* p) { return *reinterpret_cast<const uint32_t*>(p); }

// scale-a: of row g from lanes 4 g, of row g + 8 from lanes 4 g + 1; scale-b: of column g from lanes 4 g
__device__ __forceinline__ void mma_block_scaled(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t a_scale,
                                                 uint32_t b_scale) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  asm("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {%12,%12}, {%11}, {%12,%12};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(a_scale), "r"(b_scale), "n"(0));
#else
  d[0] = d[1] = d[2] = d[3] = __uint_as_float(0x7fffffffu);
#endif
}

template <int kKind>  // a Kind: names of kernels stay plain
__global__ void __launch_bounds__(32) products_kernel(const Products p) {
  const int lane = threadIdx.x, group = lane / 4, quarter = lane % 4;
  const int64_t i = blockIdx.x;
  const uint8_t* const a_at = p.a + (i * kRows + group) * kDepth + quarter * 4;
  const uint8_t* const b_at = p.b + (i * kColumns + group) * kDepth + quarter * 4;
  const uint32_t a[4] = {word_at(a_at), word_at(a_at + 8 * kDepth), word_at(a_at + 16), word_at(a_at + 8 * kDepth + 16)};
  float d[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) d[j] = p.c[(i * kRows + group + j / 2 * 8) * kColumns + quarter * 2 + j % 2];
  if constexpr (kKind == kScaled) {
    mma_block_scaled(d, a, word_at(b_at), word_at(b_at + 16), p.a_scale[i * kRows + group + lane % 2 * 8], p.b_scale[i * kColumns + group]);
  } else if constexpr (kKind == kF16) {
    mma_f16(d, a, word_at(b_at), word_at(b_at + 16));
  } else {
    mma_fp8(d, a, word_at(b_at), word_at(b_at + 16));
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) p.d[(i * kRows + group + j / 2 * 8) * kColumns + quarter * 2 + j % 2] = d[j];
}

using Kernel = void (*)(Products);
Kernel kernel_of(const Products& p) {
  return p.f16 ? products_kernel<kF16> : p.a_scale != nullptr ? products_kernel<kScaled> : products_kernel<kE4m3>;
}

}  // namespace

void launch_products(const Products& products, cudaStream_t stream) {
  Launcher{"card", false, stream}(kernel_of(products), dim3(products.count), 32, 0, products);
}

}  // namespace dsv4::card

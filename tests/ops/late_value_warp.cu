// The kernel for few rows, with one warp of the value team held back where it is between the barrier at a unit's end and the factors by
// which it folds the unit: what a busy multiprocessor may do to it. The row's bits must not know. Compiled by
// test_sparse_decode_late_warp_gpu.py against the sources as they are; nothing of it is in the module.
//
// A row of 41 leaves and more has units of 8, the last of which may have as few as one or two: then the softmax team needs nothing of the
// value team to be done with it. The keys are such that the factors of the last two units differ: only the last unit but one has great
// logits, so its factors (2^-64, 1) throw away what was before it, and the last unit's (1, 2^-64) throw away the last unit.
//
// Exit status: 0 all rows have the same bits with and without delay, 1 some do not, 2 it could not be found out.
#include <cuda_fp8.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "sparse_decode/fold.cuh"
#include "sparse_decode/roles.cuh"

namespace dsv4::sparse_decode {

__device__ int late_warp = -1;
__device__ unsigned long long late_ns = 0;

__device__ __forceinline__ unsigned long long now_ns() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}

// in place of fold_vectors, whatever it takes
template <typename... Arguments>
__device__ __forceinline__ void late_fold_vectors(Arguments&&... arguments) {
  if (static_cast<int>(threadIdx.x / 32) == late_warp) {
    const unsigned long long start = now_ns();
    while (now_ns() - start < late_ns) {
    }
  }
  fold_vectors(arguments...);
}

}  // namespace dsv4::sparse_decode

#define fold_vectors late_fold_vectors
#include "sparse_decode/value.cuh"
#undef fold_vectors
#include "sparse_decode/kernel.cuh"

namespace {

using namespace dsv4;
using namespace dsv4::sparse_decode;

constexpr int kPageSize = 64, kHeads = kBlockHeads;
constexpr float kGreat = 64.f;  // logits in log2 of the last unit but one; the others' are 0

void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}

template <typename T>
T* on_device(const std::vector<T>& v) {
  T* p = nullptr;
  must(cudaMalloc(&p, v.size() * sizeof(T)), "cudaMalloc");
  must(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  return p;
}

FastDivisor divisor_of(int divisor) {  // make_divisor of launch.cu
  uint32_t shift = 0;
  while ((1ll << shift) < divisor) ++shift;
  return {static_cast<uint32_t>(divisor), static_cast<uint32_t>(((1ull << (31 + shift)) + divisor - 1) / divisor), shift};
}

uint16_t bf16(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  return static_cast<uint16_t>(bits >> 16);
}
float of_bf16(uint16_t v) {
  const uint32_t bits = static_cast<uint32_t>(v) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// All dimensions of a candidate but the first say which unit it is in; the first is 1 in the last unit but one.
std::vector<uint8_t> make_pages(int candidates, int unit_candidates, int units) {
  const size_t bytes = page_bytes(kPageSize);
  std::vector<uint8_t> pages((candidates + kPageSize - 1) / kPageSize * bytes);
  for (int i = 0; i < candidates; ++i) {
    const int unit = i / unit_candidates, entry = i % kPageSize;
    uint8_t* const page = pages.data() + i / kPageSize * bytes;
    uint8_t* const data = page + entry * kDataBytes;
    for (int d = 0; d < kNopeDim; ++d) data[d] = __nv_fp8_e4m3(d > 0 ? unit + 1.f : unit == units - 2 ? 1.f : 0.f).__x;
    for (int d = 0; d < kRopeDim; ++d) reinterpret_cast<uint16_t*>(data + kNopeDim)[d] = bf16(unit + 1.f);
    for (int tile = 0; tile < kNumNopeTiles; ++tile) page[kPageSize * kDataBytes + entry * kScaleBytes + tile] = 127;
  }
  return pages;
}

struct Row {
  Params p = {};
  int leaves, units;

  explicit Row(int leaves_) : leaves(leaves_) {
    const int log2 = unit_leaves_log2(leaves), candidates = leaves * kLeaf;
    units = (leaves + (1 << log2) - 1) >> log2;
    const std::vector<uint8_t> pages = make_pages(candidates, kLeaf << log2, units);
    std::vector<int32_t> slots(candidates);
    for (int i = 0; i < candidates; ++i) slots[i] = i;
    std::vector<uint16_t> q(kHeads * kHeadDim, 0);
    for (int head = 0; head < kHeads; ++head) q[head * kHeadDim] = bf16(kGreat);
    p.q = on_device(q);
    p.out = on_device(q);
    p.q_stride_row = p.out_stride_row = kHeads * kHeadDim;
    p.q_stride_head = p.out_stride_head = kHeadDim;
    p.scale_log2 = 1.f;
    p.rows = p.head_blocks = p.unit_slots = 1;
    p.heads = kHeads;
    p.main.pages = on_device(pages);
    p.main.page_bytes = static_cast<uint32_t>(page_bytes(kPageSize));
    p.main.num_slots = (candidates + kPageSize - 1) / kPageSize * kPageSize;
    p.main.page_size = divisor_of(kPageSize);
    p.main.indices = on_device(slots);
    p.main.indices_stride = p.main.width = candidates;
    p.extra.page_size = divisor_of(1);
    p.partials = on_device(std::vector<float>(kPartialFloats, 0.f));
    p.splits = divisor_of(1);
    p.guess_leaves = p.guess_main_leaves = leaves;
  }

  std::vector<uint16_t> run(int warp, unsigned long long ns) const {
    must(cudaMemcpyToSymbol(late_warp, &warp, sizeof(warp)), "cudaMemcpyToSymbol");
    must(cudaMemcpyToSymbol(late_ns, &ns, sizeof(ns)), "cudaMemcpyToSymbol");
    must(cudaMemset(p.out, 0xff, kHeads * kHeadDim * 2), "cudaMemset");
    const auto kernel = &sparse_decode_kernel<false, false>;
    must(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SharedMemoryPlan)), "cudaFuncSetAttribute");
    kernel<<<dim3(1, 1, 1), kThreads, sizeof(SharedMemoryPlan)>>>(p);
    must(cudaGetLastError(), "launch");
    must(cudaDeviceSynchronize(), "kernel");
    std::vector<uint16_t> out(kHeads * kHeadDim);
    must(cudaMemcpy(out.data(), p.out, out.size() * 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return out;
  }
};

}  // namespace

int main() {
  bool differ = false;
  for (int leaves = kShortLeaves + 1; leaves <= kShortLeaves + (1 << kMinLongUnitLog2); ++leaves) {
    const Row row(leaves);
    const std::vector<uint16_t> expected = row.run(-1, 0);
    const float value = of_bf16(expected[kHeadDim - 1]);
    if (value != row.units - 1.f) {
      std::printf("%d leaves: without delay %g, expected %d\n", leaves, value, row.units - 1);
      return 2;
    }
    std::printf("%d leaves, %d in the last unit; without delay %g; late warps with other bits:", leaves,
                leaves - ((row.units - 1) << kMinLongUnitLog2), value);
    int others = 0;
    for (int warp = 0; warp < kValueWarps; ++warp) {
      const std::vector<uint16_t> out = row.run(warp, 300000);
      if (out == expected) continue;
      std::printf(" %d (%g)", warp, of_bf16(out[warp * kTileDim + kTileDim - 1]));
      ++others;
    }
    std::printf("%s\n", others == 0 ? " none" : "");
    differ = differ || others > 0;
  }
  std::printf(differ ? "DIFFERENT BITS\n" : "SAME BITS\n");
  return differ ? 1 : 0;
}

// SGLang launches this once a layer, behind the step's acceptance and in front of all that prepares the next: 20 launches a step of Flash.
//
// A block has one token of a request in one layer; it stores nothing where the token was accepted.
#include "drafts.h"

#include "../device/barriers.cuh"
#include "../kv_page_layout.h"
#include "../launch_kernel.h"

namespace dsv4::compressor {

namespace {

constexpr int kVector = 4;  // values of a thread
constexpr int kThreads = 2 * kHeadDim / kVector;  // the first half has the values, the second the scores

__global__ void __launch_bounds__(kThreads) clear_drafts_kernel(const __grid_constant__ DraftsParams p) {
  pdl_trigger();
  pdl_wait();
  const int request = blockIdx.x, token = blockIdx.y;
  if (token < p.accepted[request]) return;
  const int64_t slot = p.requests[request] * p.ring + (p.lengths[request] + token) % p.ring;
  if (slot < 0 || slot >= p.state_slots) return;
  const float value = threadIdx.x < kThreads / 2 ? 0.f : -INFINITY;
  reinterpret_cast<float4*>(p.states[blockIdx.z] + slot * (2 * kHeadDim))[threadIdx.x] = make_float4(value, value, value, value);
}

}  // namespace

void launch_clear_drafts(const DraftsParams& params, bool pdl, cudaStream_t stream) {
  const dim3 grid(params.num_requests, params.tokens, params.num_states);
  Launcher{"clear_drafts", pdl, stream}(clear_drafts_kernel, grid, kThreads, 0, params);
}

}  // namespace dsv4::compressor

// What rejected drafts left in the states of groups of 128: values 0 and scores -inf in their slots, of all layers in one launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dsv4::compressor {

constexpr int kMostStates = 64;  // of a call: by value among a launch's parameters, no table of them on the card

struct DraftsParams {
  const int64_t* requests;     // [num_requests]: whose ring of slots
  const int64_t* lengths;      // [num_requests]: in front of the step's tokens
  const int32_t* accepted;     // [num_requests]: tokens of the step that stay, the first ones
  float* states[kMostStates];  // [state_slots, 1024] contiguous, of a layer
  int64_t state_slots;
  int32_t num_states, num_requests, tokens, ring;
};

void launch_clear_drafts(const DraftsParams& params, bool pdl, cudaStream_t stream);

}  // namespace dsv4::compressor

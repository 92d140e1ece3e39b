// Hyper-connections (mHC): parameters and launch. Device code in mix.cuh, finish.cuh, many.cuh; sizes in config.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../launch_kernel.h"

namespace dsv4::mhc {

struct Params {
  // post: the streams that the sublayer's output makes of the old ones; f == nullptr: x are the streams
  const uint16_t* f;           // [rows, hidden] bf16 sublayer output
  int64_t f_stride;            // elements, multiple of 8
  const float* post;           // [rows, 4]
  const float* comb;           // [rows, 4 old, 4 new]
  uint16_t* streams;           // [rows, 4, hidden] bf16, contiguous
  const uint16_t* x;           // [rows, 4, hidden] bf16
  int64_t x_stride;            // elements between rows, multiple of 8

  // pre: the next sublayer's input; fn == nullptr: post only
  const float* fn;             // [24, 4 * hidden]; of the head [4, 4 * hidden]
  const float* scale;          // [3]; of the head [1]
  const float* base;           // [24]; of the head [4]
  const uint16_t* norm_weight; // [hidden] bf16, or nullptr: y is not normed
  float rms_eps, hc_eps, norm_eps, post_scale;
  int32_t sinkhorn_iters;
  uint16_t* y;                 // [rows, hidden] bf16
  float* post_out;             // [rows, 4]
  float* comb_out;             // [rows, 4, 4]

  float* partials;             // workspace: [rows, hidden / 32, 32 or 8]; for many rows [rows, hidden / 128, 32]
  uint32_t* counters;          // for many rows: one per 64 rows, zero before
  int32_t rows, hidden;
  float inverse_hidden;        // 1 / hidden
  bool head;                   // four mixes (pre) and no more
};

// Why the kernels cannot take this width; empty: they can.
std::string problem(int hidden);

bool has_many(const Params& params);  // whether there is a kernel for many rows: post and pre, hidden 4096

struct Workspace {
  int64_t partials_bytes, counter_words;
};
Workspace workspace(int rows, int hidden, bool head, bool many);

// post only: one kernel. Few rows: two. Many rows: one, and the counters must be zero before.
void launch(const Params& params, bool many, int num_sms, bool pdl, cudaStream_t stream);

std::vector<KernelAttributes> kernel_attributes();
int shared_bytes();  // of the kernel that takes the most

}  // namespace dsv4::mhc

// The router's choice of experts: parameters and launch. Device code in kernel.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "../launch_kernel.h"

namespace dsv4::router_topk {

constexpr int kMaxExperts = 512, kMaxTopk = 8;

struct Params {
  const void* logits;        // [rows, experts] fp32 or bf16
  int64_t logits_stride;     // elements
  const void* bias;          // [experts] fp32 or bf16
  float* weights;            // [rows, topk]
  int32_t* ids;              // likewise
  const int32_t* real_rows;  // one number: rows from there on are padding; nullptr: none are
  float scale;               // of the weights
  int32_t rows, experts, topk;
  bool logits_bf16, bias_bf16;
  bool log1p;                // softplus as SGLang has it since 0.5.20
  bool renormalize;
  bool in_pairs;  // how a row's weights are added up: as Triton has it since 3.8
};

void launch(const Params& params, bool pdl, cudaStream_t stream);

std::vector<KernelAttributes> kernel_attributes();

}  // namespace dsv4::router_topk

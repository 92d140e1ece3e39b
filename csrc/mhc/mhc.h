// Hyper-connections (mHC): parameters and launch. Device code in fused.cuh (few rows), with sum.cuh where f is a sum between cards,
// mix.cuh and finish.cuh, many.cuh, post.cuh; sizes in config.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../all_reduce/all_reduce.h"
#include "../launch_kernel.h"
#include "term.h"

namespace dsv4::mhc {

struct Params {
  // What a kernel asks for first comes first: the parameters come to a multiprocessor by 64 bytes.
  const float* fn;             // [24, 4 * hidden]; of the head [4, 4 * hidden]; nullptr: post only
  const uint16_t* x;           // [rows, 4, hidden] bf16: the old streams; without a post the streams
  const uint16_t* f;           // [rows, hidden] bf16 sublayer output; nullptr: no post
  int32_t rows, hidden;
  const float* post;           // [rows, 4]
  const float* comb;           // [rows, 4 old, 4 new]
  uint16_t* streams;           // [rows, 4, hidden] bf16, contiguous: what f makes of the old ones
  float* exchange;             // fused: [rows, hidden / 32, 32 or 8], zero before and after; of no other call that may run meanwhile
  int64_t x_stride, f_stride;  // elements between rows, multiples of 8

  // the next sublayer's input
  const float* scale;          // [3]; of the head [1]
  const float* base;           // [24]; of the head [4]
  const uint16_t* norm_weight; // [hidden] bf16, or nullptr: y is not normed
  uint16_t* y;                 // [rows, hidden] bf16
  float* post_out;             // [rows, 4]
  float* comb_out;             // [rows, 4, 4]
  float rms_eps, hc_eps, norm_eps, post_scale;
  int32_t sinkhorn_iters;
  float inverse_hidden;        // 1 / hidden
  bool head;                   // four mixes (pre) and no more
  uint32_t patience;           // looks for another block's sums before the process is stopped: kPatienceLooks

  float* partials;             // split: [rows, hidden / 32, 32 or 8]; many: [rows, hidden / 128, 32]
  uint32_t* counters;          // many: a sector per 16 rows, zero before
};

// f is a sum between cards: `sum.x` has this one's terms, [rows, hidden] bf16, contiguous, or `term` says what they are; sum.out is not
// written.
struct SummingParams {
  Params boundary;
  all_reduce::Params sum;
  Term term;
};

// f's last addition is this boundary's: `term` says which. boundary.f: [rows, hidden] bf16, contiguous, where the term is not `partial`.
struct AddingParams {
  Params boundary;
  Term term;
};

// Why the kernels cannot take this width; empty: they can.
std::string problem(int hidden);

// What takes a call that has a pre; a row's bits are the same.
enum class Kernels {
  kFused,  // one launch, blocks of rows beside blocks of slices: hidden 4096, up to kFusedRows
  kSplit,  // two launches
  kMany,   // one launch that reads the streams once: post and pre, hidden 4096
};
Kernels kernels_of(const std::string& name);  // "fused", "split", "many"

struct Workspace {
  int64_t exchange_words, partials_bytes, counter_words;
};
Workspace workspace(int rows, int hidden, bool head, Kernels kernels, bool sums = false);  // sums: f is a sum between cards, kFused
int fused_rows();  // the most that kFused takes

// Whether they can run on so many multiprocessors: their blocks that wait for others never keep those off. Of the current device.
bool fits(Kernels kernels, int rows, int num_sms);

// Whether other processes' kernels may run beside ours on the current device (CUDA's multi-process service), whatever their own wait for.
bool card_is_shared();

// `kernels` means nothing for a post alone. num_sms: that the stream has (stream.h)
void launch(const Params& params, Kernels kernels, int num_sms, bool pdl, cudaStream_t stream);

// The same as kFused with f a sum between cards. All blocks wait, and those of other cards for them: all must be resident.
bool fits_summing(int rows, int num_sms);
void launch(const SummingParams& params, int ranks, all_reduce::Transport transport, int num_sms, bool pdl, cudaStream_t stream);
std::vector<KernelAttributes> summing_attributes();

// The same as kFused with f's last addition, and as many places; not of a head.
bool fits_adding(int rows, int num_sms);
void launch(const AddingParams& params, int num_sms, bool pdl, cudaStream_t stream);
KernelAttributes adding_attributes();

std::vector<KernelAttributes> kernel_attributes();
int shared_bytes();  // of the kernel that takes the most

}  // namespace dsv4::mhc

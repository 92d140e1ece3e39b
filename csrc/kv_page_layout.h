// The FP8 KV page of DeepSeek-V4 ("MODEL1", 584 bytes a token), in one place: device code, bindings and Python read it from here.
//
//   page of P tokens            offset                 bytes
//   data    token i             i * 576                448 E4M3 values, then 64 bf16 values (rotary part)
//   scales  token i             P * 576 + i * 8        7 UE8M0 exponents, one per 64 E4M3 values, then 1 pad byte
//   tail                        P * 584                pad up to a multiple of 576
//
// value = e4m3 * 2^(exponent - 127). The tensor handed around is [pages, P, 1, 584] with stride(0) = page bytes; its inner
// strides do not describe the memory.
#pragma once

#include "numbers.h"

namespace dsv4 {

constexpr int kNopeDim = 448;                                    // E4M3 values of a token
constexpr int kRopeDim = 64;                                     // bf16 values of a token
constexpr int kHeadDim = kNopeDim + kRopeDim;                    // K and V are the same row
constexpr int kTileDim = 64;                                     // E4M3 values that share one exponent
constexpr int kNumNopeTiles = kNopeDim / kTileDim;
constexpr int kDataBytes = kNopeDim + 2 * kRopeDim;              // of a token
constexpr int kScaleBytes = 8;                                   // of a token: 7 exponents, 1 pad
constexpr int kTokenBytes = kDataBytes + kScaleBytes;            // last dimension of the tensor
constexpr int kPageAlign = 576;                                  // page bytes are a multiple of this

static_assert(kNumNopeTiles * kTileDim == kNopeDim && kNumNopeTiles < kScaleBytes, "one exponent per tile and a pad byte");
static_assert(kDataBytes % 16 == 0 && kPageAlign % 16 == 0, "rows are copied in 16-byte pieces");

constexpr long long page_bytes(long long page_size) { return ceil_div(page_size * kTokenBytes, kPageAlign) * kPageAlign; }

static_assert(page_bytes(256) == 149760 && page_bytes(64) == 37440 && page_bytes(2) == 1728, "as SGLang allocates them");

}  // namespace dsv4

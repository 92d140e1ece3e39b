// Questions to the card: what the kernels of this module take for granted of it. commands/selftest/card.py asks and judges.
//
// Every spin here has an end, so that a card that answers otherwise than expected gives a wrong answer and not a hang.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

namespace dsv4::card {

// A chain of three kernels, each launched programmatically: the first lets the second start, holds for a while, then writes; the third
// reads what the first writes.
enum class Middle {
  kNone,            // two kernels, not three
  kReturns,         // without waiting for the first
  kOneThreadWaits,  // of one block; all others return
};
Middle middle_of(const std::string& name);  // "none", "returns", "one thread waits"

struct Chain {
  uint32_t* value;   // zero before; the first writes kWritten
  uint32_t* seen;    // [3] zero before; by the third: what its first block read from the L2; how many of its blocks had read another
                     // value before their wait; how many of all then read by a plain load what the L2 no longer had
  int64_t* times;    // [2] globaltimer, ns: the first's end, the third's read
  int64_t hold_ns;
};
constexpr uint32_t kWritten = 0x5ca1ab1e;
void launch_chain(const Chain& chain, Middle middle, bool third_waits, cudaStream_t stream);

// Pairs of blocks that send each other values, round by round: by words that are their own flags (own_flags), or by payloads of a whole
// block behind a counter.
constexpr int kExchangeThreads = 128;
struct Exchange {
  float* words;         // own_flags: [pairs][rounds][2][kExchangeThreads][4], zero before and after
  uint32_t* payload;    // counters: [pairs][2][2][kExchangeThreads]
  uint32_t* counters;   // counters: [pairs][2][32], zero before
  uint32_t* answer;     // [3] zero before: values as sent, values otherwise, waits that were given up
  int32_t pairs, rounds;
};
void launch_exchange(const Exchange& exchange, bool own_flags, cudaStream_t stream);

// Blocks that keep the multiprocessors busy for hold_ns; times: [2] globaltimer of the first block's begin and end.
void launch_busy(int64_t* times, float* sink, int64_t hold_ns, int num_sms, cudaStream_t stream);

// Pairs of blocks: one raises flags, one waits for them in a spin with nanosleep.
struct Sleep {
  uint32_t* flags;      // [pairs][rounds][2], zero before
  int64_t* times;       // [pairs][rounds][2] globaltimer: raised, seen; 0: never
  int32_t pairs, rounds;
};
void launch_sleep(const Sleep& sleep, cudaStream_t stream);

// d[i] = a[i] b[i]^T + c[i] by one mma: a [count][16][32], b [count][8][32] E4M3, or f16 [count][16][16], [count][8][16]; c and d
// [count][16][8] fp32. With scales, UE8M0 [count][16] and [count][8]: the block-scaled instruction; where the architecture has none, d is NaN.
struct Products {
  const uint8_t *a, *b, *a_scale, *b_scale;
  const float* c;
  float* d;
  int32_t count;
  bool f16;
};
void launch_products(const Products& products, cudaStream_t stream);

}  // namespace dsv4::card

// Sums and gathers between the cards of one host: parameters, memory and launch. Device code in kernel.cuh, gather.cuh.
//
// Every card sends what it adds, and every card sums the same terms: fp32, in the order of ranks, rounded once. So all have the same bits,
// and a row's do not depend on the rows beside it, on the kernel, or on the way by which the terms come. A gather lays side by side what
// every card sends.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../launch_kernel.h"

namespace dsv4::all_reduce {

constexpr int kMaxRanks = 8;
constexpr int kVectorBytes = 16;   // what a thread moves: 8 bf16
constexpr int kGenerations = 4;    // calls take turns in as many places (turn.cuh says why four)
constexpr uint32_t kAlgorithms = 4;  // more than there are

// By which way the terms come.
enum class Transport {
  kPeer,  // each card writes into the others' memory and reads its own
  kHost,  // each card writes into its own part of host memory, once, and reads the others' parts
};
enum class Algorithm {
  kOneShot,  // everybody gets every term: one hop
  kTwoShot,  // a card sums its share of the values and gives the sums to the others: two hops, 2 / ranks of the bytes
  kGather,   // everybody gets what everybody sends, as it is: one hop
};

// Of one card in its memory, or (host) of all in host memory. By generation: each rank's terms of a call with one hop, each rank's terms
// of one with two (in a card's memory only those of its share), and the sums. A gather has all of its generation, a slot for each rank.
struct Places {
  int64_t one_shot_vectors;  // the most that one call sends
  int64_t two_shot_vectors;  // multiple of ranks
  int32_t ranks;

  __host__ __device__ int64_t share() const { return two_shot_vectors / ranks; }
  __host__ __device__ int64_t of_writer(bool host) const { return host ? two_shot_vectors : share(); }
  __host__ __device__ int64_t first_sum(bool host) const { return ranks * (one_shot_vectors + of_writer(host)); }
  __host__ __device__ int64_t generation(bool host) const { return first_sum(host) + two_shot_vectors; }
  __host__ __device__ int64_t slot(bool host) const { return generation(host) / ranks; }
};

// Words of this card, zero at first: how many calls there were, and what is to be wiped behind them.
struct State {
  uint32_t arrivals;            // kArrivals a call
  uint32_t claimed;             // whose thread tells of the fault
  uint32_t used[kGenerations];  // what the last call of each generation sent: vectors * kAlgorithms + Algorithm
};

// In host memory: what a kernel tells before it gives up, and what makes it give up at once.
struct Fault {
  uint32_t told;       // 1: the rest is there
  uint32_t waited_for; // rank
  uint32_t call;       // number since the beginning, of 2^22
  uint32_t tag;        // Params::tag
  uint32_t rows;
  uint32_t stop;       // written by the host: a rank is gone
};

struct Params {
  const uint16_t* x;          // [vectors * 8] bf16: this card's terms; of a gather any [rows, row_vectors], as 16 bytes each
  uint16_t* out;              // the same size, may be x; of a gather [rows, ranks, row_vectors]
  int64_t vectors;            // multiple of the number of ranks where there are two hops
  uint32_t row_vectors;       // for a gather alone
  uint4* places[kMaxRanks];   // kPeer: of each card, in its memory; kHost: the same address for all
  State* state;
  Fault* fault;               // host memory, as this card sees it
  Places sizes;
  int32_t rank;
  uint32_t tag;               // names the call in a fault: the caller's
  uint32_t rows;              // for the fault alone
  uint64_t patience_ns;       // how long a term is waited for
  bool traps;                 // out of patience: end the process's CUDA work; else tell and leave (a probe)
};

// One direction between two cards, for the probe: one sends `vectors` in every round, the other answers with one when it has all of them.
// The words of a round are its number, so places hold anything else at first, and nothing is wiped.
struct Ping {
  uint4* there;         // the other's places: of what comes, or [1] of the answer
  const uint4* here;    // this card's
  int64_t vectors;
  uint32_t rounds, warm_ups;  // the first ones are not timed
  bool sends;
  uint64_t patience_ns;
  uint64_t* took_ns;    // host memory: of the timed rounds; untouched where the other did not come
};

int64_t places_bytes(const Places& places, Transport transport);
int64_t most_vectors(const Places& places, Transport transport, Algorithm algorithm);  // of a call
void launch(const Params& params, int ranks, Transport transport, Algorithm algorithm, int num_sms, bool pdl, cudaStream_t stream);
void ping(const Ping& ping, cudaStream_t stream);

Transport transport_of(const std::string& name);  // "peer", "host"
Algorithm algorithm_of(const std::string& name);  // "one_shot", "two_shot", "gather"

std::vector<KernelAttributes> kernel_attributes();

}  // namespace dsv4::all_reduce

// Launch of the sums and gathers between cards.
#include <algorithm>
#include <limits>
#include <stdexcept>

#include "gather.cuh"
#include "kernel.cuh"
#include "ping.cuh"

namespace dsv4::all_reduce {

namespace {

constexpr char kName[] = "all_reduce";
using Kernel = void (*)(Params);

template <int kRanks>
Kernel kernel_for(Transport transport, Algorithm algorithm) {
  const bool host = transport == Transport::kHost;
  if (algorithm == Algorithm::kOneShot) return host ? &one_shot_kernel<kRanks, true> : &one_shot_kernel<kRanks, false>;
  if (algorithm == Algorithm::kGather) return host ? &gather_kernel<kRanks, true> : &gather_kernel<kRanks, false>;
  return host ? &two_shot_kernel<kRanks, true> : &two_shot_kernel<kRanks, false>;
}

Kernel kernel_of(int ranks, Transport transport, Algorithm algorithm) {
  switch (ranks) {
    case 2: return kernel_for<2>(transport, algorithm);
    case 4: return kernel_for<4>(transport, algorithm);
    case 8: return kernel_for<8>(transport, algorithm);
    default: throw std::runtime_error("all_reduce: takes 2, 4 or 8 ranks, got " + std::to_string(ranks));
  }
}

}  // namespace

int64_t places_bytes(const Places& places, Transport transport) {
  return kGenerations * places.generation(transport == Transport::kHost) * kVectorBytes;
}

int64_t most_vectors(const Places& places, Transport transport, Algorithm algorithm) {
  int64_t places_for = places.slot(transport == Transport::kHost);
  if (algorithm == Algorithm::kOneShot) places_for = places.one_shot_vectors;
  if (algorithm == Algorithm::kTwoShot) places_for = places.two_shot_vectors;
  return std::min<int64_t>(places_for, std::numeric_limits<uint32_t>::max() / kAlgorithms);  // State::used has both
}

Transport transport_of(const std::string& name) {
  if (name == "peer") return Transport::kPeer;
  if (name == "host") return Transport::kHost;
  throw std::runtime_error("all_reduce: transport must be peer or host, got " + name);
}

Algorithm algorithm_of(const std::string& name) {
  if (name == "one_shot") return Algorithm::kOneShot;
  if (name == "two_shot") return Algorithm::kTwoShot;
  if (name == "gather") return Algorithm::kGather;
  throw std::runtime_error("all_reduce: algorithm must be one_shot, two_shot or gather, got " + name);
}

void launch(const Params& params, int ranks, Transport transport, Algorithm algorithm, int num_sms, bool pdl, cudaStream_t stream) {
  const bool two_shot = algorithm == Algorithm::kTwoShot;
  const int64_t most = most_vectors(params.sizes, transport, algorithm);
  if (params.vectors < 1 || params.vectors > most || (two_shot && params.vectors % ranks))
    throw std::runtime_error("all_reduce: takes 1 to " + std::to_string(most) + " vectors of 8, got " + std::to_string(params.vectors));
  if (algorithm == Algorithm::kGather && (params.row_vectors == 0 || params.vectors % params.row_vectors))
    throw std::runtime_error("all_reduce: a gather takes rows of row_vectors vectors, got " + std::to_string(params.row_vectors));
  const int64_t of_threads = two_shot ? params.vectors / ranks : params.vectors;
  const int64_t blocks = std::min<int64_t>({(of_threads + kThreads - 1) / kThreads, 2 * num_sms, kArrivals - 1});
  const Launcher launcher = {kName, pdl, stream};
  launcher(kernel_of(ranks, transport, algorithm), dim3(static_cast<unsigned>(blocks)), kThreads, 0, params);
}

void ping(const Ping& ping, cudaStream_t stream) {
  if (ping.vectors < 1 || ping.warm_ups >= ping.rounds) throw std::runtime_error("all_reduce_ping: takes vectors, and more rounds than warm-ups");
  const Launcher launcher = {"all_reduce_ping", false, stream};
  launcher(&ping_kernel, dim3(1), kPingThreads, 0, ping);
}

std::vector<KernelAttributes> kernel_attributes() {
  std::vector<KernelAttributes> all;
  for (const int ranks : {2, 4, 8})
    for (const auto transport : {Transport::kPeer, Transport::kHost})
      for (const auto& algorithm_name : {"one_shot", "two_shot", "gather"}) {
        const Algorithm algorithm = algorithm_of(algorithm_name);
        const std::string way = transport == Transport::kHost ? "_host_" : "_peer_";
        const std::string name = std::string("all_reduce_") + algorithm_name + way + std::to_string(ranks);
        all.push_back(attributes_of(kName, reinterpret_cast<const void*>(kernel_of(ranks, transport, algorithm)), name, kThreads, 0));
      }
  all.push_back(attributes_of(kName, reinterpret_cast<const void*>(&ping_kernel), "all_reduce_ping", kPingThreads, 0));
  return all;
}

}  // namespace dsv4::all_reduce

// The boundary of few rows whose f is a sum between cards: choice and launch.
#include <algorithm>
#include <stdexcept>

#include "fused.cuh"

namespace dsv4::mhc {

namespace {

constexpr char kName[] = "mhc";
using all_reduce::Transport;
using Kernel = void (*)(SummingParams);

template <bool kHead, int kRanks>
Kernel kernel_by(Transport transport) {
  return transport == Transport::kHost ? &summing_kernel<kHead, kRanks, true> : &summing_kernel<kHead, kRanks, false>;
}

Kernel kernel_of(bool head, int ranks, Transport transport) {
  switch (ranks) {
    case 2: return head ? kernel_by<true, 2>(transport) : kernel_by<false, 2>(transport);
    case 4: return head ? kernel_by<true, 4>(transport) : kernel_by<false, 4>(transport);
    case 8: return head ? kernel_by<true, 8>(transport) : kernel_by<false, 8>(transport);
    default: throw std::runtime_error("mhc: a sum is of 2, 4 or 8 ranks, got " + std::to_string(ranks));
  }
}

int fewest_blocks_per_sm() {  // of all, asked once per device
  static int known[64] = {};
  int device = 0;
  check_cuda(cudaGetDevice(&device), kName, "cudaGetDevice");
  if (device < 64 && known[device] > 0) return known[device];
  int fewest = 1 << 16;
  for (const KernelAttributes& kernel : summing_attributes()) fewest = std::min(fewest, kernel.blocks_per_sm);
  if (device < 64) known[device] = fewest;
  return fewest;
}

int num_blocks(int rows) { return mixing_blocks(rows) + rows; }

// Looks of a row's block, which waits for slices that wait for other cards: these tell of it and give up first. A look is 0.3 us or more.
uint32_t patience_of_rows(uint64_t patience_ns) { return static_cast<uint32_t>(std::clamp<uint64_t>(patience_ns / 100, kPatienceLooks, UINT32_MAX)); }

}  // namespace

bool fits_summing(int rows, int num_sms) { return num_blocks(rows) <= fewest_blocks_per_sm() * num_sms; }

void launch(const SummingParams& params, int ranks, Transport transport, int num_sms, bool pdl, cudaStream_t stream) {
  const Params& p = params.boundary;
  if (p.hidden != kFlashHidden || (p.f == nullptr && params.term.partial == nullptr) || p.fn == nullptr || p.rows < 1 || p.rows > kFusedRows)
    throw std::runtime_error("mhc: these kernels do not take this form, width or number of rows");
  if (params.sum.vectors > params.sum.sizes.one_shot_vectors)
    throw std::runtime_error("mhc: the sum's places take " + std::to_string(params.sum.sizes.one_shot_vectors) + " vectors of 8, got " +
                             std::to_string(params.sum.vectors));
  if (!fits_summing(p.rows, num_sms))
    throw std::runtime_error("mhc: blocks of this kernel wait for other cards and cannot all be resident: " + std::to_string(p.rows) + " rows on " +
                             std::to_string(num_sms) + " multiprocessors; a sum of its own and the boundary behind it take any number");
  SummingParams patient = params;
  patient.boundary.patience = patience_of_rows(params.sum.patience_ns);
  Launcher{kName, pdl, stream}(kernel_of(p.head, ranks, transport), dim3(num_blocks(p.rows)), kFusedThreads, 0, patient);
}

std::vector<KernelAttributes> summing_attributes() {
  std::vector<KernelAttributes> all;
  for (const int ranks : {2, 4, 8})
    for (const auto transport : {Transport::kPeer, Transport::kHost})
      for (const bool head : {false, true}) {
        const std::string name = std::string("mhc_summing_") + (head ? "head_" : "") + (transport == Transport::kHost ? "host_" : "peer_");
        const auto* const kernel = reinterpret_cast<const void*>(kernel_of(head, ranks, transport));
        all.push_back(attributes_of(kName, kernel, name + std::to_string(ranks), kFusedThreads, 0));
      }
  return all;
}

}  // namespace dsv4::mhc

// Choice and launch of the router's top-k.
#include <stdexcept>
#include <string>
#include <type_traits>

#include "argmax.h"
#include "kernel.cuh"

namespace dsv4::router_topk {

namespace {

constexpr char kName[] = "router_topk";

// the fewest experts of a lane that are enough
template <typename Use>
void with_each(int experts, Use use) {
  if (experts <= 32) return use(std::integral_constant<int, 1>{});
  if (experts <= 64) return use(std::integral_constant<int, 2>{});
  if (experts <= 128) return use(std::integral_constant<int, 4>{});
  if (experts <= 256) return use(std::integral_constant<int, 8>{});
  if (experts <= 384) return use(std::integral_constant<int, 12>{});
  return use(std::integral_constant<int, 16>{});
}

}  // namespace

void launch(const Params& params, bool pdl, cudaStream_t stream) {
  if (params.rows < 1 || params.experts < 1 || params.experts > kMaxExperts || params.topk < 1 || params.topk > kMaxTopk)
    throw std::runtime_error("router_topk: takes 1 row and more, 1 to " + std::to_string(kMaxExperts) + " experts, topk 1 to " +
                             std::to_string(kMaxTopk));
  const Launcher launcher = {kName, pdl, stream};
  with_each(params.experts, [&](auto each) {
    const auto kernel = params.log1p ? &router_topk_kernel<each(), true> : &router_topk_kernel<each(), false>;
    launcher(kernel, dim3(params.rows), 32 * each(), 0, params);
  });
}

std::vector<KernelAttributes> kernel_attributes() {
  std::vector<KernelAttributes> all = argmax_attributes();
  all.push_back(attributes_of(kName, reinterpret_cast<const void*>(&router_topk_kernel<8, true>), "router_topk", 256, 0));
  return all;
}

}  // namespace dsv4::router_topk

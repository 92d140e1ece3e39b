// Slots of the entries that ranks have chosen for each other: entries are the same on all ranks, pages are each rank's own.
#pragma once

#include "../device/barriers.cuh"
#include "config.h"

namespace dsv4::index_select {

constexpr int kSlotThreads = 128;

// A block for each row. What is no entry of the row's page table, as -1 of either width is none, has slot -1.
template <typename Entry>
__global__ void __launch_bounds__(kSlotThreads) slots_kernel(const __grid_constant__ SlotParams p) {
  pdl_wait();
  pdl_trigger();
  const int row = blockIdx.x, each = ceil_div(p.rows, p.ranks);
  const int64_t list = static_cast<int64_t>(row % p.ranks) * each + row / p.ranks;
  const Entry* dealt = static_cast<const Entry*>(p.dealt) + list * p.k;
  const int32_t* pages = p.table.pages + row * p.table.stride;
#pragma unroll 4
  for (int i = threadIdx.x; i < p.k; i += kSlotThreads) {
    const uint32_t found = dealt[i];
    const bool is_entry = found < static_cast<uint32_t>(p.width);
    int slot = -1;
    if (is_entry) {
      const int page = pages[found / kPage];
      if (static_cast<uint32_t>(page) < p.table.num_pages) slot = page * kPage + found % kPage;
    }
    p.slots[row * p.slots_stride + i] = slot;
    if (p.entries != nullptr) p.entries[row * p.entries_stride + i] = is_entry ? static_cast<int32_t>(found) : -1;
  }
}

}  // namespace dsv4::index_select

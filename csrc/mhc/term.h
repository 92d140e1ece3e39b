// What this card adds to a sum, where its last addition is left to the boundary (term.cuh).
#pragma once

#include <cstdint>

namespace dsv4::mhc {

constexpr int kTermSplits = 4;  // of wo_b's inputs at two and at four cards (../fp8_linear)

// At most one of the two.
struct Term {
  const uint16_t* routed;  // the term is x + scaling * routed, [rows, hidden] bf16, contiguous; nullptr: it is not
  const float* partial;    // the term is the sum of [kTermSplits, rows, hidden], contiguous; nullptr: it is not
  float scaling;
};

}  // namespace dsv4::mhc

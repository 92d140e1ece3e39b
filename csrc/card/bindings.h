// The Python functions of the probes: raw pointers, keyword-only; selftest/card.py makes the tensors and judges what comes back.
#pragma once

#include <pybind11/pybind11.h>

#include "card.h"

namespace dsv4::card {

namespace py = pybind11;

template <typename T>
T* at_address(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline void bind(py::module_& m) {
  using namespace py::literals;
  m.def(
      "card_chain",
      [](uintptr_t value, uintptr_t seen, uintptr_t times, int64_t hold_ns, const std::string& middle, bool third_waits, uintptr_t stream) {
        const Chain chain = {at_address<uint32_t>(value), at_address<uint32_t>(seen), at_address<int64_t>(times), hold_ns};
        launch_chain(chain, middle_of(middle), third_waits, at_address<CUstream_st>(stream));
      },
      py::kw_only(), "value"_a, "seen"_a, "times"_a, "hold_ns"_a, "middle"_a, "third_waits"_a, "stream"_a);
  m.def(
      "card_exchange",
      [](uintptr_t words, uintptr_t payload, uintptr_t counters, uintptr_t answer, int pairs, int rounds, bool own_flags, uintptr_t stream) {
        const Exchange exchange = {at_address<float>(words), at_address<uint32_t>(payload), at_address<uint32_t>(counters),
                                   at_address<uint32_t>(answer), pairs, rounds};
        launch_exchange(exchange, own_flags, at_address<CUstream_st>(stream));
      },
      py::kw_only(), "words"_a, "payload"_a, "counters"_a, "answer"_a, "pairs"_a, "rounds"_a, "own_flags"_a, "stream"_a);
  m.def(
      "card_busy",
      [](uintptr_t times, uintptr_t sink, int64_t hold_ns, int num_sms, uintptr_t stream) {
        launch_busy(at_address<int64_t>(times), at_address<float>(sink), hold_ns, num_sms, at_address<CUstream_st>(stream));
      },
      py::kw_only(), "times"_a, "sink"_a, "hold_ns"_a, "num_sms"_a, "stream"_a);
  m.def(
      "card_sleep",
      [](uintptr_t flags, uintptr_t times, int pairs, int rounds, uintptr_t stream) {
        launch_sleep({at_address<uint32_t>(flags), at_address<int64_t>(times), pairs, rounds}, at_address<CUstream_st>(stream));
      },
      py::kw_only(), "flags"_a, "times"_a, "pairs"_a, "rounds"_a, "stream"_a);
  m.def(
      "card_products",
      [](uintptr_t a, uintptr_t b, uintptr_t a_scale, uintptr_t b_scale, uintptr_t c, uintptr_t d, int count, uintptr_t stream) {
        const Products products = {at_address<const uint8_t>(a),       at_address<const uint8_t>(b), at_address<const uint8_t>(a_scale),
                                   at_address<const uint8_t>(b_scale), at_address<const float>(c),   at_address<float>(d), count};
        launch_products(products, at_address<CUstream_st>(stream));
      },
      py::kw_only(), "a"_a, "b"_a, "a_scale"_a, "b_scale"_a, "c"_a, "d"_a, "count"_a, "stream"_a);
  m.attr("CARD_WRITTEN") = kWritten;
  m.attr("CARD_EXCHANGE_THREADS") = kExchangeThreads;
}

}  // namespace dsv4::card

// The Python functions of the probes: raw pointers, keyword-only; commands/selftest/card.py makes the tensors and judges what comes back.
#pragma once

#include "../arguments.h"
#include "card.h"

namespace dsv4::card {

inline void run_chain(Arguments& a) {
  const Chain chain = {a["value"], a["seen"], a["times"], a["hold_ns"]};
  const Middle middle = middle_of(a["middle"].text());
  const bool third_waits = a["third_waits"];
  const cudaStream_t stream = a["stream"];
  a.done();
  launch_chain(chain, middle, third_waits, stream);
}

inline void run_exchange(Arguments& a) {
  const Exchange exchange = {a["words"], a["payload"], a["counters"], a["answer"], a["pairs"], a["rounds"]};
  const bool own_flags = a["own_flags"];
  const cudaStream_t stream = a["stream"];
  a.done();
  launch_exchange(exchange, own_flags, stream);
}

inline void run_busy(Arguments& a) {
  int64_t* const times = a["times"];
  float* const sink = a["sink"];
  const int64_t hold_ns = a["hold_ns"];
  const int num_sms = a["num_sms"];
  const cudaStream_t stream = a["stream"];
  a.done();
  launch_busy(times, sink, hold_ns, num_sms, stream);
}

inline void run_sleep(Arguments& a) {
  const Sleep sleep = {a["flags"], a["times"], a["pairs"], a["rounds"]};
  const cudaStream_t stream = a["stream"];
  a.done();
  launch_sleep(sleep, stream);
}

inline void run_products(Arguments& a) {
  const Products products = {a["a"], a["b"], a["a_scale"], a["b_scale"], a["c"], a["d"], a["count"], a["f16"]};
  const cudaStream_t stream = a["stream"];
  a.done();
  launch_products(products, stream);
}

inline void bind(py::module_& m) {
  define(m, "card_chain", run_chain);
  define(m, "card_exchange", run_exchange);
  define(m, "card_busy", run_busy);
  define(m, "card_sleep", run_sleep);
  define(m, "card_products", run_products);
  m.attr("CARD_WRITTEN") = kWritten;
  m.attr("CARD_EXCHANGE_THREADS") = kExchangeThreads;
}

}  // namespace dsv4::card

// The threads of a block on one thread of the CPU: each has its turn until it waits. For kernels' own text, compiled for a CPU.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <functional>
#include <memory>
#include <vector>

struct dim3 { unsigned x, y, z; };
dim3 threadIdx, blockIdx, gridDim;

namespace turns {

constexpr int kStackBytes = 64 << 10;
struct Thread {
  ucontext_t begin;
  jmp_buf place;  // where it waits: jumps between stacks are no system calls, as swapcontext's are
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  const std::function<void()>* body = nullptr;
  bool begun = false, ended = false;
};
std::vector<Thread> threads;
Thread* current;
jmp_buf scheduler;
bool progress;  // of anybody since all had their turn

__attribute__((noinline)) void leave() {
  if (_setjmp(current->place) == 0) _longjmp(scheduler, 1);
}
__attribute__((noinline)) void give(Thread& thread) {
  current = &thread;
  if (_setjmp(scheduler) != 0) return;
  if (thread.begun) _longjmp(thread.place, 1);
  thread.begun = true;
  setcontext(&thread.begin);
}
void run_body() {
  (*current->body)();
  current->ended = progress = true;
  leave();
}
void make_ready(Thread& thread, const std::function<void()>& body) {
  thread.body = &body, thread.begun = thread.ended = false;
  getcontext(&thread.begin);
  thread.begin.uc_stack.ss_sp = thread.stack.get();
  thread.begin.uc_stack.ss_size = kStackBytes;
  makecontext(&thread.begin, run_body, 0);
}

// run() by each of `count` threads. false: some wait for ever.
bool run(int count, std::function<void()> run) {
  threads = std::vector<Thread>(count);
  for (Thread& thread : threads) make_ready(thread, run);
  for (int running = count; running > 0;) {
    progress = false;
    for (int i = 0; i < count; ++i) {
      if (threads[i].ended) continue;
      threadIdx.x = i;
      give(threads[i]);
      running -= threads[i].ended;
    }
    if (!progress) return false;
  }
  return true;
}

template <typename Condition>
void wait_until(Condition condition) {
  while (!condition()) leave();
  progress = true;
}

struct Meeting {  // of `expected` threads
  int expected, missing = expected;
  unsigned turn = 0;

  void arrive_and_wait() {
    const unsigned mine = turn;
    if (--missing == 0) {
      missing = expected;
      ++turn;
    }
    wait_until([&] { return turn != mine; });
  }
};

}  // namespace turns

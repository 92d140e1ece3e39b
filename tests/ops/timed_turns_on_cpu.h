// Threads that begin, wait, sleep and end when they like, on one thread of the CPU (turns_on_cpu.h): whose turn is next is drawn by a seed.
//
// Time is counted, not taken: a turn takes kTurnNs, and when all sleep it is the time at which the first one wakes. So a wait for what never
// comes costs no time of the clock, and no other process makes a thread late. Where others are to be waited for, time is the clock's.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>

#include "turns_on_cpu.h"

namespace turns {

constexpr uint64_t kTurnNs = 100;

struct Dice {  // splitmix64
  using result_type = uint32_t;
  uint64_t state = 0;
  static constexpr uint32_t min() { return 0; }
  static constexpr uint32_t max() { return ~0u; }
  uint32_t operator()() {
    uint64_t z = state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return static_cast<uint32_t>(z >> 32);
  }
};

struct Task : Thread {
  std::function<void()> own_body;
  dim3 thread, block, grid;
  uint64_t wakes_ns = 0;
  void* own = nullptr;  // of whoever wrote the body
};

class World {
 public:
  Dice dice;
  uint32_t runs_on = 1;  // one of so many places where a thread may give way is one where it does

  explicit World(bool has_clock) : has_clock_(has_clock) {}

  Task& begin(std::function<void()> body, dim3 thread = {}, dim3 block = {}, dim3 grid = {}) {
    if (spare_.empty()) tasks_.emplace_back(new Task), spare_.push_back(tasks_.back().get());
    Task& task = *spare_.back();
    spare_.pop_back();
    task.own_body = std::move(body), task.thread = thread, task.block = block, task.grid = grid;
    make_ready(task, task.own_body);
    awake_.push_back(&task);
    ++running_;
    return task;
  }

  // Until all have ended. false: all that have not wait for each other.
  bool run() {
    while (running_ > 0) {
      wake_sleepers();
      if (awake_.empty()) return false;
      const size_t which = dice() % awake_.size();
      Task& task = *awake_[which];
      threadIdx = task.thread, blockIdx = task.block, gridDim = task.grid;
      stays_awake_ = true;
      give(task);
      now_ns_ += kTurnNs;
      if (!task.ended && stays_awake_) continue;
      std::swap(*std::find(awake_.begin(), awake_.end(), &task), awake_.back());
      awake_.pop_back();
      if (task.ended) spare_.push_back(&task), --running_;
    }
    return true;
  }

  uint64_t now_ns() const { return has_clock_ ? std::chrono::steady_clock::now().time_since_epoch().count() : now_ns_; }

  // ---- of the thread that has its turn
  Task& now() const { return static_cast<Task&>(*current); }
  void give_way() {
    if (runs_on == 1 || dice() % runs_on == 0) leave();
  }
  void sleep(uint64_t ns) {
    now().wakes_ns = now_ns() + ns;
    asleep_.push_back(&now());
    std::push_heap(asleep_.begin(), asleep_.end(), is_later);
    stop();
  }
  void wait(std::vector<Task*>& with) {
    with.push_back(&now());
    stop();
  }
  void wake(std::vector<Task*>& who) {
    awake_.insert(awake_.end(), who.begin(), who.end());
    who.clear();
  }

 private:
  static bool is_later(const Task* a, const Task* b) { return a->wakes_ns > b->wakes_ns; }
  void stop() {
    stays_awake_ = false;
    leave();
  }
  void wake_sleepers() {
    if (asleep_.empty()) return;
    if (awake_.empty()) {
      const uint64_t first = asleep_.front()->wakes_ns;
      if (has_clock_) std::this_thread::sleep_until(std::chrono::steady_clock::time_point(std::chrono::nanoseconds(first)));
      now_ns_ = std::max(now_ns_, first);
    }
    for (const uint64_t by = now_ns(); !asleep_.empty() && asleep_.front()->wakes_ns <= by;) {
      awake_.push_back(asleep_.front());
      std::pop_heap(asleep_.begin(), asleep_.end(), is_later);
      asleep_.pop_back();
    }
  }

  std::vector<std::unique_ptr<Task>> tasks_;
  std::vector<Task*> spare_, awake_, asleep_;
  int running_ = 0;
  uint64_t now_ns_ = 1;
  bool stays_awake_ = true;
  const bool has_clock_;
};

struct Barrier {  // of `expected` threads of a world
  World& world;
  const int expected;
  int missing = expected, any = 0;
  std::vector<Task*> waiting = {};

  void arrive_and_wait() {
    if (--missing > 0) return world.wait(waiting);
    missing = expected;
    world.wake(waiting);
    world.give_way();
  }
};

}  // namespace turns

// Global memory as PTX promises it, and no more: stores that others see later, loads of what was there before.
//
// A store waits until it is drained: when chance has it so, by a fence or a release of a thread that knows it, at the end of its grid. A
// load may give what an address had at any time since its thread last acquired: it was done early, or its line is a stale one of the L1.
// A thread knows its own stores, and those of its block's threads that a barrier has told it of; of what it knows it never reads anything
// older, and of one address no relaxed load after another.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace emulator {

struct Grid;

struct Sight {  // of a thread
  uint64_t view = 0;               // it reads nothing that was overwritten before
  uint64_t settled = 0;            // the same of ld.nc, which no acquire refreshes
  uint32_t arrived = 0, left = 0;  // when it was at one of its block's barriers last, by the block's clock
};

struct Stores {  // of a block
  struct Waiting {
    uint64_t word, id;
    uint32_t issued, owner;
  };
  uint32_t number = 0;  // of all blocks
  uint32_t clock = 0;   // arrivals at barriers
  uint64_t begin = 0;
  Grid* grid = nullptr;
  std::vector<Sight> sights;
  std::vector<Waiting> waiting;  // those that were drained by way of another one are still among them
  std::unordered_map<uint64_t, uint64_t> counters;  // what those who arrived at an mbarrier had seen
};

// How a load or an atomic is ordered; none: a weak load by way of the L1
enum Order : uint8_t { kCoherent = 1, kAcquires = 2, kReleases = 4, kFromL2 = 8, kReadOnly = 16 };

class WeakMemory {
 public:
  bool on = false;

  void choose(bool is_on, uint64_t seed);
  void clear();  // what waits is lost, as by a trap
  std::shared_ptr<Stores> begin(Grid& grid, uint32_t threads);
  void end(const Grid& grid);
  void drift();  // some of what waits is drained

  uint64_t floor(const Stores& stores, uint32_t thread, uint8_t order) const;
  void read(const Stores& stores, uint32_t thread, uint64_t at, uint32_t bytes, uint64_t floor, void* to, bool is_relaxed = false);
  void write(Stores& stores, uint32_t thread, uint64_t at, uint32_t bytes, const void* from);
  void before_atomic(Stores& stores, uint32_t thread, uint64_t at, uint32_t bytes);
  bool tears();  // a vector, into its elements

  bool release_in_parts(Stores& stores, uint32_t thread);  // false: some of it, and others may have their turn
  void release(Stores& stores, uint32_t thread);
  void acquire(Stores& stores, uint32_t thread) { stores.sights[thread].view = now_; }
  void settle(Stores& stores, uint32_t thread) { stores.sights[thread].view = stores.sights[thread].settled = now_; }
  // at a barrier of the block; `seen`: the barrier's
  void arrive(Stores& stores, uint32_t thread, uint64_t& seen);
  void leave(Stores& stores, uint32_t thread, uint64_t seen);

 private:
  struct Change {  // what the bytes of `mask` were
    uint64_t time;
    uint32_t block, owner, issued;
    uint16_t mask;
    uint8_t old[16];
  };
  struct Pending {
    const Stores* stores;
    uint64_t id;
    uint32_t owner, issued;
    uint16_t mask;
    uint8_t bytes[16];
  };
  struct Word {  // 16 bytes of memory that were written to
    std::vector<Change> past;
    std::vector<Pending> pending;
  };

  static bool knows(const Stores& stores, uint32_t thread, uint32_t owner, uint32_t issued);
  uint8_t& flag(uint64_t word) { return flags_[word * 0x9e3779b97f4a7c15ull >> 46]; }
  Word& written(uint64_t word) { return flag(word) = 1, words_[word]; }
  void change(Word& word, uint64_t at, const Stores& stores, uint32_t owner, uint32_t issued, uint16_t mask);
  void drain(uint64_t word, const Stores& stores, uint64_t id);
  void drain(Word& word, uint64_t at, const Stores& stores, uint16_t mask, std::vector<Pending>::iterator end);
  void read_word(const Stores& stores, uint32_t thread, uint64_t at, uint32_t bytes, uint64_t floor, uint8_t* to, bool is_relaxed);

  uint32_t drains_one_in_ = 1, stale_one_in_ = 1, tears_one_in_ = 1;
  uint64_t now_ = 0, ids_ = 0;
  uint32_t blocks_ = 0;
  std::vector<uint8_t> flags_;  // of words by a hash: most were never written to
  std::unordered_map<uint64_t, Word> words_;
  std::unordered_map<uint64_t, uint64_t> looked_;  // by thread and word: nothing older than that is seen there by a relaxed load
  std::vector<std::shared_ptr<Stores>> all_;
};

extern WeakMemory weak;

}  // namespace emulator

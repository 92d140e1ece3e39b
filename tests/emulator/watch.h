// What no schedule shows: whether two accesses to shared memory have an order at all, and who reads what nobody has written.
//
// Each thread of a block has a clock of all threads' numbers (vector clocks). A barrier, of the block (bar, any id and count), of a warp
// (bar.warp.sync) or of phases (mbarrier), tells those who leave it what those who arrived knew. A copy is a writer of its own, which knows
// what its thread knew when it asked for it: of cp.async the thread knows the end by cp.async.wait, whoever waits for an mbarrier by
// cp.async.mbarrier.arrive, of cp.async.bulk by complete_tx alone. Shuffles, votes and products tell nobody anything. A read that races
// with what was done before it gives all bits set, so that results say whether anybody asks for it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace emulator {

struct Block;
struct Instruction;
struct Warp;

constexpr uint32_t kTogether = 32;
// Of a block: its threads, their cp.async, and bulk copies, each thread's by mbarrier (the most threads there are take 2,048). Each that
// asks for a bulk copy knows of all of them, so more would be slow before the next limit, which is that of Access::first.
constexpr uint32_t kMostWriters = 4096;

struct Clock {
  std::vector<uint32_t> of;  // by writer: threads, their cp.async, then their bulk copies by mbarrier; what is missing is 0, kTogether at a time
  uint32_t at(uint32_t writer) const { return writer < of.size() ? of[writer] : 0; }
  uint32_t knows(uint32_t first, uint32_t lanes, uint32_t clock) const;  // which of the lanes had no later clock than that it knows of
  uint32_t& operator[](uint32_t writer);
  void join(const Clock& other);
  void clear() { of.clear(); }
};

// kKeeps: a store of what is there already, which may be beside another store: all of them write the same
enum How : int { kReads = 0, kWrites = 1, kAtomic = 2, kKeeps = 4 };

struct Ordering {  // of a block
  struct Access {  // by some of kTogether writers, whose clocks are the same: a warp's lanes, mostly
    uint32_t clock;
    uint32_t lanes;  // writers, from `first` on; of a word's first access: 0: it has none
    uint32_t next;   // of the word's, or of those that are free; 0: none
    uint32_t by;     // which of its kernel's instructions
    uint16_t first;
    static_assert(kMostWriters <= 1u << 16);
    uint8_t mask;  // bytes of the word
    uint8_t how;
  };
  struct Phases {  // of an mbarrier
    Clock arrived, over;  // of the phase that runs; of those that have ended
    uint32_t phase = 0, owner = 0, since = 0;  // who initialised it
    bool is_there = false;
  };
  uint32_t threads = 0, writers = 0;
  std::vector<Clock> clocks;
  std::vector<uint32_t> copies;                 // that a thread has asked for
  std::vector<std::vector<uint32_t>> closed;    // their numbers at the ends of groups
  std::vector<Access> words;                    // of shared memory: the first access that nothing ordered is behind
  std::vector<Access> accesses = {{}};          // of all words, but for their first ones
  uint32_t free = 0;                            // the first of them that no word has
  std::unordered_map<uint64_t, Phases> phases;  // by address
  std::map<std::pair<uint32_t, uint64_t>, std::pair<uint32_t, uint32_t>> bulk;  // by thread and mbarrier: writer, copies
};

using Knowledge = std::shared_ptr<Clock>;

class Watch {
 public:
  bool on = false;

  void choose(bool is_on);
  const std::string& reports();  // a line each: how often, what

  // global memory
  void unwritten(uint64_t at, uint64_t bytes);  // from now on
  void written(uint64_t at, uint64_t bytes);
  void reads(const Block& block, const Instruction* by, uint64_t at, uint32_t bytes);

  // shared memory
  std::shared_ptr<Ordering> begin(uint32_t threads, uint32_t bytes);
  // `how`: of Access. False: a read that may have any value
  bool accesses(Warp& w, int lane, const Instruction& i, uint64_t at, uint32_t bytes, int how);
  void copies(Warp& w, int lane, const Instruction& i, uint64_t at, uint32_t bytes);
  void closes(Warp& w, int lane);
  void waits_for_copies(Warp& w, int lane, size_t groups_left);  // -1 as many as there are: all copies
  Knowledge copies_bulk(Warp& w, int lane, const Instruction& i, uint64_t at, uint32_t bytes, uint64_t barrier);

  // what tells
  void tells(Warp& w, int lane, Knowledge& all);  // a thread's knowledge, at a barrier
  void knows(Warp& w, int lane, const Knowledge& all);
  Knowledge after_copies(Warp& w, int lane);  // and the end of its cp.async
  void init_phases(Warp& w, int lane, uint64_t at);
  void uses_phases(Warp& w, int lane, const Instruction& i, uint64_t at);
  void arrives(Block& block, uint64_t at, const Knowledge& who);
  void has_phase(Block& block, uint64_t at, uint32_t phase);  // as it is now
  void sees_end(Warp& w, int lane, uint64_t at);
  void left_alone(const Block& block, const Instruction& i);  // a barrier of all threads, of which some have ended

 private:
  bool access(Ordering& o, const Block& block, const Clock& known, uint32_t writer, uint32_t clock, uint64_t at, uint32_t bytes, int how,
              const Instruction& by);
  void report(const Block& block, const std::string& what);
  void report_race(const Block& block, const Ordering::Access& before, int count, bool writes, const Instruction& by);

  std::map<uint64_t, std::vector<bool>> memory_;  // by where it begins: what of it is written
  std::map<std::string, uint64_t> found_;
  std::vector<std::shared_ptr<Ordering>> all_;
  std::string told_;
};

extern Watch watch;

}  // namespace emulator

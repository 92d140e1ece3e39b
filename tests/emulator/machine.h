// An emulator of PTX: what the tests run the kernels of sm_120 on, where there is no such card. README.md says what it shows and what not.
//
// A warp has one frame of registers, 32 lanes of each side by side, and groups of lanes that are at the same instruction. Blocks, warps
// and asynchronous copies take turns by a seed. Addresses are the host's own; shared memory has addresses of its own, from 0.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "watch.h"
#include "weak.h"

namespace emulator {

constexpr int kLanes = 32;
constexpr uint32_t kMostThreads = 1024, kMostWarps = kMostThreads / kLanes;  // of a block
constexpr uint32_t kAll = 0xffffffffu;

[[noreturn]] inline void fail(const std::string& text) { throw std::runtime_error(text); }

// Without a division, which an address would wait for
inline bool is_multiple(uint64_t at, uint32_t bytes) { return (bytes & (bytes - 1)) == 0 ? (at & (bytes - 1)) == 0 : at % bytes == 0; }

// ---- programs

// Where an operand's lanes are: in the warp's frame or among the kernel's constants. Of 64 bits a lane, of 32 (16 and 8 bits too, with
// zeros above), or one bit a lane (predicates, in one word).
struct Operand {
  enum Kind : uint8_t { kNone, k32, k64, kPredicate } kind = kNone;
  uint8_t space = 0;  // of Warp::bases: 0 frame, 1 constants
  bool negated = false;
  uint32_t at = 0;  // bytes
};

struct Address {
  Operand base;  // none: offset alone
  int64_t offset = 0;
};

struct Warp;
struct Instruction;
enum class Step : uint8_t { kNext, kJumped, kYield };  // kJumped: the warp's group has changed; kYield: likewise, and others' turn
using Handler = Step (*)(Warp&, const Instruction&, uint32_t mask);

struct Instruction {
  Handler run = nullptr;
  Operand guard;
  std::vector<Operand> o;  // destinations first; of vectors one after the other
  Address address, from, third;  // of memory, in the order of the text
  int brackets = 0;              // how many of them there are
  int32_t target = -1;     // of a jump
  int32_t count = 0;       // operands of which the text's first one consists
  int32_t written = 0;     // operands, the first ones, that it is certain to write
  bool ends = false;       // a lane does not go on behind it
  int32_t kind = 0;        // an operation's own
  uint8_t order = 0;       // of global memory: Order
  int32_t line = 0;
  std::string text;
};

struct Parameter {
  uint32_t at, bytes;
};

struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  std::vector<Parameter> parameters;
  uint32_t parameter_bytes = 0;
  uint32_t frame_bytes = 0;
  uint32_t static_shared = 0, shared_align = 16;
  std::vector<uint8_t> constants;
  struct Special {
    int what;
    uint32_t at;
  };
  std::vector<Special> specials;  // registers that a warp begins with
  uint32_t max_threads = kMostThreads, required_threads = 0;  // 0: any number

  uint32_t place(Operand::Kind kind);  // of a new register
};

// ---- a running grid

struct Grid;
struct Block;

struct Group {
  uint32_t pc = 0, mask = 0;
};

enum class Wait : uint8_t { kBarrier, kMembers, kGrid };

struct Parked {
  Group group;
  Wait why;
  int barrier = 0;
};

// Of a group that has looked at an mbarrier in vain (try_wait): until the phase is over it has no turn.
struct Sleep {
  Group group;
  const uint64_t* counter = nullptr;  // its first bit: the phase
  uint64_t phase = 0;
};

struct Copy {  // of cp.async, in order within a lane's warp; the last of a group closes it
  enum Kind : uint8_t { kBytes, kClose, kArrive } kind;
  uint8_t bytes = 0, read = 0;
  uint32_t lanes = 0;  // that it belongs to
  uint32_t to = 0;
  uint64_t from = 0, floor = 0;
  const Instruction* instruction = nullptr;
  Knowledge end;  // of kArrive
};

class Copies {  // in their order
 public:
  bool empty() const { return all_.empty(); }
  std::vector<Copy>::iterator begin() { return all_.begin() + first_; }
  std::vector<Copy>::iterator end() { return all_.end(); }
  void add(Copy copy) { all_.push_back(std::move(copy)); }
  Copy take() {
    Copy copy = std::move(all_[first_++]);
    if (first_ == all_.size() || first_ == kMostDone) all_.erase(all_.begin(), all_.begin() + first_), first_ = 0;
    return copy;
  }

 private:
  static constexpr size_t kMostDone = 512;
  std::vector<Copy> all_;
  size_t first_ = 0;  // those in front of it are done
};

struct alignas(64) Warp {
  // side by side what is looked at when a warp's turn is given away
  Group now;                  // mask 0: nothing runs
  Copies copies;
  Sleep sleep;
  std::vector<Group> others;  // at other instructions
  std::vector<Parked> parked;
  Block* block = nullptr;
  int index = 0;
  std::array<uint8_t*, 2> bases{};
  std::vector<uint8_t> frame;
  uint32_t alive = 0, begun = 0;  // lanes

  template <class T>
  T* lanes(const Operand& o) {
    return reinterpret_cast<T*>(bases[o.space] + o.at);
  }
  uint32_t thread(int lane) const { return static_cast<uint32_t>(index * kLanes + lane); }
  uint32_t predicate(const Operand& o) { return *lanes<uint32_t>(o) ^ (o.negated ? kAll : 0); }
  bool runs() const { return now.mask != 0; }
  bool is_awake() const {
    const bool sleeps = sleep.counter && (*sleep.counter & 1) == sleep.phase && others.empty();
    return runs() && !(sleeps && sleep.group.pc == now.pc && sleep.group.mask == now.mask);
  }
  void settle();                        // after a change of `now`: the group that is to run, with all that are where it is
  void next();                          // the group steps to the next instruction
  void park(Wait why, int barrier = 0); // the group, at its instruction; another one runs
  void leave(uint32_t lanes);           // lanes that have ended
};

struct Barrier {
  uint32_t arrived = 0, expected = 0;
  bool any = false, all = true;
  uint64_t seen = 0;  // by those who have arrived
  Knowledge known;
};

struct BulkCopy {
  uint32_t to, bytes, barrier, thread;
  uint64_t from, floor;
  Knowledge end;
};

struct alignas(64) Block {
  // side by side what is looked at when a turn is given away
  std::vector<BulkCopy> bulk;
  std::vector<std::unique_ptr<Warp>> warps;
  int alive = 0;  // warps
  uint32_t parked = 0;  // warps of which nothing runs and nothing is copied, as far as somebody has looked: until others let them go on
  Grid* grid = nullptr;
  uint32_t x = 0, y = 0, z = 0;
  int multiprocessor = 0;
  std::vector<uint8_t> memory;
  uint8_t* shared = nullptr;
  uint32_t shared_bytes = 0;
  bool has_let_in = false;
  std::array<Barrier, 16> barriers;
  std::shared_ptr<Stores> stores;      // where memory is weak
  std::shared_ptr<Ordering> ordering;  // where it is watched
};

struct Grid {
  const Kernel* kernel = nullptr;
  uint32_t blocks[3] = {1, 1, 1}, threads = 1, threads_y = 1, threads_z = 1, shared = 0;
  bool programmatic = false, cooperative = false;
  std::vector<uint8_t> parameters;
  uint64_t number = 0;  // of blocks
  std::vector<uint64_t> order;
  uint64_t begun = 0, ended = 0, let_in = 0;
  bool is_over() const { return ended == number; }
  Grid* before = nullptr;  // the launch in front of it, while that is not over
  uint64_t fresh = 0;      // no L1 has what was overwritten before
};

struct Card {
  struct Multiprocessor {
    uint32_t shared = 0, threads = 0, blocks = 0;
  };
  std::vector<Multiprocessor> multiprocessors;
  std::deque<std::unique_ptr<Grid>> stream;
};

struct Choices {
  uint64_t seed = 0;
  int multiprocessors = 4;
  int most_instructions = 200;  // of a warp's turn
  bool checks_memory = true;
  bool is_weak = false;  // global memory: weak.h
  bool is_watched = false;  // watch.h
};

// Of SM120
constexpr uint32_t kSharedOfMultiprocessor = 102400, kReservedShared = 1024, kThreadsOfMultiprocessor = 1536, kBlocksOfMultiprocessor = 24;

class Machine {
 public:
  void choose(const Choices& choices);
  const Choices& choices() const { return choices_; }
  void launch(int card, std::unique_ptr<Grid> grid);
  void run();    // until all launches of all cards are over
  void clear();  // forgets what was launched
  std::vector<const Grid*> waiting() const;  // launches of all cards that are not over
  int blocks_that_fit(uint32_t threads, uint32_t shared) const;

  void allow(uint64_t at, uint64_t bytes) { allowed_[at] = std::max(allowed_[at], bytes); }
  void own(uint64_t at, uint64_t bytes) { own_[at] = bytes, allow(at, bytes); }  // of the runtime: until it is given back
  void disown(uint64_t at) { own_.erase(at), allowed_.erase(at), last_ = {}; }
  void forbid_all() { allowed_ = own_, last_ = {}; }
  void check(uint64_t at, uint32_t bytes, bool writes) {
    if (at < last_.first || at + bytes > last_.second) look_up(at, bytes, writes);
  }

  uint32_t random(uint32_t below) { return static_cast<uint32_t>(random_() % below); }
  bool begins_rest(const Block& block, bool behind_fence);
  uint64_t clock() const { return instructions_; }

  uint64_t most_instructions = 0;  // of one run: a wait for what never comes is ended
  std::map<std::string, uint64_t> ran;  // launches of which a block has begun, by kernel

 private:
  void look_up(uint64_t at, uint32_t bytes, bool writes);
  bool begin_blocks(int card);
  bool place(int card, Grid& grid);
  bool begin_any();
  bool any_runs() const;
  bool wake();
  bool turn(Block& block);
  std::vector<uint8_t> memory(size_t bytes);
  void give_back(std::vector<uint8_t> memory);
  void end(Card& card, size_t resident);
  std::string where_all_wait() const;

  Choices choices_;
  std::mt19937_64 random_;
  std::deque<Card> cards_;
  std::vector<std::pair<int, std::unique_ptr<Block>>> resident_;
  std::map<size_t, std::vector<std::vector<uint8_t>>> spare_;  // of blocks that are over, by size
  size_t spare_bytes_ = 0;
  uint64_t instructions_ = 0;
  uint32_t resting_ = 0, rest_ = 0, rests_one_in_ = 0;  // which block, for how many turns of all; how often
  std::map<uint64_t, uint64_t> allowed_, own_;
  std::pair<uint64_t, uint64_t> last_;
};

extern Machine machine;

// ---- what the files give each other

std::vector<std::unique_ptr<Kernel>> parse(const std::string& ptx);
void pack_registers(Kernel& kernel);

// forms.cpp: the names of instructions that are known, each with what operands it may have; and whether these are some of them
using Words = std::vector<std::string>;
const std::map<std::string, Words>& forms();
bool is_form(const std::string& name, const std::string& operands);

// An opcode's handler, or null; `words`: its name's parts
Handler arithmetic(const Words& words, Instruction& instruction);
Handler floats_by_mode(const Words& words);  // of f32, by rounding, flushing and saturation
Handler moves(const Words& words, const Instruction& instruction);
Handler memory(const Words& words, Instruction& instruction);
Handler control(const Words& words, Instruction& instruction);
Handler products(const Words& words);
bool converge(Warp& warp, uint32_t& mask, uint32_t members);  // lanes that an instruction needs together; false: the group waits for them

bool release_in_parts(Warp& warp, uint32_t mask);  // of weak memory; false: others have their turn, then again
void copy_until(Warp& warp, size_t groups_left);  // cp.async: does copies until that many closed groups are left
void copy_one(Warp& warp);
void copy_bulk(Block& block, size_t which);
void release_barriers(Block& block);
std::string place_of(const Warp& warp, uint32_t pc);

int bytes_of(const std::string& type);

template <class F>
inline void each(uint32_t mask, F f) {
  if (mask == kAll) {
    for (int l = 0; l < kLanes; ++l) f(l);
  } else {
    for (; mask; mask &= mask - 1) f(__builtin_ctz(mask));
  }
}

// d[l] = f(l). Where all lanes take part none is written before all are computed: else no compiler would make vectors of them, for one's
// result might stand where another one's operand is.
template <class T, class F>
inline void set_each(T* d, uint32_t mask, F f) {
  if (mask == kAll) {
    T all[kLanes];
    for (int l = 0; l < kLanes; ++l) all[l] = f(l);
    std::memcpy(d, all, sizeof(all));
  } else {
    for (; mask; mask &= mask - 1) d[__builtin_ctz(mask)] = f(__builtin_ctz(mask));
  }
}

inline uint64_t lane_of(Warp& w, const Operand& o, int l) { return o.kind == Operand::k64 ? w.lanes<uint64_t>(o)[l] : w.lanes<uint32_t>(o)[l]; }
inline void set_lane(Warp& w, const Operand& o, int l, uint64_t value) {
  if (o.kind == Operand::k64) {
    w.lanes<uint64_t>(o)[l] = value;
  } else if (o.kind == Operand::k32) {
    w.lanes<uint32_t>(o)[l] = static_cast<uint32_t>(value);
  }
}

inline uint64_t address_of(Warp& w, const Address& a, int lane) {
  if (a.base.kind == Operand::kNone) return a.offset;
  if (a.base.kind == Operand::k64) return w.lanes<uint64_t>(a.base)[lane] + a.offset;
  return static_cast<uint32_t>(w.lanes<uint32_t>(a.base)[lane] + a.offset);
}

inline uint8_t* shared_at(Warp& w, uint64_t at, uint32_t bytes, const Instruction& i) {
  if (at + bytes > w.block->shared_bytes || !is_multiple(at, bytes))
    fail("shared memory: " + std::to_string(bytes) + " bytes at " + std::to_string(at) + " of " + std::to_string(w.block->shared_bytes) + ": " +
         i.text);
  return w.block->shared + at;
}

}  // namespace emulator

// Stores that wait, and what memory had before.
#include "weak.h"

#include <algorithm>
#include <cstring>

#include "machine.h"

namespace emulator {

WeakMemory weak;

namespace {

constexpr size_t kMostWaiting = 4096;  // stores of a block
constexpr size_t kMostPast = 12;       // changes of a word

uint16_t mask_of(uint64_t at, uint32_t bytes) { return static_cast<uint16_t>(((1u << bytes) - 1) << at % 16); }
uint8_t* memory_of(uint64_t word) { return reinterpret_cast<uint8_t*>(word * 16); }

void copy(uint8_t* to, const uint8_t* from, uint16_t mask) {
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) to[i] = from[i];
}

// of a range's pieces within one word each
template <class F>
void each_word(uint64_t at, uint32_t bytes, F f) {
  for (uint32_t done = 0; done < bytes;) {
    const uint32_t part = std::min(bytes - done, static_cast<uint32_t>(16 - (at + done) % 16));
    f(at + done, part, done);
    done += part;
  }
}

}  // namespace

void WeakMemory::choose(bool is_on, uint64_t seed) {
  clear();
  on = is_on;
  if (!on) return;
  flags_.resize(size_t{1} << 18);
  std::mt19937_64 random(seed);
  const uint32_t rates[] = {1, 4, 32}, stale[] = {1, 2, 16}, tears[] = {1, 8};
  drains_one_in_ = rates[random() % 3], stale_one_in_ = stale[random() % 3], tears_one_in_ = tears[random() % 2];
}

void WeakMemory::clear() {
  if (!words_.empty()) std::fill(flags_.begin(), flags_.end(), 0);
  words_.clear();
  looked_.clear();
  all_.clear();
  now_ = 0;
}

std::shared_ptr<Stores> WeakMemory::begin(Grid& grid, uint32_t threads) {
  // A launch begins without a stale L1, but for one that is let in early.
  if (grid.begun == 0) grid.fresh = grid.programmatic && grid.before ? grid.before->fresh : now_;
  auto stores = std::make_shared<Stores>();
  stores->number = ++blocks_, stores->begin = now_, stores->grid = &grid;
  stores->sights.resize(threads);
  for (Sight& sight : stores->sights) sight.view = sight.settled = grid.fresh;
  return all_.emplace_back(std::move(stores));
}

void WeakMemory::end(const Grid& grid) {
  const auto is_its = [&](const std::shared_ptr<Stores>& stores) {
    if (stores->grid != &grid) return false;
    for (const auto& one : stores->waiting) drain(one.word, *stores, one.id);
    return true;
  };
  all_.erase(std::remove_if(all_.begin(), all_.end(), is_its), all_.end());
}

void WeakMemory::drift() {
  if (all_.empty() || machine.random(drains_one_in_)) return;
  Stores& stores = *all_[machine.random(static_cast<uint32_t>(all_.size()))];
  auto& waiting = stores.waiting;
  const size_t count = waiting.size();
  if (count == 0) return;
  const uint32_t how = machine.random(4);
  for (size_t few = how == 0 ? count : how == 1 ? (count + 1) / 2 : 1 + machine.random(16); few > 0 && !waiting.empty(); --few) {
    std::swap(waiting[machine.random(static_cast<uint32_t>(waiting.size()))], waiting.back());
    drain(waiting.back().word, stores, waiting.back().id);
    waiting.pop_back();
  }
}

bool WeakMemory::tears() { return machine.random(tears_one_in_) == 0; }

bool WeakMemory::knows(const Stores& stores, uint32_t thread, uint32_t owner, uint32_t issued) {
  return owner == thread || (stores.sights[owner].arrived > issued && stores.sights[thread].left > issued);
}

uint64_t WeakMemory::floor(const Stores& stores, uint32_t thread, uint8_t order) const {
  const Sight& sight = stores.sights[thread];
  if (order & kReadOnly) return sight.settled;
  return order & (kCoherent | kFromL2) ? std::max(sight.view, stores.begin) : sight.view;
}

void WeakMemory::read(const Stores& stores, uint32_t thread, uint64_t at, uint32_t bytes, uint64_t floor, void* to, bool is_relaxed) {
  std::memcpy(to, reinterpret_cast<const void*>(at), bytes);
  each_word(at, bytes, [&](uint64_t first, uint32_t part, uint32_t done) {
    if (flag(first / 16)) read_word(stores, thread, first, part, floor, static_cast<uint8_t*>(to) + done, is_relaxed);
  });
}

void WeakMemory::read_word(const Stores& stores, uint32_t thread, uint64_t at, uint32_t bytes, uint64_t floor, uint8_t* to, bool is_relaxed) {
  const auto found = words_.find(at / 16);
  if (found == words_.end()) return;
  const Word& word = found->second;
  const uint16_t mask = mask_of(at, bytes);
  uint64_t none = 0, &looked = is_relaxed ? looked_[uint64_t{stores.number} << 42 ^ uint64_t{thread} << 32 ^ at / 16 * 0x9e3779b1u] : none;
  floor = std::max(floor, looked);
  looked = now_;
  uint8_t value[16];
  std::memcpy(value + at % 16, to, bytes);
  uint32_t older = 0;
  for (auto one = word.past.rbegin(); one != word.past.rend(); ++one) {
    if (!(one->mask & mask)) continue;
    if (one->time <= floor || (one->block == stores.number && knows(stores, thread, one->owner, one->issued))) break;
    ++older;
  }
  if (older && machine.random(stale_one_in_) == 0) {
    if (machine.random(2)) older = machine.random(older + 1);
    for (auto one = word.past.rbegin(); older > 0; ++one) {
      if (!(one->mask & mask)) continue;
      copy(value, one->old, one->mask & mask);
      looked = one->time - 1;
      --older;
    }
  }
  for (const Pending& one : word.pending)
    if (one.stores == &stores && knows(stores, thread, one.owner, one.issued)) copy(value, one.bytes, one.mask & mask);
  std::memcpy(to, value + at % 16, bytes);
}

void WeakMemory::write(Stores& stores, uint32_t thread, uint64_t at, uint32_t bytes, const void* from) {
  each_word(at, bytes, [&](uint64_t first, uint32_t part, uint32_t done) {
    Pending one{&stores, ++ids_, thread, stores.clock, mask_of(first, part), {}};
    std::memcpy(one.bytes + first % 16, static_cast<const uint8_t*>(from) + done, part);
    written(first / 16).pending.push_back(one);
    stores.waiting.push_back({first / 16, one.id, one.issued, thread});
  });
  for (size_t few = stores.waiting.size() > kMostWaiting ? kMostWaiting / 2 : 0; few > 0; --few) {
    std::swap(stores.waiting[machine.random(static_cast<uint32_t>(stores.waiting.size()))], stores.waiting.back());
    drain(stores.waiting.back().word, stores, stores.waiting.back().id);
    stores.waiting.pop_back();
  }
}

void WeakMemory::change(Word& word, uint64_t at, const Stores& stores, uint32_t owner, uint32_t issued, uint16_t mask) {
  if (word.past.size() == kMostPast) word.past.erase(word.past.begin());
  Change one{++now_, stores.number, owner, issued, mask, {}};
  copy(one.old, memory_of(at), mask);
  word.past.push_back(one);
}

// A store, behind those of its block to the same bytes; one that is drained already is not there any more.
void WeakMemory::drain(uint64_t at, const Stores& stores, uint64_t id) {
  Word& word = words_[at];
  const auto is_it = [&](const Pending& one) { return one.stores == &stores && one.id == id; };
  const auto found = std::find_if(word.pending.begin(), word.pending.end(), is_it);
  if (found != word.pending.end()) drain(word, at, stores, found->mask, found + 1);
}

// What a block has stored to some bytes, in its order, of those until `end`.
void WeakMemory::drain(Word& word, uint64_t at, const Stores& stores, uint16_t mask, std::vector<Pending>::iterator end) {
  for (auto one = end; one != word.pending.begin();)
    if ((--one)->stores == &stores && one->mask & mask) mask |= one->mask;
  const auto is_due = [&](const Pending& one) {
    if (one.stores != &stores || !(one.mask & mask)) return false;
    change(word, at, stores, one.owner, one.issued, one.mask);
    copy(memory_of(at), one.bytes, one.mask);
    return true;
  };
  word.pending.erase(std::remove_if(word.pending.begin(), end, is_due), end);
}

// It acts at once, behind what its block has stored there.
void WeakMemory::before_atomic(Stores& stores, uint32_t thread, uint64_t at, uint32_t bytes) {
  Word& word = written(at / 16);
  drain(word, at / 16, stores, mask_of(at, bytes), word.pending.end());
  change(word, at / 16, stores, thread, stores.clock, mask_of(at, bytes));
}

bool WeakMemory::release_in_parts(Stores& stores, uint32_t thread) {
  if (stores.waiting.empty() || machine.random(4) == 0) return true;
  std::vector<Stores::Waiting> known;
  for (const Stores::Waiting& one : stores.waiting)
    if (knows(stores, thread, one.owner, one.issued)) known.push_back(one);
  for (uint32_t few = known.empty() ? 0 : 1 + machine.random(4); few > 0; --few) {
    const Stores::Waiting& one = known[machine.random(static_cast<uint32_t>(known.size()))];
    drain(one.word, stores, one.id);
  }
  return known.empty();
}

bool release_in_parts(Warp& w, uint32_t mask) {
  bool is_done = true;
  each(mask, [&](int l) { is_done = weak.release_in_parts(*w.block->stores, w.thread(l)) && is_done; });
  return is_done;
}

void WeakMemory::release(Stores& stores, uint32_t thread) {
  const auto is_known = [&](const Stores::Waiting& one) {
    if (!knows(stores, thread, one.owner, one.issued)) return false;
    drain(one.word, stores, one.id);
    return true;
  };
  stores.waiting.erase(std::remove_if(stores.waiting.begin(), stores.waiting.end(), is_known), stores.waiting.end());
}

void WeakMemory::arrive(Stores& stores, uint32_t thread, uint64_t& seen) {
  stores.sights[thread].arrived = ++stores.clock;
  seen = std::max(seen, stores.sights[thread].view);
}

void WeakMemory::leave(Stores& stores, uint32_t thread, uint64_t seen) {
  Sight& sight = stores.sights[thread];
  sight.left = stores.clock;
  sight.view = std::max(sight.view, seen);
}

}  // namespace emulator

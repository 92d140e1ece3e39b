// Orders of accesses to shared memory, and what of global memory is written.
#include "watch.h"

#include <algorithm>

#include "machine.h"

namespace emulator {

Watch watch;

uint32_t& Clock::operator[](uint32_t writer) {
  if (writer >= of.size()) of.resize((writer / kTogether + 1) * kTogether);
  return of[writer];
}
uint32_t Clock::knows(uint32_t first, uint32_t lanes, uint32_t clock) const {
  if (first >= of.size()) return 0;
  const uint32_t* known = of.data() + first;
  if ((lanes & (lanes - 1)) == 0) return clock <= known[__builtin_ctz(lanes)] ? lanes : 0;
  uint32_t found = 0;
  for (uint32_t l = 0; l < kTogether; ++l) found |= uint32_t{clock <= known[l]} << l;
  return found & lanes;
}
void Clock::join(const Clock& other) {
  if (other.of.size() > of.size()) of.resize(other.of.size());
  uint32_t* mine = of.data();
  const uint32_t* its = other.of.data();
  for (size_t i = 0, count = other.of.size(); i < count; ++i) mine[i] = mine[i] < its[i] ? its[i] : mine[i];
}

void Watch::choose(bool is_on) {
  on = is_on;
  memory_.clear();
  found_.clear();
  all_.clear();
}

const std::string& Watch::reports() {
  told_.clear();
  for (const auto& [what, count] : found_) told_ += std::to_string(count) + ' ' + what + '\n';
  return told_;
}

namespace {
std::string told(const Instruction* i) { return i ? "line " + std::to_string(i->line) + ": " + i->text : "a bulk copy"; }
}  // namespace

void Watch::report(const Block& block, const std::string& what) { ++found_[block.grid->kernel->name + ": " + what]; }

// ---- global memory

void Watch::unwritten(uint64_t at, uint64_t bytes) {
  if (on && bytes) memory_[at].assign(bytes, false);
}
void Watch::written(uint64_t at, uint64_t bytes) {
  auto found = memory_.upper_bound(at);
  if (found == memory_.begin()) return;
  auto& [first, is_written] = *--found;
  if (at - first >= is_written.size()) return;
  std::fill_n(is_written.begin() + (at - first), std::min<uint64_t>(bytes, is_written.size() - (at - first)), true);
}
void Watch::reads(const Block& block, const Instruction* by, uint64_t at, uint32_t bytes) {
  auto found = memory_.upper_bound(at);
  if (found == memory_.begin()) return;
  const auto& [first, is_written] = *--found;
  for (uint64_t i = at - first; i < at - first + bytes && i < is_written.size(); ++i)
    if (!is_written[i]) return report(block, "reads what nobody has written: " + told(by));
}

// ---- shared memory

std::shared_ptr<Ordering> Watch::begin(uint32_t threads, uint32_t bytes) {
  auto found = std::find_if(all_.begin(), all_.end(), [](const auto& one) { return one.use_count() == 1; });  // of a block that is over
  if (found == all_.end()) found = all_.insert(all_.end(), std::make_shared<Ordering>());
  Ordering& o = **found;
  o.threads = threads, o.writers = 2 * threads;
  const auto emptied = [](auto& all, size_t count) {  // their memory stays
    for (auto& one : all) one.clear();
    all.resize(count);
  };
  emptied(o.clocks, threads), emptied(o.closed, threads);
  o.words.assign((bytes + 3) / 4, {}), o.accesses.resize(1), o.free = 0;
  o.copies.assign(threads, 0), o.phases.clear(), o.bulk.clear();
  for (uint32_t t = 0; t < threads; ++t) o.clocks[t][t] = 1;
  return *found;
}

void Watch::report_race(const Block& block, const Ordering::Access& before, int count, bool writes, const Instruction& by) {
  const std::string first = (before.how & kWrites ? "writes, " : "reads, ") + told(&block.grid->kernel->code[before.by]);
  for (; count > 0; --count) report(block, "race: " + first + (writes ? "; writes, " : "; reads, ") + told(&by));
}

bool Watch::access(Ordering& o, const Block& block, const Clock& known, uint32_t writer, uint32_t clock, uint64_t at, uint32_t bytes, int how,
                   const Instruction& by) {
  const bool writes = how & kWrites;
  const uint32_t lane = 1u << writer % kTogether;
  Ordering::Access one{clock, lane, 0, static_cast<uint32_t>(&by - block.grid->kernel->code.data()), 0, 0, static_cast<uint8_t>(how)};
  one.first = static_cast<uint16_t>(writer / kTogether * kTogether);
  bool has_value = true;
  for (uint64_t word = at / 4; word * 4 < at + bytes; ++word) {
    one.mask = 0xf;
    if (word * 4 < at) one.mask &= 0xf << (at - word * 4);
    if (word * 4 + 4 > at + bytes) one.mask &= 0xf >> (word * 4 + 4 - at - bytes);
    Ordering::Access *same = nullptr, *before = nullptr, &first = o.words[word];
    for (Ordering::Access* e = first.lanes ? &first : nullptr; e;) {
      const bool wrote = e->how & kWrites;
      const bool may_meet = e->how & how & kAtomic || !(writes || wrote) || (wrote && how & kKeeps);
      const bool may_be_behind = !(e->mask & ~one.mask) && (writes || !wrote), may_race = e->mask & one.mask && !may_meet;
      const uint32_t ordered = may_be_behind || may_race ? known.knows(e->first, e->lanes, e->clock) : 0;
      if (may_race && ordered != e->lanes) {
        has_value = false;
        report_race(block, *e, __builtin_popcount(e->lanes & ~ordered), writes, by);
      }
      if (may_be_behind) e->lanes &= ~ordered;  // this one is behind them
      if (e->clock == clock && e->by == one.by && e->first == one.first && e->mask == one.mask && e->how == how) same = e;
      if (e->lanes || same == e) {
        before = e, e = e->next ? &o.accesses[e->next] : nullptr;
        continue;
      }
      // the next one comes in its place
      const uint32_t freed = e->next ? e->next : before ? before->next : 0;
      if (e->next)
        *e = o.accesses[e->next];
      else if (before)
        before->next = 0, e = nullptr;
      else
        e = nullptr;
      if (freed) o.accesses[freed].next = o.free, o.free = freed;
    }
    if (same) {
      same->lanes |= lane;
    } else if (first.lanes == 0) {
      first = one;
    } else {
      const uint32_t made = o.free ? o.free : static_cast<uint32_t>(o.accesses.size());
      if (o.free) {
        o.free = o.accesses[made].next;
      } else {
        o.accesses.emplace_back();
      }
      o.accesses[made] = one;
      o.accesses[made].next = first.next, first.next = made;
    }
  }
  return has_value;
}
bool Watch::accesses(Warp& w, int lane, const Instruction& i, uint64_t at, uint32_t bytes, int how) {
  Ordering& o = *w.block->ordering;
  const uint32_t t = w.thread(lane);
  return access(o, *w.block, o.clocks[t], t, o.clocks[t].at(t), at, bytes, how, i);
}
void Watch::copies(Warp& w, int lane, const Instruction& i, uint64_t at, uint32_t bytes) {
  Ordering& o = *w.block->ordering;
  const uint32_t t = w.thread(lane);
  access(o, *w.block, o.clocks[t], o.threads + t, ++o.copies[t], at, bytes, kWrites, i);
}
void Watch::closes(Warp& w, int lane) {
  Ordering& o = *w.block->ordering;
  o.closed[w.thread(lane)].push_back(o.copies[w.thread(lane)]);
}
void Watch::waits_for_copies(Warp& w, int lane, size_t groups_left) {
  Ordering& o = *w.block->ordering;
  const uint32_t t = w.thread(lane);
  uint32_t& known = o.clocks[t][o.threads + t];
  const auto& closed = o.closed[t];
  if (groups_left == size_t(-1)) {
    known = o.copies[t];
  } else if (groups_left < closed.size()) {
    known = std::max(known, closed[closed.size() - 1 - groups_left]);
  }
}
Knowledge Watch::copies_bulk(Warp& w, int lane, const Instruction& i, uint64_t at, uint32_t bytes, uint64_t barrier) {
  Ordering& o = *w.block->ordering;
  const uint32_t t = w.thread(lane);
  auto& [writer, count] = o.bulk.try_emplace({t, barrier}, o.writers, 0).first->second;
  if (writer == kMostWriters)
    fail("more than " + std::to_string(kMostWriters) + " writers of a block's shared memory to watch: bulk copies by so many threads and mbarriers");
  if (writer == o.writers) ++o.writers;
  access(o, *w.block, o.clocks[t], writer, ++count, at, bytes, kWrites, i);
  auto end = std::make_shared<Clock>(o.clocks[t]);
  (*end)[writer] = count;
  return end;
}

// ---- what tells

void Watch::tells(Warp& w, int lane, Knowledge& all) {
  Clock& mine = w.block->ordering->clocks[w.thread(lane)];
  if (!all) all = std::make_shared<Clock>();
  all->join(mine);
  ++mine[w.thread(lane)];
}
void Watch::knows(Warp& w, int lane, const Knowledge& all) {
  if (all) w.block->ordering->clocks[w.thread(lane)].join(*all);
}
Knowledge Watch::after_copies(Warp& w, int lane) {
  Ordering& o = *w.block->ordering;
  const uint32_t t = w.thread(lane);
  Knowledge end;
  tells(w, lane, end);
  (*end)[o.threads + t] = o.copies[t];
  return end;
}
void Watch::init_phases(Warp& w, int lane, uint64_t at) {
  Ordering& o = *w.block->ordering;
  const uint32_t t = w.thread(lane);
  o.phases[at] = {};
  o.phases[at].is_there = true, o.phases[at].owner = t, o.phases[at].since = o.clocks[t].at(t);
}
void Watch::uses_phases(Warp& w, int lane, const Instruction& i, uint64_t at) {
  Ordering& o = *w.block->ordering;
  const auto& phases = o.phases[at];
  if (!phases.is_there) report(*w.block, "an mbarrier that nobody has initialised: " + told(&i));
  if (o.clocks[w.thread(lane)].at(phases.owner) < phases.since) report(*w.block, "race: with the mbarrier's initialisation, " + told(&i));
}
void Watch::arrives(Block& block, uint64_t at, const Knowledge& who) { block.ordering->phases[at].arrived.join(*who); }
void Watch::has_phase(Block& block, uint64_t at, uint32_t phase) {
  auto& phases = block.ordering->phases[at];
  if (phases.phase == phase) return;
  phases.phase = phase;
  phases.over.join(phases.arrived);
  phases.arrived = {};
}
void Watch::sees_end(Warp& w, int lane, uint64_t at) { w.block->ordering->clocks[w.thread(lane)].join(w.block->ordering->phases[at].over); }
void Watch::left_alone(const Block& block, const Instruction& i) { report(block, "a barrier of all threads where some have ended: " + told(&i)); }

}  // namespace emulator

// Jumps, barriers, what lanes of a warp tell each other, and what grids wait for.
#include <algorithm>

#include "machine.h"

namespace emulator {

namespace {

Step jump(Warp& w, const Instruction& i, uint32_t mask) {
  const uint32_t taken = i.guard.kind == Operand::kNone ? mask : mask & w.predicate(i.guard);
  const bool is_back = static_cast<uint32_t>(i.target) <= w.now.pc;
  if (taken != mask) w.others.push_back({w.now.pc + 1, mask & ~taken});
  if (taken == 0) {
    w.now.mask = 0;
  } else {
    w.now = {static_cast<uint32_t>(i.target), taken};
  }
  w.settle();
  return is_back && taken && machine.random(16) == 0 ? Step::kYield : Step::kJumped;
}

Step leave(Warp& w, const Instruction&, uint32_t mask) {
  const uint32_t rest = w.now.mask & ~mask;
  if (rest) w.others.push_back({w.now.pc + 1, rest});
  w.now.mask = mask;
  w.leave(mask);
  return Step::kJumped;
}

Step trap(Warp&, const Instruction&, uint32_t) { fail("the kernel has ended itself (trap)"); }

Step nothing(Warp&, const Instruction&, uint32_t) { return Step::kNext; }

// membar, and fences of one proxy's memory
Step fence(Warp& w, const Instruction&, uint32_t mask) {
  if (!weak.on) return Step::kNext;
  if (!release_in_parts(w, mask)) return Step::kYield;
  each(mask, [&](int l) {
    weak.release(*w.block->stores, w.thread(l));
    weak.acquire(*w.block->stores, w.thread(l));
  });
  if (!machine.begins_rest(*w.block, true)) return Step::kNext;
  w.next();
  return Step::kYield;
}
// Lanes have met: each knows what the others did before.
void meet(Warp& w, uint32_t mask) {
  if (watch.on) {
    Knowledge known;
    each(mask, [&](int l) { watch.tells(w, l, known); });
    each(mask, [&](int l) { watch.knows(w, l, known); });
  }
  if (!weak.on) return;
  uint64_t seen = 0;
  each(mask, [&](int l) { weak.arrive(*w.block->stores, w.thread(l), seen); });
  each(mask, [&](int l) { weak.leave(*w.block->stores, w.thread(l), seen); });
}
Step fence_of_block(Warp& w, const Instruction&, uint32_t mask) {
  each(mask, [&](int l) { meet(w, 1u << l); });
  return Step::kNext;
}

Step rest(Warp& w, const Instruction&, uint32_t) {
  w.next();
  return Step::kYield;
}

// Those that lanes say are with them, and that are: all say the same, and are among them. False: the group waits for the rest of them.
bool converge_as_told(Warp& w, const Operand& members, uint32_t& mask) {
  const uint32_t* const told = w.lanes<uint32_t>(members);
  const uint32_t all = told[__builtin_ctz(mask)];
  const bool is_here = converge(w, mask, all);
  if (mask & ~all) fail("a lane that its mask does not name takes part");
  each(mask, [&](int l) {
    if (told[l] != all) fail("lanes that take part together have different masks");
  });
  return is_here;
}

Step warp_barrier(Warp& w, const Instruction& i, uint32_t mask) {
  if (!converge_as_told(w, i.o[0], mask)) return Step::kJumped;
  meet(w, mask);
  return Step::kNext;
}

// bar.sync and bar.red: a warp arrives as a whole. o: [destination,] barrier [, threads] [, predicate]
enum : int { kSync, kAny, kEvery, kArrive };
Step barrier(Warp& w, const Instruction& i, uint32_t mask) {
  if (!converge(w, mask, kAll)) return Step::kJumped;
  const bool reduces = i.kind == kAny || i.kind == kEvery;
  const size_t first = reduces ? 1 : 0, operands = i.o.size() - first - (reduces ? 1 : 0);
  const int lane = __builtin_ctz(mask);
  const uint32_t which = w.lanes<uint32_t>(i.o[first])[lane];
  if (which >= 16) fail("barrier " + std::to_string(which));
  Barrier& b = w.block->barriers[which];
  const uint32_t expected = operands > 1 ? w.lanes<uint32_t>(i.o[first + 1])[lane] : 0;
  if (expected % 32) fail("a barrier of " + std::to_string(expected) + " threads");
  if (b.arrived && b.expected != expected) fail("a barrier is expected by warps with different numbers of threads");
  b.expected = expected;
  if (reduces) {
    const uint32_t said = w.predicate(i.o.back());
    b.any = b.any || (said & mask), b.all = b.all && (said & mask) == mask;
  }
  b.arrived += 32;
  if (weak.on) each(mask, [&](int l) { weak.arrive(*w.block->stores, w.thread(l), b.seen); });
  if (watch.on) each(mask, [&](int l) { watch.tells(w, l, b.known); });
  if (watch.on && expected == 0 && (mask != w.begun || static_cast<size_t>(w.block->alive) < w.block->warps.size())) watch.left_alone(*w.block, i);
  const bool stays = i.kind != kArrive;
  if (stays) w.park(Wait::kBarrier, static_cast<int>(which));
  release_barriers(*w.block);
  return stays ? Step::kJumped : Step::kNext;
}

Step wait_for_grid(Warp& w, const Instruction&, uint32_t mask) {
  if (w.block->grid->before == nullptr) {
    if (weak.on) each(mask, [&](int l) { weak.settle(*w.block->stores, w.thread(l)); });
    return Step::kNext;
  }
  w.park(Wait::kGrid);
  return Step::kJumped;
}

Step let_in(Warp& w, const Instruction&, uint32_t) {
  if (!w.block->has_let_in) ++w.block->grid->let_in;
  w.block->has_let_in = true;
  return Step::kNext;
}

// o: d [, p], a, b, c, members
enum Shuffle { kUp, kDown, kButterfly, kIndex };
template <int kHow>
Step shuffle(Warp& w, const Instruction& i, uint32_t mask) {
  const bool tells = i.o.size() == 6;
  const size_t first = tells ? 2 : 1;
  if (!converge_as_told(w, i.o[first + 3], mask)) return Step::kJumped;
  uint32_t from[kLanes], *d = w.lanes<uint32_t>(i.o[0]);
  std::memcpy(from, w.lanes<uint32_t>(i.o[first]), sizeof(from));
  const uint32_t *bs = w.lanes<uint32_t>(i.o[first + 1]), *cs = w.lanes<uint32_t>(i.o[first + 2]);
  uint32_t inside = 0;
  uint32_t result[kLanes];
  each(mask, [&](int lane) {
    const int b = bs[lane] & 31, clamp = cs[lane] & 31, segment = cs[lane] >> 8 & 31;
    const int most = (lane & segment) | (clamp & ~segment), least = lane & segment;
    int source = kHow == kUp ? lane - b : kHow == kDown ? lane + b : kHow == kButterfly ? lane ^ b : (least | (b & ~segment));
    const bool is_inside = kHow == kUp ? source >= most : source <= most;
    if (!is_inside) source = lane;
    if (is_inside) inside |= 1u << lane;
    if (!(mask >> source & 1)) fail("a shuffle from a lane that does not take part");
    result[lane] = from[source];
  });
  each(mask, [&](int lane) { d[lane] = result[lane]; });
  if (tells && i.o[1].kind != Operand::kNone) {
    uint32_t& p = *w.lanes<uint32_t>(i.o[1]);
    p = (p & ~mask) | (inside & mask);
  }
  return Step::kNext;
}

enum Vote { kBallot, kVoteAny, kVoteAll };
template <int kHow>
Step vote(Warp& w, const Instruction& i, uint32_t mask) {
  if (!converge_as_told(w, i.o[2], mask)) return Step::kJumped;
  const uint32_t said = w.predicate(i.o[1]) & mask;
  if (kHow == kBallot) {
    uint32_t* d = w.lanes<uint32_t>(i.o[0]);
    each(mask, [&](int lane) { d[lane] = said; });
  } else {
    uint32_t& p = *w.lanes<uint32_t>(i.o[0]);
    const bool is_so = kHow == kVoteAny ? said != 0 : said == mask;
    p = (p & ~mask) | (is_so ? mask : 0);
  }
  return Step::kNext;
}

Step match_any(Warp& w, const Instruction& i, uint32_t mask) {
  if (!converge_as_told(w, i.o[2], mask)) return Step::kJumped;
  uint32_t from[kLanes], *d = w.lanes<uint32_t>(i.o[0]);
  std::memcpy(from, w.lanes<uint32_t>(i.o[1]), sizeof(from));
  each(mask, [&](int lane) {
    uint32_t same = 0;
    each(mask, [&](int other) { same |= uint32_t{from[other] == from[lane]} << other; });
    d[lane] = same;
  });
  return Step::kNext;
}

template <auto kCombine>
Step reduce(Warp& w, const Instruction& i, uint32_t mask) {
  if (!converge_as_told(w, i.o[2], mask)) return Step::kJumped;
  uint32_t *a = w.lanes<uint32_t>(i.o[1]), *d = w.lanes<uint32_t>(i.o[0]);
  uint32_t all = a[__builtin_ctz(mask)];
  each(mask & (mask - 1), [&](int lane) { all = kCombine(all, a[lane]); });
  each(mask, [&](int lane) { d[lane] = all; });
  return Step::kNext;
}

Step elect(Warp& w, const Instruction& i, uint32_t mask) {
  if (!converge_as_told(w, i.o[2], mask)) return Step::kJumped;
  const int leader = __builtin_ctz(mask);
  if (i.o[0].kind != Operand::kNone) each(mask, [&](int lane) { w.lanes<uint32_t>(i.o[0])[lane] = leader; });
  uint32_t& p = *w.lanes<uint32_t>(i.o[1]);
  p = (p & ~mask) | 1u << leader;
  return Step::kNext;
}

Step active(Warp& w, const Instruction& i, uint32_t mask) {
  each(mask, [&](int lane) { w.lanes<uint32_t>(i.o[0])[lane] = mask; });
  return Step::kNext;
}

Step clock(Warp& w, const Instruction& i, uint32_t mask) {
  const uint64_t now = machine.clock() * 4;  // of a wait's patience there is enough
  if (i.o[0].kind == Operand::k64) {
    each(mask, [&](int lane) { w.lanes<uint64_t>(i.o[0])[lane] = now; });
  } else {
    each(mask, [&](int lane) { w.lanes<uint32_t>(i.o[0])[lane] = static_cast<uint32_t>(now); });
  }
  return Step::kNext;
}

uint32_t most(uint32_t a, uint32_t b) { return std::max(a, b); }
uint32_t least(uint32_t a, uint32_t b) { return std::min(a, b); }
uint32_t most_signed(uint32_t a, uint32_t b) { return std::max(static_cast<int32_t>(a), static_cast<int32_t>(b)); }
uint32_t least_signed(uint32_t a, uint32_t b) { return std::min(static_cast<int32_t>(a), static_cast<int32_t>(b)); }
uint32_t sum(uint32_t a, uint32_t b) { return a + b; }
uint32_t either(uint32_t a, uint32_t b) { return a | b; }
uint32_t both(uint32_t a, uint32_t b) { return a & b; }

}  // namespace

// Lanes that an instruction needs together. False: the group waits for the rest of them. True: `mask` holds all.
bool converge(Warp& w, uint32_t& mask, uint32_t members) {
  for (size_t p = 0; p < w.parked.size();) {
    if (w.parked[p].why == Wait::kMembers && w.parked[p].group.pc == w.now.pc) {
      w.now.mask |= w.parked[p].group.mask;
      mask |= w.parked[p].group.mask;
      w.parked.erase(w.parked.begin() + p);
    } else {
      ++p;
    }
  }
  if ((members & w.alive & ~mask) == 0) return true;
  const uint32_t missing = members & w.alive & ~mask;
  if (missing & w.now.mask) fail("lanes that its mask names do not take part");
  w.park(Wait::kMembers);
  return false;
}

void release_barriers(Block& block) {
  for (size_t which = 0; which < block.barriers.size(); ++which) {
    Barrier& b = block.barriers[which];
    const uint32_t expected = b.expected ? b.expected : static_cast<uint32_t>(block.alive) * 32;
    if (b.arrived == 0 || b.arrived < expected) continue;
    const bool any = b.any, all = b.all;
    const uint64_t seen = b.seen;
    const Knowledge known = std::move(b.known);
    b = {};
    block.parked = 0;
    for (auto& warp : block.warps) {
      for (size_t p = 0; p < warp->parked.size();) {
        const Parked parked = warp->parked[p];
        if (parked.why != Wait::kBarrier || parked.barrier != static_cast<int>(which)) {
          ++p;
          continue;
        }
        const Instruction& i = block.grid->kernel->code[parked.group.pc];
        if (i.kind != kSync) {
          uint32_t& d = *warp->lanes<uint32_t>(i.o[0]);
          d = (d & ~parked.group.mask) | ((i.kind == kAny ? any : all) ? parked.group.mask : 0);
        }
        if (weak.on) each(parked.group.mask, [&](int l) { weak.leave(*block.stores, warp->thread(l), seen); });
        if (watch.on) each(parked.group.mask, [&](int l) { watch.knows(*warp, l, known); });
        warp->parked.erase(warp->parked.begin() + p);
        warp->others.push_back({parked.group.pc + 1, parked.group.mask});
        warp->settle();
      }
    }
  }
}

Handler control(const Words& words, Instruction& i) {
  const std::string& op = words[0];
  const std::string second = words.size() > 1 ? words[1] : "", third = words.size() > 2 ? words[2] : "", last = words.back();
  if (op == "bra") return i.target = 0, jump;
  if (op == "ret" || op == "exit") return leave;
  if (op == "trap") return trap;
  if (op == "nanosleep") return rest;
  if (op == "membar" || (op == "fence" && (second == "sc" || second == "acq_rel"))) return last == "cta" ? fence_of_block : fence;
  if (op == "setmaxnreg" || op == "fence" || op == "prefetch") return nothing;
  if (op == "bar" && second == "warp") return warp_barrier;
  if (op == "bar") return i.kind = second == "sync" ? kSync : second == "arrive" ? kArrive : third == "or" ? kAny : kEvery, barrier;
  if (op == "griddepcontrol") return second == "wait" ? wait_for_grid : let_in;
  if (op == "shfl") return third == "up" ? shuffle<kUp> : third == "down" ? shuffle<kDown> : third == "bfly" ? shuffle<kButterfly> : shuffle<kIndex>;
  if (op == "vote") return third == "ballot" ? vote<kBallot> : third == "any" ? vote<kVoteAny> : third == "all" ? vote<kVoteAll> : nullptr;
  if (op == "match" && second == "any") return match_any;
  if (op == "elect") return elect;
  if (op == "activemask") return active;
  if (op == "clock") return clock;
  if (op == "redux") {
    const bool is_signed = last == "s32";
    if (third == "max") return is_signed ? reduce<most_signed> : reduce<most>;
    if (third == "min") return is_signed ? reduce<least_signed> : reduce<least>;
    return third == "add" ? reduce<sum> : third == "or" ? reduce<either> : third == "and" ? reduce<both> : nullptr;
  }
  return nullptr;
}

}  // namespace emulator

// Whose turn it is: grids of a stream, blocks on multiprocessors, warps, groups of a warp's lanes.
#include "machine.h"

#include <algorithm>
#include <sstream>

namespace emulator {

Machine machine;

namespace {

static_assert(kMostWarps <= 8 * sizeof(Block::parked));

constexpr uint32_t kRestsOneIn[] = {16, 512, 1 << 20};  // looks, by the seed
constexpr uint32_t kLongestRest = 4096;                  // turns
constexpr uint64_t kLongestSleep = 5000;               // instructions by which time goes on while all sleep
constexpr size_t kMostSpare = 64 << 20;                // bytes
constexpr int kOthersTurn = 4;                         // a group that waits in a loop leaves to another one, once in so many looks

}  // namespace

// ---- a warp

void Warp::settle() {
  for (;;) {
    if (now.mask == 0) {
      if (others.empty()) return;
      now = others.back();
      others.pop_back();
    }
    bool changed = false;
    for (size_t i = 0; i < others.size();) {
      if (others[i].pc == now.pc) {
        now.mask |= others[i].mask;
        others[i] = others.back();
        others.pop_back();
        changed = true;
      } else {
        if (others[i].pc < now.pc) std::swap(others[i], now), changed = true;
        ++i;
      }
    }
    if (!changed) return;
  }
}

void Warp::next() {
  ++now.pc;
  if (!others.empty()) settle();
}

void Warp::park(Wait why, int barrier) {
  parked.push_back({now, why, barrier});
  now.mask = 0;
  settle();
}

void Warp::leave(uint32_t lanes) {
  alive &= ~lanes;
  now.mask &= ~lanes;
  // who waits for members may have waited for these
  for (size_t i = 0; i < parked.size();) {
    if (parked[i].why == Wait::kMembers) {
      others.push_back(parked[i].group);
      parked.erase(parked.begin() + i);
    } else {
      ++i;
    }
  }
  settle();
  if (alive == 0) {
    --block->alive;
    release_barriers(*block);
  }
}

std::string place_of(const Warp& warp, uint32_t pc) {
  const Kernel& kernel = *warp.block->grid->kernel;
  const Instruction& i = kernel.code[std::min<size_t>(pc, kernel.code.size() - 1)];
  std::ostringstream out;
  out << kernel.name << ", block " << warp.block->x << "," << warp.block->y << "," << warp.block->z << ", warp " << warp.index << ", line " << i.line
      << ": " << i.text;
  return out.str();
}

// ---- the machine

void Machine::choose(const Choices& choices) {
  choices_ = choices;
  random_.seed(choices.seed);
  rest_ = 0, rests_one_in_ = choices.is_weak ? kRestsOneIn[random(3)] : 0;
  weak.choose(choices.is_weak, choices.seed);
  watch.choose(choices.is_watched);
}

int Machine::blocks_that_fit(uint32_t threads, uint32_t shared) const {
  const uint32_t by_shared = kSharedOfMultiprocessor / (shared + kReservedShared), by_threads = kThreadsOfMultiprocessor / std::max(threads, 1u);
  return static_cast<int>(std::min({by_shared, by_threads, kBlocksOfMultiprocessor}));
}

void Machine::launch(int card, std::unique_ptr<Grid> grid) {
  while (static_cast<int>(cards_.size()) <= card) cards_.emplace_back();
  for (Card& one : cards_) one.multiprocessors.resize(choices_.multiprocessors);
  grid->number = uint64_t{grid->blocks[0]} * grid->blocks[1] * grid->blocks[2];
  auto& stream = cards_[card].stream;
  grid->before = stream.empty() ? nullptr : stream.back().get();
  stream.push_back(std::move(grid));
}

void Machine::clear() {
  cards_.clear();
  resident_.clear();
  spare_.clear(), spare_bytes_ = 0;
  weak.clear();
}

std::vector<const Grid*> Machine::waiting() const {
  std::vector<const Grid*> found;
  for (const Card& card : cards_)
    for (const auto& grid : card.stream) found.push_back(grid.get());
  return found;
}

void Machine::look_up(uint64_t at, uint32_t bytes, bool writes) {
  if (!choices_.checks_memory) return;
  auto found = allowed_.upper_bound(at);
  while (found != allowed_.begin()) {
    --found;
    if (at >= found->first && at + bytes <= found->first + found->second) {
      last_ = {found->first, found->first + found->second};
      return;
    }
    if (found->first + (uint64_t{1} << 36) < at) break;
  }
  std::ostringstream out;
  out << (writes ? "writes " : "reads ") << bytes << " bytes at 0x" << std::hex << at << ", where no tensor is";
  fail(out.str());
}

// All bits set: NaN as bf16, f32 and E4M3.
std::vector<uint8_t> Machine::memory(size_t bytes) {
  auto& spare = spare_[bytes];
  if (spare.empty()) return std::vector<uint8_t>(bytes, 0xff);
  std::vector<uint8_t> found = std::move(spare.back());
  spare.pop_back();
  spare_bytes_ -= bytes;
  std::memset(found.data(), 0xff, bytes);
  return found;
}

void Machine::give_back(std::vector<uint8_t> memory) {
  if (spare_bytes_ + memory.size() > kMostSpare) return;
  spare_bytes_ += memory.size();
  spare_[memory.size()].push_back(std::move(memory));
}

bool Machine::place(int number_of_card, Grid& grid) {
  Card& card = cards_[number_of_card];
  const uint32_t threads = grid.threads * grid.threads_y * grid.threads_z, padded = (threads + 31) / 32 * 32;
  const uint32_t shared = grid.kernel->static_shared + grid.shared + kReservedShared;
  const size_t count = card.multiprocessors.size(), first = random(static_cast<uint32_t>(count));
  for (size_t i = 0; i < count; ++i) {
    const size_t which = (first + i) % count;
    Card::Multiprocessor& m = card.multiprocessors[which];
    if (m.shared + shared > kSharedOfMultiprocessor || m.threads + padded > kThreadsOfMultiprocessor || m.blocks + 1 > kBlocksOfMultiprocessor)
      continue;
    m.shared += shared, m.threads += padded, m.blocks += 1;
    auto block = std::make_unique<Block>();
    if (weak.on) block->stores = weak.begin(grid, padded);
    if (grid.begun == 0) ++ran[grid.kernel->name];
    const uint64_t number = grid.begun++;
    block->grid = &grid, block->multiprocessor = static_cast<int>(which);
    block->x = number % grid.blocks[0], block->y = number / grid.blocks[0] % grid.blocks[1], block->z = number / grid.blocks[0] / grid.blocks[1];
    block->shared_bytes = shared - kReservedShared;
    if (watch.on) block->ordering = watch.begin(padded, block->shared_bytes);
    block->memory = memory(block->shared_bytes + 1024);
    block->shared = block->memory.data() + (1024 - reinterpret_cast<uintptr_t>(block->memory.data()) % 1024);
    const Kernel& kernel = *grid.kernel;
    for (uint32_t w = 0; w < padded / 32; ++w) {
      auto warp = std::make_unique<Warp>();
      warp->block = block.get(), warp->index = static_cast<int>(w);
      warp->frame = memory(kernel.frame_bytes);
      warp->bases = {warp->frame.data(), const_cast<uint8_t*>(kernel.constants.data())};
      for (const auto& [what, at] : kernel.specials) {
        for (int l = 0; l < kLanes; ++l) {
          const uint32_t thread = w * 32 + l;
          if (what >= 1000) {
            reinterpret_cast<uint64_t*>(warp->frame.data() + at)[l] = reinterpret_cast<uint64_t>(grid.parameters.data()) + what - 1000;
            continue;
          }
          const uint32_t lane = l, below = (1u << l) - 1;
          const uint32_t values[] = {thread % grid.threads,
                                     thread / grid.threads % grid.threads_y,
                                     thread / grid.threads / grid.threads_y,
                                     grid.threads,
                                     grid.threads_y,
                                     grid.threads_z,
                                     block->x,
                                     block->y,
                                     block->z,
                                     grid.blocks[0],
                                     grid.blocks[1],
                                     grid.blocks[2],
                                     lane,
                                     w,
                                     static_cast<uint32_t>(which),
                                     static_cast<uint32_t>(count),
                                     below,
                                     below | 1u << l,
                                     ~below,
                                     ~(below | 1u << l),
                                     1u << l,
                                     grid.shared,
                                     block->shared_bytes};
          reinterpret_cast<uint32_t*>(warp->frame.data() + at)[l] = values[what];
        }
      }
      const uint32_t lanes = std::min(32u, threads - w * 32);
      warp->alive = warp->begun = lanes == 32 ? kAll : (1u << lanes) - 1;
      warp->now = {0, warp->alive};
      block->warps.push_back(std::move(warp));
    }
    block->alive = static_cast<int>(block->warps.size());
    resident_.emplace_back(number_of_card, std::move(block));
    return true;
  }
  return false;
}

// A grid may begin when the one in front is over, or, launched programmatically, when all blocks of that one have let it in.
bool Machine::begin_blocks(int card) {
  auto& stream = cards_[card].stream;
  bool begun = false;
  for (size_t i = 0; i < stream.size(); ++i) {
    Grid& grid = *stream[i];
    if (i > 0) {
      const Grid& front = *stream[i - 1];
      const bool is_let_in = grid.programmatic && front.begun == front.number && front.let_in == front.number;
      bool all_over = true;
      for (size_t j = 0; j < i; ++j) all_over = all_over && stream[j]->is_over();
      if (!is_let_in && !all_over) break;
    }
    if (grid.cooperative && grid.begun == 0) {
      const uint32_t threads = (grid.threads * grid.threads_y * grid.threads_z + 31) / 32 * 32;
      if (grid.number > uint64_t(blocks_that_fit(threads, grid.kernel->static_shared + grid.shared)) * cards_[card].multiprocessors.size())
        fail("a cooperative launch of more blocks than are resident: " + grid.kernel->name);
      if (i > 0) break;  // it has the card to itself when it begins
    }
    // some at once, so that their order is not always that of their numbers' turns
    for (uint32_t few = 1 + random(4); few > 0 && grid.begun < grid.number; --few) {
      if (!place(card, grid)) break;
      begun = true;
    }
    if (grid.begun < grid.number) break;
  }
  return begun;
}

void Machine::end(Card& card, size_t resident) {
  Block& block = *resident_[resident].second;
  for (size_t i = 0; i < block.bulk.size(); ++i) fail("a block has ended before its bulk copy: " + block.grid->kernel->name);
  Grid& grid = *block.grid;
  const uint32_t padded = (grid.threads * grid.threads_y * grid.threads_z + 31) / 32 * 32;
  Card::Multiprocessor& m = card.multiprocessors[block.multiprocessor];
  m.shared -= block.shared_bytes + kReservedShared, m.threads -= padded, m.blocks -= 1;
  if (!block.has_let_in) ++grid.let_in;
  ++grid.ended;
  give_back(std::move(block.memory));
  for (auto& warp : block.warps) give_back(std::move(warp->frame));
  std::swap(resident_[resident], resident_.back());
  resident_.pop_back();
  if (grid.is_over()) {
    if (weak.on) weak.end(grid);
    for (auto& one : resident_) {  // who waited for this grid goes on
      if (one.second->grid->before != &grid) continue;
      for (auto& warp : one.second->warps)
        for (size_t p = 0; p < warp->parked.size();) {
          if (warp->parked[p].why == Wait::kGrid) {
            Group group = warp->parked[p].group;
            if (weak.on) each(group.mask, [&](int l) { weak.settle(*one.second->stores, warp->thread(l)); });
            ++group.pc;
            warp->others.push_back(group);
            warp->parked.erase(warp->parked.begin() + p);
            warp->settle();
            one.second->parked = 0;
          } else {
            ++p;
          }
        }
    }
    for (auto& after : card.stream)
      if (after->before == &grid) after->before = nullptr;
    while (!card.stream.empty() && card.stream.front()->is_over()) card.stream.pop_front();
  }
}

// A warp's turn, and copies'. False: nothing of the block runs.
bool Machine::turn(Block& block) {
  bool copied = false;
  if (!block.bulk.empty() && random(3) == 0) copy_bulk(block, random(static_cast<uint32_t>(block.bulk.size()))), copied = true;
  const size_t count = block.warps.size(), first = random(static_cast<uint32_t>(count));
  Warp* chosen = nullptr;
  for (size_t i = 0; i < count && !chosen; ++i) {
    const size_t which = first + i < count ? first + i : first + i - count;
    if (block.parked >> which & 1) continue;
    Warp& warp = *block.warps[which];
    if (!warp.copies.empty() && (random(8) == 0 || !warp.runs())) copy_one(warp), copied = true;
    if (warp.is_awake()) chosen = &warp;
    if (!warp.runs() && warp.copies.empty()) block.parked |= 1u << which;
  }
  if (!chosen) return copied;
  Warp& warp = *chosen;
  warp.sleep = {};
  const Instruction* code = block.grid->kernel->code.data();
  int budget = 1 + random(choices_.most_instructions);
  const int begin = budget;
  const Instruction* last = code;
  try {
    for (; budget > 0 && warp.now.mask; --budget) {
      const Instruction& i = *(last = code + warp.now.pc);
      uint32_t mask = warp.now.mask;
      if (i.guard.kind != Operand::kNone && i.target < 0) {
        mask &= warp.predicate(i.guard);
        if (mask == 0) {
          warp.next();
          continue;
        }
      }
      const Step step = i.run(warp, i, mask);
      if (step == Step::kNext) {
        warp.next();
      } else if (step == Step::kYield) {
        if (!warp.others.empty() && random(kOthersTurn) == 0) std::swap(warp.now, warp.others[random(static_cast<uint32_t>(warp.others.size()))]);
        break;
      }
    }
  } catch (const std::exception& error) {
    fail(std::string(error.what()) + "\n  in " + place_of(warp, static_cast<uint32_t>(last - code)));
  }
  instructions_ += begin - budget + 1;
  return true;
}

std::string Machine::where_all_wait() const {
  std::ostringstream out;
  int lines = 0;
  for (const auto& one : resident_)
    for (const auto& warp : one.second->warps)
      for (const Parked& parked : warp->parked)
        if (lines++ < 12)
          out << "\n  "
              << (parked.why == Wait::kBarrier   ? "barrier: "
                  : parked.why == Wait::kMembers ? "other lanes: "
                                                 : "the grid in front: ")
              << place_of(*warp, parked.group.pc);
  for (const auto& one : resident_)
    for (const auto& warp : one.second->warps)
      if (warp->runs() && lines++ < 16) out << "\n  runs: " << place_of(*warp, warp->now.pc);
  return out.str();
}

bool Machine::begin_any() {
  bool any = false;
  for (size_t card = 0; card < cards_.size(); ++card) any = begin_blocks(static_cast<int>(card)) || any;
  return any;
}

bool Machine::any_runs() const {
  for (const auto& one : resident_) {
    if (!one.second->bulk.empty() || one.second->alive == 0) return true;
    for (const auto& warp : one.second->warps)
      if (warp->is_awake() || !warp->copies.empty()) return true;
  }
  return false;
}

// try_wait suspends its thread for a limited time: who sleeps looks again. False: nobody sleeps.
bool Machine::wake() {
  bool any = false;
  for (auto& one : resident_)
    for (auto& warp : one.second->warps) any = any || warp->sleep.counter, warp->sleep = {};
  instructions_ += any ? kLongestSleep : 0;
  return any;
}

// Now and then a block that has looked for others stands still, so that they are far ahead of what it has seen.
bool Machine::begins_rest(const Block& block, bool behind_fence) {
  if (rest_ > 0 || random(behind_fence ? 2 : rests_one_in_)) return false;
  resting_ = block.stores->number, rest_ = random(kLongestRest);
  return true;
}

void Machine::run() {
  const uint64_t begin = instructions_;
  size_t idle = 0;
  try {
    for (;;) {
      bool is_over = true;
      for (size_t card = 0; card < cards_.size(); ++card) {
        is_over = is_over && cards_[card].stream.empty();
        if (resident_.size() < 4 || random(4) == 0) begin_blocks(static_cast<int>(card));
      }
      if (is_over) {
        if (weak.on) weak.clear();
        return;
      }
      if (weak.on) weak.drift();
      if (resident_.empty()) {
        if (!begin_any()) fail("no block of what was launched finds a place");
      }
      const size_t which = random(static_cast<uint32_t>(resident_.size()));
      Block& block = *resident_[which].second;
      if (rest_ > 0 && --rest_ > 0 && block.stores->number == resting_) continue;
      idle = turn(block) ? 0 : idle + 1;
      if (block.alive == 0 && block.bulk.empty()) {
        end(cards_[resident_[which].first], which);
        idle = 0;
      } else if (block.alive == 0) {
        copy_bulk(block, 0);
        idle = 0;
      }
      if (idle > 16 * resident_.size() + 64 && !begin_any() && !any_runs() && !wake()) fail("all wait:" + where_all_wait());
      if (instructions_ - begin > most_instructions) fail("it does not end:" + where_all_wait());
    }
  } catch (...) {
    clear();
    throw;
  }
}

}  // namespace emulator

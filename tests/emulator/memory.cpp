// Loads, stores, atomics, matrices of shared memory, asynchronous copies and the barriers that count their bytes.
#include <algorithm>

#include "machine.h"

namespace emulator {

namespace {

bool has(const Words& words, const char* word) { return std::find(words.begin(), words.end(), word) != words.end(); }
bool is_shared(const Words& words) { return has(words, "shared"); }

template <class T>
void move(void* to, const void* from, size_t count) {  // 1, 2 or 4, without a call of memcpy
  if (count == 1) {
    std::memcpy(to, from, sizeof(T));
  } else {
    std::memcpy(to, from, count == 2 ? 2 * sizeof(T) : 4 * sizeof(T));
  }
}

uint8_t* global_at(uint64_t at, uint32_t bytes, bool writes) {
  if (!is_multiple(at, bytes)) fail("an address that is no multiple of " + std::to_string(bytes) + ": " + std::to_string(at));
  machine.check(at, bytes, writes);
  return reinterpret_cast<uint8_t*>(at);
}

enum Space { kGlobal, kShared, kParameter };

// Of global memory, and whether it is weak
uint8_t order_of(const Words& words) {
  uint8_t order = 0;
  for (const std::string& word : words) {
    if (word == "relaxed") order |= kCoherent;
    if (word == "acquire" || word == "acq_rel") order |= kCoherent | kAcquires;
    if (word == "release" || word == "acq_rel") order |= kReleases;
    if (word == "cg") order |= kFromL2;
    if (word == "nc") order |= kReadOnly;
  }
  return order;
}

void read_weakly(Warp& w, const Instruction& i, int lane, uint64_t at, uint32_t bytes, uint32_t element, void* to) {
  Stores& stores = *w.block->stores;
  const uint32_t thread = w.thread(lane), each = bytes > element && weak.tears() ? element : bytes;
  for (uint32_t done = 0; done < bytes; done += each)
    weak.read(stores, thread, at + done, each, weak.floor(stores, thread, i.order), static_cast<uint8_t*>(to) + done, i.order & kCoherent);
  if (i.order & kAcquires) weak.acquire(stores, thread);
}
void write_weakly(Warp& w, const Instruction& i, int lane, uint64_t at, uint32_t bytes, uint32_t element, const void* from) {
  Stores& stores = *w.block->stores;
  const uint32_t thread = w.thread(lane), each = bytes > element && weak.tears() ? element : bytes;
  if (i.order & kReleases) weak.release(stores, thread);
  for (uint32_t done = 0; done < bytes; done += each) weak.write(stores, thread, at + done, each, static_cast<const uint8_t*>(from) + done);
}

template <class T, int kSpace>
Step load(Warp& w, const Instruction& i, uint32_t mask) {
  const size_t count = i.o.size();
  const uint32_t bytes = static_cast<uint32_t>(sizeof(T) * count);
  each(mask, [&](int l) {
    const uint64_t at = address_of(w, i.address, l);
    const uint8_t* from = kSpace == kShared      ? shared_at(w, at, bytes, i)
                          : kSpace == kParameter ? reinterpret_cast<uint8_t*>(at)
                                                 : global_at(at, bytes, false);
    const bool has_value = kSpace != kShared || !watch.on || watch.accesses(w, l, i, at, bytes, i.order & kCoherent ? kAtomic : kReads);
    if (kSpace == kGlobal && watch.on) watch.reads(*w.block, &i, at, bytes);
    T values[4];
    if (kSpace == kGlobal && weak.on) {
      read_weakly(w, i, l, at, bytes, sizeof(T), values);
    } else {
      move<T>(values, from, count);
    }
    if (!has_value) std::memset(values, 0xff, bytes);
    for (size_t n = 0; n < count; ++n)
      set_lane(w, i.o[n], l, std::is_signed_v<T> ? static_cast<uint64_t>(static_cast<int64_t>(values[n])) : static_cast<uint64_t>(values[n]));
  });
  if (kSpace != kGlobal || !weak.on || !(i.order & kCoherent) || !machine.begins_rest(*w.block, false)) return Step::kNext;
  w.next();
  return Step::kYield;
}
template <class T, int kSpace>
Step store(Warp& w, const Instruction& i, uint32_t mask) {
  if (kSpace == kGlobal && weak.on && i.order & kReleases && !release_in_parts(w, mask)) return Step::kYield;
  const size_t count = i.o.size();
  const uint32_t bytes = static_cast<uint32_t>(sizeof(T) * count);
  each(mask, [&](int l) {
    const uint64_t at = address_of(w, i.address, l);
    T values[4];
    for (size_t n = 0; n < count; ++n) values[n] = static_cast<T>(lane_of(w, i.o[n], l));
    uint8_t* const to = kSpace == kShared ? shared_at(w, at, bytes, i) : global_at(at, bytes, true);
    if (kSpace == kShared && watch.on)
      watch.accesses(w, l, i, at, bytes, kWrites | (i.order & kCoherent ? kAtomic : 0) | (std::memcmp(to, values, bytes) ? 0 : kKeeps));
    if (kSpace == kGlobal && watch.on) watch.written(at, bytes);
    if (kSpace == kGlobal && weak.on) return write_weakly(w, i, l, at, bytes, sizeof(T), values);
    move<T>(to, values, count);
  });
  return Step::kNext;
}

template <int kSpace>
Handler load_of(const std::string& type) {
  if (type == "u8" || type == "b8") return load<uint8_t, kSpace>;
  if (type == "s8") return load<int8_t, kSpace>;
  if (type == "s16") return load<int16_t, kSpace>;
  if (type == "s32") return load<int32_t, kSpace>;
  const int bytes = bytes_of(type);
  return bytes == 2 ? load<uint16_t, kSpace> : bytes == 4 ? load<uint32_t, kSpace> : load<uint64_t, kSpace>;
}
template <int kSpace>
Handler store_of(const std::string& type) {
  const int bytes = bytes_of(type);
  return bytes == 1 ? store<uint8_t, kSpace> : bytes == 2 ? store<uint16_t, kSpace> : bytes == 4 ? store<uint32_t, kSpace> : store<uint64_t, kSpace>;
}

enum Operation { kAdd, kMost, kLeast, kOr, kAnd, kExchange, kCompare, kMostSigned, kLeastSigned };
template <class T>
T changed(int how, T old, T a, T b) {
  switch (how) {
    case kAdd: return old + a;
    case kMost: return std::max(old, a);
    case kLeast: return std::min(old, a);
    case kOr: return old | a;
    case kAnd: return old & a;
    case kExchange: return a;
    case kCompare: return old == a ? b : old;
    case kMostSigned: return static_cast<T>(std::max(static_cast<std::make_signed_t<T>>(old), static_cast<std::make_signed_t<T>>(a)));
    default: return static_cast<T>(std::min(static_cast<std::make_signed_t<T>>(old), static_cast<std::make_signed_t<T>>(a)));  // kLeastSigned
  }
}
template <class T, bool kIsShared, bool kTells>
Step atomic(Warp& w, const Instruction& i, uint32_t mask) {
  if (!kIsShared && weak.on && i.order & kReleases && !release_in_parts(w, mask)) return Step::kYield;
  const size_t first = kTells ? 1 : 0;
  each(mask, [&](int l) {
    const uint64_t at = address_of(w, i.address, l);
    T* place = reinterpret_cast<T*>(kIsShared ? shared_at(w, at, sizeof(T), i) : global_at(at, sizeof(T), true));
    if (kIsShared && watch.on) watch.accesses(w, l, i, at, sizeof(T), kWrites | kAtomic);
    if (!kIsShared && watch.on) watch.reads(*w.block, &i, at, sizeof(T)), watch.written(at, sizeof(T));
    const bool is_weak = !kIsShared && weak.on;
    if (is_weak && i.order & kReleases) weak.release(*w.block->stores, w.thread(l));
    if (is_weak) weak.before_atomic(*w.block->stores, w.thread(l), at, sizeof(T));
    const T old = *place, a = static_cast<T>(lane_of(w, i.o[first], l));
    const T b = i.o.size() > first + 1 ? static_cast<T>(lane_of(w, i.o[first + 1], l)) : T{0};
    *place = changed<T>(i.kind, old, a, b);
    if (is_weak && i.order & kAcquires) weak.acquire(*w.block->stores, w.thread(l));
    if (kTells) set_lane(w, i.o[0], l, old);
  });
  return Step::kNext;
}
Handler atomic_of(const Words& words, Instruction& i) {
  const std::string& type = words.back();
  const bool tells = words[0] == "atom", shared = is_shared(words), is_signed = type[0] == 's';
  i.kind = -1;
  for (const std::string& word : words) {
    if (word == "add") i.kind = kAdd;
    if (word == "max") i.kind = is_signed ? kMostSigned : kMost;
    if (word == "min") i.kind = is_signed ? kLeastSigned : kLeast;
    if (word == "or") i.kind = kOr;
    if (word == "and") i.kind = kAnd;
    if (word == "exch") i.kind = kExchange;
    if (word == "cas") i.kind = kCompare;
  }
  if (i.kind < 0) return nullptr;
  if (bytes_of(type) == 8)
    return shared  ? (tells ? atomic<uint64_t, true, true> : atomic<uint64_t, true, false>)
           : tells ? atomic<uint64_t, false, true>
                   : atomic<uint64_t, false, false>;
  if (bytes_of(type) == 2) return shared ? (tells ? atomic<uint16_t, true, true> : nullptr) : tells ? atomic<uint16_t, false, true> : nullptr;
  return shared  ? (tells ? atomic<uint32_t, true, true> : atomic<uint32_t, true, false>)
         : tells ? atomic<uint32_t, false, true>
                 : atomic<uint32_t, false, false>;
}

// Matrices of 8 x 8 halves: lanes 8 m to 8 m + 7 give the rows of matrix m
template <bool kTransposed, bool kStores>
Step matrices(Warp& w, const Instruction& i, uint32_t mask) {
  if (!converge(w, mask, kAll)) return Step::kJumped;
  if (mask != kAll) fail("a matrix instruction of a part of the warp");
  const size_t count = i.o.size();
  for (size_t m = 0; m < count; ++m) {
    uint16_t values[8][8];
    uint8_t* rows[8];
    bool has_value[8] = {};
    for (int r = 0; r < 8; ++r) {
      const int lane = static_cast<int>(m) * 8 + r;
      const uint64_t at = address_of(w, i.address, lane);
      rows[r] = shared_at(w, at, 16, i);
      has_value[r] = !watch.on || watch.accesses(w, lane, i, at, 16, kStores ? kWrites : kReads);
    }
    uint32_t* lanes = w.lanes<uint32_t>(i.o[m]);
    if (kStores) {
      for (int l = 0; l < kLanes; ++l)
        for (int h = 0; h < 2; ++h)
          (kTransposed ? values[l % 4 * 2 + h][l / 4] : values[l / 4][l % 4 * 2 + h]) = static_cast<uint16_t>(lanes[l] >> (16 * h));
      for (int r = 0; r < 8; ++r) std::memcpy(rows[r], values[r], 16);
    } else {
      for (int r = 0; r < 8; ++r) has_value[r] ? std::memcpy(values[r], rows[r], 16) : std::memset(values[r], 0xff, 16);
      for (int l = 0; l < kLanes; ++l) {
        const auto half = [&](int h) -> uint32_t { return kTransposed ? values[l % 4 * 2 + h][l / 4] : values[l / 4][l % 4 * 2 + h]; };
        lanes[l] = half(0) | half(1) << 16;
      }
    }
  }
  return Step::kNext;
}

// ---- barriers that count arrivals and bytes: phase 1 bit, missing arrivals 20, arrivals of a phase 20, missing bytes 22 with a sign

struct Counter {
  uint64_t word;
  static constexpr int kMissing = 1, kCount = 21, kBytes = 41, kMostBytes = (1 << 20) - 1;
  uint32_t phase() const { return word & 1; }
  uint32_t missing() const { return word >> kMissing & 0xfffff; }
  uint32_t count() const { return word >> kCount & 0xfffff; }
  int32_t bytes() const { return static_cast<int32_t>(static_cast<int64_t>(word) >> kBytes); }
  void set(uint32_t phase, uint32_t missing, uint32_t count, int32_t bytes) {
    word = phase | uint64_t{missing} << kMissing | uint64_t{count} << kCount | static_cast<uint64_t>(static_cast<int64_t>(bytes)) << kBytes;
  }
  void expect(int32_t more) {
    if (std::abs(bytes() + more) > kMostBytes) fail("more bytes under way than an mbarrier counts");
    set(phase(), missing(), count(), bytes() + more);
  }
  void advance() {
    if (missing() == 0 && bytes() == 0) set(phase() ^ 1, count(), count(), 0);
  }
};

Counter& counter_at(Block& block, uint64_t at) {
  if (at + 8 > block.shared_bytes || at % 8) fail("an mbarrier at " + std::to_string(at));
  return *reinterpret_cast<Counter*>(block.shared + at);
}
void expect_bytes(Block& block, uint64_t at, int32_t bytes) {
  Counter& c = counter_at(block, at);
  c.expect(bytes);
  c.advance();
  if (watch.on) watch.has_phase(block, at, c.phase());
}
void arrive(Block& block, uint64_t at, uint32_t count) {
  Counter& c = counter_at(block, at);
  if (c.missing() < count) fail("more arrivals than an mbarrier expects");
  c.set(c.phase(), c.missing() - count, c.count(), c.bytes());
  c.advance();
  if (watch.on) watch.has_phase(block, at, c.phase());
}

Step init_counter(Warp& w, const Instruction& i, uint32_t mask) {
  each(mask, [&](int l) {
    const uint32_t count = static_cast<uint32_t>(lane_of(w, i.o[0], l));
    if (count == 0 || count > 0xfffff) fail("an mbarrier of " + std::to_string(count));
    const uint64_t at = address_of(w, i.address, l);
    counter_at(*w.block, at).set(0, count, count, 0);
    if (watch.on) watch.accesses(w, l, i, at, 8, kWrites), watch.init_phases(w, l, at);
  });
  return Step::kNext;
}
// o: state, which nobody can ask for [, count or bytes]
template <bool kExpects>
Step arrive_at(Warp& w, const Instruction& i, uint32_t mask) {
  each(mask, [&](int l) {
    const uint64_t at = address_of(w, i.address, l);
    const bool counts = i.o.size() > 1;
    const uint32_t said = counts ? static_cast<uint32_t>(lane_of(w, i.o[1], l)) : 1;
    set_lane(w, i.o[0], l, counter_at(*w.block, at).word);
    if (weak.on) weak.arrive(*w.block->stores, w.thread(l), w.block->stores->counters[at]);
    if (watch.on) {
      Knowledge known;
      watch.uses_phases(w, l, i, at);
      watch.tells(w, l, known);
      watch.arrives(*w.block, at, known);
    }
    if (kExpects) {
      if (said > Counter::kMostBytes) fail("an mbarrier expects " + std::to_string(said) + " bytes");
      counter_at(*w.block, at).expect(static_cast<int32_t>(said));
    }
    arrive(*w.block, at, kExpects ? 1 : said);
  });
  return Step::kNext;
}
// o: p, parity
template <bool kSleeps>
Step look_at(Warp& w, const Instruction& i, uint32_t mask) {
  uint32_t over = 0, phase = 0;
  uint64_t known = ~uint64_t{0};  // all lanes look at one, mostly
  bool is_one = true;
  each(mask, [&](int l) {
    const uint64_t at = address_of(w, i.address, l);
    if (at != known) {
      is_one = known == ~uint64_t{0};
      phase = counter_at(*w.block, known = at).phase();
    }
    const bool is_over = phase != (lane_of(w, i.o[1], l) & 1);
    over |= uint32_t{is_over} << l;
    if (watch.on) watch.uses_phases(w, l, i, at);
    if (watch.on && is_over) watch.sees_end(w, l, at);
    if (weak.on && is_over) weak.leave(*w.block->stores, w.thread(l), w.block->stores->counters[at]);
  });
  uint32_t& p = *w.lanes<uint32_t>(i.o[0]);
  p = (p & ~mask) | over;
  w.next();
  if (over == mask) return Step::kJumped;
  if (kSleeps && is_one && over == 0) w.sleep = {w.now, &counter_at(*w.block, known).word, phase};
  return Step::kYield;
}

Handler counters(const Words& words, Instruction& i) {
  const std::string& second = words[1];
  if (second == "init") return init_counter;
  if (second == "try_wait") return look_at<true>;
  if (second == "test_wait") return look_at<false>;
  if (second != "arrive") return nullptr;
  return has(words, "expect_tx") ? arrive_at<true> : arrive_at<false>;
}

// ---- asynchronous copies: [to], [from], bytes [, bytes that are read; the rest is zeros]

enum : int { kOfAny, kOf16 };
Step copy_async(Warp& w, const Instruction& i, uint32_t mask) {
  each(mask, [&](int l) {
    Copy copy;
    copy.kind = Copy::kBytes;
    const uint64_t bytes = lane_of(w, i.o[0], l), read = i.o.size() > 1 ? lane_of(w, i.o[1], l) : bytes;
    if (bytes != 16 && (i.kind == kOf16 || (bytes != 4 && bytes != 8))) fail("a copy of " + std::to_string(bytes) + " bytes");
    if (read > bytes) fail("a copy reads more than it writes");
    copy.bytes = static_cast<uint8_t>(bytes);
    copy.read = static_cast<uint8_t>(read);
    copy.lanes = 1u << l;
    copy.to = static_cast<uint32_t>(address_of(w, i.address, l));
    copy.from = address_of(w, i.from, l);
    if (weak.on) copy.floor = weak.floor(*w.block->stores, w.thread(l), i.order);
    copy.instruction = &i;
    if (watch.on && copy.read) watch.reads(*w.block, &i, copy.from, copy.read);
    if (watch.on) watch.copies(w, l, i, copy.to, copy.bytes);
    w.copies.add(std::move(copy));
  });
  return Step::kNext;
}
Step close_group(Warp& w, const Instruction&, uint32_t mask) {
  Copy copy{};
  copy.kind = Copy::kClose, copy.lanes = mask;
  if (watch.on) each(mask, [&](int l) { watch.closes(w, l); });
  w.copies.add(std::move(copy));
  return Step::kNext;
}
Step wait_group(Warp& w, const Instruction& i, uint32_t mask) {
  if (watch.on) each(mask, [&](int l) { watch.waits_for_copies(w, l, lane_of(w, i.o[0], 0)); });
  copy_until(w, lane_of(w, i.o[0], 0));
  return Step::kNext;
}
Step wait_all(Warp& w, const Instruction&, uint32_t mask) {
  if (watch.on) each(mask, [&](int l) { watch.waits_for_copies(w, l, -1); });
  while (!w.copies.empty()) copy_one(w);
  return Step::kNext;
}
Step arrive_after_copies(Warp& w, const Instruction& i, uint32_t mask) {
  each(mask, [&](int l) {
    Copy copy{};
    copy.kind = Copy::kArrive, copy.lanes = 1u << l, copy.instruction = &i;
    copy.to = static_cast<uint32_t>(address_of(w, i.address, l));
    if (watch.on) watch.uses_phases(w, l, i, copy.to), copy.end = watch.after_copies(w, l);
    w.copies.add(std::move(copy));
  });
  return Step::kNext;
}
// [to], [from], bytes, [mbarrier]
Step copy_in_bulk(Warp& w, const Instruction& i, uint32_t mask) {
  each(mask, [&](int l) {
    const uint32_t bytes = static_cast<uint32_t>(lane_of(w, i.o[0], l));
    const uint64_t from = address_of(w, i.from, l), to = address_of(w, i.address, l);
    if (bytes % 16 || from % 16 || to % 16) fail("a bulk copy that is not aligned to 16 bytes");
    if (to + bytes > w.block->shared_bytes) fail("a bulk copy beyond shared memory");
    const uint64_t floor = weak.on ? weak.floor(*w.block->stores, w.thread(l), kFromL2) : 0;
    const uint32_t barrier = static_cast<uint32_t>(address_of(w, i.third, l));
    Knowledge end;
    if (watch.on) {
      watch.reads(*w.block, &i, from, bytes);
      watch.uses_phases(w, l, i, barrier);
      end = watch.copies_bulk(w, l, i, to, bytes, barrier);
    }
    w.block->bulk.push_back({static_cast<uint32_t>(to), bytes, barrier, w.thread(l), from, floor, end});
  });
  return Step::kNext;
}

Handler copies(const Words& words, Instruction& i) {
  const std::string& third = words[2];
  if (third == "commit_group") return close_group;
  if (third == "wait_group") return wait_group;
  if (third == "wait_all") return wait_all;
  if (third == "mbarrier") return arrive_after_copies;
  if (third == "bulk") return copy_in_bulk;
  return i.kind = third == "cg" ? kOf16 : kOfAny, copy_async;
}

}  // namespace

void copy_one(Warp& w) {
  const Copy copy = w.copies.take();
  if (copy.kind == Copy::kArrive && watch.on) watch.arrives(*w.block, copy.to, copy.end);
  if (copy.kind == Copy::kArrive) return arrive(*w.block, copy.to, 1);
  if (copy.kind == Copy::kClose) return;
  uint8_t* to = shared_at(w, copy.to, copy.bytes, *copy.instruction);
  if (copy.read < copy.bytes) std::memset(to, 0, copy.bytes);
  if (copy.read) {
    if (!is_multiple(copy.from, copy.bytes)) fail("a copy from an address that is no multiple of " + std::to_string(copy.bytes));
    machine.check(copy.from, copy.read, false);
    if (weak.on) return weak.read(*w.block->stores, w.thread(__builtin_ctz(copy.lanes)), copy.from, copy.read, copy.floor, to);
    const void* from = reinterpret_cast<const void*>(copy.from);
    copy.read == 16 ? std::memcpy(to, from, 16) : std::memcpy(to, from, copy.read);
  }
}

void copy_until(Warp& w, size_t groups_left) {
  const auto closed = [&] {
    return static_cast<size_t>(std::count_if(w.copies.begin(), w.copies.end(), [](const Copy& c) { return c.kind == Copy::kClose; }));
  };
  for (size_t left = closed(); left > groups_left;) {
    left -= w.copies.begin()->kind == Copy::kClose;
    copy_one(w);
  }
}

void copy_bulk(Block& block, size_t which) {
  const BulkCopy copy = block.bulk[which];
  block.bulk.erase(block.bulk.begin() + which);
  machine.check(copy.from, copy.bytes, false);
  if (weak.on) {
    weak.read(*block.stores, copy.thread, copy.from, copy.bytes, copy.floor, block.shared + copy.to);
  } else {
    std::memcpy(block.shared + copy.to, reinterpret_cast<const uint8_t*>(copy.from), copy.bytes);
  }
  if (watch.on) watch.arrives(block, copy.barrier, copy.end);
  expect_bytes(block, copy.barrier, -static_cast<int32_t>(copy.bytes));
}

Handler memory(const Words& words, Instruction& i) {
  const std::string &op = words[0], &type = words.back();
  i.order = order_of(words);
  if (op == "ld") return has(words, "param") ? load_of<kParameter>(type) : is_shared(words) ? load_of<kShared>(type) : load_of<kGlobal>(type);
  if (op == "st") return is_shared(words) ? store_of<kShared>(type) : store_of<kGlobal>(type);
  if (op == "atom" || op == "red") return atomic_of(words, i);
  if (op == "ldmatrix") return has(words, "trans") ? matrices<true, false> : matrices<false, false>;
  if (op == "stmatrix") return has(words, "trans") ? matrices<true, true> : matrices<false, true>;
  if (op == "mbarrier") return counters(words, i);
  if (op == "cp") return copies(words, i);
  return nullptr;
}

}  // namespace emulator

// Where a kernel's registers lie in a warp's frame. PTX has a new one for every value, thousands of them; those that are never needed at the
// same time share a place here, so that a warp's frame stays in the caches.
//
// What is read is what it was without this: a register that some path may read before it is written (it is live where the kernel begins)
// has a place of its own, all bits set. A register is needed from the first to the last instruction of the text at which it is live or
// stands; of one instruction all have different places.
#include <algorithm>

#include "machine.h"

namespace emulator {

namespace {

struct Register {
  Operand::Kind kind = Operand::kNone;
  size_t first = SIZE_MAX, last = 0;
  bool is_alone = false;
  uint32_t at = 0;

  void is_needed(size_t place) { first = std::min(first, place), last = std::max(last, place); }
};

using Bits = std::vector<uint64_t>;
bool has(const Bits& bits, size_t n) { return bits[n / 64] >> n % 64 & 1; }
void put(Bits& bits, size_t n) { bits[n / 64] |= uint64_t{1} << n % 64; }

struct Run {  // of instructions without a jump between them: [begin, end)
  size_t begin, end;
  std::vector<size_t> next;
  Bits read, written, in, out;  // read: before it is written here
};

template <class F>
void each_operand(Instruction& i, F f) {  // f(operand, is it certain to be written)
  f(i.guard, false);
  for (Address* one : {&i.address, &i.from, &i.third}) f(one->base, false);
  for (size_t n = 0; n < i.o.size(); ++n) f(i.o[n], n < static_cast<size_t>(i.written) && i.guard.kind == Operand::kNone);
}

class Frame {
 public:
  explicit Frame(Kernel& kernel) : kernel_(kernel) {
    for (Instruction& i : kernel_.code) each_operand(i, [&](Operand& o, bool) { number(o); });
    for (const auto& special : kernel_.specials)
      if (const auto found = numbers_.find(special.at); found != numbers_.end()) registers_[found->second].is_alone = true;
  }

  void pack() {
    split();
    follow();
    extend();
    place();
  }

 private:
  size_t number(const Operand& o) {  // SIZE_MAX: no register
    if (o.kind == Operand::kNone || o.space != 0) return SIZE_MAX;
    const auto [found, is_new] = numbers_.try_emplace(o.at, registers_.size());
    if (is_new) registers_.emplace_back().kind = o.kind;
    return found->second;
  }

  void split() {
    const size_t count = kernel_.code.size();
    std::vector<bool> begins(count + 1);
    begins[0] = true;
    for (size_t n = 0; n < count; ++n) {
      const Instruction& i = kernel_.code[n];
      if (i.target >= 0) begins[i.target] = begins[n + 1] = true;
      if (i.ends) begins[n + 1] = true;
    }
    std::vector<size_t> run_at(count + 1, SIZE_MAX);
    for (size_t n = 0; n < count; ++n) {
      if (begins[n]) runs_.push_back({n, n, {}, {}, {}, {}, {}});
      run_at[n] = runs_.size() - 1;
      runs_.back().end = n + 1;
    }
    for (Run& run : runs_) {
      const Instruction& last = kernel_.code[run.end - 1];
      const bool goes_on = last.guard.kind != Operand::kNone || !(last.target >= 0 || last.ends);
      if (goes_on && run.end < count) run.next.push_back(run_at[run.end]);
      if (last.target >= 0) run.next.push_back(run_at[last.target]);
    }
  }

  void follow() {
    const size_t words = registers_.size() / 64 + 1;
    for (Run& run : runs_) {
      run.read = run.written = run.in = run.out = Bits(words);
      for (size_t n = run.begin; n < run.end; ++n) {
        each_operand(kernel_.code[n], [&](Operand& o, bool is_written) {
          const size_t r = number(o);
          if (r != SIZE_MAX && !is_written && !has(run.written, r)) put(run.read, r);
        });
        each_operand(kernel_.code[n], [&](Operand& o, bool is_written) {
          const size_t r = number(o);
          if (r != SIZE_MAX && is_written) put(run.written, r);
        });
      }
    }
    for (bool changes = true; changes;) {
      changes = false;
      for (auto run = runs_.rbegin(); run != runs_.rend(); ++run) {
        for (size_t word = 0; word < words; ++word) {
          for (const size_t next : run->next) run->out[word] |= runs_[next].in[word];
          const uint64_t in = run->read[word] | (run->out[word] & ~run->written[word]);
          changes = changes || in != run->in[word];
          run->in[word] = in;
        }
      }
    }
  }

  void extend() {
    for (size_t n = 0; n < kernel_.code.size(); ++n)
      each_operand(kernel_.code[n], [&](Operand& o, bool) {
        if (const size_t r = number(o); r != SIZE_MAX) registers_[r].is_needed(n);
      });
    for (const Run& run : runs_)
      for (size_t r = 0; r < registers_.size(); ++r) {
        if (has(run.in, r)) registers_[r].is_needed(run.begin);
        if (has(run.out, r)) registers_[r].is_needed(run.end - 1);
      }
    for (size_t r = 0; r < registers_.size(); ++r) registers_[r].is_alone = registers_[r].is_alone || has(runs_[0].in, r);
  }

  void place() {
    std::vector<Register*> order;
    for (Register& one : registers_) order.push_back(&one);
    std::stable_sort(order.begin(), order.end(), [](const Register* a, const Register* b) { return a->first < b->first; });
    kernel_.frame_bytes = 0;
    std::map<Operand::Kind, std::vector<std::pair<size_t, uint32_t>>> taken;  // by kind: until when, where
    for (Register* one : order) {
      auto& places = taken[one->kind];
      const auto is_free = [&](const auto& place) { return place.first < one->first; };
      const auto found = one->is_alone ? places.end() : std::find_if(places.begin(), places.end(), is_free);
      if (found == places.end()) {
        one->at = kernel_.place(one->kind);
        places.emplace_back(one->is_alone ? SIZE_MAX : one->last, one->at);
      } else {
        one->at = found->second;
        found->first = one->last;
      }
    }
    std::map<uint32_t, uint32_t> moved;
    for (const auto& [at, number] : numbers_) moved[at] = registers_[number].at;
    for (Instruction& i : kernel_.code)
      each_operand(i, [&](Operand& o, bool) {
        if (o.kind != Operand::kNone && o.space == 0) o.at = moved.at(o.at);
      });
    std::vector<Kernel::Special> asked;  // some were named by what is not there any more
    for (const auto& [what, at] : kernel_.specials)
      if (const auto found = moved.find(at); found != moved.end()) asked.push_back({what, found->second});
    kernel_.specials = std::move(asked);
  }

  Kernel& kernel_;
  std::unordered_map<uint32_t, size_t> numbers_;  // by their places before
  std::vector<Register> registers_;
  std::vector<Run> runs_;
};

}  // namespace

uint32_t Kernel::place(Operand::Kind kind) {
  const uint32_t bytes = kind == Operand::k64 ? 256 : kind == Operand::k32 ? 128 : 4;
  frame_bytes = (frame_bytes + bytes - 1) / bytes * bytes;
  const uint32_t at = frame_bytes;
  frame_bytes += bytes;
  return at;
}

void pack_registers(Kernel& kernel) { Frame(kernel).pack(); }

}  // namespace emulator

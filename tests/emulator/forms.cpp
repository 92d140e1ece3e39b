// The forms of instructions that are known, and nothing else: one that has another modifier, type, rounding, scope or operand than these ends
// the test that runs it, whatever a handler would have made of it. test_forms.py holds each to its definition.
#include "machine.h"

namespace emulator {

namespace {

// words: of the name, a `?` in front of one that may be missing, `|` between those of which one is there; V is nothing, v2 or v4.
// operands, in the order of the text, one way or another: r of 32 bits, d of 64, a of either, p a predicate, m of memory; x as the type says,
// y twice as wide; V one, two or four of `a`, as in the name; {} and | as in the text, _ what nobody wants.
struct Pattern {
  const char *words, *operands;
};

#define INTEGERS "u16|s16|u32|s32|u64|s64"
#define ANY_BITS "b16|b32|b64"
#define MEMORY "b8|u8|s8|b16|u16|s16|b32|u32|s32|f32|b64|u64|s64"
#define ROUNDINGS "rn|rm|rp|rz"
#define HALVES "bf16|bf16x2|f16|f16x2"

constexpr Pattern kPatterns[] = {
    // integers
    {"add|sub|div|rem|min|max " INTEGERS, "xxx"},
    {"and|or|xor " ANY_BITS, "xxx"},
    {"not " ANY_BITS, "xx"},
    {"neg|abs s16|s32|s64", "xx"},
    {"shl " ANY_BITS, "xxr"},
    {"shr " ANY_BITS "|" INTEGERS, "xxr"},
    {"mul lo|hi " INTEGERS, "xxx"},
    {"mul wide u16|s16|u32|s32", "yxx"},
    {"mad lo|hi " INTEGERS, "xxxx"},
    {"mad wide u16|s16|u32|s32", "yxxy"},
    {"max u16x2", "xxx"},
    // bits
    {"prmt b32", "xxxx"},
    {"lop3 b32", "xxxxx"},
    {"brev|popc|clz b32", "xx"},
    {"popc b64", "rx"},
    {"bfind ?shiftamt u32", "xx"},
    {"shf l|r wrap|clamp b32", "xxxx"},
    {"bfe u32|s32", "xxxx"},
    // floats
    {"add|sub|mul ?" ROUNDINGS " ?ftz ?sat f32", "xxx"},
    {"fma " ROUNDINGS " ?ftz ?sat f32", "xxxx"},
    {"div " ROUNDINGS " ?ftz f32", "xxx"},
    {"div approx|full ?ftz f32", "xxx"},
    {"rcp|sqrt approx|" ROUNDINGS " ?ftz f32", "xx"},
    {"rsqrt|ex2 approx ?ftz f32", "xx"},
    {"min|max ?ftz ?NaN f32", "xxx xxxx"},
    {"neg|abs ?ftz f32", "xx"},
    {"add|mul ?rn f32x2", "xxx"},
    {"fma rn f32x2", "xxxx"},
    {"add|sub|mul ?rn " HALVES, "xxx"},
    {"min|max ?NaN " HALVES, "xxx"},
    {"neg|abs " HALVES, "xx"},
    // predicates
    {"setp eq|ne|lt|le|gt|ge " INTEGERS, "pxx"},
    {"setp eq|ne " ANY_BITS, "pxx"},
    {"setp eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan f32", "pxx"},
    {"selp " ANY_BITS "|" INTEGERS "|f32", "xxxp"},
    {"and|or|xor pred", "ppp"},
    {"not|mov pred", "pp"},
    // from one register to another
    {"mov " INTEGERS "|b16|f32", "xx"},
    {"mov b32", "xx {rr}r r{rr}"},
    {"mov b64", "xx {rr}d d{rr} {rrrr}d d{rrrr}"},
    {"clock u32|u64", "x"},
    {"cvta to global u64", "xx"},
    {"cvt u8|s8|" INTEGERS " u8|s8|" INTEGERS, "aa"},
    {"cvt rn f32 u8|" INTEGERS, "ra"},
    {"cvt rni|rzi|rmi|rpi u16|s16|u32|s32 f32", "ar"},
    {"cvt ?ftz ?sat f32 f32", "rr"},
    {"cvt rn f16|bf16 f32", "rr"},
    {"cvt f32 f16|bf16", "rr"},
    {"cvt rn f16x2|bf16x2 f32", "rrr"},
    {"cvt rn satfinite e4m3x2 f32", "rrr"},
    {"cvt rn f16x2 e4m3x2|e2m1x2", "rr"},
    {"cvt rn bf16x2 e2m1x2", "rr"},
    // memory
    {"ld ?global|param|shared V " MEMORY, "Vm"},
    {"ld global cg|cs|nc V " MEMORY, "Vm"},
    {"ld global ?nc L1::no_allocate ?L2::256B V " MEMORY, "Vm"},
    {"ld relaxed|acquire gpu|sys global V " MEMORY, "Vm"},
    {"st ?global|shared V " MEMORY, "mV"},
    {"st global cg|cs V " MEMORY, "mV"},
    {"st relaxed|release gpu|sys global V " MEMORY, "mV"},
    {"atom ?acq_rel|acquire|release|relaxed ?gpu|sys global add|min|max u32|s32|u64|s64", "xmx"},
    {"atom ?acq_rel|acquire|release|relaxed ?gpu|sys global and|or|exch b32|b64", "xmx"},
    {"atom ?acq_rel|acquire|release|relaxed ?gpu|sys global cas b16|b32|b64", "xmxx"},
    {"red ?release|relaxed ?gpu|sys global add|min|max u32|s32|u64|s64", "mx"},
    {"red ?release|relaxed ?gpu|sys global and|or b32|b64", "mx"},
    {"atom shared add|min|max u32|s32|u64|s64", "xmx"},
    {"atom shared and|or|exch b32|b64", "xmx"},
    {"atom shared cas b16|b32|b64", "xmxx"},
    {"red shared add|min|max u32|s32|u64|s64", "mx"},
    {"red shared and|or b32|b64", "mx"},
    {"ldmatrix sync aligned m8n8 x1 ?trans shared b16", "{r}m"},
    {"ldmatrix sync aligned m8n8 x2 ?trans shared b16", "{rr}m"},
    {"ldmatrix sync aligned m8n8 x4 ?trans shared b16", "{rrrr}m"},
    {"stmatrix sync aligned m8n8 x1 ?trans shared b16", "m{r}"},
    {"stmatrix sync aligned m8n8 x2 ?trans shared b16", "m{rr}"},
    {"stmatrix sync aligned m8n8 x4 ?trans shared b16", "m{rrrr}"},
    {"prefetch global L2", "m"},
    // copies
    {"cp async ca shared global", "mmr mmrr"},
    {"cp async cg shared global ?L2::256B", "mmr mmrr"},
    {"cp async commit_group|wait_all", ""},
    {"cp async wait_group", "r"},
    {"cp async mbarrier arrive noinc shared::cta b64", "m"},
    {"cp async bulk shared::cluster global mbarrier::complete_tx::bytes", "mmrm"},
    // products
    {"mma sync aligned m16n8k16 row col f32 bf16 bf16 f32", "{rrrr}{rrrr}{rr}{rrrr}"},
    {"mma sync aligned m16n8k16 row col f32 f16 f16 f32", "{rrrr}{rrrr}{rr}{rrrr}"},
    {"mma sync aligned m16n8k32 row col f32 e4m3 e4m3 f32", "{rrrr}{rrrr}{rr}{rrrr}"},
    {"mma sync aligned m16n8k32 row col kind::mxf8f6f4 block_scale scale_vec::1X f32 e2m1|e4m3 e4m3 f32 ue8m0",
     "{rrrr}{rrrr}{rr}{rrrr}r{rr}r{rr} {rrrr}{rrrr}{rr}{rrrr}{r}{rr}{r}{rr}"},
    // what lanes tell each other
    {"shfl sync up|down|bfly|idx b32", "rrrrr r|prrrr"},
    {"vote sync any|all pred", "ppr"},
    {"vote sync ballot b32", "rpr"},
    {"match any sync b32", "rrr"},
    {"redux sync add|min|max u32|s32", "rrr"},
    {"redux sync and|or b32", "rrr"},
    {"elect sync", "r|pr _|pr"},
    {"activemask b32", "r"},
    // barriers and fences
    {"bar sync", "r rr"},
    {"bar arrive", "rr"},
    {"bar red or|and pred", "prp prrp"},
    {"bar warp sync", "r"},
    {"mbarrier init shared::cta b64", "mr"},
    {"mbarrier arrive shared::cta b64", "_m dm _mr dmr"},
    {"mbarrier arrive expect_tx shared::cta b64", "_mr dmr"},
    {"mbarrier try_wait|test_wait parity shared::cta b64", "pmr"},
    {"membar cta|gl|sys", ""},
    {"fence acq_rel|sc cta|gpu|sys", ""},
    {"fence mbarrier_init release cluster", ""},
    {"fence proxy async shared::cta", ""},
    {"griddepcontrol wait|launch_dependents", ""},
    // jumps, and what changes no number
    {"bra ?uni", ""},
    {"ret|exit ?uni", ""},
    {"trap", ""},
    {"nanosleep u32", "r"},
    {"setmaxnreg inc|dec sync aligned u32", "r"},
};

Words parts(const std::string& text, char at) {
  Words out;
  for (size_t begin = 0;;) {
    const size_t end = text.find(at, begin);
    out.push_back(text.substr(begin, end - begin));
    if (end == std::string::npos) return out;
    begin = end + 1;
  }
}

void add(std::map<std::string, Words>& all, const Words& words, size_t next, const std::string& name, const std::string& operands) {
  if (next == words.size()) {
    if (name.find(".v4.") != std::string::npos && name.ends_with("64")) return;  // of 256 bits
    for (const std::string& one : parts(operands, ' ')) all[name].push_back(one);
    return;
  }
  const std::string dot = name.empty() ? "" : ".";
  if (words[next] == "V") {
    const size_t at = operands.find('V');
    const auto with = [&](const char* so_many) { return std::string(operands).replace(at, 1, so_many); };
    add(all, words, next + 1, name, with("a") + ' ' + with("{a}"));
    add(all, words, next + 1, name + ".v2", with("{aa}"));
    add(all, words, next + 1, name + ".v4", with("{aaaa}"));
    return;
  }
  const bool may_be_missing = words[next][0] == '?';
  if (may_be_missing) add(all, words, next + 1, name, operands);
  for (const std::string& one : parts(words[next].substr(may_be_missing), '|')) add(all, words, next + 1, name + dot + one, operands);
}

bool is(char operand, char asked, bool is_wide) {
  if (asked == 'a') return operand == 'r' || operand == 'd';
  if (asked == 'x') return operand == (is_wide ? 'd' : 'r');
  return operand == asked;
}

}  // namespace

const std::map<std::string, Words>& forms() {
  static const auto known = [] {
    std::map<std::string, Words> all;
    for (const Pattern& one : kPatterns) add(all, parts(one.words, ' '), 0, "", one.operands);
    return all;
  }();
  return known;
}

bool is_form(const std::string& name, const std::string& operands) {
  const auto found = forms().find(name);
  if (found == forms().end()) return false;
  const std::string type = name.substr(name.rfind('.') + 1);
  const bool is_wide = type == "u64" || type == "s64" || type == "b64" || type == "f32x2";
  const char twice = type == "u32" || type == "s32" ? 'd' : 'r';
  for (std::string asked : found->second) {
    bool fits = asked.size() == operands.size();
    for (size_t n = 0; fits && n < asked.size(); ++n) fits = is(operands[n], asked[n] == 'y' ? twice : asked[n], is_wide);
    if (fits) return true;
  }
  return false;
}

}  // namespace emulator

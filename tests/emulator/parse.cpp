// Text of PTX to kernels.
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <set>

#include "machine.h"

namespace emulator {

namespace {

const std::vector<std::string> kSpecials = {"%tid.x",          "%tid.y",
                                            "%tid.z",          "%ntid.x",
                                            "%ntid.y",         "%ntid.z",
                                            "%ctaid.x",        "%ctaid.y",
                                            "%ctaid.z",        "%nctaid.x",
                                            "%nctaid.y",       "%nctaid.z",
                                            "%laneid",         "%warpid",
                                            "%smid",           "%nsmid",
                                            "%lanemask_lt",    "%lanemask_le",
                                            "%lanemask_ge",    "%lanemask_gt",
                                            "%lanemask_eq",    "%dynamic_smem_size",
                                            "%total_smem_size"};
constexpr int kParameterAddress = 1000;  // a special register: the address of parameter bytes from here on

int special(const std::string& name) {
  for (size_t i = 0; i < kSpecials.size(); ++i)
    if (kSpecials[i] == name) return static_cast<int>(i);
  return -1;
}

std::string without_comments(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text.compare(i, 2, "//") == 0) {
      while (i < text.size() && text[i] != '\n') ++i;
      out += '\n';
    } else if (text.compare(i, 2, "/*") == 0) {
      i = text.find("*/", i) + 1;
    } else {
      out += text[i];
    }
  }
  return out;
}

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\r\n"), end = text.find_last_not_of(" \t\r\n");
  return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}

Words split(const std::string& text, char at) {
  Words out;
  std::string word;
  int depth = 0;
  for (const char c : text) {
    depth += (c == '{' || c == '[' || c == '(') - (c == '}' || c == ']' || c == ')');
    if (c == at && depth == 0) {
      out.push_back(trimmed(word));
      word.clear();
    } else {
      word += c;
    }
  }
  if (!trimmed(word).empty()) out.push_back(trimmed(word));
  return out;
}

Words dotted(const std::string& opcode) {
  Words out = {""};
  for (size_t i = 0; i < opcode.size(); ++i) {
    if (opcode[i] == '.') {
      out.emplace_back();
    } else {
      out.back() += opcode[i];
    }
  }
  return out;
}

bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.'; }

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(without_comments(text)) {}

  std::vector<std::unique_ptr<Kernel>> all() {
    std::vector<std::unique_ptr<Kernel>> kernels;
    while (skip(), at_ < text_.size()) {
      if (is_at(".visible") || is_at(".entry") || is_at(".weak")) {
        kernels.push_back(entry());
      } else if (is_at(".extern")) {
        const std::string line = until(";");
        module_extern_.insert(name_in(line));
      } else if (is_at(".shared") || is_at(".global") || is_at(".const")) {
        fail("a module's own variable is not known: " + until(";"));
      } else if (is_at(".section")) {
        at_ = text_.size();  // what debuggers read; it is at the end
      } else {
        until("\n");  // .version, .target, .address_size, .file
      }
    }
    return kernels;
  }

 private:
  struct Scope {
    std::map<std::string, Operand> registers;
    std::string suffix;
  };

  void skip() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) line_ += text_[at_++] == '\n';
  }
  bool is_at(const char* word) const { return text_.compare(at_, std::strlen(word), word) == 0; }
  std::string until(const char* end) {
    const size_t found = std::min(text_.find(end, at_), text_.size());
    const std::string out = text_.substr(at_, found - at_);
    for (const char c : out) line_ += c == '\n';
    at_ = std::min(found + std::strlen(end), text_.size());
    return out;
  }
  static std::string name_in(const std::string& declaration) {  // `.shared .align 16 .b8 name[48]`
    const size_t bracket = declaration.find('[');
    const std::string head = trimmed(declaration.substr(0, bracket));
    return head.substr(head.find_last_of(" \t") + 1);
  }
  static uint32_t number_behind(const std::string& text, const std::string& word, uint32_t otherwise) {
    const size_t found = text.find(word + " ");
    return found == std::string::npos ? otherwise : static_cast<uint32_t>(std::stoul(text.substr(found + word.size())));
  }

  std::unique_ptr<Kernel> entry() {
    auto kernel = std::make_unique<Kernel>();
    kernel_ = kernel.get();
    scopes_.assign(1, {});
    labels_.clear(), jumps_.clear(), constants_.clear(), shared_.clear(), parameters_.clear();
    until(".entry");
    kernel->name = trimmed(until("("));
    for (const std::string& parameter : split(until(")"), ',')) add_parameter(parameter);
    const std::string limits = until("{");
    add_limits(*kernel, limits);
    while (skip(), !scopes_.empty()) {
      if (at_ >= text_.size()) fail("the text ends within " + kernel->name);
      if (text_[at_] == '{') {
        ++at_;
        scopes_.push_back({{}, "#" + std::to_string(++scope_number_)});
      } else if (text_[at_] == '}') {
        ++at_;
        scopes_.pop_back();
      } else {
        statement();
      }
    }
    for (const auto& [instruction, label] : jumps_) {
      const auto found = labels_.find(label);
      if (found == labels_.end()) fail("no label " + label + " in " + kernel->name);
      kernel->code[instruction].target = found->second;
    }
    Instruction end;
    Words ret = {"ret"};
    end.run = control(ret, end), end.text = "ret", end.ends = true;
    kernel->code.push_back(end);
    pack_registers(*kernel);
    return kernel;
  }

  // `.maxntid 32, 4`, `.reqntid 128`, `.minnctapersm 2`
  static void add_limits(Kernel& kernel, const std::string& text) {
    for (const std::string& one : split(trimmed(text), '.')) {
      if (one.empty()) continue;
      const size_t space = one.find_first_of(" \t");
      const std::string name = one.substr(0, space);
      if (name == "minnctapersm" || name == "maxnreg") continue;
      if (name != "maxntid" && name != "reqntid") fail("a directive that is not known: ." + one + " of " + kernel.name);
      uint64_t threads = 1;
      for (const std::string& number : split(one.substr(space), ',')) threads *= std::stoul(number);
      kernel.max_threads = static_cast<uint32_t>(std::min<uint64_t>(kernel.max_threads, threads));
      if (name == "reqntid") kernel.required_threads = static_cast<uint32_t>(threads);
    }
  }

  void add_parameter(const std::string& text) {  // `.param .align 8 .b8 name[304]`, `.param .u64 .ptr .global .align 1 name`
    const size_t bracket = text.find('[');
    uint32_t bytes = 0;
    if (bracket != std::string::npos) {
      bytes = static_cast<uint32_t>(std::stoul(text.substr(bracket + 1)));
    } else {
      const Words words = split(text, ' ');
      for (const std::string& word : words)
        if (word.size() > 2 && word[0] == '.' && bytes == 0 && std::isdigit(static_cast<unsigned char>(word.back())))
          bytes = bytes_of(word.substr(1));
    }
    if (bytes == 0) fail("a parameter without a size: " + text);
    const uint32_t own = bracket == std::string::npos ? bytes : std::max(number_behind(text, ".align", 1), 1u);
    kernel_->parameter_bytes = (kernel_->parameter_bytes + own - 1) / own * own;
    parameters_[name_in(text)] = kernel_->parameter_bytes;
    kernel_->parameters.push_back({kernel_->parameter_bytes, bytes});
    kernel_->parameter_bytes += bytes;
  }

  void statement() {
    if (is_at(".loc") || is_at(".file")) return void(until("\n"));
    if (text_[at_] != '.' && text_[at_] != '@') {  // a label?
      size_t end = at_;
      while (end < text_.size() && is_name(text_[end]) && text_[end] != '.') ++end;
      if (text_[end] == ':' && text_[end + 1] != ':') {
        labels_[label(text_.substr(at_, end - at_), true)] = static_cast<int32_t>(kernel_->code.size());
        at_ = end + 1;
        return;
      }
    }
    const int line = line_;
    const std::string text = trimmed(until(";"));
    if (text.compare(0, 4, ".reg") == 0) return registers(trimmed(text.substr(4)));
    if (text.compare(0, 7, ".shared") == 0) return shared_variable(text);
    if (text.compare(0, 7, ".pragma") == 0 || text.empty()) return;
    if (text[0] == '.') fail("a directive that is not known: " + text);
    instruction(text, line);
  }

  std::string label(const std::string& name, bool defines) {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (defines || labels_.count(name + scope->suffix)) return name + scope->suffix;
    }
    return name;
  }

  void registers(const std::string& text) {  // `.b32 %r<12>`, `.pred p, q`
    const size_t space = text.find_first_of(" \t");
    const std::string type = text.substr(1, space - 1);
    if (type != "pred" && bytes_of(type) > 8) fail("registers that are not known: " + text);
    const Operand::Kind kind = type == "pred" ? Operand::kPredicate : bytes_of(type) == 8 ? Operand::k64 : Operand::k32;
    for (const std::string& name : split(text.substr(space), ',')) {
      const size_t angle = name.find('<');
      const int count = angle == std::string::npos ? 1 : std::stoi(name.substr(angle + 1));
      for (int i = 0; i < count; ++i) {
        const std::string one = angle == std::string::npos ? name : name.substr(0, angle) + std::to_string(i);
        scopes_.back().registers[one] = place(kind);
      }
    }
  }

  Operand place(Operand::Kind kind) {
    Operand o;
    o.kind = kind;
    o.at = kernel_->place(kind);
    return o;
  }

  static uint32_t shared_bytes(const std::string& text) {  // `.shared .align 16 .b8 name[48]`, `.shared .align 8 .u64 name`
    const size_t bracket = text.find('[');
    const std::string head = trimmed(text.substr(0, bracket)), typed = trimmed(head.substr(0, head.find_last_of(" \t")));
    const uint32_t each = bytes_of(typed.substr(typed.find_last_of('.') + 1));
    return each * (bracket == std::string::npos ? 1 : static_cast<uint32_t>(std::stoul(text.substr(bracket + 1))));
  }

  void shared_variable(const std::string& text) {
    const uint32_t align = number_behind(text, ".align", 16), bytes = shared_bytes(text);
    kernel_->static_shared = (kernel_->static_shared + align - 1) / align * align;
    shared_[name_in(text)] = kernel_->static_shared;
    kernel_->static_shared += bytes;
  }

  Operand constant(uint64_t value, Operand::Kind kind) {
    const auto key = std::pair{value, static_cast<int>(kind)};
    if (const auto found = constants_.find(key); found != constants_.end()) return found->second;
    Operand o;
    o.kind = kind, o.space = 1;
    auto& all = kernel_->constants;
    all.resize((all.size() + 255) / 256 * 256);
    o.at = static_cast<uint32_t>(all.size());
    for (int l = 0; l < kLanes; ++l) {
      const size_t bytes = kind == Operand::k64 ? 8 : 4;
      all.insert(all.end(), reinterpret_cast<uint8_t*>(&value), reinterpret_cast<uint8_t*>(&value) + bytes);
    }
    return constants_[key] = o;
  }

  Operand truth(bool is_so) {
    Operand out = constant(is_so ? kAll : 0, Operand::k32);
    out.kind = Operand::kPredicate;
    return out;
  }

  Operand special_register(int what, Operand::Kind kind) {
    for (const auto& [known, at] : kernel_->specials)
      if (known == what) {
        Operand o;
        o.kind = kind, o.at = at;
        return o;
      }
    const Operand o = place(kind);
    kernel_->specials.push_back({what, o.at});
    return o;
  }

  bool symbol(const std::string& name, Operand& out, Operand::Kind kind) {
    if (const auto found = parameters_.find(name); found != parameters_.end()) {
      out = special_register(kParameterAddress + static_cast<int>(found->second), Operand::k64);
      return true;
    }
    if (const auto found = shared_.find(name); found != shared_.end()) {
      out = constant(found->second, kind);
      return true;
    }
    if (module_extern_.count(name)) {  // dynamic shared memory is behind the static one; kernels have one or the other
      if (kernel_->static_shared) fail("static and dynamic shared memory in one kernel: " + kernel_->name);
      out = constant(0, kind);
      return true;
    }
    return false;
  }

  static uint64_t whole(const std::string& text, const std::string& digits, int base) {
    if (digits.compare(0, 2, "0b") == 0) return whole(text, digits.substr(2), 2);
    char* end = nullptr;
    errno = 0;
    const uint64_t value = std::strtoull(digits.c_str(), &end, base);
    if (errno || *end || digits.empty()) fail("a number that is not known: " + text);
    return value;
  }
  static bool number(const std::string& text, bool is_wide, bool is_float, uint64_t& out) {
    const std::string begin = text.substr(0, 2);
    if ((begin == "0f" || begin == "0F") && text.size() == 10) return out = whole(text, text.substr(2), 16), true;
    const bool is_negative = text[0] == '-';
    const std::string digits = text.substr(is_negative);
    if (digits.empty() || !std::isdigit(static_cast<unsigned char>(digits[0]))) return false;
    if (is_float) {
      char* end = nullptr;
      const float value = std::strtof(text.c_str(), &end);
      if (*end) fail("a number that is not known: " + text);
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      return out = bits, true;
    }
    out = whole(text, digits.back() == 'U' ? digits.substr(0, digits.size() - 1) : digits, 0);
    if (!is_wide && out > kAll) fail("a number of more than 32 bits: " + text);
    if (is_negative) out = -out;
    if (!is_wide) out &= kAll;
    return true;
  }

  // One operand; `wide`: a number among 64-bit registers. Types decide nothing else here: registers know their width.
  Operand operand(std::string text, bool wide, bool is_float) {
    Operand out;
    if (text[0] == '!') {
      out = operand(trimmed(text.substr(1)), wide, is_float);
      out.negated = !out.negated;
      return out;
    }
    if (text == "_") return out;
    if (text == "true" || text == "false") return truth(text == "true");
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto found = scope->registers.find(text); found != scope->registers.end()) return found->second;
    }
    if (const int what = special(text); what >= 0) return special_register(what, Operand::k32);
    uint64_t value = 0;
    if (number(text, wide, is_float, value)) return constant(value, wide ? Operand::k64 : Operand::k32);
    if (symbol(text, out, wide ? Operand::k64 : Operand::k32)) return out;
    fail("an operand that is not known: " + text + " in " + kernel_->name);
  }

  Address address(const std::string& bracketed) {
    std::string inner = trimmed(bracketed.substr(1, bracketed.size() - 2));
    Address out;
    const size_t plus = inner.find('+');
    if (plus != std::string::npos) {
      out.offset = std::stoll(inner.substr(plus + 1), nullptr, 0);
      inner = trimmed(inner.substr(0, plus));
    }
    uint64_t value;
    if (number(inner, true, false, value)) {
      out.offset += static_cast<int64_t>(value);
    } else {
      out.base = operand(inner, false, false);
    }
    return out;
  }

  void instruction(const std::string& text, int line) {
    Instruction made;
    made.text = text, made.line = line;
    std::string rest = text;
    if (rest[0] == '@') {
      const size_t space = rest.find_first_of(" \t");
      made.guard = operand(rest.substr(1, space - 1), false, false);
      rest = trimmed(rest.substr(space));
    }
    const size_t space = rest.find_first_of(" \t");
    std::string name = rest.substr(0, space);
    Words operands = space == std::string::npos ? Words{} : split(rest.substr(space), ',');
    if (operands.size() == 2 && (operands[1] == "%globaltimer" || operands[1] == "%clock" || operands[1] == "%clock64")) {
      name = "clock" + name.substr(std::min(name.find('.'), name.size()));
      operands.pop_back();
    }
    const Words words = dotted(name);
    std::string shape;  // of the operands, as in forms.cpp
    if (forms().count(name) == 0) fail("line " + std::to_string(line) + ": an instruction that is not known: " + text);
    if (words[0] == "bra") {
      if (operands.size() != 1) fail("line " + std::to_string(line) + ": an instruction that is not known: " + text);
      jumps_.emplace_back(kernel_->code.size(), label(operands[0], false));
    } else {
      const std::string& type = words.back();
      const bool is_wide = type == "u64" || type == "s64" || type == "b64" || type == "f32x2";
      const bool is_float = type == "f32";
      for (size_t i = 0; i < operands.size(); ++i) shape += add_operand(made, words, operands[i], is_wide, is_float, i);
    }
    if (!is_form(name, shape)) fail("line " + std::to_string(line) + ": operands that are not known (" + shape + "): " + text);
    made.run = control(words, made);
    if (!made.run) made.run = memory(words, made);
    if (!made.run) made.run = products(words);
    if (!made.run) made.run = arithmetic(words, made);
    if (!made.run) fail("line " + std::to_string(line) + ": an instruction that nothing does: " + text);
    made.ends = words[0] == "ret" || words[0] == "exit";
    if (always_writes(words)) made.written = made.count;
    kernel_->code.push_back(std::move(made));
  }

  // The operand's shape, as in forms.cpp
  std::string add_operand(Instruction& made, const Words& words, const std::string& text, bool is_wide, bool is_float, size_t place_of_it) {
    const size_t before = made.o.size();
    std::string shape;
    const auto add = [&](const std::string& one, bool wide) {
      uint64_t value = 0;
      const bool is_truth = words[0] == "mov" && words.back() == "pred" && number(one, false, false, value);
      made.o.push_back(is_truth ? truth(value != 0) : operand(one, wide, is_float));
      const Operand::Kind kind = made.o.back().kind;
      if (made.o.back().negated && (kind != Operand::kPredicate || place_of_it == 0))
        fail("what is negated is no predicate that is read: " + made.text);
      shape += kind == Operand::kNone ? '_' : kind == Operand::kPredicate ? 'p' : kind == Operand::k64 ? 'd' : 'r';
    };
    if (text[0] == '[') {
      if (made.brackets == 3) fail("more addresses than are known: " + made.text);
      (made.brackets == 0 ? made.address : made.brackets == 1 ? made.from : made.third) = address(text);
      ++made.brackets;
      shape = "m";
    } else if (text[0] == '{') {
      shape = "{";
      for (const std::string& one : split(text.substr(1, text.size() - 2), ',')) add(one, is_wide && words[0] != "mov");
      shape += "}";
    } else if (const size_t bar = text.find('|'); bar != std::string::npos) {
      add(trimmed(text.substr(0, bar)), is_wide);
      shape += "|";
      add(trimmed(text.substr(bar + 1)), is_wide);
    } else {
      const bool is_shift = (words[0] == "shl" || words[0] == "shr") && place_of_it == 2;
      const bool is_wide_sum = words[0] == "mad" && words[1] == "wide" && place_of_it == 3 && bytes_of(words.back()) == 4;
      const bool is_count = words[0] == "mbarrier" && place_of_it > 0;
      add(text, is_wide_sum || (is_wide && !is_shift && !is_count));
    }
    if (place_of_it == 0) made.count = static_cast<int32_t>(made.o.size() - before);
    return shape;
  }

  // Whether its first operand is written in every lane that comes to it; of what is not known here that is not assumed.
  static bool always_writes(const Words& words) {
    static const std::set<std::string> kThese = {"mov", "ld",   "ldmatrix", "cvt",  "cvta",  "add",   "sub",   "mul",   "mad",        "fma",
                                                 "min", "max",  "and",      "or",   "xor",   "not",   "neg",   "abs",   "shl",        "shr",
                                                 "shf", "prmt", "lop3",     "bfe",  "bfi",   "clz",   "brev",  "popc",  "setp",       "selp",
                                                 "div", "rem",  "bfind",    "rcp",  "ex2",   "lg2",   "rsqrt", "sqrt",  "mma",        "sin",
                                                 "cos", "tanh", "shfl",     "vote", "match", "redux", "atom",  "clock", "activemask", "elect"};
    return kThese.count(words[0]) || (words[0] == "mbarrier" && (words[1] == "try_wait" || words[1] == "test_wait"));
  }
  std::string text_;
  size_t at_ = 0;
  int line_ = 1, scope_number_ = 0;
  Kernel* kernel_ = nullptr;
  std::vector<Scope> scopes_;
  std::map<std::string, int32_t> labels_;
  std::vector<std::pair<size_t, std::string>> jumps_;
  std::map<std::pair<uint64_t, int>, Operand> constants_;
  std::map<std::string, uint32_t> shared_, parameters_;
  std::set<std::string> module_extern_;
};

}  // namespace

int bytes_of(const std::string& type) {
  static const std::map<std::string, int> known = {{"f16x2", 4}, {"bf16x2", 4}, {"bf16", 2}, {"u16x2", 4}, {"s16x2", 4}, {"tf32", 4}, {"f32x2", 8}};
  if (const auto found = known.find(type); found != known.end()) return found->second;
  size_t digits = type.size();
  while (digits > 0 && std::isdigit(static_cast<unsigned char>(type[digits - 1]))) --digits;
  if (digits == type.size() || digits == 0 || digits > 1) fail("a type that is not known: " + type);
  return std::stoi(type.substr(digits)) / 8;
}

std::vector<std::unique_ptr<Kernel>> parse(const std::string& ptx) { return Parser(ptx).all(); }

}  // namespace emulator

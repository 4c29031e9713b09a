#include "cuda_ptx/module.h"

#include <algorithm>
#include <cctype>
#include <charconv>

namespace pymoe::ptx {
namespace {

bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }
bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$' || c == '%'; }

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

// Joins the text into one line, with single spaces.
std::string joined(std::string_view text) {
  std::string line;
  for (const char c : trimmed(text)) {
    if (!is_space(c)) {
      line += c;
    } else if (line.back() != ' ') {
      line += ' ';
    }
  }
  return line;
}

int64_t number(std::string_view text) {
  text = trimmed(text);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) throw Error("a number was expected: " + joined(text));
  return value;
}

// Returns the parts between commas that are not inside brackets.
std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> parts;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i <= text.size(); ++i) {
    const char c = i < text.size() ? text[i] : ',';
    depth += (c == '{' || c == '[' || c == '(') - (c == '}' || c == ']' || c == ')');
    if (c != ',' || (depth != 0 && i < text.size())) continue;
    if (const auto part = trimmed(text.substr(begin, i - begin)); !part.empty()) parts.push_back(part);
    begin = i + 1;
  }
  return parts;
}

std::vector<std::string> words(std::string_view text) {
  std::vector<std::string> found;
  for (size_t i = 0; i < text.size();) {
    if (is_space(text[i])) {
      ++i;
      continue;
    }
    const size_t begin = i;
    while (i < text.size() && !is_space(text[i])) ++i;
    found.emplace_back(text.substr(begin, i - begin));
  }
  return found;
}

// Comments become spaces; lines stay where they are.
std::string without_comments(std::string_view text) {
  std::string clean(text);
  for (size_t i = 0; i + 1 < clean.size(); ++i) {
    if (clean[i] == '"') {  // a string may contain text that looks like a comment
      i = std::min(clean.find('"', i + 1), clean.size());
    } else if (clean[i] == '/' && clean[i + 1] == '/') {
      for (; i < clean.size() && clean[i] != '\n'; ++i) clean[i] = ' ';
    } else if (clean[i] == '/' && clean[i + 1] == '*') {
      const size_t end = std::min(clean.find("*/", i), clean.size() - 2) + 2;
      for (; i < end; ++i) clean[i] = clean[i] == '\n' ? '\n' : ' ';
    }
  }
  return clean;
}

Operand parse_operand(std::string_view text) {
  Operand operand;
  if (text.front() == '{') {
    operand.kind = Operand::kVector;
    for (const auto part : split(text.substr(1, text.size() - 2))) operand.items.emplace_back(part);
  } else if (text.front() == '[') {
    operand.kind = Operand::kAddress;
    const auto inside = trimmed(text.substr(1, text.size() - 2));
    const size_t sign = inside.find_first_of("+", 1);
    operand.items.emplace_back(trimmed(inside.substr(0, sign)));
    operand.items.emplace_back(sign == std::string_view::npos ? "0" : trimmed(inside.substr(sign + 1)));
  } else if (const size_t bar = text.find('|'); bar != std::string_view::npos) {
    operand.items = {std::string(trimmed(text.substr(0, bar))), std::string(trimmed(text.substr(bar + 1)))};
  } else {
    operand.items.emplace_back(text);
  }
  return operand;
}

// .shared .align 16 .b8 name[128], also without an alignment or a size: one element.
struct Declared {
  std::string name;
  Array array;
  bool unsized = false;
};
Declared parse_array(std::string_view text) {
  Declared found;
  const auto parts = words(text);
  int64_t element = 0;
  int64_t own_alignment = 0;
  bool points = false;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i] == ".align") {
      const int64_t alignment = number(parts.at(++i));
      if (!points) own_alignment = alignment;
    } else if (parts[i] == ".ptr") {
      points = true;  // what follows describes the memory to which the parameter points
    } else if (parts[i][0] == '.') {
      const int width =
          std::isdigit(static_cast<unsigned char>(parts[i].back())) ? width_of_type(parts[i].substr(1)) : 0;
      element = std::max<int64_t>(element, width);
    } else {
      const size_t bracket = parts[i].find('[');
      found.name = parts[i].substr(0, bracket);
      if (bracket == std::string::npos) {
        found.array.bytes = element;
      } else {
        const auto size = std::string_view(parts[i]).substr(bracket + 1, parts[i].size() - bracket - 2);
        found.unsized = size.empty();
        found.array.bytes = size.empty() ? 0 : element * number(size);
      }
    }
  }
  if (found.name.empty() || element == 0) throw Error("a declaration is not understood: " + joined(text));
  found.array.alignment = own_alignment != 0 ? own_alignment : element;
  return found;
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(without_comments(text)) {
    for (size_t i = 0; i < text_.size(); ++i) {
      if (text_[i] == '\n') line_ends_.push_back(i);
    }
  }

  std::map<std::string, Kernel> run() {
    while (skip_spaces(), at_ < text_.size()) {
      const size_t end = text_.find_first_of(";(\n{", at_);
      const std::string_view head = std::string_view(text_).substr(at_, end - at_);
      const auto parts = words(head);
      const bool linkage = parts[0] == ".visible" || parts[0] == ".weak" || parts[0] == ".extern";
      const std::string& what = linkage && parts.size() > 1 ? parts[1] : parts[0];
      if (what == ".version" || what == ".target" || what == ".address_size") {
        at_ = text_.find('\n', at_);
      } else if (what == ".entry") {
        parse_kernel(parts.back());
      } else if (what == ".shared") {
        const auto found = parse_array(declaration());
        if (found.unsized) {
          module_dynamic_.push_back(found.name);
        } else {
          module_shared_[found.name] = found.array;
        }
      } else {
        throw Error(place() + "is not understood: " + joined(head));
      }
    }
    for (auto& [name, kernel] : kernels_) add_module_arrays(kernel);
    return std::move(kernels_);
  }

 private:
  int line() const {
    return static_cast<int>(std::lower_bound(line_ends_.begin(), line_ends_.end(), at_) - line_ends_.begin()) + 1;
  }
  std::string place() const { return "line " + std::to_string(line()) + " "; }
  void skip_spaces() {
    while (at_ < text_.size() && is_space(text_[at_])) ++at_;
  }
  // Returns the text up to the semicolon, without directives such as ".shared" and ".extern".
  std::string_view declaration() {
    const size_t end = text_.find(';', at_);
    std::string_view all = std::string_view(text_).substr(at_, end - at_);
    at_ = end + 1;
    for (const std::string_view word : {".visible", ".weak", ".extern", ".shared"}) {
      all = trimmed(all);
      if (all.starts_with(word)) all.remove_prefix(word.size());
    }
    return all;
  }

  // A kernel sees the module's arrays that it names.
  void add_module_arrays(Kernel& kernel) {
    const auto named = [&](const std::string& name) {
      return std::any_of(kernel.statements.begin(), kernel.statements.end(), [&](const Statement& statement) {
        return std::any_of(statement.operands.begin(), statement.operands.end(), [&](const Operand& operand) {
          return std::find(operand.items.begin(), operand.items.end(), name) != operand.items.end();
        });
      });
    };
    for (const auto& [name, array] : module_shared_) {
      if (named(name)) kernel.shared[name] = array;
    }
    for (const auto& name : module_dynamic_) {
      if (named(name)) kernel.dynamic_shared = name;
    }
  }

  void parse_kernel(std::string name) {
    Kernel kernel;
    kernel.name = std::move(name);
    const size_t open = text_.find('(', at_), close = text_.find(')', open), body = text_.find('{', close);
    for (const auto part : split(std::string_view(text_).substr(open + 1, close - open - 1))) {
      const auto found = parse_array(part.substr(std::string_view(".param").size()));
      const int64_t alignment = found.array.alignment;
      const int64_t offset = (kernel.parameter_bytes + alignment - 1) / alignment * alignment;
      kernel.parameters.push_back({found.name, offset, found.array.bytes});
      kernel.parameter_bytes = offset + found.array.bytes;
    }
    for (const std::string_view directive : {".maxntid", ".reqntid"}) {
      const auto between = std::string_view(text_).substr(close, body - close);
      const size_t where = between.find(directive);
      if (where == std::string_view::npos) continue;
      const auto rest = between.substr(where + directive.size());
      kernel.most_threads = 1;
      for (const auto extent : split(rest.substr(0, rest.find('\n')))) kernel.most_threads *= number(extent);
    }
    at_ = body + 1;
    scopes_.assign(1, {});
    while (!scopes_.empty()) parse_statement(kernel);
    kernels_[kernel.name] = std::move(kernel);
  }

  void parse_statement(Kernel& kernel) {
    skip_spaces();
    if (at_ >= text_.size()) throw Error(kernel.name + " does not end");
    if (text_[at_] == '{') {
      scopes_.emplace_back();
      ++at_;
    } else if (text_[at_] == '}') {
      scopes_.pop_back();
      ++at_;
    } else {
      size_t end = at_;
      while (end < text_.size() && is_name(text_[end])) ++end;
      if (text_[end] == ':') {
        kernel.labels[text_.substr(at_, end - at_)] = static_cast<int64_t>(kernel.statements.size());
        last_label_ = text_.substr(at_, end - at_);
        at_ = end + 1;
        return;
      }
      end = text_.find(';', at_);
      const auto text = std::string_view(text_).substr(at_, end - at_);
      if (text[0] == '.') {
        // .loc has no semicolon.
        if (text.starts_with(".loc") || text.starts_with(".file")) {
          end = text_.find('\n', at_);
        } else {
          parse_directive(kernel, text);
        }
      } else {
        kernel.statements.push_back(parse_instruction(text, line()));
      }
      at_ = end + 1;
    }
  }

  void parse_directive(Kernel& kernel, std::string_view text) {
    const auto parts = words(text);
    if (parts[0] == ".reg") {
      const int width = width_of_type(std::string_view(parts.at(1)).substr(1));
      const size_t names = text.find(parts[1]) + parts[1].size();
      for (const auto name : split(text.substr(names))) declare(kernel, name, width);
    } else if (parts[0] == ".shared") {
      const auto found = parse_array(text.substr(std::string_view(".shared").size()));
      kernel.shared[found.name] = found.array;
    } else if (parts[0] == ".branchtargets") {
      for (const auto label : split(text.substr(parts[0].size()))) kernel.tables[last_label_].emplace_back(label);
    } else if (parts[0] != ".pragma") {
      throw Error(place() + "is not understood: " + joined(text));
    }
  }

  void declare(Kernel& kernel, std::string_view name, int width) {
    const size_t angle = name.find('<');
    if (angle != std::string_view::npos) {
      const int64_t count = number(name.substr(angle + 1, name.size() - angle - 2));
      for (int64_t i = 0; i < count; ++i) {
        kernel.registers[std::string(name.substr(0, angle)) + std::to_string(i)] = width;
      }
      return;
    }
    // Names of an inner scope hide names outside, and may be declared again with another type.
    const std::string unique = std::string(name) + "@" + std::to_string(kernel.registers.size());
    scopes_.back()[std::string(name)] = unique;
    kernel.registers[unique] = width;
  }

  std::string resolved(const std::string& name) const {
    const bool negated = name[0] == '!';
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      const auto found = scope->find(name.substr(negated));
      if (found != scope->end()) return (negated ? "!" : "") + found->second;
    }
    return name;
  }

  Statement parse_instruction(std::string_view text, int line) {
    Statement statement;
    statement.line = line;
    statement.text = joined(text);
    std::string_view rest = statement.text;
    if (rest[0] == '@') {
      statement.negated = rest[1] == '!';
      rest.remove_prefix(statement.negated ? 2 : 1);
      const size_t space = rest.find(' ');
      statement.guard = resolved(std::string(rest.substr(0, space)));
      rest = trimmed(rest.substr(space));
    }
    const size_t space = std::min(rest.find_first_of(" {"), rest.size());
    statement.opcode = std::string(rest.substr(0, space));
    for (const auto part : split(rest.substr(space))) {
      statement.operands.push_back(parse_operand(part));
      for (auto& item : statement.operands.back().items) item = resolved(item);
    }
    return statement;
  }

  std::string text_;
  std::vector<size_t> line_ends_;
  size_t at_ = 0;
  std::map<std::string, Kernel> kernels_;
  std::map<std::string, Array> module_shared_;
  std::vector<std::string> module_dynamic_;
  std::vector<std::map<std::string, std::string>> scopes_;
  std::string last_label_;
};

}  // namespace

int width_of_type(std::string_view type) {
  if (type == "pred") return 0;
  if (type.ends_with("64")) return 8;
  if (type.ends_with("32")) return 4;
  if (type.ends_with("16")) return 2;
  if (type.ends_with("8")) return 1;
  throw Error("unknown type " + std::string(type));
}

std::map<std::string, Kernel> parse_module(std::string_view text) { return Parser(text).run(); }

}  // namespace pymoe::ptx

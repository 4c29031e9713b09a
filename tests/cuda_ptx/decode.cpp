#include "cuda_ptx/decode.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <utility>

#include "cuda_ptx/machine.h"
#include "cuda_ptx/table.h"

namespace pymoe::ptx {
namespace {

const std::map<std::string, Special>& specials() {
  static const std::map<std::string, Special> all = {
      {"%tid.x", Special::kThread},
      {"%ntid.x", Special::kThreads},
      {"%ctaid.x", Special::kBlock},
      {"%nctaid.x", Special::kBlocks},
      {"%laneid", Special::kLane},
      {"%warpid", Special::kWarp},
      {"%lanemask_lt", Special::kLanesBelow},
      {"%lanemask_le", Special::kLanesUpTo},
      {"%lanemask_gt", Special::kLanesAbove},
      {"%lanemask_ge", Special::kLanesFrom},
      {"%lanemask_eq", Special::kLaneBit},
      {"%cluster_ctarank", Special::kRank},
      {"%cluster_ctaid.x", Special::kRank},
      {"%cluster_nctarank", Special::kRanks},
      {"%cluster_nctaid.x", Special::kRanks},
      {"%dynamic_smem_size", Special::kDynamicBytes},
  };
  return all;
}

// 12, -1, 0x1F, 0f3F800000, 0d3FF0000000000000
bool parse_number(const std::string& text, uint64_t& bits) {
  if (text.empty()) return false;
  char* end = nullptr;
  if (text.size() > 2 && text[0] == '0' && (text[1] == 'f' || text[1] == 'F' || text[1] == 'd' || text[1] == 'D')) {
    bits = std::strtoull(text.c_str() + 2, &end, 16);
  } else if (text[0] == '-') {
    bits = static_cast<uint64_t>(std::strtoll(text.c_str(), &end, 0));
  } else {
    bits = std::strtoull(text.c_str(), &end, 0);
  }
  if (*end == 'U') ++end;
  return *end == 0;
}

void lay_out_shared(Program& program) {
  int64_t end = 0;
  for (const auto& [name, array] : program.kernel.shared) {
    end = (end + array.alignment - 1) / array.alignment * array.alignment + array.bytes;
  }
  program.static_shared = end;
  program.dynamic_begin = (end + 15) / 16 * 16;
}

// Returns the offset of an array in shared memory, or -1.
int64_t shared_offset(const Program& program, const std::string& name) {
  if (name == program.kernel.dynamic_shared) return program.dynamic_begin;
  int64_t end = 0;
  for (const auto& [other, array] : program.kernel.shared) {
    end = (end + array.alignment - 1) / array.alignment * array.alignment;
    if (name == other) return end;
    end += array.bytes;
  }
  return -1;
}

}  // namespace

std::vector<std::string> parts_of(const std::string& opcode) {
  std::vector<std::string> parts(1);
  for (const char c : opcode) {
    if (c == ':' && parts.back().ends_with(':')) {
      parts.back().pop_back();
      parts.back() += '/';  // "shared::cta" -> "shared/cta"
    } else if (c == '.') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

uint32_t Decoder::place(int width) {
  const uint32_t found = program_.register_bytes;
  program_.register_bytes += width == 0 ? 8 : static_cast<uint32_t>(width) * kWarpSize;
  return found;
}

uint32_t Decoder::register_named(const std::string& name, uint8_t& width) {
  if (name == "_") throw Error("a result that nobody wants is not supported");
  if (!is_register(name)) throw Error("not a register: " + name);
  width = static_cast<uint8_t>(program_.kernel.registers.at(name));
  if (const auto found = places_.find(name); found != places_.end()) return found->second;
  program_.register_bytes += 8;  // mask of the lanes that have set the register
  program_.registers.push_back(place(width));
  return places_[name] = program_.registers.back();
}

uint32_t Decoder::any_result(const std::string& name, uint8_t& width) {
  writes_.push_back(register_named(name, width));
  return writes_.back();
}

void Decoder::take_registers(Instruction& to) {
  to.reads = std::move(reads_);
  to.writes = std::move(writes_);
  reads_.clear();
  writes_.clear();
}

int Decoder::width_of(const Operand& operand) const {
  const auto found = program_.kernel.registers.find(operand.items[0]);
  return found == program_.kernel.registers.end() ? -1 : found->second;
}

uint32_t Decoder::result(const std::string& name, int width) {
  uint8_t found = 0;
  const uint32_t where = any_result(name, found);
  if (found != width) throw Error("expected a register of " + std::to_string(width) + " bytes, got " + name);
  return where;
}

uint32_t Decoder::any_source(const std::string& name, int width, uint8_t& found) {
  if (is_register(name)) {
    reads_.push_back(register_named(name, found));
    return reads_.back();
  }
  found = static_cast<uint8_t>(width);
  const std::string key = name + "/" + std::to_string(width);
  if (const auto known = places_.find(key); known != places_.end()) return known->second;
  if (const auto special = specials().find(name); special != specials().end()) {
    if (width != 4) throw Error(name + " has 4 bytes");
    program_.specials.emplace_back(place(4), special->second);
    return places_[key] = program_.specials.back().first;
  }
  uint64_t bits = 0;
  if (name == "%tid.y" || name == "%tid.z" || name == "%ctaid.y" || name == "%ctaid.z") {
    bits = 0;
  } else if (name == "%ntid.y" || name == "%ntid.z" || name == "%nctaid.y" || name == "%nctaid.z") {
    bits = 1;
  } else if (const int64_t offset = shared_offset(program_, name); offset >= 0) {
    bits = static_cast<uint64_t>(offset) + SharedMemory::kBegin;
  } else if (const auto& all = program_.kernel.parameters;
             std::any_of(all.begin(), all.end(), [&](const Parameter& one) { return one.name == name; })) {
    bits = static_cast<uint64_t>(
        std::find_if(all.begin(), all.end(), [&](const Parameter& one) { return one.name == name; })->offset);
  } else if (!parse_number(name, bits)) {
    throw Error("unknown operand " + name);
  }
  program_.constants.push_back({place(width), width, width == 0 ? (bits != 0 ? ~uint64_t{0} : 0) : bits});
  return places_[key] = program_.constants.back().place;
}

uint32_t Decoder::source(const std::string& name, int width) {
  uint8_t found = 0;
  const uint32_t where = any_source(name, width, found);
  if (found != width) throw Error("expected an operand of " + std::to_string(width) + " bytes, got " + name);
  return where;
}

void Decoder::address(const Operand& operand, Instruction& to, int number) {
  if (operand.kind != Operand::kAddress) throw Error("expected an address");
  uint64_t offset = 0;
  if (!parse_number(operand.items[1], offset)) throw Error("unknown offset " + operand.items[1]);
  to.offset = static_cast<int64_t>(offset);
  to.at[number] = any_source(operand.items[0], 8, to.width[number]);
  to.wide_address = to.width[number] == 8;
  if (to.width[number] != 4 && to.width[number] != 8) throw Error("not an address: " + operand.items[0]);
}

int32_t Decoder::label(const std::string& name) const {
  const auto found = program_.kernel.labels.find(name);
  if (found == program_.kernel.labels.end()) throw Error("unknown label " + name);
  return static_cast<int32_t>(found->second);
}

bool decode_table(const Statement& statement, Decoder& decoder, Instruction& to) {
  static const Table table = [] {
    Table all;
    add_integer(all);
    add_bits(all);
    add_float(all);
    add_comparison(all);
    add_conversion(all);
    return all;
  }();
  auto found = table.find(statement.opcode);
  if (statement.opcode.starts_with("cvt.") && statement.operands.size() == 2) {
    const auto wider = table.find(statement.opcode + "/" + std::to_string(decoder.width_of(statement.operands[1])));
    if (wider != table.end()) found = wider;
  }
  if (found == table.end()) return false;
  const Meaning& meaning = found->second;
  if (statement.operands.size() != meaning.widths.size()) throw Error("a wrong number of operands");
  for (size_t i = 0; i < meaning.widths.size(); ++i) {
    const Operand& operand = statement.operands[i];
    if (operand.kind != Operand::kPlain || operand.items.size() != 1) return false;
    to.at[i] = i == 0 ? decoder.result(operand.items[0], meaning.widths[i])
                      : decoder.source(operand.items[0], meaning.widths[i]);
  }
  to.run = meaning.run;
  return true;
}

namespace {

// Finds words that are read from shared memory only to be stored there again: copying a structure also copies its gaps.
void find_copies(Program& program) {
  std::set<std::string_view> used, stored;
  for (const Statement& statement : program.kernel.statements) {
    used.insert(statement.guard);
    const bool loads = statement.opcode.starts_with("ld."), stores = statement.opcode.starts_with("st.shared");
    for (size_t i = 0; i < statement.operands.size(); ++i) {
      if (loads && i == 0) continue;
      for (const auto& item : statement.operands[i].items) (stores && i == 1 ? stored : used).insert(item);
    }
  }
  for (Instruction& instruction : program.code) {
    const Statement& statement = *instruction.statement;
    if (!statement.opcode.starts_with("ld.shared") || instruction.count != 1 || instruction.bytes > 4) continue;
    const std::string& result = statement.operands[0].items[0];
    instruction.only_copied = stored.contains(result) && !used.contains(result);
  }
}

// Finds pairs of 16 bits of which every use takes the same half, because the other half is shifted out or masked. nvcc
// fills the other half with any register, even one that nothing has set.
void find_half_pairs(Program& program) {
  struct Uses {
    int all = 0, of_half[2] = {};
  };
  std::map<std::string_view, Uses> uses;  // by register
  for (const Statement& statement : program.kernel.statements) {
    const auto& operands = statement.operands;
    for (size_t i = 0; i < operands.size(); ++i) {
      for (const auto& item : operands[i].items) {
        Uses& found = uses[item];
        ++found.all;
        if (i != 1 || operands.size() != 3) continue;
        found.of_half[0] += statement.opcode == "shl.b32" && operands[2].items[0] == "16";
        found.of_half[1] += statement.opcode == "and.b32" && operands[2].items[0] == "-65536";
      }
    }
  }
  for (Instruction& instruction : program.code) {
    const Statement& statement = *instruction.statement;
    if (statement.opcode != "mov.b32" || statement.operands[1].items.size() != 2 || instruction.reads.size() != 2) {
      continue;
    }
    const Uses& found = uses[statement.operands[0].items[0]];
    for (const int half : {0, 1}) {
      if (found.of_half[half] == found.all - 1) instruction.reads = {instruction.reads[static_cast<size_t>(half)]};
    }
  }
}

}  // namespace

Program decode(Kernel kernel) {
  Program program;
  program.kernel = std::move(kernel);
  program.register_bytes = 64;  // place 0 is nobody's
  lay_out_shared(program);
  Decoder decoder(program);
  for (const Statement& statement : program.kernel.statements) {
    Instruction instruction;
    instruction.statement = &statement;
    try {
      instruction.negated = statement.negated;
      if (!statement.guard.empty()) instruction.guard = decoder.source(statement.guard, 0);
      decoder.take_registers(instruction);
      static constexpr Family kFamilies[] = {decode_table,   decode_move, decode_access,     decode_atomic,
                                             decode_control, decode_copy, decode_collective, decode_matrix};
      if (!std::any_of(std::begin(kFamilies), std::end(kFamilies),
                       [&](Family family) { return family(statement, decoder, instruction); })) {
        throw Error("unknown instruction");
      }
      decoder.take_registers(instruction);
    } catch (const Error& error) {
      throw Error("line " + std::to_string(statement.line) + ": " + error.what() + ": " + statement.text);
    }
    program.code.push_back(std::move(instruction));
  }
  find_copies(program);
  find_half_pairs(program);
  static const Statement end{0, "end of the kernel", "", false, "ret", {}};
  program.code.emplace_back();
  program.code.back().kind = Instruction::kExit;
  program.code.back().statement = &end;
  return program;
}

}  // namespace pymoe::ptx

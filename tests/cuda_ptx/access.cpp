// Loads, stores, vector moves, and the checks on which memory they may touch.
#include "cuda_ptx/access.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <set>

namespace pymoe::ptx {
namespace {

std::string hexadecimal(uint64_t number) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(number));
  return text;
}

// The compiler copies the gaps of a structure as 2 or 4 single bytes, or as words from shared memory back to shared
// memory. No code uses these bytes.
bool copies_gaps(const Instruction& instruction) {
  return (instruction.bytes == 1 && instruction.count > 1) || instruction.only_copied;
}

unsigned char* global(Warp& warp, const Instruction& instruction, int lane, uint64_t address, int bytes,
                      Purpose purpose) {
  Launch& launch = warp.launch();
  auto& recent = launch.recent[static_cast<size_t>(&instruction - launch.program.code.data())];
  if (!recent.stretch.holds(address, static_cast<uint64_t>(bytes))) {
    recent.stretch = find_memory(address, static_cast<uint64_t>(bytes));
    if (recent.stretch.end == 0) throw Error("address " + hexadecimal(address) + " is in no tensor");
  }
  const bool written = purpose != Purpose::kWrite && !copies_gaps(instruction);
  if (purpose == Purpose::kRead && instruction.is_constant) purpose = Purpose::kConstantRead;
  launch.memory.note(recent, address, bytes, purpose, warp.moment(lane), written);
  return reinterpret_cast<unsigned char*>(address);
}

unsigned char* shared(Warp& warp, const Instruction& instruction, int lane, uint64_t address, int bytes,
                      Purpose purpose) {
  Block* block = warp.block;
  const uint64_t rank = address >> SharedMemory::kRankShift & SharedMemory::kRank;
  address &= SharedMemory::kPlace;
  Moment now = warp.moment(lane);
  if (rank != 0) {
    if (rank > block->cluster.size()) throw Error("no block of rank " + std::to_string(rank - 1) + " in the cluster");
    Block* const other = block->cluster[rank - 1];
    if (other != block) now = {static_cast<uint32_t>(other->index), Moment::kSeveral, 0, other->barriers, 0, nullptr};
    block = other;
    if (block->ended) throw Error("the shared memory of a block that has ended");
  }
  switch (purpose) {
    case Purpose::kRead: return block->shared.read(address, bytes, now, !copies_gaps(instruction));
    case Purpose::kWrite: return block->shared.write(address, bytes, now);
    default: return block->shared.update(address, bytes, now);
  }
}

template <typename T>
uint64_t loaded(const unsigned char* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return static_cast<uint64_t>(static_cast<int64_t>(value));
}

uint64_t element(const unsigned char* from, int bytes, bool is_signed) {
  switch (bytes) {
    case 1: return is_signed ? loaded<int8_t>(from) : loaded<uint8_t>(from);
    case 2: return is_signed ? loaded<int16_t>(from) : loaded<uint16_t>(from);
    case 4: return is_signed ? loaded<int32_t>(from) : loaded<uint32_t>(from);
    default: return loaded<int64_t>(from);
  }
}

void put(const Warp& warp, uint32_t place, int width, int lane, uint64_t value) {
  switch (width) {
    case 2: warp.at<uint16_t>(place)[lane] = static_cast<uint16_t>(value); break;
    case 4: warp.at<uint32_t>(place)[lane] = static_cast<uint32_t>(value); break;
    default: warp.at<uint64_t>(place)[lane] = value;
  }
}

uint64_t taken(const Warp& warp, uint32_t place, int width, int lane) {
  switch (width) {
    case 2: return warp.at<uint16_t>(place)[lane];
    case 4: return warp.at<uint32_t>(place)[lane];
    default: return warp.at<uint64_t>(place)[lane];
  }
}

// Elements are operands 0 to count - 1; the address is operand `count`.
template <Space kSpace>
void load(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const int bytes = instruction.bytes, count = instruction.count;
  for_lanes_checked(lanes, [&](int lane) {
    const uint64_t address = address_of(warp, instruction, lane, count);
    const unsigned char* from = access(warp, instruction, lane, address, bytes * count, kSpace, Purpose::kRead);
    for (int i = 0; i < count; ++i, from += bytes) {
      put(warp, instruction.at[i], instruction.width[i], lane, element(from, bytes, instruction.is_signed));
    }
  });
}

template <Space kSpace>
void store(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const int bytes = instruction.bytes, count = instruction.count;
  for_lanes_checked(lanes, [&](int lane) {
    const uint64_t address = address_of(warp, instruction, lane, count);
    unsigned char* to = access(warp, instruction, lane, address, bytes * count, kSpace, Purpose::kWrite);
    for (int i = 0; i < count; ++i, to += bytes) {
      const uint64_t value = taken(warp, instruction.at[i], instruction.width[i], lane);
      std::memcpy(to, &value, static_cast<size_t>(bytes));  // little-endian: the low bytes
    }
  });
}

// mov.b64 {a, b}, c and mov.b64 c, {a, b}: the first element is the lowest.
void unpack(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const int count = instruction.count, bytes = instruction.bytes;
  for_lanes(lanes, [&](int lane) {
    const uint64_t all = taken(warp, instruction.at[count], bytes * count, lane);
    for (int i = 0; i < count; ++i) put(warp, instruction.at[i], bytes, lane, all >> (8 * bytes * i));
  });
}
void pack(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const int count = instruction.count, bytes = instruction.bytes;
  for_lanes(lanes, [&](int lane) {
    uint64_t all = 0;
    for (int i = 0; i < count; ++i) all |= taken(warp, instruction.at[1 + i], bytes, lane) << (8 * bytes * i);
    put(warp, instruction.at[0], bytes * count, lane, all);
  });
}

// Qualifiers of loads and stores that concern caches; they change no value. Qualifiers of order and scope are missing,
// because the interpreter knows only the order of barriers.
const std::set<std::string>& harmless() {
  static const std::set<std::string> all = {"ca",
                                            "cg",
                                            "cs",
                                            "lu",
                                            "cv",
                                            "wb",
                                            "wt",
                                            "weak",
                                            "L1/no_allocate",
                                            "L1/evict_first",
                                            "L1/evict_last",
                                            "L1/evict_normal",
                                            "L1/evict_unchanged",
                                            "L2/64B",
                                            "L2/128B",
                                            "L2/256B"};
  return all;
}

}  // namespace

unsigned char* access(Warp& warp, const Instruction& instruction, int lane, uint64_t address, int bytes, Space space,
                      Purpose purpose) {
  if (address % static_cast<uint64_t>(bytes) != 0) {
    throw Error("address " + hexadecimal(address) + " is not a multiple of the " + std::to_string(bytes) + " bytes");
  }
  if (space == Space::kParameter) {
    auto& parameters = warp.launch().parameters;
    if (address + static_cast<uint64_t>(bytes) > parameters.size()) throw Error("outside the parameters");
    return parameters.data() + address;
  }
  const bool window = (address & SharedMemory::kWindow) != 0;
  if (space == Space::kShared || (space == Space::kGeneric && window)) {
    return shared(warp, instruction, lane, address, bytes, purpose);
  }
  return global(warp, instruction, lane, address, bytes, purpose);
}

void read_global(Warp& warp, const Instruction& instruction, int lane, uint64_t address, int bytes) {
  global(warp, instruction, lane, address, bytes, Purpose::kRead);
}

bool decode_access(const Statement& statement, Decoder& decoder, Instruction& to) {
  const auto parts = parts_of(statement.opcode);
  if (parts[0] != "ld" && parts[0] != "st") return false;
  const bool reads = parts[0] == "ld";
  Space space = Space::kGeneric;
  to.count = 1;
  for (size_t i = 1; i + 1 < parts.size(); ++i) {
    if (parts[i] == "global") {
      space = Space::kGlobal;
    } else if (parts[i] == "shared" || parts[i] == "shared/cta" || parts[i] == "shared/cluster") {
      space = Space::kShared;
    } else if (parts[i] == "param" && reads) {
      space = Space::kParameter;
    } else if (parts[i] == "v2" || parts[i] == "v4") {
      to.count = static_cast<uint8_t>(parts[i][1] - '0');
    } else if (parts[i] == "nc" && reads) {
      to.is_constant = true;
    } else if (!harmless().contains(parts[i])) {
      return false;
    }
  }
  to.bytes = static_cast<uint8_t>(width_of_type(parts.back()));
  to.is_signed = parts.back()[0] == 's';
  const Operand& values = statement.operands.at(reads ? 0 : 1);
  if (statement.operands.size() != 2 || values.items.size() != to.count) throw Error("a wrong number of operands");
  for (int i = 0; i < to.count; ++i) {
    const std::string& name = values.items[static_cast<size_t>(i)];
    const int width = std::max<int>(to.bytes, 2);
    to.at[i] = reads ? decoder.any_result(name, to.width[i]) : decoder.any_source(name, width, to.width[i]);
    if (to.width[i] < to.bytes) throw Error(name + " is too narrow");
  }
  decoder.address(statement.operands[reads ? 1 : 0], to, to.count);
  static constexpr Function kLoads[] = {load<Space::kGlobal>, load<Space::kShared>, load<Space::kGeneric>,
                                        load<Space::kParameter>};
  static constexpr Function kStores[] = {store<Space::kGlobal>, store<Space::kShared>, store<Space::kGeneric>};
  to.run = reads ? kLoads[static_cast<int>(space)] : kStores[static_cast<int>(space)];
  return true;
}

bool decode_move(const Statement& statement, Decoder& decoder, Instruction& to) {
  if (!statement.opcode.starts_with("mov.b") || statement.operands.size() != 2) return false;
  const int width = width_of_type(std::string_view(statement.opcode).substr(4));
  const bool unpacks = statement.operands[0].kind == Operand::kVector;
  const auto& elements = statement.operands[unpacks ? 0 : 1].items;
  const std::string& whole = statement.operands[unpacks ? 1 : 0].items[0];
  if (statement.operands[unpacks ? 0 : 1].kind != Operand::kVector) return false;
  to.count = static_cast<uint8_t>(elements.size());
  to.bytes = static_cast<uint8_t>(width / static_cast<int>(elements.size()));
  int number = 0;
  if (!unpacks) to.at[number++] = decoder.result(whole, width);
  for (const auto& element : elements) {
    to.at[number++] = unpacks ? decoder.result(element, to.bytes) : decoder.source(element, to.bytes);
  }
  if (unpacks) to.at[number] = decoder.source(whole, width);
  to.run = unpacks ? unpack : pack;
  return true;
}

}  // namespace pymoe::ptx

// atom, red and cp.async.
#include <algorithm>
#include <cstring>
#include <map>

#include "cuda_ptx/access.h"

namespace pymoe::ptx {
namespace {

template <typename T>
T value_at(const Warp& warp, uint32_t place, int lane) {
  return warp.at<T>(place)[lane];
}

// Operand 0 is the result, 1 the address, 2 and 3 the values. Lanes are processed one after the other, in random order.
template <typename T, auto kNew, Space kSpace, bool kReturns>
void update(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const auto first = static_cast<int>(warp.launch().random() % kWarpSize);
  const auto one = [&](int lane) {
    const uint64_t address = address_of(warp, instruction, lane, 1);
    unsigned char* const to = access(warp, instruction, lane, address, sizeof(T), kSpace, Purpose::kUpdate);
    T old;
    std::memcpy(&old, to, sizeof(T));
    const T fresh = kNew(old, value_at<T>(warp, instruction.at[2], lane), value_at<T>(warp, instruction.at[3], lane));
    std::memcpy(to, &fresh, sizeof(T));
    if constexpr (kReturns) warp.at<T>(instruction.at[0])[lane] = old;
  };
  for_lanes_checked(lanes & (~0u << first), one);
  for_lanes_checked(lanes & ~(~0u << first), one);
}

struct Update {
  Function run[2][3];  // by whether the old value is returned, and by space
  int width;
};

template <typename T, auto kNew>
Update updates() {
  return {{{update<T, kNew, Space::kGlobal, false>, update<T, kNew, Space::kShared, false>,
            update<T, kNew, Space::kGeneric, false>},
           {update<T, kNew, Space::kGlobal, true>, update<T, kNew, Space::kShared, true>,
            update<T, kNew, Space::kGeneric, true>}},
          sizeof(T)};
}

template <typename T>
void add_integer(std::map<std::string, Update>& all, const std::string& type) {
  all["add." + type] = updates<T, [](T a, T b, T) { return static_cast<T>(a + b); }>();
  all["min." + type] = updates<T, [](T a, T b, T) { return std::min(a, b); }>();
  all["max." + type] = updates<T, [](T a, T b, T) { return std::max(a, b); }>();
}
template <typename T>
void add_bits(std::map<std::string, Update>& all, const std::string& type) {
  all["and." + type] = updates<T, [](T a, T b, T) { return a & b; }>();
  all["or." + type] = updates<T, [](T a, T b, T) { return a | b; }>();
  all["xor." + type] = updates<T, [](T a, T b, T) { return a ^ b; }>();
  all["exch." + type] = updates<T, [](T, T b, T) { return b; }>();
  all["cas." + type] = updates<T, [](T a, T b, T c) { return a == b ? c : a; }>();
}

// Integers only: a sum of floating-point numbers would depend on the order, and no result of the library may.
const std::map<std::string, Update>& all_updates() {
  static const std::map<std::string, Update> table = [] {
    std::map<std::string, Update> all;
    add_integer<uint32_t>(all, "u32");
    add_integer<int32_t>(all, "s32");
    add_integer<uint64_t>(all, "u64");
    add_integer<int64_t>(all, "s64");
    add_bits<uint32_t>(all, "b32");
    add_bits<uint64_t>(all, "b64");
    return all;
  }();
  return table;
}

// Operand 0 is the address in shared memory, 1 that in global memory, 2 the number of bytes to read.
void begin_copy(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  for_lanes_checked(lanes, [&](int lane) {
    const uint64_t to = warp.at<uint32_t>(instruction.at[0])[lane] + static_cast<uint64_t>(instruction.offset);
    uint64_t from = warp.at<uint64_t>(instruction.at[1])[lane] + static_cast<uint64_t>(instruction.target);
    const int bytes = instruction.bytes;
    const auto read =
        static_cast<int>(std::min<uint32_t>(warp.at<uint32_t>(instruction.at[2])[lane], instruction.bytes));
    if (to % static_cast<uint64_t>(bytes) != 0 || (read > 0 && from % static_cast<uint64_t>(bytes) != 0)) {
      throw Error("an address is not a multiple of the " + std::to_string(bytes) + " bytes");
    }
    if (read > 0) read_global(warp, instruction, lane, from, read);
    warp.block->shared.begin_copy(to, bytes, warp.moment(lane));
    auto& groups = warp.copies[static_cast<size_t>(lane)];
    if (groups.empty()) groups.emplace_back();
    groups.back().push_back({to, from, bytes, read});
  });
}

void commit_copies(Warp& warp, const Instruction&, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    auto& groups = warp.copies[static_cast<size_t>(lane)];
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();
  });
}

// Afterwards all committed groups except the latest `count` have arrived; with kAll also copies that were not
// committed.
template <bool kAll>
void await_copies(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    auto& groups = warp.copies[static_cast<size_t>(lane)];
    const size_t stay = kAll ? 0 : static_cast<size_t>(instruction.offset) + 1;  // the open group stays, too
    while (groups.size() > stay) {
      for (const AsyncCopy& copy : groups.front()) {
        unsigned char* const to = warp.block->shared.end_copy(copy.shared, copy.bytes, warp.moment(lane));
        std::memcpy(to, reinterpret_cast<const void*>(copy.global), static_cast<size_t>(copy.read));
        std::memset(to + copy.read, 0, static_cast<size_t>(copy.bytes - copy.read));
      }
      groups.erase(groups.begin());
    }
  });
}

}  // namespace

bool decode_atomic(const Statement& statement, Decoder& decoder, Instruction& to) {
  const auto parts = parts_of(statement.opcode);
  if (parts[0] != "atom" && parts[0] != "red") return false;
  const bool returns = parts[0] == "atom" && statement.operands.at(0).items[0] != "_";
  int space = 2;
  for (size_t i = 1; i + 2 < parts.size(); ++i) {
    if (parts[i] == "global") {
      space = 0;
    } else if (parts[i] == "shared" || parts[i] == "shared/cta" || parts[i] == "shared/cluster") {
      space = 1;
    } else if (parts[i] != "relaxed" && parts[i] != "acquire" && parts[i] != "release" && parts[i] != "acq_rel" &&
               parts[i] != "cta" && parts[i] != "cluster" && parts[i] != "gpu" && parts[i] != "sys") {
      return false;
    }
  }
  if (parts.size() < 3) return false;
  const auto found = all_updates().find(parts[parts.size() - 2] + "." + parts.back());
  if (found == all_updates().end()) return false;
  const int width = found->second.width;
  size_t operand = parts[0] == "atom" ? 1 : 0;
  if (returns) to.at[0] = decoder.result(statement.operands[0].items[0], width);
  decoder.address(statement.operands.at(operand++), to, 1);
  to.at[2] = decoder.source(statement.operands.at(operand++).items[0], width);
  to.at[3] =
      operand < statement.operands.size() ? decoder.source(statement.operands[operand].items[0], width) : to.at[2];
  to.run = found->second.run[returns][space];
  return true;
}

bool decode_copy(const Statement& statement, Decoder& decoder, Instruction& to) {
  const auto& opcode = statement.opcode;
  if (opcode == "cp.async.commit_group") {
    to.run = commit_copies;
  } else if (opcode == "cp.async.wait_all") {
    to.run = await_copies<true>;
  } else if (opcode == "cp.async.wait_group") {
    to.offset = std::stoll(statement.operands.at(0).items[0]);
    to.run = await_copies<false>;
  } else if (opcode.starts_with("cp.async.ca.shared") || opcode.starts_with("cp.async.cg.shared")) {
    const auto parts = parts_of(opcode);
    for (size_t i = 5; i < parts.size(); ++i) {
      if (!parts[i].starts_with("L2/")) return false;
    }
    if (parts.size() < 5 || parts[4] != "global") return false;
    const auto& operands = statement.operands;
    const std::string& bytes = operands.at(2).items[0];
    if (bytes != "16" && (parts[2] == "cg" || (bytes != "4" && bytes != "8"))) throw Error("cannot copy such a piece");
    to.bytes = static_cast<uint8_t>(std::stoi(bytes));
    // Both addresses have an offset: the second one's goes into `target`.
    decoder.address(operands.at(1), to, 1);
    to.target = static_cast<int32_t>(to.offset);
    if (to.width[1] != 8) throw Error("expected a global address of 64 bits");
    decoder.address(operands.at(0), to, 0);
    if (to.width[0] == 8) throw Error("expected a shared address of 32 bits");
    to.at[2] = decoder.source(operands.size() > 3 ? operands[3].items[0] : bytes, 4);
    to.run = begin_copy;
  } else {
    return false;
  }
  return true;
}

}  // namespace pymoe::ptx

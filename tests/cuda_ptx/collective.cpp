// Collective instructions of a warp: shfl, vote, match, redux, activemask, elect.
#include <algorithm>
#include <map>

#include "cuda_ptx/access.h"

namespace pymoe::ptx {
namespace {

enum class Shuffle { kUp, kDown, kButterfly, kIndex };

// Operands: result, whether the source lane was in range (if wanted: `count` is 2), value, lane or distance, clamp.
template <Shuffle kHow>
void shuffle(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  uint32_t given[kWarpSize], result[kWarpSize], in_range = 0;
  const uint32_t* const values = warp.at<uint32_t>(instruction.at[2]);
  std::copy(values, values + kWarpSize, given);
  for_lanes(lanes, [&](int lane) {
    const int b = static_cast<int>(warp.at<uint32_t>(instruction.at[3])[lane] & 31);
    const uint32_t c = warp.at<uint32_t>(instruction.at[4])[lane];
    const int segment = static_cast<int>(c >> 8 & 31), clamp = static_cast<int>(c & 31);
    const int least = lane & segment, most = least | (clamp & ~segment);
    int from = lane;
    switch (kHow) {
      case Shuffle::kUp: from = lane - b; break;
      case Shuffle::kDown: from = lane + b; break;
      case Shuffle::kButterfly: from = lane ^ b; break;
      case Shuffle::kIndex: from = least | (b & ~segment); break;
    }
    const bool valid = kHow == Shuffle::kUp ? from >= most : from <= most;
    if (!valid) from = lane;
    if ((lanes >> from & 1) == 0) {
      throw Fault{lane, "a shuffle from lane " + std::to_string(from) + ", which takes no part"};
    }
    in_range |= static_cast<uint32_t>(valid) << lane;
    result[lane] = given[from];
  });
  for_lanes(lanes, [&](int lane) { warp.at<uint32_t>(instruction.at[0])[lane] = result[lane]; });
  if (instruction.count == 2) {
    uint32_t& to = warp.predicate(instruction.at[1]);
    to = (to & ~lanes) | in_range;
  }
}

// Returns the lanes whose predicate is true.
uint32_t ballot(const Warp& warp, const Instruction& instruction, uint32_t lanes) {
  return warp.predicate(instruction.at[1]) & lanes;
}
void vote_ballot(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint32_t all = ballot(warp, instruction, lanes);
  for_lanes(lanes, [&](int lane) { warp.at<uint32_t>(instruction.at[0])[lane] = all; });
}
void give(Warp& warp, const Instruction& instruction, uint32_t lanes, bool value) {
  uint32_t& to = warp.predicate(instruction.at[0]);
  to = value ? to | lanes : to & ~lanes;
}
void vote_any(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  give(warp, instruction, lanes, ballot(warp, instruction, lanes) != 0);
}
void vote_all(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  give(warp, instruction, lanes, ballot(warp, instruction, lanes) == lanes);
}
void vote_uniform(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint32_t all = ballot(warp, instruction, lanes);
  give(warp, instruction, lanes, all == 0 || all == lanes);
}

// Returns the lanes that have the same value.
template <typename T>
void match_any(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  uint32_t result[kWarpSize] = {};
  const T* const given = warp.at<T>(instruction.at[1]);
  for_lanes(lanes, [&](int lane) {
    for_lanes(lanes, [&](int other) { result[lane] |= static_cast<uint32_t>(given[lane] == given[other]) << other; });
  });
  for_lanes(lanes, [&](int lane) { warp.at<uint32_t>(instruction.at[0])[lane] = result[lane]; });
}

template <typename T, auto kJoin>
void reduce(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const T* const given = warp.at<T>(instruction.at[1]);
  T all = given[std::countr_zero(lanes)];
  for_lanes(lanes & (lanes - 1), [&](int lane) { all = kJoin(all, given[lane]); });
  for_lanes(lanes, [&](int lane) { warp.at<T>(instruction.at[0])[lane] = all; });
}

const std::map<std::string, Function>& reductions() {
  using U = uint32_t;
  using I = int32_t;
  static const std::map<std::string, Function> all = {
      {"redux.sync.add.u32", reduce<U, [](U a, U b) { return a + b; }>},
      {"redux.sync.add.s32", reduce<U, [](U a, U b) { return a + b; }>},
      {"redux.sync.min.u32", reduce<U, [](U a, U b) { return std::min(a, b); }>},
      {"redux.sync.max.u32", reduce<U, [](U a, U b) { return std::max(a, b); }>},
      {"redux.sync.min.s32", reduce<I, [](I a, I b) { return std::min(a, b); }>},
      {"redux.sync.max.s32", reduce<I, [](I a, I b) { return std::max(a, b); }>},
      {"redux.sync.and.b32", reduce<U, [](U a, U b) { return a & b; }>},
      {"redux.sync.or.b32", reduce<U, [](U a, U b) { return a | b; }>},
      {"redux.sync.xor.b32", reduce<U, [](U a, U b) { return a ^ b; }>},
  };
  return all;
}

bool decode_shuffle(const Statement& statement, Decoder& decoder, Instruction& to) {
  static const std::map<std::string, Function> all = {{"shfl.sync.up.b32", shuffle<Shuffle::kUp>},
                                                      {"shfl.sync.down.b32", shuffle<Shuffle::kDown>},
                                                      {"shfl.sync.bfly.b32", shuffle<Shuffle::kButterfly>},
                                                      {"shfl.sync.idx.b32", shuffle<Shuffle::kIndex>}};
  const auto found = all.find(statement.opcode);
  if (found == all.end()) return false;
  const auto& operands = statement.operands;
  const auto& results = operands.at(0).items;
  to.count = static_cast<uint8_t>(results.size());
  to.at[0] = decoder.result(results[0], 4);
  if (to.count == 2) to.at[1] = decoder.result(results[1], 0);
  for (size_t i = 1; i < 4; ++i) to.at[1 + i] = decoder.source(operands.at(i).items[0], 4);
  to.mask = decoder.source(operands.at(4).items[0], 4);
  to.run = found->second;
  return true;
}

}  // namespace

bool decode_collective(const Statement& statement, Decoder& decoder, Instruction& to) {
  const auto& opcode = statement.opcode;
  const auto& operands = statement.operands;
  to.kind = Instruction::kWarp;
  if (decode_shuffle(statement, decoder, to)) return true;
  // Opcode -> function, width of the result, width of the value; 0 is a predicate.
  struct Simple {
    Function run;
    int result, value;
  };
  static const std::map<std::string, Simple> simple = {
      {"vote.sync.any.pred", {vote_any, 0, 0}},
      {"vote.sync.all.pred", {vote_all, 0, 0}},
      {"vote.sync.uni.pred", {vote_uniform, 0, 0}},
      {"vote.sync.ballot.b32", {vote_ballot, 4, 0}},
      {"match.any.sync.b32", {match_any<uint32_t>, 4, 4}},
      {"match.any.sync.b64", {match_any<uint64_t>, 4, 8}},
  };
  const auto found = simple.find(opcode);
  const auto reduction = reductions().find(opcode);
  if (found == simple.end() && reduction == reductions().end()) {
    to.kind = Instruction::kLanewise;
    return false;
  }
  const Simple how = found != simple.end() ? found->second : Simple{reduction->second, 4, 4};
  to.at[0] = decoder.result(operands.at(0).items[0], how.result);
  to.at[1] = decoder.source(operands.at(1).items[0], how.value);
  to.mask = decoder.source(operands.at(2).items[0], 4);
  to.run = how.run;
  return true;
}

}  // namespace pymoe::ptx

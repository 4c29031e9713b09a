// Branches, ends, barriers, and instructions that do nothing here.
#include <algorithm>
#include <set>

#include "cuda_ptx/access.h"

namespace pymoe::ptx {
namespace {

void trap(Warp&, const Instruction&, uint32_t lanes) { throw Fault{std::countr_zero(lanes), "the kernel gives up"}; }

void nothing(Warp&, const Instruction&, uint32_t) {}

// The lanes of a warp have met: accesses that were ordered before any of them are now ordered before all of them, and
// so are the lanes' own accesses.
void pass_warp_barrier(Warp& warp, const Instruction&, uint32_t lanes) {
  ++warp.barriers;
  std::array<uint32_t, kWarpSize> all{};
  if (lanes != ~0u) {
    for_lanes(lanes, [&](int lane) {
      const auto& known = warp.known[static_cast<size_t>(lane)];
      for (size_t i = 0; i < all.size(); ++i) all[i] = std::max(all[i], known[i]);
    });
  }
  for_lanes(lanes, [&](int lane) { all[static_cast<size_t>(lane)] = warp.barriers; });
  for_lanes(lanes, [&](int lane) { warp.known[static_cast<size_t>(lane)] = all; });
}

// Fences order accesses around barriers and atomics; here memory is always in order. A prefetch changes no value.
bool does_nothing(const std::string& opcode) {
  static const std::set<std::string> all = {
      "membar.cta",   "membar.gl", "membar.sys", "griddepcontrol.wait", "griddepcontrol.launch_dependents",
      "nanosleep.u32"};
  return all.contains(opcode) || opcode.starts_with("fence.acq_rel.") || opcode.starts_with("fence.sc.") ||
         opcode.starts_with("prefetch.global.");
}

}  // namespace

bool decode_control(const Statement& statement, Decoder& decoder, Instruction& to) {
  const auto& opcode = statement.opcode;
  if (opcode == "bra" || opcode == "bra.uni") {
    to.kind = Instruction::kBranch;
    to.target = decoder.label(statement.operands.at(0).items[0]);
  } else if (opcode == "brx.idx" || opcode == "brx.idx.uni") {
    to.kind = Instruction::kIndexedBranch;
    to.at[0] = decoder.source(statement.operands.at(0).items[0], 4);
    const auto& tables = decoder.program().kernel.tables;
    const auto table = tables.find(statement.operands.at(1).items[0]);
    if (table == tables.end()) throw Error("unknown table");
    for (const auto& label : table->second) to.targets.push_back(decoder.label(label));
  } else if (opcode == "ret" || opcode == "exit") {
    to.kind = Instruction::kExit;
  } else if (opcode == "trap") {
    to.run = trap;
  } else if (opcode == "bar.warp.sync") {
    to.kind = Instruction::kWarp;
    to.mask = decoder.source(statement.operands.at(0).items[0], 4);
    to.run = pass_warp_barrier;
  } else if (opcode == "bar.sync" || opcode == "barrier.sync" || opcode == "barrier.sync.aligned" ||
             opcode == "barrier.cta.sync.aligned") {
    if (statement.operands.size() != 1 || statement.operands[0].items[0] != "0") return false;
    to.kind = Instruction::kBlock;
  } else if (opcode.starts_with("barrier.cluster.arrive")) {
    to.kind = Instruction::kClusterArrive;
  } else if (opcode.starts_with("barrier.cluster.wait")) {
    to.kind = Instruction::kClusterWait;
  } else if (does_nothing(opcode)) {
    to.run = nothing;
  } else {
    return false;
  }
  return true;
}

}  // namespace pymoe::ptx

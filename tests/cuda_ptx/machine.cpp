#include "cuda_ptx/machine.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace pymoe::ptx {
namespace {

// maximum number for the warps of a block; a block with more counts as one that never ends
constexpr int64_t kMostInstructions = int64_t{1} << 31;
constexpr int32_t kNowhere = INT32_MAX;

// What an operand without a register holds.
uint64_t special_value(Special what, const Warp& warp, int lane) {
  const Launch& launch = warp.launch();
  const auto ranks = static_cast<uint64_t>(launch.shape.cluster);
  const auto bit = uint64_t{1} << lane;
  switch (what) {
    case Special::kThread: return static_cast<uint64_t>(warp.index * kWarpSize + lane);
    case Special::kThreads: return static_cast<uint64_t>(launch.shape.threads);
    case Special::kBlock: return static_cast<uint64_t>(warp.block->index);
    case Special::kBlocks: return static_cast<uint64_t>(launch.shape.blocks);
    case Special::kLane: return static_cast<uint64_t>(lane);
    case Special::kWarp: return static_cast<uint64_t>(warp.index);
    case Special::kLanesBelow: return bit - 1;
    case Special::kLanesUpTo: return bit | (bit - 1);
    case Special::kLanesAbove: return ~(bit | (bit - 1)) & 0xffffffffu;
    case Special::kLanesFrom: return ~(bit - 1) & 0xffffffffu;
    case Special::kLaneBit: return bit;
    case Special::kRank: return static_cast<uint64_t>(warp.block->index) % ranks;
    case Special::kRanks: return ranks;
    default: return static_cast<uint64_t>(launch.shape.shared_bytes);
  }
}

void fill_lanes(Warp& warp, uint32_t place, int width, int lane, uint64_t bits) {
  std::memcpy(warp.registers + place + static_cast<size_t>(lane * width), &bits, static_cast<size_t>(width));
}

void fill_registers(Warp& warp) {
  const Program& program = warp.launch().program;
  for (const uint32_t place : program.registers) warp.lanes_set(place) = 0;
  for (const auto& constant : program.constants) {
    if (constant.width == 0) warp.predicate(constant.place) = static_cast<uint32_t>(constant.bits);
    for (int lane = 0; lane < kWarpSize; ++lane) fill_lanes(warp, constant.place, constant.width, lane, constant.bits);
  }
  for (const auto& [place, what] : program.specials) {
    for (int lane = 0; lane < kWarpSize; ++lane) fill_lanes(warp, place, 4, lane, special_value(what, warp, lane));
  }
}

void require_set(const Warp& warp, uint32_t place, uint32_t lanes) {
  const uint32_t missing = lanes & ~warp.lanes_set(place);
  if (missing != 0) throw Fault{std::countr_zero(missing), "a register that the thread has not set"};
}

// Runs an instruction for lanes, which must have set the registers that it reads.
void run_for(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  for (const uint32_t place : instruction.reads) require_set(warp, place, lanes);
  instruction.run(warp, instruction, lanes);
  for (const uint32_t place : instruction.writes) warp.lanes_set(place) |= lanes;
}

std::string lanes_of(uint32_t lanes) {
  if (lanes == ~0u) return "all lanes";
  std::string text = "lanes";
  for_lanes(lanes, [&](int lane) { text += " " + std::to_string(lane); });
  return text;
}

// Runs the blocks of a grid.
class Grid {
 public:
  explicit Grid(Launch& launch) : launch_(launch), code_(launch.program.code) {}

  void run() {
    // Some blocks run at a time; the next one is any of the remaining ones.
    const int64_t all = launch_.shape.blocks / launch_.shape.cluster, ends = launch_.shape.ends;
    const int64_t clusters = ends > 0 && 2 * ends < all ? 2 * ends : all;
    const int64_t first = random(clusters);
    int64_t stride = random(clusters) | 1;
    while (std::gcd(stride, clusters) != 1) stride += 2;
    const size_t window = clusters > 1000 ? 1 : static_cast<size_t>(1 + random(3));
    for (int64_t next = 0; next < clusters || !live_.empty();) {
      while (next < clusters && live_.size() < window) {
        const auto number = static_cast<int64_t>((static_cast<__int128>(next) * stride + first) % clusters);
        start(number < clusters / 2 ? number : all - clusters + number);
        ++next;
      }
      const auto turn = live_.begin() + random(static_cast<int64_t>(live_.size()));
      if (!advance(*turn)) live_.erase(turn);
    }
  }

 private:
  using Cluster = std::vector<std::unique_ptr<Block>>;

  int64_t random(int64_t below) {
    return static_cast<int64_t>(launch_.random() % static_cast<uint64_t>(std::max<int64_t>(below, 1)));
  }

  void start(int64_t number) {
    const int64_t size = launch_.shape.cluster;
    Cluster cluster;
    for (int64_t rank = 0; rank < size; ++rank) {
      cluster.push_back(std::make_unique<Block>(launch_, number * size + rank));
    }
    for (auto& block : cluster) {
      for (auto& other : cluster) block->cluster.push_back(other.get());
    }
    live_.push_back(std::move(cluster));
    // In a large grid most blocks run their warps in step, which saves time.
    apart_ = random(launch_.shape.blocks > 256 ? 8 : 2) == 0;
  }

  // Runs a few turns of warps; returns false when all have ended.
  bool advance(Cluster& cluster) {
    for (int turns = 0; turns < 64; ++turns) {
      Warp* const warp = choose(cluster);
      if (warp == nullptr) return false;
      const auto length = static_cast<int>(1 + random(int64_t{1} << (4 + random(8))));
      try {
        run(*warp, length);
      } catch (const Fault& fault) {
        fail(*warp, fault.lane, fault.what);
      } catch (const Error& error) {
        fail(*warp, -1, error.what());
      }
    }
    return true;
  }

  // Returns a warp that can continue; nullptr if all have ended.
  Warp* choose(Cluster& cluster) {
    std::vector<Warp*>& ready = ready_;
    ready.clear();
    bool alive = false;
    Warp* stuck = nullptr;
    for (auto& block : cluster) {
      bool of_block = false;
      for (auto& warp : block->warps) {
        of_block = of_block || warp.alive != 0;
        if ((warp.alive & ~warp.waiting) != 0) ready.push_back(&warp);
        if (warp.waiting != 0) stuck = &warp;
      }
      block->ended = !of_block;
      alive = alive || of_block;
    }
    if (!ready.empty()) return ready[static_cast<size_t>(random(static_cast<int64_t>(ready.size())))];
    if (alive) {
      const int lane = std::countr_zero(stuck->waiting);
      stuck->current = &code_[static_cast<size_t>(stuck->place[static_cast<size_t>(lane)])];
      fail(*stuck, lane,
           "threads wait here for others that do not come (of this warp " + lanes_of(stuck->waiting) + " wait, and " +
               lanes_of(stuck->alive) + " have not ended)");
    }
    return nullptr;
  }

  [[noreturn]] void fail(const Warp& warp, int lane, const std::string& what) const {
    const Statement& statement = *warp.current->statement;
    std::string where = "block " + std::to_string(warp.block->index);
    where +=
        lane < 0 ? ", warp " + std::to_string(warp.index) : ", thread " + std::to_string(warp.index * kWarpSize + lane);
    throw Error(launch_.program.kernel.name + ": " + what + " [" + where + ", line " + std::to_string(statement.line) +
                ": " + statement.text + "]");
  }

  // Chooses the lanes of a warp that run first.
  uint32_t choose_turn(uint32_t ready) {
    if (!apart_ || random(2) == 0) return ready;
    const auto some = ready & static_cast<uint32_t>(launch_.random());
    return some != 0 ? some : ready;
  }

  // Runs about `budget` instructions of a warp, or until none of its lanes can continue.
  void run(Warp& warp, int budget) {
    while (budget > 0) {
      const uint32_t ready = warp.alive & ~warp.waiting;
      if (ready == 0) return;
      if ((warp.turn & ready) == 0) warp.turn = choose_turn(ready);
      // The lanes that are furthest behind run until they reach the next ones.
      int32_t place = kNowhere, next = kNowhere;
      uint32_t group = 0;
      for_lanes(ready & warp.turn, [&](int lane) {
        const int32_t at = warp.place[static_cast<size_t>(lane)];
        if (at < place) next = place, place = at, group = 0;
        if (at == place) {
          group |= 1u << lane;
        } else if (at < next) {
          next = at;
        }
      });
      const int before = budget;
      run_group(warp, group, place, next, budget);
      launch_.executed += before - budget;
      if (launch_.executed > kMostInstructions * launch_.shape.blocks) fail(warp, -1, "the kernel does not end");
    }
  }

  void run_group(Warp& warp, uint32_t group, int32_t place, int32_t next, int& budget) {
    while (place < next && budget-- > 0) {
      const Instruction& instruction = code_[static_cast<size_t>(place)];
      warp.current = &instruction;
      uint32_t lanes = group;
      if (instruction.guard != 0) {
        require_set(warp, instruction.guard, group);
        const uint32_t bits = warp.predicate(instruction.guard);
        lanes &= instruction.negated ? ~bits : bits;
      }
      if (instruction.kind == Instruction::kLanewise) {
        if (lanes != 0) run_for(warp, instruction, lanes);
        ++place;
        continue;
      }
      if (lanes == 0) {
        ++place;
        continue;
      }
      if (instruction.kind == Instruction::kBranch && lanes == group) {
        place = instruction.target;
        continue;
      }
      // Some go another way, or stop.
      move(warp, group, place + 1);
      switch (instruction.kind) {
        case Instruction::kBranch: move(warp, lanes, instruction.target); return;
        case Instruction::kIndexedBranch:
          for_lanes(lanes, [&](int lane) {
            require_set(warp, instruction.at[0], 1u << lane);
            const uint32_t index = warp.at<uint32_t>(instruction.at[0])[lane];
            if (index >= instruction.targets.size()) throw Fault{lane, "a branch past the end of its table"};
            warp.place[static_cast<size_t>(lane)] = instruction.targets[index];
          });
          return;
        case Instruction::kExit: warp.alive &= ~lanes; return;
        case Instruction::kClusterArrive: warp.block->arrived += std::popcount(lanes); return;
        default:
          move(warp, lanes, place);
          warp.waiting |= lanes;
          meet(warp, instruction, lanes, place);
          return;
      }
    }
    move(warp, group, place);
  }

  static void move(Warp& warp, uint32_t lanes, int32_t place) {
    for_lanes(lanes, [&](int lane) { warp.place[static_cast<size_t>(lane)] = place; });
  }

  static uint32_t waiting_at(const Warp& warp, int32_t place) {
    uint32_t here = 0;
    for_lanes(warp.waiting,
              [&](int lane) { here |= static_cast<uint32_t>(warp.place[static_cast<size_t>(lane)] == place) << lane; });
    return here;
  }

  // Called when `lanes` have reached a collective or barrier, which takes place if all lanes that it needs have
  // arrived.
  void meet(Warp& warp, const Instruction& instruction, uint32_t lanes, int32_t place) {
    const int first = std::countr_zero(lanes);
    if (instruction.kind == Instruction::kBlock) {
      meet_block(*warp.block, first, place);
    } else if (instruction.kind == Instruction::kClusterWait) {
      meet_cluster(*warp.block);
    } else if (instruction.kind == Instruction::kAlignedWarp) {
      if (warp.alive != ~0u) throw Fault{first, "a collective of the whole warp, of which lanes ended before"};
      if (waiting_at(warp, place) == ~0u) happen(warp, instruction, ~0u, place);
    } else {
      meet_named(warp, instruction, lanes, place);
    }
  }

  // Each lane has a mask of the lanes that it meets; lanes with different masks do not meet.
  void meet_named(Warp& warp, const Instruction& instruction, uint32_t lanes, int32_t place) {
    const uint32_t* const masks = warp.at<uint32_t>(instruction.mask);
    for (const uint32_t read : instruction.reads) require_set(warp, read, lanes);
    for_lanes(lanes, [&](int lane) {
      if ((masks[lane] >> lane & 1) == 0) throw Fault{lane, "a lane that its own mask does not name"};
    });
    while (lanes != 0) {
      const int first = std::countr_zero(lanes);
      const uint32_t needed = masks[first];
      if (const uint32_t ended = needed & ~warp.alive; ended != 0) {
        throw Fault{first, "a collective of " + lanes_of(ended) + ", which ended before"};
      }
      uint32_t same = 0;
      for_lanes(waiting_at(warp, place),
                [&](int lane) { same |= static_cast<uint32_t>(masks[lane] == needed) << lane; });
      if ((same & needed) == needed) happen(warp, instruction, needed, place);
      lanes &= ~same;
    }
  }

  void happen(Warp& warp, const Instruction& instruction, uint32_t lanes, int32_t place) {
    run_for(warp, instruction, lanes);
    warp.waiting &= ~lanes;
    move(warp, lanes, place + 1);
  }

  // Handles a barrier of all threads of the block, none of which may have ended.
  void meet_block(Block& block, int lane, int32_t place) {
    bool all_there = true;
    for (const Warp& warp : block.warps) {
      if (warp.alive != warp.all) {
        throw Fault{lane, "a barrier of the block, of which warp " + std::to_string(warp.index) + " has " +
                              lanes_of(warp.all & ~warp.alive) + " that ended before"};
      }
      all_there = all_there && waiting_at(warp, place) == warp.all;
    }
    if (!all_there) return;
    ++block.barriers;
    for (Warp& warp : block.warps) {
      warp.waiting = 0;
      move(warp, warp.alive, place + 1);
    }
  }

  void meet_cluster(Block& block) {
    int threads = 0, arrived = 0;
    bool waiting = true;
    for (const Block* one : block.cluster) {
      for (const Warp& warp : one->warps) {
        threads += std::popcount(warp.alive);
        for_lanes(warp.alive, [&](int lane) {
          const auto kind = code_[static_cast<size_t>(warp.place[static_cast<size_t>(lane)])].kind;
          waiting = waiting && (warp.waiting >> lane & 1) != 0 && kind == Instruction::kClusterWait;
        });
      }
      arrived += one->arrived;
    }
    if (!waiting) return;
    if (arrived != threads) throw Error("the cluster's barrier was awaited by threads that had not arrived");
    for (Block* one : block.cluster) {
      one->arrived = 0;
      ++one->barriers;
      for (Warp& warp : one->warps) {
        warp.waiting = 0;
        for_lanes(warp.alive, [&](int lane) { ++warp.place[static_cast<size_t>(lane)]; });
      }
    }
  }

  Launch& launch_;
  const std::vector<Instruction>& code_;
  std::vector<Cluster> live_;
  std::vector<Warp*> ready_;
  bool apart_ = false;
};

}  // namespace

Block::Block(Launch& launch, int64_t index)
    : launch(&launch),
      index(index),
      shared(launch.program.dynamic_begin + launch.shape.shared_bytes, launch.random()),
      registers(static_cast<size_t>((launch.shape.threads + kWarpSize - 1) / kWarpSize) * launch.program.register_bytes,
                kPoison),
      warps(static_cast<size_t>((launch.shape.threads + kWarpSize - 1) / kWarpSize)) {
  for (size_t i = 0; i < warps.size(); ++i) {
    Warp& warp = warps[i];
    warp.block = this;
    warp.index = static_cast<int>(i);
    warp.registers = registers.data() + i * launch.program.register_bytes;
    const int there = launch.shape.threads - warp.index * kWarpSize;
    warp.alive = warp.all = there >= kWarpSize ? ~0u : (1u << there) - 1;
    fill_registers(warp);
  }
}

int64_t run(const Program& program, const LaunchShape& shape, std::vector<unsigned char> arguments, uint64_t seed) {
  if (shape.blocks <= 0 || shape.threads <= 0 || shape.threads > program.kernel.most_threads ||
      shape.blocks % shape.cluster != 0) {
    throw Error(program.kernel.name + ": cannot be launched with " + std::to_string(shape.blocks) + " blocks of " +
                std::to_string(shape.threads) + " threads");
  }
  if (const int64_t shared = program.static_shared + shape.shared_bytes;
      shared > (shape.more_shared ? kMostShared : kUsualShared)) {
    throw Error(program.kernel.name + ": cannot be launched with " + std::to_string(shared) +
                " bytes of shared memory, of which " + std::to_string(program.static_shared) + " are static");
  }
  Launch launch{program,
                shape,
                std::move(arguments),
                std::mt19937_64(seed),
                std::vector<LaunchMemory::Recent>(program.code.size()),
                {}};
  Grid(launch).run();
  return launch.executed;
}

}  // namespace pymoe::ptx

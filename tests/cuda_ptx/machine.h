// Runs a kernel: every thread has its own place in the code, and a seed decides which thread continues.
//
// Threads of a warp that are at the same instruction run together or separately: at random, a part of a warp runs ahead
// until it reaches a collective. Warps of a block take turns of random length, blocks become live in random order. So a
// kernel cannot rely on an order that CUDA does not promise: of lanes without bar.warp.sync, of warps between barriers,
// or of blocks. (Conflicts in memory are found whatever the order: history.h.)
//
// Errors name the instruction and the thread: an access outside of registered memory, not aligned to its size, or to
// bytes that nothing has written; a conflict in shared or global memory; a read through the read-only cache of memory
// that the launch writes; a register that was not set; a barrier or collective that not all threads reach; a wait that
// never ends; an unknown instruction; a launch that a GPU would refuse.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda_ptx/decode.h"
#include "cuda_ptx/launch_memory.h"
#include "cuda_ptx/shared.h"

namespace pymoe::ptx {

inline constexpr int kWarpSize = 32;
// Limits of a block's shared memory: the usual one, and the maximum if the kernel's attribute allows more. The maximum
// is that of the GPUs with the least (compute capability 8.6, 8.9, 12.0), which run the same PTX as others.
inline constexpr int64_t kUsualShared = 48 << 10, kMostShared = 99 << 10;

struct LaunchShape {
  int64_t blocks = 1;
  int threads = 1;
  int64_t shared_bytes = 0;  // dynamic
  int64_t cluster = 1;       // blocks a cluster
  bool more_shared = false;  // whether it may have more than kUsualShared
  int64_t ends = 0;          // number of clusters that run at each end of the grid; 0: all run
};

struct Block;
struct Launch;

// A copy that cp.async has begun.
struct AsyncCopy {
  uint64_t shared, global;
  int bytes, read;  // what is not read becomes zero
};

// A fault of one lane; the machine says where.
struct Fault {
  int lane;
  std::string what;
};

struct Warp {
  Block* block = nullptr;
  int index = 0;  // in the block
  unsigned char* registers = nullptr;
  uint32_t all = 0;      // lanes that the launch asked for
  uint32_t alive = 0;    // lanes that have not ended
  uint32_t waiting = 0;  // lanes at a collective or barrier
  uint32_t turn = 0;     // lanes that may run before the others of the warp
  // number of bar.warp.sync that lanes of the warp have passed
  uint32_t barriers = 0;
  std::array<std::array<uint32_t, kWarpSize>, kWarpSize> known{};  // Moment::known of each lane
  std::array<int32_t, kWarpSize> place{};
  const Instruction* current = nullptr;
  std::array<std::vector<std::vector<AsyncCopy>>, kWarpSize>
      copies;  // for each lane: its committed groups of copies, and last the open one

  template <typename T>
  T* at(uint32_t offset) const {
    return reinterpret_cast<T*>(registers + offset);
  }
  uint32_t& predicate(uint32_t offset) const { return *at<uint32_t>(offset); }
  uint32_t& lanes_set(uint32_t offset) const { return *at<uint32_t>(offset - 8); }  // of a register
  Moment moment(int lane) const;
  Launch& launch() const;
};

struct Block {
  Launch* launch = nullptr;
  int64_t index = 0;
  uint32_t barriers = 0;
  SharedMemory shared;
  std::vector<unsigned char> registers;
  std::vector<Warp> warps;
  std::vector<Block*> cluster;  // by rank; itself alone, usually
  int arrived = 0;              // threads at the cluster's barrier
  bool ended = false;

  Block(Launch& launch, int64_t index);
};

struct Launch {
  const Program& program;
  LaunchShape shape;
  std::vector<unsigned char> parameters;
  std::mt19937_64 random;
  std::vector<LaunchMemory::Recent> recent;  // of each instruction
  LaunchMemory memory;
  int64_t executed = 0;
};

inline Launch& Warp::launch() const { return *block->launch; }
inline Moment Warp::moment(int lane) const {
  return {static_cast<uint32_t>(block->index),
          static_cast<uint32_t>(index),
          static_cast<uint32_t>(lane),
          block->barriers,
          barriers,
          known[static_cast<size_t>(lane)].data()};
}

// Calls f(lane) for the lanes of a mask.
template <typename F>
inline void for_lanes(uint32_t lanes, F&& f) {
  if (lanes == ~0u) {
    for (int lane = 0; lane < kWarpSize; ++lane) f(lane);
  } else {
    for (; lanes != 0; lanes &= lanes - 1) f(std::countr_zero(lanes));
  }
}

// Runs the whole grid. `arguments` are the bytes of the kernel's parameters. Returns the number of instructions that
// warps have executed. Throws Error.
int64_t run(const Program& program, const LaunchShape& shape, std::vector<unsigned char> arguments, uint64_t seed);

}  // namespace pymoe::ptx

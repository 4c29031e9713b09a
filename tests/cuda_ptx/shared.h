// The shared memory of a block: which bytes have been written, by whom, and whether an access is ordered after those of
// other threads.
//
// CUDA orders accesses of different threads by barriers alone: those of the block (and the cluster) for all threads,
// bar.warp.sync for the lanes of a warp. Shuffles and votes order nothing. An access that conflicts with another one
// that no barrier separates from it is an error, whatever values came out.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda_ptx/module.h"

namespace pymoe::ptx {

// Identifies the thread of an access and the number of barriers it has passed.
struct Moment {
  uint16_t thread;    // of the block
  uint16_t in_warp;   // bar.warp.sync, of its warp; only ever compared for equality
  uint32_t in_block;  // barriers of the block
};

class SharedMemory {
 public:
  // Addresses begin here, so that one that was forgotten, 0, is outside.
  static constexpr uint64_t kBegin = 1024;
  // Bits of a generic address that points into this memory.
  static constexpr uint64_t kWindow = uint64_t{1} << 56;
  // Bits of an address that name a block of the cluster: its rank plus one, or 0 for the block's own memory.
  static constexpr int kRankShift = 24;
  static constexpr uint64_t kPlace = (uint64_t{1} << kRankShift) - 1, kRank = 0xff;

  // The `thread` of a Moment that is a thread of another block of the cluster: of it no more is known.
  static constexpr uint16_t kOutsider = 0xfffe;

  // Filled with bytes that depend on `junk`.
  SharedMemory(int64_t bytes, uint64_t junk);

  // Each checks bounds, and throws Error. With `written` false bytes may be read that never were.
  unsigned char* read(uint64_t address, int bytes, const Moment& now, bool written = true);
  unsigned char* write(uint64_t address, int bytes, const Moment& now);
  unsigned char* update(uint64_t address, int bytes, const Moment& now);  // atomically
  // cp.async: nobody may touch the bytes until the thread that copies has waited for them.
  void begin_copy(uint64_t address, int bytes, const Moment& now);
  unsigned char* end_copy(uint64_t address, int bytes, const Moment& now);

 private:
  enum State : unsigned char { kUnwritten, kWritten, kCopying };
  // A set of threads that made accesses of a kind since the last barrier of the block: none, one, several of a warp, or
  // more.
  struct Accessors {
    uint16_t who = kNobody, in_warp = 0;
    uint32_t in_block = 0;
  };
  static constexpr uint16_t kNobody = 0xffff, kEverybody = kOutsider, kWarpOf = 0x8000;
  static constexpr int kGranule = 2;  // bytes that have one history; what is smaller is not searched for races
  struct History {
    Accessors writers, readers, updaters;
  };

  unsigned char* checked(uint64_t address, int bytes);
  void require(State state, uint64_t offset, int bytes, const char* what) const;
  static bool ordered(const Accessors& before, const Moment& now);
  static void join(Accessors& all, const Moment& now);
  template <typename F>
  void for_granules(uint64_t address, int bytes, F&& f);

  std::vector<unsigned char> bytes_;
  std::vector<State> states_;
  std::vector<History> histories_;
};

}  // namespace pymoe::ptx

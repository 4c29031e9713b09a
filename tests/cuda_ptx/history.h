// Records which threads have accessed a piece of memory in a launch, and whether an access is ordered after those of
// other threads.
//
// Only barriers order accesses of different threads of a launch: barriers of the block (and the cluster) for all its
// threads, bar.warp.sync for the lanes that it names. Shuffles, votes and the order of blocks order nothing. (Fences
// with flags could; kernels here have none, so loads and stores that would need them are unknown instructions.) Two
// accesses that no barrier separates are an error if one of them writes, even if all values are right, unless both are
// atomic. Memory that is read through the read-only cache must not be written in the launch at all.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pymoe::ptx {

enum class Purpose { kRead, kConstantRead, kWrite, kUpdate };  // kConstantRead: through the read-only cache

// The thread of an access, and the accesses that are ordered before it.
struct Moment {
  static constexpr uint32_t kSeveral = 127;  // value of `warp` that stands for threads of another block of the cluster

  uint32_t block, warp, lane;
  uint32_t in_block;  // barriers that the block has passed
  uint32_t in_warp;   // number of barriers of any lanes of the warp so far
  // for each lane, the number of a barrier: accesses of the lane before it are ordered before this access
  const uint32_t* known;
};

// The threads whose accesses of one kind are not yet ordered before all later accesses by a barrier.
struct Accessors {
  static constexpr uint32_t kBlocks = ~0u;  // several blocks, whose accesses nothing orders

  uint32_t block = 0;
  uint32_t in_block : 24 = 0, warp : 7 = 0;
  uint32_t constant : 1 = 0;  // some came through the read-only cache
  uint32_t in_warp = 0;       // the latest one's
  uint32_t lanes = 0;         // of the warp; 0: nobody

  bool before(const Moment& now) const;
  void join(const Moment& now);
};

// Two conflicting accesses; none if `access` is null.
struct Conflict {
  const char* access = nullptr;  // such as "a read of"
  const char* with = nullptr;    // such as "another thread has written"

  std::string in(const char* memory) const { return std::string(access) + " " + memory + " that " + with; }
};

// Of some bytes that are accessed together.
struct History {
  Accessors writers, readers, updaters;

  Conflict note(Purpose purpose, const Moment& now);
};

// The histories of consecutive bytes, which begin at a multiple of four. Each word has one history until a part of it
// is accessed; then each of its bytes has one.
class Histories {
 public:
  explicit Histories(size_t bytes) : words_((bytes + 3) / 4) {}

  Conflict note(size_t first, int bytes, Purpose purpose, const Moment& now);
  // Returns whether the launch has written this byte.
  bool written(size_t byte) const;

 private:
  // value of `warp` for the writers of a split word, whose `lanes` is an index into split_
  static constexpr uint32_t kSplit = 126;
  std::array<History, 4>& split(History& word);

  std::vector<History> words_;
  std::vector<std::array<History, 4>> split_;
};

}  // namespace pymoe::ptx

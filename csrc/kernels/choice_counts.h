// The number of choices of each expert in each tile of consecutive tokens. The gate counts them while it chooses, and
// build_routing then sorts by them without counting again. Used by the CUDA twins.
#pragma once

#include <cstdint>

namespace pymoe {

struct ChoiceCounts {
  uint16_t* values = nullptr;  // (tiles, stride)
  int64_t tiles = 0;
  int64_t tokens = 0;  // tokens per tile; fewer in the last one
  int64_t stride = 0;  // number of experts rounded up to a multiple of kCountPack; the counts past them are zeros

  static constexpr int64_t kCountPack = 4;  // loaded at once
  // An expert has at most one choice per token: with at most this many tokens every sum of counts fits into 16 bits.
  static constexpr int64_t kMostTokens = 65535;
  static constexpr int64_t kMostExperts = 1024;  // build_routing's shared memory has room for their counters

  int64_t size() const { return tiles * stride; }
};

}  // namespace pymoe

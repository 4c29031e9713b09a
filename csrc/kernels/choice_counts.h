// How many choices each expert has in each tile, some consecutive tokens: what the gate counts while it chooses, and
// what build_routing then sorts by without counting again. Of the CUDA twins.
#pragma once

#include <cstdint>

namespace pymoe {

struct ChoiceCounts {
  uint16_t* values = nullptr;  // (tiles, stride)
  int64_t tiles = 0;
  int64_t tokens = 0;  // a tile; fewer in the last
  int64_t stride = 0;  // the number of experts, rounded up to kCountPack: what lies between are zeroes

  static constexpr int64_t kCountPack = 4;  // that are loaded at once
  // An expert has at most one choice of a token: with so few tokens no sum of counts needs more than 16 bits.
  static constexpr int64_t kMostTokens = 65535;
  static constexpr int64_t kMostExperts = 1024;  // whose counters build_routing keeps in shared memory with them

  int64_t size() const { return tiles * stride; }
};

}  // namespace pymoe

// Assigns rows to the threads of a block. One group of threads works on a row: each thread of the group takes the row's
// packs `lane`, `lane + group`, `lane + 2 * group`, ...
#pragma once

#include <cstdint>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/platform.h"

namespace pymoe::cuda {

inline constexpr int kRowThreads = 256;  // largest number of threads per block

struct RowGroup {
  int threads;  // threads per row: a power of two below a warp, or whole warps
  int rows;     // per block

  int block() const { return threads * rows; }
};

// Returns a group for rows of `packs` packs: a thread for every `share` packs, rounded up to a size that RowGroup
// allows, but at most kRowThreads. Longer rows take as many rounds as with a full block: 896 packs are four rounds of
// 224 threads, instead of three and a half of 256.
inline RowGroup group_for(int64_t packs, int64_t share = 1) {
  const int64_t wanted = ceil_div(packs, share);
  if (wanted <= kWarp) {
    int threads = 1;
    while (threads < wanted) threads *= 2;
    return {threads, kRowThreads / threads};
  }
  const int64_t rounds = ceil_div(wanted, kRowThreads);
  const int threads = static_cast<int>(ceil_div(ceil_div(wanted, rounds), kWarp)) * kWarp;
  return {threads, kRowThreads / threads};
}

}  // namespace pymoe::cuda

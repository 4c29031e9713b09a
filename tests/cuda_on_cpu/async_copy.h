// Emulates csrc/kernels/cuda/async_copy.h. A copy arrives as late as possible: when its thread waits for it. Until then
// its destination holds NaN in every format, which reveals a read that comes too early, and a copy over data that
// others still read.
#pragma once

#include "cuda_on_cpu/device.h"

namespace pymoe::cuda {

inline void copy_async(void* to, const void* from, int bytes, PYMOE_SITE) {
  emulator::begin_copy({static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), bytes}, PYMOE_HERE);
  memset(to, 0xff, emulator::kCopied);
}

inline void commit_copies() { emulator::commit_copies(); }

template <int kPending>
void wait_for_copies() {
  emulator::Copy copy;
  while (emulator::next_copy(kPending, copy)) {
    memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
    memset(copy.to + copy.bytes, 0, static_cast<size_t>(emulator::kCopied - copy.bytes));
  }
}

}  // namespace pymoe::cuda

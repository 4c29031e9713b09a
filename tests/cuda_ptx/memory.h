// The global memory that a kernel may access: registered stretches, and nothing between them.
//
// Memory of the process is used as it is. Memory that was never written is recognised by its contents: the caller that
// registers a stretch fills it with kPoison, and four aligned bytes that all equal kPoison were never written (or were
// copied from such bytes, which is just as wrong).
#pragma once

#include <cstddef>
#include <cstdint>

namespace pymoe::ptx {

inline constexpr unsigned char kPoison = 0xa5;
inline constexpr uint32_t kPoisonWord = 0xa5a5a5a5u;

// These functions may be called from several threads. Stretches must not overlap; adding a stretch of no bytes does
// nothing.
void add_memory(const void* begin, int64_t bytes);
void remove_memory(const void* begin);

struct Stretch {
  uint64_t begin = 0, end = 0;
  bool holds(uint64_t address, uint64_t bytes) const { return address >= begin && address + bytes <= end; }
};
// Returns the stretch that holds these bytes, or an empty one.
Stretch find_memory(uint64_t address, uint64_t bytes);

}  // namespace pymoe::ptx

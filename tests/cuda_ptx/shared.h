// The shared memory of a block: which bytes have been written, and by whom (history.h).
#pragma once

#include <cstdint>
#include <vector>

#include "cuda_ptx/history.h"
#include "cuda_ptx/module.h"

namespace pymoe::ptx {

class SharedMemory {
 public:
  // Addresses begin here, so that a missing address, 0, is out of bounds.
  static constexpr uint64_t kBegin = 1024;
  // Bits of a generic address that points into this memory.
  static constexpr uint64_t kWindow = uint64_t{1} << 56;
  // Bits of an address that name a block of the cluster: its rank plus one, or 0 for the block's own memory.
  static constexpr int kRankShift = 24;
  static constexpr uint64_t kPlace = (uint64_t{1} << kRankShift) - 1, kRank = 0xff;

  // Filled with bytes that depend on `junk`.
  SharedMemory(int64_t bytes, uint64_t junk);

  // Each function checks bounds, and throws Error. If `written` is false, bytes that were never written may be read.
  unsigned char* read(uint64_t address, int bytes, const Moment& now, bool written = true);
  unsigned char* write(uint64_t address, int bytes, const Moment& now);
  unsigned char* update(uint64_t address, int bytes, const Moment& now);  // atomically
  // cp.async: no thread may access the bytes until the copying thread has waited for them.
  void begin_copy(uint64_t address, int bytes, const Moment& now);
  unsigned char* end_copy(uint64_t address, int bytes, const Moment& now);

 private:
  enum State : unsigned char { kUnwritten, kWritten, kCopying };

  unsigned char* checked(uint64_t address, int bytes);
  void require(State state, uint64_t offset, int bytes, const char* what) const;
  void note(uint64_t address, int bytes, Purpose purpose, const Moment& now);

  std::vector<unsigned char> bytes_;
  std::vector<State> states_;
  Histories histories_;
};

}  // namespace pymoe::ptx

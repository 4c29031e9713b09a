#include "cuda_ptx/shared.h"

#include <cstring>

namespace pymoe::ptx {
SharedMemory::SharedMemory(int64_t bytes, uint64_t junk)
    : bytes_(static_cast<size_t>(bytes)),
      states_(static_cast<size_t>(bytes), kUnwritten),
      histories_(static_cast<size_t>((bytes + kGranule - 1) / kGranule)) {
  for (size_t i = 0; i < bytes_.size(); ++i) bytes_[i] = static_cast<unsigned char>((junk += 0x9e3779b97f4a7c15) >> 56);
}

unsigned char* SharedMemory::checked(uint64_t address, int bytes) {
  const uint64_t offset = address - kBegin;
  if (address < kBegin || offset + static_cast<uint64_t>(bytes) > bytes_.size()) {
    throw Error("byte " + std::to_string(static_cast<int64_t>(offset)) + " of shared memory, of which the block has " +
                std::to_string(bytes_.size()));
  }
  return bytes_.data() + offset;
}

void SharedMemory::require(State state, uint64_t offset, int bytes, const char* what) const {
  for (int i = 0; i < bytes; ++i) {
    const State found = states_[offset + static_cast<uint64_t>(i)];
    if (found == state) continue;
    if (found == kCopying)
      throw Error("shared memory that cp.async is still copying to, at byte " + std::to_string(offset));
    if (state == kWritten) throw Error(std::string(what) + " at byte " + std::to_string(offset));
  }
}

bool SharedMemory::ordered(const Accessors& before, const Moment& now) {
  if (before.who == kNobody || before.in_block != now.in_block) return true;
  if (before.who == kEverybody || now.thread == kEverybody) return false;
  if (before.who == now.thread) return true;
  const bool several = (before.who & kWarpOf) != 0;
  const int warp = several ? before.who & ~kWarpOf : before.who / 32;
  return warp == now.thread / 32 && before.in_warp != now.in_warp;
}

void SharedMemory::join(Accessors& all, const Moment& now) {
  if (all.who == kNobody || all.in_block != now.in_block) {
    all = {now.thread, now.in_warp, now.in_block};
  } else if (all.who == kEverybody || now.thread == kEverybody) {
    all.who = kEverybody;
  } else {
    const bool several = (all.who & kWarpOf) != 0;
    const int warp = several ? all.who & ~kWarpOf : all.who / 32;
    if (warp != now.thread / 32) {
      all.who = kEverybody;
    } else if (all.in_warp != now.in_warp) {  // the earlier ones are ordered before whatever this warp does from now on
      all = {now.thread, now.in_warp, now.in_block};
    } else if (all.who != now.thread) {
      all.who = static_cast<uint16_t>(kWarpOf | warp);
    }
  }
}

template <typename F>
void SharedMemory::for_granules(uint64_t address, int bytes, F&& f) {
  const uint64_t first = (address - kBegin) / kGranule;
  for (int i = 0; i < bytes / kGranule; ++i) f(histories_[first + static_cast<uint64_t>(i)]);
}

unsigned char* SharedMemory::read(uint64_t address, int bytes, const Moment& now, bool written) {
  unsigned char* const place = checked(address, bytes);
  require(written ? kWritten : kUnwritten, address - kBegin, bytes, "a read of shared memory that was never written,");
  for_granules(address, bytes, [&](History& history) {
    if (!ordered(history.writers, now) || !ordered(history.updaters, now)) {
      throw Error("a read of shared memory that another thread has written since the last barrier, at byte " +
                  std::to_string(address - kBegin));
    }
    join(history.readers, now);
  });
  return place;
}

unsigned char* SharedMemory::write(uint64_t address, int bytes, const Moment& now) {
  unsigned char* const place = checked(address, bytes);
  require(kUnwritten, address - kBegin, bytes, "");
  for_granules(address, bytes, [&](History& history) {
    if (!ordered(history.writers, now) || !ordered(history.updaters, now) || !ordered(history.readers, now)) {
      throw Error("a write to shared memory that another thread has read or written since the last barrier, at byte " +
                  std::to_string(address - kBegin));
    }
    join(history.writers, now);
  });
  std::memset(states_.data() + (address - kBegin), kWritten, static_cast<size_t>(bytes));
  return place;
}

unsigned char* SharedMemory::update(uint64_t address, int bytes, const Moment& now) {
  unsigned char* const place = checked(address, bytes);
  require(kUnwritten, address - kBegin, bytes, "");  // what was never written stays so, for whoever reads it
  for_granules(address, bytes, [&](History& history) {
    if (!ordered(history.writers, now) || !ordered(history.readers, now)) {
      throw Error(
          "an atomic operation on shared memory that another thread has read or written since the last barrier, "
          "at byte " +
          std::to_string(address - kBegin));
    }
    join(history.updaters, now);
  });
  return place;
}

void SharedMemory::begin_copy(uint64_t address, int bytes, const Moment& now) {
  write(address, bytes, now);
  std::memset(states_.data() + (address - kBegin), kCopying, static_cast<size_t>(bytes));
}

unsigned char* SharedMemory::end_copy(uint64_t address, int bytes, const Moment& now) {
  std::memset(states_.data() + (address - kBegin), kWritten, static_cast<size_t>(bytes));
  for_granules(address, bytes, [&](History& history) { join(history.writers, now); });
  return checked(address, bytes);
}

}  // namespace pymoe::ptx

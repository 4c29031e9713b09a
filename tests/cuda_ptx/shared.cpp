#include "cuda_ptx/shared.h"

#include <cstring>

namespace pymoe::ptx {
SharedMemory::SharedMemory(int64_t bytes, uint64_t junk)
    : bytes_(static_cast<size_t>(bytes)),
      states_(static_cast<size_t>(bytes), kUnwritten),
      histories_(static_cast<size_t>(bytes)) {
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

void SharedMemory::note(uint64_t address, int bytes, Purpose purpose, const Moment& now) {
  const Conflict found = histories_.note(address - kBegin, bytes, purpose, now);
  if (found.access == nullptr) return;
  throw Error(found.in("shared memory") + ", at byte " + std::to_string(address - kBegin));
}

unsigned char* SharedMemory::read(uint64_t address, int bytes, const Moment& now, bool written) {
  unsigned char* const place = checked(address, bytes);
  require(written ? kWritten : kUnwritten, address - kBegin, bytes, "a read of shared memory that was never written,");
  note(address, bytes, Purpose::kRead, now);
  return place;
}

unsigned char* SharedMemory::write(uint64_t address, int bytes, const Moment& now) {
  unsigned char* const place = checked(address, bytes);
  require(kUnwritten, address - kBegin, bytes, "");
  note(address, bytes, Purpose::kWrite, now);
  std::memset(states_.data() + (address - kBegin), kWritten, static_cast<size_t>(bytes));
  return place;
}

unsigned char* SharedMemory::update(uint64_t address, int bytes, const Moment& now) {
  unsigned char* const place = checked(address, bytes);
  // bytes that were never written stay so, whichever thread reads them
  require(kUnwritten, address - kBegin, bytes, "");
  note(address, bytes, Purpose::kUpdate, now);
  return place;
}

void SharedMemory::begin_copy(uint64_t address, int bytes, const Moment& now) {
  write(address, bytes, now);
  std::memset(states_.data() + (address - kBegin), kCopying, static_cast<size_t>(bytes));
}

unsigned char* SharedMemory::end_copy(uint64_t address, int bytes, const Moment& now) {
  std::memset(states_.data() + (address - kBegin), kWritten, static_cast<size_t>(bytes));
  note(address, bytes, Purpose::kWrite, now);
  return checked(address, bytes);
}

}  // namespace pymoe::ptx

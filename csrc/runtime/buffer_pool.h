// BufferPool: memory for batches, kept for later batches after use.
//
// New memory costs a page fault for every 4 KiB, which takes longer than copying 4 KiB. Blocks have at least 256 bytes
// and come in size classes, four for every power of two, so that a larger block exceeds the request by at most a
// quarter.
//
// Bounded   At most most_cached_bytes bytes are kept. If a returned block does not fit, blocks of other sizes are
//           freed, the largest first; if that is not enough, the returned block itself is freed.
// Threads   take and give_back may be called from any thread. Every block must be back before its pool is destroyed.
// Aligned   Every block begins at a multiple of 64 bytes.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace pymoe::runtime {

class BufferPool {
 public:
  struct Statistics {
    int64_t live_blocks;   // number of blocks that are taken and not yet given back
    int64_t cached_bytes;  // bytes in blocks that are kept for later callers
  };

  explicit BufferPool(size_t most_cached_bytes) : most_cached_bytes_(most_cached_bytes) {}
  ~BufferPool() { free_all(make_room(most_cached_bytes_, kClasses)); }
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // Returns a block of at least `bytes` bytes. Throws std::bad_alloc.
  void* take(size_t bytes) {
    const int size_class = class_of(bytes);
    {
      const std::lock_guard lock(mutex_);
      auto& blocks = cached_[static_cast<size_t>(size_class)];
      if (!blocks.empty()) {
        Header* header = blocks.back();
        blocks.pop_back();
        cached_bytes_ -= size_of(size_class);
        ++live_blocks_;
        return header + 1;
      }
    }
    void* memory = std::aligned_alloc(kAlignment, sizeof(Header) + size_of(size_class));
    if (memory == nullptr) throw std::bad_alloc();
    const std::lock_guard lock(mutex_);
    ++live_blocks_;
    return new (memory) Header{size_class} + 1;
  }

  void give_back(void* block) noexcept {
    Header* header = static_cast<Header*>(block) - 1;
    const size_t bytes = size_of(header->size_class);
    // Blocks to free after unlocking, since returning megabytes to the system takes long.
    Header* freed = nullptr;
    {
      const std::lock_guard lock(mutex_);
      --live_blocks_;
      if (bytes <= most_cached_bytes_) freed = make_room(bytes, header->size_class);
      if (cached_bytes_ + bytes > most_cached_bytes_ || !keep(header)) header->next = std::exchange(freed, header);
    }
    free_all(freed);
  }

  // Call these before and after a fork, so that the child finds the lock free and the members consistent.
  void before_fork() { mutex_.lock(); }
  void after_fork() { mutex_.unlock(); }

  Statistics statistics() const {
    const std::lock_guard lock(mutex_);
    return {live_blocks_, static_cast<int64_t>(cached_bytes_)};
  }

 private:
  static constexpr size_t kAlignment = 64;
  static constexpr int kClasses = 4 * (64 - 8) + 1;

  struct alignas(kAlignment) Header {
    int size_class;
    Header* next = nullptr;  // next in the chain of blocks to be freed
  };

  bool keep(Header* header) noexcept {
    try {
      cached_[static_cast<size_t>(header->size_class)].push_back(header);
    } catch (const std::bad_alloc&) {
      return false;
    }
    cached_bytes_ += size_of(header->size_class);
    return true;
  }

  // Removes blocks of classes other than `spared` until `bytes` more bytes fit, or none is left. Returns the removed
  // blocks as a chain, which the caller frees.
  Header* make_room(size_t bytes, int spared) noexcept {
    Header* chain = nullptr;
    for (int i = kClasses - 1; i >= 0 && cached_bytes_ + bytes > most_cached_bytes_; --i) {
      auto& blocks = cached_[static_cast<size_t>(i)];
      while (i != spared && !blocks.empty() && cached_bytes_ + bytes > most_cached_bytes_) {
        blocks.back()->next = std::exchange(chain, blocks.back());
        blocks.pop_back();
        cached_bytes_ -= size_of(i);
      }
    }
    return chain;
  }

  // Returns the size in bytes of the blocks of a class: class 4 p + q has (4 + q) * 2^p units of 64 bytes.
  static size_t size_of(int size_class) {
    return (size_t{4} + static_cast<size_t>(size_class % 4)) << (size_class / 4 + 6);
  }

  static int class_of(size_t bytes) {
    if (bytes > SIZE_MAX / 4) throw std::bad_alloc();
    const size_t units = bytes <= 4 * kAlignment ? 4 : (bytes + kAlignment - 1) / kAlignment;
    const int power = static_cast<int>(std::bit_width(units)) - 3;
    const size_t quarters = (units + (size_t{1} << power) - 1) >> power;  // 4 to 8; 8 means 4 of the next power
    return power * 4 + static_cast<int>(quarters) - 4;
  }

  static void free_all(Header* chain) noexcept {
    while (chain != nullptr) std::free(std::exchange(chain, chain->next));
  }

  const size_t most_cached_bytes_;
  mutable std::mutex mutex_;  // guards the rest
  std::array<std::vector<Header*>, kClasses> cached_;
  size_t cached_bytes_ = 0;
  int64_t live_blocks_ = 0;
};

}  // namespace pymoe::runtime

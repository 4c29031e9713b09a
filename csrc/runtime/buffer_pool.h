// BufferPool: memory for batches, kept for the next batch when one is done with.
//
// Fresh memory costs a page fault for every 4 KiB, which is more than copying 4 KiB. Blocks come in classes of size,
// four for every power of two, so that a block is larger than asked for by a quarter at most.
//
// Bounded   At most most_cached_bytes are kept. What comes back beyond them drives out blocks of other sizes, the
//           largest first, and is freed itself where that is not enough.
// Threads   take and give_back may be called from any thread; a block may be given back after its pool has gone.
// Aligned   Every block begins at a multiple of 64 bytes.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace pymoe::runtime {

class BufferPool {
 public:
  struct Statistics {
    int64_t live_blocks;   // taken and not given back
    int64_t cached_bytes;  // kept, for whoever asks next
  };

  explicit BufferPool(size_t most_cached_bytes) : shared_(std::make_shared<Shared>()) {
    shared_->most_cached_bytes = most_cached_bytes;
  }
  ~BufferPool() {
    Header* evicted;
    {
      const std::lock_guard lock(shared_->mutex);
      shared_->most_cached_bytes = 0;
      evicted = shared_->make_room(0, kClasses);
    }
    destroy_all(evicted);
  }
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // At least `bytes` bytes. Throws std::bad_alloc.
  void* take(size_t bytes) {
    const int size_class = class_of(bytes);
    {
      const std::lock_guard lock(shared_->mutex);
      auto& blocks = shared_->cached[static_cast<size_t>(size_class)];
      if (!blocks.empty()) {
        Header* header = blocks.back();
        blocks.pop_back();
        shared_->cached_bytes -= size_of(size_class);
        ++shared_->live_blocks;
        header->owner = shared_;
        return header + 1;
      }
    }
    void* memory = std::aligned_alloc(kAlignment, sizeof(Header) + size_of(size_class));
    if (memory == nullptr) throw std::bad_alloc();
    Header* header = new (memory) Header{shared_, size_class};
    const std::lock_guard lock(shared_->mutex);
    ++shared_->live_blocks;
    return header + 1;
  }

  static void give_back(void* block) noexcept {
    Header* header = static_cast<Header*>(block) - 1;
    const std::shared_ptr<Shared> shared = std::move(header->owner);
    const size_t bytes = size_of(header->size_class);
    // Freed without the lock: to give megabytes back to the system takes long.
    Header* freed = nullptr;
    bool kept = false;
    {
      const std::lock_guard lock(shared->mutex);
      --shared->live_blocks;
      if (bytes <= shared->most_cached_bytes) {
        freed = shared->make_room(bytes, header->size_class);
        kept = shared->cached_bytes + bytes <= shared->most_cached_bytes && shared->keep(header);
      }
    }
    destroy_all(freed);
    if (!kept) destroy(header);
  }

  // Around a fork, so that the child finds the lock free and everything in order.
  void before_fork() { shared_->mutex.lock(); }
  void after_fork() { shared_->mutex.unlock(); }

  Statistics statistics() const {
    const std::lock_guard lock(shared_->mutex);
    return {shared_->live_blocks, static_cast<int64_t>(shared_->cached_bytes)};
  }

 private:
  static constexpr size_t kAlignment = 64;
  static constexpr int kClasses = 4 * (64 - 8) + 1;

  struct Shared;
  struct alignas(kAlignment) Header {
    std::shared_ptr<Shared> owner;  // null while cached: the pool may go then
    int size_class;
    Header* next = nullptr;  // of those that are to be freed
  };

  struct Shared {
    std::mutex mutex;  // guards everything
    std::array<std::vector<Header*>, kClasses> cached;
    size_t most_cached_bytes = 0;
    size_t cached_bytes = 0;
    int64_t live_blocks = 0;

    bool keep(Header* header) noexcept {
      try {
        cached[static_cast<size_t>(header->size_class)].push_back(header);
      } catch (const std::bad_alloc&) {
        return false;
      }
      cached_bytes += size_of(header->size_class);
      return true;
    }

    // Takes out blocks of classes other than `spared` until `bytes` more fit; the caller frees the chain of them.
    Header* make_room(size_t bytes, int spared) noexcept {
      Header* chain = nullptr;
      for (int i = kClasses - 1; i >= 0 && cached_bytes + bytes > most_cached_bytes; --i) {
        auto& blocks = cached[static_cast<size_t>(i)];
        while (i != spared && !blocks.empty() && cached_bytes + bytes > most_cached_bytes) {
          blocks.back()->next = std::exchange(chain, blocks.back());
          blocks.pop_back();
          cached_bytes -= size_of(i);
        }
      }
      return chain;
    }
  };

  // Class 4 p + q holds (4 + q) 2^p units of 64 bytes.
  static size_t size_of(int size_class) {
    return (size_t{4} + static_cast<size_t>(size_class % 4)) << (size_class / 4 + 6);
  }

  static int class_of(size_t bytes) {
    if (bytes > SIZE_MAX / 4) throw std::bad_alloc();
    const size_t units = bytes <= 4 * kAlignment ? 4 : (bytes + kAlignment - 1) / kAlignment;
    const int power = static_cast<int>(std::bit_width(units)) - 3;
    const size_t quarters = (units + (size_t{1} << power) - 1) >> power;  // 4 to 8, and 8 is the next power's 4
    return power * 4 + static_cast<int>(quarters) - 4;
  }

  static void destroy(Header* header) noexcept {
    header->~Header();
    std::free(header);
  }

  static void destroy_all(Header* chain) noexcept {
    while (chain != nullptr) destroy(std::exchange(chain, chain->next));
  }

  const std::shared_ptr<Shared> shared_;
};

}  // namespace pymoe::runtime

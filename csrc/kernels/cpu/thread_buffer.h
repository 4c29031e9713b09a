// Scratch memory of a thread, kept between calls: fresh memory costs a page fault every 4 KiB, and huge pages spare
// the packed panels most of their TLB misses.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace pymoe::cpu {

class ThreadBuffer {
 public:
  ThreadBuffer() = default;
  ThreadBuffer(const ThreadBuffer&) = delete;
  ThreadBuffer& operator=(const ThreadBuffer&) = delete;
  ~ThreadBuffer() { std::free(data_); }

  // At least `bytes` bytes, aligned to a cache line; what they held before is lost when the buffer grows.
  void* reserve(int64_t bytes) {
    if (bytes > capacity_) {
      std::free(data_);
      data_ = nullptr;
      const int64_t rounded = (bytes + kHugePage - 1) / kHugePage * kHugePage;
      capacity_ = 0;
      data_ = std::aligned_alloc(static_cast<size_t>(kHugePage), static_cast<size_t>(rounded));
      if (data_ == nullptr) throw std::bad_alloc();
      capacity_ = rounded;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
      madvise(data_, static_cast<size_t>(rounded), MADV_HUGEPAGE);
#endif
    }
    return data_;
  }

 private:
  static constexpr int64_t kHugePage = int64_t{2} << 20;
  void* data_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace pymoe::cpu

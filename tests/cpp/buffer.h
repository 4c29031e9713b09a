// Buffer<T>: an array for a kernel that reveals writes outside its bounds.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace pymoe::test {

// The PTX interpreter (tests/cuda_ptx) lets kernels touch only memory that was registered with it.
#if defined(PYMOE_WATCHED_MEMORY)
void watch_memory(const void* begin, int64_t bytes);
void unwatch_memory(const void* begin);
#else
inline void watch_memory(const void*, int64_t) {}
inline void unwatch_memory(const void*) {}
#endif

// Holds `count` elements at the end of a heap block, so that a sanitizer sees the first byte past them. They begin
// `shift` elements off 16-byte alignment and are filled with an arbitrary pattern. Without a sanitizer, intact() tells
// whether the bands before and after them are unchanged.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t count, int64_t shift = 0)
      : count_(count),
        lead_(kLead + shift * static_cast<int64_t>(sizeof(T))),
        bytes_(lead_ + count * static_cast<int64_t>(sizeof(T)) + kTrail),
        storage_(static_cast<unsigned char*>(std::malloc(static_cast<size_t>(bytes_)))) {
    memset(storage_.get(), kPattern, static_cast<size_t>(bytes_));
    storage_.get_deleter().watched = data();
    watch_memory(data(), count * static_cast<int64_t>(sizeof(T)));
  }

  T* data() { return reinterpret_cast<T*>(storage_.get() + lead_); }
  const T* data() const { return reinterpret_cast<const T*>(storage_.get() + lead_); }
  int64_t size() const { return count_; }
  T& operator[](int64_t i) { return data()[i]; }
  const T& operator[](int64_t i) const { return data()[i]; }
  T* begin() { return data(); }
  T* end() { return data() + count_; }

  bool intact() const {
    const auto* bytes = storage_.get();
    for (int64_t i = 0; i < lead_; ++i) {
      if (bytes[i] != kPattern) return false;
    }
    for (int64_t i = bytes_ - kTrail; i < bytes_; ++i) {
      if (bytes[i] != kPattern) return false;
    }
    return true;
  }
  // Compares bits: a NaN equals a NaN of the same bits, and -0 differs from +0.
  bool same(const Buffer& other) const {
    return count_ == other.count_ && memcmp(data(), other.data(), static_cast<size_t>(count_) * sizeof(T)) == 0;
  }

 private:
  static constexpr unsigned char kPattern = 0xa5;
#if defined(__SANITIZE_ADDRESS__)
  static constexpr int64_t kLead = 0, kTrail = 0;
#else
  static constexpr int64_t kLead = 512, kTrail = 512;  // room for 64 of the widest elements
#endif
  struct Free {
    const void* watched = nullptr;
    void operator()(unsigned char* p) const {
      unwatch_memory(watched);
      std::free(p);
    }
  };

  int64_t count_, lead_, bytes_;
  std::unique_ptr<unsigned char, Free> storage_;
};

}  // namespace pymoe::test

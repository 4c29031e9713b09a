// Guarded<T>: an output buffer between two bands of a known pattern. A kernel that writes outside changes a band,
// also where no sanitizer watches.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace pymoe::test {

template <typename T>
class Guarded {
 public:
  // `shift` elements move the start off its natural alignment.
  explicit Guarded(int64_t count, int64_t shift = 0)
      : count_(count), begin_(kBand + shift), storage_(static_cast<size_t>(count + 2 * kBand + shift)) {
    memset(static_cast<void*>(storage_.data()), kPattern, storage_.size() * sizeof(T));
  }

  T* data() { return storage_.data() + begin_; }
  const T* data() const { return storage_.data() + begin_; }
  int64_t size() const { return count_; }
  T& operator[](int64_t i) { return data()[i]; }
  const T& operator[](int64_t i) const { return data()[i]; }

  bool intact() const {
    return pattern(storage_.data(), begin_) &&
           pattern(data() + count_, static_cast<int64_t>(storage_.size()) - begin_ - count_);
  }
  // Same bits: NaN equals NaN, -0 differs from +0.
  bool same(const Guarded& other) const {
    return count_ == other.count_ && memcmp(data(), other.data(), static_cast<size_t>(count_) * sizeof(T)) == 0;
  }

 private:
  static constexpr int64_t kBand = 64;
  static constexpr unsigned char kPattern = 0xa5;

  static bool pattern(const T* from, int64_t count) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(from);
    for (int64_t i = 0; i < count * static_cast<int64_t>(sizeof(T)); ++i) {
      if (bytes[i] != kPattern) return false;
    }
    return true;
  }

  int64_t count_, begin_;
  std::vector<T> storage_;
};

}  // namespace pymoe::test

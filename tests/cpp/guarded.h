// Guarded<T>: an array between two inaccessible pages, so that any instruction that reads or writes a single byte of
// those pages ends the process.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

namespace pymoe::test {

// Holds `count` elements that end at the end of a page, or begin at the beginning of one.
template <typename T>
class Guarded {
 public:
  Guarded(int64_t count, bool at_end) : count_(count) {
    const int64_t page = sysconf(_SC_PAGESIZE), bytes = count * static_cast<int64_t>(sizeof(T));
    const int64_t inner = (bytes + page - 1) / page * page;
    size_ = static_cast<size_t>(inner + 2 * page);
    pages_ = mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages_ == MAP_FAILED) throw std::bad_alloc();
    char* begin = static_cast<char*>(pages_) + page;
    if (inner > 0 && mprotect(begin, static_cast<size_t>(inner), PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    data_ = reinterpret_cast<T*>(begin + (at_end ? inner - bytes : 0));
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { munmap(pages_, size_); }

  int64_t size() const { return count_; }
  T* data() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  int64_t count_;
  void* pages_;
  size_t size_;
  T* data_;
};

}  // namespace pymoe::test

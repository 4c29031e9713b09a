// CPU tensors in memory that the interpreter watches: each has its own stretch, filled with kPoison, between bands that
// belong to no tensor.
#include <c10/core/Allocator.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "cuda_ptx/memory.h"

namespace pymoe::ptx {
namespace {

constexpr size_t kBand = 512;  // as far apart as CUDA's allocator aligns

void release(void* block) {
  remove_memory(static_cast<unsigned char*>(block) + kBand);
  std::free(block);
}

class WatchedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release_nothing, c10::Device(c10::DeviceType::CPU)};
    const size_t all = (bytes + 2 * kBand + kBand - 1) / kBand * kBand;
    auto* const block = static_cast<unsigned char*>(std::aligned_alloc(kBand, all));
    if (block == nullptr) throw std::bad_alloc();
    std::memset(block, kPoison, all);
    add_memory(block + kBand, static_cast<int64_t>(bytes));
    return {block + kBand, block, &release, c10::Device(c10::DeviceType::CPU)};
  }
  // The context is not the data, so that callers without one are refused.
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static void release_nothing(void*) {}
};

// Replaces torch's allocator when the library is loaded; never destroyed, because tensors live until the process ends.
[[maybe_unused]] const bool installed = [] {
  c10::SetAllocator(c10::DeviceType::CPU, new WatchedMemory, /*priority=*/200);
  return true;
}();

}  // namespace
}  // namespace pymoe::ptx

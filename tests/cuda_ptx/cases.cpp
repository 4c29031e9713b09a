// Runs the cases of the emulated kernels (tests/cuda_on_cpu/test_*.cpp) on the PTX: they compare a CUDA twin with its
// CPU twin, whatever runs the CUDA twin. The interpreter's runtime answers their calls of the emulator.
#define DOCTEST_CONFIG_IMPLEMENT
#include <sys/mman.h>

#include <regex>

#include "cuda_on_cpu/harness.h"
#include "cuda_ptx/memory.h"
#include "cuda_ptx/runtime.h"

namespace pymoe::test {

void watch_memory(const void* begin, int64_t bytes) { ptx::add_memory(begin, bytes); }
void unwatch_memory(const void* begin) { ptx::remove_memory(begin); }

SparseMemory::SparseMemory(int64_t bytes)
    : bytes_(bytes),
      data_(mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
  REQUIRE(data_ != MAP_FAILED);
  watch_memory(data_, bytes);
}

SparseMemory::~SparseMemory() {
  unwatch_memory(data_);
  munmap(data_, static_cast<size_t>(bytes_));
}

}  // namespace pymoe::test

namespace pymoe::emulator {

void set_seed(uint64_t seed) { ptx::set_seed(seed); }

// Launches by operator: a kernel's name contains the name of its file.
const std::map<std::string, int64_t>& launches() {
  static std::map<std::string, int64_t> all;
  static const std::regex file("_[0-9]+_([a-z_]+)_cuda_cu_");
  all.clear();
  for (const auto& [kernel, count] : ptx::launches()) {
    std::smatch found;
    all[std::regex_search(kernel, found, file) ? found[1].str() : kernel] += count;
  }
  return all;
}

}  // namespace pymoe::emulator

// Takes the arguments of a doctest program; returns the exit status.
extern "C" __attribute__((visibility("default"))) int pymoe_ptx_cases(int argc, const char** argv) {
  doctest::Context context(argc, argv);
  return context.run();
}

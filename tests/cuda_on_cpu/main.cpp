// Runs the tests of the emulated kernels; a run without a filter fails if a kernel was launched too few times.
#define DOCTEST_CONFIG_IMPLEMENT
#include <sys/mman.h>

#include <cstdio>

#include "cuda_on_cpu/harness.h"

namespace pymoe::test {

SparseMemory::SparseMemory(int64_t bytes)
    : bytes_(bytes),
      data_(mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
  REQUIRE(data_ != MAP_FAILED);
}

SparseMemory::~SparseMemory() { munmap(data_, static_cast<size_t>(bytes_)); }

}  // namespace pymoe::test

int main(int argc, char** argv) {
  constexpr int64_t kLeastLaunches = pymoe::test::kSlow ? 0 : 400, kLeastOfEach = 12;
  doctest::Context context(argc, argv);
  const int failed = context.run();
  if (context.shouldExit() || argc > 1) return failed;
  int64_t all = 0;
  bool enough = true;
  for (const auto& [name, count] : pymoe::emulator::launches()) {
    if (name.starts_with("emulator")) continue;  // the emulator's own tests
    std::printf("%-28s %6ld launches\n", name.c_str(), static_cast<long>(count));
    all += count;
    enough = enough && count >= kLeastOfEach;
  }
  enough = enough && all >= kLeastLaunches;
  std::printf("%ld launches of emulated kernels%s\n", static_cast<long>(all), enough ? "" : ": too few");
  return failed != 0 ? failed : enough ? 0 : 1;
}

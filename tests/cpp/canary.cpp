// Planted errors. The sanitizer of the build must report each; ctest looks for the report.
#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <latch>
#include <thread>
#include <vector>

#include "futures.h"
#include "kernels/quantized_linear.h"
#include "kernels/quantized_weight.h"
#include "runtime/parallel_for.h"
#include "runtime/worker_pool.h"
#include "simulated.h"

namespace {

int shared_counter = 0;
std::atomic<int> done{0};

void count_together(std::latch& start) {
  start.arrive_and_wait();  // without this the threads often run one after the other, and no race is found
  for (int i = 0; i < 100; ++i) ++shared_counter;
  // The first thread continues while the other counts: ThreadSanitizer may know too little of a thread that has ended
  // to report the race. The accesses are relaxed, so that they order nothing.
  done.fetch_add(1, std::memory_order_relaxed);
  while (done.load(std::memory_order_relaxed) < 2) {
    ++shared_counter;
    std::this_thread::yield();
  }
}

void race() {
  std::latch start(2);
  std::thread other([&] { count_together(start); });
  count_together(start);
  other.join();
}

void pool_race() {
  pymoe::runtime::WorkerPool<pymoe::runtime::SystemSync> pool(2);
  std::latch start(2);
  const auto first = submit(pool, [&] { count_together(start); });
  const auto second = submit(pool, [&] { count_together(start); });
  first.get();
  second.get();
}

void parallel_for_race() {
  pymoe::runtime::WorkerPool<pymoe::runtime::SystemSync> pool(2);
  std::latch start(2);
  get(*pymoe::runtime::ParallelFor<pymoe::runtime::SystemSync>::start(pool, 2, [&](int) { count_together(start); }));
}

void simulated_race() {
  using Thread = pymoe::simulation::SimulatedSync::Thread;
  pymoe::simulation::simulate({}, [] {
    Thread other([] { ++shared_counter; });
    ++shared_counter;
    other.join();
  });
}

void overflow(volatile int count) {
  auto* buffer = static_cast<volatile int*>(std::malloc(sizeof(int) * static_cast<size_t>(count)));
  buffer[count] = 1;
  std::free(const_cast<int*>(buffer));
}

// Weights that lack their last byte, for a kernel that reads them by vectors.
void kernel_overflow() {
  using namespace pymoe;
  constexpr int64_t kInputs = 256, kOutputs = 64;
  constexpr auto kFormat = WeightFormat::kInt8;
  const std::vector<uint8_t> packed(static_cast<size_t>(quantized_tile_bytes(kFormat, kInputs)) - 1);
  const std::vector<float> x(kInputs);
  std::vector<float> y(kOutputs);
  std::vector<char> workspace(static_cast<size_t>(quantized_linear_workspace(1, kInputs, kFormat)));
  const int32_t offsets[] = {0, 1};
  cpu::quantized_linear({x.data(), packed.data(), offsets, nullptr, y.data(), 1, kInputs, kOutputs, 1, kFormat,
                         DType::kFloat32, workspace.data()});
}

void use_after_free() {
  auto* buffer = static_cast<volatile int*>(std::malloc(sizeof(int)));
  *buffer = 1;
  std::free(const_cast<int*>(buffer));
  shared_counter = *buffer;
}

void signed_overflow(volatile int value) { shared_counter = value + INT_MAX; }

void leak() {
  void* volatile lost = std::malloc(64);
  lost = nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  const char* name = argc > 1 ? argv[1] : "";
  for (int round = 0; round < 20; ++round) {  // on a busy machine ThreadSanitizer misses about one race in a hundred
    done = 0;
    if (std::strcmp(name, "race") == 0) race();
    if (std::strcmp(name, "pool_race") == 0) pool_race();
    if (std::strcmp(name, "parallel_for_race") == 0) parallel_for_race();
  }
  if (std::strcmp(name, "simulated_race") == 0) simulated_race();
  if (std::strcmp(name, "overflow") == 0) overflow(8);
  if (std::strcmp(name, "kernel_overflow") == 0) kernel_overflow();
  if (std::strcmp(name, "use_after_free") == 0) use_after_free();
  if (std::strcmp(name, "signed_overflow") == 0) signed_overflow(argc);
  if (std::strcmp(name, "leak") == 0) leak();
  std::printf("canary '%s' has run, %d\n", name, shared_counter);
  return 0;
}

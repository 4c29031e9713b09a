// A data race that ThreadSanitizer must report, or its silence proves nothing. In the sanitized runtime alone.
#include <chrono>
#include <latch>
#include <thread>

namespace {

int shared_counter = 0;
std::latch both(2);

}  // namespace

// Waits for a second caller, and counts beside it. (Callers that hold a lock after one another would be ordered by it.)
extern "C" __attribute__((visibility("default"))) void pymoe_count_together() {
  both.count_down();
  const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!both.try_wait() && std::chrono::steady_clock::now() < late) std::this_thread::yield();
  for (int i = 0; i < 1000; ++i) {
    ++shared_counter;
    std::this_thread::yield();
  }
}

// Contains a deliberate data race. If ThreadSanitizer misses it, its silence about other code proves nothing.
// Linked only into the sanitized runtime.
#include <chrono>
#include <latch>
#include <thread>

namespace {

int shared_counter = 0;
std::latch both(2);

}  // namespace

// Waits for a second caller, and counts at the same time. (Callers that took a lock in turn would be ordered by it.)
extern "C" __attribute__((visibility("default"))) void pymoe_count_together() {
  both.count_down();
  const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!both.try_wait() && std::chrono::steady_clock::now() < late) std::this_thread::yield();
  for (int i = 0; i < 1000; ++i) {
    ++shared_counter;
    std::this_thread::yield();
  }
}

// Tests of the waits of SystemSync::Condition, on the clock of SystemSync::now().
#include <doctest/doctest.h>

#include <chrono>
#include <mutex>
#include <thread>

#include "runtime/sync.h"

using pymoe::runtime::SystemSync;
using namespace std::chrono_literals;

TEST_CASE("a wait until a time ends when the time has passed, and not before") {
  SystemSync::Mutex mutex;
  SystemSync::Condition condition;
  std::unique_lock lock(mutex);
  for (const auto span : {-1h, 0h}) CHECK_FALSE(condition.wait_until(lock, SystemSync::now() + span));
  for (const auto span : {1us, 1000us, 20000us}) {
    const auto until = SystemSync::now() + span;
    while (condition.wait_until(lock, until)) {  // nobody notifies, but a wait may end early
    }
    CHECK(SystemSync::now() >= until);
  }
}

TEST_CASE("a wait until any later time ends when it is notified") {
  for (const auto until : {SystemSync::now() + 1h, SystemSync::Time::max()}) {
    SystemSync::Mutex mutex;
    SystemSync::Condition condition;
    bool called = false;
    std::unique_lock lock(mutex);
    std::thread caller([&] {
      {
        const std::lock_guard other(mutex);
        called = true;
      }
      condition.notify_one();
    });
    bool waits = true;
    while (!called && waits) waits = condition.wait_until(lock, until);
    CHECK(waits);
    lock.unlock();
    caller.join();
  }
}

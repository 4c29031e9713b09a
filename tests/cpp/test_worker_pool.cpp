#include <doctest/doctest.h>

#include <atomic>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "runtime/worker_pool.h"

using namespace pymoe::runtime;
using namespace std::chrono_literals;

namespace {

// Occupies every worker until release() is called, so that what is submitted meanwhile stays in the queue.
class Blocker {
 public:
  explicit Blocker(WorkerPool& pool) : started_(pool.workers()), released_(1) {
    for (int i = 0; i < pool.workers(); ++i) {
      futures_.push_back(pool.submit([this] {
        started_.count_down();
        released_.wait();
      }));
    }
    started_.wait();
  }
  void release() { released_.count_down(); }
  void wait() const {
    for (const auto& future : futures_) future.get();
  }

 private:
  std::latch started_, released_;
  std::vector<Future<void>> futures_;
};

struct Counted {
  static std::atomic<int> alive;
  Counted() { ++alive; }
  Counted(const Counted&) { ++alive; }
  ~Counted() { --alive; }
};
std::atomic<int> Counted::alive{0};

}  // namespace

TEST_CASE("values come through the future") {
  WorkerPool pool(2);
  CHECK(pool.submit([] { return 6 * 7; }).get() == 42);
  CHECK(pool.submit([] { return std::string("text"); }).get() == "text");
  auto owned = pool.submit([] { return std::make_unique<int>(5); });
  CHECK(*owned.get() == 5);
  auto nothing = pool.submit([] {});
  nothing.get();
  CHECK(nothing.done());
}

TEST_CASE("functions that can only be moved are taken") {
  WorkerPool pool(1);
  auto value = std::make_unique<int>(3);
  CHECK(pool.submit([value = std::move(value)] { return *value; }).get() == 3);
}

TEST_CASE("exceptions come through with type and text, and touch nothing else") {
  WorkerPool pool(1);
  auto failed = pool.submit([]() -> int { throw std::out_of_range("planted"); });
  auto next = pool.submit([] { return 1; });
  CHECK_THROWS_WITH_AS(failed.get(), "planted", std::out_of_range);
  CHECK_THROWS_AS(failed.get(), std::out_of_range);
  CHECK(next.get() == 1);
}

TEST_CASE("one worker runs tasks in the order of submission") {
  WorkerPool pool(1);
  std::vector<int> order;
  for (int i = 0; i < 1000; ++i) pool.submit([&order, i] { order.push_back(i); });
  pool.stop();
  REQUIRE(order.size() == 1000);
  for (int i = 0; i < 1000; ++i) CHECK(order[static_cast<size_t>(i)] == i);
}

TEST_CASE("all workers work at the same time") {
  WorkerPool pool(4);
  std::latch together(4);
  std::vector<Future<void>> futures;
  for (int i = 0; i < 4; ++i) futures.push_back(pool.submit([&] { together.arrive_and_wait(); }));
  for (const auto& future : futures) future.get();
}

TEST_CASE("the function is destroyed before the future is done") {
  WorkerPool pool(2);
  for (int i = 0; i < 200; ++i) {
    pool.submit([counted = Counted()] {}).get();
    CHECK(Counted::alive == 0);
  }
  CHECK_THROWS(pool.submit([counted = Counted()] { throw 1; }).get());
  CHECK(Counted::alive == 0);
}

TEST_CASE("wait_for reports whether the task has ended") {
  WorkerPool pool(1);
  Blocker blocker(pool);
  auto future = pool.submit([] { return 1; });
  CHECK_FALSE(future.wait_for(1ms));
  CHECK_FALSE(future.done());
  blocker.release();
  future.wait();
  CHECK(future.wait_for(0ms));
  blocker.wait();
}

TEST_CASE("stop drains by default") {
  WorkerPool pool(2);
  Blocker blocker(pool);
  std::atomic<int> ran{0};
  for (int i = 0; i < 100; ++i) pool.submit([&] { ++ran; });
  pool.request_stop(Stop::kDrain);
  blocker.release();
  pool.stop();
  CHECK(ran == 100);
}

TEST_CASE("stop cancels what has not started, on demand") {
  WorkerPool pool(2);
  Blocker blocker(pool);
  std::atomic<int> ran{0};
  std::vector<Future<void>> futures;
  for (int i = 0; i < 100; ++i) {
    futures.push_back(pool.submit([&ran, counted = Counted()] { ++ran; }));
  }
  pool.request_stop(Stop::kCancel);
  CHECK(Counted::alive == 0);
  for (const auto& future : futures) CHECK_THROWS_AS(future.get(), Cancelled);
  blocker.release();
  pool.stop(Stop::kCancel);
  blocker.wait();  // a task that runs is not interrupted
  CHECK(ran == 0);
}

TEST_CASE("a drain may be cut short") {
  WorkerPool pool(1);
  Blocker blocker(pool);
  auto future = pool.submit([] {});
  pool.request_stop(Stop::kDrain);
  pool.request_stop(Stop::kCancel);
  CHECK_THROWS_AS(future.get(), Cancelled);
  blocker.release();
  pool.stop();
}

TEST_CASE("submit after a stop throws, and leaves the function destroyed") {
  WorkerPool pool(1);
  pool.stop();
  CHECK_THROWS_AS(pool.submit([counted = Counted()] {}), StoppedError);
  CHECK(Counted::alive == 0);
}

TEST_CASE("stop may be called again and by many threads") {
  WorkerPool pool(3);
  std::latch start(4);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      start.arrive_and_wait();
      pool.stop();
    });
  }
  for (auto& thread : threads) thread.join();
  pool.stop();
  CHECK(pool.wait_stopped_for(0ms));
}

TEST_CASE("wait_stopped_for waits in slices") {
  WorkerPool pool(2);
  Blocker blocker(pool);
  pool.request_stop(Stop::kDrain);
  CHECK_FALSE(pool.wait_stopped_for(1ms));
  blocker.release();
  while (!pool.wait_stopped_for(10ms)) {
  }
  blocker.wait();
}

TEST_CASE("a worker that waits for its own pool is told so") {
  WorkerPool pool(2);
  CHECK(pool.submit([&] { return pool.on_worker(); }).get());
  CHECK_FALSE(pool.on_worker());
  CHECK_THROWS_AS(pool.submit([&] { pool.stop(); }).get(), std::logic_error);
  CHECK(pool.submit([] { return 2; }).get() == 2);
}

TEST_CASE("tasks may submit tasks") {
  WorkerPool pool(2);
  std::atomic<int> ran{0};
  pool.submit([&] {
        for (int i = 0; i < 10; ++i) pool.submit([&] { ++ran; });
      })
      .get();
  pool.stop();
  CHECK(ran == 10);
}

TEST_CASE("an outcome outlives its pool") {
  Future<int> future;
  CHECK_FALSE(future.valid());
  {
    WorkerPool pool(1);
    future = pool.submit([] { return 9; });
  }
  CHECK(future.get() == 9);
}

TEST_CASE("the hook runs around every worker") {
  std::atomic<int> before{0}, after{0};
  {
    WorkerPool pool(3, [&](const std::function<void()>& work) {
      ++before;
      work();
      ++after;
    });
    pool.submit([] {}).get();
  }
  CHECK(before == 3);
  CHECK(after == 3);
}

TEST_CASE("fewer than one worker is refused") {
  CHECK_THROWS_AS(WorkerPool(0), std::invalid_argument);
  CHECK_THROWS_AS(WorkerPool(-1), std::invalid_argument);
}

TEST_CASE("pools come and go") {
  for (int i = 0; i < 200; ++i) {
    WorkerPool pool(2);
    if (i % 2) pool.submit([] {});
  }
}

TEST_CASE("a million tasks from eight producers on four workers, some failing, some never waited for") {
  constexpr int kProducers = 8, kTasks = 125'000;
  WorkerPool pool(4);
  std::atomic<int64_t> ran{0}, sum{0}, failed{0};
  std::latch start(kProducers);
  std::vector<std::thread> producers;
  for (int producer = 0; producer < kProducers; ++producer) {
    producers.emplace_back([&] {
      start.arrive_and_wait();
      std::vector<Future<int>> window;
      const auto collect = [&] {
        for (const auto& future : window) {
          try {
            sum += future.get();
          } catch (const std::runtime_error&) {
            ++failed;
          }
        }
        window.clear();
      };
      for (int i = 0; i < kTasks; ++i) {
        auto future = pool.submit([&ran, i] {
          ran.fetch_add(1, std::memory_order_relaxed);
          if (i % 1000 == 999) throw std::runtime_error("planted");
          return 1;
        });
        if (i % 10 != 0) window.push_back(std::move(future));  // one in ten is dropped at once
        if (window.size() == 256) collect();
      }
      collect();
    });
  }
  for (auto& producer : producers) producer.join();
  pool.stop();
  CHECK(ran == int64_t{kProducers} * kTasks);
  CHECK(failed == kProducers * kTasks / 1000);
  CHECK(sum == int64_t{kProducers} * (kTasks - kTasks / 10 - kTasks / 1000));
}

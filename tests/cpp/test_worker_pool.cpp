#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <iterator>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "futures.h"
#include "runtime/worker_pool.h"

using namespace pymoe::runtime;
using namespace std::chrono_literals;
using Pool = WorkerPool<SystemSync>;

namespace {

// Occupies every worker until release() is called, so that jobs submitted meanwhile stay in the queue.
class Blocker {
 public:
  explicit Blocker(Pool& pool) : started_(pool.workers()), released_(1) {
    for (int i = 0; i < pool.workers(); ++i) {
      futures_.push_back(submit(pool, [this] {
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

// Returns the future once a worker has run its task; a wait with a limit leaves the task to workers.
template <typename T>
Future<T> ended_on_worker(Future<T> future) {
  REQUIRE(future.wait_for(1min));
  return future;
}

// A job that logs that it was run or cancelled.
class Noted final : public Job {
 public:
  Noted(std::string name, std::vector<std::string>& log) : name_(std::move(name)), log_(&log) {}
  void run() noexcept override { log_->push_back(name_); }
  void cancel() noexcept override { log_->push_back("no " + name_); }

 private:
  std::string name_;
  std::vector<std::string>* log_;
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
  Pool pool(2);
  CHECK(submit(pool, [] { return 6 * 7; }).get() == 42);
  CHECK(submit(pool, [] { return std::string("text"); }).get() == "text");
  auto owned = submit(pool, [] { return std::make_unique<int>(5); });
  CHECK(*owned.get() == 5);
  auto nothing = submit(pool, [] {});
  nothing.get();
  CHECK(nothing.done());
}

TEST_CASE("functions that can only be moved are taken") {
  Pool pool(1);
  auto value = std::make_unique<int>(3);
  CHECK(submit(pool, [value = std::move(value)] { return *value; }).get() == 3);
}

TEST_CASE("exceptions come through with type and text, and touch nothing else") {
  Pool pool(1);
  auto failed = submit(pool, []() -> int { throw std::out_of_range("planted"); });
  auto next = submit(pool, [] { return 1; });
  CHECK_THROWS_WITH_AS(failed.get(), "planted", std::out_of_range);
  CHECK_THROWS_AS(failed.get(), std::out_of_range);
  CHECK(next.get() == 1);
}

TEST_CASE("one worker runs tasks in the order of submission") {
  Pool pool(1);
  std::vector<int> order;
  for (int i = 0; i < 1000; ++i) submit(pool, [&order, i] { order.push_back(i); });
  pool.stop();
  REQUIRE(order.size() == 1000);
  for (int i = 0; i < 1000; ++i) CHECK(order[static_cast<size_t>(i)] == i);
}

TEST_CASE("all workers work at the same time") {
  Pool pool(4);
  std::latch together(4);
  std::vector<Future<void>> futures;
  for (int i = 0; i < 4; ++i) futures.push_back(submit(pool, [&] { together.arrive_and_wait(); }));
  for (const auto& future : futures) future.get();
}

TEST_CASE("the function is destroyed before the future is done") {
  Pool pool(2);
  for (int i = 0; i < 200; ++i) {
    submit(pool, [counted = Counted()] {}).get();
    CHECK(Counted::alive == 0);
  }
  CHECK_THROWS(submit(pool, [counted = Counted()] { throw 1; }).get());
  CHECK(Counted::alive == 0);
}

TEST_CASE("wait_for reports whether the task has ended") {
  Pool pool(1);
  Blocker blocker(pool);
  auto future = submit(pool, [] { return 1; });
  CHECK_FALSE(future.wait_for(1ms));
  CHECK_FALSE(future.done());
  blocker.release();
  future.wait();
  CHECK(future.wait_for(0ms));
  blocker.wait();
}

TEST_CASE("stop drains by default") {
  Pool pool(2);
  Blocker blocker(pool);
  std::atomic<int> ran{0};
  for (int i = 0; i < 100; ++i) submit(pool, [&] { ++ran; });
  pool.request_stop(Stop::kDrain);
  blocker.release();
  pool.stop();
  CHECK(ran == 100);
}

TEST_CASE("stop cancels what has not started, on demand") {
  Pool pool(2);
  Blocker blocker(pool);
  std::atomic<int> ran{0};
  std::vector<Future<void>> futures;
  for (int i = 0; i < 100; ++i) {
    futures.push_back(submit(pool, [&ran, counted = Counted()] { ++ran; }));
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
  Pool pool(1);
  Blocker blocker(pool);
  auto future = submit(pool, [] {});
  pool.request_stop(Stop::kDrain);
  pool.request_stop(Stop::kCancel);
  CHECK_THROWS_AS(future.get(), Cancelled);
  blocker.release();
  pool.stop();
}

TEST_CASE("submit after a stop throws, and leaves the function destroyed") {
  Pool pool(1);
  pool.stop();
  CHECK_THROWS_AS(submit(pool, [counted = Counted()] {}), StoppedError);
  CHECK(Counted::alive == 0);
}

TEST_CASE("stop may be called again and by many threads") {
  Pool pool(3);
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
  CHECK(pool.wait_stopped_until(SystemSync::now()));
}

TEST_CASE("wait_stopped_until waits in slices") {
  Pool pool(2);
  Blocker blocker(pool);
  pool.request_stop(Stop::kDrain);
  CHECK_FALSE(pool.wait_stopped_until(SystemSync::now() + 1ms));
  blocker.release();
  while (!pool.wait_stopped_until(SystemSync::now() + 10ms)) {
  }
  blocker.wait();
}

TEST_CASE("a worker that waits for its own pool is told so") {
  Pool pool(2);
  CHECK(ended_on_worker(submit(pool, [&] { return pool.on_worker(); })).get());
  CHECK_FALSE(pool.on_worker());
  CHECK_THROWS_AS(ended_on_worker(submit(pool, [&] { pool.stop(); })).get(), std::logic_error);
  CHECK_THROWS_AS(ended_on_worker(submit(pool, [&] { pool.wait_stopped_until({}); })).get(), std::logic_error);
  CHECK(submit(pool, [] { return 2; }).get() == 2);
}

TEST_CASE("tasks may submit tasks") {
  Pool pool(2);
  std::atomic<int> ran{0};
  submit(pool, [&] {
    for (int i = 0; i < 10; ++i) submit(pool, [&] { ++ran; });
  }).get();
  pool.stop();
  CHECK(ran == 10);
}

TEST_CASE("tasks that wait for tasks do not block a pool of one worker") {
  Pool pool(1);
  std::function<int(int)> sum = [&](int n) {
    return n == 0 ? 0 : n + submit(pool, [&, n] { return sum(n - 1); }).get();
  };
  CHECK(ended_on_worker(submit(pool, [&] { return sum(100); })).get() == 5050);
}

TEST_CASE("a thread that waits runs the task that it waits for, and nobody else does") {
  Pool pool(1);
  Blocker blocker(pool);
  int ran = 0;
  const auto future = submit(pool, [&] {
    ++ran;
    return std::this_thread::get_id();
  });
  CHECK(future.get() == std::this_thread::get_id());
  CHECK_FALSE(future.help());
  const auto failed = submit(pool, []() -> int { throw std::out_of_range("planted"); });
  CHECK(failed.help());
  CHECK_THROWS_AS(failed.get(), std::out_of_range);
  blocker.release();
  pool.stop();
  CHECK(ran == 1);
}

TEST_CASE("a wait with a limit does not run the task") {
  Pool pool(1);
  Blocker blocker(pool);
  const auto future = submit(pool, [] { return std::this_thread::get_id(); });
  CHECK_FALSE(future.wait_until(SystemSync::now()));
  blocker.release();
  CHECK(ended_on_worker(future).get() != std::this_thread::get_id());
}

TEST_CASE("the smallest rank runs first, and equals in the order in which they came") {
  Pool pool(1);
  Blocker blocker(pool);
  std::vector<std::string> log, expected;
  const auto start = SystemSync::now();
  const int ranks[] = {5, 7, 7, 2, 9, 5, 1, 9, 2, 0, 7, 5};
  for (size_t i = 0; i < std::size(ranks); ++i) {
    CHECK(pool.post(std::make_shared<Noted>(std::to_string(ranks[i]) + "." + std::to_string(10 + i), log),
                    start + std::chrono::seconds(ranks[i])));
    expected.push_back(std::to_string(ranks[i]) + "." + std::to_string(10 + i));
  }
  std::sort(expected.begin(), expected.end());
  blocker.release();
  pool.stop();
  CHECK(log == expected);
}

TEST_CASE("jobs run at their time, the earliest first, between those without one") {
  Pool pool(1);
  std::vector<std::string> log;
  const auto start = SystemSync::now();
  {
    Blocker blocker(pool);
    pool.post_at(start + 2ms, std::make_shared<Noted>("second", log));
    pool.post_at(start + 1ms, std::make_shared<Noted>("first", log));
    pool.post_at(start + 2ms, std::make_shared<Noted>("third", log));
    while (SystemSync::now() < start + 3ms) std::this_thread::yield();
    pool.post(std::make_shared<Noted>("last", log), SystemSync::now());
    blocker.release();
    blocker.wait();
  }
  pool.stop();
  CHECK(log == std::vector<std::string>{"first", "second", "third", "last"});
}

TEST_CASE("a drain runs jobs whose time has come even if no worker has looked since") {
  Pool pool(1);
  std::vector<std::string> log;
  Blocker blocker(pool);
  pool.post_at(SystemSync::now(), std::make_shared<Noted>("due", log));
  pool.request_stop(Stop::kDrain);
  blocker.release();
  pool.stop();
  CHECK(log == std::vector<std::string>{"due"});
}

TEST_CASE("a job never runs before its time, and idle workers wake for it") {
  for (const int workers : {1, 3}) {
    Pool pool(workers);
    std::latch ran(20);
    std::atomic<int> early{0};
    struct Timed final : Job {
      std::function<void()> function;
      void run() noexcept override { function(); }
    };
    for (int i = 0; i < 20; ++i) {
      const auto when = SystemSync::now() + std::chrono::microseconds(i * 7919 % 5000);
      auto job = std::make_shared<Timed>();
      job->function = [&, when] {
        early += SystemSync::now() < when;
        ran.count_down();
      };
      CHECK(pool.post_at(when, job));
      if (i % 4 == 0) submit(pool, [] {});
    }
    ran.wait();
    CHECK(early == 0);
  }
}

TEST_CASE("a stop cancels jobs whose time has not come, a drain too, and refuses new ones") {
  for (const Stop how : {Stop::kDrain, Stop::kCancel}) {
    std::vector<std::string> log;
    Pool pool(1);
    Blocker blocker(pool);
    pool.post_at(SystemSync::now() + 1h, std::make_shared<Noted>("timed", log));
    pool.post(std::make_shared<Noted>("posted", log), SystemSync::now());
    pool.request_stop(how);
    CHECK_FALSE(pool.post(std::make_shared<Noted>("late", log), SystemSync::now()));
    CHECK_FALSE(pool.post_at(SystemSync::now(), std::make_shared<Noted>("late", log)));
    blocker.release();
    pool.stop();
    CHECK(log == std::vector<std::string>{"no timed", how == Stop::kDrain ? "posted" : "no posted"});
  }
}

TEST_CASE("an outcome outlives its pool") {
  Future<int> future;
  {
    Pool pool(1);
    future = submit(pool, [] { return 9; });
  }
  CHECK(future.get() == 9);
}

TEST_CASE("the hook runs around every worker") {
  std::atomic<int> before{0}, after{0};
  {
    Pool pool(3, [&](const std::function<void()>& work) {
      ++before;
      work();
      ++after;
    });
    submit(pool, [] {}).get();
  }
  CHECK(before == 3);
  CHECK(after == 3);
}

TEST_CASE("fewer than one worker is refused") {
  CHECK_THROWS_AS(Pool(0), std::invalid_argument);
  CHECK_THROWS_AS(Pool(-1), std::invalid_argument);
}

TEST_CASE("pools come and go") {
  for (int i = 0; i < 200; ++i) {
    Pool pool(2);
    if (i % 2) submit(pool, [] {});
  }
}

// Tests a growing pool: it adds threads for jobs that wait for each other, adds none for jobs that compute, and ends
// added threads later.
#include <atomic>
#include <latch>
#include <thread>
#include <vector>

#include "futures.h"
#include "runtime/parallel_for.h"
#include "runtime/worker_pool.h"
#include "schedules.h"

using namespace pymoe::runtime;
using namespace pymoe::simulation;
using namespace std::chrono_literals;
using Sync = SimulatedSync;
using Pool = WorkerPool<Sync>;

namespace {

constexpr int kMost = 24;
const Growth<Sync> kGrowth{kMost, 8ms, 1s};

// Every thread that calls wait() waits until all expected threads have called it.
class Meeting {
 public:
  explicit Meeting(int count) : missing_(count) {}
  void wait() {
    std::unique_lock lock(mutex_);
    if (--missing_ == 0) met_.notify_all();
    while (missing_ > 0) met_.wait(lock);
  }

 private:
  Sync::Mutex mutex_;
  Sync::Condition met_;
  int missing_;
};

void compute(Sync::Duration span) {
  for (; span > 0ms; span -= 1ms) Sync::sleep_for(1ms);
}

int one_to(int most) { return 1 + static_cast<int>(random_below(static_cast<uint64_t>(most))); }

}  // namespace

TEST_CASE("schedules of a growing pool: jobs that wait for each other all end") {
  run_schedules(5'000, [](bool) {
    const int workers = one_to(3), jobs = one_to(kMost);
    Meeting meeting(jobs);
    int ran = 0;
    Sync::Mutex counting;
    Pool pool(workers, {}, kGrowth);
    std::vector<Future<void, Sync>> futures;
    for (int i = 0; i < jobs; ++i) {
      futures.push_back(submit(pool, [&] {
        meeting.wait();
        const std::lock_guard lock(counting);
        ++ran;
      }));
    }
    // In half of the schedules the pool is stopped meanwhile: it grows while it drains, too.
    if (random_below(2) == 0) pool.stop(Stop::kDrain);
    for (const auto& future : futures) future.wait_until(Sync::Time::max());
    expect(ran == jobs, "a job is lost");
  });
}

TEST_CASE("schedules of a growing pool: calls of two runs that wait for each other all end") {
  run_schedules(3'000, [](bool) {
    const int workers = one_to(2), calls = one_to(12);
    const Sync::Duration limit = random_below(2) == 0 ? 100us : 0us;
    Meeting meeting(2 * calls);
    Pool pool(workers, {}, kGrowth);
    const auto meet = [&] { get(*ParallelFor<Sync>::start(pool, calls, [&](int) { meeting.wait(); }, limit)); };
    Sync::Thread other(meet);
    meet();
    other.join();
  });
}

TEST_CASE("schedules of a growing pool: jobs that meet inside of jobs that wait for them all end") {
  run_schedules(3'000, [](bool) {
    const int outer = one_to(3), inner = one_to(4);
    Meeting meeting(outer * inner);
    Pool pool(1, {}, kGrowth);
    std::vector<Future<void, Sync>> futures;
    for (int i = 0; i < outer; ++i) {
      futures.push_back(
          submit(pool, [&] { get(*ParallelFor<Sync>::start(pool, inner, [&](int) { meeting.wait(); })); }));
    }
    for (const auto& future : futures) future.wait_until(Sync::Time::max());
  });
}

TEST_CASE("schedules of a growing pool: jobs that compute get no more threads") {
  run_schedules(3'000, [](bool stalls) {
    const int workers = one_to(3);
    Pool pool(workers, {}, kGrowth);
    for (int i = 0; i < 12; ++i) submit(pool, [] { compute(20ms); });
    for (int i = 0; i < 40; ++i) {
      Sync::sleep_for(1ms);
      expect(stalls || pool.workers() == workers, "a pool has grown with jobs that compute");
    }
  });
}

TEST_CASE("schedules of a growing pool: jobs that wait are replaced, and threads that were added end") {
  run_schedules(3'000, [](bool stalls) {
    const int workers = 2 + static_cast<int>(random_below(2));
    Meeting meeting(2), again(3 * workers);
    Pool pool(workers, {}, kGrowth);
    submit(pool, [&] { meeting.wait(); });
    for (int i = 0; i < 12; ++i) submit(pool, [] { compute(10ms); });
    Sync::sleep_for(40ms);
    expect(stalls || pool.workers() == workers + 1, "a job that waits takes the place of one that computes");
    meeting.wait();
    Sync::sleep_for(10s);
    expect(pool.workers() == workers, "a thread that was added has not ended");
    for (int i = 1; i < 3 * workers; ++i) submit(pool, [&] { again.wait(); });
    again.wait();
  });
}

TEST_CASE("schedules of a growing pool: where jobs waited and others compute, threads that were added end") {
  run_schedules(1'000, [](bool stalls) {
    const int workers = 1 + static_cast<int>(random_below(2));
    Meeting meeting(12);
    Pool pool(workers, {}, {kMost, 8ms, 1h});
    for (int i = 0; i < 12; ++i) submit(pool, [&] { meeting.wait(); });
    Sync::sleep_for(500ms);
    expect(pool.workers() >= 12, "a pool has not grown");
    for (int i = 0; i < 60; ++i) submit(pool, [] { compute(50ms); });
    Sync::sleep_for(250ms);
    expect(stalls || pool.workers() <= workers + 1, "threads that were added go on to compute");
  });
}

TEST_CASE("schedules of a growing pool: a job that comes when threads are to end is not left lying") {
  run_schedules(3'000, [](bool) {
    const int workers = one_to(2), crowd = 8 + static_cast<int>(random_below(8));
    Meeting meeting(crowd), again(crowd / 2 + 1);
    Pool pool(workers, {}, {kMost, 8ms, 1h});
    for (int i = 0; i < crowd; ++i) {
      submit(pool, [&, i] {
        meeting.wait();
        compute((100 + i % 4) * 1ms);  // more than `workers` threads at a time, for more than ten spans
        if (i % 2 == 1) again.wait();
      });
    }
    Sync::sleep_for(std::chrono::microseconds(random_below(400'000)));
    const auto began = Sync::now();
    const auto job = submit(pool, [] {});
    expect(job.wait_until(began + 1s), "a job is left lying while threads have nothing to do");
    again.wait();
  });
}

TEST_CASE("schedules of a growing pool: a stop while threads that were added end") {
  run_schedules(3'000, [](bool) {
    Meeting meeting(6);
    Pool pool(1, {}, {kMost, 8ms, 1ms});
    std::vector<Future<void, Sync>> futures;
    for (int i = 0; i < 6; ++i) futures.push_back(submit(pool, [&] { meeting.wait(); }));
    for (const auto& future : futures) future.wait_until(Sync::Time::max());
    Sync::sleep_for(std::chrono::microseconds(random_below(2'000)));
    if (random_below(2) == 0) pool.stop(random_below(2) == 0 ? Stop::kDrain : Stop::kCancel);
  });
}

TEST_CASE("schedules of a growing pool: a pool that is refused threads goes on with those that it has") {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    for (const int refused : {3, 4}) {  // the worker is the first, the watcher the second
      const Outcome outcome = simulate({.seed = seed, .refused_thread = refused}, [] {
        Pool pool(1, {}, kGrowth);
        for (int i = 0; i < 4; ++i) submit(pool, [] { Sync::sleep_for(20ms); });
      });
      REQUIRE_MESSAGE(outcome.ok(), outcome.failure);
    }
  }
}

TEST_CASE("a growing pool: sixty-four jobs at one latch, and threads that go again") {
  WorkerPool<SystemSync> pool(2, {}, {128, 8ms, 20ms});
  for (int round = 0; round < 2; ++round) {
    std::latch latch(64);
    std::atomic<int> most{0};
    std::vector<Future<void>> futures;
    for (int i = 0; i < 64; ++i) {
      futures.push_back(submit(pool, [&] {
        for (int seen = most, now = pool.workers(); now > seen && !most.compare_exchange_weak(seen, now);) {
        }
        latch.arrive_and_wait();
      }));
    }
    for (const auto& future : futures) REQUIRE(future.wait_for(1min));
    CHECK(most >= 64);
    while (pool.workers() > 2) std::this_thread::sleep_for(1ms);
  }
}

TEST_CASE("a growing pool: threads that use the processor get no company, also where there are too few processors") {
  WorkerPool<SystemSync> pool(2, {}, {128, 8ms, 1min});
  std::atomic<bool> over{false};
  std::atomic<bool> grown{false};
  std::vector<std::thread> rivals;
  for (unsigned i = 0; i < 4 * std::thread::hardware_concurrency(); ++i) {
    rivals.emplace_back([&] {
      while (!over) {
      }
    });
  }
  std::vector<Future<void>> futures;
  for (int i = 0; i < 8; ++i) {
    futures.push_back(submit(pool, [&] {
      volatile unsigned sum = 0;
      for (unsigned k = 0; k < 20'000'000; ++k) sum = sum + k;
      if (pool.workers() > 4) grown = true;
    }));
  }
  for (const auto& future : futures) CHECK(future.wait_for(5min));
  over = true;
  for (auto& rival : rivals) rival.join();
  CHECK_FALSE(grown);
}

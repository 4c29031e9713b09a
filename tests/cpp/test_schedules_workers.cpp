// WorkerPool under seeded schedules: no job is lost, runs twice or runs early, and there is no deadlock.
#include <array>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "futures.h"
#include "runtime/worker_pool.h"
#include "schedules.h"

using namespace pymoe::runtime;
using namespace pymoe::simulation;
using namespace std::chrono_literals;
using Sync = SimulatedSync;
using Pool = WorkerPool<Sync>;

namespace {

constexpr size_t kMostJobs = 64;

// Records the outcome of every job that clients submitted to a pool.
class Ledger {
 public:
  // Returns the number of a new job.
  size_t open() {
    const size_t number = count_++;
    expect(number < kMostJobs, "the scenario has too many jobs");
    return number;
  }
  void refused(size_t job) { entries_[job].refused = true; }
  void ran(size_t job) { ++entries_[job].ran; }
  void cancelled(size_t job) { ++entries_[job].cancelled; }

  // Called at the end, when no thread works any more.
  void check(bool may_cancel) const {
    for (size_t job = 0; job < count_; ++job) {
      const Entry& entry = entries_[job];
      const int settled = entry.ran + entry.cancelled;
      if (entry.refused) {
        expect(entry.ran == 0, "a job that was refused has run");
      } else {
        expect(settled > 0, "a job is lost");
        expect(settled < 2, "a job has run twice, or was cancelled too");
        expect(entry.cancelled == 0 || may_cancel, "a job was cancelled for no reason");
      }
    }
  }

 private:
  struct Entry {
    std::atomic<bool> refused{false};
    std::atomic<int> ran{0}, cancelled{0};
  };
  std::array<Entry, kMostJobs> entries_{};
  std::atomic<size_t> count_{0};
};

class CountedJob final : public Job {
 public:
  CountedJob(Ledger& ledger, size_t number, Sync::Time due, bool exact)
      : ledger_(ledger), number_(number), due_(due), exact_(exact) {}
  ~CountedJob() override { expect(locks_held() == 0, "a job is destroyed under a lock"); }
  void run() noexcept override {
    expect(locks_held() == 0, "a job runs under a lock");
    expect(Sync::now() >= due_, "a job runs before its time");
    expect(!exact_ || Sync::now() == due_, "a worker was free, and a job runs late");
    ledger_.ran(number_);
  }
  void cancel() noexcept override {
    expect(locks_held() == 0, "a job is cancelled under a lock");
    ledger_.cancelled(number_);
  }

 private:
  Ledger& ledger_;
  size_t number_;
  Sync::Time due_;
  bool exact_;
};

// Travels with a task's function, which is destroyed without having run if the task is cancelled.
struct Run {
  ~Run() {
    expect(locks_held() == 0, "a function is destroyed under a lock");
    if (!ran) ledger.cancelled(number);
  }
  Ledger& ledger;
  size_t number;
  bool ran = false;
};

void submit(Pool& pool, Ledger& ledger, bool wait, int nested) {
  const size_t number = ledger.open();
  try {
    auto run = std::unique_ptr<Run>(new Run{ledger, number});
    const auto future = submit(pool, [&pool, &ledger, number, nested, run = std::move(run)] {
      run->ran = true;
      ledger.ran(number);
      if (nested > 0) submit(pool, ledger, true, nested - 1);
      return number;
    });
    if (!wait) return;
    if (random_below(4) == 0) future.wait_until(Sync::now() + 1ms);
    expect(future.get() == number, "a task has another's value");
  } catch (const StoppedError&) {
    ledger.refused(number);
  } catch (const Cancelled&) {
  }
}

void post(Pool& pool, Ledger& ledger, bool timed, bool exact) {
  const size_t number = ledger.open();
  const auto delay = std::chrono::milliseconds(random_below(3));
  const Sync::Time now = Sync::now();
  const auto job = std::make_shared<CountedJob>(ledger, number, timed ? now + delay : now, exact);
  if (!(timed ? pool.post_at(now + delay, job) : pool.post(job, now - delay))) ledger.refused(number);
}

}  // namespace

TEST_CASE("schedules of a pool: clients that wait, forget, nest and post, and a stop in the middle") {
  run_schedules(30'000, [](bool) {
    Ledger ledger;
    const bool stops = random_below(2) == 0;
    const Stop how = random_below(2) == 0 ? Stop::kDrain : Stop::kCancel;
    {
      Pool pool(1 + static_cast<int>(random_below(3)));
      std::vector<Sync::Thread> clients;
      for (uint64_t client = 1 + random_below(3); client > 0; --client) {
        clients.emplace_back([&pool, &ledger, how, client, stops] {
          for (uint64_t i = 1 + random_below(4); i > 0; --i) {
            switch (random_below(5)) {
              case 0:
              case 1: submit(pool, ledger, true, static_cast<int>(random_below(3))); break;
              case 2: submit(pool, ledger, false, 0); break;
              case 3: post(pool, ledger, false, false); break;
              default: post(pool, ledger, true, false);
            }
            if (random_below(4) == 0) Sync::sleep_for(1ms);
          }
          if (stops && client == 1) pool.request_stop(how);
        });
      }
      for (auto& client : clients) client.join();
      if (random_below(2) == 0) pool.stop(how);
    }
    ledger.check(true);
  });
}

TEST_CASE("schedules of a pool: a drain runs all that was posted") {
  run_schedules(10'000, [](bool) {
    Ledger ledger;
    {
      Pool pool(1 + static_cast<int>(random_below(3)));
      std::vector<Sync::Thread> clients;
      for (int client = 0; client < 2; ++client) {
        clients.emplace_back([&pool, &ledger] {
          for (int i = 0; i < 4; ++i) {
            if (random_below(2) == 0) {
              submit(pool, ledger, random_below(2) == 0, 0);
            } else {
              post(pool, ledger, false, false);
            }
          }
        });
      }
      if (random_below(2) == 0) pool.request_stop(Stop::kDrain);
      for (auto& client : clients) client.join();
      while (!pool.wait_stopped_until(Sync::now() + 1ms)) pool.request_stop(Stop::kDrain);
    }
    ledger.check(false);
  });
}

TEST_CASE("schedules of a pool: jobs run at their very time while a worker is free") {
  run_schedules(10'000, [](bool stalls) {
    Ledger ledger;
    {
      Pool pool(1 + static_cast<int>(random_below(3)));
      std::vector<Sync::Thread> clients;
      for (int client = 0; client < 2; ++client) {
        clients.emplace_back([&pool, &ledger, stalls] {
          for (int i = 0; i < 4; ++i) {
            post(pool, ledger, random_below(4) != 0, !stalls);
            if (random_below(2) == 0) Sync::sleep_for(std::chrono::milliseconds(random_below(3)));
          }
        });
      }
      if (pool.workers() > 1) {  // one worker at a time is busy, and another is free
        struct Long final : Job {
          void run() noexcept override { Sync::sleep_for(4ms); }
        };
        for (int i = 0; i < 3; ++i) {
          if (random_below(2) == 0) {
            submit(pool, [] { Sync::sleep_for(1ms); }).wait_until(Sync::Time::max());
          } else {
            pool.post_at(Sync::now() + 1ms, std::make_shared<Long>());
            Sync::sleep_for(6ms);
          }
        }
      }
      for (auto& client : clients) client.join();
      Sync::sleep_for(1h);
    }
    ledger.check(stalls);
  });
}

TEST_CASE("schedules of a pool: the smallest rank goes first") {
  run_schedules(5'000, [](bool) {
    std::vector<int> order;
    {
      Pool pool(1);
      Sync::Mutex mutex;
      Sync::Condition changed;
      bool started = false, released = false;
      const auto gate = submit(pool, [&] {
        std::unique_lock lock(mutex);
        started = true;
        changed.notify_all();
        while (!released) changed.wait(lock);
      });
      {
        std::unique_lock lock(mutex);
        while (!started) changed.wait(lock);
      }
      struct Ordered final : Job {
        Ordered(std::vector<int>& order, int rank) : order(order), rank(rank) {}
        void run() noexcept override { order.push_back(rank); }
        std::vector<int>& order;
        int rank;
      };
      const Sync::Time start = Sync::now();
      for (int i = 0; i < 6; ++i) {
        const int rank = static_cast<int>(random_below(4));
        pool.post(std::make_shared<Ordered>(order, rank * 10 + i), start + std::chrono::milliseconds(rank));
      }
      {
        const std::lock_guard lock(mutex);
        released = true;
      }
      changed.notify_all();
      gate.wait();
    }
    expect(order.size() == 6, "a job is lost");
    for (size_t i = 1; i < order.size(); ++i)
      expect(order[i - 1] < order[i], "a job went before one of a smaller rank");
  });
}

TEST_CASE("schedules of a pool: a task that is claimed by many runs once") {
  run_schedules(10'000, [](bool) {
    Pool pool(1 + static_cast<int>(random_below(2)));
    int ran = 0;
    const auto future = submit(pool, [&ran] {
      Sync::preempt();
      return ++ran;
    });
    std::vector<Sync::Thread> clients;
    for (int client = 0; client < 3; ++client) {
      clients.emplace_back([future] { expect(future.get() == 1, "a task has run twice"); });
    }
    if (random_below(2) == 0) future.help();
    for (auto& client : clients) client.join();
    expect(ran == 1, "a task has run twice");
  });
}

// ParallelFor under seeded schedules: every call is made once, failures are contained, every run ends, no deadlock.
#include <array>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "futures.h"
#include "runtime/parallel_for.h"
#include "schedules.h"

using namespace pymoe::runtime;
using namespace pymoe::simulation;
using namespace std::chrono_literals;
using Sync = SimulatedSync;
using Pool = WorkerPool<Sync>;
using Calls = ParallelFor<Sync>;

namespace {

constexpr size_t kMostCalls = 8;

// A run of calls that check that each is made once, on any thread.
class Checked {
 public:
  explicit Checked(bool may_fail) : count_(1 + random_below(kMostCalls)) {
    for (size_t call = 0; call < count_; ++call) fails_[call] = may_fail && random_below(6) == 0;
  }

  std::shared_ptr<Calls> start(Pool& pool, Sync::Duration inline_limit = 0ms) {
    return Calls::start(pool, static_cast<int>(count_), [this](int i) { call(static_cast<size_t>(i)); }, inline_limit);
  }

  // Called after a run: checks that all calls were made that should have been, and which error came out.
  void check(Calls& run, bool may_be_cancelled) {
    expect(run.done(), "a run that was waited for has not ended");
    std::string first;
    bool left_out = false;
    for (size_t call = 0; call < count_; ++call) {
      expect(began_[call] == ended_[call], "a run has ended before one of its calls");
      expect(may_be_cancelled || ended_[call] == 1, "a call was not made");
      expect(!left_out || ended_[call] == 0, "calls do not start in the order of their numbers");
      left_out |= ended_[call] == 0;
      if (ended_[call] == 1 && fails_[call] && first.empty()) first = std::to_string(call);
    }
    try {
      get(run);
      expect(!left_out && first.empty(), "a run that has failed says nothing");
    } catch (const Cancelled&) {
      expect(left_out && first.empty(), "a run was cancelled for no reason");
    } catch (const std::runtime_error& error) {
      expect(error.what() == first, "another exception than the first call's comes out");
    }
    for (auto* counts : {&began_, &ended_}) {
      for (auto& count : *counts) count = 0;
    }
  }

 private:
  void call(size_t number) {
    expect(locks_held() == 0, "a call is made under a lock");
    Sync::preempt();
    expect(++began_[number] == 1, "a call is made twice");
    if (random_below(4) == 0) Sync::sleep_for(1ms);
    ++ended_[number];
    if (fails_[number]) throw std::runtime_error(std::to_string(number));
  }

  size_t count_;
  std::array<bool, kMostCalls> fails_{};
  std::array<std::atomic<int>, kMostCalls> began_{}, ended_{};
};

// Waits for a run in a random way; with `alone`, also without helping.
void wait(Calls& run, bool alone = true) {
  switch (random_below(alone ? 3 : 2)) {
    case 0: run.help_until(Sync::Time::max()); break;
    case 1:
      while (!run.help_until(Sync::now() + 1ms)) {
      }
      break;
    default: run.wait_until(Sync::Time::max());
  }
}

Sync::Duration some_limit() { return std::chrono::milliseconds(random_below(3)); }

struct Empty final : Job {
  void run() noexcept override { Sync::preempt(); }
};

}  // namespace

TEST_CASE("schedules of calls: failures, other jobs, run after run") {
  run_schedules(40'000, [](bool) {
    Checked checked(random_below(2) == 0);
    Pool pool(1 + static_cast<int>(random_below(3)));
    Sync::Thread other([&pool] {
      for (int i = 0; i < 3; ++i) {
        pool.post(std::make_shared<Empty>(), Sync::now() - std::chrono::milliseconds(random_below(3)));
      }
    });
    for (uint64_t step = 1 + random_below(2); step > 0; --step) {
      const auto run = checked.start(pool, some_limit());
      wait(*run);
      checked.check(*run, false);
    }
    other.join();
  });
}

TEST_CASE("schedules of calls: cancelled by a client or by the pool's stop") {
  run_schedules(40'000, [](bool) {
    Checked checked(random_below(2) == 0);
    Pool pool(1 + static_cast<int>(random_below(3)));
    const auto limit = some_limit();
    const auto run = checked.start(pool, limit);
    Sync::Thread client([&] { wait(*run, limit == 0ms); });
    if (random_below(2) == 0) Sync::sleep_for(1ms);
    const uint64_t how = random_below(3);
    if (how == 0) run->cancel();
    if (how == 1) pool.request_stop(Stop::kCancel);
    if (how == 2) pool.request_stop(Stop::kDrain);
    if (random_below(2) == 0) pool.stop();
    client.join();
    checked.check(*run, how != 2);
  });
}

TEST_CASE("schedules of calls: nobody waits to the end, and the pool drains") {
  run_schedules(20'000, [](bool) {
    Checked checked(false);
    std::shared_ptr<Calls> run;
    {
      Pool pool(1 + static_cast<int>(random_below(3)));
      run = checked.start(pool);
      Sync::Thread other([&] {  // adds older jobs, for which a worker leaves the remaining calls
        for (int i = 0; i < 3; ++i) pool.post(std::make_shared<Empty>(), Sync::now() - 10ms);
      });
      Sync::Thread client([&] {
        for (uint64_t i = random_below(3); i > 0; --i) {
          run->help_until(Sync::now() + std::chrono::milliseconds(random_below(2)));
        }
      });
      if (random_below(2) == 0) pool.request_stop(Stop::kDrain);
      client.join();
      other.join();
    }
    checked.check(*run, false);
  });
}

TEST_CASE("schedules of calls: several clients help one run, and calls wait for others") {
  run_schedules(20'000, [](bool) {
    Checked inner(false), outer(random_below(2) == 0);
    Pool pool(1 + static_cast<int>(random_below(2)));
    const auto around = Calls::start(
        pool, 2,
        [&](int i) {
          Checked& own = i == 0 ? inner : outer;
          const auto run = own.start(pool, some_limit());
          run->help_until(Sync::Time::max());
          own.check(*run, false);
        },
        some_limit());
    std::vector<Sync::Thread> clients;
    for (int client = 0; client < 2; ++client) clients.emplace_back([&] { wait(*around); });
    for (auto& client : clients) client.join();
    expect(around->done() && !around->error(), "a call that waits for others has failed");
  });
}

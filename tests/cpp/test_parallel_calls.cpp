// Uses ParallelFor as a map of calls with a parallel backward does, on real threads, for the sanitizers: runs that read
// results of earlier runs, callers that help in slices, calls that map again, failures, cancellation and stops. Calls
// pass data to each other in plain memory: only the runs order the accesses.
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "futures.h"
#include "runtime/parallel_for.h"

using namespace pymoe::runtime;
using namespace std::chrono_literals;
using Sync = SystemSync;
using Pool = WorkerPool<Sync>;
using Calls = ParallelFor<Sync>;

namespace {

constexpr int kCalls = 8;

// Waits as a caller does: it helps, in slices that are mostly too short.
void help(Calls& run, int step) {
  while (!run.help_until(Sync::now() + (step % 3 == 0 ? 10us : 1ms))) {
  }
}

// Returns the limit of a run: mostly that of maps, sometimes none or a very small one.
Sync::Duration limit(int step) { return step % 4 == 0 ? 0us : step % 4 == 1 ? 2us : 200us; }

// One map: backward calls read what their forward calls have saved, and the caller reads the results of both.
struct Map {
  explicit Map(int seed) : seed(seed) {}

  // Runs both passes; returns how many of the results are wrong.
  int run(Pool& pool, int step) {
    const auto forward = [this](int call) {
      const auto at = static_cast<size_t>(call);
      outputs[at] = *(saved[at] = std::make_unique<int>(seed + call));
    };
    const auto backward = [this](int call) {
      const auto at = static_cast<size_t>(call);
      gradients[at] = 2 * *std::exchange(saved[at], nullptr);
    };
    help(*Calls::start(pool, kCalls, forward, limit(step)), step);
    help(*Calls::start(pool, kCalls, backward, limit(step + 1)), step);
    int wrong = 0;
    for (int call = 0; call < kCalls; ++call) {
      const auto at = static_cast<size_t>(call);
      wrong += outputs[at] != seed + call || gradients[at] != 2 * (seed + call) || saved[at] != nullptr;
      outputs[at] = gradients[at] = 0;
    }
    return wrong;
  }

  int seed;
  std::array<std::unique_ptr<int>, kCalls> saved;
  std::array<int, kCalls> outputs{}, gradients{};
};

// Runs `client(number)` on `count` threads at the same time.
template <typename Client>
void on_clients(int count, const Client& client) {
  std::latch start(count);
  std::vector<std::thread> threads;
  for (int number = 0; number < count; ++number) {
    threads.emplace_back([&, number] {
      start.arrive_and_wait();
      client(number);
    });
  }
  for (auto& thread : threads) thread.join();
}

// Makes a call that maps over three calls of its own, nested `depth` levels deep.
int nested(Pool& pool, int depth) {
  if (depth == 0) return 1;
  std::array<int, 3> counts{};
  const auto call = [&](int i) { counts[static_cast<size_t>(i)] = nested(pool, depth - 1); };
  help(*Calls::start(pool, 3, call, limit(depth)), depth);
  return counts[0] + counts[1] + counts[2];
}

}  // namespace

TEST_CASE("what a call saves is seen by its backward and by the caller, with any number of clients and workers") {
  for (const int workers : {1, 2, 8}) {
    Pool pool(workers);
    std::atomic<int> wrong{0};
    on_clients(3, [&](int client) {
      Map map(100 * client);
      for (int step = 0; step < 300; ++step) wrong += map.run(pool, step);
    });
    CHECK(wrong == 0);
  }
}

TEST_CASE("calls that map again end on fewer workers than there are maps waiting") {
  for (const int workers : {1, 2, 4}) {
    Pool pool(workers);
    std::atomic<int> wrong{0};
    on_clients(2, [&](int) {
      for (int step = 0; step < 10; ++step) wrong += nested(pool, 4) != 81;
    });
    CHECK(wrong == 0);
  }
}

TEST_CASE("every call ends before the caller sees the failure, which is that of the first call") {
  Pool pool(4);
  std::atomic<int> wrong{0};
  on_clients(2, [&](int client) {
    for (int step = 0; step < 200; ++step) {
      std::array<int, kCalls> ended{};
      const auto fails = [&](int call) { return (call * 7 + step + client) % 3 == 0; };
      const auto call = [&](int i) {
        ended[static_cast<size_t>(i)] = 1;
        if (fails(i)) throw std::runtime_error("call " + std::to_string(i));
      };
      const auto run = Calls::start(pool, kCalls, call, limit(step));
      help(*run, step);
      for (const int one : ended) wrong += one != 1;
      int first = 0;
      while (!fails(first)) ++first;
      try {
        get(*run);
        ++wrong;
      } catch (const std::runtime_error& error) {
        wrong += error.what() != "call " + std::to_string(first);
      }
    }
  });
  CHECK(wrong == 0);
}

TEST_CASE("a map that is cancelled while others help it has run each call wholly or not at all") {
  // Fewer than kCalls threads run calls, so calls that wait for the cancellation leave others that it cuts off.
  Pool pool(3);
  for (int step = 0; step < 300; ++step) {
    std::array<int, kCalls> began{}, ended{};
    std::latch first(1), cancelled(1);
    const auto call = [&](int i) {
      began[static_cast<size_t>(i)] = 1;
      if (i == 0) first.count_down();
      if (step % 4 == 0) cancelled.wait();
      std::this_thread::yield();
      ended[static_cast<size_t>(i)] = 1;
    };
    const auto run = Calls::start(pool, kCalls, call, limit(step));
    std::thread helper([&] { help(*run, step); });
    std::thread canceller([&] {
      if (step % 2 == 0) first.wait();
      run->cancel();
      cancelled.count_down();
    });
    help(*run, step + 1);
    int left_out = 0;
    for (int call = 0; call < kCalls; ++call) {
      CHECK(began[static_cast<size_t>(call)] == ended[static_cast<size_t>(call)]);
      left_out += began[static_cast<size_t>(call)] == 0;
    }
    CHECK((run->error() != nullptr) == (left_out > 0));
    if (step % 4 == 0) CHECK(left_out > 0);
    canceller.join();
    helper.join();
  }
}

TEST_CASE("a pool that is stopped under running maps ends or refuses each of them") {
  for (int step = 0; step < 40; ++step) {
    for (const Stop how : {Stop::kDrain, Stop::kCancel}) {
      Pool pool(2);
      std::atomic<int> ended{0}, cancelled{0}, refused{0};
      std::latch running(2);
      std::thread stopper([&] {
        running.wait();
        pool.request_stop(how);
      });
      on_clients(2, [&](int client) {
        for (int turn = 0;; ++turn) {
          std::array<int, kCalls> ran{};
          try {
            const auto call = [&](int i) { ran[static_cast<size_t>(i)] = 1; };
            const auto run = Calls::start(pool, kCalls, call, limit(turn + client));
            if (turn == 0) running.count_down();
            help(*run, client + step);
            int count = 0;
            for (const int one : ran) count += one;
            if (run->error()) {
              ++cancelled;
              CHECK(count < kCalls);
            } else {
              ++ended;
              CHECK(count == kCalls);
            }
          } catch (const StoppedError&) {
            ++refused;
            break;
          }
        }
      });
      stopper.join();
      pool.stop();
      CHECK(refused == 2);
      if (how == Stop::kDrain) CHECK(cancelled == 0);
    }
  }
}

// Tests the runtime on real threads, under load: of a million tasks and a million requests, none is lost, and none runs
// twice.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

#include "futures.h"
#include "runtime/executor.h"
#include "runtime/parallel_for.h"
#include "runtime/task_pool.h"

using namespace pymoe::runtime;
using namespace std::chrono_literals;
using Sync = SystemSync;

namespace {

constexpr int kProducers = 8, kWorkers = 4, kEach = 125'000, kAll = kProducers * kEach;

// Counts how often each of a million tasks or requests has run.
class Counts {
 public:
  void add(int number) { runs_[static_cast<size_t>(number)].fetch_add(1, std::memory_order_relaxed); }
  int of(int number) const { return runs_[static_cast<size_t>(number)].load(std::memory_order_relaxed); }

 private:
  std::vector<std::atomic<uint8_t>> runs_ = std::vector<std::atomic<uint8_t>>(size_t{kAll});
};

// Runs `produce(producer)` on eight threads that begin at the same time.
template <typename Produce>
void on_producers(const Produce& produce) {
  std::latch start(kProducers);
  std::vector<std::thread> producers;
  for (int producer = 0; producer < kProducers; ++producer) {
    producers.emplace_back([&, producer] {
      start.arrive_and_wait();
      produce(producer);
    });
  }
  for (auto& producer : producers) producer.join();
}

struct Numbered : Request<Sync> {
  Numbered(int number, int64_t rows, std::optional<Time> deadline) : Request(rows, 0, deadline), number(number) {}
  const int number;
};

struct Counting final : BatchFunction<Sync> {
  Counting(Counts& counts, int64_t limit) : counts(counts), limit(limit) {}
  void run(std::span<const Slice<Sync>> batch) override {
    int64_t rows = 0;
    for (const auto& slice : batch) rows += slice.end - slice.begin;
    over_limit += rows > limit;
    overlaps += inside.exchange(true);
    for (const auto& slice : batch) {
      const int number = static_cast<const Numbered&>(*slice.request).number;
      if (number % 1000 == 999) {
        inside = false;
        throw std::runtime_error("planted");
      }
    }
    for (const auto& slice : batch) counts.add(static_cast<const Numbered&>(*slice.request).number);
    inside = false;
  }
  Counts& counts;
  const int64_t limit;
  std::atomic<bool> inside{false};
  std::atomic<int> over_limit{0}, overlaps{0};
};

}  // namespace

TEST_CASE("a million tasks from eight producers on four workers, some failing, some never waited for") {
  Counts counts;
  std::atomic<int64_t> sum{0}, failed{0};
  {
    WorkerPool<Sync> pool(kWorkers);
    on_producers([&](int producer) {
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
      for (int i = 0; i < kEach; ++i) {
        auto future = submit(pool, [&counts, number = producer * kEach + i] {
          counts.add(number);
          if (number % 1000 == 999) throw std::runtime_error("planted");
          return 1;
        });
        if (i % 10 != 0) window.push_back(std::move(future));  // one future in ten is dropped at once
        if (window.size() == 256) collect();
      }
      collect();
    });
  }
  int wrong = 0;
  for (int number = 0; number < kAll; ++number) wrong += counts.of(number) != 1;
  CHECK(wrong == 0);
  CHECK(failed == kAll / 1000);
  CHECK(sum == kAll - kAll / 10 - kAll / 1000);
}

TEST_CASE("a million requests from eight producers on four workers: waited for, forgotten, cancelled, late, failing") {
  Counts counts;
  std::atomic<int> done{0}, fine{0}, failed{0}, cancelled{0}, expired{0}, unexpected{0};
  BatchingOptions<Sync> options;
  options.max_batch_size = 64;
  options.capacity = 256;
  options.isolate = true;
  std::vector<std::shared_ptr<Counting>> functions;
  std::vector<std::shared_ptr<TaskPool<Sync>>> pools;
  Executor<Sync> executor(kWorkers);
  for (int expert = 0; expert < 3; ++expert) {
    const auto strand = std::make_shared<Strand<Sync>>();
    for (int i = 0; i < 2; ++i) {
      functions.push_back(std::make_shared<Counting>(counts, options.max_batch_size));
      pools.push_back(TaskPool<Sync>::create("pool", options, functions.back(), strand));
    }
    executor.attach(strand);
  }
  on_producers([&](int producer) {
    std::vector<std::pair<TaskPool<Sync>*, std::shared_ptr<Numbered>>> window;
    const auto collect = [&](Help help) {
      for (const auto& [pool, request] : window) pool->wait(request, Sync::Time::max(), help);
      window.clear();
    };
    for (int i = 0; i < kEach; ++i) {
      const int number = producer * kEach + i;
      const auto deadline = i % 16 == 5 ? std::optional(Sync::now() + std::chrono::microseconds(i % 97)) : std::nullopt;
      const auto request = std::make_shared<Numbered>(number, 1 + i % 3, deadline);
      request->on_done([&, request = request.get()] {
        ++done;
        const int runs = counts.of(request->number);
        try {
          if (request->error()) std::rethrow_exception(request->error());
          (runs == 1 ? fine : unexpected)++;
        } catch (const Cancelled&) {
          (runs == 0 ? cancelled : unexpected)++;
        } catch (const DeadlineExceeded&) {
          (runs == 0 && request->deadline ? expired : unexpected)++;
        } catch (const std::runtime_error&) {
          (runs == 0 && request->number % 1000 == 999 ? failed : unexpected)++;
        }
      });
      TaskPool<Sync>& pool = *pools[static_cast<size_t>((producer + i / 64) % 6)];
      pool.submit(request, Sync::Time::max(), i % 2 ? Help::kYes : Help::kNo);
      if (i % 16 == 9) {
        pool.cancel(request);
      } else if (i % 16 != 2) {  // the rest is dropped without a wait
        window.emplace_back(&pool, request);
      }
      if (window.size() == 64) collect(i % 3 ? Help::kYes : Help::kNo);
    }
    collect(Help::kYes);
  });
  executor.request_stop(Stop::kDrain);
  while (!executor.wait_stopped_until(Sync::now() + 100ms)) {
  }
  CHECK(done == kAll);
  CHECK(unexpected == 0);
  CHECK(fine + failed + cancelled + expired == kAll);
  CHECK(fine > kAll / 2);
  CHECK(failed > 0);
  CHECK(failed <= kAll / 1000);
  CHECK(cancelled > 0);
  int more_than_once = 0;
  for (int number = 0; number < kAll; ++number) more_than_once += counts.of(number) > 1;
  CHECK(more_than_once == 0);
  for (const auto& function : functions) {
    CHECK(function->over_limit == 0);
    CHECK(function->overlaps == 0);
  }
  for (const auto& pool : pools) {
    const PoolStatistics& seen = pool->statistics();
    CHECK(seen.completed.value() + seen.failed.value() + seen.cancelled.value() + seen.expired.value() ==
          seen.submitted.value());
    CHECK(seen.queued.value() == 0);
    CHECK(seen.running.value() == 0);
  }
}

TEST_CASE("four clients make ten thousand calls at a time on one pool, beside tasks") {
  constexpr int kCalls = 10'000, kClients = 4, kSteps = 5;
  WorkerPool<Sync> pool(kWorkers);
  std::atomic<int> wrong{0};
  std::vector<std::thread> clients;
  for (int client = 0; client < kClients; ++client) {
    clients.emplace_back([&] {
      std::vector<int> made(kCalls);  // plain memory: only the run orders the accesses
      for (int step = 1; step <= kSteps; ++step) {
        const auto run = ParallelFor<Sync>::start(pool, kCalls, [&](int i) { ++made[static_cast<size_t>(i)]; });
        for (int i = 0; i < 100; ++i) submit(pool, [] {});
        get(*run);
        for (const int count : made) wrong += count != step;
      }
    });
  }
  for (auto& client : clients) client.join();
  CHECK(wrong == 0);
}

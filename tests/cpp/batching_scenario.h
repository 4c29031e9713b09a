// Clients, pools and batches for schedules of the batching core; every promise is checked when it is due.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "runtime/executor.h"
#include "runtime/task_pool.h"
#include "schedules.h"

namespace pymoe::simulation {

using Sync = SimulatedSync;
using Time = Sync::Time;
using runtime::Help;
using namespace std::chrono_literals;

struct PlantedError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct TestRequest : runtime::Request<Sync> {
  using Request::Request;
  // Data that clients put into a request may take any lock when it is destroyed.
  ~TestRequest() override { expect(locks_held() == 0, "a request is destroyed under a lock"); }

  bool bad = false;                    // the batch function throws when it meets this request
  std::atomic<bool> submitted{false};  // submit has returned for this request
  std::atomic<bool> refused{false};    // submit has refused it
  std::atomic<bool> cancelled{false};  // a client cancelled it in time
  std::atomic<bool> begun{false};      // it ran in a batch that was not interrupted
  std::atomic<bool> put_back{false};   // it was in a batch that was interrupted
  std::atomic<int> rows_run{0};        // its rows in batches that did not fail
  std::atomic<int64_t> done_at{-1};    // nanoseconds
  std::atomic<int> ends{0};
  std::atomic<bool> with_bad{false};  // its batch had a bad request, or a job that the batch started was refused
};

struct Expert;

// A pool together with its batch function, which checks every batch.
struct TestPool final : runtime::BatchFunction<Sync>, std::enable_shared_from_this<TestPool> {
  using Slice = runtime::Slice<Sync>;

  TestPool(Expert& expert, const runtime::BatchingOptions<Sync>& options) : expert(expert), options(options) {}

  void run(std::span<const Slice> batch) override;
  void check_limits(std::span<const Slice> batch) const;
  void check_turns(std::span<const Slice> batch) const;
  void check_end() const;

  std::shared_ptr<TestRequest> make_request(bool with_deadlines);
  // Returns false if the pool refused the request.
  bool submit(const std::shared_ptr<TestRequest>& request, Time until, Help help);

  Expert& expert;
  const runtime::BatchingOptions<Sync> options;
  bool stalls = false;
  int interruptions = 0;         // how often a batch may still be interrupted
  std::function<void()> inside;  // additional work of a batch
  std::shared_ptr<runtime::TaskPool<Sync>> pool;
  std::array<std::shared_ptr<TestRequest>, 64> owned;    // by number; keeps each request for its client until the end
  std::array<std::atomic<TestRequest*>, 64> requests{};  // the same requests, for all threads
  std::atomic<size_t> count{0};
};

// Pools that share a strand.
struct Expert {
  std::shared_ptr<runtime::Strand<Sync>> strand = std::make_shared<runtime::Strand<Sync>>();
  std::atomic<int> batches{0};  // batches that run now
  std::vector<std::shared_ptr<TestPool>> pools;

  TestPool& add(const runtime::BatchingOptions<Sync>& options, bool stalls) {
    const auto pool = std::make_shared<TestPool>(*this, options);
    pool->stalls = stalls;
    pool->interruptions = static_cast<int>(random_below(2));
    pool->pool = runtime::TaskPool<Sync>::create("pool", options, pool, strand);
    pools.push_back(pool);
    return *pool;
  }
  // The pool and its batch function hold each other: this breaks the cycle.
  ~Expert() {
    for (const auto& pool : pools) pool->pool = nullptr;
  }
};

// Calls `helps` until it is not interrupted, and returns its result: a batch that it helps with may be interrupted.
template <typename Helps>
auto uninterrupted(const Helps& helps) {
  for (;;) {
    try {
      return helps();
    } catch (const runtime::Interrupted&) {
    }
  }
}

inline runtime::BatchingOptions<Sync> random_options() {
  runtime::BatchingOptions<Sync> options;
  options.max_batch_size = 2 + static_cast<int64_t>(random_below(6));
  if (random_below(3) == 0) {
    options.min_batch_size = 1 + static_cast<int64_t>(random_below(static_cast<uint64_t>(options.max_batch_size)));
  }
  options.timeout = std::chrono::milliseconds(random_below(4));
  options.linger = std::chrono::milliseconds(random_below(3));
  options.capacity = random_below(2) == 0 ? 64 : 1 + static_cast<int64_t>(random_below(3));
  options.isolate = random_below(2) == 0;
  return options;
}

inline Time rank(const runtime::Request<Sync>& request) {
  return runtime::RequestQueue<Sync>::arrival(request) - request.head_start;
}

inline void TestPool::check_limits(std::span<const Slice> batch) const {
  int64_t rows = 0;
  for (const Slice& slice : batch) {
    expect(slice.begin < slice.end && slice.end <= slice.request->rows, "a slice is not a part of its request");
    expect(slice.request->kind == batch[0].request->kind, "requests of two kinds are in one batch");
    expect(slice.whole() || slice.request->rows > options.max_batch_size, "a request is cut that fits into a batch");
    rows += slice.end - slice.begin;
  }
  expect(rows > 0, "a batch is empty");
  expect(rows <= options.max_batch_size, "a batch is over the limit");
}

// Checks that no request that begins now has expired, and that none overtakes a pending request of a smaller rank.
inline void TestPool::check_turns(std::span<const Slice> batch) const {
  for (const Slice& slice : batch) {
    auto& request = static_cast<TestRequest&>(*slice.request);
    expect(!request.done(), "a request runs that is done");
    // A part of a request that was taken before the cancellation may still run.
    expect(!request.cancelled || !slice.last(), "a request runs that was cancelled");
    if (slice.begin > 0 || request.begun) continue;  // begun earlier: a later slice, or part of a batch that runs again
    expect(stalls || !request.deadline || Sync::now() < *request.deadline, "a request starts after its deadline");
    for (size_t i = 0; i < count; ++i) {
      const TestRequest* const there = requests[i];
      if (there == nullptr || !there->submitted) continue;
      const TestRequest& other = *there;
      if (!other.pending() || other.kind != request.kind || other.head_start > 0ns) continue;
      expect(rank(other) >= rank(request) || &other == &request, "a request overtakes one of a smaller rank");
    }
  }
}

inline void TestPool::run(std::span<const Slice> batch) {
  expect(++expert.batches == 1, "two batches of one expert overlap");
  struct Leave {
    ~Leave() { --batches; }
    std::atomic<int>& batches;
  } const leave{expert.batches};
  expect(locks_held() == 0, "a batch runs under a lock");
  check_limits(batch);
  check_turns(batch);
  Sync::preempt();
  const auto interrupt = [&batch] {
    for (const Slice& slice : batch) {
      auto& request = static_cast<TestRequest&>(*slice.request);
      request.put_back = true;
      if (slice.begin == 0) request.begun = false;
    }
    throw runtime::Interrupted{};
  };
  if (interruptions > 0 && random_below(8) == 0) {
    --interruptions;
    interrupt();
  }
  for (const Slice& slice : batch) static_cast<TestRequest&>(*slice.request).begun = true;
  if (random_below(2) == 0) Sync::sleep_for(std::chrono::milliseconds(random_below(3)));
  const auto mark = [&batch] {
    for (const Slice& slice : batch) static_cast<TestRequest&>(*slice.request).with_bad = true;
  };
  try {
    if (inside) inside();
  } catch (const runtime::Interrupted&) {  // it helped with a batch of the other expert, which was interrupted
    interrupt();
  } catch (...) {
    mark();
    throw;
  }
  for (const Slice& slice : batch) {
    if (!static_cast<TestRequest&>(*slice.request).bad) continue;
    if (!options.isolate || batch.size() == 1) mark();
    throw PlantedError("planted");
  }
  for (const Slice& slice : batch) {
    static_cast<TestRequest&>(*slice.request).rows_run += static_cast<int>(slice.end - slice.begin);
  }
}

inline std::shared_ptr<TestRequest> TestPool::make_request(bool with_deadlines) {
  const auto rows = 1 + static_cast<int64_t>(random_below(random_below(4) == 0 ? 12 : 3));
  std::optional<Time> deadline;
  if (with_deadlines && random_below(2) == 0) deadline = Sync::now() + std::chrono::milliseconds(random_below(4));
  const auto head_start = std::chrono::milliseconds(random_below(4) == 0 ? random_below(3) : 0);
  auto request = std::make_shared<TestRequest>(rows, random_below(2), deadline, head_start);
  request->bad = random_below(8) == 0;
  request->on_done([&request = *request] {
    expect(locks_held() == 0, "a callback runs under a lock");
    ++request.ends;
    request.done_at = Sync::now().time_since_epoch().count();
  });
  const size_t number = count++;
  expect(number < requests.size(), "the scenario has too many requests");
  owned[number] = request;
  requests[number] = request.get();
  return request;
}

inline bool TestPool::submit(const std::shared_ptr<TestRequest>& request, Time until, Help help) {
  bool taken = false;
  try {
    if (until == Time::max() && help == Help::kNo && random_below(2) == 0) {
      // Python clients that must not block do this on another thread.
      while (!(taken = pool->submit(request, Time::min()))) expect(pool->wait_for_room(until), "a wait ended early");
    } else {
      taken = uninterrupted([&] { return pool->submit(request, until, help); });
    }
  } catch (const runtime::StoppedError&) {
  }
  (taken ? request->submitted : request->refused) = true;
  return taken;
}

// Called at the end; checks how every request ended.
inline void TestPool::check_end() const {
  int64_t submitted = 0;
  for (size_t i = 0; i < count; ++i) {
    const TestRequest& request = *requests[i];
    expect(request.submitted || request.refused, "a client has not come back from submit");
    if (request.refused) {
      expect(!request.done() && !request.begun && request.rows_run == 0, "a request that was refused has run");
      continue;
    }
    ++submitted;
    expect(request.done(), "a request is lost");
    expect(request.ends == 1, "a request has ended twice");
    const int rows = request.rows_run;
    expect(rows <= request.rows, "rows have run twice");
    try {
      if (request.error()) std::rethrow_exception(request.error());
      expect(rows == request.rows, "a request is done, and some of its rows have not run");
    } catch (const PlantedError&) {
      expect(request.bad || request.with_bad, "a request has failed for another one, or for nothing");
    } catch (const runtime::StoppedError&) {
      expect(request.with_bad, "a request was stopped for nothing");
    } catch (const runtime::Cancelled&) {
      expect(rows < request.rows && (request.begun || rows == 0), "a request was cancelled that has run");
    } catch (const runtime::DeadlineExceeded&) {
      expect(rows == 0 && !request.begun, "a request has expired that has begun");
      const int64_t deadline = request.deadline->time_since_epoch().count();
      expect(request.done_at >= deadline, "a request has expired before its deadline");
      const int64_t arrival = runtime::RequestQueue<Sync>::arrival(request).time_since_epoch().count();
      expect(stalls || request.put_back || request.done_at == std::max(deadline, arrival),
             "a request has expired late");
    }
  }
  const runtime::PoolStatistics& seen = pool->statistics();
  const int64_t ended = seen.completed.value() + seen.failed.value() + seen.cancelled.value() + seen.expired.value();
  expect(seen.submitted.value() == submitted, "the statistics have another number of requests");
  expect(ended == submitted, "the statistics do not add up");
  expect(seen.queued.value() == 0 && seen.queued_rows.value() == 0 && seen.running.value() == 0,
         "the statistics say that something is left");
}

}  // namespace pymoe::simulation

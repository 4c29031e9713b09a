// Pools, strands and the executor on real threads. Waits here end through other threads, never by the clock alone.
#include <doctest/doctest.h>

#include <atomic>
#include <functional>
#include <latch>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "runtime/executor.h"

using namespace pymoe::runtime;
using namespace std::chrono_literals;

namespace {

using Sync = SystemSync;
using Pool = TaskPool<Sync>;
using Pointer = std::shared_ptr<Request<Sync>>;
using Batch = std::span<const Slice<Sync>>;
using Options = BatchingOptions<Sync>;
constexpr auto kForever = Sync::Time::max();

struct Function : BatchFunction<Sync> {
  explicit Function(std::function<void(Batch)> body = {}) : body(std::move(body)) {}
  void run(Batch batch) override {
    if (body) body(batch);
  }
  bool may_retry(const std::exception_ptr&) override { return retry; }
  std::function<void(Batch)> body;
  std::atomic<bool> retry{true};
};

std::shared_ptr<Pool> make_pool(std::function<void(Batch)> body = {}, const Options& options = {},
                                std::shared_ptr<Strand<Sync>> strand = std::make_shared<Strand<Sync>>(),
                                std::string name = "pool") {
  return Pool::create(std::move(name), options, std::make_shared<Function>(std::move(body)), std::move(strand));
}

Pointer request(int64_t rows = 1, uint64_t kind = 0, std::optional<Sync::Time> deadline = std::nullopt,
                Sync::Duration head_start = 0s) {
  return std::make_shared<Request<Sync>>(rows, kind, deadline, head_start);
}

Pointer submit(Pool& pool, Pointer submitted) {
  REQUIRE(pool.submit(submitted, kForever));
  return submitted;
}

template <typename Error>
bool failed_with(const Pointer& request, const std::string& text = "") {
  if (!request->done() || !request->error()) return false;
  try {
    std::rethrow_exception(request->error());
  } catch (const Error& error) {
    return std::string(error.what()).find(text) != std::string::npos;
  } catch (...) {
    return false;
  }
}

bool succeeded(const Pointer& request) { return request->done() && !request->error(); }

void stop(Executor<Sync>& executor, Stop how = Stop::kDrain) {
  executor.request_stop(how);
  while (!executor.wait_stopped_until(kForever)) {
  }
}

// A batch function that tells when it has begun and ends when it is let go.
struct Gate {
  std::latch begun{1}, go{1};
  std::function<void(Batch)> body() {
    return [this, first = std::make_shared<std::atomic<bool>>(true)](Batch) {
      if (!first->exchange(false)) return;
      begun.count_down();
      go.wait();
    };
  }
};

}  // namespace

TEST_CASE("requests run, and their rows are counted") {
  std::atomic<int64_t> rows{0};
  auto pool = make_pool([&](Batch batch) {
    for (const auto& slice : batch) rows += slice.end - slice.begin;
  });
  Executor<Sync> executor(2);
  executor.attach(pool->strand());
  std::vector<Pointer> requests;
  for (int i = 0; i < 100; ++i) requests.push_back(submit(*pool, request(i % 4)));
  for (const auto& r : requests) CHECK(pool->wait(r, kForever));
  for (const auto& r : requests) CHECK(succeeded(r));
  CHECK(rows == 150);
  const PoolStatistics& seen = pool->statistics();
  CHECK(seen.submitted.value() == 100);
  CHECK(seen.completed.value() == 100);
  CHECK(seen.rows.value() == 150);
  CHECK(seen.queued.value() == 0);
  CHECK(seen.queued_rows.value() == 0);
  CHECK(seen.running.value() == 0);
}

TEST_CASE("what is queued before the start runs after it, in one batch") {
  std::atomic<int> batches{0};
  auto pool = make_pool([&](Batch) { ++batches; });
  std::vector<Pointer> requests;
  for (int i = 0; i < 10; ++i) requests.push_back(submit(*pool, request()));
  CHECK_FALSE(pool->wait(requests[0], Sync::now() + 1ms, Help::kYes));  // nobody helps a pool that was not started
  Executor<Sync> executor(1);
  executor.attach(pool->strand());
  for (const auto& r : requests) pool->wait(r, kForever);
  CHECK(batches == 1);
}

TEST_CASE("a thread that waits runs its batch itself if nobody else does") {
  std::set<std::thread::id> ran;
  Gate gate;
  auto busy = make_pool(gate.body());
  auto pool = make_pool([&](Batch) { ran.insert(std::this_thread::get_id()); });
  Executor<Sync> executor(1);
  executor.attach(busy->strand());
  executor.attach(pool->strand());
  submit(*busy, request());
  gate.begun.wait();  // the only worker is taken
  const Pointer mine = submit(*pool, request());
  CHECK(pool->wait(mine, kForever, Help::kYes));
  CHECK(ran == std::set{std::this_thread::get_id()});
  gate.go.count_down();
}

TEST_CASE("an exception ends the requests of its batch and nothing else") {
  auto pool = make_pool([](Batch batch) {
    if (batch[0].request->rows == 13) throw std::runtime_error("planted");
  });
  Executor<Sync> executor(2);
  executor.attach(pool->strand());
  for (int i = 0; i < 20; ++i) {
    const Pointer bad = submit(*pool, request(13));
    pool->wait(bad, kForever);
    CHECK(failed_with<std::runtime_error>(bad, "planted"));
    const Pointer good = submit(*pool, request(1));
    pool->wait(good, kForever);
    CHECK(succeeded(good));
  }
  CHECK(pool->statistics().failed.value() == 20);
}

TEST_CASE("isolation: a bad request fails alone, and the others run once") {
  for (const int bad : {0, 1, 6, 12}) {
    std::vector<int> runs(13, 0);
    std::vector<Pointer> requests;
    Options options;
    options.isolate = true;
    auto pool = make_pool(
        [&](Batch batch) {
          for (const auto& slice : batch) {
            if (slice.request == requests[static_cast<size_t>(bad)]) throw std::runtime_error("planted");
          }
          for (const auto& slice : batch) {
            for (size_t i = 0; i < requests.size(); ++i) runs[i] += requests[i] == slice.request;
          }
        },
        options);
    for (int i = 0; i < 13; ++i) requests.push_back(request());
    for (const auto& r : requests) submit(*pool, r);
    Executor<Sync> executor(1);
    executor.attach(pool->strand());
    for (size_t i = 0; i < requests.size(); ++i) {
      pool->wait(requests[i], kForever);
      const bool is_bad = static_cast<int>(i) == bad;
      CHECK(succeeded(requests[i]) != is_bad);
      CHECK(runs[i] == (is_bad ? 0 : 1));
    }
  }
}

TEST_CASE("isolation: what may not be retried is not") {
  std::atomic<int> batches{0};
  Options options;
  options.isolate = true;
  auto function = std::make_shared<Function>([&](Batch) {
    ++batches;
    throw std::runtime_error("planted");
  });
  function->retry = false;
  auto pool = Pool::create("pool", options, function, std::make_shared<Strand<Sync>>());
  std::vector<Pointer> requests;
  for (int i = 0; i < 8; ++i) requests.push_back(submit(*pool, request()));
  Executor<Sync> executor(1);
  executor.attach(pool->strand());
  for (const auto& r : requests) {
    pool->wait(r, kForever);
    CHECK(failed_with<std::runtime_error>(r, "planted"));
  }
  CHECK(batches == 1);
}

TEST_CASE("a batch that was interrupted goes back to the queue, and nobody sees it") {
  std::atomic<int> batches{0};
  auto pool = make_pool([&](Batch) {
    if (batches++ == 0) throw Interrupted();
  });
  std::vector<Pointer> requests;
  for (int i = 0; i < 5; ++i) requests.push_back(submit(*pool, request()));
  Executor<Sync> executor(1);
  executor.attach(pool->strand());
  for (const auto& r : requests) {
    pool->wait(r, kForever);
    CHECK(succeeded(r));
  }
  CHECK(batches == 2);
  CHECK(pool->statistics().batches.value() == 1);
  CHECK(pool->statistics().queued.value() == 0);
  CHECK(pool->statistics().queued_rows.value() == 0);
  CHECK(pool->statistics().running.value() == 0);
}

TEST_CASE("a request larger than a batch runs in slices, and fails with the first that does") {
  std::vector<std::pair<int64_t, int64_t>> seen;
  Options options;
  options.max_batch_size = 4;
  auto pool = make_pool(
      [&](Batch batch) {
        for (const auto& slice : batch) seen.emplace_back(slice.begin, slice.end);
        if (batch[0].request->rows == 20 && batch[0].begin == 8) throw std::runtime_error("planted");
      },
      options);
  Executor<Sync> executor(2);
  executor.attach(pool->strand());
  const Pointer large = submit(*pool, request(10));
  pool->wait(large, kForever);
  CHECK(succeeded(large));
  CHECK(seen == std::vector<std::pair<int64_t, int64_t>>{{0, 4}, {4, 8}, {8, 10}});
  seen.clear();
  const Pointer bad = submit(*pool, request(20));
  pool->wait(bad, kForever);
  CHECK(failed_with<std::runtime_error>(bad));
  CHECK(seen.size() == 3);
  const Pointer next = submit(*pool, request(1));
  pool->wait(next, kForever);
  CHECK(succeeded(next));
  CHECK(pool->statistics().queued_rows.value() == 0);
}

TEST_CASE("requests of different kinds share no batch") {
  std::atomic<bool> mixed{false};
  auto pool = make_pool([&](Batch batch) {
    for (const auto& slice : batch) {
      if (slice.request->kind != batch[0].request->kind) mixed = true;
    }
  });
  std::vector<Pointer> requests;
  for (uint64_t i = 0; i < 300; ++i) requests.push_back(submit(*pool, request(1, i * i % 100)));
  Executor<Sync> executor(2);
  executor.attach(pool->strand());
  for (const auto& r : requests) pool->wait(r, kForever);
  CHECK_FALSE(mixed);
  CHECK(pool->statistics().completed.value() == 300);
}

TEST_CASE("batches of one strand never overlap, those of two do") {
  std::atomic<int> inside{0};
  std::atomic<bool> overlapped{false};
  const auto body = [&](Batch) {
    if (inside++ != 0) overlapped = true;
    std::this_thread::yield();
    --inside;
  };
  auto strand = std::make_shared<Strand<Sync>>();
  auto forward = make_pool(body, {}, strand), backward = make_pool(body, {}, strand);
  Executor<Sync> executor(4);
  executor.attach(strand);
  std::vector<std::thread> clients;
  for (int i = 0; i < 6; ++i) {
    clients.emplace_back([&, i] {
      Pool& pool = i % 2 ? *forward : *backward;
      for (int k = 0; k < 200; ++k) {
        const Pointer r = submit(pool, request());
        pool.wait(r, kForever, k % 2 ? Help::kYes : Help::kNo);
      }
    });
  }
  for (auto& client : clients) client.join();
  CHECK_FALSE(overlapped);

  std::latch both(2);
  auto one = make_pool([&](Batch) { both.arrive_and_wait(); });
  auto two = make_pool([&](Batch) { both.arrive_and_wait(); });
  executor.attach(one->strand());
  executor.attach(two->strand());
  const Pointer a = submit(*one, request()), b = submit(*two, request());
  one->wait(a, kForever);
  two->wait(b, kForever);
}

TEST_CASE("the oldest request goes first across pools and strands, a head start counted in") {
  std::vector<std::string> order;
  Gate gate;
  auto busy = make_pool(gate.body());
  const auto note = [&](const char* name) { return [&order, name](Batch) { order.push_back(name); }; };
  auto strand = std::make_shared<Strand<Sync>>();
  auto a = make_pool(note("a"), {}, strand), b = make_pool(note("b"), {}, strand), c = make_pool(note("c"));
  Executor<Sync> executor(1);
  for (const auto& s : {busy->strand(), strand, c->strand()}) executor.attach(s);
  submit(*busy, request());
  gate.begun.wait();
  std::vector<std::pair<Pool*, Pointer>> all;
  for (Pool* pool : {b.get(), c.get(), a.get()}) all.emplace_back(pool, submit(*pool, request()));
  gate.go.count_down();
  for (const auto& [pool, r] : all) pool->wait(r, kForever);
  CHECK(order == std::vector<std::string>{"b", "c", "a"});
}

TEST_CASE("a full queue pushes back until there is room") {
  Gate gate;
  Options options;
  options.capacity = 2;
  auto pool = make_pool(gate.body(), options);
  Executor<Sync> executor(1);
  executor.attach(pool->strand());
  submit(*pool, request());
  gate.begun.wait();
  std::vector<Pointer> requests{submit(*pool, request()), submit(*pool, request())};
  const Pointer refused = request();
  CHECK_FALSE(pool->submit(refused, Sync::now()));
  CHECK_FALSE(pool->submit(refused, Sync::now() + 1ms));
  CHECK(refused->pending());
  CHECK(pool->statistics().rejected.value() == 2);
  std::thread waiting([&] { requests.push_back(submit(*pool, refused)); });
  gate.go.count_down();
  waiting.join();
  for (const auto& r : requests) pool->wait(r, kForever);
  CHECK(pool->statistics().completed.value() == 4);
}

TEST_CASE("a cancelled request never runs; one that has begun is not cancelled") {
  Gate gate;
  auto pool = make_pool(gate.body());
  Executor<Sync> executor(1);
  executor.attach(pool->strand());
  const Pointer begun = submit(*pool, request());
  gate.begun.wait();
  const Pointer queued = submit(*pool, request());
  CHECK(pool->cancel(queued));
  CHECK(failed_with<Cancelled>(queued, "was cancelled"));
  CHECK_FALSE(pool->cancel(queued));
  CHECK_FALSE(pool->cancel(begun));
  gate.go.count_down();
  pool->wait(begun, kForever);
  CHECK(succeeded(begun));
  CHECK_FALSE(pool->cancel(begun));
  CHECK(pool->statistics().cancelled.value() == 1);
}

TEST_CASE("a deadline ends a request that has not begun, while every worker is busy and nobody waits for it") {
  Gate gate;
  auto pool = make_pool(gate.body());
  Executor<Sync> executor(1);
  executor.attach(pool->strand());
  submit(*pool, request());
  gate.begun.wait();
  std::latch ended(1);
  const Pointer late = request(1, 0, Sync::now() + 2ms);
  late->on_done([&] { ended.count_down(); });
  submit(*pool, late);
  ended.wait();
  CHECK(failed_with<DeadlineExceeded>(late, "had not started in time"));
  CHECK(pool->statistics().expired.value() == 1);
  gate.go.count_down();
}

TEST_CASE("a deadline counts in a pool that was never started, if somebody waits") {
  auto pool = make_pool();
  const Pointer late = submit(*pool, request(1, 0, Sync::now() + 1ms));
  CHECK(pool->wait(late, kForever));
  CHECK(failed_with<DeadlineExceeded>(late));
}

TEST_CASE("a callback that was set before the end runs once, one set later runs at once") {
  auto pool = make_pool();
  const Pointer r = request();
  std::atomic<int> calls{0};
  r->on_done([&] { ++calls; });
  submit(*pool, r);
  CHECK(calls == 0);
  Executor<Sync> executor(1);
  executor.attach(pool->strand());
  pool->wait(r, kForever);
  stop(executor);
  CHECK(calls == 1);
  r->on_done([&] { ++calls; });
  CHECK(calls == 2);
}

TEST_CASE("draining runs everything, also less than a batch and what lingers") {
  Options options;
  options.min_batch_size = 100;
  auto pool = make_pool({}, options);
  std::vector<Pointer> requests;
  Executor<Sync> executor(2);
  executor.attach(pool->strand());
  for (int i = 0; i < 7; ++i) requests.push_back(submit(*pool, request()));
  stop(executor);
  for (const auto& r : requests) CHECK(succeeded(r));
  CHECK_THROWS_AS(pool->submit(request(), kForever), StoppedError);
  stop(executor);
}

TEST_CASE("cancelling ends what has not begun and waits for what has") {
  Gate gate;
  Options options;
  options.max_batch_size = 2;
  auto pool = make_pool(gate.body(), options);
  Executor<Sync> executor(1);
  executor.attach(pool->strand());
  const Pointer large = submit(*pool, request(7));  // its other slices run too: it has begun
  gate.begun.wait();
  std::vector<Pointer> queued;
  for (int i = 0; i < 5; ++i) queued.push_back(submit(*pool, request()));
  executor.request_stop(Stop::kCancel);
  for (const auto& r : queued) CHECK(failed_with<Cancelled>(r, "shut down"));
  CHECK_FALSE(executor.wait_stopped_until(Sync::now() + 1ms));
  gate.go.count_down();
  stop(executor, Stop::kCancel);
  CHECK(succeeded(large));
}

TEST_CASE("a pool can go from one executor to the next") {
  auto pool = make_pool();
  for (int i = 0; i < 3; ++i) {
    Executor<Sync> executor(1);
    executor.attach(pool->strand());
    CHECK_THROWS_AS(executor.attach(pool->strand()), std::logic_error);
    const Pointer r = submit(*pool, request());
    pool->wait(r, kForever);
    CHECK(succeeded(r));
  }
}

TEST_CASE("one strand leaves while others work on") {
  auto leaving = make_pool(), staying = make_pool();
  Executor<Sync> executor(1);
  executor.attach(leaving->strand());
  executor.attach(staying->strand());
  const Pointer last = submit(*leaving, request());
  executor.request_release(leaving->strand(), Stop::kDrain);
  while (!executor.wait_released_until(leaving->strand(), kForever)) {
  }
  CHECK(succeeded(last));
  CHECK_THROWS_AS(leaving->submit(request(), kForever), StoppedError);
  const Pointer r = submit(*staying, request());
  staying->wait(r, kForever);
  CHECK(succeeded(r));
}

TEST_CASE("an expert may ask another one on the only worker there is") {
  auto inner = make_pool();
  std::atomic<int> asked{0};
  auto outer = make_pool([&](Batch) {
    for (int i = 0; i < 3; ++i) {
      const Pointer r = submit(*inner, request());
      inner->wait(r, kForever, Help::kYes);
      asked += succeeded(r);
    }
  });
  Executor<Sync> executor(1);
  executor.attach(inner->strand());
  executor.attach(outer->strand());
  const Pointer r = submit(*outer, request());
  outer->wait(r, kForever);
  CHECK(succeeded(r));
  CHECK(asked == 3);
}

TEST_CASE("a worker that waits for another expert sees its batch become ready") {
  // The inner pool wants two rows: the second one comes when the only worker waits already.
  Options options;
  options.min_batch_size = 2;
  auto inner = make_pool({}, options);
  std::latch waiting(1);
  auto outer = make_pool([&](Batch) {
    const Pointer r = submit(*inner, request());
    waiting.count_down();
    inner->wait(r, kForever, Help::kYes);
  });
  Executor<Sync> executor(1);
  executor.attach(inner->strand());
  executor.attach(outer->strand());
  const Pointer r = submit(*outer, request());
  waiting.wait();
  submit(*inner, request());
  outer->wait(r, kForever);
  CHECK(succeeded(r));
}

TEST_CASE("a batch that waits for its own expert is told so") {
  std::shared_ptr<Pool> pool;
  pool = make_pool([&](Batch) {
    const Pointer r = submit(*pool, request());
    pool->wait(r, kForever, Help::kYes);
  });
  Executor<Sync> executor(2);
  executor.attach(pool->strand());
  const Pointer r = submit(*pool, request());
  pool->wait(r, kForever);
  CHECK(failed_with<std::logic_error>(r, "waits for its own expert"));
  stop(executor, Stop::kCancel);
  pool.reset();
}

TEST_CASE("a pool that goes completes what it holds") {
  auto pool = make_pool();
  const Pointer r = submit(*pool, request());
  pool.reset();
  CHECK(failed_with<Cancelled>(r, "has gone"));
}

TEST_CASE("clients that come back share batches; a lonely one has its own") {
  // Each client's next request follows its answer. What is measured is what the linger promises, not time.
  for (const int clients : {1, 64}) {
    auto pool = make_pool([](Batch) {
      const auto until = Sync::now() + 300us;
      while (Sync::now() < until) {
      }
    });
    Executor<Sync> executor(2);
    executor.attach(pool->strand());
    std::vector<std::thread> threads;
    for (int i = 0; i < clients; ++i) {
      threads.emplace_back([&] {
        for (int k = 0; k < 50; ++k) {
          const Pointer r = submit(*pool, request());
          pool->wait(r, kForever, Help::kYes);
        }
      });
    }
    for (auto& thread : threads) thread.join();
    const double mean =
        static_cast<double>(pool->statistics().rows.value()) / static_cast<double>(pool->statistics().batches.value());
    MESSAGE(clients << " clients: batches of " << mean << " on average");
    if (clients == 1) CHECK(mean == 1);
    if (clients > 1) CHECK(mean > 1);
  }
}

TEST_CASE("a histogram's buckets are in order and hold what they say") {
  CHECK(Histogram::bucket(UINT64_MAX) == Histogram::kBuckets - 1);
  for (int i = 0; i < Histogram::kBuckets; ++i) {
    CHECK(Histogram::bucket(Histogram::lowest(i)) == i);
    if (i > 0) CHECK(Histogram::bucket(Histogram::lowest(i) - 1) == i - 1);
  }
  Histogram histogram;
  for (uint64_t value = 0; value < 1000; ++value) histogram.add(value);
  const auto seen = histogram.snapshot();
  CHECK(seen.sum == 499500);
  CHECK(seen.max == 999);
  uint64_t count = 0;
  for (const uint64_t n : seen.counts) count += n;
  CHECK(count == 1000);
}

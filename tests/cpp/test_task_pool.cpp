// Tests requests through one pool, on real threads. A wait is ended by another thread, never only by the clock.
#include <doctest/doctest.h>

#include <atomic>
#include <latch>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "pools.h"

using namespace pymoe::runtime;
using namespace pymoe::runtime::test;
using namespace std::chrono_literals;

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
  CHECK_FALSE(pool->wait(requests[0], Sync::now() + 1ms, Help::kYes));  // no thread helps a pool that was not started
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
  gate.begun.wait();  // the only worker is busy
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
  CHECK(pool->statistics().rejected.value() == 0);  // a refused client may try again
  pool->reject();
  CHECK(pool->statistics().rejected.value() == 1);
  std::thread waiting([&] { requests.push_back(submit(*pool, refused)); });
  gate.go.count_down();
  waiting.join();
  for (const auto& r : requests) pool->wait(r, kForever);
  CHECK(pool->statistics().completed.value() == 4);
}

TEST_CASE("a thread can wait for room without a request, until there is some or the pool is closed") {
  Gate gate;
  Options options;
  options.capacity = 1;
  auto pool = make_pool(gate.body(), options);
  Executor<Sync> executor(1);
  executor.attach(pool->strand());
  CHECK(pool->wait_for_room(Sync::now()));
  const Pointer begun = submit(*pool, request());
  gate.begun.wait();
  const Pointer queued = submit(*pool, request());
  CHECK_FALSE(pool->wait_for_room(Sync::now() + 1ms));
  for (const bool cancels : {true, false}) {
    std::thread waiting([&] { CHECK(pool->wait_for_room(kForever)); });
    if (cancels) {
      CHECK(pool->cancel(queued));
    } else {
      gate.go.count_down();
    }
    waiting.join();
    if (cancels) submit(*pool, request());
  }
  pool->wait(begun, kForever);
  pool->close();
  CHECK_THROWS_AS(pool->wait_for_room(kForever), StoppedError);
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
  CHECK_FALSE(failed_with<DeadlineExceeded>(late, "no Runtime serves the pool"));
  CHECK(pool->statistics().expired.value() == 1);
  gate.go.count_down();
}

TEST_CASE("a deadline counts in a pool that was never started, if somebody waits") {
  auto pool = make_pool();
  const Pointer late = submit(*pool, request(1, 0, Sync::now() + 1ms));
  CHECK(pool->wait(late, kForever));
  CHECK(failed_with<DeadlineExceeded>(late, "had not started in time; no Runtime serves the pool"));
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

TEST_CASE("callbacks with a key are taken back, in any number, and others stay in their order") {
  auto pool = make_pool();
  const Pointer r = request();
  std::vector<int> calls;
  const int one = 0, other = 0;
  r->on_done([&] { calls.push_back(1); });
  r->on_done([&] { calls.push_back(2); }, &one);
  r->on_done([&] { calls.push_back(3); }, &other);
  r->on_done([&] { calls.push_back(4); }, &one);
  CHECK(r->remove(&one).size() == 2);
  CHECK(r->remove(&one).empty());
  submit(*pool, r);
  pool.reset();
  CHECK(calls == std::vector<int>{1, 3});
  CHECK(r->remove(&other).empty());
}

TEST_CASE("a callback that is taken back while the end comes is called or returned, never both") {
  for (int i = 0; i < 200; ++i) {
    auto pool = make_pool();
    const Pointer r = submit(*pool, request());
    std::atomic<size_t> calls{0};
    r->on_done([&] { ++calls; }, &calls);
    std::thread ends([&] { pool.reset(); });
    const size_t removed = r->remove(&calls).size();
    ends.join();
    CHECK(calls + removed == 1);
  }
}

TEST_CASE("a pool that goes completes what it holds") {
  auto pool = make_pool();
  const Pointer r = submit(*pool, request());
  pool.reset();
  CHECK(failed_with<Cancelled>(r, "has gone"));
}

// Sets a callback on one request that waits for another, and then says whether that one had ended.
static void wait_after(Pool& pool, const Pointer& one, const Pointer& other, std::atomic<int>& ended) {
  one->on_done([&, other] { ended += pool.wait(other, Sync::now() + 2s); });
}

TEST_CASE("a callback may wait for any request that ends together with its own") {
  std::atomic<int> ended{0};
  SUBCASE("their deadlines have passed") {
    auto pool = make_pool();
    const auto soon = Sync::now() + 1ms;
    const Pointer first = request(1, 0, soon), second = request(1, 0, soon);
    wait_after(*pool, first, second, ended);
    wait_after(*pool, second, first, ended);
    submit(*pool, first);
    submit(*pool, second);
    std::this_thread::sleep_until(soon);
    pool->expire();
    CHECK(failed_with<DeadlineExceeded>(first));
  }
  SUBCASE("the pool is cancelled") {
    auto pool = make_pool();
    const Pointer first = request(), second = request();
    wait_after(*pool, first, second, ended);
    wait_after(*pool, second, first, ended);
    submit(*pool, first);
    submit(*pool, second);
    pool->cancel_all("stopped");
    CHECK(failed_with<Cancelled>(first, "stopped"));
  }
  SUBCASE("a stop cancels the pools of a strand, and other strands") {
    Options never;
    never.min_batch_size = 100;
    auto strand = std::make_shared<Strand<Sync>>();
    auto forward = make_pool({}, never, strand), backward = make_pool({}, never, strand), other = make_pool({}, never);
    const Pointer a = request(), b = request(), c = request();
    wait_after(*backward, a, b, ended);
    wait_after(*other, b, c, ended);
    submit(*forward, a);
    submit(*backward, b);
    submit(*other, c);
    Executor<Sync> executor(1);
    executor.attach(std::vector{strand, other->strand()});
    stop(executor, Stop::kCancel);
    for (const Pointer& request : {a, b, c}) CHECK(failed_with<Cancelled>(request, "shut down"));
  }
  CHECK(ended == 2);
}

TEST_CASE("a callback of a request that a worker finds expired may wait for the next batch") {
  auto pool = make_pool();
  const auto workers = std::make_shared<WorkerPool<Sync>>(1), timer = std::make_shared<WorkerPool<Sync>>(1);
  timer->request_stop(Stop::kCancel);  // so that the worker finds it
  const Pointer late = request(1, 0, Sync::now() + 1ms), next = request();
  std::atomic<bool> ended{false};
  std::latch called(1);
  late->on_done([&] {
    try {
      ended = pool->wait(next, Sync::now() + 2s, Help::kYes);
    } catch (const std::logic_error&) {
    }
    called.count_down();
  });
  submit(*pool, late);
  submit(*pool, next);
  std::this_thread::sleep_until(*late->deadline);
  pool->strand()->attach(workers, timer);
  called.wait();
  CHECK(failed_with<DeadlineExceeded>(late));
  CHECK(ended);
  CHECK(next->wait_until(kForever));
  CHECK(succeeded(next));
  for (const auto& threads : {workers, timer}) {
    threads->request_stop(Stop::kDrain);
    while (!threads->wait_stopped_until(kForever)) {
    }
  }
  pool->strand()->detach();
}

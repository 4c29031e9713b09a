// Tests strands and the executor on real threads: order, overlap, stops, and experts that call each other.
#include <doctest/doctest.h>

#include <atomic>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "pools.h"

using namespace pymoe::runtime;
using namespace pymoe::runtime::test;
using namespace std::chrono_literals;

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

TEST_CASE("cancelling ends what has not begun and waits for the batch that runs") {
  Gate gate;
  Options options;
  options.max_batch_size = 2;
  auto pool = make_pool(gate.body(), options);
  Executor<Sync> executor(1);
  executor.attach(pool->strand());
  const Pointer large = submit(*pool, request(7));  // has begun, and needs three more batches
  gate.begun.wait();
  std::vector<Pointer> queued;
  for (int i = 0; i < 5; ++i) queued.push_back(submit(*pool, request()));
  executor.request_stop(Stop::kCancel);
  for (const auto& r : queued) CHECK(failed_with<Cancelled>(r, "shut down"));
  CHECK_FALSE(executor.wait_stopped_until(Sync::now() + 1ms));
  gate.go.count_down();
  stop(executor, Stop::kCancel);
  CHECK(failed_with<Cancelled>(large, "before all of its rows had run"));
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
  Strand<Sync>::request_stop({leaving->strand()}, Stop::kDrain);
  while (!executor.wait_released_until(leaving->strand(), kForever)) {
  }
  CHECK(succeeded(last));
  CHECK_THROWS_AS(leaving->submit(request(), kForever), StoppedError);
  const Pointer r = submit(*staying, request());
  staying->wait(r, kForever);
  CHECK(succeeded(r));
}

TEST_CASE("a strand whose release nobody waits for is taken back, before its end and after") {
  Gate gate;
  auto held = make_pool(gate.body());
  Executor<Sync> executor(1);
  executor.attach(held->strand());
  const Pointer first = submit(*held, request());
  gate.begun.wait();
  Strand<Sync>::request_stop({held->strand()}, Stop::kDrain);
  CHECK_FALSE(executor.wait_released_until(held->strand(), Sync::now() + 1ms));
  CHECK_THROWS_AS(held->submit(request(), kForever), StoppedError);
  executor.reopen(held->strand());
  const Pointer second = submit(*held, request());
  gate.go.count_down();
  held->wait(second, kForever);
  CHECK(succeeded(first));
  CHECK(succeeded(second));
  Strand<Sync>::request_stop({held->strand()}, Stop::kDrain);
  while (!executor.wait_released_until(held->strand(), kForever)) {
  }
  executor.reopen(held->strand());
  const Pointer third = submit(*held, request());
  held->wait(third, kForever);
  CHECK(succeeded(third));
  executor.request_stop(Stop::kCancel);
  CHECK_THROWS_AS(executor.reopen(held->strand()), StoppedError);
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
  // The inner pool waits for two rows: the second arrives when the only worker is waiting already.
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

TEST_CASE("clients that come back share batches; a lonely one has its own") {
  // Each client sends its next request after an answer. The test checks what the linger promises, not times.
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

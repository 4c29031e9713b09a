// Tests the batching core under seeded schedules, with clients of every kind.
#include "batching_scenario.h"

using namespace pymoe::runtime;
using namespace pymoe::simulation;

namespace {

// The ways in which clients treat their requests.
struct Shape {
  bool wait = false, forget = false, cancel = false, deadlines = false;
};

void use(TestPool& pool, const Shape& shape) {
  const auto request = pool.make_request(shape.deadlines);
  const Help help = random_below(2) == 0 ? Help::kYes : Help::kNo;
  const uint64_t patience = random_below(4);
  const Time until = patience == 0   ? Sync::now()
                     : patience == 1 ? Sync::now() + std::chrono::milliseconds(random_below(3))
                                     : Time::max();
  if (!pool.submit(request, until, help)) return;
  const bool ways[] = {shape.wait, shape.forget, shape.cancel};
  uint64_t way = random_below(3);
  while (!ways[way]) way = (way + 1) % 3;
  const auto wait_until = [&](Time time) {
    return uninterrupted([&] { return pool.pool->wait(request, time, help); });
  };
  if (way == 0) expect(wait_until(Time::max()), "a wait without a limit has come back early");
  if (way == 2) {
    const bool ended = wait_until(Sync::now() + std::chrono::milliseconds(random_below(3)));
    expect(ended == request->done() || request->done(), "a wait says that a request has ended, and it has not");
    if (pool.pool->cancel(request)) request->cancelled = true;
  }
}

enum class End { kWhenDone, kDrain, kCancel };

// Two experts, one with two pools, and their clients. With `nested`, batches of the first expert call the second.
void serve(bool stalls, const Shape& shape, bool nested, End end) {
  Expert first, second;
  TestPool* pools[] = {&first.add(random_options(), stalls), &first.add(random_options(), stalls),
                       &second.add(random_options(), stalls)};
  if (nested) {
    for (TestPool* pool : {pools[0], pools[1]}) {
      pool->inside = [&inner = *pools[2]] {
        if (random_below(2) == 0) return;
        const auto request = inner.make_request(false);
        if (!inner.submit(request, Time::max(), Help::kYes)) throw StoppedError("the other expert has gone");
        inner.pool->wait(request, Time::max(), Help::kYes);
      };
    }
  }
  {
    Executor<Sync> executor(1 + static_cast<int>(random_below(3)));
    const bool late = random_below(4) == 0;
    executor.attach(first.strand);
    if (!late) executor.attach(second.strand);
    std::vector<Sync::Thread> clients;
    for (uint64_t client = 1 + random_below(4); client > 0; --client) {
      clients.emplace_back([&pools, &shape] {
        for (uint64_t i = 1 + random_below(4); i > 0; --i) {
          use(*pools[random_below(3)], shape);
          if (random_below(4) == 0) Sync::sleep_for(std::chrono::milliseconds(random_below(3)));
        }
      });
    }
    if (late) executor.attach(second.strand);
    if (end != End::kWhenDone) {
      Sync::sleep_for(std::chrono::milliseconds(random_below(6)));
      executor.request_stop(end == End::kDrain ? Stop::kDrain : Stop::kCancel);
    }
    for (auto& client : clients) client.join();
    if (random_below(2) == 0) executor.request_stop(Stop::kDrain);
    if (end == End::kWhenDone) executor.request_stop(Stop::kDrain);
    while (!executor.wait_stopped_until(Sync::now() + 1ms)) {
    }
    for (const TestPool* pool : pools) pool->check_end();
    if (end != End::kCancel) {
      for (const TestPool* pool : pools) {
        for (size_t i = 0; i < pool->count; ++i) {
          const TestRequest& request = *pool->requests[i];
          if (request.refused || request.cancelled || !request.error()) continue;
          try {
            std::rethrow_exception(request.error());
          } catch (const Cancelled&) {
            fail("a request was cancelled by a drain");
          } catch (...) {
          }
        }
      }
    }
  }
}

End random_end() { return static_cast<End>(random_below(3)); }

}  // namespace

TEST_CASE("schedules of batches: clients that wait") {
  run_schedules(20'000, [](bool stalls) { serve(stalls, {.wait = true}, false, End::kWhenDone); });
}

TEST_CASE("schedules of batches: clients that fire and forget") {
  run_schedules(20'000, [](bool stalls) { serve(stalls, {.forget = true}, false, End::kWhenDone); });
}

TEST_CASE("schedules of batches: clients that cancel, and requests with deadlines") {
  run_schedules(20'000, [](bool stalls) {
    serve(stalls, {.wait = true, .cancel = true, .deadlines = true}, false, random_end());
  });
}

TEST_CASE("schedules of batches: batches that ask another expert") {
  run_schedules(20'000, [](bool stalls) { serve(stalls, {.wait = true}, true, random_end()); });
}

TEST_CASE("schedules of batches: everything at once") {
  run_schedules(20'000, [](bool stalls) {
    serve(stalls, {.wait = true, .forget = true, .cancel = true, .deadlines = true}, true, random_end());
  });
}

TEST_CASE("schedules of batches: pools and experts that go in the middle") {
  run_schedules(20'000, [](bool) {
    struct Counting final : BatchFunction<Sync> {
      explicit Counting(std::atomic<int>& ran) : ran(ran) {}
      void run(std::span<const Slice<Sync>> batch) override {
        if (random_below(2) == 0) Sync::sleep_for(1ms);
        for (const auto& slice : batch) ran += static_cast<int>(slice.last());
      }
      std::atomic<int>& ran;
    };
    std::atomic<int> ran{0}, ended{0}, submitted{0};
    {
      Executor<Sync> executor(1 + static_cast<int>(random_below(2)));
      std::vector<Sync::Thread> clients;
      for (uint64_t client = 1 + random_below(3); client > 0; --client) {
        clients.emplace_back([&] {
          const auto strand = std::make_shared<Strand<Sync>>();
          auto pool = TaskPool<Sync>::create("pool", random_options(), std::make_shared<Counting>(ran), strand);
          executor.attach(strand);
          for (int i = 0; i < 3; ++i) {
            const auto request =
                std::make_shared<TestRequest>(1 + static_cast<int64_t>(random_below(3)), random_below(2));
            request->on_done([&ended] { ++ended; });
            ++submitted;
            pool->submit(request, Time::max(), Help::kYes);
            if (random_below(3) == 0) pool->wait(request, Sync::now() + 1ms, Help::kYes);
          }
          switch (random_below(3)) {
            case 0:  // no thread waits for the requests that it still holds
              pool = nullptr;
              break;
            case 1:
              Strand<Sync>::request_stop({strand}, random_below(2) == 0 ? Stop::kDrain : Stop::kCancel);
              while (!executor.wait_released_until(strand, Sync::now() + 1ms)) {
              }
              break;
            default:
              Strand<Sync>::request_stop({strand}, Stop::kCancel);
              pool = nullptr;
              executor.wait_released_until(strand, Time::max());
          }
        });
      }
      for (auto& client : clients) client.join();
    }
    expect(ended == submitted, "a request is lost");
    expect(ran <= submitted, "a request has run twice");
  });
}

TEST_CASE("schedules of batches: a lonely request does not wait, and a small one no longer than its pool says") {
  run_schedules(5'000, [](bool stalls) {
    Expert expert;
    BatchingOptions<Sync> options;
    options.max_batch_size = 8;
    options.linger = 5ms;
    TestPool& lonely = expert.add(options, stalls);
    options.min_batch_size = 4;
    options.timeout = 3ms;
    TestPool& small = expert.add(options, stalls);
    Executor<Sync> executor(1);
    executor.attach(expert.strand);
    for (int i = 0; i < 4; ++i) {
      for (TestPool* pool : {&lonely, &small}) {
        const Help help = random_below(2) == 0 ? Help::kYes : Help::kNo;
        const Time start = Sync::now();
        const auto begun = std::make_shared<std::atomic<int64_t>>(-1);
        const auto inside = [begun] { *begun = Sync::now().time_since_epoch().count(); };
        pool->interruptions = 0;
        pool->inside = inside;
        const auto request = std::make_shared<TestRequest>(1, 0);
        pool->pool->submit(request, Time::max());
        pool->pool->wait(request, Time::max(), help);
        const auto waited = Sync::Duration(*begun) - start.time_since_epoch();
        // A batch may take up to 2 ms before it gets here.
        const auto least = pool == &small ? 3ms : 0ms;
        expect(stalls || (waited >= least && waited <= least + 2ms), "a request has not run when it was due");
      }
    }
  });
}

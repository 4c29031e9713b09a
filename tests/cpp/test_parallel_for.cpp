#include "futures.h"
#include "runtime/parallel_for.h"

#include <doctest/doctest.h>

#include <atomic>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using namespace pymoe::runtime;
using namespace std::chrono_literals;
using Pool = WorkerPool<SystemSync>;
using Calls = ParallelFor<SystemSync>;

TEST_CASE("every call is made once, for any number of workers") {
  for (const int workers : {1, 2, 4}) {
    Pool pool(workers);
    for (int step = 0; step < 50; ++step) {
      std::vector<std::atomic<int>> made(30);
      get(*Calls::start(pool, 30, [&](int i) { ++made[static_cast<size_t>(i)]; }));
      for (const auto& count : made) CHECK(count == 1);
    }
  }
}

TEST_CASE("no calls end at once, and a thousand end without help") {
  Pool pool(2);
  CHECK(Calls::start(pool, 0, [](int) {})->done());
  CHECK(Calls::start(pool, 0, [](int) {}, 1min)->done());
  std::atomic<int> made{0};
  const auto run = Calls::start(pool, 1000, [&](int) { ++made; });
  CHECK(run->wait_until(SystemSync::now() + 1min));
  CHECK(run->error() == nullptr);
  CHECK(made == 1000);
}

TEST_CASE("calls start in the order of their numbers") {
  Pool pool(1);
  std::string order;
  CHECK(Calls::start(pool, 6, [&](int i) { order += std::to_string(i); })->wait_until(SystemSync::now() + 1min));
  CHECK(order == "012345");
}

TEST_CASE("a call that throws touches no other, and the exception of the first by number comes out") {
  Pool pool(2);
  for (int step = 0; step < 20; ++step) {
    std::atomic<int> made{0};
    const auto run = Calls::start(pool, 6, [&](int i) {
      if (i == 1) throw std::out_of_range("call 1");
      if (i == 5) throw std::runtime_error("call 5");
      ++made;
    });
    CHECK_THROWS_WITH_AS(get(*run), "call 1", std::out_of_range);
    CHECK(made == 4);
  }
}

TEST_CASE("whoever waits makes calls, so calls may wait for calls on one worker") {
  Pool pool(1);
  std::atomic<int> made{0};
  std::atomic<bool> on_worker{true};
  const auto run = Calls::start(pool, 2, [&](int) {
    on_worker = on_worker && pool.on_worker();
    get(*Calls::start(pool, 3, [&](int) { ++made; }));
    get(*Calls::start(pool, 3, [&](int) { ++made; }));
  });
  CHECK(run->wait_until(SystemSync::now() + 1min));
  CHECK(on_worker);
  CHECK(made == 12);
}

TEST_CASE("the thread that waits makes all calls while every worker is busy") {
  Pool pool(1);
  std::latch released(1);
  const auto blocker = submit(pool, [&] { released.wait(); });
  while (blocker.wait_for(0s) || pool.older_waits(SystemSync::now())) std::this_thread::yield();
  std::vector<int> order;
  get(*Calls::start(pool, 9, [&](int i) { order.push_back(i); }));
  CHECK(order == std::vector{0, 1, 2, 3, 4, 5, 6, 7, 8});
  released.count_down();
}

TEST_CASE("a wait in slices helps until its time") {
  Pool pool(1);
  std::latch started(1), released(1);
  const auto run = Calls::start(pool, 1, [&](int) {
    started.count_down();
    released.wait();
  });
  started.wait();  // on the worker; otherwise the helper below would make the call itself, and wait for itself
  CHECK_FALSE(run->help_until(SystemSync::now() + 1ms));
  released.count_down();
  CHECK(run->help_until(SystemSync::now() + 1min));
  CHECK(run->done());
}

TEST_CASE("a cancelled run ends with Cancelled once the calls that run have ended") {
  Pool pool(1);
  std::latch started(1), released(1);
  std::atomic<int> made{0};
  const auto run = Calls::start(pool, 3, [&](int) {
    started.count_down();
    released.wait();
    ++made;
  });
  started.wait();
  run->cancel();
  CHECK_FALSE(run->done());
  released.count_down();
  CHECK_THROWS_AS(get(*run), Cancelled);
  CHECK(made == 1);
  run->cancel();  // the run has ended, so this does nothing
}

TEST_CASE("a failure goes before the cancellation, and a cancel that comes late changes nothing") {
  Pool pool(1);
  std::shared_ptr<Calls> run;
  std::latch stored(1);
  run = Calls::start(pool, 3, [&](int) {
    stored.wait();
    run->cancel();
    throw std::runtime_error("failed");
  });
  stored.count_down();
  CHECK_THROWS_WITH_AS(get(*run), "failed", std::runtime_error);
  const auto all = Calls::start(pool, 3, [](int) {});
  all->help_until(SystemSync::Time::max());
  all->cancel();
  CHECK_NOTHROW(get(*all));
}

TEST_CASE("a stop of the pool: a drain makes all calls, a cancel leaves out the rest, and a later run is refused") {
  for (const Stop how : {Stop::kDrain, Stop::kCancel}) {
    Pool pool(1);
    std::latch started(1), released(1);
    int made = 0;
    const auto blocker = submit(pool, [&] {
      started.count_down();
      released.wait();
    });
    started.wait();
    const auto run = Calls::start(pool, 4, [&](int) { ++made; });
    pool.request_stop(how);
    released.count_down();
    pool.stop();
    CHECK(run->done());
    CHECK(made == (how == Stop::kDrain ? 4 : 0));
    if (how == Stop::kCancel) CHECK_THROWS_AS(get(*run), Cancelled);
    CHECK_THROWS_AS(Calls::start(pool, 4, [](int) {}), StoppedError);
    CHECK_THROWS_AS(Calls::start(pool, 4, [](int) {}, 1min), StoppedError);
  }
}

TEST_CASE("the function lives as long as the run, also where nobody waits") {
  std::atomic<int> made{0};
  const auto seen = std::make_shared<int>(7);
  {
    Pool pool(1);
    Calls::start(pool, 100, [&made, seen](int) { made += *seen == 7; });
  }
  CHECK(made == 100);
  CHECK(seen.use_count() == 1);
}

TEST_CASE("an older job goes before the rest of the calls") {
  Pool pool(1);
  std::string order;
  struct Older final : Job {
    explicit Older(std::string& order) : order(order) {}
    void run() noexcept override { order += 'o'; }
    std::string& order;
  };
  const auto run = Calls::start(pool, 2, [&](int i) {
    order += std::to_string(i);
    if (i == 0) pool.post(std::make_shared<Older>(order), SystemSync::now() - 1h);
  });
  CHECK(run->wait_until(SystemSync::now() + 1min));
  pool.stop();
  CHECK(order == "0o1");
}

TEST_CASE("many runs at once on one pool") {
  Pool pool(4);
  std::latch start(4);
  std::vector<std::thread> clients;
  std::atomic<int> wrong{0};
  for (int client = 0; client < 4; ++client) {
    clients.emplace_back([&] {
      start.arrive_and_wait();
      for (int step = 0; step < 500; ++step) {
        std::vector<int> made(16);
        get(*Calls::start(pool, 16, [&](int i) { ++made[static_cast<size_t>(i)]; }));
        for (const int count : made) wrong += count != 1;
      }
    });
  }
  for (auto& client : clients) client.join();
  CHECK(wrong == 0);
}

TEST_CASE("with a limit short calls stay on the thread that waits, and a long one brings the workers") {
  Pool pool(2);
  std::atomic<int> elsewhere{0};
  const auto self = std::this_thread::get_id();
  get(*Calls::start(pool, 100, [&](int) { elsewhere += std::this_thread::get_id() != self; }, 1min));
  CHECK(elsewhere == 0);

  // Only another thread, by making the second call, can end the first one.
  std::atomic<bool> released{false};
  const auto run = Calls::start(
      pool, 2,
      [&](int i) {
        if (i == 1) released = true;
        while (!released) std::this_thread::yield();
      },
      1ms);
  get(*run);
  CHECK(released);
}

TEST_CASE("with a limit a run goes on though nobody waits, and a wait in slices is no wait for all") {
  Pool pool(1);
  std::atomic<bool> released{true};
  std::atomic<int> made{0};
  const auto call = [&](int i) {
    while (i == 0 && !released) std::this_thread::yield();
    ++made;
  };
  const auto alone = Calls::start(pool, 11, call, 1ms);
  while (!alone->done()) std::this_thread::yield();
  CHECK(made == 11);
  // The first call blocks the worker, so the run cannot have ended when the wait ends.
  released = false;
  const auto sliced = Calls::start(pool, 11, call, 1min);
  CHECK_FALSE(sliced->help_until(SystemSync::now() - 1ms));  // the time has passed: from now on workers make the calls
  released = true;
  while (!sliced->done()) std::this_thread::yield();
  CHECK(made == 22);
}

TEST_CASE("a stop of the pool leaves a run with a limit to who waits for it") {
  for (const Stop how : {Stop::kDrain, Stop::kCancel}) {
    Pool pool(1);
    int made = 0;
    const auto run = Calls::start(pool, 3, [&](int) { ++made; }, 1min);
    pool.stop(how);
    get(*run);
    CHECK(made == 3);
  }
}

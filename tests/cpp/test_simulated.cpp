// Tests of the simulation itself: the choices that a seed determines, the faults that it finds, and its own rules.
#include "simulated.h"

#include <doctest/doctest.h>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "runtime/worker_pool.h"

using namespace pymoe::runtime;
using namespace pymoe::simulation;
using namespace std::chrono_literals;
using Sync = SimulatedSync;

namespace {

// Returns the failure of the first of `seeds` schedules that fails; empty if none does.
std::string first_failure(uint64_t seeds, const std::function<void()>& body) {
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    const Outcome outcome = simulate({.seed = seed, .most_steps = 10'000}, body);
    if (!outcome.ok()) return outcome.failure;
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// A mailbox for one number, with a place for a planted bug.
struct Mailbox {
  Sync::Mutex mutex;
  Sync::Condition filled;
  bool full = false;
  bool if_for_while = false, lets_go_between = false;

  void put() {
    {
      const std::lock_guard lock(mutex);
      full = true;
    }
    filled.notify_one();
  }
  void take() {
    std::unique_lock lock(mutex);
    if (if_for_while) {
      if (!full) filled.wait(lock);
    } else if (lets_go_between) {
      bool empty = !full;
      lock.unlock();
      lock.lock();
      for (; empty; empty = !full) filled.wait(lock);
    } else {
      while (!full) filled.wait(lock);
    }
    expect(full, "nothing is in the mailbox");
    full = false;
  }
};

void use_mailbox(bool if_for_while, bool lets_go_between) {
  Mailbox box;
  box.if_for_while = if_for_while;
  box.lets_go_between = lets_go_between;
  Sync::Thread taker([&] { box.take(); });
  box.put();
  taker.join();
}

}  // namespace

TEST_CASE("a seed decides the schedule, and seeds differ") {
  const auto body = [] {
    Sync::Mutex mutex;
    std::vector<Sync::Thread> threads;
    for (uint64_t i = 0; i < 4; ++i) {
      threads.emplace_back([&mutex, i] {
        for (int j = 0; j < 5; ++j) {
          const std::lock_guard lock(mutex);
          note(i);
        }
      });
    }
    for (auto& thread : threads) thread.join();
  };
  std::set<uint64_t> hashes;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    for (const bool stalls : {false, true}) {
      const Outcome outcome = simulate({.seed = seed, .stalls = stalls}, body);
      CHECK(outcome.ok());
      CHECK(simulate({.seed = seed, .stalls = stalls}, body).hash == outcome.hash);
      if (stalls) hashes.insert(outcome.hash);
    }
  }
  CHECK(hashes.size() > 150);
}

TEST_CASE("every order of three threads comes up, in every style") {
  for (uint64_t style = 0; style < 4; ++style) {
    std::set<int> orders;
    for (uint64_t seed = style; seed < 40'000; seed += 4) {
      std::atomic<int> order{0};
      const auto append = [&order](int thread) { order = order * 10 + thread; };
      const auto body = [&append] {
        Sync::Thread a([&] { append(1); }), b([&] { append(2); });
        append(3);
        a.join();
        b.join();
      };
      CHECK(simulate({.seed = seed}, body).ok());
      orders.insert(order);
    }
    CHECK(orders.size() == 6);
  }
}

TEST_CASE("a correct program passes every schedule") {
  CHECK(first_failure(2000, [] { use_mailbox(false, false); }) == "");
}

TEST_CASE("`if` in the place of `while` around a wait is found") {
  CHECK(contains(first_failure(2000, [] { use_mailbox(true, false); }), "nothing is in the mailbox"));
}

TEST_CASE("a lost wake-up is found, and the report says who waits for what") {
  const std::string report = first_failure(2000, [] { use_mailbox(false, true); });
  CHECK(contains(report, "deadlock"));
  CHECK(contains(report, "thread 1: joins thread 2"));
  CHECK(contains(report, "thread 2: waits for condition"));
  CHECK(contains(report, "seed "));
}

TEST_CASE("two mutexes in two orders: a deadlock in some schedule") {
  const std::string report = first_failure(2000, [] {
    Sync::Mutex first, second;
    Sync::Thread other([&] {
      name_thread("the other");
      const std::lock_guard one(second), two(first);
    });
    { const std::lock_guard one(first), two(second); }
    other.join();
  });
  CHECK(contains(report, "thread 2 (the other): locks mutex"));
  CHECK(contains(report, ", which thread 1 holds"));
}

TEST_CASE("an update that is not atomic is found") {
  const auto count = [](bool atomically) {
    return [atomically] {
      Sync::Mutex mutex;
      int value = 0;
      const auto add = [&] {
        std::unique_lock lock(mutex);
        const int seen = value;
        if (!atomically) {
          lock.unlock();
          lock.lock();
        }
        value = seen + 1;
      };
      Sync::Thread other(add);
      add();
      other.join();
      expect(value == 2, "an addition is lost");
    };
  };
  CHECK(contains(first_failure(2000, count(false)), "an addition is lost"));
  CHECK(first_failure(1000, count(true)) == "");
}

TEST_CASE("a schedule that does not end is ended") {
  const std::string report = first_failure(1, [] {
    for (;;) Sync::preempt();
  });
  CHECK(contains(report, "does not end"));
  CHECK(contains(report, "thread 1 is preempted"));
}

TEST_CASE("the clock stands while anybody can run, and then goes to the next time that is waited for") {
  const auto body = [] {
    const Sync::Time start = Sync::now();
    Sync::Mutex mutex;
    Sync::Condition never;
    Sync::Thread sleeper([&] {
      Sync::sleep_for(2h);
      expect(Sync::now() == start + 2h, "a sleep ends at its time");
    });
    Sync::Thread waiter([&] {
      std::unique_lock lock(mutex);
      while (never.wait_until(lock, start + 1h)) {
      }
      expect(Sync::now() == start + 1h, "a wait ends at its time");
      expect(!never.wait_until(lock, start), "a time that has passed is not waited for");
    });
    for (int i = 0; i < 20; ++i) Sync::preempt();
    expect(Sync::now() <= start + 2h, "code takes no time");
    waiter.join();
    sleeper.join();
  };
  CHECK(first_failure(500, body) == "");
  CHECK(simulate({.seed = 1}, body).nanoseconds == std::chrono::nanoseconds(2h).count());
}

TEST_CASE("stalls take time, in some schedules, and hold up one thread alone") {
  int stalled = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const Outcome outcome = simulate({.seed = seed, .stalls = true}, [] {
      for (int i = 0; i < 20; ++i) Sync::preempt();
    });
    CHECK(outcome.ok());
    stalled += outcome.nanoseconds > 0;
  }
  CHECK(stalled > 10);
  CHECK(stalled < 100);
}

TEST_CASE("misuse of a mutex or a condition is found") {
  CHECK(contains(first_failure(1, [] { Sync::Mutex().unlock(); }), "which it does not hold"));
  CHECK(contains(first_failure(1,
                               [] {
                                 Sync::Mutex mutex;
                                 mutex.lock();
                                 mutex.lock();
                               }),
                 "which it holds"));
  CHECK(contains(first_failure(1,
                               [] {
                                 Sync::Mutex mutex;
                                 mutex.lock();
                               }),
                 "destroyed while it is locked"));
  CHECK(contains(first_failure(2000,
                               [] {
                                 Sync::Mutex mutex;
                                 auto ended = std::make_unique<Sync::Condition>();
                                 bool waits = false;
                                 Sync::Thread waiter([&] {
                                   std::unique_lock lock(mutex);
                                   waits = true;
                                   ended->wait(lock);
                                 });
                                 const auto look = [&] {
                                   const std::lock_guard lock(mutex);
                                   return waits;
                                 };
                                 while (!look()) Sync::sleep_for(1ms);
                                 ended.reset();
                                 waiter.join();
                               }),
                 "destroyed while thread 2 waits for it"));
}

TEST_CASE("an exception that leaves a thread fails the schedule") {
  const std::string report = first_failure(1, [] { Sync::Thread([] { throw std::runtime_error("planted"); }).join(); });
  CHECK(contains(report, "an exception has left the thread: planted"));
}

TEST_CASE("exceptions in flight belong to their thread") {
  const auto body = [] {
    const auto thrower = [](int mine) {
      for (int i = 0; i < 3; ++i) {
        try {
          throw mine;
        } catch (const int& caught) {
          Sync::preempt();
          try {
            throw std::runtime_error("inner");
          } catch (const std::exception&) {
            Sync::preempt();
          }
          expect(caught == mine, "another thread's exception is caught");
          try {
            std::rethrow_exception(std::current_exception());
          } catch (const int& again) {
            Sync::preempt();
            expect(again == mine, "another thread's exception is current");
          }
        }
        expect(std::uncaught_exceptions() == 0, "an exception is in flight that nobody threw");
      }
    };
    Sync::Thread first([&] { thrower(1); }), second([&] { thrower(2); });
    thrower(3);
    first.join();
    second.join();
  };
  CHECK(first_failure(500, body) == "");
}

TEST_CASE("a refused thread: the pool's constructor ends those that run and throws on") {
  for (int refused = 1; refused <= 3; ++refused) {
    for (uint64_t seed = 0; seed < 200; ++seed) {
      bool thrown = false;
      const Outcome outcome = simulate({.seed = seed, .refused_thread = refused}, [&thrown] {
        try {
          const WorkerPool<Sync> pool(3);
        } catch (const std::system_error&) {
          thrown = true;
        }
      });
      REQUIRE_MESSAGE(outcome.ok(), outcome.failure);
      CHECK(thrown);
    }
  }
}

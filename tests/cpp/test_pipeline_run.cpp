#include "runtime/pipeline_run.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "runtime/sync.h"

using namespace pymoe::runtime;
using namespace std::chrono_literals;
using Plan = PipelinePlan;
using Run = PipelineRun<SystemSync>;
using Node = Plan::Node;

namespace {

constexpr Node kNone = Run::kNone, kLater = Run::kLater;

// Runs every worker of a run on a thread of its own.
template <typename Work>
void run_workers(Run& run, int workers, const Work& work) {
  std::vector<std::thread> threads;
  for (int worker = 0; worker < workers; ++worker) {
    threads.emplace_back([&run, &work, worker] {
      for (Node node = run.next(worker); node != kNone; node = run.next(worker, node)) work(worker, node);
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace

TEST_CASE("a worker alone runs its nodes in order, as often as it is run, and ends") {
  Plan plan(1);
  for (int i = 0; i < 5; ++i) CHECK(plan.add(0) == i);
  for (int step = 0; step < 3; ++step) {
    Run run(plan);
    std::vector<Node> ran;
    run_workers(run, 1, [&](int, Node node) {
      CHECK_FALSE(run.done());
      ran.push_back(node);
    });
    CHECK(ran == std::vector<Node>{0, 1, 2, 3, 4});
    CHECK(run.done());
    CHECK(run.next(0) == kNone);
  }
}

TEST_CASE("a run without nodes is done, and its workers have nothing to start") {
  Plan plan(2);
  Run run(plan);
  CHECK(run.done());
  CHECK(run.next(1) == kNone);
}

TEST_CASE("a worker waits for what its next node depends on in another") {
  Plan plan(2);
  const Node first = plan.add(0), second = plan.add(1), third = plan.add(0);
  plan.add_edge(first, second);
  plan.add_edge(second, third);
  Run run(plan);
  CHECK(run.ask(1, {}) == kLater);
  CHECK(run.wait_until(1, SystemSync::now() + 1ms) == kLater);
  CHECK(run.next(0) == first);
  CHECK(run.ask(0, first) == kLater);
  CHECK(run.wait_until(1, SystemSync::now() + 1min) == second);
  CHECK(run.ask(1, second) == kNone);
  CHECK(run.wait_until(0, SystemSync::now() + 1min) == third);
  CHECK_FALSE(run.done());
  CHECK(run.ask(0, third) == kNone);
  CHECK(run.done());
}

TEST_CASE("a worker keeps to its order though a later node is ready") {
  Plan plan(2);
  const Node gate = plan.add(1), front = plan.add(0), ready = plan.add(0);
  plan.add_edge(gate, front);
  Run run(plan);
  CHECK(run.ask(0, {}) == kLater);
  run.leave(0);
  CHECK(run.next(1) == gate);
  CHECK(run.next(1, gate) == kNone);
  CHECK(run.next(0) == front);
  CHECK(run.next(0, front) == ready);
  CHECK(run.next(0, ready) == kNone);
  CHECK(run.done());
}

TEST_CASE("a cancelled run starts nothing, and wakes who waits") {
  Plan plan(3);
  const Node first = plan.add(0), second = plan.add(1);
  plan.add(0);
  plan.add_edge(first, second);
  Run run(plan);
  CHECK(run.next(0) == first);
  std::atomic<Node> got{0};
  std::thread waiter([&] { got = run.next(1); });
  std::this_thread::sleep_for(5ms);
  CHECK_FALSE(run.cancelled());
  run.cancel();
  run.cancel();
  waiter.join();
  CHECK(got == kNone);
  CHECK(run.cancelled());
  CHECK(run.next(0) == kNone);  // also without saying what became of the first
  CHECK(run.next(0, first) == kNone);
  CHECK(run.next(1) == kNone);
  CHECK_FALSE(run.done());
}

TEST_CASE("a run that is cancelled while its last node runs can still be done") {
  Plan plan(1);
  const Node node = plan.add(0);
  Run run(plan);
  CHECK(run.next(0) == node);
  run.cancel();
  CHECK_FALSE(run.done());
  CHECK(run.next(0, node) == kNone);
  CHECK(run.done());
}

TEST_CASE("a cycle is refused with its nodes, the orders of the workers counted in") {
  Plan plan(2);
  plan.add(0);
  const Node a = plan.add(0), b = plan.add(0), c = plan.add(1), d = plan.add(1);
  plan.add_edge(b, c);
  Run{plan};
  plan.add_edge(d, a);
  CHECK_THROWS_WITH_AS(
      Run{plan},
      "PipelinePlan: the edges and the orders of the workers form a cycle: "
      "node 1 (worker 0) -> node 2 (worker 0) -> node 3 (worker 1) -> node 4 (worker 1) -> node 1 (worker 0)",
      std::invalid_argument);
  Plan loop(1);
  loop.add_edge(loop.add(0), 0);
  CHECK_THROWS_WITH_AS(Run{loop},
                       "PipelinePlan: the edges and the orders of the workers form a cycle: "
                       "node 0 (worker 0) -> node 0 (worker 0)",
                       std::invalid_argument);
}

TEST_CASE("workers and nodes that do not exist are refused") {
  CHECK_THROWS_AS(Plan(0), std::invalid_argument);
  Plan plan(2);
  plan.add(0);
  CHECK_THROWS_WITH_AS(plan.add(2), "PipelinePlan: add: expected a worker from 0 to 1, got 2", std::out_of_range);
  CHECK_THROWS_AS(plan.add(-1), std::out_of_range);
  CHECK_THROWS_WITH_AS(plan.add_edge(0, 1), "PipelinePlan: add_edge: expected one of 1 nodes, got node 1",
                       std::out_of_range);
  CHECK_THROWS_AS(plan.add_edge(-1, 0), std::out_of_range);
  Run run(plan);
  CHECK_THROWS_AS(run.next(2), std::out_of_range);
  CHECK_THROWS_AS(run.next(0, 1), std::out_of_range);
  CHECK_THROWS_AS(run.next(0, -1), std::out_of_range);
}

TEST_CASE("a report of the end of the wrong node is refused, and the worker goes on") {
  Plan plan(2);
  const Node first = plan.add(0), other = plan.add(1), second = plan.add(0);
  Run run(plan);
  CHECK_THROWS_WITH_AS(run.next(0, first),
                       "PipelineRun: next: worker 0 runs nothing, but is reported to have finished node 0",
                       std::logic_error);
  CHECK(run.next(0) == first);
  CHECK(run.next(1) == other);
  CHECK_THROWS_WITH_AS(run.next(0, other),
                       "PipelineRun: next: worker 0 runs node 0, but is reported to have finished node 1",
                       std::logic_error);
  CHECK_THROWS_WITH_AS(run.next(0), "PipelineRun: next: worker 0 runs node 0, but is reported to have finished nothing",
                       std::logic_error);
  CHECK(run.next(0, first) == second);
  CHECK_THROWS_AS(run.next(0, first), std::logic_error);
  run.cancel();
  CHECK_THROWS_AS(run.next(0, first), std::logic_error);
}

TEST_CASE("a second thread of a worker is refused until the first has its answer or leaves") {
  Plan plan(2);
  const Node first = plan.add(0), second = plan.add(1);
  plan.add_edge(first, second);
  Run run(plan);
  CHECK(run.ask(1, {}) == kLater);
  CHECK_THROWS_WITH_AS(run.next(1), "PipelineRun: next: another thread waits for worker 1", std::logic_error);
  run.leave(1);
  CHECK(run.ask(1, {}) == kLater);
  CHECK(run.next(0) == first);
  CHECK(run.next(0, first) == kNone);
  CHECK(run.wait_until(1, SystemSync::now() + 1min) == second);
  CHECK(run.ask(1, second) == kNone);
}

TEST_CASE("a plan may change while a run of it goes on, and a run outlives its plan") {
  std::optional<Run> before, after;
  {
    Plan plan(1);
    plan.add(0);
    before.emplace(plan);
    plan.add(0);
    after.emplace(plan);
    plan.add_edge(0, 1);
  }
  CHECK(before->next(0) == 0);
  CHECK(before->next(0, 0) == kNone);
  CHECK(after->next(0) == 0);
  CHECK(after->next(0, 0) == 1);
}

namespace {

// Waits run a function of the test instead, and notifications are counted.
struct HookedSync : SystemSync {
  static inline std::vector<std::function<void()>> waits;
  static inline int notified = 0;
  struct Condition {
    bool wait_until(std::unique_lock<Mutex>& lock, Time) {
      const auto instead = std::move(waits.back());
      waits.pop_back();
      lock.unlock();
      instead();
      lock.lock();
      return true;
    }
    void notify_one() { ++notified; }
  };
};

}  // namespace

TEST_CASE("an end wakes the workers whose next node it made ready, each once, and no others") {
  Plan plan(4);
  const Node first = plan.add(0), second = plan.add(0), third = plan.add(0);
  const Node one = plan.add(1), other = plan.add(1);  // two nodes at once
  const Node behind = plan.add(2), ready_behind = plan.add(2);
  const Node last = plan.add(3);
  for (const Node node : {one, other, ready_behind}) plan.add_edge(second, node);
  for (const Node node : {behind, last}) plan.add_edge(third, node);
  PipelineRun<HookedSync> run(plan);
  // Worker 1 waits in worker 2's wait, which waits in worker 3's: while they do, worker 0 goes on.
  const auto& notified = HookedSync::notified;
  HookedSync::waits.push_back([&] {
    CHECK(run.next(0) == first);
    CHECK(run.next(0, first) == second);
    CHECK(notified == 0);  // nothing became ready
    CHECK(run.next(0, second) == third);
    CHECK(notified == 1);  // worker 1; of worker 2 a later node is ready, which must not start
    CHECK(run.next(0, third) == Run::kNone);
    CHECK(notified == 3);
  });
  HookedSync::waits.push_back([&] { CHECK(run.next(1) == one); });
  HookedSync::waits.push_back([&] { CHECK(run.next(2) == behind); });
  CHECK(run.next(3) == last);
  CHECK(HookedSync::waits.empty());
}

TEST_CASE("a million nodes over eight workers: each once, after what it depends on, in its worker's order") {
  constexpr int kWorkers = 8, kEach = 125'000;
  Plan plan(kWorkers);
  // Node i of a worker waits for nodes of its neighbours that come earlier in all orders.
  const auto right = [](int i, int worker) { return (i - 16) * kWorkers + (worker + 1) % kWorkers; };
  const auto left = [](int i, int worker) { return (i - 64) * kWorkers + (worker + kWorkers - 1) % kWorkers; };
  for (int i = 0; i < kEach; ++i) {
    for (int worker = 0; worker < kWorkers; ++worker) {
      const Node node = plan.add(worker);
      if (i >= 16) plan.add_edge(right(i, worker), node);
      if (i >= 64 && i % 7 == 0) plan.add_edge(left(i, worker), node);
    }
  }
  std::vector<std::atomic<uint8_t>> ended(static_cast<size_t>(kEach) * kWorkers);
  std::atomic<int> wrong{0}, starts{0};
  Run run(plan);
  std::vector<int> last(kWorkers, -1);
  run_workers(run, kWorkers, [&](int worker, Node node) {
    const int i = node / kWorkers;
    const auto has_ended = [&](Node other) {
      return ended[static_cast<size_t>(other)].load(std::memory_order_relaxed) == 1;
    };
    wrong += node % kWorkers != worker || std::exchange(last[static_cast<size_t>(worker)], i) != i - 1;
    wrong += i >= 16 && !has_ended(right(i, worker));
    wrong += i >= 64 && i % 7 == 0 && !has_ended(left(i, worker));
    wrong += ended[static_cast<size_t>(node)].fetch_add(1, std::memory_order_relaxed) != 0;
    ++starts;
  });
  CHECK(wrong == 0);
  CHECK(starts == kEach * kWorkers);
  CHECK(run.done());
}

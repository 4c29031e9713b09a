#include "runtime/lanes.h"

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
using Plan = LanePlan;
using Run = LaneRun<SystemSync>;
using Node = Plan::Node;

namespace {

constexpr Node kNone = Run::kNone, kLater = Run::kLater;

// Runs every lane of a run on a thread of its own.
template <typename Work>
void run_lanes(Run& run, int lanes, const Work& work) {
  std::vector<std::thread> threads;
  for (int lane = 0; lane < lanes; ++lane) {
    threads.emplace_back([&run, &work, lane] {
      for (Node node = run.next(lane); node != kNone; node = run.next(lane, node)) work(lane, node);
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace

TEST_CASE("a lane alone runs its plan in order, as often as it is run, and ends") {
  Plan plan(1);
  for (int i = 0; i < 5; ++i) CHECK(plan.add(0, i % 2) == i);
  for (int step = 0; step < 3; ++step) {
    Run run(plan);
    std::vector<Node> ran;
    run_lanes(run, 1, [&](int, Node node) {
      CHECK_FALSE(run.done());
      ran.push_back(node);
    });
    CHECK(ran == std::vector<Node>{0, 1, 2, 3, 4});
    CHECK(run.done());
    CHECK(run.next(0) == kNone);
  }
}

TEST_CASE("a run without nodes is done, and its lanes have nothing to start") {
  Plan plan(2);
  Run run(plan);
  CHECK(run.done());
  CHECK(run.next(1) == kNone);
}

TEST_CASE("a lane waits for what its front depends on in another") {
  Plan plan(2);
  const Node first = plan.add(0, 0), second = plan.add(1, 0), third = plan.add(0, 0);
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

TEST_CASE("while the front is not ready, the first that may overtake it does, and never within a queue") {
  Plan plan(2);
  const Node gate = plan.add(1, 0);
  const Node front = plan.add(0, 0);
  const Node same_queue = plan.add(0, 0, 0, true), stays = plan.add(0, 1), behind_it = plan.add(0, 1, 0, true);
  const Node not_ready = plan.add(0, 2, 0, true);
  const Node overtakes = plan.add(0, 3, 0, true), overtakes_too = plan.add(0, 4, 0, true);
  plan.add_edge(gate, front);
  plan.add_edge(gate, not_ready);
  Run run(plan);
  CHECK(run.ask(0, {}) == overtakes);
  CHECK(run.ask(0, overtakes) == overtakes_too);
  CHECK(run.ask(0, overtakes_too) == kLater);
  run.leave(0);
  CHECK(run.next(1) == gate);
  CHECK(run.next(1, gate) == kNone);
  Node node = run.next(0);
  for (const Node expected : {front, same_queue, stays, behind_it, not_ready, kNone}) {
    CHECK(node == expected);
    if (node != kNone) node = run.next(0, node);
  }
  CHECK(run.done());
}

TEST_CASE("a front that is ready starts though others could overtake it, and at any limit") {
  Plan plan(1);
  plan.set_limit(0, 0);
  const Node front = plan.add(0, 0, 5);
  plan.add(0, 1, 0, true);
  CHECK(Run(plan).next(0) == front);
}

// In lane 0: two forwards, a backward that waits for lane 1, and a third forward that may overtake it.
struct Forwards {
  explicit Forwards(std::optional<int64_t> limit) {
    plan.set_limit(0, limit);
    plan.add_edge(gate, backward);
  }
  Plan plan{2};
  Node gate = plan.add(1, 0);
  Node first = plan.add(0, 0, 1, true), second = plan.add(0, 0, 1, true);
  Node backward = plan.add(0, 1, -1, true);
  Node third = plan.add(0, 0, 1, true);
};

TEST_CASE("a node overtakes below the limit alone, and what ends makes room") {
  for (const int64_t limit : {2, 3}) {
    Forwards forwards(limit);
    Run run(forwards.plan);
    CHECK(run.next(0) == forwards.first);
    CHECK(run.next(0, forwards.first) == forwards.second);
    CHECK(run.ask(0, forwards.second) == (limit == 2 ? kLater : forwards.third));
    if (limit == 2) {
      run.leave(0);
      CHECK(run.next(1) == forwards.gate);
      CHECK(run.next(1, forwards.gate) == kNone);
      CHECK(run.next(0) == forwards.backward);
      CHECK(run.next(0, forwards.backward) == forwards.third);
    }
  }
  Forwards forwards(std::nullopt);
  Run run(forwards.plan);
  CHECK(run.next(0) == forwards.first);
  CHECK(run.next(0, forwards.first) == forwards.second);
  CHECK(run.next(0, forwards.second) == forwards.third);
}

TEST_CASE("a node overtakes only if those that it passes will have room, too") {
  for (const int64_t limit : {2, 3}) {
    Plan plan(2);
    const Node gate = plan.add(1, 0);
    const Node first = plan.add(0, 0, 1, true), passed = plan.add(0, 1, 1, true), last = plan.add(0, 0, 1, true);
    plan.add_edge(gate, passed);
    plan.set_limit(0, limit);
    Run run(plan);
    CHECK(run.next(0) == first);
    CHECK(run.ask(0, first) == (limit == 2 ? kLater : last));
  }
}

TEST_CASE("a cancelled run starts nothing, and wakes who waits") {
  Plan plan(3);
  const Node first = plan.add(0, 0), second = plan.add(1, 0);
  plan.add(0, 0);
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
  const Node node = plan.add(0, 0);
  Run run(plan);
  CHECK(run.next(0) == node);
  run.cancel();
  CHECK_FALSE(run.done());
  CHECK(run.next(0, node) == kNone);
  CHECK(run.done());
}

TEST_CASE("a cycle is refused with its nodes, the orders of the lanes counted in") {
  Plan plan(2);
  plan.add(0, 0);
  const Node a = plan.add(0, 0), b = plan.add(0, 1), c = plan.add(1, 0), d = plan.add(1, 1);
  plan.add_edge(b, c);
  Run{plan};
  plan.add_edge(d, a);
  CHECK_THROWS_WITH_AS(Run{plan},
                       "LanePlan: the edges and the orders of the lanes make a cycle: "
                       "node 1 (lane 0) -> node 2 (lane 0) -> node 3 (lane 1) -> node 4 (lane 1) -> node 1 (lane 0)",
                       std::invalid_argument);
  Plan loop(1);
  loop.add_edge(loop.add(0, 0), 0);
  CHECK_THROWS_WITH_AS(Run{loop},
                       "LanePlan: the edges and the orders of the lanes make a cycle: "
                       "node 0 (lane 0) -> node 0 (lane 0)",
                       std::invalid_argument);
}

TEST_CASE("lanes and nodes that are not there are refused") {
  CHECK_THROWS_AS(Plan(0), std::invalid_argument);
  Plan plan(2);
  plan.add(0, 0);
  CHECK_THROWS_WITH_AS(plan.add(2, 0), "LanePlan: add: there is no lane 2, the lanes are 0 to 1", std::out_of_range);
  CHECK_THROWS_AS(plan.set_limit(-1, 1), std::out_of_range);
  CHECK_THROWS_WITH_AS(plan.add_edge(0, 1), "LanePlan: add_edge: there is no node 1, there are 1", std::out_of_range);
  CHECK_THROWS_AS(plan.add_edge(-1, 0), std::out_of_range);
  Run run(plan);
  CHECK_THROWS_AS(run.next(2), std::out_of_range);
  CHECK_THROWS_AS(run.next(0, 1), std::out_of_range);
  CHECK_THROWS_AS(run.next(0, -1), std::out_of_range);
}

TEST_CASE("who says that the wrong node has ended is refused, and the lane goes on") {
  Plan plan(2);
  const Node first = plan.add(0, 0), other = plan.add(1, 0), second = plan.add(0, 0);
  Run run(plan);
  CHECK_THROWS_WITH_AS(run.next(0, first), "LaneRun: next: lane 0 runs nothing, but is said to have finished node 0",
                       std::logic_error);
  CHECK(run.next(0) == first);
  CHECK(run.next(1) == other);
  CHECK_THROWS_WITH_AS(run.next(0, other), "LaneRun: next: lane 0 runs node 0, but is said to have finished node 1",
                       std::logic_error);
  CHECK_THROWS_WITH_AS(run.next(0), "LaneRun: next: lane 0 runs node 0, but is said to have finished nothing",
                       std::logic_error);
  CHECK(run.next(0, first) == second);
  CHECK_THROWS_AS(run.next(0, first), std::logic_error);
  run.cancel();
  CHECK_THROWS_AS(run.next(0, first), std::logic_error);
}

TEST_CASE("a second thread in a lane is refused until the first has its answer or leaves") {
  Plan plan(2);
  const Node first = plan.add(0, 0), second = plan.add(1, 0);
  plan.add_edge(first, second);
  Run run(plan);
  CHECK(run.ask(1, {}) == kLater);
  CHECK_THROWS_WITH_AS(run.next(1), "LaneRun: next: another thread waits in lane 1", std::logic_error);
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
    plan.add(0, 0);
    before.emplace(plan);
    plan.add(0, 0);
    after.emplace(plan);
    plan.set_limit(0, 3);
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

TEST_CASE("an end wakes the lanes that it gave something to start, each once, and no others") {
  Plan plan(4);
  const Node first = plan.add(0, 0), second = plan.add(0, 0), third = plan.add(0, 0);
  const Node one = plan.add(1, 0), other = plan.add(1, 1, 0, true);  // two nodes at once
  const Node behind = plan.add(2, 0), ready_behind = plan.add(2, 0, 0, true);
  const Node last = plan.add(3, 0);
  for (const Node node : {one, other, ready_behind}) plan.add_edge(second, node);
  for (const Node node : {behind, last}) plan.add_edge(third, node);
  LaneRun<HookedSync> run(plan);
  // Lane 1 waits in lane 2's wait, which waits in lane 3's: while they do, lane 0 goes on.
  const auto& notified = HookedSync::notified;
  HookedSync::waits.push_back([&] {
    CHECK(run.next(0) == first);
    CHECK(run.next(0, first) == second);
    CHECK(notified == 0);  // nobody got anything
    CHECK(run.next(0, second) == third);
    CHECK(notified == 1);  // lane 1; in lane 2 the node is ready and must not overtake
    CHECK(run.next(0, third) == Run::kNone);
    CHECK(notified == 3);
  });
  HookedSync::waits.push_back([&] { CHECK(run.next(1) == one); });
  HookedSync::waits.push_back([&] { CHECK(run.next(2) == behind); });
  CHECK(run.next(3) == last);
  CHECK(HookedSync::waits.empty());
}

TEST_CASE("a million nodes over eight lanes: each once, after what it depends on, in its queue's order") {
  constexpr int kLanes = 8, kEach = 125'000, kQueues = 3;
  Plan plan(kLanes);
  // Node i of a lane waits for nodes of its neighbours that come earlier in all the plans.
  for (int i = 0; i < kEach; ++i) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const Node node = plan.add(lane, i % kQueues, i % 4 == 0 ? 1 : i % 4 == 3 ? -1 : 0, i % 5 != 0);
      if (i >= 16) plan.add_edge(node - 16 * kLanes - lane + (lane + 1) % kLanes, node);
      if (i >= 64 && i % 7 == 0) plan.add_edge(node - 64 * kLanes - lane + (lane + kLanes - 1) % kLanes, node);
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) plan.set_limit(lane, 4);
  std::vector<std::atomic<uint8_t>> ended(static_cast<size_t>(kEach) * kLanes);
  std::atomic<int> wrong{0}, starts{0};
  Run run(plan);
  std::vector<std::vector<int>> last(kLanes, std::vector<int>(kQueues, -1));
  run_lanes(run, kLanes, [&](int lane, Node node) {
    const int i = node / kLanes;
    const auto has_ended = [&](Node other) {
      return ended[static_cast<size_t>(other)].load(std::memory_order_relaxed) == 1;
    };
    int& before = last[static_cast<size_t>(lane)][static_cast<size_t>(i % kQueues)];
    wrong += node % kLanes != lane || std::exchange(before, i) >= i;
    wrong += i >= 16 && !has_ended(node - 16 * kLanes - lane + (lane + 1) % kLanes);
    wrong += i >= 64 && i % 7 == 0 && !has_ended(node - 64 * kLanes - lane + (lane + kLanes - 1) % kLanes);
    wrong += ended[static_cast<size_t>(node)].fetch_add(1, std::memory_order_relaxed) != 0;
    ++starts;
  });
  CHECK(wrong == 0);
  CHECK(starts == kEach * kLanes);
  CHECK(run.done());
}

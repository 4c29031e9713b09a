// LanePlan under seeded schedules: nodes start where the contract of lanes.h says so, and where it says so they start.
#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "runtime/lanes.h"
#include "schedules.h"

using namespace pymoe::runtime;
using namespace pymoe::simulation;
using namespace std::chrono_literals;
using Sync = SimulatedSync;
using Run = LaneRun<Sync>;
using Node = LanePlan::Node;

namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

size_t index(int number) { return static_cast<size_t>(number); }
int below(int bound) { return static_cast<int>(random_below(static_cast<uint64_t>(bound))); }

// A plan, and beside it what the contract needs to be looked up in the simplest way.
class Checked {
 public:
  explicit Checked(int lanes) : plan(lanes), orders(index(lanes)), limits(index(lanes), kNoLimit) {}

  Node add(int lane, int queue, int live, bool overtakes) {
    nodes.push_back({lane, queue, live, overtakes, {}});
    const Node node = plan.add(lane, queue, live, overtakes);
    orders[index(lane)].push_back(node);
    return node;
  }
  void add_edge(Node before, Node after) {
    nodes[index(after)].before.push_back(before);
    plan.add_edge(before, after);
  }
  void set_limit(int lane, int64_t limit) {
    limits[index(lane)] = limit;
    plan.set_limit(lane, limit);
  }
  int lanes() const { return static_cast<int>(orders.size()); }

  // What a lane may hold: its limit, or what its plan holds at most.
  int64_t most_held(int lane) const {
    int64_t held = 0, most = limits[index(lane)];
    for (const Node node : orders[index(lane)]) {
      held += nodes[index(node)].live;
      if (nodes[index(node)].live > 0) most = std::max(most, held);
    }
    return most;
  }

  struct Entry {
    int lane, queue, live;
    bool overtakes;
    std::vector<Node> before;
  };
  LanePlan plan;
  std::vector<Entry> nodes;
  std::vector<std::vector<Node>> orders;  // of each lane
  std::vector<int64_t> limits;
};

// Edges lead from what was added first to what was added later.
Checked random_plan() {
  Checked plan(1 + below(4));
  const int size = 1 + below(16), queues = 1 + below(3), edges = 1 + below(4);
  for (Node node = 0; node < size; ++node) {
    plan.add(below(plan.lanes()), below(queues), below(5) - 2, below(3) != 0);
    for (Node before = 0; before < node; ++before) {
      if (below(8) < edges) plan.add_edge(before, node);
    }
  }
  for (int lane = 0; lane < plan.lanes(); ++lane) {
    if (below(3) != 0) plan.set_limit(lane, below(5));
  }
  return plan;
}

// One forward, one backward; or all forwards first, with one or two stages a lane.
Checked pipeline() {
  const bool forwards_first = below(2) == 0;
  const int lanes = 2 + below(2), stages = lanes * (forwards_first ? 1 + below(2) : 1), micro_batches = 1 + below(4);
  Checked plan(lanes);
  std::vector<std::vector<Node>> forward(index(stages)), backward(index(stages));
  for (int lane = 0; lane < lanes; ++lane) {
    const int warm_up = forwards_first ? micro_batches : lanes - 1 - lane;
    for (int i = 0; i < micro_batches + warm_up; ++i) {
      for (int stage = lane; i < micro_batches && stage < stages; stage += lanes) {
        forward[index(stage)].push_back(plan.add(lane, stage, 1, true));
      }
      for (int stage = stages - lanes + lane; i >= warm_up && stage >= 0; stage -= lanes) {
        backward[index(stage)].push_back(plan.add(lane, stages + stage, -1, below(4) != 0));
      }
    }
    plan.set_limit(lane, stages / lanes * (1 + below(lanes)));
  }
  for (int i = 0; i < micro_batches; ++i) {
    for (int stage = 0; stage + 1 < stages; ++stage) {
      plan.add_edge(forward[index(stage)][index(i)], forward[index(stage + 1)][index(i)]);
      plan.add_edge(backward[index(stage + 1)][index(i)], backward[index(stage)][index(i)]);
    }
    plan.add_edge(forward[index(stages - 1)][index(i)], backward[index(stages - 1)][index(i)]);
  }
  return plan;
}

// A run of a plan, each lane on a thread of its own.
class CheckedRun {
 public:
  explicit CheckedRun(Checked& plan)
      : plan_(plan),
        run_(plan.plan),
        started_(plan.nodes.size()),
        ended_(plan.nodes.size()),
        told_(plan.nodes.size()),
        held_(plan.orders.size()),
        given_back_(plan.orders.size()) {
    for (int lane = 0; lane < plan.lanes(); ++lane) threads_.emplace_back([this, lane] { run_lane(lane); });
  }

  void cancel() {
    run_.cancel();
    cancelled_ = true;
  }

  // Waits for the lanes' threads.
  void join() {
    for (auto& thread : threads_) thread.join();
    const bool all = std::find(ended_.begin(), ended_.end(), false) == ended_.end();
    expect(all || cancelled_, "a node has not run");
    expect(run_.done() == all, "a run is wrong about its end");
    expect(run_.cancelled() == cancelled_, "a run is wrong about its being cancelled");
  }

 private:
  void run_lane(int lane) {
    std::optional<Node> node;
    for (;;) {
      // What has ended was told to the run before this lane asks: it must know.
      const std::vector<char> known(told_.begin(), told_.end());
      const bool was_cancelled = cancelled_;
      if (node) {
        const auto& entry = plan_.nodes[index(*node)];
        ended_[index(*node)] = true;
        if (entry.live < 0) given_back_[index(lane)] -= entry.live;
        if (entry.live < 0) held_[index(lane)] += entry.live;
      }
      Node next = run_.ask(lane, node);
      if (node) told_[index(*node)] = true;
      if (next == Run::kLater) {
        expect(!was_cancelled, "a cancelled run has its lanes wait");
        expect(expected(lane, own(known, node)) == Run::kLater, "a lane waits though it has a node to start");
        next = wait(lane);
      }
      expect(locks_held() == 0, "a lane has its answer under a lock");
      if (next == Run::kNone) {
        expect(run_.cancelled() || all_started(lane), "a lane ends before all of its nodes have started");
        return;
      }
      expect(!was_cancelled, "a node starts in a cancelled run");
      start(lane, next, own(known, node));
      node = next;
      Sync::preempt();
      if (below(3) == 0) Sync::sleep_for(std::chrono::milliseconds(1 + below(3)));
    }
  }

  Node wait(int lane) {
    Node next = Run::kLater;
    const bool in_slices = below(2) == 0;
    while (next == Run::kLater) {
      next = run_.wait_until(lane, in_slices ? Sync::now() + 1ms : Sync::Time::max());
      if (next != Run::kLater || below(4) != 0) continue;
      run_.leave(lane);
      next = run_.ask(lane, {});
    }
    return next;
  }

  // What this lane has just ended is known to it, too.
  static std::vector<char> own(std::vector<char> known, std::optional<Node> ended) {
    if (ended) known[index(*ended)] = true;
    return known;
  }

  bool all_started(int lane) const {
    const auto& order = plan_.orders[index(lane)];
    return std::all_of(order.begin(), order.end(), [&](Node node) { return started_[index(node)]; });
  }

  static bool ready(const Checked::Entry& entry, const std::vector<char>& ended) {
    return std::all_of(entry.before.begin(), entry.before.end(), [&](Node node) { return ended[index(node)]; });
  }

  // Whether a node that has not started, with `passed` in front of it, may start but for its dependencies.
  bool may_start(Node node, const std::vector<Node>& passed) const {
    if (passed.empty()) return true;
    const auto& entry = plan_.nodes[index(node)];
    if (!entry.overtakes) return false;
    int64_t held = -given_back_[index(entry.lane)] + entry.live;
    for (const Node other : plan_.orders[index(entry.lane)]) {
      if (other == node) break;
      const auto& before = plan_.nodes[index(other)];
      if (!started_[index(other)] && before.queue == entry.queue) return false;
      if (before.live > 0) held += before.live;
    }
    return entry.live <= 0 || held <= plan_.limits[index(entry.lane)];
  }

  // What starts, by the contract, if these nodes have ended.
  Node expected(int lane, const std::vector<char>& ended) const {
    std::vector<Node> passed;
    for (const Node node : plan_.orders[index(lane)]) {
      if (started_[index(node)]) continue;
      if (ready(plan_.nodes[index(node)], ended) && may_start(node, passed)) return node;
      passed.push_back(node);
    }
    return Run::kLater;
  }

  void start(int lane, Node node, const std::vector<char>& known) {
    const auto& entry = plan_.nodes[index(node)];
    expect(entry.lane == lane, "a node starts in another lane");
    expect(!started_[index(node)], "a node starts twice");
    expect(ready(entry, ended_), "a node starts before one that it depends on has ended");
    // With more that has ended than is known here, something in front of it may be ready, and nothing else can start.
    const Node first = expected(lane, known);
    expect(first == Run::kLater || node <= first, "a node starts although one in front of it could");
    std::vector<Node> passed;
    for (const Node other : plan_.orders[index(lane)]) {
      if (other == node) break;
      if (!started_[index(other)]) passed.push_back(other);
    }
    expect(may_start(node, passed), "a node overtakes that must not");
    started_[index(node)] = true;
    if (entry.live > 0) held_[index(lane)] += entry.live;
    expect(entry.live <= 0 || held_[index(lane)] <= plan_.most_held(lane), "a lane holds more than its limit and plan");
  }

  Checked& plan_;
  Run run_;
  std::vector<char> started_, ended_;       // not atomic: a run must order what depends on each other
  std::vector<std::atomic<char>> told_;     // the run has been told that they have ended
  std::vector<int64_t> held_, given_back_;  // of each lane
  std::atomic<bool> cancelled_{false};
  std::vector<Sync::Thread> threads_;
};

}  // namespace

TEST_CASE("schedules of lanes: random plans, run after run and two runs at once") {
  run_schedules(30'000, [](bool) {
    Checked plan = random_plan();
    CheckedRun(plan).join();
    CheckedRun first(plan), second(plan);
    first.join();
    second.join();
  });
}

TEST_CASE("schedules of lanes: pipelines with limits") {
  run_schedules(30'000, [](bool) {
    Checked plan = pipeline();
    CheckedRun(plan).join();
  });
}

TEST_CASE("schedules of lanes: cancelled at any time") {
  run_schedules(30'000, [](bool) {
    Checked plan = below(2) == 0 ? random_plan() : pipeline();
    CheckedRun run(plan);
    if (below(4) != 0) Sync::sleep_for(std::chrono::milliseconds(below(12)));
    run.cancel();
    run.join();
  });
}

TEST_CASE("schedules of lanes: whatever edges a plan has, it is refused or runs to its end") {
  run_schedules(20'000, [](bool) {
    Checked plan(1 + below(3));
    const int size = 2 + below(6);
    for (int i = 0; i < size; ++i) plan.add(below(plan.lanes()), below(2), 0, below(2) == 0);
    for (int i = below(6); i > 0; --i) plan.add_edge(below(size), below(size));
    try {
      CheckedRun(plan).join();
    } catch (const std::invalid_argument&) {
    }
  });
}

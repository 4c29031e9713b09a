// PipelineRun under seeded schedules: nodes start where the contract of pipeline_run.h says so, and where it says so
// they start.
#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "runtime/pipeline_run.h"
#include "schedules.h"

using namespace pymoe::runtime;
using namespace pymoe::simulation;
using namespace std::chrono_literals;
using Sync = SimulatedSync;
using Run = PipelineRun<Sync>;
using Node = PipelinePlan::Node;

namespace {

size_t index(int number) { return static_cast<size_t>(number); }
int below(int bound) { return static_cast<int>(random_below(static_cast<uint64_t>(bound))); }

// A plan, and beside it what the contract needs to be looked up in the simplest way.
class Checked {
 public:
  explicit Checked(int workers) : plan(workers), orders(index(workers)) {}

  Node add(int worker) {
    nodes.push_back({worker, {}});
    const Node node = plan.add(worker);
    orders[index(worker)].push_back(node);
    return node;
  }
  void add_edge(Node before, Node after) {
    nodes[index(after)].before.push_back(before);
    plan.add_edge(before, after);
  }
  int workers() const { return static_cast<int>(orders.size()); }

  struct Entry {
    int worker;
    std::vector<Node> before;
  };
  PipelinePlan plan;
  std::vector<Entry> nodes;
  std::vector<std::vector<Node>> orders;  // of each worker
};

// Edges lead from what was added first to what was added later.
Checked random_plan() {
  Checked plan(1 + below(4));
  const int size = 1 + below(16), edges = 1 + below(4);
  for (Node node = 0; node < size; ++node) {
    plan.add(below(plan.workers()));
    for (Node before = 0; before < node; ++before) {
      if (below(8) < edges) plan.add_edge(before, node);
    }
  }
  return plan;
}

// One forward, one backward; or all forwards first, with one or two stages a worker.
Checked pipeline() {
  const bool forwards_first = below(2) == 0;
  const int workers = 2 + below(2), stages = workers * (forwards_first ? 1 + below(2) : 1);
  const int micro_batches = 1 + below(4);
  Checked plan(workers);
  std::vector<std::vector<Node>> forward(index(stages)), backward(index(stages));
  for (int worker = 0; worker < workers; ++worker) {
    const int warm_up = forwards_first ? micro_batches : workers - 1 - worker;
    for (int i = 0; i < micro_batches + warm_up; ++i) {
      for (int stage = worker; i < micro_batches && stage < stages; stage += workers) {
        forward[index(stage)].push_back(plan.add(worker));
      }
      for (int stage = stages - workers + worker; i >= warm_up && stage >= 0; stage -= workers) {
        backward[index(stage)].push_back(plan.add(worker));
      }
    }
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

// A run of a plan, each worker on a thread of its own.
class CheckedRun {
 public:
  explicit CheckedRun(Checked& plan)
      : plan_(plan), run_(plan.plan), started_(plan.nodes.size()), ended_(plan.nodes.size()), told_(plan.nodes.size()) {
    for (int worker = 0; worker < plan.workers(); ++worker) {
      threads_.emplace_back([this, worker] { run_worker(worker); });
    }
  }

  void cancel() {
    run_.cancel();
    cancelled_ = true;
  }

  // Waits for the workers' threads.
  void join() {
    for (auto& thread : threads_) thread.join();
    const bool all = std::find(ended_.begin(), ended_.end(), false) == ended_.end();
    expect(all || cancelled_, "a node has not run");
    expect(run_.done() == all, "a run is wrong about its end");
    expect(run_.cancelled() == cancelled_, "a run is wrong about its being cancelled");
  }

 private:
  void run_worker(int worker) {
    std::optional<Node> node;
    for (;;) {
      // What has ended was told to the run before this worker asks: it must know.
      std::vector<char> known(told_.begin(), told_.end());
      const bool was_cancelled = cancelled_;
      if (node) ended_[index(*node)] = known[index(*node)] = true;
      Node next = run_.ask(worker, node);
      if (node) told_[index(*node)] = true;
      if (next == Run::kLater) {
        expect(!was_cancelled, "a cancelled run has its workers wait");
        expect(!ready(front(worker), known), "a worker waits though its next node is ready");
        next = wait(worker);
      }
      expect(locks_held() == 0, "a worker has its answer under a lock");
      if (next == Run::kNone) {
        expect(run_.cancelled() || front(worker) == Run::kNone, "a worker ends before all of its nodes have started");
        return;
      }
      expect(!was_cancelled, "a node starts in a cancelled run");
      expect(next == front(worker), "a node starts out of its worker's order");
      expect(ready(next, ended_), "a node starts before one that it depends on has ended");
      started_[index(next)] = true;
      node = next;
      Sync::preempt();
      if (below(3) == 0) Sync::sleep_for(std::chrono::milliseconds(1 + below(3)));
    }
  }

  Node wait(int worker) {
    Node next = Run::kLater;
    const bool in_slices = below(2) == 0;
    while (next == Run::kLater) {
      next = run_.wait_until(worker, in_slices ? Sync::now() + 1ms : Sync::Time::max());
      if (next != Run::kLater || below(4) != 0) continue;
      run_.leave(worker);
      next = run_.ask(worker, {});
    }
    return next;
  }

  // The first node of the worker's order that has not started; kNone if all have.
  Node front(int worker) const {
    const auto& order = plan_.orders[index(worker)];
    const auto found = std::find_if(order.begin(), order.end(), [&](Node node) { return !started_[index(node)]; });
    return found == order.end() ? Run::kNone : *found;
  }

  bool ready(Node node, const std::vector<char>& ended) const {
    const auto& before = plan_.nodes[index(node)].before;
    return std::all_of(before.begin(), before.end(), [&](Node other) { return ended[index(other)]; });
  }

  Checked& plan_;
  Run run_;
  std::vector<char> started_, ended_;    // not atomic: a run must order what depends on each other
  std::vector<std::atomic<char>> told_;  // the run has been told that they have ended
  std::atomic<bool> cancelled_{false};
  std::vector<Sync::Thread> threads_;
};

}  // namespace

TEST_CASE("schedules of a pipeline: random plans, run after run and two runs at once") {
  run_schedules(30'000, [](bool) {
    Checked plan = random_plan();
    CheckedRun(plan).join();
    CheckedRun first(plan), second(plan);
    first.join();
    second.join();
  });
}

TEST_CASE("schedules of a pipeline: orders of pipelines") {
  run_schedules(30'000, [](bool) {
    Checked plan = pipeline();
    CheckedRun(plan).join();
  });
}

TEST_CASE("schedules of a pipeline: cancelled at any time") {
  run_schedules(30'000, [](bool) {
    Checked plan = below(2) == 0 ? random_plan() : pipeline();
    CheckedRun run(plan);
    if (below(4) != 0) Sync::sleep_for(std::chrono::milliseconds(below(12)));
    run.cancel();
    run.join();
  });
}

TEST_CASE("schedules of a pipeline: whatever edges a plan has, it is refused or runs to its end") {
  run_schedules(20'000, [](bool) {
    Checked plan(1 + below(3));
    const int size = 2 + below(6);
    for (int i = 0; i < size; ++i) plan.add(below(plan.workers()));
    for (int i = below(6); i > 0; --i) plan.add_edge(below(size), below(size));
    try {
      CheckedRun(plan).join();
    } catch (const std::invalid_argument&) {
    }
  });
}

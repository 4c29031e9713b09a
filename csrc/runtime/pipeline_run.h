// PipelineRun: nodes that depend on each other, each run by the thread of its worker, in that worker's order.
//
//     PipelinePlan plan(workers);
//     const auto one = plan.add(worker), other = plan.add(another_worker);
//     plan.add_edge(one, other);
//     PipelineRun<SystemSync> run(plan);
//     // on the thread of each worker:
//     for (auto node = run.next(worker); node != run.kNone; node = run.next(worker, node)) work(node);
//
// The threads are the caller's: each asks for the next node of its worker when it has ended the one before.
//
// Order      A worker starts its nodes in the order in which they were added, each as soon as all nodes that it
//            depends on have ended.
// No deadlock. Edges and orders together have no cycle, or no run begins. So a run gets to its end as long as every
//            worker's thread goes on to ask.
// Waking     The end of a node wakes the workers whose next node it made ready, each once. What a worker could start
//            when it was woken, it still can when it comes: it alone starts its nodes.
// Runs       A plan may be run any number of times, and changed meanwhile: a run sees it as it was when it began. All
//            memory that a run needs is allocated when it begins.
// Errors     std::out_of_range for a worker or node that does not exist; std::invalid_argument from a run that begins
//            with a cycle, which it names; std::logic_error for a thread that asks for a worker for which another
//            thread waits, and for one that reports the end of another node than the one it got.
// Threads    A plan is for one thread at a time, and so is a worker of a run; the other functions are thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace pymoe::runtime {

class PipelinePlan {
 public:
  using Node = int32_t;  // counted from 0 in the order in which nodes were added

  static constexpr Node kNone = -1;  // in place of a node
  static size_t index(int32_t number) { return static_cast<size_t>(number); }

  explicit PipelinePlan(int workers) {
    if (workers < 1) {
      throw std::invalid_argument("PipelinePlan: workers must be a positive integer, got " + std::to_string(workers));
    }
    orders_.resize(static_cast<size_t>(workers));
  }

  Node add(int worker) {
    require_worker("PipelinePlan: add", worker, orders_.size());
    compiled_ = nullptr;
    const auto node = static_cast<Node>(worker_of_.size());
    worker_of_.push_back(worker);
    orders_[index(worker)].push_back(node);
    return node;
  }

  void add_edge(Node before, Node after) {
    for (const Node node : {before, after}) require_node("PipelinePlan: add_edge", node, worker_of_.size());
    compiled_ = nullptr;
    edges_.emplace_back(before, after);
  }

  // The plan as runs see it.
  struct Compiled {
    std::vector<std::vector<Node>> orders;  // of each worker
    std::vector<int32_t> worker_of;         // of each node
    std::vector<int32_t> before;            // of each node: how many nodes it waits for
    std::vector<int32_t> first;             // after[first[n] .. first[n + 1] - 1] are the nodes that wait for node n
    std::vector<Node> after;

    std::span<const Node> after_of(Node node) const {
      return std::span(after).subspan(index(first[index(node)]), index(first[index(node) + 1] - first[index(node)]));
    }
  };

  // As it is now.
  std::shared_ptr<const Compiled> compiled() {
    if (!compiled_) compiled_ = compile();
    return compiled_;
  }

  // For runs, too.
  static void require_worker(const char* where, int worker, size_t workers) {
    if (worker >= 0 && index(worker) < workers) return;
    throw std::out_of_range(std::string(where) + ": expected a worker from 0 to " + std::to_string(workers - 1) +
                            ", got " + std::to_string(worker));
  }

  static void require_node(const char* where, Node node, size_t nodes) {
    if (node >= 0 && index(node) < nodes) return;
    throw std::out_of_range(std::string(where) + ": expected one of " + std::to_string(nodes) + " nodes, got node " +
                            std::to_string(node));
  }

 private:
  // A worker's order is made of edges, too.
  std::shared_ptr<const Compiled> compile() const {
    auto edges = edges_;
    for (const auto& order : orders_) {
      for (size_t i = 1; i < order.size(); ++i) edges.emplace_back(order[i - 1], order[i]);
    }
    const size_t nodes = worker_of_.size();
    auto plan = std::make_shared<Compiled>();
    plan->orders = orders_;
    plan->worker_of = worker_of_;
    plan->before.resize(nodes);
    plan->first.resize(nodes + 1);
    plan->after.resize(edges.size());
    for (const auto& [before, after] : edges) {
      ++plan->first[index(before) + 1];
      ++plan->before[index(after)];
    }
    for (size_t node = 0; node < nodes; ++node) plan->first[node + 1] += plan->first[node];
    auto next = plan->first;
    for (const auto& [before, after] : edges) plan->after[index(next[index(before)]++)] = after;
    refuse_cycle(*plan);
    return plan;
  }

  static void refuse_cycle(const Compiled& plan) {
    // Take away nodes that wait for nothing, again and again.
    auto before = plan.before;
    const auto nodes = static_cast<Node>(before.size());
    std::vector<Node> free;
    for (Node node = 0; node < nodes; ++node) {
      if (before[index(node)] == 0) free.push_back(node);
    }
    for (size_t i = 0; i < free.size(); ++i) {
      for (const Node after : plan.after_of(free[i])) {
        if (--before[index(after)] == 0) free.push_back(after);
      }
    }
    if (free.size() == before.size()) return;
    // Each node that is left waits for another of them, so a walk backwards runs into a cycle.
    std::vector<Node> from(before.size(), kNone);
    Node node = kNone;
    for (Node left = 0; left < nodes; ++left) {
      if (before[index(left)] == 0) continue;
      if (node == kNone) node = left;
      for (const Node after : plan.after_of(left)) from[index(after)] = left;
    }
    std::vector<bool> seen(before.size());
    for (; !seen[index(node)]; node = from[index(node)]) seen[index(node)] = true;
    const auto label = [&](Node one) {
      return "node " + std::to_string(one) + " (worker " + std::to_string(plan.worker_of[index(one)]) + ")";
    };
    std::string cycle = label(node);
    for (Node step = from[index(node)]; step != node; step = from[index(step)]) cycle = label(step) + " -> " + cycle;
    throw std::invalid_argument("PipelinePlan: the edges and the orders of the workers form a cycle: " + label(node) +
                                " -> " + cycle);
  }

  std::vector<std::vector<Node>> orders_;  // of each worker
  std::vector<int32_t> worker_of_;         // of each node
  std::vector<std::pair<Node, Node>> edges_;
  std::shared_ptr<const Compiled> compiled_;  // null: to be made
};

template <typename Sync>
class PipelineRun {
 public:
  using Time = typename Sync::Time;
  using Node = PipelinePlan::Node;
  // In place of a node: nothing is left to start, and nothing can start yet.
  static constexpr Node kNone = PipelinePlan::kNone, kLater = -2;

  explicit PipelineRun(PipelinePlan& plan)
      : plan_(plan.compiled()),
        before_(plan_->before),
        workers_(plan_->orders.size()),
        unended_(plan_->worker_of.size()) {
    for (Worker& worker : workers_) worker.to_wake.reserve(workers_.size());
  }
  PipelineRun(const PipelineRun&) = delete;
  PipelineRun& operator=(const PipelineRun&) = delete;

  // Reports that `finished`, which this worker got before, has ended, then waits until the worker's next node may
  // start, and starts it. kNone if the worker has nothing left to start, or the run is cancelled.
  Node next(int worker, std::optional<Node> finished = std::nullopt) {
    Node node = ask(worker, finished);
    while (node == kLater) node = wait_until(worker, Time::max());
    return node;
  }

  // The same in steps, for waits in slices: ask, and as long as the answer is kLater wait_until, or leave. In between
  // the worker is this thread's.
  Node ask(int number, std::optional<Node> finished) {
    PipelinePlan::require_worker("PipelineRun: next", number, workers_.size());
    if (finished) PipelinePlan::require_node("PipelineRun: next", *finished, before_.size());
    Worker& worker = workers_[index(number)];
    Node node;
    {
      const Lock lock(mutex_);
      if (worker.asked) {
        throw std::logic_error("PipelineRun: next: another thread waits for worker " + std::to_string(number));
      }
      const Node running = worker.running;
      if (finished.value_or(kNone) != running && (finished || !cancelled_)) refuse(number, finished, running);
      worker.to_wake.clear();
      if (finished) end(worker);
      node = answer(number);
    }
    for (const int32_t other : worker.to_wake) workers_[index(other)].changed.notify_one();
    return node;
  }

  // kLater if the worker's next node still cannot start at `until`.
  Node wait_until(int number, Time until) {
    Worker& worker = workers_[index(number)];
    Lock lock(mutex_);
    Node node = answer(number);
    for (bool in_time = true; node == kLater && in_time; node = answer(number)) {
      worker.waits = true;
      in_time = worker.changed.wait_until(lock, until);
      worker.waits = false;
    }
    return node;
  }

  void leave(int number) {
    const Lock lock(mutex_);
    workers_[index(number)].asked = false;
  }

  // From now on no node starts; threads that wait get kNone.
  void cancel() {
    {
      const Lock lock(mutex_);
      cancelled_ = true;
    }
    for (Worker& worker : workers_) worker.changed.notify_one();
  }

  bool cancelled() const {
    const Lock lock(mutex_);
    return cancelled_;
  }

  // True once every node has ended.
  bool done() const {
    const Lock lock(mutex_);
    return unended_ == 0;
  }

 private:
  using Lock = std::unique_lock<typename Sync::Mutex>;

  struct Worker {
    typename Sync::Condition changed;  // its next node may start, or the run is cancelled
    size_t started = 0;                // how many of its nodes have started
    Node running = kNone;
    bool asked = false;            // a thread is between ask and its answer
    bool waits = false;            // it waits, and nobody is about to wake it
    std::vector<int32_t> to_wake;  // the worker's thread's own: workers whose next node its node made ready
  };

  static size_t index(int32_t number) { return PipelinePlan::index(number); }

  // --- all with the lock held ---

  // The next node of the worker if it is ready; kNone or kLater otherwise.
  Node front(int number) const {
    const auto& order = plan_->orders[index(number)];
    const size_t started = workers_[index(number)].started;
    if (started == order.size()) return kNone;
    return before_[index(order[started])] == 0 ? order[started] : kLater;
  }

  // Starts what the worker may start.
  Node answer(int number) {
    Worker& worker = workers_[index(number)];
    const Node node = cancelled_ ? kNone : front(number);
    worker.asked = node == kLater;
    if (node < 0) return node;
    ++worker.started;
    worker.running = node;
    return node;
  }

  // What the worker runs has ended.
  void end(Worker& worker) {
    --unended_;
    for (const Node after : plan_->after_of(std::exchange(worker.running, kNone))) {
      if (--before_[index(after)] > 0) continue;
      const int32_t number = plan_->worker_of[index(after)];
      Worker& other = workers_[index(number)];
      if (!other.waits || front(number) != after) continue;
      other.waits = false;
      worker.to_wake.push_back(number);
    }
  }

  [[noreturn]] static void refuse(int worker, std::optional<Node> finished, Node running) {
    const auto name = [](Node node) { return node == kNone ? std::string("nothing") : "node " + std::to_string(node); };
    throw std::logic_error("PipelineRun: next: worker " + std::to_string(worker) + " runs " + name(running) +
                           ", but is reported to have finished " + name(finished.value_or(kNone)));
  }

  const std::shared_ptr<const PipelinePlan::Compiled> plan_;
  mutable typename Sync::Mutex mutex_;  // guards the rest
  std::vector<int32_t> before_;         // of each node: how many nodes it still waits for
  std::vector<Worker> workers_;
  size_t unended_;
  bool cancelled_ = false;
};

}  // namespace pymoe::runtime

// TaskGraph: functions that depend on each other, run by a worker pool as soon as what each depends on has ended.
//
//     TaskGraph<SystemSync> graph;
//     const auto first = graph.add([&] { a = f(); });
//     const auto second = graph.add([&] { b = g(a); });
//     graph.add_edge(first, second);
//     for (int step = 0; step < steps; ++step) graph.run(pool)->get();
//
// Order      A node becomes ready when all before it have ended well. Of several that are ready the one with the
//            greatest head start goes first, and the one that was added first among equals. Beside other jobs of the
//            pool a node ranks as what was posted when its run began, less its head start.
// Failures   What depends on a node that has thrown is skipped; everything else still runs. A run ends when every node
//            has run or is skipped, so nothing of it goes on behind the back of whoever has waited. Its error is the
//            exception of the first node, in the order in which they were added, that has thrown; failures() has all.
// Cancelling Nodes that have not started are skipped, and the run's error is Cancelled if no node has thrown. A pool
//            that is stopped with kCancel does that; with kDrain it still runs the graph to its end.
// Runs       A graph may be run any number of times, also by several threads at once and while it is changed: a run
//            sees the graph as it was when it began. What a run needs is allocated once, when it begins.
// Waiting    wait and get help: they run ready nodes of this run on the calling thread, so a node may wait for the run
//            of another graph, however few workers there are. help_until is for waits in slices.
// Patience   A run that is begun with patience leaves its nodes to who waits for it, as long as that thread ends one
//            within every such span: handing over nodes that are shorter costs more than it gains. Somebody must wait
//            for it, or it goes on after that span only, and not at all in a pool that is stopped before.
// Errors     add_edge throws std::out_of_range for a node that is not there. run throws std::invalid_argument for a
//            cycle, which it names, and StoppedError if the pool was stopped.
// Threads    add, add_edge and run of one graph are for one thread at a time; a Run's functions are for any number. The
//            pool must outlive its runs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "runtime/completion.h"
#include "runtime/cycle.h"
#include "runtime/worker_pool.h"

namespace pymoe::runtime {

template <typename Sync>
class TaskGraph {
 public:
  using Time = typename Sync::Time;
  using Duration = typename Sync::Duration;
  using Node = int32_t;  // counts from 0 in the order in which nodes were added
  class Run;

  // `name` is for error messages.
  Node add(std::function<void()> function, Duration head_start = Duration::zero(), std::string name = {}) {
    plan_ = nullptr;
    nodes_.push_back({std::make_shared<const std::function<void()>>(std::move(function)), head_start, std::move(name)});
    return size() - 1;
  }

  void add_edge(Node before, Node after) {
    for (const Node node : {before, after}) {
      if (node < 0 || node >= size()) {
        throw std::out_of_range("TaskGraph: add_edge: there is no node " + std::to_string(node) +
                                ", the nodes are 0 to " + std::to_string(size() - 1));
      }
    }
    plan_ = nullptr;
    edges_.emplace_back(before, after);
  }

  Node size() const { return static_cast<Node>(nodes_.size()); }

  std::shared_ptr<Run> run(WorkerPool<Sync>& pool, Duration patience = Duration::zero()) {
    if (!plan_) plan_ = make_plan();
    const auto run = std::make_shared<Run>(plan_, pool, patience);
    run->start();
    return run;
  }

 private:
  struct Added {
    std::shared_ptr<const std::function<void()>> function;
    Duration head_start;
    std::string name;
  };

  // The graph as runs see it.
  struct Plan {
    struct Entry {
      std::shared_ptr<const std::function<void()>> function;
      Duration head_start;
      int32_t place;        // in the order in which ready nodes go
      int32_t before;       // how many nodes it waits for
      int32_t first, last;  // the nodes that wait for it: after[first .. last - 1]
    };
    std::vector<Entry> nodes;
    std::vector<Node> after;
    std::vector<Node> by_place;
  };

  std::shared_ptr<const Plan> make_plan() const {
    refuse_cycle();
    auto plan = std::make_shared<Plan>();
    plan->by_place.resize(nodes_.size());
    std::iota(plan->by_place.begin(), plan->by_place.end(), 0);
    std::stable_sort(plan->by_place.begin(), plan->by_place.end(), [&](Node a, Node b) {
      return nodes_[static_cast<size_t>(a)].head_start > nodes_[static_cast<size_t>(b)].head_start;
    });
    for (const Added& node : nodes_) plan->nodes.push_back({node.function, node.head_start, 0, 0, 0, 0});
    for (size_t place = 0; place < nodes_.size(); ++place) {
      plan->nodes[static_cast<size_t>(plan->by_place[place])].place = static_cast<int32_t>(place);
    }
    for (const auto& [before, after] : edges_) {
      ++plan->nodes[static_cast<size_t>(before)].last;
      ++plan->nodes[static_cast<size_t>(after)].before;
    }
    int32_t used = 0;
    for (auto& node : plan->nodes) {
      node.first = used;
      used += std::exchange(node.last, used);
    }
    plan->after.resize(edges_.size());
    for (const auto& [before, after] : edges_) {
      plan->after[static_cast<size_t>(plan->nodes[static_cast<size_t>(before)].last++)] = after;
    }
    return plan;
  }

  void refuse_cycle() const {
    const auto cycle = find_cycle(size(), edges_);
    if (cycle.empty()) return;
    throw std::invalid_argument("TaskGraph: the edges make a cycle: " +
                                describe_cycle(cycle, [this](Node node) { return label(node); }));
  }

  std::string label(Node node) const {
    const std::string& name = nodes_[static_cast<size_t>(node)].name;
    return "node " + std::to_string(node) + (name.empty() ? "" : " (" + name + ")");
  }

  std::vector<Added> nodes_;
  std::vector<std::pair<Node, Node>> edges_;
  std::shared_ptr<const Plan> plan_;  // null: to be made
};

// One run of a graph.
//
// Its jobs in the pool are tickets: each runs ready nodes one after the other until there are none, or something older
// waits for a worker. One is posted for every ready node that no thread is about to take, as far as there are workers;
// in a pool that grows, as many as there are workers wait there beside those that were taken.
template <typename Sync>
class TaskGraph<Sync>::Run final : public Completion<Sync>,
                                   public std::enable_shared_from_this<typename TaskGraph<Sync>::Run> {
 public:
  struct Failure {
    Node node;
    std::exception_ptr error;
  };

  Run(std::shared_ptr<const Plan> plan, WorkerPool<Sync>& pool, Duration patience)
      : plan_(std::move(plan)),
        pool_(pool),
        began_(Sync::now()),
        patience_(patience),
        unsettled_(static_cast<int>(plan_->nodes.size())) {
    ready_.reserve(plan_->nodes.size());
    states_.reserve(plan_->nodes.size());
    for (const auto& node : plan_->nodes) states_.push_back({node.before, false});
    this->claim();
  }

  // Runs ready nodes, and waits while there are none; false if the run has not ended by `until`. A node that has been
  // started here is run to its end.
  bool help_until(Time until) {
    const auto late = [until] { return until != Time::max() && Sync::now() >= until; };
    {
      Lock lock(mutex_);
      while (unsettled_ > 0) {
        work(lock, false, late);
        if (unsettled_ == 0) break;
        if (late()) return false;
        ++waiting_;
        if (ready_.empty()) changed_.wait_until(lock, until);
        --waiting_;
      }
    }
    Completion<Sync>::wait();  // whoever settled the last node is about to say so
    return true;
  }

  void wait() { help_until(Time::max()); }

  // Waits; throws the run's error, if it has one.
  void get() {
    wait();
    if (this->error()) std::rethrow_exception(this->error());
  }

  // Skips every node that has not started.
  void cancel() {
    Lock lock(mutex_);
    cancelled_ = true;
    while (!ready_.empty()) {
      const Node node = take();
      states_[index(node)].skipped = dropped_ = true;
      settle(node);
    }
    end_if_settled(lock);
  }

  // After the end: what has thrown, in the order of the nodes.
  const std::vector<Failure>& failures() const { return failures_; }

 private:
  friend class TaskGraph;
  using Lock = std::unique_lock<typename Sync::Mutex>;

  struct State {
    int before;    // nodes that it waits for
    bool skipped;  // or has thrown: what comes after it is skipped
  };

  struct Ticket final : Job {
    explicit Ticket(Run& owner) : owner(owner) {}
    void run() noexcept override {
      Lock lock(owner.mutex_);
      --owner.called_;
      owner.work(lock, true, [this] { return owner.pool_.older_waits(owner.next_rank()); });
    }
    void cancel() noexcept override {
      {
        const Lock lock(owner.mutex_);
        --owner.called_;
        --owner.tickets_;
      }
      owner.cancel();
    }
    Run& owner;
  };

  // Looks, every span of patience, whether the thread that waits gets on without workers.
  struct Watch final : Job {
    explicit Watch(Run& owner) : owner(owner) {}
    void run() noexcept override {
      Lock lock(owner.mutex_);
      if (!owner.held_) return;
      if (std::exchange(owner.seen_, owner.unsettled_) != owner.unsettled_ && owner.unsettled_ > 0) {
        lock.unlock();
        if (owner.watch_later()) return;
        lock.lock();
      }
      owner.let_go(lock);
    }
    void cancel() noexcept override {
      Lock lock(owner.mutex_);
      owner.let_go(lock);
    }
    Run& owner;
  };

  bool watch_later() {
    return pool_.post_at(Sync::now() + patience_, std::shared_ptr<Job>(this->shared_from_this(), &watch_));
  }

  static size_t index(int32_t node) { return static_cast<size_t>(node); }

  void start() {
    Lock lock(mutex_);
    for (Node node = 0; node < static_cast<Node>(states_.size()); ++node) {
      if (states_[index(node)].before == 0) make_ready(node);
    }
    seen_ = unsettled_;
    held_ = patience_ > Duration::zero() && unsettled_ > 0;
    if (held_) {
      lock.unlock();
      const bool watched = watch_later();
      lock.lock();
      if (watched) return;
    }
    let_go(lock);
    if (tickets_ == 0 && !ready_.empty()) throw StoppedError("TaskGraph: run on a pool that was stopped");
    end_if_settled(lock);
  }

  // --- all with the lock held; those that take it as a parameter release it for a while ---

  // Runs ready nodes until there are none, or leave() says that others should.
  template <typename Leave>
  void work(Lock& lock, bool ticket, const Leave& leave) {
    while (!ready_.empty()) {
      if (leave()) {
        tickets_ -= ticket;
        let_go(lock);
        if (ready_.empty() || tickets_ > 0) return;
        tickets_ += ticket;  // the pool refuses tickets, and nobody else has one
      }
      const Node node = take();
      call_workers(lock, waiting_);
      lock.unlock();
      std::exception_ptr error;
      try {
        (*plan_->nodes[index(node)].function)();
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      if (error) {
        states_[index(node)].skipped = true;
        failures_.push_back({node, std::move(error)});
      }
      settle(node);
      end_if_settled(lock);
    }
    tickets_ -= ticket;
  }

  // For the nodes that are ready: of the threads that wait in help_until up to `waiting`, and workers for the rest.
  void call_workers(Lock& lock, int waiting) {
    int count = static_cast<int>(ready_.size()) - called_;
    for (; count > 0 && waiting > 0; --waiting, --count) changed_.notify_one();
    if (held_) return;
    // A pool that grows has to see that there are more than its workers have taken.
    count = std::min(count, pool_.workers() - (pool_.grows() ? called_ : tickets_));
    if (count <= 0) return;
    const Time rank = next_rank();
    called_ += count;
    tickets_ += count;
    lock.unlock();
    int posted = 0;
    while (posted < count && pool_.post(std::shared_ptr<Job>(this->shared_from_this(), &ticket_), rank)) ++posted;
    lock.lock();
    called_ -= count - posted;
    tickets_ -= count - posted;
  }

  void let_go(Lock& lock) {
    held_ = false;
    call_workers(lock, 0);
  }

  Time next_rank() const { return began_ - plan_->nodes[index(plan_->by_place[index(ready_.front())])].head_start; }

  void make_ready(Node node) {
    ready_.push_back(plan_->nodes[index(node)].place);
    std::push_heap(ready_.begin(), ready_.end(), std::greater<>());
  }

  Node take() {
    std::pop_heap(ready_.begin(), ready_.end(), std::greater<>());
    const Node node = plan_->by_place[index(ready_.back())];
    ready_.pop_back();
    return node;
  }

  // A node has run or is skipped.
  void settle(Node node) {
    for (;;) {
      --unsettled_;
      const auto& entry = plan_->nodes[index(node)];
      for (int32_t k = entry.first; k < entry.last; ++k) {
        const Node after = plan_->after[index(k)];
        State& state = states_[index(after)];
        state.skipped |= states_[index(node)].skipped;
        if (--state.before > 0) continue;
        if (!state.skipped && !cancelled_) {
          make_ready(after);
          continue;
        }
        dropped_ |= !state.skipped;
        state.skipped = true;
        to_skip_.push_back(after);
      }
      if (to_skip_.empty()) return;
      node = to_skip_.back();
      to_skip_.pop_back();
    }
  }

  void end_if_settled(Lock& lock) {
    if (unsettled_ > 0 || ended_) return;
    ended_ = true;
    std::sort(failures_.begin(), failures_.end(), [](const Failure& a, const Failure& b) { return a.node < b.node; });
    std::exception_ptr error;
    if (!failures_.empty()) {
      error = failures_.front().error;
    } else if (dropped_) {
      error = std::make_exception_ptr(Cancelled("the run was cancelled before all of its nodes had started"));
    }
    if (waiting_ > 0) changed_.notify_all();
    lock.unlock();
    this->complete(std::move(error));
    lock.lock();
  }

  const std::shared_ptr<const Plan> plan_;
  WorkerPool<Sync>& pool_;
  const Time began_;
  const Duration patience_;
  Ticket ticket_{*this};
  Watch watch_{*this};
  typename Sync::Mutex mutex_;        // guards the rest
  typename Sync::Condition changed_;  // a node is ready for a thread that waits in help_until, or the run has ended
  std::vector<State> states_;
  std::vector<int32_t> ready_;  // a heap of places, the smallest in front
  std::vector<Node> to_skip_;   // for settle
  std::vector<Failure> failures_;
  int unsettled_;
  int seen_ = 0;       // unsettled_ when watch_ last looked
  bool held_ = false;  // workers are not called yet
  int called_ = 0;     // tickets that no worker has taken yet
  int tickets_ = 0;    // these, and those that a worker is at
  int waiting_ = 0;    // threads that wait in help_until
  bool cancelled_ = false, dropped_ = false, ended_ = false;
};

}  // namespace pymoe::runtime

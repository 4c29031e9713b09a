// LaneRun: nodes that depend on each other, each run by the thread of its lane, in the lane's order, which bends.
//
//     LanePlan plan(lanes);
//     const auto one = plan.add(lane, queue), other = plan.add(lane, queue);
//     plan.add_edge(one, other);
//     LaneRun<SystemSync> run(plan);
//     for (auto node = run.next(lane); node != run.kNone; node = run.next(lane, node)) work(node);  // in each lane
//
// The threads are the caller's: each asks for the next node of its lane when it has ended the one before.
//
// Order      The order in which a lane's nodes were added is its plan. The first of them that has not started is the
//            lane's front. A node is ready when all before it have ended. If the front is ready, it starts. If not, the
//            first node of the plan starts that
//              - is ready, and was added as one that overtakes;
//              - is the first of its queue that has not started: nodes of one queue never overtake each other;
//              - has room, see below.
//            A lane looks at the heads of its queues alone, so finding a node takes as many steps as it has queues.
// Limits     A node's live is what it holds: what is above 0 counts from its start on, what is below 0 is taken off at
//            its end. A node with live above 0 has room if the lane's limit has room for it and for those in front of
//            it that have not started. The front asks for no room. So what a lane holds is never more than its limit or
//            what its plan holds at most when it runs in order, whichever is greater.
// No deadlock. Edges and plans together have no cycle, or no run begins, so there is an order of all nodes that keeps
//            both. The first in it that has not started is the front of its lane, and ready once those that run have
//            ended; neither limits nor what has overtaken it hold it back. So a run gets to its end as long as every
//            lane's thread goes on to ask.
// Waking     The end of a node wakes the lanes that it gave something to start, each once. What a lane could start when
//            it was woken, it still can when it comes: it alone starts its nodes.
// Runs       A plan may be run any number of times, and changed meanwhile: a run sees it as it was when it began. What
//            a run needs is allocated once, when it begins.
// Errors     std::out_of_range for a lane or node that is not there; std::invalid_argument from a run that begins for
//            a cycle, which it names; std::logic_error for a thread that asks in a lane where another does, and for one
//            that says of another node than the one it got that it has ended.
// Threads    A plan is for one thread at a time, and so is a lane of a run; its other functions are for any number.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "runtime/lane_plan.h"

namespace pymoe::runtime {

template <typename Sync>
class LaneRun {
 public:
  using Time = typename Sync::Time;
  using Node = LanePlan::Node;
  // What is said in place of a node: there is nothing left to start, and there is nothing yet.
  static constexpr Node kNone = LanePlan::kNone, kLater = -2;

  explicit LaneRun(LanePlan& plan)
      : plan_(plan.compiled()),
        before_(plan_->before),
        heads_(plan_->heads),
        lanes_(plan_->lanes.size()),
        unended_(plan_->places.size()) {
    for (Lane& lane : lanes_) lane.to_wake.reserve(lanes_.size());
  }
  LaneRun(const LaneRun&) = delete;
  LaneRun& operator=(const LaneRun&) = delete;

  // Says that `finished`, which this lane got before, has ended, then waits until a node of the lane may start, and
  // starts it. kNone if the lane has nothing left to start, or the run is cancelled.
  Node next(int lane, std::optional<Node> finished = std::nullopt) {
    Node node = ask(lane, finished);
    while (node == kLater) node = wait_until(lane, Time::max());
    return node;
  }

  // The same in steps, for waits in slices: ask, and as long as the answer is kLater wait_until, or leave. In between
  // the lane is this thread's.
  Node ask(int number, std::optional<Node> finished) {
    LanePlan::require_lane("LaneRun: next", number, lanes_.size());
    if (finished) LanePlan::require_node("LaneRun: next", *finished, plan_->places.size());
    Lane& lane = lanes_[index(number)];
    Node node;
    {
      const Lock lock(mutex_);
      if (lane.asked) {
        throw std::logic_error("LaneRun: next: another thread waits in lane " + std::to_string(number));
      }
      const Node running = lane.running == kNone ? kNone : plan_->places[index(lane.running)].node;
      if (finished.value_or(kNone) != running && (finished || !cancelled_)) refuse(number, finished, running);
      lane.to_wake.clear();
      if (finished) end(lane);
      node = answer(number);
    }
    for (const int32_t other : lane.to_wake) lanes_[index(other)].changed.notify_one();
    return node;
  }

  // kLater if there is still nothing to start by `until`.
  Node wait_until(int number, Time until) {
    Lane& lane = lanes_[index(number)];
    Lock lock(mutex_);
    Node node = answer(number);
    for (bool in_time = true; node == kLater && in_time; node = answer(number)) {
      lane.waits = true;
      in_time = lane.changed.wait_until(lock, until);
      lane.waits = false;
    }
    return node;
  }

  void leave(int number) {
    const Lock lock(mutex_);
    lanes_[index(number)].asked = false;
  }

  // From now on no node starts; who waits gets kNone.
  void cancel() {
    {
      const Lock lock(mutex_);
      cancelled_ = true;
    }
    for (Lane& lane : lanes_) lane.changed.notify_one();
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

  struct Lane {
    typename Sync::Condition changed;  // there is something to start, or the run is cancelled
    bool asked = false;                // a thread is between ask and its answer
    bool waits = false;                // it waits, and nobody is about to wake it
    int32_t running = kNone;           // a place
    int64_t given_back = 0;            // what nodes with live below 0 have taken off
    std::vector<int32_t> to_wake;      // the lane's thread's own: lanes that its node gave something to start
  };

  static size_t index(int32_t number) { return static_cast<size_t>(number); }

  // --- all with the lock held ---

  // Starts what the lane may start.
  Node answer(int number) {
    Lane& lane = lanes_[index(number)];
    const int32_t place = cancelled_ ? kNone : choose(number);
    lane.asked = place == kLater;
    if (place < 0) return place;
    const auto& entry = plan_->places[index(place)];
    heads_[index(entry.queue)] = entry.next_in_queue;
    lane.running = place;
    return entry.node;
  }

  // A place, kNone or kLater. Of the lane's nodes that have not started the first is the first of its queue, too.
  int32_t choose(int number) const {
    const auto& lane = plan_->lanes[index(number)];
    int32_t front = kNone, best = kLater;
    for (int32_t queue = lane.first; queue < lane.last; ++queue) {
      const int32_t head = heads_[index(queue)];
      if (head == kNone) continue;
      if (front == kNone || head < front) front = head;
      if ((best == kLater || head < best) && may_overtake(number, head)) best = head;
    }
    return front == kNone || before_[index(front)] == 0 ? front : best;
  }

  bool may_overtake(int number, int32_t place) const {
    const auto& entry = plan_->places[index(place)];
    if (!entry.overtakes || before_[index(place)] > 0) return false;
    return entry.live <= 0 || entry.held - lanes_[index(number)].given_back <= plan_->lanes[index(number)].limit;
  }

  // What the lane runs has ended.
  void end(Lane& lane) {
    const auto& entry = plan_->places[index(std::exchange(lane.running, kNone))];
    if (entry.live < 0) lane.given_back -= entry.live;
    --unended_;
    for (int32_t k = entry.first; k < entry.last; ++k) {
      const int32_t after = plan_->after[index(k)];
      if (--before_[index(after)] > 0) continue;
      const int32_t number = plan_->places[index(after)].lane;
      Lane& other = lanes_[index(number)];
      if (!other.waits || choose(number) == kLater) continue;
      other.waits = false;
      lane.to_wake.push_back(number);
    }
  }

  [[noreturn]] static void refuse(int lane, std::optional<Node> finished, Node running) {
    const auto name = [](Node node) { return node == kNone ? std::string("nothing") : "node " + std::to_string(node); };
    throw std::logic_error("LaneRun: next: lane " + std::to_string(lane) + " runs " + name(running) +
                           ", but is said to have finished " + name(finished.value_or(kNone)));
  }

  const std::shared_ptr<const LanePlan::Compiled> plan_;
  mutable typename Sync::Mutex mutex_;  // guards the rest
  std::vector<int32_t> before_;         // of each place: how many it still waits for
  std::vector<int32_t> heads_;          // of each queue: its first place that has not started, or kNone
  std::vector<Lane> lanes_;
  size_t unended_;
  bool cancelled_ = false;
};

}  // namespace pymoe::runtime

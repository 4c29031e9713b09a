// LanePlan: which nodes there are, in which lanes and orders, and what they depend on. lanes.h says what it means.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "runtime/cycle.h"

namespace pymoe::runtime {

class LanePlan {
 public:
  using Node = int32_t;  // counts from 0 in the order in which nodes were added

  static constexpr Node kNone = -1;  // in place of a node

  explicit LanePlan(int lanes) {
    if (lanes < 1) throw std::invalid_argument("LanePlan: there must be a lane, got " + std::to_string(lanes));
    limits_.assign(static_cast<size_t>(lanes), kUnlimited);
  }

  Node add(int lane, int queue, int live = 0, bool overtakes = false) {
    require_lane("LanePlan: add", lane, limits_.size());
    compiled_ = nullptr;
    nodes_.push_back({lane, queue, live, overtakes});
    return static_cast<Node>(nodes_.size()) - 1;
  }

  void add_edge(Node before, Node after) {
    for (const Node node : {before, after}) require_node("LanePlan: add_edge", node, nodes_.size());
    compiled_ = nullptr;
    edges_.emplace_back(before, after);
  }

  void set_limit(int lane, std::optional<int64_t> limit) {
    require_lane("LanePlan: set_limit", lane, limits_.size());
    compiled_ = nullptr;
    limits_[static_cast<size_t>(lane)] = limit.value_or(kUnlimited);
  }

  // The plan as runs see it. Nodes are in it lane by lane, and within a lane in its order: that is a node's place.
  struct Compiled {
    struct Entry {
      int32_t first, last;    // the places that wait for it: after[first .. last - 1]
      int32_t next_in_queue;  // a place, or kNone
      int32_t lane, queue;    // queue: counted over all lanes
      int32_t live;
      bool overtakes;
      Node node;
      int64_t held;  // what nodes of the lane with live above 0 hold together, up to this one
    };
    struct Lane {
      int32_t first, last;  // its queues
      int64_t limit;
    };
    std::vector<Entry> places;
    std::vector<int32_t> after;
    std::vector<int32_t> before;  // of each place: how many it waits for
    std::vector<int32_t> heads;   // of each queue: its first place
    std::vector<Lane> lanes;
  };

  // As it is now.
  std::shared_ptr<const Compiled> compiled() {
    if (!compiled_) compiled_ = compile();
    return compiled_;
  }

  // For runs, too.
  static void require_lane(const char* where, int lane, size_t lanes) {
    if (lane >= 0 && index(lane) < lanes) return;
    throw std::out_of_range(std::string(where) + ": there is no lane " + std::to_string(lane) +
                            ", the lanes are 0 to " + std::to_string(lanes - 1));
  }

  static void require_node(const char* where, Node node, size_t nodes) {
    if (node >= 0 && index(node) < nodes) return;
    throw std::out_of_range(std::string(where) + ": there is no node " + std::to_string(node) + ", there are " +
                            std::to_string(nodes));
  }

 private:
  static constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

  struct Added {
    int lane, queue, live;
    bool overtakes;
  };

  static size_t index(int32_t number) { return static_cast<size_t>(number); }

  std::shared_ptr<const Compiled> compile() const {
    std::vector<std::vector<Node>> orders(limits_.size());
    for (size_t node = 0; node < nodes_.size(); ++node) {
      orders[index(nodes_[node].lane)].push_back(static_cast<Node>(node));
    }
    refuse_cycle(orders);
    auto plan = std::make_shared<Compiled>();
    std::vector<int32_t> places(nodes_.size());  // of each node
    for (size_t lane = 0; lane < orders.size(); ++lane) {
      const auto first = static_cast<int32_t>(plan->heads.size());
      lay_out(orders[lane], *plan, places);
      plan->lanes.push_back({first, static_cast<int32_t>(plan->heads.size()), limits_[lane]});
    }
    link(*plan, places);
    return plan;
  }

  // The nodes of a lane, and its queues.
  void lay_out(const std::vector<Node>& order, Compiled& plan, std::vector<int32_t>& places) const {
    std::map<int, std::pair<int32_t, int32_t>> queues;  // by the caller's number: ours, and the last place so far
    int64_t held = 0;
    for (const Node node : order) {
      const Added& added = nodes_[index(node)];
      const auto here = static_cast<int32_t>(plan.places.size());
      const auto [queue, is_new] = queues.try_emplace(added.queue, plan.heads.size(), here);
      if (is_new) {
        plan.heads.push_back(here);
      } else {
        plan.places[index(std::exchange(queue->second.second, here))].next_in_queue = here;
      }
      if (added.live > 0) held += added.live;
      places[index(node)] = here;
      plan.places.push_back({0, 0, kNone, added.lane, queue->second.first, added.live, added.overtakes, node, held});
    }
  }

  void link(Compiled& plan, const std::vector<int32_t>& places) const {
    plan.before.resize(nodes_.size());
    for (const auto& [before, after] : edges_) {
      ++plan.places[index(places[index(before)])].last;
      ++plan.before[index(places[index(after)])];
    }
    int32_t used = 0;
    for (auto& entry : plan.places) {
      entry.first = used;
      used += std::exchange(entry.last, used);
    }
    plan.after.resize(edges_.size());
    for (const auto& [before, after] : edges_) {
      plan.after[index(plan.places[index(places[index(before)])].last++)] = places[index(after)];
    }
  }

  void refuse_cycle(const std::vector<std::vector<Node>>& orders) const {
    auto edges = edges_;
    for (const auto& order : orders) {
      for (size_t i = 1; i < order.size(); ++i) edges.emplace_back(order[i - 1], order[i]);
    }
    const auto cycle = find_cycle(static_cast<int32_t>(nodes_.size()), edges);
    if (cycle.empty()) return;
    const auto label = [this](Node node) {
      return "node " + std::to_string(node) + " (lane " + std::to_string(nodes_[index(node)].lane) + ")";
    };
    throw std::invalid_argument("LanePlan: the edges and the orders of the lanes make a cycle: " +
                                describe_cycle(cycle, label));
  }

  std::vector<Added> nodes_;
  std::vector<std::pair<Node, Node>> edges_;
  std::vector<int64_t> limits_;               // of each lane
  std::shared_ptr<const Compiled> compiled_;  // null: to be made
};

}  // namespace pymoe::runtime

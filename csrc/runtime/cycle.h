// Cycles in a graph of numbered nodes, for what must refuse them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace pymoe::runtime {

// The nodes of a cycle, each with an edge to the next and the last with one to the first; empty if there is no cycle.
// The nodes are 0 to size - 1, an edge is (before, after).
inline std::vector<int32_t> find_cycle(int32_t size, const std::vector<std::pair<int32_t, int32_t>>& edges) {
  const auto index = [](int32_t node) { return static_cast<size_t>(node); };
  std::vector<int32_t> before(index(size)), last(index(size)), after(edges.size());
  for (const auto& [one, other] : edges) {
    ++before[index(other)];
    ++last[index(one)];
  }
  int32_t used = 0;
  for (int32_t& end : last) used += std::exchange(end, used);
  for (const auto& [one, other] : edges) after[index(last[index(one)]++)] = other;
  // Take away nodes that wait for nothing, again and again; on what is left every walk backwards runs into a cycle.
  std::vector<int32_t> free;
  for (int32_t node = 0; node < size; ++node) {
    if (before[index(node)] == 0) free.push_back(node);
  }
  for (size_t i = 0; i < free.size(); ++i) {
    for (int32_t k = free[i] == 0 ? 0 : last[index(free[i] - 1)]; k < last[index(free[i])]; ++k) {
      if (--before[index(after[index(k)])] == 0) free.push_back(after[index(k)]);
    }
  }
  if (free.size() == index(size)) return {};
  std::vector<int32_t> from(index(size), -1);  // a node of the rest that each node of the rest waits for
  for (const auto& [one, other] : edges) {
    if (before[index(one)] > 0) from[index(other)] = one;
  }
  auto node = static_cast<int32_t>(std::find_if(before.begin(), before.end(), [](int32_t count) { return count > 0; }) -
                                   before.begin());
  std::vector<bool> seen(index(size));
  for (; !seen[index(node)]; node = from[index(node)]) seen[index(node)] = true;
  std::vector<int32_t> cycle{node};
  for (int32_t step = from[index(node)]; step != node; step = from[index(step)]) cycle.push_back(step);
  std::reverse(cycle.begin() + 1, cycle.end());
  return cycle;
}

// "a -> b -> a", of what label(node) calls the nodes.
template <typename Label>
std::string describe_cycle(const std::vector<int32_t>& cycle, const Label& label) {
  std::string text;
  for (const int32_t node : cycle) text += label(node) + " -> ";
  return text + label(cycle.front());
}

}  // namespace pymoe::runtime

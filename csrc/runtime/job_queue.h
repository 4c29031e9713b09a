// JobQueue: what a worker pool has to run, smallest rank first, first come first served among equals.
//
// Ranks are points in time and mostly grow from one push to the next. Those that do form a line, where a push and a pop
// cost the same however long it is; what comes out of order goes to a heap beside it. Not locked: its owner does that.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

namespace pymoe::runtime {

// Something that a worker pool runs.
struct Job {
  virtual ~Job() = default;
  virtual void run() noexcept = 0;
  // Instead of run(): the pool was stopped first.
  virtual void cancel() noexcept {}
};

template <typename Rank>
class JobQueue {
 public:
  bool empty() const { return line_.empty() && heap_.empty(); }
  size_t size() const { return line_.size() + heap_.size(); }

  void push(Rank rank, std::shared_ptr<Job> job) {
    Entry entry{rank, pushed_++, std::move(job)};
    if (line_.empty() || !(rank < line_.back().rank)) {
      line_.push_back(std::move(entry));
    } else {
      heap_.push_back(std::move(entry));
      std::push_heap(heap_.begin(), heap_.end(), later);
    }
  }

  // Both of a queue that is not empty.
  Rank first_rank() const { return (line_first() ? line_.front() : heap_.front()).rank; }

  std::shared_ptr<Job> pop() {
    std::shared_ptr<Job> job;
    if (line_first()) {
      job = std::move(line_.front().job);
      line_.pop_front();
    } else {
      std::pop_heap(heap_.begin(), heap_.end(), later);
      job = std::move(heap_.back().job);
      heap_.pop_back();
    }
    return job;
  }

 private:
  struct Entry {
    Rank rank;
    uint64_t order;
    std::shared_ptr<Job> job;
  };

  static bool later(const Entry& a, const Entry& b) {
    return b.rank < a.rank || (!(a.rank < b.rank) && b.order < a.order);
  }
  bool line_first() const { return heap_.empty() || (!line_.empty() && later(heap_.front(), line_.front())); }

  std::deque<Entry> line_;   // in order
  std::vector<Entry> heap_;  // the earliest in front
  uint64_t pushed_ = 0;
};

}  // namespace pymoe::runtime

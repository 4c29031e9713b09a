// Request: what a client submits to a TaskPool, and Slice: the part of one that a batch holds.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>

#include "runtime/completion.h"

namespace pymoe::runtime {

// The outcome of a request that had not started by its deadline.
class DeadlineExceeded : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename Sync>
class RequestQueue;

// A number of rows that want to go through a pool's batch function. What the rows hold is up to who derives from it.
template <typename Sync>
class Request : public Completion<Sync> {
 public:
  using Time = typename Sync::Time;
  using Duration = typename Sync::Duration;

  // Requests of different kinds never share a batch. `head_start` is its priority: it counts as if the request had
  // arrived so much earlier.
  Request(int64_t rows, uint64_t kind, std::optional<Time> deadline = std::nullopt,
          Duration head_start = Duration::zero())
      : rows(rows), kind(kind), deadline(deadline), head_start(head_start) {}

  const int64_t rows;
  const uint64_t kind;
  const std::optional<Time> deadline;  // the time by which it must have started
  const Duration head_start;

 private:
  friend class RequestQueue<Sync>;
  using ByRank = std::multimap<Time, std::shared_ptr<Request>>;  // rank: arrival - head_start
  using ByTime = std::multimap<Time, Request*>;

  // Where it stands in its queue; guarded as the queue is.
  Time arrival_{};
  int64_t next_row_ = 0;  // the first row that no batch has taken yet
  bool queued_ = false;
  bool in_batch_ = false;               // a batch that has not ended has a part of it
  bool given_up_ = false;               // what no batch has taken yet never runs
  typename ByRank::iterator place_;     // if queued_
  typename ByTime::iterator deadline_;  // if queued_, not begun, and it has a deadline
};

template <typename Sync>
struct Slice {
  std::shared_ptr<Request<Sync>> request;
  int64_t begin, end;  // rows

  bool whole() const { return begin == 0 && end == request->rows; }
  bool last() const { return end == request->rows; }
};

// What to throw from BatchFunction::run if the batch did not run at all and must not count as failed: its requests go
// back to where they were in the queue. A thread that helped gets it thrown from where it helped (submit, wait).
struct Interrupted {};

template <typename Sync>
class BatchFunction {
 public:
  virtual ~BatchFunction() = default;

  // Runs the slices as one batch, in this order, and keeps each one's result. What it throws is the error of all.
  virtual void run(std::span<const Slice<Sync>> batch) = 0;

  // Whether a batch that threw `error` left everything as it was, so that parts of it may run again.
  virtual bool may_retry([[maybe_unused]] const std::exception_ptr& error) { return true; }

  // Calls end(), once: it ends the requests that are done with a batch, and so wakes who waits for them.
  virtual void deliver(const std::function<void()>& end) { end(); }
};

}  // namespace pymoe::runtime

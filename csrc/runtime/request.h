// Request: what a client submits to a TaskPool. Slice: the part of a request that a batch contains.
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

// The error of a request that had not started by its deadline.
class DeadlineExceeded : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename Sync>
class RequestQueue;

// A request to process a number of rows in a pool's batches. Derived classes define the content of the rows.
template <typename Sync>
class Request : public Completion<Sync> {
 public:
  using Time = typename Sync::Time;
  using Duration = typename Sync::Duration;

  // Requests of different kinds never share a batch. `head_start` is the priority: the request is ranked as if it had
  // arrived that much earlier.
  Request(int64_t rows, uint64_t kind, std::optional<Time> deadline = std::nullopt,
          Duration head_start = Duration::zero())
      : rows(rows), kind(kind), deadline(deadline), head_start(head_start) {}

  const int64_t rows;
  const uint64_t kind;
  const std::optional<Time> deadline;  // time by which the request must have started; none: no limit
  const Duration head_start;

 private:
  friend class RequestQueue<Sync>;
  using ByRank = std::multimap<Time, std::shared_ptr<Request>>;  // rank in the queue: arrival - head_start
  using ByTime = std::multimap<Time, Request*>;

  // The state of the request in its queue. The queue's lock guards these members.
  Time arrival_{};
  int64_t next_row_ = 0;  // the first row that no batch has taken yet
  bool queued_ = false;
  bool in_batch_ = false;               // true if a running batch contains a part of the request
  bool given_up_ = false;               // true if the rows that no batch had taken were withdrawn
  typename ByRank::iterator place_;     // position by rank, if queued_
  typename ByTime::iterator deadline_;  // position by deadline, if it has one, is queued and has not begun
};

template <typename Sync>
struct Slice {
  std::shared_ptr<Request<Sync>> request;
  int64_t begin, end;  // rows

  bool whole() const { return begin == 0 && end == request->rows; }
  bool last() const { return end == request->rows; }
};

// Thrown by BatchFunction::run if the batch was interrupted and must not count as failed: its requests return to their
// places in the queue, and run again. If a helping thread took the batch, the function in which it helped (submit, wait
// or help) throws Interrupted too.
struct Interrupted {};

template <typename Sync>
class BatchFunction {
 public:
  virtual ~BatchFunction() = default;

  // Runs the slices as one batch, in this order, and stores the result of each. An exception that it throws becomes the
  // error of all slices' requests.
  virtual void run(std::span<const Slice<Sync>> batch) = 0;

  // Returns true if a batch that threw `error` changed nothing, so that parts of it may run again.
  virtual bool may_retry([[maybe_unused]] const std::exception_ptr& error) { return true; }

  // Delivers the results of a batch. Must call end() once, which ends the finished requests of the batch and so wakes
  // the threads that wait for them.
  virtual void deliver(const std::function<void()>& end) { end(); }
};

}  // namespace pymoe::runtime

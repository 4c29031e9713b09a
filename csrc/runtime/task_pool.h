// TaskPool: takes clients' requests and runs them in batches through its batch function.
//
//     auto strand = std::make_shared<Strand<Sync>>();
//     auto pool = TaskPool<Sync>::create("forward", options, function, strand);
//     executor.attach(strand);
//     pool->submit(request, until);
//     pool->wait(request, until);
//
// Bounded    The queue has room for options.capacity requests. submit waits for room until a given time. If the thread
//            may help, it meanwhile runs the strand's ready batches, unless another thread runs one.
// Waiting    wait returns true once the request is done. A thread that may help runs ready batches of the strand
//            itself. That saves two thread switches for a single request, and lets a batch that waits for another
//            expert run that expert's batch on the only worker. Waiting inside a batch for a request of the same strand
//            could never end, so it throws std::logic_error.
// Closing    After close, submit throws StoppedError, until the strand opens the pool again.
// Destruction  The destructor completes requests that are still queued with the error Cancelled.
// Threads    All functions may be called from any thread. The pool must be owned by a shared_ptr.
#pragma once

#include <atomic>
#include <chrono>
#include <concepts>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/batching.h"
#include "runtime/request_queue.h"
#include "runtime/statistics.h"
#include "runtime/strand.h"

namespace pymoe::runtime {

template <typename Sync>
class TaskPool : public std::enable_shared_from_this<TaskPool<Sync>> {
 public:
  using Time = typename Sync::Time;
  using RequestPointer = std::shared_ptr<Request<Sync>>;
  using Requests = std::vector<RequestPointer>;

  // Returns a new pool of the strand. Throws std::invalid_argument for invalid options.
  static std::shared_ptr<TaskPool> create(std::string name, const BatchingOptions<Sync>& options,
                                          std::shared_ptr<BatchFunction<Sync>> function,
                                          std::shared_ptr<Strand<Sync>> strand) {
    options.check();
    std::shared_ptr<TaskPool> pool(new TaskPool(std::move(name), options, std::move(function), std::move(strand)));
    pool->strand_->add(pool.get());
    return pool;
  }

  ~TaskPool() {
    Requests left;
    {
      const std::lock_guard lock(strand_->mutex_);
      strand_->remove(this);
      clear(left, true);  // no batch runs, since that would hold the pool
    }
    cancel(std::move(left), "the request was cancelled: its pool has gone before it had started").call();
  }

  // Queues the request. Returns false if the queue has no room by `until`; the client may then try again, and the
  // request counts as rejected only if reject() is called. Throws StoppedError if the pool is closed, std::logic_error
  // if it would wait for room inside a batch of the same strand.
  bool submit(const RequestPointer& request, Time until, Help help = Help::kNo) {
    typename Strand<Sync>::Plan plan;
    {
      std::unique_lock lock(strand_->mutex_);
      while (closed_ || queued_ >= options_.capacity) {
        if (closed_) throw StoppedError(closed_message());
        if (Sync::now() >= until) return false;
        strand_->refuse_on_runner();
        if (help != Help::kNo) {
          if (!strand_->help(lock)) strand_->watch(lock, until);
          continue;
        }
        ++waiting_for_room_;
        room_.wait_until(lock, until);
        --waiting_for_room_;
      }
      const Time now = Sync::now();
      RequestQueue<Sync>& queue = queue_of(request->kind);
      queue.push(request, now);
      ++queued_;
      ++strand_->unfinished_;
      statistics_.submitted.add();
      statistics_.queued.add();
      statistics_.queued_rows.add(request->rows);
      plan = strand_->plan(now);
    }
    strand_->carry_out(plan);
    return true;
  }

  // Returns true once the queue has room, which another client may take first; false if it has none by `until`. Throws
  // StoppedError if the pool is closed.
  bool wait_for_room(Time until) {
    std::unique_lock lock(strand_->mutex_);
    while (closed_ || queued_ >= options_.capacity) {
      if (closed_) throw StoppedError(closed_message());
      if (Sync::now() >= until) return false;
      ++waiting_for_room_;
      room_.wait_until(lock, until);
      --waiting_for_room_;
    }
    return true;
  }

  void reject() { statistics_.rejected.add(); }

  // Waits for the request. Returns true once it is done, false if it is not done by `until`.
  bool wait(const RequestPointer& request, Time until, Help help = Help::kNo) {
    return wait(request, until, [&](Time at) { strand_->wait(*request, at, help); });
  }

  // Waits by calling rest(at) repeatedly, which must wait for the request until `at` at most. Returns true once the
  // request is done, false if it is not done by `until`.
  template <typename Rest>
  bool wait(const RequestPointer& request, Time until, const Rest& rest)
    requires std::invocable<const Rest&, Time>
  {
    while (!request->done()) {
      // If the executor has not been started, no other thread can notice an expired deadline, so this thread checks it.
      const Time now = Sync::now();
      const bool watch = request->deadline && request->pending() && *request->deadline < until;
      if (watch && *request->deadline <= now) {
        expire();
        if (request->pending()) return request->wait_until(until);
        continue;
      }
      if (now >= until) return request->done();
      rest(watch ? *request->deadline : until);
    }
    return true;
  }

  // Runs the strand's ready batches until the request is done, none is ready or another thread runs one, without
  // waiting. Returns true if the request is done.
  bool help(const RequestPointer& request) {
    std::unique_lock lock(strand_->mutex_);
    while (!request->done()) {
      strand_->refuse_on_runner();
      if (!strand_->help(lock)) return request->done();
    }
    return true;
  }

  // Withdraws a request that has not begun, or the remaining rows of one that has; such a request ends with the running
  // batch, if that contains a part of it. Returns false if no rows are left to withdraw.
  bool cancel(const RequestPointer& request) {
    {
      const std::lock_guard lock(strand_->mutex_);
      const auto queue = queues_.find(request->kind);
      if (queue == queues_.end()) return false;
      if (queue->second->remove(*request)) {
        left_queue(1, request->rows);
      } else {
        bool ends_now = false;
        if (!give_up(*queue->second, *request, ends_now)) return false;
        if (!ends_now) return true;
      }
    }
    statistics_.cancelled.add();
    end({request}, std::make_exception_ptr(Cancelled("the request was cancelled"))).call();
    return true;
  }

  void close() {
    const std::lock_guard lock(strand_->mutex_);
    closed_ = true;
    room_.notify_all();
    strand_->changed_.notify_all();
  }

  // Ends, with Cancelled(reason), every request that has not begun or needs further batches. If a running batch
  // contains a part of the request, the request ends with that batch, also with Cancelled.
  void cancel_all(const std::string& reason) { cancel_queued(reason).call(); }

  // Completes, with DeadlineExceeded, every request whose deadline has passed.
  void expire() {
    Requests expired;
    typename Strand<Sync>::Plan plan;
    {
      const std::lock_guard lock(strand_->mutex_);
      const Time now = Sync::now();
      for (auto& [kind, queue] : queues_) queue->expire(now, expired);
      int64_t rows = 0;
      for (const auto& request : expired) rows += request->rows;
      left_queue(static_cast<int64_t>(expired.size()), rows);
      plan = strand_->plan(now);
    }
    strand_->carry_out(plan);
    if (expired.empty()) return;
    statistics_.expired.add(static_cast<int64_t>(expired.size()));
    const auto error =
        std::make_exception_ptr(DeadlineExceeded("TaskPool '" + name_ + "': the request had not started in time" +
                                                 (strand_->attached() ? "" : "; no Runtime serves the pool")));
    end(std::move(expired), error).call();
  }

  // Returns true only the first time, so that at most one client is told that no runtime serves the pool.
  bool tell_idle() { return !told_idle_.exchange(true); }

  const std::string& name() const { return name_; }
  const BatchingOptions<Sync>& options() const { return options_; }
  const PoolStatistics& statistics() const { return statistics_; }
  const std::shared_ptr<Strand<Sync>>& strand() const { return strand_; }

 private:
  friend class Strand<Sync>;
  using Queue = RequestQueue<Sync>;
  using Outcome = typename Strand<Sync>::Outcome;
  using Ended = typename Strand<Sync>::Ended;

  TaskPool(std::string name, const BatchingOptions<Sync>& options, std::shared_ptr<BatchFunction<Sync>> function,
           std::shared_ptr<Strand<Sync>> strand)
      : name_(std::move(name)), options_(options), function_(std::move(function)), strand_(std::move(strand)) {}

  // --- with the strand's mutex held ---

  // Returns the queue of the next batch, or null if none is ready by `now`.
  Queue* ready_queue(Time now) {
    Queue* best = nullptr;
    for (auto& [kind, queue] : queues_) {
      if (ready_at(*queue) <= now && (best == nullptr || queue->rank() < best->rank())) best = queue.get();
    }
    return best;
  }
  Time ready_at() const {
    Time earliest = Queue::kNever;
    for (const auto& [kind, queue] : queues_) earliest = std::min(earliest, ready_at(*queue));
    return earliest;
  }
  Time ready_at(const Queue& queue) const {
    return strand_->draining_ && !queue.empty() ? Queue::kNow : queue.ready_at();
  }
  Time next_deadline() const {
    Time earliest = Queue::kNever;
    for (const auto& [kind, queue] : queues_) earliest = std::min(earliest, queue->next_deadline());
    return earliest;
  }

  Queue& queue_of(uint64_t kind) {
    if (const auto found = queues_.find(kind); found != queues_.end()) return *found->second;
    // Ragged requests may have any number of kinds, so queues without requests are discarded if there are many.
    if (queues_.size() >= kKeptQueues) std::erase_if(queues_, [](const auto& entry) { return entry.second->idle(); });
    return *queues_.emplace(kind, std::make_unique<Queue>(options_)).first->second;
  }

  // Records that requests and rows have left the queue, and wakes the threads that wait for room.
  void left_queue(int64_t requests, int64_t rows) {
    queued_ -= requests;
    statistics_.queued.add(-requests);
    statistics_.queued_rows.add(-rows);
    if (requests <= 0) return;
    if (waiting_for_room_ > 0) room_.notify_all();
    if (strand_->watching_ > 0) strand_->changed_.notify_all();
  }

  // Updates the pool's counters after `batch` was taken from a queue, at `now`.
  void taken(const std::vector<Slice<Sync>>& batch, Time now) {
    int64_t rows = 0, requests = 0;
    for (const auto& slice : batch) {
      rows += slice.end - slice.begin;
      requests += slice.last();
      if (slice.begin == 0) {
        statistics_.running.add();
        statistics_.wait_ns.add(nanoseconds(now - Queue::arrival(*slice.request)));
      }
    }
    left_queue(requests, rows);
  }

  // Updates the pool after a batch, and puts back slices that must run again. Returns the requests that are done, each
  // with its error, which is null on success.
  std::vector<std::pair<RequestPointer, std::exception_ptr>> settle(Queue& queue, std::span<const Slice<Sync>> batch,
                                                                    std::span<const Outcome> outcomes, Time start,
                                                                    Time end) {
    std::vector<std::pair<RequestPointer, std::exception_ptr>> done;
    std::vector<Slice<Sync>> back;
    int64_t rows = 0;
    done.reserve(batch.size());
    for (size_t i = 0; i < batch.size(); ++i) {
      const auto& [request, begin, slice_end] = batch[i];
      const Outcome& outcome = outcomes[i];
      const bool given_up = queue.returned(*request);
      if (outcome.put_back && !given_up) {
        back.push_back(batch[i]);
        continue;
      }
      rows += slice_end - begin;
      if (given_up && !outcome.error) {
        done.emplace_back(request, std::make_exception_ptr(Cancelled(kGivenUp)));
        continue;
      }
      if (outcome.error && !batch[i].last() && !given_up) left_queue(1, queue.drop_rest(*request));
      if (outcome.error || batch[i].last()) done.emplace_back(request, outcome.error);
    }
    if (!back.empty()) put_back(queue, back);
    if (back.size() == batch.size()) return done;
    queue.ended(static_cast<int64_t>(done.size()), end, end - start);
    statistics_.batches.add();
    statistics_.rows.add(rows);
    statistics_.batch_rows.add(static_cast<uint64_t>(rows));
    statistics_.process_ns.add(nanoseconds(end - start));
    for (const auto& [request, error] : done) {
      statistics_.running.add(-1);
      (queue.returned(*request) ? statistics_.cancelled : error ? statistics_.failed : statistics_.completed).add();
      statistics_.latency_ns.add(nanoseconds(end - Queue::arrival(*request)));
    }
    return done;
  }

  bool give_up(Queue& queue, Request<Sync>& request, bool& ends_now) {
    int64_t rows = 0;
    if (!queue.give_up(request, rows, ends_now)) return false;
    left_queue(1, rows);
    if (ends_now) statistics_.running.add(-1);
    return true;
  }

  void put_back(Queue& queue, std::span<const Slice<Sync>> back) {
    int64_t rows = 0, requests = 0;
    for (const auto& slice : back) {
      rows += slice.end - slice.begin;
      requests += slice.last();
      if (slice.begin == 0) statistics_.running.add(-1);
    }
    queue.put_back(back);
    left_queue(-requests, -rows);
  }

  void clear(Requests& cleared, bool begun_too = false) {
    int64_t rows = 0;
    for (auto& [kind, queue] : queues_) queue->clear(cleared, begun_too);
    for (const auto& request : cleared) rows += request->rows;
    left_queue(static_cast<int64_t>(cleared.size()), rows);
  }

  // --- completing; no lock is held ---

  // Ends requests that this thread has claimed. The caller must call their callbacks.
  [[nodiscard]] Ended end(Requests requests, const std::exception_ptr& error) {
    Ended ended{std::move(requests), {}};
    for (const auto& request : ended.requests) ended.callbacks.push_back(request->end(error));
    strand_->finished(static_cast<int64_t>(ended.requests.size()));
    return ended;
  }

  [[nodiscard]] Ended cancel(Requests requests, const std::string& reason) {
    if (requests.empty()) return {};
    statistics_.cancelled.add(static_cast<int64_t>(requests.size()));
    return end(std::move(requests), std::make_exception_ptr(Cancelled(reason)));
  }

  // Does what cancel_all does, but leaves the callbacks to the caller.
  [[nodiscard]] Ended cancel_queued(const std::string& reason) {
    Requests cleared;
    {
      const std::lock_guard lock(strand_->mutex_);
      clear(cleared);
      for (auto& [kind, queue] : queues_) {
        for (const auto& request : queue->begun()) {
          bool ends_now = false;
          if (give_up(*queue, *request, ends_now) && ends_now) cleared.push_back(request);
        }
      }
    }
    return cancel(std::move(cleared), reason);
  }

  std::string closed_message() const {
    return "TaskPool '" + name_ +
           "': submit after it was closed: its Runtime has been shut down, or has removed it; submit while one serves "
           "it";
  }

  static uint64_t nanoseconds(typename Sync::Duration duration) {
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count());
  }

  static constexpr size_t kKeptQueues = 16;
  static constexpr const char* kGivenUp = "the request was cancelled before all of its rows had run";

  const std::string name_;
  const BatchingOptions<Sync> options_;
  const std::shared_ptr<BatchFunction<Sync>> function_;
  const std::shared_ptr<Strand<Sync>> strand_;
  PoolStatistics statistics_;
  std::atomic<bool> told_idle_{false};
  // Guarded by the strand's mutex:
  std::unordered_map<uint64_t, std::unique_ptr<Queue>> queues_;  // by kind
  int64_t queued_ = 0;                                           // requests, over all kinds
  bool closed_ = false;
  int waiting_for_room_ = 0;
  typename Sync::Condition room_;
};

}  // namespace pymoe::runtime

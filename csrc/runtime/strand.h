// Strand: a group of pools whose batches never overlap, such as the forward and the backward pool of one expert.
// Workers run strands.
//
// Order      Among the pools that have a batch ready, the one whose front request has the smallest rank goes first.
//            Strands are ordered in the same way: a strand posts itself to the workers with that rank, and runs one
//            batch for each time that a worker takes it.
// Posting    A strand posts itself to the workers when a batch is ready, and for the time at which one will be ready
//            (timeout, linger). A post is a hint: the worker that takes it checks whether a batch is ready, so an
//            unnecessary post does no harm. Nothing is posted while a batch runs; the thread that ran it checks
//            afterwards.
// Helping    A waiting thread runs ready batches of the strand itself (help). A worker that waits, from inside a batch,
//            for a request of another strand keeps running that strand's ready batches until the request is done,
//            since it may be the only thread that can run them.
// Results    Requests end after the strand is free again, so that a client's next request finds it free. If the batch
//            function throws, all requests of the batch end with its exception; with options.isolate, only those that
//            also fail alone, if the function allows parts of the batch to run again (may_retry).
// Locks      mutex_ guards the strand and the queues of its pools. Nothing is posted under it: plan() decides,
//            carry_out() posts.
#pragma once

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "runtime/request_queue.h"
#include "runtime/worker_pool.h"

namespace pymoe::runtime {

template <typename Sync>
class TaskPool;

// Says whether a waiting thread helps, that is, runs batches while it waits. Inside a batch (of another strand) it must
// help, because it blocks that strand and may be the only thread that can continue.
enum class Help { kNo, kYes, kInBatch };

template <typename Sync>
class Strand : public Job, public std::enable_shared_from_this<Strand<Sync>> {
 public:
  using Time = typename Sync::Time;
  using Workers = std::shared_ptr<WorkerPool<Sync>>;

  // Attaches the strand to the workers that run its batches from now on, and to the one-thread pool that handles its
  // deadlines, and opens its pools. Throws std::logic_error if it is already attached.
  void attach(Workers workers, Workers timer) {
    Plan made;
    {
      const std::lock_guard lock(mutex_);
      if (workers_) throw std::logic_error("Strand: it belongs to an executor already");
      workers_ = std::move(workers);
      timer_ = std::move(timer);
      posted_ = false;
      armed_ = armed_deadline_ = kNever;
      made = open();
    }
    carry_out(made);
  }

  void detach() {
    const std::lock_guard lock(mutex_);
    workers_ = timer_ = nullptr;
  }

  // Closes the pools of the strands. With kDrain, queued requests run without waiting for more; with kCancel, they are
  // cancelled, and so are the remaining rows of requests that have begun. All of them end before any callback runs,
  // because a callback may wait for any of them.
  static void request_stop(const std::vector<std::shared_ptr<Strand>>& strands, Stop how) {
    std::vector<Ended> ended;
    for (const auto& strand : strands) strand->request_stop(how, ended);
    for (const Ended& of_pool : ended) of_pool.call();
  }

  // Reverses request_stop: opens the strand's pools again. No thread may be waiting in wait_finished_until.
  void reopen() {
    Plan made;
    {
      const std::lock_guard lock(mutex_);
      made = open();
    }
    carry_out(made);
  }

  // Waits for the end of all submitted requests; returns false if one has not ended by `until`. Call after
  // request_stop. Throws std::logic_error on the thread that runs a batch of the strand.
  bool wait_finished_until(Time until) {
    std::unique_lock lock(mutex_);
    refuse_on_runner();
    while (unfinished_ > 0) {
      if (!changed_.wait_until(lock, until) && unfinished_ > 0) return false;
    }
    return true;
  }

  // Waits until `request`, which is one of this strand's, has ended, or until `until`. `how` says whether this thread
  // runs batches meanwhile. Throws std::logic_error on the thread that runs a batch of the strand.
  void wait(const Request<Sync>& request, Time until, Help how) {
    std::unique_lock lock(mutex_);
    while (!request.done()) {
      refuse_on_runner();
      if (how != Help::kNo && help(lock)) continue;
      // If other threads run the batches, this one can sleep until the request ends. Otherwise it must watch for
      // batches: a strand without workers may be about to be attached to this very thread, as its only worker.
      if (how == Help::kNo || (how == Help::kYes && workers_ && !workers_->on_worker())) {
        lock.unlock();
        request.wait_until(until);
        return;
      }
      watch(lock, until);
      if (Sync::now() >= until) return;
    }
  }

  // Returns true if the strand is attached to workers, which then run its batches.
  bool attached() const {
    const std::lock_guard lock(mutex_);
    return workers_ != nullptr;
  }

  // Returns the thread that runs a batch of the strand, if any.
  std::optional<typename Sync::ThreadId> runner() const {
    const std::lock_guard lock(mutex_);
    if (!running_) return std::nullopt;
    return runner_;
  }

  void run() noexcept override {
    std::unique_lock lock(mutex_);
    posted_ = false;
    if (armed_ <= Sync::now()) armed_ = kNever;
    try {
      if (help(lock)) return;
    } catch (const Interrupted&) {
      return;  // the batch is back in the queue, and posted
    }
    const Plan made = plan(Sync::now());
    lock.unlock();
    carry_out(made);
  }

 private:
  friend class TaskPool<Sync>;
  using Queue = RequestQueue<Sync>;
  using Pool = TaskPool<Sync>;
  static constexpr Time kNever = Queue::kNever;

  // The posts that must be made once the lock is released.
  struct Plan {
    Workers workers, timer;
    bool post = false;
    Time rank{};
    Time at = kNever;
    Time deadline = kNever;
  };

  // The outcome of a slice: interrupted (put_back), failed with `error`, or successful.
  struct Outcome {
    bool put_back = false;
    std::exception_ptr error;
  };

  // Requests that a thread has ended, and the callbacks of each. The thread calls the callbacks only once it has ended
  // all requests that it is going to end, because a callback may wait for any of them.
  struct Ended {
    std::vector<std::shared_ptr<Request<Sync>>> requests;
    std::vector<typename Completion<Sync>::Callbacks> callbacks;

    void call() const {
      for (const auto& of_request : callbacks) {
        for (const auto& callback : of_request) callback();
      }
    }
  };

  // What help() has taken from a queue.
  struct Taken {
    std::shared_ptr<Pool> pool;
    Queue* queue;
    Time start;
    typename Queue::Slices batch;
  };

  struct Deadlines : Job {
    explicit Deadlines(std::weak_ptr<Strand> strand) : strand(std::move(strand)) {}
    void run() noexcept override {
      if (const auto owner = strand.lock()) owner->expire();
    }
    const std::weak_ptr<Strand> strand;
  };

  // --- with the lock held ---

  void add(Pool* pool) {
    const std::lock_guard lock(mutex_);
    pools_.push_back(pool);
  }
  Plan open() {
    draining_ = false;
    for (Pool* pool : pools_) pool->closed_ = false;
    if (watching_ > 0) changed_.notify_all();
    return plan(Sync::now());
  }
  void remove(Pool* pool) { std::erase(pools_, pool); }

  void refuse_on_runner() const {
    if (running_ && runner_ == Sync::this_thread()) {
      throw std::logic_error(
          "TaskPool: a batch waits for its own expert, which cannot go on before this batch has ended");
    }
  }

  std::vector<std::shared_ptr<Pool>> owners() const {
    std::vector<std::shared_ptr<Pool>> result;
    for (Pool* pool : pools_) {
      if (auto owner = pool->weak_from_this().lock()) result.push_back(std::move(owner));
    }
    return result;
  }

  Time ready_at() const {
    Time earliest = kNever;
    if (running_) return earliest;
    for (const Pool* pool : pools_) earliest = std::min(earliest, pool->ready_at());
    return earliest;
  }

  Plan plan(Time now) {
    Plan made;
    if (!workers_) return made;
    Time deadline = kNever;
    for (const Pool* pool : pools_) deadline = std::min(deadline, pool->next_deadline());
    if (deadline < armed_deadline_) {
      armed_deadline_ = made.deadline = deadline;
      made.timer = timer_;
    }
    if (running_) return made;
    const Time ready = ready_at();
    if (ready <= now) {
      if (watching_ > 0) changed_.notify_all();
      if (posted_) return made;
      posted_ = made.post = true;
      const auto [pool, queue] = choose(now);
      made.rank = queue->rank();
      made.workers = workers_;
    } else if (ready < armed_) {
      if (watching_ > 0) changed_.notify_all();
      armed_ = made.at = ready;
      made.workers = workers_;
    }
    return made;
  }

  // Returns the pool and the queue of the next batch; both are null if no batch is ready.
  std::pair<Pool*, Queue*> choose(Time now) const {
    std::pair<Pool*, Queue*> best{nullptr, nullptr};
    for (Pool* pool : pools_) {
      Queue* queue = pool->ready_queue(now);
      if (queue && (!best.second || queue->rank() < best.second->rank())) best = {pool, queue};
    }
    return best;
  }

  // Runs one batch, if the strand is attached, a batch is ready and no thread runs a batch of this strand; the lock is
  // released meanwhile. Returns true if it ran a batch, or ended requests that had expired. If the batch was
  // interrupted, throws Interrupted with the lock released, because the interrupt is meant for this thread's own code.
  bool help(std::unique_lock<typename Sync::Mutex>& lock) {
    if (running_ || !workers_) return false;
    const Time start = Sync::now();
    const auto [chosen, queue] = choose(start);
    if (!queue) return false;
    std::shared_ptr<Pool> pool = chosen->weak_from_this().lock();
    if (!pool) return false;  // being destroyed: its destructor waits for the lock

    if (queue->next_deadline() <= start) {  // without a batch: the callbacks may wait for the one that would be next
      lock.unlock();
      pool->expire();
      pool.reset();
      lock.lock();
      return true;
    }

    Taken taken{std::move(pool), queue, start, queue->take()};
    taken.pool->taken(taken.batch, start);
    running_ = true;
    runner_ = Sync::this_thread();
    lock.unlock();
    run_taken(std::move(taken));
    lock.lock();
    return true;
  }

  // Waits until a batch may be ready, a request has ended or a queue has room, but not beyond `until`.
  void watch(std::unique_lock<typename Sync::Mutex>& lock, Time until) {
    ++watching_;
    changed_.wait_until(lock, workers_ ? std::min(until, ready_at()) : until);
    --watching_;
  }

  // --- without the lock ---

  void carry_out(const Plan& made) {
    // Stopped workers refuse the post, which is harmless: nothing is left for them to run.
    if (made.post) made.workers->post(this->shared_from_this(), made.rank);
    if (made.at != kNever) made.workers->post_at(made.at, this->shared_from_this());
    if (made.deadline != kNever) {
      made.timer->post_at(made.deadline, std::make_shared<Deadlines>(this->weak_from_this()));
    }
  }

  // Runs the batch and ends its requests; throws Interrupted if the batch was interrupted. `taken` is passed by value,
  // so that it is destroyed here: the last reference to a pool or a request must not be dropped under the lock.
  void run_taken(Taken taken) {
    const auto& [pool, queue, start, batch] = taken;
    std::vector<Outcome> outcomes(batch.size());
    ++Sync::batches_on_this_thread();
    execute(*pool, batch, outcomes);
    --Sync::batches_on_this_thread();
    const Time end = Sync::now();

    std::unique_lock lock(mutex_);
    running_ = false;
    runner_ = {};
    const auto ended = pool->settle(*queue, batch, outcomes, start, end);
    const Plan made = plan(end);
    lock.unlock();
    carry_out(made);
    // All requests end before any callback runs, because a callback may wait for any of them, or for the stop.
    Ended called;  // without the requests, which `ended` has
    called.callbacks.reserve(ended.size());
    pool->function_->deliver([&, &ended = ended] {
      for (const auto& [request, error] : ended) called.callbacks.push_back(request->end(error));
    });
    finished(static_cast<int64_t>(ended.size()));
    called.call();
    for (const Outcome& outcome : outcomes) {
      if (outcome.put_back) throw Interrupted();
    }
  }

  // Runs slices as one batch. If the batch fails, and the pool has the option `isolate`, runs each half of it again in
  // the same way.
  void execute(Pool& pool, std::span<const Slice<Sync>> batch, std::span<Outcome> outcomes) {
    std::exception_ptr error;
    try {
      pool.function_->run(batch);
      return;
    } catch (const Interrupted&) {
      for (Outcome& outcome : outcomes) outcome.put_back = true;
      return;
    } catch (...) {
      error = std::current_exception();
    }
    if (!pool.options_.isolate || batch.size() == 1 || !pool.function_->may_retry(error)) {
      for (Outcome& outcome : outcomes) outcome.error = error;
      return;
    }
    const size_t half = batch.size() / 2;
    execute(pool, batch.first(half), outcomes.first(half));
    execute(pool, batch.subspan(half), outcomes.subspan(half));
  }

  // Stops the strand, and adds the requests that this ends to `ended`. The caller must call their callbacks.
  void request_stop(Stop how, std::vector<Ended>& ended) {
    std::vector<std::shared_ptr<Pool>> pools;
    Plan made;
    {
      const std::lock_guard lock(mutex_);
      pools = owners();
      draining_ = true;
      made = how == Stop::kDrain ? plan(Sync::now()) : Plan{};
    }
    for (const auto& pool : pools) pool->close();
    if (how == Stop::kCancel) {
      for (const auto& pool : pools) {
        ended.push_back(
            pool->cancel_queued("the request was cancelled: the runtime was shut down before it had started"));
      }
      const std::lock_guard lock(mutex_);
      made = plan(Sync::now());  // as after every change of the queues
    }
    carry_out(made);
  }

  void expire() {
    std::vector<std::shared_ptr<Pool>> pools;
    {
      const std::lock_guard lock(mutex_);
      armed_deadline_ = kNever;
      pools = owners();
    }
    for (const auto& pool : pools) pool->expire();  // plans for the next deadline
  }

  void finished(int64_t requests) {
    const std::lock_guard lock(mutex_);
    unfinished_ -= requests;
    if (watching_ > 0 || (draining_ && unfinished_ == 0)) changed_.notify_all();
  }

  mutable typename Sync::Mutex mutex_;
  std::vector<Pool*> pools_;
  Workers workers_, timer_;  // null: not attached
  bool draining_ = false;    // true after request_stop: any queued request is ready
  bool running_ = false;     // true while a batch runs, on the thread runner_
  typename Sync::ThreadId runner_{};
  bool posted_ = false;               // true if no worker has taken the last post yet
  Time armed_ = kNever;               // the earliest time for which a post waits
  Time armed_deadline_ = kNever;      // the earliest deadline for which a post waits
  int64_t unfinished_ = 0;            // number of submitted requests that have not ended
  int watching_ = 0;                  // number of threads in watch()
  typename Sync::Condition changed_;  // signalled for these threads, and for threads that wait for the end
};

}  // namespace pymoe::runtime

#include "runtime/task_pool.h"

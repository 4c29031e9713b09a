// WorkerPool: a fixed number of threads that run jobs, smallest rank first, first come first served among equals.
//
//     WorkerPool<SystemSync> pool(4);
//     Future<int> answer = pool.submit([] { return 6 * 7; });
//     answer.get();
//     pool.stop();
//
// Jobs      post hands over a job with its rank: a point in time, so that what has waited longest goes first and a
//           priority is a head start. post_at runs a job at a time, or as soon after it as a worker is free; its rank
//           is that time. Exactly one of run() and cancel() is called on a job that was taken, once and under no lock.
// Tasks     submit makes a job of a function; its rank is the present. What the function returns or throws appears in
//           the future; an exception in a task touches nothing else. The function object is destroyed before the future
//           is done, by the thread that ran it. A thread that waits for a task that has not started runs it itself
//           (future.h): the number of workers bounds what runs at a time only as far as nobody waits.
// Stopping  request_stop refuses further jobs from then on and returns at once. With Stop::kDrain everything posted
//           still runs; with Stop::kCancel what has not started is cancelled. Either way jobs whose time has not come
//           are cancelled, and what runs is never interrupted. stop waits, too, until every worker has ended. Both may
//           be called any number of times and from several threads. The destructor stops with kDrain.
// Errors    submit after a stop throws StoppedError; post and post_at return false. Waiting for the workers from one of
//           them can never end, so it throws std::logic_error. The constructor throws std::invalid_argument for fewer
//           than one worker, and if the system refuses a thread it ends those already running and throws on.
// Threads   All functions may be called from any thread, including from jobs (stop and the destructor excepted). No
//           thread exists before the constructor or after stop.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "runtime/future.h"
#include "runtime/job_queue.h"
#include "runtime/sync.h"

namespace pymoe::runtime {

class StoppedError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Stop { kDrain, kCancel };

// A function and the state of its future, in one allocation.
template <typename Function, typename Sync>
class FunctionTask final : public Job, public FutureState<std::invoke_result_t<Function&>, Sync> {
  using Result = std::invoke_result_t<Function&>;
  using Value = typename FutureState<Result, Sync>::Value;

 public:
  template <typename From>
  explicit FunctionTask(From&& function) : function_(std::forward<From>(function)) {}

  bool help() noexcept override {
    if (!this->claim()) return false;
    std::optional<Value> value;
    std::exception_ptr error;
    try {
      if constexpr (std::is_void_v<Result>) {
        (*function_)();
        value.emplace();
      } else {
        value.emplace((*function_)());
      }
    } catch (...) {
      error = std::current_exception();
    }
    function_.reset();
    if (error) {
      this->complete(std::move(error));
    } else {
      this->finish(std::move(*value));
    }
    return true;
  }

  void run() noexcept override { help(); }

  void cancel() noexcept override {
    if (!this->claim()) return;
    function_.reset();
    this->complete(
        std::make_exception_ptr(Cancelled("the task was cancelled: its pool stopped before it had started")));
  }

 private:
  std::optional<Function> function_;
};

template <typename Sync>
class WorkerPool {
 public:
  using Time = typename Sync::Time;
  using Rank = Time;
  // What every worker does: `around(work)` must call work() once, and may set up and tear down around it.
  using Around = std::function<void(const std::function<void()>& work)>;

  explicit WorkerPool(int workers, Around around = {});
  ~WorkerPool() { stop(Stop::kDrain); }
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  bool post(std::shared_ptr<Job> job, Rank rank);
  bool post_at(Time when, std::shared_ptr<Job> job);

  template <typename Function>
  auto submit(Function&& function) {
    using Stored = std::decay_t<Function>;
    auto task = std::make_shared<FunctionTask<Stored, Sync>>(std::forward<Function>(function));
    if (!post(task, Sync::now())) throw StoppedError("WorkerPool: submit after the pool was stopped");
    return Future<std::invoke_result_t<Stored&>, Sync>(std::move(task));
  }

  void request_stop(Stop how);
  void stop(Stop how = Stop::kDrain);

  // The waiting half of stop: true if every worker has ended by `until`. Call after request_stop.
  bool wait_stopped_until(Time until);

  // True if a job waits for a worker whose rank is smaller: it should go first. May be out of date.
  bool older_waits(Rank rank) const { return first_rank_.load(std::memory_order_relaxed) < rank; }

  int workers() const { return static_cast<int>(workers_.size()); }
  // True on a thread of this pool.
  bool on_worker() const;

 private:
  struct Worker {
    typename Sync::Thread thread;   // guarded by join_mutex_
    typename Sync::ThreadId id{};   // guarded by mutex_, as is the rest; nobody's while the thread does not run
    typename Sync::Condition wake;  // called has become true
    bool called = false;
  };

  void work(Worker& self);
  std::shared_ptr<Job> next(Worker& self);
  void sleep(Worker& self, std::unique_lock<typename Sync::Mutex>& lock);
  void release_due();
  void make_ready(Rank rank, std::shared_ptr<Job> job);
  std::shared_ptr<Job> take_ready();
  // A sleeping worker that is to look again: the caller then notifies it, best without the lock. Null if none sleeps.
  Worker* call_idle();
  Worker* call_timekeeper();
  void refuse_on_worker() const;
  void join();

  // Sleeping workers are idle or the timekeeper: the one who wakes at the first time of timed_. There is a timekeeper
  // whenever timed_ has something and a worker sleeps. A worker is called for every job that becomes ready, if one
  // sleeps; the one who lay down last, since its caches are warm.
  const Around around_;
  std::vector<std::unique_ptr<Worker>> workers_;
  mutable typename Sync::Mutex mutex_;  // guards all below but join_mutex_
  JobQueue<Rank> ready_, timed_;
  std::atomic<Rank> first_rank_{Rank::max()};  // of ready_; written under the lock
  std::vector<Worker*> idle_;
  Worker* timekeeper_ = nullptr;
  bool stopping_ = false;
  int running_ = 0;                 // workers that have not ended
  typename Sync::Condition ended_;  // running_ has reached 0
  typename Sync::Mutex join_mutex_;
};

template <typename Sync>
WorkerPool<Sync>::WorkerPool(int workers, Around around) : around_(std::move(around)) {
  if (workers < 1) {
    throw std::invalid_argument("WorkerPool: workers must be at least 1, got " + std::to_string(workers));
  }
  for (int i = 0; i < workers; ++i) workers_.push_back(std::make_unique<Worker>());
  idle_.reserve(workers_.size());
  try {
    for (const auto& worker : workers_) {
      {
        const std::lock_guard lock(mutex_);
        ++running_;
      }
      try {
        worker->thread = typename Sync::Thread([this, self = worker.get()] { work(*self); });
      } catch (...) {
        const std::lock_guard lock(mutex_);
        --running_;
        throw;
      }
    }
  } catch (...) {
    stop(Stop::kCancel);
    throw;
  }
}

template <typename Sync>
bool WorkerPool<Sync>::post(std::shared_ptr<Job> job, Rank rank) {
  Worker* called;
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return false;
    make_ready(rank, std::move(job));
    called = call_idle();
    if (called == nullptr) called = call_timekeeper();
  }
  if (called != nullptr) called->wake.notify_one();
  return true;
}

template <typename Sync>
bool WorkerPool<Sync>::post_at(Time when, std::shared_ptr<Job> job) {
  Worker* called = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return false;
    const bool first = timed_.empty() || when < timed_.first_rank();
    timed_.push(when, std::move(job));
    if (first) called = timekeeper_ != nullptr ? call_timekeeper() : call_idle();
  }
  if (called != nullptr) called->wake.notify_one();
  return true;
}

template <typename Sync>
void WorkerPool<Sync>::work(Worker& self) {
  {
    const std::lock_guard lock(mutex_);
    self.id = Sync::this_thread();
  }
  const std::function<void()> loop = [this, &self] {
    while (const std::shared_ptr<Job> job = next(self)) job->run();
  };
  if (around_) {
    around_(loop);
  } else {
    loop();
  }
  const std::lock_guard lock(mutex_);
  self.id = {};
  if (--running_ == 0) ended_.notify_all();
}

// Waits for a job; null when the worker is to end.
template <typename Sync>
std::shared_ptr<Job> WorkerPool<Sync>::next(Worker& self) {
  std::shared_ptr<Job> job;
  Worker* successor = nullptr;
  {
    std::unique_lock lock(mutex_);
    for (release_due(); ready_.empty(); release_due()) {
      if (stopping_) return nullptr;
      sleep(self, lock);
    }
    job = take_ready();
    if (!timed_.empty() && timekeeper_ == nullptr) successor = call_idle();
  }
  if (successor != nullptr) successor->wake.notify_one();
  return job;
}

template <typename Sync>
void WorkerPool<Sync>::sleep(Worker& self, std::unique_lock<typename Sync::Mutex>& lock) {
  self.called = false;
  if (timed_.empty() || timekeeper_ != nullptr) {
    idle_.push_back(&self);
    while (!self.called) self.wake.wait(lock);
    return;
  }
  timekeeper_ = &self;
  const Time until = timed_.first_rank();
  while (!self.called && self.wake.wait_until(lock, until)) {
  }
  if (!self.called) timekeeper_ = nullptr;
}

// Moves what is due to ready_. The worker who looks takes one job itself, and calls others for the rest.
template <typename Sync>
void WorkerPool<Sync>::release_due() {
  if (timed_.empty()) return;
  const Time now = Sync::now();
  for (bool first = true; !timed_.empty() && !(now < timed_.first_rank()); first = false) {
    const Rank rank = timed_.first_rank();
    make_ready(rank, timed_.pop());
    Worker* called = first ? nullptr : call_idle();
    if (called != nullptr) called->wake.notify_one();
  }
}

template <typename Sync>
void WorkerPool<Sync>::make_ready(Rank rank, std::shared_ptr<Job> job) {
  ready_.push(rank, std::move(job));
  first_rank_.store(ready_.first_rank(), std::memory_order_relaxed);
}

template <typename Sync>
std::shared_ptr<Job> WorkerPool<Sync>::take_ready() {
  std::shared_ptr<Job> job = ready_.pop();
  first_rank_.store(ready_.empty() ? Rank::max() : ready_.first_rank(), std::memory_order_relaxed);
  return job;
}

template <typename Sync>
auto WorkerPool<Sync>::call_idle() -> Worker* {
  if (idle_.empty()) return nullptr;
  Worker* worker = idle_.back();
  idle_.pop_back();
  worker->called = true;
  return worker;
}

template <typename Sync>
auto WorkerPool<Sync>::call_timekeeper() -> Worker* {
  if (timekeeper_ != nullptr) timekeeper_->called = true;
  return std::exchange(timekeeper_, nullptr);
}

template <typename Sync>
void WorkerPool<Sync>::request_stop(Stop how) {
  std::vector<std::shared_ptr<Job>> dropped;
  {
    const std::lock_guard lock(mutex_);
    if (how == Stop::kDrain) release_due();  // no worker may have looked since a job's time came
    stopping_ = true;
    while (!timed_.empty()) dropped.push_back(timed_.pop());
    while (how == Stop::kCancel && !ready_.empty()) dropped.push_back(take_ready());
    while (Worker* called = call_idle()) called->wake.notify_one();
    if (Worker* called = call_timekeeper()) called->wake.notify_one();
  }
  for (const auto& job : dropped) job->cancel();
}

template <typename Sync>
bool WorkerPool<Sync>::wait_stopped_until(Time until) {
  refuse_on_worker();
  {
    std::unique_lock lock(mutex_);
    while (running_ != 0) {
      if (!ended_.wait_until(lock, until) && running_ != 0) return false;
    }
  }
  join();
  return true;
}

template <typename Sync>
void WorkerPool<Sync>::stop(Stop how) {
  refuse_on_worker();
  request_stop(how);
  join();
}

template <typename Sync>
void WorkerPool<Sync>::join() {
  const std::lock_guard lock(join_mutex_);
  for (const auto& worker : workers_) {
    if (worker->thread.joinable()) worker->thread.join();
  }
}

template <typename Sync>
bool WorkerPool<Sync>::on_worker() const {
  const auto id = Sync::this_thread();
  const std::lock_guard lock(mutex_);
  return std::any_of(workers_.begin(), workers_.end(), [&](const auto& worker) { return worker->id == id; });
}

template <typename Sync>
void WorkerPool<Sync>::refuse_on_worker() const {
  if (on_worker()) throw std::logic_error("WorkerPool: a worker cannot wait for the end of its own pool");
}

extern template class WorkerPool<SystemSync>;

}  // namespace pymoe::runtime

// WorkerPool: threads that run jobs, smallest rank first, and equal ranks in order of arrival. The number of threads is
// fixed, or grows while running jobs wait.
//
//     WorkerPool<SystemSync> pool(4);
//     pool.post(job, SystemSync::now());
//     pool.stop();
//
// Jobs      post hands over a job with its rank: a point in time, so that the job that has waited longest goes first
//           and a priority is a head start. post_at runs a job at a time, or as soon after it as a worker is free; its
//           rank is that time. Exactly one of run() and cancel() is called on an accepted job, once and under no lock.
// Growing   A pool that may grow has `workers` threads at first and gets more while jobs stay queued because the
//           running ones wait; worker_pool_growth.h has the rule, and the thread that applies it, the watcher.
// Stopping  request_stop refuses all further jobs and returns immediately. With Stop::kDrain, queued jobs still run;
//           with Stop::kCancel, jobs that have not started are cancelled. In both cases, jobs whose time has not come
//           are cancelled, and running jobs are never interrupted. stop also waits until every worker has ended. Both
//           may be called any number of times and from several threads. The destructor stops with kDrain.
// Errors    post and post_at return false after a stop. A worker that waits for the end of its own pool would wait for
//           ever, so stop and wait_stopped_until then throw std::logic_error. The constructor throws
//           std::invalid_argument for fewer than one worker; if the system refuses a thread, the constructor ends the
//           threads that it has started and rethrows. (If the system refuses a thread for growth, the pool asks again
//           later.)
// Threads   All functions may be called from any thread, including from jobs (except stop, wait_stopped_until and the
//           destructor). No thread exists before the constructor or after stop.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "runtime/sync.h"

namespace pymoe::runtime {

class StoppedError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Stop { kDrain, kCancel };

struct Job {
  virtual ~Job() = default;
  virtual void run() noexcept = 0;
  // Called instead of run() if the pool was stopped before the job started.
  virtual void cancel() noexcept {}
};

template <typename Sync>
struct Growth {
  int most = 0;                     // largest number of threads; a pool grows only if it has fewer workers
  typename Sync::Duration still{};  // a thread that is inactive for this long counts as waiting
  typename Sync::Duration idle{};   // added threads end after this long without a job
};

template <typename Sync>
class WorkerPool {
 public:
  using Time = typename Sync::Time;
  using Rank = Time;
  // Every worker calls `around(work)`, which must call work() once and may do set-up before it and clean-up after it.
  using Around = std::function<void(const std::function<void()>& work)>;

  explicit WorkerPool(int workers, Around around = {}, Growth<Sync> growth = {})
      : base_(workers), around_(std::move(around)), growth_(growth) {
    if (workers < 1) {
      throw std::invalid_argument("WorkerPool: workers must be at least 1, got " + std::to_string(workers));
    }
    try {
      for (int i = 0; i < workers; ++i) start_worker();
      if (grows()) {
        {
          const std::lock_guard lock(mutex_);
          ++running_;
          watched_ = true;
        }
        try {
          watcher_ = typename Sync::Thread([this] { watch(); });
        } catch (...) {
          count_ended();
          throw;
        }
      }
    } catch (...) {
      stop(Stop::kCancel);
      throw;
    }
  }

  ~WorkerPool() { stop(Stop::kDrain); }
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  bool post(std::shared_ptr<Job> job, Rank rank) {
    Worker* called;
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return false;
      make_ready(rank, std::move(job));
      called = call_idle();
      if (called == nullptr) called = call_timekeeper();
      if (called == nullptr || workers() > base_) call_watcher();
    }
    if (called != nullptr) called->wake.notify_one();
    return true;
  }

  bool post_at(Time when, std::shared_ptr<Job> job) {
    Worker* called = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return false;
      const bool first = timed_.empty() || when < timed_.begin()->first;
      timed_.emplace_hint(timed_.end(), when, std::move(job));
      if (first) called = timekeeper_ != nullptr ? call_timekeeper() : call_idle();
      if (first && called == nullptr) call_watcher();
    }
    if (called != nullptr) called->wake.notify_one();
    return true;
  }

  void request_stop(Stop how) {
    std::vector<std::shared_ptr<Job>> dropped;
    {
      const std::lock_guard lock(mutex_);
      if (how == Stop::kDrain) release_due();  // a job may be due that no worker has noticed yet
      stopping_ = true;
      while (!timed_.empty()) dropped.push_back(pop(timed_));
      while (how == Stop::kCancel && !ready_.empty()) dropped.push_back(take_ready());
      while (Worker* called = call_idle()) called->wake.notify_one();
      if (Worker* called = call_timekeeper()) called->wake.notify_one();
      call_watcher();
      watch_.notify_one();
    }
    for (const auto& job : dropped) job->cancel();
  }

  void stop(Stop how = Stop::kDrain) {
    refuse_on_worker();
    request_stop(how);
    join();
  }

  // Waits as stop() does, but at most until `until`. Returns true if every worker has ended. Call after request_stop.
  bool wait_stopped_until(Time until) {
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

  // Returns true if a job of smaller rank waits for a worker and should run first. The answer may be out of date.
  bool older_waits(Rank rank) const { return first_rank_.load(std::memory_order_relaxed) < rank; }

  // Returns the current number of workers.
  int workers() const { return count_.load(std::memory_order_relaxed); }
  bool grows() const { return growth_.most > base_; }
  // Returns true on a worker of this pool.
  bool on_worker() const {
    const auto id = Sync::this_thread();
    const std::lock_guard lock(mutex_);
    return std::any_of(workers_.begin(), workers_.end(), [&](const auto& worker) { return worker->id == id; });
  }

 private:
  using Lock = std::unique_lock<typename Sync::Mutex>;

  // Jobs by rank. Ranks mostly grow from one push to the next, so a search begins at the end.
  using Jobs = std::multimap<Rank, std::shared_ptr<Job>>;

  struct Worker {
    typename Sync::Activity activity;  // the thread's activity, and the last time at which it was active
    Time since{};
    typename Sync::Thread thread;   // written by the thread that starts it, read by the one that joins it
    typename Sync::ThreadId id{};   // guarded by mutex_, like the rest; invalid while the thread does not run
    typename Sync::Condition wake;  // signalled when `called` becomes true
    bool called = false;
  };

  void start_worker() {
    Worker* worker;
    {
      const std::lock_guard lock(mutex_);
      if (spare_.empty()) spare_.push_back(std::make_unique<Worker>());
      worker = spare_.back().get();
      worker->activity = {};
      worker->since = {};
      workers_.push_back(std::move(spare_.back()));
      spare_.pop_back();
      idle_.reserve(workers_.size());
      count_ = static_cast<int>(workers_.size());
      ++running_;
    }
    try {
      worker->thread = typename Sync::Thread([this, worker] { work(*worker); });
    } catch (...) {
      {
        const std::lock_guard lock(mutex_);
        spare_.push_back(take_out(*worker));
      }
      count_ended();
      throw;
    }
  }

  void work(Worker& self) {
    {
      const std::lock_guard lock(mutex_);
      self.id = Sync::this_thread();
      if (grows()) self.activity = Sync::Activity::of_this_thread();
    }
    const std::function<void()> loop = [this, &self] {
      while (const std::shared_ptr<Job> job = next(self)) job->run();
    };
    if (around_) {
      around_(loop);
    } else {
      loop();
    }
    {
      const std::lock_guard lock(mutex_);
      self.id = {};
    }
    count_ended();
  }

  // Waits for a job and returns it; returns null if the worker must end.
  std::shared_ptr<Job> next(Worker& self) {
    std::shared_ptr<Job> job;
    Worker* successor = nullptr;
    {
      std::unique_lock lock(mutex_);
      for (release_due(); ready_.empty(); release_due()) {
        if (stopping_) return nullptr;
        if (!sleep(self, lock)) {
          retire(self);
          return nullptr;
        }
      }
      if (surplus_ > 0 && workers() > base_ && !stopping_) {
        --surplus_;
        successor = call_idle();  // this worker ends, so another must take the job for which it was called
        if (successor == nullptr) successor = call_timekeeper();
        retire(self);
      } else {
        job = take_ready();
        if (!timed_.empty() && timekeeper_ == nullptr) {
          successor = call_idle();
          if (successor == nullptr) call_watcher();
        }
      }
    }
    if (successor != nullptr) successor->wake.notify_one();
    return job;
  }

  // Waits until the worker is called, or a timed job is due. Returns false if the worker must end instead, because it
  // was idle for growth_.idle and the pool has more than base_ workers.
  bool sleep(Worker& self, Lock& lock) {
    self.called = false;
    if (timed_.empty() || timekeeper_ != nullptr) {
      idle_.push_back(&self);
      const Time until = workers() > base_ ? Sync::now() + growth_.idle : Time::max();
      while (!self.called) {
        if (until == Time::max()) {
          self.wake.wait(lock);
        } else if (!self.wake.wait_until(lock, until)) {
          break;
        }
      }
      if (self.called) return true;
      std::erase(idle_, &self);
      return workers() <= base_;
    }
    timekeeper_ = &self;
    const Time until = timed_.begin()->first;
    while (!self.called && self.wake.wait_until(lock, until)) {
    }
    if (!self.called) timekeeper_ = nullptr;
    return true;
  }

  void retire(Worker& self) {
    retired_.push_back(take_out(self));
    call_watcher();
  }
  // Removes a worker from workers_. Call it with the lock held.
  std::unique_ptr<Worker> take_out(Worker& worker) {
    const auto is_it = [&](const auto& other) { return other.get() == &worker; };
    const auto place = std::find_if(workers_.begin(), workers_.end(), is_it);
    std::unique_ptr<Worker> taken = std::move(*place);
    workers_.erase(place);
    count_ = static_cast<int>(workers_.size());
    return taken;
  }

  void watch();                     // the watcher's thread
  Time look(Lock& lock, Time now);  // returns the time of the next check
  void join_retired(Lock& lock);
  // Returns the number of jobs that are ready but that no worker is about to take. All timed jobs that are due count as
  // one.
  size_t unserved(Time now) const {
    if (!idle_.empty() || timekeeper_ != nullptr) return 0;
    return ready_.size() + (!timed_.empty() && !(now < timed_.begin()->first));
  }
  void call_watcher() {
    if (!grows() || watched_) return;
    watched_ = true;
    watch_.notify_one();
  }
  void count_ended() {
    const std::lock_guard lock(mutex_);
    if (--running_ == 0) ended_.notify_all();
  }
  // Moves due jobs to ready_. The worker that calls this takes the first of them itself, so other workers are called
  // only for the rest.
  void release_due() {
    if (timed_.empty()) return;
    const Time now = Sync::now();
    for (bool first = true; !timed_.empty() && !(now < timed_.begin()->first); first = false) {
      const Rank rank = timed_.begin()->first;
      make_ready(rank, pop(timed_));
      Worker* called = first ? nullptr : call_idle();
      if (called != nullptr) called->wake.notify_one();
      if (!first && called == nullptr) call_watcher();
    }
  }

  static std::shared_ptr<Job> pop(Jobs& jobs) { return std::move(jobs.extract(jobs.begin()).mapped()); }
  void make_ready(Rank rank, std::shared_ptr<Job> job) {
    ready_.emplace_hint(ready_.end(), rank, std::move(job));
    first_rank_.store(ready_.begin()->first, std::memory_order_relaxed);
  }
  std::shared_ptr<Job> take_ready() {
    std::shared_ptr<Job> job = pop(ready_);
    first_rank_.store(ready_.empty() ? Rank::max() : ready_.begin()->first, std::memory_order_relaxed);
    return job;
  }
  // Marks the idle worker that fell asleep last as called and returns it, or returns null if none is idle. The caller
  // must notify the worker, preferably without the lock.
  Worker* call_idle() {
    if (idle_.empty()) return nullptr;
    Worker* worker = idle_.back();
    idle_.pop_back();
    worker->called = true;
    return worker;
  }
  Worker* call_timekeeper() {
    if (timekeeper_ != nullptr) timekeeper_->called = true;
    return std::exchange(timekeeper_, nullptr);
  }
  void refuse_on_worker() const {
    if (on_worker()) throw std::logic_error("WorkerPool: a worker cannot wait for the end of its own pool");
  }
  // Waits until all threads have ended. Call after request_stop. The watcher is joined first, because it starts and
  // joins workers until it ends.
  void join() {
    const std::lock_guard joining(join_mutex_);
    if (watcher_.joinable()) watcher_.join();
    std::vector<Worker*> left;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& worker : workers_) left.push_back(worker.get());
      for (const auto& worker : retired_) left.push_back(worker.get());
    }
    for (Worker* worker : left) {
      if (worker->thread.joinable()) worker->thread.join();
    }
  }

  // Sleeping workers are either idle or the timekeeper, which wakes at the first time of timed_. There is a timekeeper
  // whenever timed_ is not empty and a worker sleeps. For every job that becomes ready, a sleeping worker is called if
  // there is one: the idle one that fell asleep last, since its caches are warm, or else the timekeeper.
  const int base_;
  const Around around_;
  const Growth<Sync> growth_;
  mutable typename Sync::Mutex mutex_;  // guards everything below except join_mutex_
  // Threads of retired_ have ended or are about to, and must be joined. Their workers then go to spare_ for reuse and
  // are not destroyed, because a thread that called one of them may still be about to notify it.
  std::vector<std::unique_ptr<Worker>> workers_, retired_, spare_;
  std::atomic<int> count_{0};  // size of workers_; written under the lock
  Jobs ready_, timed_;
  std::atomic<Rank> first_rank_{Rank::max()};  // first rank of ready_; written under the lock
  std::vector<Worker*> idle_;
  Worker* timekeeper_ = nullptr;
  bool stopping_ = false;
  int running_ = 0;                   // number of threads that have not ended
  typename Sync::Condition ended_;    // signalled when running_ reaches 0
  bool watched_ = false;              // true if the watcher is awake, or about to be
  typename Sync::Condition watch_;    // signalled when watched_ becomes true
  Time crowded_since_ = Time::max();  // time since which more than base_ threads are active
  int surplus_ = 0;                   // number of workers that must end instead of taking a job
  typename Sync::Mutex join_mutex_;   // held while threads are joined for good; mutex_ is taken inside
  typename Sync::Thread watcher_;
};

}  // namespace pymoe::runtime

#include "runtime/worker_pool_growth.h"

// ParallelFor: calls function(0) to function(count - 1) on the workers of a pool and on the threads that wait for them.
//
//     const auto run = ParallelFor<SystemSync>::start(pool, 16, [&](int i) { out[i] = f(i); });
//     run->help_until(until);
//
// Order      Calls start in the order of their numbers. Among the jobs of the pool, they rank by the time when the run
//            began: if an older job waits for a worker, a worker takes it first and makes the remaining calls later.
// Failures   A call that throws does not affect the others. The run ends when every call has ended, so none of its
//            calls continues after a wait; the run's error is the error of the first call, by number, that has thrown.
// Cancelling cancel drops the calls that have not started; the run's error is then Cancelled, unless a call has thrown.
//            A pool that is stopped with kCancel cancels its runs; one that is stopped with kDrain makes all calls.
// Waiting    help_until makes calls on the waiting thread, so a call may wait for calls of its own even if there are
//            few workers. wait_until waits without helping.
// Inline     A run with an `inline_limit` leaves its calls to the waiting thread, as long as that thread finishes at
//            least one per span of this length: handing shorter calls to workers costs more than it gains. Some thread
//            should wait for such a run: otherwise its calls begin only after the span, or are dropped if the pool is
//            stopped before.
// Errors     start throws StoppedError if the pool was stopped and there are calls to make.
// Threads    All functions may be called from any thread. The pool must outlive the run. The function is
//            destroyed with the run.
#pragma once

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/completion.h"
#include "runtime/worker_pool.h"

namespace pymoe::runtime {

// The run's jobs in the pool are tickets: each makes calls one after the other until none is left, or until an older
// job waits for a worker. In a pool of fixed size there are at most as many tickets as workers. In a pool that can
// grow, as many tickets as workers stay queued while calls are left, besides those that run, because queued jobs make
// the pool grow.
template <typename Sync>
class ParallelFor final : public Completion<Sync>, public std::enable_shared_from_this<ParallelFor<Sync>> {
 public:
  using Time = typename Sync::Time;
  using Duration = typename Sync::Duration;
  using Function = std::function<void(int)>;

  static std::shared_ptr<ParallelFor> start(WorkerPool<Sync>& pool, int count, Function function,
                                            Duration inline_limit = Duration::zero()) {
    const std::shared_ptr<ParallelFor> run(new ParallelFor(pool, count, std::move(function), inline_limit));
    run->begin();
    return run;
  }

  // Makes calls on this thread and, when none is left to start, waits for those of other threads. Returns false if the
  // run has not ended by `until`. A call that this thread has started is finished even after `until`.
  bool help_until(Time until) {
    {
      Lock lock(mutex_);
      work(lock, false, [until] { return Sync::now() >= until; });
      if (next_ < count_) return false;
    }
    return this->wait_until(until);
  }

  // Drops every call that has not started.
  void cancel() {
    Lock lock(mutex_);
    if (next_ == count_) return;
    running_ -= count_ - std::exchange(next_, count_);
    cancelled_ = true;
    end_if_over(lock);
  }

 private:
  using Lock = std::unique_lock<typename Sync::Mutex>;

  struct Ticket final : Job {
    explicit Ticket(ParallelFor& owner) : owner(owner) {}
    void run() noexcept override {
      Lock lock(owner.mutex_);
      --owner.posted_;
      owner.work(lock, true, [this] { return owner.pool_.older_waits(owner.began_); });
    }
    void cancel() noexcept override {
      {
        const Lock lock(owner.mutex_);
        --owner.posted_;
        --owner.tickets_;
      }
      owner.cancel();
    }
    ParallelFor& owner;
  };

  // Checks once per inline limit whether the waiting thread makes progress; if not, workers make the remaining calls.
  struct Watch final : Job {
    explicit Watch(ParallelFor& owner) : owner(owner) {}
    void run() noexcept override {
      Lock lock(owner.mutex_);
      if (!owner.held_) return;
      if (std::exchange(owner.seen_, owner.running_) != owner.running_ && owner.running_ > 0) {
        lock.unlock();
        if (owner.watch_later()) return;
        lock.lock();
      }
      owner.let_go(lock);
    }
    void cancel() noexcept override {
      Lock lock(owner.mutex_);
      owner.let_go(lock);
    }
    ParallelFor& owner;
  };

  ParallelFor(WorkerPool<Sync>& pool, int count, Function function, Duration inline_limit)
      : pool_(pool),
        function_(std::move(function)),
        inline_limit_(inline_limit),
        count_(count),
        running_(count),
        seen_(count) {
    this->claim();
  }

  bool watch_later() {
    return pool_.post_at(Sync::now() + inline_limit_, std::shared_ptr<Job>(this->shared_from_this(), &watch_));
  }

  void begin() {
    held_ = inline_limit_ > Duration::zero() && count_ > 0;
    if (held_ && watch_later()) return;
    Lock lock(mutex_);
    let_go(lock);
    if (tickets_ == 0 && next_ < count_) throw StoppedError("ParallelFor: start on a pool that was stopped");
    if (count_ == 0) end_if_over(lock);
  }

  // --- call these with the lock held; they may release it for a while ---

  // Makes calls until none is left, or until leave() returns true and other threads can make the rest. `ticket`: true
  // if the caller is a ticket.
  template <typename Leave>
  void work(Lock& lock, bool ticket, const Leave& leave) {
    while (next_ < count_) {
      if (leave()) {
        tickets_ -= ticket;
        let_go(lock);
        if (next_ == count_ || tickets_ > 0) return;
        tickets_ += ticket;  // the pool is stopped and no other thread has a ticket, so go on here
      }
      const int call = next_++;
      call_workers(lock);
      lock.unlock();
      std::exception_ptr error;
      try {
        function_(call);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      if (error) failures_.emplace_back(call, std::move(error));
      --running_;
      end_if_over(lock);
    }
    tickets_ -= ticket;
  }

  void call_workers(Lock& lock) {
    if (held_) return;
    const int count = std::min(count_ - next_ - posted_, pool_.workers() - (pool_.grows() ? posted_ : tickets_));
    if (count <= 0) return;
    posted_ += count;
    tickets_ += count;
    lock.unlock();
    int taken = 0;
    while (taken < count && pool_.post(std::shared_ptr<Job>(this->shared_from_this(), &ticket_), began_)) ++taken;
    lock.lock();
    posted_ -= count - taken;
    tickets_ -= count - taken;
  }

  void let_go(Lock& lock) {
    held_ = false;
    call_workers(lock);
  }

  void end_if_over(Lock& lock) {
    if (running_ > 0) return;
    std::exception_ptr error;
    if (!failures_.empty()) {
      const auto before = [](const auto& a, const auto& b) { return a.first < b.first; };
      error = std::min_element(failures_.begin(), failures_.end(), before)->second;
    } else if (cancelled_) {
      error = std::make_exception_ptr(Cancelled("the run was cancelled before all of its calls had started"));
    }
    lock.unlock();
    this->complete(std::move(error));
    lock.lock();
  }

  WorkerPool<Sync>& pool_;
  const Function function_;
  const Time began_ = Sync::now();
  const Duration inline_limit_;
  const int count_;
  Ticket ticket_{*this};
  Watch watch_{*this};
  typename Sync::Mutex mutex_;  // guards the rest
  // The numbers of the calls that threw, with their errors. All are kept until the run is destroyed, because destroying
  // an error may take another lock, such as the interpreter's.
  std::vector<std::pair<int, std::exception_ptr>> failures_;
  int next_ = 0;       // the next call to start
  int running_;        // number of calls that have neither ended nor been dropped
  int seen_;           // value of running_ at the last check of watch_
  bool held_ = false;  // true while the calls are left to the waiting thread
  int posted_ = 0;     // number of tickets that no worker has taken yet
  int tickets_ = 0;    // number of tickets, both those that no worker has taken yet and those that workers run
  bool cancelled_ = false;
};

}  // namespace pymoe::runtime

// Completion: something that ends exactly once, and what waits for that end.
//
//     pending --claim()--> running --complete(error)--> done
//
// Claiming   Exactly one caller of claim() gets true. It alone may run the thing, cancel it or let it expire, and it
// must
//            call complete(). So a worker, a thread that would rather help than wait, a canceller and a deadline can
//            all reach for one task, and one of them has it.
// Waiting    Every wait that began before the end or begins after it returns. `error` is null if all went well, and
//            does not change after the end.
// Callbacks  run once each, in the order in which they were added, on the thread that completes, or at once on the
//            thread that adds them after the end; never under a lock. They must not throw.
// Lifetime   A thread that waits or completes must hold a reference: use it through a shared_ptr.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

namespace pymoe::runtime {

// The outcome of what was dropped before it had started.
class Cancelled : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename Sync>
class Completion {
 public:
  using Time = typename Sync::Time;
  using Callback = std::function<void()>;

  virtual ~Completion() = default;
  Completion(const Completion&) = delete;
  Completion& operator=(const Completion&) = delete;

  bool done() const { return stage_.load(std::memory_order_acquire) == Stage::kDone; }
  bool pending() const { return stage_.load(std::memory_order_acquire) == Stage::kPending; }

  void wait() const {
    if (done()) return;
    std::unique_lock lock(mutex_);
    while (!done()) ended_.wait(lock);
  }

  // True if it has ended by `until`.
  bool wait_until(Time until) const {
    if (done()) return true;
    std::unique_lock lock(mutex_);
    while (!done()) {
      if (!ended_.wait_until(lock, until)) return done();
    }
    return true;
  }

  // Only after the end: it never changes again, so it is read without the lock.
  const std::exception_ptr& error() const { return error_; }

  void on_done(Callback callback) {
    {
      const std::lock_guard lock(mutex_);
      if (!done()) {
        callbacks_.push_back(std::move(callback));
        return;
      }
    }
    callback();
  }

  bool claim() {
    Sync::preempt();
    Stage expected = Stage::kPending;
    return stage_.compare_exchange_strong(expected, Stage::kRunning, std::memory_order_acq_rel);
  }

  // By whom claim() was given to, once.
  void complete(std::exception_ptr error = nullptr) {
    std::vector<Callback> callbacks;
    {
      const std::lock_guard lock(mutex_);
      error_ = std::move(error);
      stage_.store(Stage::kDone, std::memory_order_release);
      callbacks.swap(callbacks_);
    }
    ended_.notify_all();
    for (const Callback& callback : callbacks) callback();
  }

 protected:
  Completion() = default;

  // Gives a claim back: whoever had it did not run the thing after all.
  void unclaim() { stage_.store(Stage::kPending, std::memory_order_release); }

 private:
  enum class Stage { kPending, kRunning, kDone };

  std::atomic<Stage> stage_{Stage::kPending};
  mutable typename Sync::Mutex mutex_;  // guards callbacks_, error_ and the step to kDone
  mutable typename Sync::Condition ended_;
  std::vector<Callback> callbacks_;
  std::exception_ptr error_;
};

}  // namespace pymoe::runtime

// Completion: something that ends exactly once, and what waits for that end.
//
//     pending --claim()--> running --complete(error)--> done
//
// Claiming   Exactly one caller of claim() gets true. It alone may run the thing, cancel it or let it expire, and it
//            must call complete(). So a worker, a thread that would rather help than wait, a canceller and a deadline
//            can all reach for one task, and one of them has it.
// Waiting    Every wait that began before the end or begins after it returns. `error` is null if all went well, and
//            does not change after the end.
// Callbacks  run once each, in the order in which they were added, on the thread that completes, or at once on the
//            thread that adds them after the end; never under a lock. They must not throw. Whoever completes several
//            things ends them all (end) before it runs what they have called for: a callback may wait for any of them.
// Wakers     are callbacks that wake who waits, and do nothing else: they run as part of the end.
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
  using Callbacks = std::vector<Callback>;

  virtual ~Completion() = default;
  Completion(const Completion&) = delete;
  Completion& operator=(const Completion&) = delete;

  bool done() const { return stage_.load(std::memory_order_acquire) == Stage::kDone; }
  bool pending() const { return stage_.load(std::memory_order_acquire) == Stage::kPending; }

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

  void on_done(Callback callback) { add(callbacks_, std::move(callback)); }
  void wake_by(Callback waker) { add(wakers_, std::move(waker)); }

  bool claim() {
    Sync::preempt();
    Stage expected = Stage::kPending;
    return stage_.compare_exchange_strong(expected, Stage::kRunning, std::memory_order_acq_rel);
  }

  // By whom claim() was given to, once.
  void complete(std::exception_ptr error = nullptr) {
    for (const Callback& callback : end(std::move(error))) callback();
  }

  // The same, but for the callbacks: the caller runs them.
  [[nodiscard]] Callbacks end(std::exception_ptr error) {
    Callbacks wakers, callbacks;
    {
      const std::lock_guard lock(mutex_);
      error_ = std::move(error);
      stage_.store(Stage::kDone, std::memory_order_release);
      wakers.swap(wakers_);
      callbacks.swap(callbacks_);
    }
    ended_.notify_all();
    for (const Callback& waker : wakers) waker();
    return callbacks;
  }

 protected:
  Completion() = default;

  // Gives a claim back: whoever had it did not run the thing after all.
  void unclaim() { stage_.store(Stage::kPending, std::memory_order_release); }

 private:
  enum class Stage { kPending, kRunning, kDone };

  void add(Callbacks& list, Callback callback) {
    {
      const std::lock_guard lock(mutex_);
      if (!done()) {
        list.push_back(std::move(callback));
        return;
      }
    }
    callback();
  }

  std::atomic<Stage> stage_{Stage::kPending};
  mutable typename Sync::Mutex mutex_;  // guards the callbacks, error_ and the step to kDone
  mutable typename Sync::Condition ended_;
  Callbacks wakers_, callbacks_;
  std::exception_ptr error_;
};

}  // namespace pymoe::runtime

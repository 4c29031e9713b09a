// Completion: an operation that ends exactly once, and the waits for its end.
//
//     pending --claim()--> running --complete(error)--> done
//
// Claiming   Exactly one caller of claim() gets true. Only that caller may run the operation, cancel it or let it
//            expire, and it must call complete(). So a worker, a waiting thread that helps, a canceller and a deadline
//            can all try to claim one task, and exactly one of them gets it.
// Waiting    Every wait returns once the operation has ended, or the time of the wait is over. `error` is null if the
//            operation succeeded, and does not change after the end.
// Callbacks run once each, in the order in which they were added, on the thread that completes the operation; if added
//            after the end, immediately on the thread that adds them. No lock is held while they run, and they must not
//            throw. A callback that was added with a key can be removed (remove) until the operation ends. A thread
//            that completes several operations ends all of them (end) before it runs any callback, because a callback
//            may wait for any of these operations.
// Wakers     are callbacks that only wake waiting threads: they run as part of the end.
// Lifetime   A thread that waits or completes must hold a reference: use it through a shared_ptr.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

namespace pymoe::runtime {

// The error of an operation that was dropped before it started or, if it runs in parts, before its last part started.
class Cancelled : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename Sync>
class Completion {
 public:
  using Time = typename Sync::Time;
  using Callback = std::function<void()>;
  struct KeyedCallback {
    const void* key;
    Callback call;
    void operator()() const { call(); }
  };
  using Callbacks = std::vector<KeyedCallback>;

  virtual ~Completion() = default;
  Completion(const Completion&) = delete;
  Completion& operator=(const Completion&) = delete;

  bool done() const { return stage_.load(std::memory_order_acquire) == Stage::kDone; }
  bool pending() const { return stage_.load(std::memory_order_acquire) == Stage::kPending; }

  // Waits for the end of the operation. Returns true if it has ended by `until`.
  bool wait_until(Time until) const {
    if (done()) return true;
    std::unique_lock lock(mutex_);
    while (!done()) {
      if (!ended_.wait_until(lock, until)) return done();
    }
    return true;
  }

  // Returns the error, or null if the operation succeeded. Call only after the end: the error no longer changes then,
  // so it is read without the lock.
  const std::exception_ptr& error() const { return error_; }

  void on_done(Callback callback, const void* key = nullptr) { add(callbacks_, {key, std::move(callback)}); }
  void wake_by(Callback waker) { add(wakers_, {nullptr, std::move(waker)}); }

  // Removes and returns the callbacks with this key, which will not be called. Returns none after the end.
  Callbacks remove(const void* key) {
    Callbacks removed;
    const std::lock_guard lock(mutex_);
    const auto stays = [key](const KeyedCallback& callback) { return callback.key != key; };
    const auto begin = std::stable_partition(callbacks_.begin(), callbacks_.end(), stays);
    std::move(begin, callbacks_.end(), std::back_inserter(removed));
    callbacks_.erase(begin, callbacks_.end());
    return removed;
  }

  bool claim() {
    Sync::preempt();
    Stage expected = Stage::kPending;
    return stage_.compare_exchange_strong(expected, Stage::kRunning, std::memory_order_acq_rel);
  }

  // Ends the operation and runs the callbacks. Must be called once, by the thread whose claim() returned true.
  void complete(std::exception_ptr error = nullptr) {
    for (const KeyedCallback& callback : end(std::move(error))) callback();
  }

  // Ends the operation as complete() does, but returns the callbacks, which the caller must run.
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
    for (const KeyedCallback& waker : wakers) waker();
    return callbacks;
  }

 protected:
  Completion() = default;

  // Undoes claim(): the operation is pending again. Call only after claim(), if the operation has not been run.
  void unclaim() { stage_.store(Stage::kPending, std::memory_order_release); }

 private:
  enum class Stage { kPending, kRunning, kDone };

  void add(Callbacks& list, KeyedCallback callback) {
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
  mutable typename Sync::Mutex mutex_;  // guards the callbacks, error_ and the transition to kDone
  mutable typename Sync::Condition ended_;
  Callbacks wakers_, callbacks_;
  std::exception_ptr error_;
};

}  // namespace pymoe::runtime
